//! Image locks between ourselves, and with QEMU's tools both ways.

use super::bed::{file_in, skipped};
use crate::{FileStorage, LockMode, OpenOptions};
use bedplate_types::ErrorKind;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};

fn image() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = file_in(dir.path());
    std::fs::write(&path, vec![0; 65536]).expect("file");
    (dir, path)
}

fn open(path: &Path, read_only: bool, lock: LockMode) -> Result<FileStorage, ErrorKind> {
    let options = OpenOptions::new(path).read_only(read_only).lock(lock);
    FileStorage::open(&options).map_err(|e| e.kind())
}

#[test]
fn a_writer_excludes_everybody_and_readers_only_exclude_writers() {
    let (_dir, path) = image();
    let writer = open(&path, false, LockMode::Auto).expect("writer");
    assert_eq!(open(&path, false, LockMode::Auto).err(), Some(ErrorKind::Locked));
    assert_eq!(open(&path, true, LockMode::Auto).err(), Some(ErrorKind::Locked));
    open(&path, true, LockMode::ForceShare).expect("shared by force");
    open(&path, false, LockMode::Off).expect("without locks");
    drop(writer);
    let reader = open(&path, true, LockMode::Auto).expect("reader");
    open(&path, true, LockMode::Auto).expect("second reader");
    assert_eq!(open(&path, false, LockMode::Auto).err(), Some(ErrorKind::Locked));
    drop(reader);
    open(&path, false, LockMode::Auto).expect("writer again");
}

#[test]
fn the_error_names_this_process_when_it_is_the_holder() {
    let (_dir, path) = image();
    let _writer = open(&path, false, LockMode::Auto).expect("writer");
    let e = FileStorage::open(&OpenOptions::new(&path)).expect_err("locked").to_string();
    assert!(e.contains(&std::process::id().to_string()) && e.contains("this very process"), "{e}");
}

/// A qcow2 image: for raw ones qemu-io's readers allow writers. `None` without QEMU's tools.
fn qemu_image() -> Option<(tempfile::TempDir, PathBuf)> {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = file_in(dir.path());
    let mut create = Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2"]).arg(&path).arg("1M");
    match create.status() {
        Ok(status) => assert!(status.success()),
        Err(e) => {
            skipped("locks with QEMU's tools", &e.to_string());
            return None;
        }
    }
    Some((dir, path))
}

/// Whether qemu-io could do `command` on the image.
fn qemu_io(path: &Path, options: &[&str], command: &str) -> bool {
    let mut io = Command::new("qemu-io");
    io.args(options).args(["-f", "qcow2", "-c", command]).arg(path);
    io.output().expect("qemu-io is installed where qemu-img is").status.success()
}

#[test]
fn qemu_is_refused_while_we_write_and_shares_while_we_read() {
    let Some((_dir, path)) = qemu_image() else { return };
    assert!(qemu_io(&path, &[], "write 0 512"));
    let writer = open(&path, false, LockMode::Auto).expect("writer");
    assert!(!qemu_io(&path, &[], "write 0 512"));
    assert!(!qemu_io(&path, &["-r"], "read 0 512"));
    assert!(qemu_io(&path, &["-r", "-U"], "read 0 512"));
    drop(writer);
    let reader = open(&path, true, LockMode::Auto).expect("reader");
    assert!(!qemu_io(&path, &[], "write 0 512"));
    assert!(qemu_io(&path, &["-r"], "read 0 512"));
    drop(reader);
    let _shared = open(&path, true, LockMode::ForceShare).expect("shared by force");
    assert!(qemu_io(&path, &[], "write 0 512"));
}

/// A qemu-io that has the image open until its input is closed.
struct Qemu {
    child: Child,
    input: Option<ChildStdin>,
}

impl Qemu {
    fn holding(path: &Path, options: &[&str]) -> Self {
        let mut command = Command::new("qemu-io");
        command.args(options).args(["-f", "qcow2"]).arg(path);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("qemu-io is installed where qemu-img is");
        let mut input = child.stdin.take().expect("input");
        input.write_all(b"read 0 512\n").expect("command");
        input.flush().expect("flush");
        let mut line = String::new();
        let mut output = BufReader::new(child.stdout.take().expect("output"));
        while !line.contains("read 512/512") {
            line.clear();
            assert_ne!(output.read_line(&mut line).expect("answer"), 0, "qemu-io has ended");
        }
        Self { child, input: Some(input) }
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.child.wait();
    }
}

#[test]
fn we_are_refused_while_qemu_writes_and_told_by_whom() {
    let Some((_dir, path)) = qemu_image() else { return };
    let qemu = Qemu::holding(&path, &[]);
    for read_only in [false, true] {
        let options = OpenOptions::new(&path).read_only(read_only);
        let e = FileStorage::open(&options).expect_err("locked");
        assert_eq!(e.kind(), ErrorKind::Locked);
        let text = e.to_string();
        assert!(text.contains(&format!("process {} (qemu-io)", qemu.child.id())), "{text}");
    }
    open(&path, true, LockMode::ForceShare).expect("shared by force");
    drop(qemu);
    open(&path, false, LockMode::Auto).expect("free again");
    let reading = Qemu::holding(&path, &["-r"]);
    open(&path, true, LockMode::Auto).expect("two readers");
    assert_eq!(open(&path, false, LockMode::Auto).err(), Some(ErrorKind::Locked));
    drop(reading);
}
