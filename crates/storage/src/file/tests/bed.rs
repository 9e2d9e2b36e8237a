//! What the tests of this module share: runtimes of both kinds, short calls, devices and mounts.

use crate::{FileStorage, Storage};
use bedplate_runtime::buf::{AlignedBuf, IoVec, SharedBuf};
use bedplate_runtime::{Backend, Config, Runtime};
use bedplate_types::{ByteLen, HostOffset};
use std::future::Future;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

pub(super) fn at(n: u64) -> HostOffset {
    HostOffset::new(n)
}

pub(super) fn len(n: u64) -> ByteLen {
    ByteLen::new(n)
}

pub(super) fn filled(byte: u8, len: usize) -> IoVec {
    let buf = SharedBuf::zeroed(len).expect("memory").iovec();
    buf.fill(0, len, byte);
    buf
}

pub(super) async fn put(s: &FileStorage, offset: u64, bytes: &[u8]) {
    let buf = SharedBuf::new(AlignedBuf::from_slice(bytes).expect("memory")).iovec();
    s.write(at(offset), buf).await.expect("write");
}

pub(super) async fn get(s: &FileStorage, offset: u64, n: usize) -> Vec<u8> {
    let buf = filled(0xee, n);
    s.read(at(offset), buf.clone()).await.expect("read");
    let mut out = vec![0; n];
    buf.copy_to(0, &mut out);
    out
}

/// Runs `work` on a runtime of this thread.
pub(super) fn on<F: Future>(backend: Backend, work: F) -> F::Output {
    let runtime = Runtime::new(Config { backend, ..Config::default() }).expect("runtime");
    runtime.block_on(work)
}

/// Runs a test on a ring and on threads, each with an empty folder.
pub(super) fn on_both<F: Future<Output = ()>>(test: impl Fn(PathBuf) -> F) {
    for backend in [Backend::Uring, Backend::Threads] {
        let dir = tempfile::tempdir().expect("tempdir");
        on(backend, test(dir.path().to_owned()));
    }
}

/// Tells on the terminal, past the test harness, that a test did not run.
pub(super) fn skipped(what: &str, why: &str) {
    let _ = writeln!(std::io::stderr(), "skipped: {what}: {why}");
}

fn run(command: &mut Command) -> Result<String, String> {
    let out = command.output().map_err(|e| format!("{command:?}: {e}"))?;
    if out.status.success() {
        return Ok(String::from_utf8_lossy(&out.stdout).trim().to_owned());
    }
    Err(format!("{command:?}: {}", String::from_utf8_lossy(&out.stderr).trim()))
}

/// A loop device over a file; it goes when this is dropped.
pub(super) struct LoopDevice {
    pub(super) path: PathBuf,
    _dir: tempfile::TempDir,
}

impl LoopDevice {
    /// A device of `size` bytes with this sector size, or why there can be none here.
    pub(super) fn new(sector: u32, size: u64) -> Result<Self, String> {
        if !rustix::process::geteuid().is_root() {
            return Err("needs root".to_owned());
        }
        let dir = tempfile::tempdir().map_err(|e| e.to_string())?;
        let file = dir.path().join("backing");
        let backing = std::fs::File::create(&file).map_err(|e| e.to_string())?;
        backing.set_len(size).map_err(|e| e.to_string())?;
        let mut command = Command::new("losetup");
        command.args(["--find", "--show", "--sector-size"]).arg(sector.to_string()).arg(&file);
        // Others may take the same free device at the same time.
        let mut last = String::new();
        for _ in 0..5 {
            match run(&mut command) {
                Ok(path) => return Ok(Self { path: path.into(), _dir: dir }),
                Err(e) => last = e,
            }
        }
        Err(last)
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        if let Err(e) = run(Command::new("losetup").arg("--detach").arg(&self.path)) {
            skipped("detaching", &e);
        }
    }
}

/// A file system on a loop device; unmounted when this is dropped.
pub(super) struct Mount {
    pub(super) dir: tempfile::TempDir,
    device: LoopDevice,
}

impl Mount {
    pub(super) fn device_path(&self) -> &Path {
        &self.device.path
    }

    /// Makes and mounts a file system of this kind, or tells why not.
    pub(super) fn new(kind: &str, sector: u32) -> Result<Self, String> {
        let device = LoopDevice::new(sector, 400 << 20)?;
        run(Command::new(format!("mkfs.{kind}")).arg("-q").arg(&device.path))?;
        let dir = tempfile::tempdir().map_err(|e| e.to_string())?;
        run(Command::new("mount").arg(&device.path).arg(dir.path()))?;
        Ok(Self { dir, device })
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if let Err(e) = run(Command::new("umount").arg(self.dir.path())) {
            skipped("unmounting", &e);
        }
    }
}

/// A name for a test's file in `dir`.
pub(super) fn file_in(dir: &Path) -> PathBuf {
    dir.join("disk.raw")
}

/// Random numbers that a seed repeats (a 64-bit linear congruence, high bits).
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 24) % bound
    }
}
