//! Serving files in tests, and running other programs against them.
#![allow(dead_code, reason = "each test file uses a part of it")]

use bedplate_disk::{Disk, Layer};
use bedplate_nbd::client::{Client, Wanted};
use bedplate_nbd::{NbdAddr, NbdExport, NbdOptions, NbdServer};
use bedplate_qcow2::Qcow2;
use bedplate_runtime::{Config, Runtime};
use bedplate_storage::{FileStorage, OpenOptions};
use bedplate_types::CacheMode;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use tempfile::TempDir;

/// A served image in a folder of its own.
pub struct Served {
    pub server: NbdServer,
    pub disk: Arc<Disk<FileStorage>>,
    pub addr: NbdAddr,
    pub file: PathBuf,
    pub dir: TempDir,
}

/// How to serve.
#[derive(Clone, Copy, Debug, Default)]
pub struct How {
    pub tcp: bool,
    pub read_only: bool,
    /// As qcow2 instead of raw; needs qemu-img.
    pub qcow2: bool,
    pub cache: CacheMode,
}

/// Serves an image with this content as the exports "disk" and "second".
pub fn serve(content: &[u8], how: How) -> Served {
    let dir = tempfile::tempdir().expect("a folder");
    let raw = dir.path().join("disk.raw");
    std::fs::write(&raw, content).expect("written");
    let file = if how.qcow2 {
        let file = dir.path().join("disk.qcow2");
        run("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", arg(&raw), arg(&file)]);
        file
    } else {
        raw
    };
    let addr = if how.tcp {
        NbdAddr::Tcp { host: "127.0.0.1".into(), port: 0 }
    } else {
        NbdAddr::Unix(dir.path().join("nbd.sock"))
    };
    let disk = open(&file, how);
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
    Served { server, disk, addr, file, dir }
}

fn open(file: &Path, how: How) -> Arc<Disk<FileStorage>> {
    let options = OpenOptions::new(file).read_only(how.read_only).cache(how.cache);
    let storage = FileStorage::open(&options).expect("opened");
    let layer = if how.qcow2 {
        let options = bedplate_qcow2::OpenOptions::default();
        Layer::Qcow2(Arc::new(on_a_runtime(Qcow2::open(storage, &options)).expect("a good image")))
    } else {
        Layer::Raw(Arc::new(storage))
    };
    Arc::new(Disk::new("test", vec![layer], how.read_only, how.cache).expect("a disk"))
}

fn on_a_runtime<F: Future>(f: F) -> F::Output {
    Runtime::new(Config::default()).expect("a runtime").block_on(f)
}

impl Served {
    /// Stops the server and closes the image; gives its folder and file.
    pub fn close(self) -> (TempDir, PathBuf) {
        let Self { mut server, disk, file, dir, .. } = self;
        server.stop();
        on_a_runtime(disk.close()).expect("closed");
        (dir, file)
    }

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
