//! The I/O side of a runtime: the backend, the operations that have futures, and the transfers of the hot path.
//!
//! Callers: [`crate::executor`], which holds it in one `RefCell` and never borrows it while foreign code runs.

use crate::config::{Backend, Config};
use crate::file::File;
use crate::helper::Helper;
use crate::inline::{Inline, QUICK, Timed};
use crate::ops::{Leftovers, OpTable, Request};
use crate::remote::Shared;
use crate::ring::Ring;
use crate::threads::{self, Threads};
use bedplate_types::Result;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

/// The direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirectOp {
    /// From the file to memory.
    Read,
    /// From memory to the file.
    Write,
}

/// The most segments that one transfer takes (IOV_MAX).
pub(crate) const MAX_SEGMENTS: usize = 1024;
/// The most bytes that Linux moves in one transfer.
pub(crate) const MAX_TRANSFER: usize = 0x7fff_f000;

/// How completions find their way: two bits of kind, the rest an index.
pub(crate) mod user_data {
    /// The read of the eventfd through which other threads wake this one.
    pub(crate) const BELL: u64 = 2;
    /// Nobody wants to know.
    pub(crate) const IGNORED: u64 = 3;
    const KIND_BITS: u32 = 2;
    const OP: u64 = 1;

    /// A transfer of the hot path.
    pub(crate) fn direct(i: u32) -> u64 {
        u64::from(i) << KIND_BITS
    }

    /// An operation with a future.
    pub(crate) fn op(i: u32) -> u64 {
        u64::from(i) << KIND_BITS | OP
    }

    /// The index, and whether it is that of an operation with a future.
    pub(crate) fn split(data: u64) -> (bool, u32) {
        (data & OP != 0, (data >> KIND_BITS) as u32)
    }
}

enum Engine {
    Uring(Box<Ring>),
    Threads(Threads),
}

/// A transfer of the hot path in flight.
struct Direct {
    token: u64,
    /// Keeps the file open where the ring does not.
    file: Option<Arc<File>>,
}

/// A transfer of the hot path that found nothing else in flight. It waits for company until the next round: what is
/// still alone then may be done in line.
struct Staged {
    op: DirectOp,
    file: Arc<File>,
    iov: *const libc::iovec,
    n: u32,
    at: u64,
    place: u32,
}

/// Everything that has to do with I/O.
pub(crate) struct Io {
    engine: Engine,
    ops: OpTable,
    direct: Vec<Direct>,
    direct_free: Vec<u32>,
    direct_done: Vec<(u64, i32)>,
    staged: Option<Staged>,
    /// Lone transfers of the hot path, and writes of the slow road.
    lone: Inline,
    slow_writes: Inline,
    helper: Helper,
    /// Bound of transfers of the hot path in flight for the thread backend, which has no ring to be full.
    max_direct: usize,
    left: Leftovers,
}

impl Io {
    pub(crate) fn new(config: &Config, shared: &Arc<Shared>) -> Result<Self> {
        let engine = match config.backend {
            Backend::Threads => Engine::Threads(Threads::new(shared)),
            Backend::Uring => Engine::Uring(Box::new(Ring::new(config.entries, shared)?)),
            Backend::Auto => match Ring::new(config.entries, shared) {
                Ok(ring) => Engine::Uring(Box::new(ring)),
                Err(e) => {
                    tracing::warn!("I/O uses a pool of threads, which is slower: {e:#}");
                    Engine::Threads(Threads::new(shared))
                }
            },
        };
        Ok(Self {
            engine,
            ops: OpTable::default(),
            direct: Vec::new(),
            direct_free: Vec::new(),
            direct_done: Vec::new(),
            staged: None,
            lone: Inline::new(),
            slow_writes: Inline::new(),
            helper: Helper::new(shared),
            max_direct: config.entries.max(2) as usize,
            left: Leftovers::default(),
        })
    }

    /// True when this is the io_uring backend.
    pub(crate) fn is_uring(&self) -> bool {
        matches!(self.engine, Engine::Uring(_))
    }

    /// The size of the submission ring.
    #[cfg(test)]
    pub(crate) fn ring_entries(&self) -> u32 {
        match &self.engine {
            Engine::Uring(ring) => ring.entries(),
            Engine::Threads(_) => self.max_direct as u32,
        }
    }

    /// Transfers, syncs and the like in flight; waits for descriptors don't count.
    pub(crate) fn transfers(&self) -> usize {
        self.direct_in_flight() + self.ops.transfers()
    }

    fn direct_in_flight(&self) -> usize {
        self.direct.len() - self.direct_free.len()
    }

    /// True while anything at all is in flight.
    pub(crate) fn is_busy(&self) -> bool {
        let bell = matches!(&self.engine, Engine::Uring(r) if r.bell_armed());
        bell || !self.only_bell_is_out()
    }

