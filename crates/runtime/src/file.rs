//! An open file or device that rings may have registered.
//!
//! A ring that has registered a file keeps it open inside the kernel. So a file remembers where it is registered,
//! and takes itself out again when it is dropped.

use crate::executor;
use crate::remote::Shared;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Identities are never used twice; zero means "none" in the rings' tables.
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// An open file or device, shared by any number of threads' runtimes.
///
/// Dropping the last reference closes it. When another thread's ring has it registered, the kernel lets go of it
/// a little later, as soon as that thread runs: so release file locks explicitly where that matters.
pub struct File {
    fd: OwnedFd,
    id: u64,
    /// Rings in which the file is registered, with the slot. Taken alone; held for a few instructions.
    rings: Mutex<Vec<(Arc<Shared>, u32)>>,
}

impl File {
    /// Takes over an open file descriptor.
    pub fn new(fd: OwnedFd) -> Arc<Self> {
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        Arc::new(Self { fd, id, rings: Mutex::new(Vec::new()) })
    }

    /// The descriptor, for calls that this crate does not make.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub(crate) fn raw(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Remembers that the ring of `shared` has this file in `slot`.
    pub(crate) fn registered(&self, shared: &Arc<Shared>, slot: u32) {
        let mut rings = self.rings.lock().unwrap_or_else(PoisonError::into_inner);
        // Rings that ended meanwhile have let go of the file by themselves.
        rings.retain(|(s, _)| !s.is_closed());
        rings.push((shared.clone(), slot));
    }
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let rings = self.rings.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (shared, slot) in rings.drain(..) {
            if !executor::release_here(&shared, slot) {
                shared.release(slot);
            }
        }
    }
}

impl std::fmt::Debug for File {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "File(fd {})", self.raw())
    }
}
