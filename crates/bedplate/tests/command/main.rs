//! The command as its users meet it: words, output, exit codes, and files left alone when something is refused.

mod bench;
mod bitmap;
mod check;
mod create;
mod data_file;
mod encrypted;
mod info;
mod limits;
mod map;
mod qemu_io;
mod resize;
mod serve;
mod snapshot;
mod state;
mod usage;

use anyhow::{Context, Result, ensure};
use bedplate_tests::host;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A folder for one test, on a file system that has direct I/O.
struct Bench {
    folder: tempfile::TempDir,
}

/// How a command ended and what it wrote.
#[derive(Debug)]
struct Ended {
    code: i32,
    out: String,
    err: String,
}

impl Ended {
    /// Asserts success.
    fn ok(self) -> Result<Self> {
        ensure!(self.code == 0, "{self:?}");
        Ok(self)
    }

    fn json(&self) -> Result<Value> {
        serde_json::from_str(&self.out).with_context(|| format!("no JSON: {}", self.out))
    }

    /// Asserts a failure with this exit code, told in one line that holds all of `words`.
    fn fails(&self, code: i32, words: &[&str]) -> Result<()> {
        ensure!(self.code == code, "exit code {code} expected: {self:?}");
        ensure!(self.out.is_empty(), "nothing is to be printed: {self:?}");
        ensure!(self.err.starts_with("bedplate: ") && self.err.lines().count() == 1, "{self:?}");
        for word in words {
            ensure!(self.err.contains(word), "'{word}' is not in {}", self.err);
        }
        Ok(())
    }
}

impl Bench {
    fn new() -> Result<Self> {
        let target = bedplate_tests::paths::target();
        Ok(Self { folder: tempfile::Builder::new().prefix("command-").tempdir_in(target)? })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The command under test in this folder.
    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_bedplate"));
        command.current_dir(self.folder.path()).args(args).env_remove("RUST_LOG");
        command.stdin(Stdio::null());
        command
    }

    /// Runs the command under test.
    fn run(&self, args: &[&str]) -> Result<Ended> {
        let out = host::output(&mut self.command(args))?;
        Ok(Ended {
            code: out.status.code().unwrap_or(-1),
            out: String::from_utf8_lossy(&out.stdout).into_owned(),
            err: String::from_utf8_lossy(&out.stderr).into_owned(),
        })
    }

    /// Runs another program that must succeed.
    fn tool(&self, program: &str, args: &[&str]) -> Result<String> {
        host::run(host::tool(program).args(args).current_dir(self.folder.path()))
    }

    fn tool_json(&self, program: &str, args: &[&str]) -> Result<Value> {
        Ok(serde_json::from_str(&self.tool(program, args)?)?)
    }

    /// All files in the folder with their content.
    fn snapshot(&self) -> Result<Vec<(PathBuf, Vec<u8>)>> {
        let mut all = Vec::new();
        for entry in std::fs::read_dir(self.folder.path())? {
            let path = entry?.path();
            if path.is_file() {
                let content = std::fs::read(&path)?;
                all.push((path, content));
            }
        }
        all.sort();
        Ok(all)
    }

    /// Asserts that the command is refused in these words, and that no file was changed, made or removed.
    fn refuses(&self, args: &[&str], code: i32, words: &[&str]) -> Result<()> {
        let before = self.snapshot()?;
        self.run(args)?.fails(code, words).with_context(|| format!("{args:?}"))?;
        ensure!(self.snapshot()? == before, "{args:?} changed files");
        Ok(())
    }
}

/// Overwrites bytes of a file.
fn poke(file: &Path, at: u64, bytes: &[u8]) -> Result<()> {
    use std::os::unix::fs::FileExt;
    Ok(std::fs::File::options().write(true).open(file)?.write_all_at(bytes, at)?)
}