    /// True when nothing is in flight, except perhaps for the read of the eventfd.
    pub(crate) fn only_bell_is_out(&self) -> bool {
        self.direct_in_flight() + self.ops.in_flight() == 0
    }

    /// True when a round would find something without waiting.
    #[inline]
    pub(crate) fn has_events(&mut self) -> bool {
        self.has_staged()
            || match &mut self.engine {
                Engine::Uring(ring) => ring.has_events(),
                Engine::Threads(threads) => threads.has_events(),
            }
    }

    /// Hands over what waits for the system.
    pub(crate) fn submit(&mut self) {
        match &mut self.engine {
            Engine::Uring(ring) => ring.submit(),
            Engine::Threads(threads) => threads.poll(Some(Duration::ZERO)),
        }
    }

    /// As [`Self::submit`], and sleeps until something happens.
    pub(crate) fn sleep(&mut self, limit: Option<Duration>) {
        let in_flight = self.transfers();
        match &mut self.engine {
            Engine::Uring(ring) => ring.submit_and_wait(limit, in_flight),
            Engine::Threads(threads) => threads.poll(limit),
        }
    }

    /// Takes completions. What they leave to be woken and dropped is in [`Self::leftovers`] then.
    pub(crate) fn reap(&mut self) -> bool {
        let Self { engine, ops, direct, direct_free, direct_done, left, .. } = self;
        let each = |data, result| {
            let (is_op, i) = user_data::split(data);
            if is_op {
                ops.complete(i, result, left);
            } else if let Some(d) = direct.get_mut(i as usize) {
                direct_done.push((d.token, result));
                direct_free.push(i);
                left.files.extend(d.file.take());
            }
        };
        match engine {
            Engine::Uring(ring) => ring.reap(each),
            Engine::Threads(threads) => threads.reap(each),
        }
    }

    /// Records a result that came from the thread pool.
    pub(crate) fn complete(&mut self, data: u64, result: i32) {
        let (is_op, i) = user_data::split(data);
        if is_op {
            self.helper.done(i);
            self.ops.complete(i, result, &mut self.left);
        } else if let Some(d) = self.direct.get_mut(i as usize) {
            self.direct_done.push((d.token, result));
            self.direct_free.push(i);
            self.left.files.extend(d.file.take());
        }
    }

    /// What completions have left; to be woken and dropped when nothing is borrowed.
    #[inline]
    pub(crate) fn leftovers(&mut self) -> Option<Leftovers> {
        let l = &self.left;
        if l.wakers.is_empty() && l.requests.is_empty() && l.files.is_empty() {
            return None;
        }
        Some(std::mem::take(&mut self.left))
    }

    /// Starts a transfer of the hot path; false when there is no room.
    ///
    /// # Safety
    /// The list and the memory it names must stay valid until the completion.
    #[inline]
    pub(crate) unsafe fn direct(
        &mut self,
        op: DirectOp,
        file: &Arc<File>,
        iov: *const libc::iovec,
        n: u32,
        at: u64,
        token: u64,
    ) -> bool {
        if self.staged.is_some() && !self.submit_staged() {
            return false;
        }
        let alone = self.transfers() == 0;
        let place = match self.direct_free.last() {
            Some(i) => *i,
            None => self.more_places(),
        };
        if alone {
            self.staged = Some(Staged { op, file: file.clone(), iov, n, at, place });
        // SAFETY: the caller's promise.
        } else if !unsafe { self.start_direct(op, file, iov, n, at, place) } {
            return false;
        }
        self.direct_free.pop();
        self.direct[place as usize].token = token;
        true
    }

    #[cold]
    fn more_places(&mut self) -> u32 {
        self.direct.push(Direct { token: 0, file: None });
        let i = (self.direct.len() - 1) as u32;
        self.direct_free.push(i);
        i
    }

    /// Hands a transfer of the hot path to the backend; false when there is no room.
    ///
    /// # Safety
    /// As for [`Self::direct`].
    #[inline]
    unsafe fn start_direct(
        &mut self,
        op: DirectOp,
        file: &Arc<File>,
        iov: *const libc::iovec,
        n: u32,
        at: u64,
        place: u32,
    ) -> bool {
        let data = user_data::direct(place);
        let busy = self.direct_in_flight();
        match &mut self.engine {
            Engine::Uring(ring) => {
                // SAFETY: the caller's promise.
                match unsafe { ring.direct(op, file, iov, n, at, data) } {
                    Some(true) => {}
                    Some(false) => self.direct[place as usize].file = Some(file.clone()),
                    None => return false,
                }
            }
            Engine::Threads(_) if busy >= self.max_direct => return false,
            Engine::Threads(threads) => {
                // SAFETY: the caller's promise.
                unsafe { threads.transfer(op, file, iov, n as usize, at, data) };
            }
        }
        true
    }

