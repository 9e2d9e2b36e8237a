//! Image locks that QEMU's tools and virtual machines respect, and that respect theirs.
//!
//! QEMU's file driver holds a shared lock on byte 100 + n for each permission n that it uses, and on byte 200 + n
//! for each that it does not let others use; before that counts it looks whether anybody holds the opposite byte.
//! All locks are shared, so that taking them never fails; only looking does. The locks belong to an open file
//! description of their own, which nothing else keeps open: they end when the [`ImageLock`] does.

use crate::{holder, sys};
use bedplate_types::{Error, ErrorKind, Result};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

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
    _fd: OwnedFd,
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
                Ok(None) => return Ok(Some(Self { _fd: fd })),
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
