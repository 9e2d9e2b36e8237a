//! The io_uring backend: submission with back-pressure, one system call per round, registered files.
//!
//! Callers: [`crate::io`]. Invariants: an entry once accepted is never lost, it waits in `backlog` when the ring is
//! full; user data is given back exactly once for each entry; a slot of the file table is emptied only after all
//! entries that name it have been handed to the kernel, which holds its own reference from then on.

use crate::file::File;
use crate::io::{DirectOp, MAX_TRANSFER, user_data};
use crate::ops::Request;
use crate::remote::Shared;
use crate::setup;
use bedplate_types::Result;
use io_uring::squeue::{Entry, Flags};
use io_uring::types::{Fd, FsyncFlags, Timespec};
use io_uring::{EnterFlags, IoUring, opcode};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

/// Size of the table of registered files.
const FILE_SLOTS: u32 = 256;

/// `struct io_uring_getevents_arg`.
#[repr(C)]
struct GetEventsArg {
    sigmask: u64,
    sigmask_size: u32,
    min_wait_usec: u32,
    timespec: u64,
}

/// `struct io_uring_rsrc_update`, as IORING_(UN)REGISTER_RING_FDS take it.
#[repr(C)]
struct RsrcUpdate {
    offset: u32,
    reserved: u32,
    data: u64,
}

/// With this many transfers in flight several completions are waited for, since each wake-up of a sleeping thread
/// costs about as much as a transfer:
const GATHER_FROM: usize = 16;
/// one for this many transfers,
const GATHER: usize = 4;
/// but not more than this,
const GATHER_MOST: usize = 8;
/// and for no longer than this.
const GATHER_USEC: u32 = 20;

const REGISTER_RING_FDS: libc::c_uint = 20;
const UNREGISTER_RING_FDS: libc::c_uint = 21;
const ENTER_REGISTERED_RING: u32 = 1 << 4;

/// One thread's io_uring.
pub(crate) struct Ring {
    ring: IoUring,
    /// What io_uring_enter is called with: the index of the registered ring, or its descriptor.
    enter_fd: RawFd,
    enter_flags: u32,
    /// Entries that found the ring full.
    backlog: VecDeque<Entry>,
    /// Identities of the registered files; empty when files can't be registered.
    files: Vec<u64>,
    /// Slots to be emptied as soon as the ring has been submitted.
    to_release: Vec<u32>,
    shared: Arc<Shared>,
    /// Where the read of the eventfd puts its counter.
    bell: Box<u64>,
    bell_armed: bool,
    /// The kernel can wait for several completions for a bounded time (Linux 6.12).
    gathers: bool,
    /// The last call found no completion although the kernel had asked for it, and it still asks.
    stale: bool,
}

impl Ring {
    pub(crate) fn new(entries: u32, shared: &Arc<Shared>) -> Result<Self> {
        let ring = setup::open_ring(entries)?;
        let fd = ring.as_raw_fd();
        let files = match ring.submitter().register_files_sparse(FILE_SLOTS) {
            Ok(()) => vec![0; FILE_SLOTS as usize],
            Err(e) => {
                tracing::debug!("files are not registered with the ring: {e}");
                Vec::new()
            }
        };
        let (enter_fd, enter_flags) = match register_ring_fd(fd) {
            Some(index) => (index, ENTER_REGISTERED_RING),
            None => (fd, 0),
        };
        let gathers = ring.params().is_feature_min_timeout();
        Ok(Self {
            ring,
            enter_fd,
            enter_flags,
            backlog: VecDeque::new(),
            files,
            to_release: Vec::new(),
            shared: shared.clone(),
            bell: Box::new(0),
            bell_armed: false,
            gathers,
            stale: false,
        })
    }

    /// How many entries the submission ring has.
    #[cfg(test)]
    pub(crate) fn entries(&self) -> u32 {
        self.ring.params().sq_entries()
    }

    /// True when a call into the kernel would do something.
    #[inline]
    fn needs_enter(&mut self) -> bool {
        let sq = self.ring.submission();
        !sq.is_empty() || sq.taskrun() || sq.cq_overflow()
    }

