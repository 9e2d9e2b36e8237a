//! Which parts of a file are data: asked of the file system by seeking, once per run of data or hole.
//!
//! A run of data may be remembered although it has become a hole (it still reads right); a hole that has become
//! data must not. So whoever has changed something looks at `watched`, which is set only while a hole is
//! remembered or being looked for, and wipes the memory then. In ordinary service that is one load of a line that
//! nobody writes to.

use super::Inner;
use crate::Extent;
use bedplate_runtime::fs;
use bedplate_types::{ByteLen, Error, Result};
use rustix::fs::SeekFrom;
use rustix::io::Errno;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Mutex, MutexGuard, PoisonError};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    start: u64,
    end: u64,
    data: bool,
}

#[derive(Default)]
struct Memory {
    run: Option<Run>,
    /// How often the memory was wiped; a run found in between may be stale.
    wiped: u64,
}

pub(super) struct ExtentCache {
    watched: AtomicBool,
    read_only: bool,
    // Lock order: a leaf; held for a few instructions.
    memory: Mutex<Memory>,
}

impl ExtentCache {
    pub(super) fn new(read_only: bool) -> Self {
        Self { watched: AtomicBool::new(false), read_only, memory: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// To be called after each change, before it counts as completed.
    #[inline]
    pub(super) fn note_change(&self) {
        if self.watched.load(Ordering::Acquire) {
            self.wipe();
        }
    }

    #[cold]
    fn wipe(&self) {
        let mut memory = self.lock();
        memory.run = None;
        memory.wiped += 1;
        self.watched.store(false, Ordering::Release);
    }

    fn find(&self, at: u64) -> Option<Run> {
        self.lock().run.filter(|r| r.start <= at && at < r.end)
    }

    /// Must come before the file system is asked.
    fn watch(&self) -> u64 {
        let wiped = self.lock().wiped;
        if !self.read_only {
            self.watched.store(true, Ordering::SeqCst);
            // Changes that end from here on wipe; those that ended before are seen by the file system.
            fence(Ordering::SeqCst);
        }
        wiped
    }

    fn remember(&self, run: Run, wiped: u64) {
        let mut memory = self.lock();
        if memory.wiped == wiped {
            memory.run = Some(run);
        }
    }
}

impl Inner {
    /// The run at `at`, cut off at `end`.
    pub(super) async fn extent(&self, at: u64, end: u64) -> Result<Extent> {
        let cut = |run: Run| Extent { len: ByteLen::new(run.end.min(end) - at), data: run.data };
        if self.device {
            let len = self.len();
            let inside = at < len;
            let stop = if inside { len } else { u64::MAX };
            return Ok(cut(Run { start: at, end: stop, data: inside }));
        }
        if let Some(run) = self.extents.find(at) {
            return Ok(cut(run));
        }
        let wiped = self.extents.watch();
        let file = self.file.clone();
        let found = fs::blocking(move || seek_run(file.as_fd(), at)).await;
        let run = found.map_err(|e| {
            Error::io(format!("cannot find holes and data of '{}' at {at:#x}", self.name), e.into())
        })?;
        self.extents.remember(run, wiped);
        Ok(cut(run))
    }
}

/// Asks the file system. Everything beyond the end is hole; file systems that don't tell have data only.
fn seek_run(fd: BorrowedFd<'_>, at: u64) -> Result<Run, Errno> {
    let start = at;
    let data = match rustix::fs::seek(fd, SeekFrom::Data(at)) {
        Ok(data) => data,
        Err(Errno::NXIO) => return Ok(Run { start, end: u64::MAX, data: false }),
        Err(Errno::INVAL | Errno::OPNOTSUPP) => {
            let len = rustix::fs::fstat(fd)?.st_size.unsigned_abs();
            let inside = at < len;
            return Ok(Run { start, end: if inside { len } else { u64::MAX }, data: inside });
        }
        Err(e) => return Err(e),
    };
    if data > at {
        return Ok(Run { start, end: data, data: false });
    }
    match rustix::fs::seek(fd, SeekFrom::Hole(at)) {
        Ok(hole) if hole > at => Ok(Run { start, end: hole, data: true }),
        // The file was cut off between the two questions.
        Ok(_) | Err(Errno::NXIO) => Ok(Run { start, end: at + 1, data: true }),
        Err(e) => Err(e),
    }
}
