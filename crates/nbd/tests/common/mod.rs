//! Serving files in tests, and running other programs against them.
#![allow(dead_code, reason = "each test file uses a part of it")]

use bedplate_nbd::client::{Client, Wanted};
use bedplate_nbd::device::{Device, Run};
use bedplate_nbd::{NbdAddr, NbdExport, NbdOptions, NbdServer};
use bedplate_runtime::buf::IoVec;
use bedplate_storage::ZeroMode;
use bedplate_types::{ByteLen, GuestOffset, Result};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use tempfile::TempDir;

pub struct Plain(File, bool);

impl Device for Plain {
    fn size(&self) -> u64 {
        self.0.metadata().expect("stat").len()
    }
    fn read_only(&self) -> bool {
        self.1
    }
    fn align(&self) -> u32 {
        512
    }
    async fn read(&self, at: GuestOffset, buf: IoVec) -> Result<()> {
        let mut v = vec![0; buf.len()];
        self.0.read_exact_at(&mut v, at.get()).expect("read");
        buf.copy_from(0, &v);
        Ok(())
    }
    async fn write(&self, at: GuestOffset, buf: IoVec, _fua: bool) -> Result<()> {
        let mut v = vec![0; buf.len()];
        buf.copy_to(0, &mut v);
        self.0.write_all_at(&v, at.get()).expect("read");
        Ok(())
    }
    async fn write_batch(&self, writes: Vec<(GuestOffset, IoVec)>) -> Vec<Result<()>> {
        let mut out = Vec::new();
        for (at, buf) in writes {
            out.push(self.write(at, buf, false).await);
        }
        out
    }
    async fn flush(&self) -> Result<()> {
        Ok(())
    }
    async fn discard(&self, _at: GuestOffset, _len: ByteLen) -> Result<()> {
        Ok(())
    }
    async fn write_zeroes(&self, at: GuestOffset, len: ByteLen, _mode: ZeroMode) -> Result<()> {
        self.0.write_all_at(&vec![0; len.get() as usize], at.get()).expect("read");
        Ok(())
    }
    async fn block_status(&self, _at: GuestOffset, len: ByteLen, _max: usize) -> Result<Vec<Run>> {
        Ok(vec![Run { len: len.get(), hole: false, zero: false }])
    }
}

/// A served file in a folder of its own.
pub struct Served {
    pub server: NbdServer,
    pub addr: NbdAddr,
    pub file: PathBuf,
    pub dir: TempDir,
}

/// How to serve.
#[derive(Clone, Copy, Default)]
pub struct How {
    pub tcp: bool,
    pub read_only: bool,
}

/// Serves a raw file with this content as the exports "disk" and "second".
pub fn serve(content: &[u8], how: How) -> Served {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("disk.raw");
    std::fs::write(&file, content).expect("written");
    serve_file(dir, file, how)
}

pub fn serve_file(dir: TempDir, file: PathBuf, how: How) -> Served {
    let addr = if how.tcp {
        NbdAddr::Tcp { host: "127.0.0.1".into(), port: 0 }
    } else {
        NbdAddr::Unix(dir.path().join("nbd.sock"))
    };
    let disk = open(&file, how.read_only);
    let export = |name: &str| NbdExport {
        name: name.into(),
        description: "a test".into(),
        disk: disk.clone(),
        read_only: how.read_only,
    };
    let options = NbdOptions { threads: 2, ..NbdOptions::default() };
    let exports = vec![export("disk"), export("second")];
    let server = NbdServer::start(&addr, exports, options).expect("started");
    let addr = server.local_addr().clone();
    Served { server, addr, file, dir }
}

fn open(file: &Path, read_only: bool) -> Arc<Plain> {
    Arc::new(Plain(File::options().read(true).write(!read_only).open(file).unwrap(), read_only))
}

impl Served {
    pub fn uri(&self) -> String {
        self.addr.uri("disk")
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn connect(&self) -> Client {
        Client::connect(&self.addr, 3).expect("connected")
    }

    /// A client with structured replies and `base:allocation` on the first export.
    pub fn client(&self) -> Client {
        let mut c = self.connect();
        let full = Wanted { structured: true, allocation: true };
        c.go(b"", full).expect("negotiated").expect("the export");
        c
    }
}

/// Bytes that repeat at no power of two and hold no runs of zeroes.
pub fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i % 251) as u8 + 1).collect()
}

/// True when the program is installed; says so when it is not.
pub fn have(program: &str) -> bool {
    let found = std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).is_file()));
    if !found {
        eprintln!("SKIPPED: {program} is not installed");
    }
    found
}

/// Runs a program that must succeed; gives what it printed.
pub fn run(program: &str, args: &[&str]) -> String {
    let out = Command::new("timeout")
        .arg("120")
        .arg(program)
        .args(args)
        .output()
        .unwrap_or_else(|e| panic!("{program}: {e}"));
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let errors = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{program} {args:?}: {}\n{text}\n{errors}", out.status);
    text
}

/// A path as an argument.
pub fn arg(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}
