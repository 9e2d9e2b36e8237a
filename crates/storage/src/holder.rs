//! Finds the process that holds an image lock, for the error message.
//!
//! Locks of open file descriptions have no owner that the kernel would name, so the open files of all processes
//! are looked through: one of the same inode whose `fdinfo` lists a lock on the byte, else one of the same inode.

use rustix::fs::Stat;
use std::fmt;
use std::fs;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// A process that has the image open.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Holder {
    pid: u32,
    command: String,
    own: bool,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.own {
            return write!(f, "this very process ({})", self.pid);
        }
        write!(f, "process {} ({})", self.pid, self.command)
    }
}

/// The process that has a lock on `byte` of the file that `fd` is open on, other than `fd` itself.
pub(crate) fn find(fd: impl AsFd, byte: i64) -> Option<Holder> {
    let st = rustix::fs::fstat(fd.as_fd()).ok()?;
    let mine = (std::process::id(), fd.as_fd().as_raw_fd());
    let mut opener = None;
    for entry in fs::read_dir("/proc").ok()?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else {
            continue;
        };
        match look_at(&entry.path(), pid, &st, byte, mine) {
            Some(true) => return Some(holder(&entry.path(), pid)),
            // Our own other descriptors on it are no sign that we hold a lock.
            Some(false) if pid != mine.0 => opener = opener.or(Some(holder(&entry.path(), pid))),
            _ => {}
        }
    }
    opener
}

/// `Some(true)` when the process holds the lock, `Some(false)` when it has the file open.
fn look_at(process: &Path, pid: u32, st: &Stat, byte: i64, mine: (u32, i32)) -> Option<bool> {
    let mut found = None;
    for entry in fs::read_dir(process.join("fd")).ok()?.flatten() {
        let name = entry.file_name();
        let number: Option<i32> = name.to_str().and_then(|n| n.parse().ok());
        if (Some(mine.1) == number && pid == mine.0) || !same_file(&entry.path(), st) {
            continue;
        }
        let info = fs::read_to_string(process.join("fdinfo").join(&name)).unwrap_or_default();
        if info.lines().any(|line| locks_byte(line, byte)) {
            return Some(true);
        }
        found = Some(false);
    }
    found
}

fn same_file(link: &Path, st: &Stat) -> bool {
    fs::metadata(link).is_ok_and(|m| m.ino() == st.st_ino && m.dev() == st.st_dev)
}

/// Reads a line such as `lock: 1: OFDLCK ADVISORY READ -1 fe:00:1234 100 100` (with a tab after the first word).
fn locks_byte(line: &str, byte: i64) -> bool {
    let mut words = line.split_whitespace();
    if words.next() != Some("lock:") {
        return false;
    }
    let mut last = words.rev();
    let end = last.next().map(|w| if w == "EOF" { i64::MAX } else { w.parse().unwrap_or(-1) });
    let start = last.next().and_then(|w| w.parse::<i64>().ok());
    matches!((start, end), (Some(s), Some(e)) if s <= byte && byte <= e)
}

fn holder(process: &Path, pid: u32) -> Holder {
    let line = fs::read(process.join("cmdline")).unwrap_or_default();
    let first = line.split(|b| *b == 0).next().unwrap_or_default();
    let mut command = String::from_utf8_lossy(first).into_owned();
    if command.is_empty() {
        command = fs::read_to_string(process.join("comm")).unwrap_or_default().trim().to_owned();
    }
    Holder { pid, command, own: pid == std::process::id() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_fdinfo_are_matched_by_byte() {
        let line = "lock:\t1: OFDLCK ADVISORY  READ -1 fe:00:1234 100 101";
        assert!(locks_byte(line, 100) && locks_byte(line, 101) && !locks_byte(line, 102));
        assert!(locks_byte("lock:\t2: POSIX  ADVISORY  WRITE 17 fe:00:9 0 EOF", 203));
        assert!(!locks_byte("pos:\t100", 100));
        assert!(!locks_byte("lock:", 100));
    }
}
