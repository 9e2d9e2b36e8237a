//! Image locks that QEMU's tools and virtual machines respect, and that respect theirs.
//!
//! QEMU's file driver holds a shared lock on byte 100 + n for each permission n that it uses, and on byte 200 + n
//! for each that it does not let others use; before that counts it looks whether anybody holds the opposite byte.
//! All locks are shared, so that taking them never fails; only looking does. The locks belong to an open file
//! description of their own, which nothing else keeps open: they end when the [`ImageLock`] does.
//!
//! When a process is killed, the kernel may still be carrying out its writes, from memory that is no longer its own
//! to say about (a guest's). So the descriptions that writes go through hold a byte of Bedplate's own ([`IoMark`]),
//! which the kernel lets go of after the last of these writes; whoever opens the image waits for that.

use crate::{holder, sys};
use bedplate_runtime::File;
use bedplate_types::{Error, ErrorKind, Result};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Reads see consistent data.
const CONSISTENT_READ: u8 = 0;
/// Contents are changed.
const WRITE: u8 = 1;
/// The length is changed.
const RESIZE: u8 = 3;

/// First of the bytes for permissions in use.
const USED: i64 = 100;
/// First of the bytes for permissions not shared.
const KEPT: i64 = 200;

/// The byte that descriptions hold through which writes go; QEMU looks at no byte beyond 263.
const IO: i64 = 300;

/// How long the writes of a killed process may take to end.
pub(crate) const LATE_IO: Duration = Duration::from_secs(30);
const LATE_PAUSE: Duration = Duration::from_millis(5);

/// A process that has just let go of an image may need a moment to close it.
const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(60);

/// How an image is guarded against other programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum LockMode {
    /// A writer excludes everybody, a reader excludes writers.
    #[default]
    Auto,
    /// Read although somebody may be writing, as with QEMU's `--force-share`. Only for read-only use.
    ForceShare,
    /// No locks at all.
    Off,
}

/// The locks held on one image; they end when this is dropped.
#[derive(Debug)]
pub(crate) struct ImageLock {
    fd: OwnedFd,
}

impl ImageLock {
    /// Locks the image that `fd` is a fresh open file description of; `None` where the file system has no locks.
    pub(crate) fn take(
        fd: OwnedFd,
        path: &Path,
        write: bool,
        mode: LockMode,
    ) -> Result<Option<Self>> {
        let (used, kept): (&[u8], &[u8]) = match (mode, write) {
            (LockMode::Off, _) => return Ok(None),
            (LockMode::ForceShare, _) => (&[CONSISTENT_READ], &[]),
            (LockMode::Auto, true) => (&[CONSISTENT_READ, WRITE, RESIZE], &[WRITE, RESIZE]),
            (LockMode::Auto, false) => (&[CONSISTENT_READ], &[WRITE, RESIZE]),
        };
        for attempt in 1..=TRIES {
            match claim(&fd, used, kept) {
                Ok(None) => return Ok(Some(Self { fd })),
                Ok(Some(byte)) if attempt == TRIES => return Err(refused(&fd, path, write, byte)),
                // Our own bytes would make two who try at once refuse each other for ever.
                Ok(Some(_)) => {
                    release(&fd, used, kept);
                    std::thread::sleep(PAUSE);
                }
                Err(e)
                    if matches!(
                        e.raw_os_error(),
                        Some(libc::ENOLCK | libc::EINVAL | libc::EOPNOTSUPP)
                    ) =>
                {
                    tracing::warn!(
                        "'{}' is on a file system without file locks ({e}): nothing keeps other programs off it",
                        path.display()
                    );
                    return Ok(None);
                }
                Err(e) => return Err(Error::io(format!("cannot lock '{}'", path.display()), e)),
            }
        }
        Ok(None)
    }
}

impl ImageLock {
    /// Waits until no write of a process that was killed is under way any more, at most `limit`.
    pub(crate) fn wait_for_late_io(&self, path: &Path, limit: Duration) -> Result<()> {
        let begin = Instant::now();
        loop {
            // Where there are no locks, there is nothing to see.
            if !sys::is_locked_elsewhere(&self.fd, IO).unwrap_or(false) {
                return Ok(());
            }
            if begin.elapsed() >= limit {
                return Err(Error::new(
                    ErrorKind::Locked,
                    format!(
                        "cannot use '{}': writes of a process that was killed are still under way in the kernel; \
                         its device seems to hang",
                        path.display()
                    ),
                ));
            }
            std::thread::sleep(LATE_PAUSE);
        }
    }
}