    /// True when completions are there to be taken, or will be after a call into the kernel.
    #[inline]
    pub(crate) fn has_events(&mut self) -> bool {
        let stale = self.stale;
        let sq = self.ring.submission();
        let flagged = (sq.taskrun() && !stale) || sq.cq_overflow();
        drop(sq);
        flagged || !self.ring.completion().is_empty()
    }

    /// Hands everything to the kernel that waits for it, and lets it post what is complete. One system call, or none.
    pub(crate) fn submit(&mut self) {
        if !self.backlog.is_empty() {
            self.refill();
        }
        if self.needs_enter() {
            self.enter();
            // A worker of the kernel sets the flag after it has queued its work. Where this thread takes the work in
            // between, the flag stays without any, and must not keep the thread from sleeping.
            self.stale = self.ring.submission().taskrun() && self.ring.completion().is_empty();
        }
        if !self.to_release.is_empty() {
            self.release_waiting();
        }
    }

    /// As [`Self::submit`], but sleeps until a completion is there, at most for `limit`. With many transfers in
    /// flight it waits a moment for several.
    pub(crate) fn submit_and_wait(&mut self, limit: Option<Duration>, in_flight: usize) {
        self.arm_bell();
        self.refill();
        if !self.backlog.is_empty() {
            // Without all entries handed over, the completion waited for might never come.
            self.enter();
        } else if self.gathers && in_flight >= GATHER_FROM {
            let wait = (in_flight / GATHER).min(GATHER_MOST) as u32;
            self.enter_waiting(wait, limit, GATHER_USEC);
        } else {
            self.enter_waiting(1, limit, 0);
        }
        self.stale = false;
        if !self.to_release.is_empty() {
            self.release_waiting();
        }
    }

    /// Has the eventfd of other threads read, so that it wakes this one.
    fn arm_bell(&mut self) {
        if self.bell_armed {
            return;
        }
        self.bell_armed = true;
        let entry = opcode::Read::new(Fd(self.shared.wake_fd()), (&raw mut *self.bell).cast(), 8)
            .build()
            .user_data(user_data::BELL);
        // SAFETY: the counter is on the heap, and lives until the ring's end, which waits for this read.
        unsafe { self.push_or_wait(entry) };
    }

    /// True while the read of the eventfd is out.
    pub(crate) fn bell_armed(&self) -> bool {
        self.bell_armed
    }

