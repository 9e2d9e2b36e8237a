//! `bedplate serve`.

use super::{Bench, poke};
use anyhow::{Context, Result, bail, ensure};
use bedplate_tests::has_or_skip;
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Stdio};

/// A running `bedplate serve`; killed when it is dropped without having been stopped.
pub(super) struct Serving {
    pub(super) child: Child,
    out: BufReader<std::process::ChildStdout>,
    /// What it printed up to "ready".
    pub(super) hello: String,
}

impl Serving {
    pub(super) fn start(bench: &Bench, args: &[&str]) -> Result<Self> {
        let mut command = bench.command(&["serve"]);
        let mut child = command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let mut out = BufReader::new(child.stdout.take().context("no stdout")?);
        let mut hello = String::new();
        while !hello.ends_with("\nready\n") && !hello.contains("\"event\":\"ready\"") {
            if out.read_line(&mut hello)? == 0 {
                let out = child.wait_with_output()?;
                bail!("ended early: {out:?}\n{hello}");
            }
        }
        Ok(Self { child, out, hello })
    }

    /// Asks for the end; what it printed since "ready".
    pub(super) fn stop(mut self) -> Result<String> {
        kill_process(Pid::from_child(&self.child), Signal::TERM)?;
        let mut rest = String::new();
        self.out.read_to_string(&mut rest)?;
        let status = self.child.wait()?;
        let mut err = String::new();
        if let Some(mut stderr) = self.child.stderr.take() {
            stderr.read_to_string(&mut err)?;
        }
        ensure!(status.success(), "ended with {status}: {err}");
        Ok(rest)
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        // Both fail when it has ended already, which is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The URI that was printed for the first NBD export.
pub(super) fn uri(hello: &str) -> Result<&str> {
    let line = hello.lines().find_map(|l| l.strip_prefix("nbd at "));
    line.context("no NBD export was announced")
}

#[test]
fn a_disk_is_served_over_nbd_and_closed_cleanly() -> Result<()> {
    if !has_or_skip("a_disk_is_served_over_nbd_and_closed_cleanly", "qemu-io") {
        return Ok(());
    }
    for (file, options) in [("a.qcow2", "lazy_refcounts=on"), ("a.raw", "")] {
        let bench = Bench::new()?;
        bench.run(&["create", "-o", options, file, "8M"])?.ok()?;
        let serving = Serving::start(&bench, &["--nbd", "./s", "--nbd", "127.0.0.1:0", file])?;
        let mut args = vec!["-f", "raw"];
        for command in ["write -P 7 1000 100k", "write -P 8 4M 64k", "read -P 7 1000 100k", "flush"]
        {
            args.extend(["-c", command]);
        }
        let uri = uri(&serving.hello)?;
        args.push(uri);
        let text = bench.tool("qemu-io", &args)?;
        ensure!(!text.contains("failed"), "{text}");
        let told = serving.stop()?;
        ensure!(told.contains("2 writes (164 KiB)") && told.contains("0 failed"), "{told}");
        ensure!(!bench.path("s").exists(), "the socket is removed");
        let info = bench.run(&["info", "--json", file])?.ok()?.json()?;
        assert_eq!(info["dirty-flag"], false);
        if file.ends_with("qcow2") {
            bench.run(&["check", file])?.ok()?;
            bench.tool("qemu-img", &["check", "-q", file])?;
        }
        let format = file.rsplit('.').next().unwrap_or_default();
        let args =
            ["-r", "-f", format, "-c", "read -P 7 1000 100k", "-c", "read -P 8 4M 64k", file];
        let text = bench.tool("qemu-io", &args)?;
        ensure!(!text.contains("failed"), "{text}");
    }
    Ok(())
}

#[test]
fn the_image_is_locked_against_other_programs_and_the_holder_is_named() -> Result<()> {
    let bench = Bench::new()?;
    bench.run(&["create", "a.qcow2", "8M"])?.ok()?;
    let serving = Serving::start(&bench, &["--nbd", "./s", "a.qcow2"])?;
    let holder = serving.child.id().to_string();
    let words = ["a.qcow2", "cannot lock", &holder, "bedplate"];
    bench.refuses(&["serve", "--nbd", "./t", "a.qcow2"], 1, &words)?;
    bench.refuses(&["serve", "--nbd", "./t", "--read-only", "a.qcow2"], 1, &words)?;
    bench.refuses(&["create", "a.qcow2", "1M"], 1, &words)?;
    bench.refuses(&["info", "a.qcow2"], 1, &words)?;
    bench.run(&["info", "-U", "a.qcow2"])?.ok()?;
    let reader = Serving::start(&bench, &["--nbd", "./t", "-r", "--force-share", "a.qcow2"])?;
    ensure!(reader.hello.contains("read-only"), "{}", reader.hello);
    reader.stop()?;
    serving.stop()?;
    bench.run(&["info", "a.qcow2"])?.ok()?;
    Ok(())
}

#[test]
fn an_image_served_read_only_is_not_changed_by_one_bit() -> Result<()> {
    if !has_or_skip("an_image_served_read_only_is_not_changed_by_one_bit", "qemu-io") {
        return Ok(());
    }
    let bench = Bench::new()?;
    bench.run(&["create", "a.qcow2", "8M"])?.ok()?;
    // A dirty bit and an unknown autoclear bit, which a writer would clear.
    poke(&bench.path("a.qcow2"), 79, &[1])?;
    poke(&bench.path("a.qcow2"), 88, &[0x80])?;
    let before = std::fs::read(bench.path("a.qcow2"))?;
    let serving = Serving::start(&bench, &["--nbd", "./s", "--read-only", "a.qcow2"])?;
    let uri = uri(&serving.hello)?;
    bench.tool("qemu-io", &["-r", "-f", "raw", "-c", "read -P 0 0 8M", uri])?;
    serving.stop()?;
    ensure!(std::fs::read(bench.path("a.qcow2"))? == before);
    Ok(())
}

#[test]
fn what_is_refused_is_not_changed() -> Result<()> {
    let bench = Bench::new()?;
    bench.run(&["create", "base.raw", "1M"])?.ok()?;
    bench.run(&["create", "-b", "base.raw", "-F", "raw", "a.qcow2"])?.ok()?;
    let serve = |args: &[&str], words: &[&str]| {
        let mut all = vec!["serve", "--nbd", "./s"];
        all.extend_from_slice(args);
        bench.refuses(&all, 1, words)
    };
    serve(&["a.qcow2"], &["has the backing file 'base.raw'", "--allow-backing"])?;
    // An unknown autoclear bit would be cleared by opening; a missing backing file comes to light before.
    poke(&bench.path("a.qcow2"), 88, &[0x80])?;
    std::fs::rename(bench.path("base.raw"), bench.path("moved.raw"))?;
    serve(&["--allow-backing", "a.qcow2"], &["base.raw", "No such file"])?;
    serve(&["null:1X"], &["null:1X", "not a size"])?;
    serve(&["null:1G", "-f", "raw"], &["null disk"])?;
    Ok(())
}

#[test]
fn a_socket_that_cannot_be_is_refused_with_a_sentence() -> Result<()> {
    let bench = Bench::new()?;
    bench.run(&["create", "a.qcow2", "1M"])?.ok()?;
    std::fs::write(bench.path("file"), b"data")?;
    for option in ["--nbd", "--vhost-user-blk"] {
        let ended = bench.run(&["serve", option, "./file", "a.qcow2", "--log-level", "error"])?;
        ended.fails(1, &["cannot listen", "file", "no socket"])?;
        let ended = bench.run(&["serve", option, "none/s", "a.qcow2", "--log-level", "error"])?;
        ended.fails(1, &["cannot listen", "none/s"])?;
    }
    assert_eq!(std::fs::read(bench.path("file"))?, b"data");
    bench.run(&["check", "a.qcow2"])?.ok()?;
    Ok(())
}

#[test]
fn json_tells_how_to_attach_and_what_was_asked() -> Result<()> {
    let bench = Bench::new()?;
    let args =
        ["--json", "--vhost-user-blk", "v,1.sock", "--queues", "3", "--nbd", "./n", "null:1T"];
    let serving = Serving::start(&bench, &args)?;
    let hello: serde_json::Value = serde_json::from_str(&serving.hello)?;
    assert_eq!(hello["virtual-size"], 1_u64 << 40);
    let [blk, nbd] = [0, 1].map(|n| hello["exports"][n].clone());
    let socket = bench.path("v,1.sock");
    assert_eq!(blk["address"].as_str().map(Path::new), Some(socket.as_path()));
    for (way, words) in [
        ("qemu", &["v,,1.sock,reconnect-ms=1000", "num-queues=3", "share=on"][..]),
        ("libvirt", &["type='vhostuser'", "queues='3'", "mode='shared'"]),
        ("cloud-hypervisor", &["vhost_user=true,", "num_queues=3", "shared=on"]),
        ("firecracker", &["PUT /drives/", "\"socket\":"]),
    ] {
        let text = blk["attach"][way].as_str().unwrap_or_default();
        for word in words {
            ensure!(text.contains(word), "{way}: '{word}' is not in {text}");
        }
    }
    for way in ["uri", "qemu", "nbdinfo", "nbd-client"] {
        ensure!(nbd["attach"][way].is_string(), "{way}");
    }
    if has_or_skip("json_tells_how_to_attach_and_what_was_asked", "nbdinfo") {
        let uri = nbd["attach"]["uri"].as_str().unwrap_or_default();
        assert_eq!(bench.tool("nbdinfo", &["--size", uri])?.trim(), (1_u64 << 40).to_string());
    }
    let told: serde_json::Value = serde_json::from_str(serving.stop()?.trim())?;
    assert_eq!(told["event"], "stopped");
    assert_eq!(
        (&told["exports"][0]["requests"], &told["exports"][1]["errors"]),
        (&0.into(), &0.into())
    );
    Ok(())
}

#[test]
fn a_chain_reads_as_it_does_for_qemu() -> Result<()> {
    if !has_or_skip("a_chain_reads_as_it_does_for_qemu", "qemu-img") {
        return Ok(());
    }
    let bench = Bench::new()?;
    bench.run(&["create", "c.raw", "3M"])?.ok()?;
    bench.tool("qemu-io", &["-f", "raw", "-c", "write -P 1 0 3M", "c.raw"])?;
    bench.run(&["create", "-b", "c.raw", "-F", "raw", "b.qcow2", "2M"])?.ok()?;
    bench.tool("qemu-io", &["-f", "qcow2", "-c", "write -P 2 1000 300k", "b.qcow2"])?;
    // Longer again than the one below: what lies beyond that one's end must not show through from the lowest.
    bench
        .run(&["create", "-o", "cluster_size=4k", "-b", "b.qcow2", "-F", "qcow2", "a.qcow2", "5M"])?
        .ok()?;
    bench.tool(
        "qemu-io",
        &["-f", "qcow2", "-c", "write -P 3 1M 5000", "-c", "write -z 64k 64k", "a.qcow2"],
    )?;
    let serving = Serving::start(&bench, &["--nbd", "./s", "--allow-backing", "-r", "a.qcow2"])?;
    ensure!(
        serving.hello.contains("over b.qcow2 (qcow2)")
            && serving.hello.contains("over c.raw (raw)")
    );
    let args = ["compare", "-U", "-f", "raw", "-F", "qcow2", uri(&serving.hello)?, "a.qcow2"];
    bench.tool("qemu-img", &args)?;
    serving.stop()?;
    Ok(())
}

#[test]
fn the_service_manager_is_told_when_it_is_ready_and_when_it_stops() -> Result<()> {
    let bench = Bench::new()?;
    let path = bench.path("notify");
    let socket = std::os::unix::net::UnixDatagram::bind(&path)?;
    let mut child = bench
        .command(&["serve", "--nbd", "./s", "null:1G"])
        .env("NOTIFY_SOCKET", &path)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let mut told = [0; 64];
    let mut next = || -> Result<String> {
        let n = socket.recv(&mut told)?;
        Ok(String::from_utf8_lossy(&told[..n]).into_owned())
    };
    assert_eq!(next()?, "READY=1\n");
    ensure!(bench.path("s").exists(), "clients can connect");
    kill_process(Pid::from_child(&child), Signal::INT)?;
    assert_eq!(next()?, "STOPPING=1\n");
    ensure!(child.wait()?.success());
    Ok(())
}

#[test]
fn an_image_that_was_not_closed_is_served_again_and_clean_afterwards() -> Result<()> {
    if !has_or_skip("an_image_that_was_not_closed_is_served_again", "qemu-io") {
        return Ok(());
    }
    let bench = Bench::new()?;
    bench.run(&["create", "a.qcow2", "64M"])?.ok()?;
    let serving = Serving::start(&bench, &["--nbd", "./s", "a.qcow2"])?;
    let writes = ["-f", "raw", "-c", "write -P 5 0 3M", "-c", "flush", "-c", "write 8M 3M"];
    let mut args = writes.to_vec();
    let address = uri(&serving.hello)?.to_owned();
    args.push(&address);
    bench.tool("qemu-io", &args)?;
    drop(serving); // killed
    let serving = Serving::start(&bench, &["--nbd", "./s", "a.qcow2"])?;
    let text =
        bench.tool("qemu-io", &["-f", "raw", "-c", "read -P 5 0 3M", uri(&serving.hello)?])?;
    ensure!(!text.contains("failed"), "{text}");
    serving.stop()?;
    let (code, text) = bedplate_tests::host::qemu_img_check(&bench.path("a.qcow2"))?;
    ensure!(matches!(code, 0 | 3), "{text}");
    Ok(())
}