/// The mark on open files that writes go through. It ends with this value, or, when the process is killed, with the
/// last write.
#[derive(Debug)]
pub(crate) struct IoMark(Vec<Arc<File>>);

impl IoMark {
    /// Marks `files`, which must be open for reading too.
    pub(crate) fn set(files: impl IntoIterator<Item = Arc<File>>) -> Self {
        let files = files.into_iter().collect::<Vec<_>>();
        for file in &files {
            if let Err(e) = sys::set_shared_lock(file, IO, true) {
                tracing::debug!("cannot mark {file:?} as being written through: {e}");
            }
        }
        Self(files)
    }
}

impl Drop for IoMark {
    fn drop(&mut self) {
        for file in &self.0 {
            // A ring may keep the file open for a while, and nothing is under way there.
            if let Err(e) = sys::set_shared_lock(file, IO, false) {
                tracing::debug!("cannot take the mark from {file:?}: {e}");
            }
        }
    }
}

/// Takes the bytes and looks for the opposite ones; the byte that is in the way, if there is one.
fn claim(fd: &OwnedFd, used: &[u8], kept: &[u8]) -> io::Result<Option<i64>> {
    for n in used {
        sys::set_shared_lock(fd, USED + i64::from(*n), true)?;
    }
    for n in kept {
        sys::set_shared_lock(fd, KEPT + i64::from(*n), true)?;
    }
    let opposite = used.iter().map(|n| KEPT + i64::from(*n));
    for byte in opposite.chain(kept.iter().map(|n| USED + i64::from(*n))) {
        if sys::is_locked_elsewhere(fd, byte)? {
            return Ok(Some(byte));
        }
    }
    Ok(None)
}

fn release(fd: &OwnedFd, used: &[u8], kept: &[u8]) {
    let bytes = used.iter().map(|n| USED + i64::from(*n));
    for byte in bytes.chain(kept.iter().map(|n| KEPT + i64::from(*n))) {
        if let Err(e) = sys::set_shared_lock(fd, byte, false) {
            tracing::debug!("cannot unlock byte {byte}: {e}");
        }
    }
}

fn refused(fd: &OwnedFd, path: &Path, write: bool, byte: i64) -> Error {
    let path = path.display();
    let who = match holder::find(fd, byte) {
        Some(h) => h.to_string(),
        None => "another process (one whose open files we may not see)".to_owned(),
    };
    // A byte from 200 on is "I let nobody do this"; one from 100 on is "I do this".
    let uses = if byte < KEPT { "writes to it" } else { "keeps others from using it" };
    let advice = match (write, byte < KEPT) {
        (true, _) => "stop that program first, or open the image read-only if it only reads too",
        (false, _) => {
            "stop that program first, or read it all the same with --force-share, at the risk of seeing \
             half-finished changes"
        }
    };
    let purpose = if write { "writing" } else { "reading" };
    Error::new(
        ErrorKind::Locked,
        format!("cannot lock '{path}' for {purpose}: {who} {uses}; {advice}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FileStorage, OpenOptions};

    #[test]
    fn writes_of_a_killed_process_are_waited_for_and_an_image_let_go_of_is_not() {
        let file = tempfile::NamedTempFile::new().expect("file");
        let open = || OwnedFd::from(std::fs::File::open(file.path()).expect("open"));
        let storage = FileStorage::open(&OpenOptions::new(file.path())).expect("open");
        let other = open();
        assert!(sys::is_locked_elsewhere(&other, IO).expect("look"), "marked while it is open");
        drop(storage);
        assert!(!sys::is_locked_elsewhere(&other, IO).expect("look"));

        // What the kernel keeps of a killed process: its file, with the mark, without the image lock.
        let late = open();
        sys::set_shared_lock(&late, IO, true).expect("mark");
        let lock = ImageLock::take(open(), file.path(), true, LockMode::Auto);
        let lock = lock.expect("lock").expect("a file system with locks");
        let wait = || lock.wait_for_late_io(file.path(), Duration::ZERO);
        assert_eq!(wait().expect_err("under way").kind(), ErrorKind::Locked);
        drop(late);
        wait().expect("over");
    }
}