    /// Hands over the transfer that waits for company; false when there is no room.
    fn submit_staged(&mut self) -> bool {
        let Some(s) = self.staged.take() else { return true };
        // SAFETY: whoever gave it vouched for the memory until its completion.
        if unsafe { self.start_direct(s.op, &s.file, s.iov, s.n, s.at, s.place) } {
            self.left.files.push(s.file);
            return true;
        }
        self.staged = Some(s);
        false
    }

    /// Does the transfer that has stayed alone, or hands it over. True when it is complete.
    #[cold]
    pub(crate) fn run_staged(&mut self) -> bool {
        let lone = self.transfers() == 1;
        let try_it = |s: &Staged| lone && self.lone.worth(s.file.id());
        if !self.staged.as_ref().is_some_and(try_it) {
            self.submit_staged();
            return false;
        }
        let Some(s) = self.staged.take() else { return false };
        let begin = Instant::now();
        let n = (s.n as usize).min(MAX_SEGMENTS);
        // SAFETY: whoever gave it vouched for the memory until its completion.
        let result = unsafe { threads::transfer_now(s.op, &s.file, s.iov, n, s.at) };
        self.lone.learn(s.file.id(), begin.elapsed() <= QUICK);
        self.complete(user_data::direct(s.place), result);
        self.left.files.push(s.file);
        true
    }

    /// True when a transfer waits for company.
    #[inline]
    pub(crate) fn has_staged(&self) -> bool {
        self.staged.is_some()
    }

    /// Moves the results of the hot path that are there to `out`.
    #[inline]
    pub(crate) fn take_direct(&mut self, out: &mut Vec<(u64, i32)>) {
        out.append(&mut self.direct_done);
    }

    /// Does a write of the slow road at once, where that is better than to hand it over.
    pub(crate) fn run_now(&mut self, request: &Request) -> Option<i32> {
        let Request::Transfer { op: DirectOp::Write, file, buf, at } = request else { return None };
        if !self.is_uring() || !self.slow_writes.worth(file.id()) {
            return None;
        }
        let (iov, n) = buf.as_iovecs();
        if self.helper.wants(file.id(), buf.len()) {
            return None;
        }
        let time = Timed::begin();
        // SAFETY: the list is the request's, which owns the memory too.
        let result =
            unsafe { threads::transfer_now(DirectOp::Write, file, iov, n.min(MAX_SEGMENTS), *at) };
        self.slow_writes.learn(file.id(), time.was_work());
        self.helper.company();
        Some(result)
    }

    /// Starts an operation; returns its place.
    pub(crate) fn start_op(&mut self, request: Box<Request>, waker: Waker) -> u32 {
        let i = self.ops.add(request, waker);
        if let Some(request) = self.ops.request(i) {
            let data = user_data::op(i);
            match &mut self.engine {
                // SAFETY: the table keeps the boxed request untouched until its completion.
                _ if self.helper.takes(i) => unsafe { self.helper.pool.start(request, data) },
                // SAFETY: the table keeps the boxed request untouched until its completion.
                Engine::Uring(ring) => unsafe { ring.start(request, data) },
                // SAFETY: as above.
                Engine::Threads(threads) => unsafe { threads.start(request, data) },
            }
        }
        i
    }

    pub(crate) fn poll_op(&mut self, i: u32, waker: &Waker) -> Option<i32> {
        self.ops.poll(i, waker)
    }

    /// Nobody waits for this operation any more. Gives back its waker, to be dropped outside.
    pub(crate) fn abandon_op(&mut self, i: u32) -> Option<Waker> {
        let (cancel, waker) = self.ops.abandon(i);
        if cancel {
            self.cancel(i);
        }
        waker
    }

    fn cancel(&mut self, i: u32) {
        match &mut self.engine {
            Engine::Uring(ring) => ring.cancel(user_data::op(i)),
            Engine::Threads(threads) => threads.cancel(user_data::op(i)),
        }
    }

    /// Cancels all waits for descriptors.
    pub(crate) fn cancel_polls(&mut self) {
        for i in self.ops.polls() {
            self.cancel(i);
        }
    }

    /// Takes a file out of the ring's table.
    pub(crate) fn release(&mut self, slot: u32) {
        if let Engine::Uring(ring) = &mut self.engine {
            ring.release(slot);
        }
    }

    /// Lets go of everything that the kernel holds for this runtime.
    pub(crate) fn end(&mut self) {
        if let Engine::Uring(ring) = &mut self.engine {
            ring.end();
        }
    }
}