    /// Moves entries from the backlog to the ring.
    fn refill(&mut self) {
        while let Some(entry) = self.backlog.front() {
            // SAFETY: whoever put the entry into the backlog vouched for its memory until its completion.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                self.backlog.pop_front();
                continue;
            }
            if !self.enter() {
                return;
            }
        }
    }

    /// Puts `entry` into the ring, or behind those that wait for room in it.
    ///
    /// # Safety
    /// Memory that the entry names must stay valid until its completion.
    unsafe fn push_or_wait(&mut self, entry: Entry) {
        // SAFETY: the caller's promise.
        if !self.backlog.is_empty() || !unsafe { self.try_push(&entry) } {
            self.backlog.push_back(entry);
        }
    }

    /// Puts `entry` into the ring; makes room when there is none. False when that fails.
    ///
    /// # Safety
    /// As for [`Self::push_or_wait`].
    #[inline]
    unsafe fn try_push(&mut self, entry: &Entry) -> bool {
        // SAFETY: the caller's promise.
        if unsafe { self.ring.submission().push(entry) }.is_ok() {
            return true;
        }
        self.enter();
        // SAFETY: the caller's promise.
        unsafe { self.ring.submission().push(entry) }.is_ok()
    }

    /// Hands over what is in the ring. True when the kernel took entries.
    fn enter(&mut self) -> bool {
        self.enter_waiting(0, None, 0)
    }

    /// One io_uring_enter, which waits for `wait` completions; after `gather` µs for one. True when the kernel
    /// took entries.
    fn enter_waiting(&mut self, wait: u32, limit: Option<Duration>, gather: u32) -> bool {
        let to_submit = self.ring.submission().len() as u32;
        let time = limit.map(Timespec::from);
        let arg = GetEventsArg {
            sigmask: 0,
            sigmask_size: 0,
            min_wait_usec: gather,
            timespec: time.as_ref().map_or(0, |t| &raw const *t as u64),
        };
        let mut flags = self.enter_flags | EnterFlags::GETEVENTS.bits();
        let (arg_ptr, arg_len) = if time.is_some() || gather > 0 {
            flags |= EnterFlags::EXT_ARG.bits();
            (&raw const arg, size_of::<GetEventsArg>())
        } else {
            (std::ptr::null(), 0)
        };
        // SAFETY: `arg` and the time it points to live through the call; entries were vouched for when pushed.
        let n = unsafe {
            libc::syscall(
                libc::SYS_io_uring_enter,
                self.enter_fd,
                to_submit,
                wait,
                flags,
                arg_ptr,
                arg_len,
            )
        };
        if n >= 0 {
            return n > 0;
        }
        let e = io::Error::last_os_error();
        match e.raw_os_error() {
            // The time is over; a signal came; completions must be taken first (EBUSY); no memory at the
            // moment (EAGAIN): the entries stay in the ring and go with the next round.
            Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN) => {}
            _ => tracing::error!("io_uring_enter failed: {e}"),
        }
        false
    }

    /// Takes the completions that are there.
    #[inline]
    pub(crate) fn reap(&mut self, mut each: impl FnMut(u64, i32)) -> bool {
        let mut any = false;
        for cqe in self.ring.completion() {
            any = true;
            match cqe.user_data() {
                user_data::BELL => self.bell_armed = false,
                user_data::IGNORED => {}
                data => each(data, cqe.result()),
            }
        }
        any
    }

    /// Where the file is in the table, having it registered when there is room; `None` when there is not.
    #[inline]
    fn slot_of(&mut self, file: &File) -> Option<u32> {
        if self.files.is_empty() {
            return None;
        }
        let slot = file.id() as u32 % FILE_SLOTS;
        match self.files[slot as usize] {
            id if id == file.id() => Some(slot),
            0 => self.register(file, slot),
            _ => None,
        }
    }

    #[cold]
    fn register(&mut self, file: &File, slot: u32) -> Option<u32> {
        if let Err(e) = self.ring.submitter().register_files_update(slot, &[file.raw()]) {
            tracing::debug!("cannot register {file:?} with the ring: {e}");
            return None;
        }
        self.files[slot as usize] = file.id();
        file.registered(&self.shared, slot);
        Some(slot)
    }

    /// Takes a file out of the table that is not used any more.
    pub(crate) fn release(&mut self, slot: u32) {
        self.to_release.push(slot);
        if !self.ring.submission().is_empty() {
            self.enter();
        }
        self.release_waiting();
    }

    fn release_waiting(&mut self) {
        if !self.ring.submission().is_empty() {
            return; // An entry may still name a slot.
        }
        for slot in self.to_release.drain(..) {
            if let Err(e) = self.ring.submitter().register_files_update(slot, &[-1]) {
                tracing::warn!("cannot take a closed file out of the ring's table: {e}");
            } else if let Some(id) = self.files.get_mut(slot as usize) {
                *id = 0;
            }
        }
    }

    /// Starts a transfer of the hot path. The second value is true when the file is registered, so that the ring
    /// keeps it open; else the caller must, until the completion. `None` when the ring is full.
    ///
    /// # Safety
    /// The segments, their list, and the memory they name must stay valid until the completion.
    #[inline]
    pub(crate) unsafe fn direct(
        &mut self,
        op: DirectOp,
        file: &File,
        iov: *const libc::iovec,
        n: u32,
        at: u64,
        data: u64,
    ) -> Option<bool> {
        if !self.backlog.is_empty() {
            self.refill();
            if !self.backlog.is_empty() {
                return None;
            }
        }
        let (fd, fixed) = match self.slot_of(file) {
            Some(slot) => (slot as i32, true),
            None => (file.raw(), false),
        };
        // SAFETY: the caller's promise covers the list and its memory.
        let mut entry = unsafe { transfer(op, fd, iov, n, at) }.user_data(data);
        if fixed {
            entry = entry.flags(Flags::FIXED_FILE);
        }
        // SAFETY: as above.
        unsafe { self.try_push(&entry) }.then_some(fixed)
    }

    /// Starts an operation whose request stays where it is until the completion.
    ///
    /// # Safety
    /// `request` must neither move nor be dropped before the completion.
    pub(crate) unsafe fn start(&mut self, request: &Request, data: u64) {
        let (fd, fixed) = match request.file().map(|f| (f, self.slot_of(f))) {
            Some((_, Some(slot))) => (slot as i32, true),
            Some((file, None)) => (file.raw(), false),
            None => (-1, false),
        };
        let entry = match request {
            Request::Transfer { op, buf, at, .. } => {
                let (iov, n) = buf.as_iovecs();
                // SAFETY: the list is part of the request, which owns the memory too.
                unsafe { transfer(*op, fd, iov, n.min(crate::io::MAX_SEGMENTS) as u32, *at) }
            }
            Request::Fsync { data_only, .. } => {
                let flags = if *data_only { FsyncFlags::DATASYNC } else { FsyncFlags::empty() };
                opcode::Fsync::new(Fd(fd)).flags(flags).build()
            }
            Request::Fallocate { mode, at, len, .. } => {
                opcode::Fallocate::new(Fd(fd), *len).offset(*at).mode(*mode).build()
            }
            Request::Poll { fd, events } => {
                opcode::PollAdd::new(Fd(*fd), u32::from(*events as u16)).build()
            }
        };
        let mut entry = entry.user_data(data);
        if fixed {
            entry = entry.flags(Flags::FIXED_FILE);
        }
        // SAFETY: the caller's promise.
        unsafe { self.push_or_wait(entry) };
    }

    /// Asks for the end of an operation; its completion still comes.
    pub(crate) fn cancel(&mut self, data: u64) {
        let entry = opcode::AsyncCancel::new(data).build().user_data(user_data::IGNORED);
        // SAFETY: the entry names no memory.
        unsafe { self.push_or_wait(entry) };
    }

    /// Lets go of all registered files, now rather than when the kernel gets round to it.
    pub(crate) fn end(&mut self) {
        if !self.files.is_empty() {
            self.files.clear();
            if let Err(e) = self.ring.submitter().unregister_files() {
                tracing::debug!("cannot unregister the ring's files: {e}");
            }
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        if self.enter_flags & ENTER_REGISTERED_RING != 0 {
            let update = RsrcUpdate { offset: self.enter_fd as u32, reserved: 0, data: 0 };
            // Fails only when the thread is ending and the kernel has undone it by itself.
            let _ = register_call(self.ring.as_raw_fd(), UNREGISTER_RING_FDS, update);
        }
    }
}

