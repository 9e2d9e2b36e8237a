//! What a killed `bedplate serve` leaves: taken up, refused, or discarded.

use super::Bench;
use super::serve::{Serving, uri};
use anyhow::{Context, Result, ensure};
use bedplate_tests::{has_or_skip, host};
use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

/// An image, and a folder for state.
struct Killed {
    bench: Bench,
    state: tempfile::TempDir,
}

impl Killed {
    fn new(options: &str) -> Result<Self> {
        let bench = Bench::new()?;
        bench.run(&["create", "-o", options, "a.qcow2", "8M"])?.ok()?;
        Ok(Self { bench, state: tempfile::tempdir_in("/dev/shm")? })
    }

    fn serve_args(&self, more: &[&str]) -> Vec<String> {
        let state = self.state.path().display().to_string();
        let args = ["--nbd", "./s", "a.qcow2", "--state-dir", &state];
        args.iter().chain(more).map(|s| (*s).to_owned()).collect()
    }

    fn serve(&self, more: &[&str]) -> Result<Serving> {
        let args = self.serve_args(more);
        Serving::start(&self.bench, &args.iter().map(String::as_str).collect::<Vec<_>>())
    }

    fn states(&self) -> Result<usize> {
        Ok(std::fs::read_dir(self.state.path())?.count())
    }

    /// Writes without a flush (which QEMU's tool would send with each write by itself); the server is killed before the client ends.
    fn write_and_kill(&self) -> Result<()> {
        let mut serving = self.serve(&[])?;
        let mut command = host::tool("qemu-io");
        command
            .args(["-t", "writeback", "-f", "raw", uri(&serving.hello)?])
            .current_dir(self.bench.folder.path());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut client = command.spawn()?;
        let mut input = client.stdin.take().context("no stdin")?;
        writeln!(input, "write -P 7 0 200k")?;
        input.flush()?;
        let mut out = BufReader::new(client.stdout.take().context("no stdout")?);
        let mut told = String::new();
        while !told.contains("wrote 204800") {
            ensure!(out.read_line(&mut told)? != 0, "qemu-io ended: {told}");
        }
        serving.child.kill()?;
        serving.child.wait()?;
        client.kill()?;
        client.wait()?;
        Ok(())
    }

    fn reads(&self, serving: &Serving, commands: &[&str]) -> Result<()> {
        let mut args = vec!["-r", "-f", "raw"];
        commands.iter().for_each(|c| args.extend(["-c", *c]));
        args.push(uri(&serving.hello)?);
        let text = self.bench.tool("qemu-io", &args)?;
        ensure!(!text.contains("failed"), "{text}");
        Ok(())
    }
}

#[test]
fn completed_writes_of_a_killed_server_are_there_when_it_is_started_again() -> Result<()> {
    let test = "completed_writes_of_a_killed_server_are_there_when_it_is_started_again";
    if !has_or_skip(test, "qemu-io") {
        return Ok(());
    }
    for options in ["compat=1.1", "lazy_refcounts=on"] {
        let killed = Killed::new(options)?;
        killed.write_and_kill()?;
        ensure!(killed.states()? == 1, "the state of the killed server is there");
        let serving = killed.serve(&[])?;
        ensure!(serving.hello.contains("  state in /dev/shm/"), "{}", serving.hello);
        killed.reads(&serving, &["read -P 7 0 200k", "read -P 0 200k 1M"])?;
        serving.stop()?;
        ensure!(killed.states()? == 0, "a clean end removes the state");
        killed.bench.run(&["check", "a.qcow2"])?.ok()?;
        killed.bench.tool("qemu-img", &["check", "-q", "a.qcow2"])?;
    }
    Ok(())
}

#[test]
fn state_of_an_image_that_another_program_has_changed_is_refused_until_it_is_discarded()
-> Result<()> {
    let test =
        "state_of_an_image_that_another_program_has_changed_is_refused_until_it_is_discarded";
    if !has_or_skip(test, "qemu-io") {
        return Ok(());
    }
    let killed = Killed::new("compat=1.1")?;
    killed.write_and_kill()?;
    killed.bench.tool("qemu-io", &["-f", "qcow2", "-c", "write -P 9 1M 64k", "a.qcow2"])?;
    let args = killed.serve_args(&[]);
    let args: Vec<&str> = ["serve"].into_iter().chain(args.iter().map(String::as_str)).collect();
    let words = ["a.qcow2", "was killed", "another program has opened", "--discard-state"];
    killed.bench.refuses(&args, 1, &words)?;
    ensure!(killed.states()? == 1, "it stays");
    let serving = killed.serve(&["--discard-state"])?;
    killed.reads(&serving, &["read -P 0 0 200k", "read -P 9 1M 64k"])?;
    serving.stop()?;
    ensure!(killed.states()? == 0, "a clean end removes the state");
    killed.bench.run(&["check", "a.qcow2"])?.ok()?;
    Ok(())
}

#[test]
fn state_is_kept_in_memory_only_and_not_for_every_image() -> Result<()> {
    let killed = Killed::new("compat=0.10")?;
    let serving = killed.serve(&[])?;
    ensure!(!serving.hello.contains("state in"), "version 2 has none: {}", serving.hello);
    ensure!(killed.states()? == 0);
    serving.stop()?;
    let bench = Bench::new()?;
    bench.run(&["create", "a.qcow2", "8M"])?.ok()?;
    std::fs::create_dir(bench.path("disk"))?;
    let words = ["disk", "memory file system", "--state-dir none"];
    for dir in ["disk", "disk/new"] {
        bench.refuses(&["serve", "--nbd", "./s", "a.qcow2", "--state-dir", dir], 1, &words)?;
        ensure!(std::fs::read_dir(bench.path("disk"))?.next().is_none(), "nothing stays in {dir}");
    }
    let serving =
        Serving::start(&bench, &["--nbd", "./s", "a.qcow2", "--state-dir", "none", "--json"])?;
    ensure!(serving.hello.contains("\"state-file\":null"), "{}", serving.hello);
    serving.stop()?;
    Ok(())
}
