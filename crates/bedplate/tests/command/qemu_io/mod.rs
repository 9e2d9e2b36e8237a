//! `bedplate qemu-io`, and `bedplate` by the name `qemu-io`: the same words and exit codes as QEMU's program.

mod sessions;

use super::{Bench, Ended};
use anyhow::{Result, ensure};
use bedplate_tests::{has_or_skip, host};
use sessions::{
    AIO, COMPRESSED, COMPRESSED_RAW, COMPRESSED_TAIL, COPYING, NUMBERS, OPENING, OTHERS, OVER,
    PROGRAM, READS, Session, VM_STATE, WRITES,
};
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// The output without what differs from run to run, and without explanations, which are in other words.
fn masked(out: &str) -> String {
    let mut lines = Vec::new();
    for line in out.lines() {
        if line.starts_with("Usage:") {
            lines.push("Usage".to_owned());
            break; // the rest is the help
        }
        if let Some((head, _)) = line.split_once(" ops; ") {
            lines.push(head.to_owned());
        } else if line.contains(",0:00:0") {
            lines.push(line.split(",0:").next().unwrap_or_default().to_owned());
        } else if line.contains(" -- ") && !line.starts_with("Parsing") {
            lines.push(format!("usage of {}", line.split(' ').next().unwrap_or_default()));
        } else {
            lines.push(line.to_owned());
        }
    }
    lines.join("\n")
}

/// Two folders with the same files: one for each program.
struct Pair {
    bench: Bench,
}

impl Pair {
    fn new() -> Result<Self> {
        let bench = Bench::new()?;
        let ours = bench.path("ours");
        std::fs::create_dir(&ours)?;
        let at = |name: &str| format!("ours/{name}");
        let create =
            |args: &[&str]| bench.tool("qemu-img", &[&["create", "-q", "-f"], args].concat());
        create(&["qcow2", &at("a.qcow2"), "4M"])?;
        create(&["raw", &at("r.raw"), "100001"])?;
        create(&["qcow2", &at("odd.qcow2"), "100001"])?;
        create(&["qcow2", &at("base.qcow2"), "1M"])?;
        bench.tool("qemu-io", &["-f", "qcow2", &at("base.qcow2"), "-c", "write -P 1 0 1M"])?;
        create(&["qcow2", "-b", "base.qcow2", "-F", "qcow2", &at("over.qcow2")])?;
        std::fs::write(ours.join("pat"), "abc")?;
        std::fs::write(ours.join("empty"), "")?;
        host::run(host::tool("cp").arg("-r").arg(&ours).arg(bench.path("peer")))?;
        Ok(Self { bench })
    }

    fn ours(&self, words: &[String], input: &str) -> Result<Ended> {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_bedplate"));
        command.arg("qemu-io").args(words).current_dir(self.bench.path("ours"));
        talk(&mut command, input)
    }

    fn peer(&self, words: &[String], input: &str) -> Result<Ended> {
        talk(host::tool("qemu-io").args(words).current_dir(self.bench.path("peer")), input)
    }

    /// Both programs say and do the same.
    fn same(&self, words: &[String], input: &str) -> Result<()> {
        let (ours, peer) = (self.ours(words, input)?, self.peer(words, input)?);
        let (ours_out, peer_out) = (masked(&ours.out), masked(&peer.out));
        ensure!(
            ours_out == peer_out && ours.code == peer.code,
            "{words:?} {input:?}\n--- ours, {}\n{ours_out}\n{}\n--- peer, {}\n{peer_out}\n{}",
            ours.code,
            ours.err,
            peer.code,
            peer.err
        );
        Ok(())
    }

    /// Both left the same content, in a sound image.
    fn same_content(&self, name: &str) -> Result<()> {
        let (ours, peer) = (format!("ours/{name}"), format!("peer/{name}"));
        self.bench
            .tool("qemu-img", &["compare", "-q", "-f", "qcow2", "-F", "qcow2", &ours, &peer])?;
        self.bench.tool("qemu-img", &["check", "-q", "-f", "qcow2", &ours])?;
        Ok(())
    }
}