/// A read or write; of one segment without the detour of a list.
///
/// # Safety
/// `iov` must point to `n` segments.
#[inline]
unsafe fn transfer(op: DirectOp, fd: RawFd, iov: *const libc::iovec, n: u32, at: u64) -> Entry {
    if n == 1 {
        // SAFETY: the caller vouches for the list.
        let seg = unsafe { *iov };
        let len = seg.iov_len.min(MAX_TRANSFER) as u32;
        return match op {
            DirectOp::Read => {
                opcode::Read::new(Fd(fd), seg.iov_base.cast(), len).offset(at).build()
            }
            DirectOp::Write => {
                opcode::Write::new(Fd(fd), seg.iov_base.cast_const().cast(), len).offset(at).build()
            }
        };
    }
    match op {
        DirectOp::Read => opcode::Readv::new(Fd(fd), iov, n).offset(at).build(),
        DirectOp::Write => opcode::Writev::new(Fd(fd), iov, n).offset(at).build(),
    }
}

/// Registers the ring with this thread, which spares the kernel a look-up in every call.
fn register_ring_fd(fd: RawFd) -> Option<RawFd> {
    let update = RsrcUpdate { offset: u32::MAX, reserved: 0, data: fd as u64 };
    register_call(fd, REGISTER_RING_FDS, update).map(|u| u.offset as RawFd)
}

fn register_call(fd: RawFd, op: libc::c_uint, mut update: RsrcUpdate) -> Option<RsrcUpdate> {
    // SAFETY: `update` is one valid structure of the kind that both operations take and change.
    let n = unsafe {
        libc::syscall(libc::SYS_io_uring_register, fd, op, &raw mut update, 1 as libc::c_uint)
    };
    (n == 1).then_some(update)
}