/// Runs a program with `input` on its standard input.
fn talk(command: &mut std::process::Command, input: &str) -> Result<Ended> {
    use std::io::Write;
    use std::os::unix::process::ExitStatusExt;
    command
        .env_remove("RUST_LOG")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = host::start(command)?;
    if let Some(mut pipe) = child.stdin.take() {
        // Who ends early does not read it.
        let _ = pipe.write_all(input.as_bytes());
    }
    let out = child.wait_with_output()?;
    let code = out.status.code().or(out.status.signal().map(|s| 128 + s)).unwrap_or(-1);
    Ok(Ended {
        code,
        out: String::from_utf8_lossy(&out.stdout).into_owned(),
        err: String::from_utf8_lossy(&out.stderr).into_owned(),
    })
}

fn words(line: &str) -> Vec<String> {
    line.split(' ').filter(|w| !w.is_empty()).map(str::to_owned).collect()
}

fn session((before, commands): Session) -> Vec<String> {
    let commands = commands.iter().flat_map(|c| ["-c".to_owned(), (*c).to_owned()]);
    words(before).into_iter().chain(commands).collect()
}

fn peer_is_there(test: &str) -> bool {
    has_or_skip(test, "qemu-io") && has_or_skip(test, "qemu-img")
}

#[test]
fn sessions_print_what_those_of_qemu_io_print() -> Result<()> {
    if !peer_is_there("sessions_print_what_those_of_qemu_io_print") {
        return Ok(());
    }
    for one in [
        NUMBERS,
        READS,
        WRITES,
        OTHERS,
        AIO,
        OPENING,
        OVER,
        COPYING,
        COMPRESSED,
        COMPRESSED_TAIL,
        COMPRESSED_RAW,
        VM_STATE,
    ] {
        let pair = Pair::new()?;
        pair.same(&session(one), "")?;
        pair.same_content("a.qcow2")?;
        pair.same_content("over.qcow2")?;
        pair.same_content("odd.qcow2")?;
    }
    Ok(())
}

#[test]
fn the_command_line_is_read_as_that_of_qemu_io() -> Result<()> {
    if !peer_is_there("the_command_line_is_read_as_that_of_qemu_io") {
        return Ok(());
    }
    let pair = Pair::new()?;
    for line in PROGRAM {
        // One word may hold spaces.
        let line = match line.strip_prefix(r#"json:{"driver":"qcow2", "#) {
            Some(rest) => [vec![r#"json:{"driver":"qcow2", "#.to_owned()], words(rest)].concat(),
            None => words(line),
        };
        pair.same(&line, "")?;
    }
    Ok(())
}

#[test]
fn commands_come_from_the_standard_input() -> Result<()> {
    if !peer_is_there("commands_come_from_the_standard_input") {
        return Ok(());
    }
    let pair = Pair::new()?;
    let image = words("-f qcow2 a.qcow2");
    for input in [
        "length\nread 0 512\n\nfoo\nquit\nlength\n",
        "length\nread -P 1 0 512\nlength",
        "\n",
        "write 0 64k\n",
    ] {
        pair.same(&image, input)?;
    }
    pair.same_content("a.qcow2")
}

#[test]
fn signals_and_aborts_end_the_process_as_they_do_there() -> Result<()> {
    if !peer_is_there("signals_and_aborts_end_the_process_as_they_do_there") {
        return Ok(());
    }
    let pair = Pair::new()?;
    for command in ["sigraise 15", "sigraise 9", "abort"] {
        pair.same(&session(("-f qcow2 a.qcow2", &["write 0 64k", "length"])), "")?;
        let mut line = words("-f qcow2 a.qcow2");
        line.extend(["-c".to_owned(), command.to_owned()]);
        pair.same(&line, "")?;
    }
    pair.same_content("a.qcow2")
}

/// What one program has kept behind the disk's end, the other finds, also after a snapshot has taken it over.
#[test]
fn the_state_of_a_vm_is_kept_where_qemu_keeps_it() -> Result<()> {
    if !peer_is_there("the_state_of_a_vm_is_kept_where_qemu_keeps_it") {
        return Ok(());
    }
    let bench = Bench::new()?;
    bench.run(&["create", "a.qcow2", "4M"])?.ok()?;
    let ours = |c: &str| bench.run(&["qemu-io", "a.qcow2", "-c", c])?.ok();
    let peer = |c: &str| bench.tool("qemu-io", &["-f", "qcow2", "a.qcow2", "-c", c]);
    ours("write -b -P 5 0 1M")?;
    peer("read -b -P 5 0 1M")?;
    peer("write -b -P 6 64k 64k")?;
    ours("read -b -P 6 64k 64k")?;
    ours("write -P 9 0 64k")?;
    bench.tool("qemu-img", &["check", "-q", "-f", "qcow2", "a.qcow2"])?;
    bench.run(&["snapshot", "-c", "s", "a.qcow2"])?.ok()?;
    ours("write -b -P 7 0 64k")?;
    peer("read -b -P 7 0 64k")?;
    peer("read -P 9 0 64k")?;
    bench.tool("qemu-img", &["check", "-q", "-f", "qcow2", "a.qcow2"])?;
    let too_far = bench.run(&["qemu-io", "a.qcow2", "-c", "write -b 4E 512"])?;
    assert_eq!((too_far.code, too_far.out.as_str()), (1, "write failed: File too large\n"));
    Ok(())
}

#[test]
fn the_name_of_the_program_chooses_the_command() -> Result<()> {
    let bench = Bench::new()?;
    let link = bench.path("qemu-io");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_bedplate"), &link)?;
    bench.run(&["create", "a.qcow2", "1M"])?.ok()?;
    let out = bench.tool(path_text(&link), &["a.qcow2", "-c", "length"])?;
    assert_eq!(out, "1 MiB\n");
    let help = bench.run(&["qemu-io", "--help"])?.ok()?.out;
    ensure!(help.contains("--copy-on-read") && help.contains("backing"), "{help}");
    ensure!(bench.run(&["--help"])?.ok()?.out.contains("qemu-io"));
    Ok(())
}

fn path_text(path: &Path) -> &str {
    path.to_str().unwrap_or_default()
}

/// A held write is not passed by another to its clusters, and what it holds is not there before it goes on.
#[test]
fn requests_can_be_held() -> Result<()> {
    let bench = Bench::new()?;
    bench.run(&["create", "a.qcow2", "4M"])?.ok()?;
    let script = [
        "break write_aio A",
        "aio_write -q -P 1 0 64k",
        "wait_break A",
        "aio_write -q -P 2 32k 64k",
        "read -q -P 0 0 128k",
        "break read_aio B",
        "aio_read -P 9 0 512",
        "wait_break B",
        "resume A",
        "resume B",
        "aio_flush",
        "read -q -P 1 0 32k",
        "read -q -P 2 32k 64k",
        "break flush_to_disk C",
        "remove_break C",
        "flush",
    ];
    let mut args = vec!["qemu-io", "-f", "qcow2", "blkdebug::a.qcow2"];
    script.iter().for_each(|c| args.extend(["-c", c]));
    let done = bench.run(&args)?.ok()?;
    ensure!(
        done.out.starts_with("Pattern verification failed at offset 0, 512 bytes\n"),
        "{done:?}"
    );
    assert_eq!(done.out.lines().count(), 3, "{done:?}");
    for (command, words) in [
        ("break l2_update A", "Could not set breakpoint: Operation not supported\n"),
        ("resume A", "Could not resume request: No such file or directory\n"),
        ("remove_break A", "Could not remove breakpoint A: No such file or directory\n"),
    ] {
        let ended = bench.run(&["qemu-io", "blkdebug::a.qcow2", "-c", command])?;
        assert_eq!((ended.code, ended.out.as_str()), (1, words));
    }
    Ok(())
}

/// Formats are never guessed from content, and an image can't make the program open a file whose format nobody stated.
#[test]
fn formats_are_stated_for_the_image_and_for_what_lies_under_it() -> Result<()> {
    if !peer_is_there("formats_are_stated_for_the_image_and_for_what_lies_under_it") {
        return Ok(());
    }
    let bench = Bench::new()?;
    bench.tool("qemu-img", &["create", "-q", "-f", "raw", "base", "1M"])?;
    bench.tool(
        "qemu-img",
        &["create", "-q", "-u", "-f", "qcow2", "-b", "base", "-F", "raw", "a.qcow2", "1M"],
    )?;
    let refused = bench.run(&["qemu-io", "base", "-c", "length"])?;
    ensure!(refused.code == 1 && refused.err.contains("state it with -f"), "{refused:?}");
    let stated = std::fs::read(bench.path("a.qcow2"))?;
    bench.run(&["qemu-io", "a.qcow2", "-c", "read 0 512"])?.ok()?;
    let mut unstated = stated.clone();
    let at = unstated.windows(4).position(|w| w == [0xe2, 0x79, 0x2a, 0xca]);
    let at = at.ok_or_else(|| anyhow::anyhow!("the image states no backing format"))?;
    unstated.splice(at..at + 4, [0x12, 0x34, 0x56, 0x78]); // an extension that nobody knows
    std::fs::write(bench.path("a.qcow2"), unstated)?;
    let refused = bench.run(&["qemu-io", "a.qcow2", "-c", "read 0 512"])?;
    ensure!(refused.code == 1 && refused.err.contains("does not state the format"), "{refused:?}");
    let options = "driver=qcow2,backing.driver=raw,file.filename=a.qcow2";
    bench.run(&["qemu-io", "--image-opts", options, "-c", "read 0 512"])?.ok()?;
    Ok(())
}

/// What can't be done is refused in words, and the image is left as it was.
#[test]
fn what_is_not_supported_is_refused() -> Result<()> {
    let bench = Bench::new()?;
    bench.run(&["create", "a.qcow2", "1M"])?.ok()?;
    let before = std::fs::read(bench.path("a.qcow2"))?;
    for (args, words) in [
        (&["nbd://localhost/x", "-c", "length"][..], "Unknown protocol 'nbd'"),
        (&["--object", "iothread,id=a", "a.qcow2"], "objects"),
        (&["-T", "x", "a.qcow2"], "RUST_LOG"),
        (&["-f", "raw", "json:{\"driver\":\"qcow2\",\"file.filename\":\"a.qcow2\"}"], "twice"),
        (&["--image-opts", "driver=qcow2,file.locking=off,file.filename=a.qcow2"], "not supported"),
        (&["blkdebug:rules:a.qcow2"], "blkdebug::FILE"),
    ] {
        let ended = bench.run(&[&["qemu-io"], args].concat())?;
        ensure!(ended.code == 1 && ended.err.contains(words), "{args:?}: {ended:?}");
    }
    ensure!(std::fs::read(bench.path("a.qcow2"))? == before);
    Ok(())
}

/// While one program writes to an image, no other does.
#[test]
fn an_image_in_use_is_not_opened() -> Result<()> {
    if !peer_is_there("an_image_in_use_is_not_opened") {
        return Ok(());
    }
    let bench = Bench::new()?;
    bench.run(&["create", "a.qcow2", "1M"])?.ok()?;
    let mut command = bench.command(&["qemu-io", "a.qcow2"]);
    let mut holder = host::start(command.stdin(Stdio::piped()).stdout(Stdio::piped()))?;
    let mut prompt = [0; 9];
    if let Some(out) = holder.stdout.as_mut() {
        std::io::Read::read_exact(out, &mut prompt)?;
    }
    let peer = talk(
        host::tool("qemu-io").args(["-f", "qcow2", "a.qcow2"]).current_dir(folder(&bench)),
        "",
    )?;
    let ours = bench.run(&["qemu-io", "a.qcow2", "-c", "length"])?;
    drop(holder.stdin.take());
    ensure!(holder.wait()?.success());
    ensure!(peer.code == 1 && ours.code == 1 && ours.out.is_empty(), "{peer:?} {ours:?}");
    bench.run(&["qemu-io", "a.qcow2", "-c", "length"])?.ok()?;
    Ok(())
}

fn folder(bench: &Bench) -> PathBuf {
    bench.path("")
}
