//! The executor: one thread's rounds of I/O, timers, messages and tasks.
//!
//! Invariant: no `RefCell` in here is borrowed while a future, a posted closure, a waker or the drop of any of
//! them runs, since they may call back into the runtime.

use crate::config::{Config, Idle, Wait};
use crate::file::File;
use crate::io::{DirectOp, Io};
use crate::ops::{Leftovers, Request};
use crate::remote::{Handle, Incoming, Shared};
use crate::spin::Spin;
use crate::task::{Header, LocalFuture, Tasks};
use crate::timers::Timers;
use bedplate_types::{Error, ErrorKind, HostOffset, Result};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

thread_local! {
    static CURRENT: RefCell<Option<Rc<Inner>>> = const { RefCell::new(None) };
}

/// With more transfers in flight than this, sleeping in the ring beats looking for work in a loop: the device may
/// need the core.
const SPIN_MAX_IN_FLIGHT: usize = 2;
/// How often work is looked for between two looks at the clock.
const SPINS_PER_CLOCK: u32 = 16;

/// The runtime of a thread, as its futures know it.
pub(crate) struct Inner {
    pub(crate) shared: Arc<Shared>,
    pub(crate) timers: RefCell<Timers>,
    io: RefCell<Io>,
    ready: RefCell<VecDeque<Arc<Header>>>,
    tasks: RefCell<Tasks>,
    spin: Spin,
    closed: Cell<bool>,
}

/// What became of an operation.
pub(crate) enum Start {
    /// It is in flight, at this place.
    Started(u32),
    /// It is over, with this result.
    Done(i32),
}

/// A thread's runtime. There is at most one on a thread at a time, and it never leaves it.
///
/// Dropping it drops its tasks, and waits for the transfers in flight.
pub struct Runtime {
    inner: Rc<Inner>,
}

impl Runtime {
    /// Makes the runtime of this thread.
    ///
    /// # Errors
    /// `InvalidInput` when the thread has one; with [`crate::Backend::Uring`] also `Unsupported`, `Denied` or `Limit`
    /// when the system gives no io_uring.
    pub fn new(config: Config) -> Result<Self> {
        if current().is_some() {
            let text = "this thread has a runtime already";
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        let shared = Shared::new()
            .map_err(|e| Error::io("cannot make the eventfd that wakes a thread", e))?;
        let io = Io::new(&config, &shared)?;
        let spin = if io.is_uring() { config.spin } else { Duration::ZERO };
        let inner = Rc::new(Inner {
            shared,
            timers: RefCell::default(),
            io: RefCell::new(io),
            ready: RefCell::default(),
            tasks: RefCell::default(),
            spin: Spin::new(spin),
            closed: Cell::new(false),
        });
        CURRENT.with(|c| *c.borrow_mut() = Some(inner.clone()));
        Ok(Self { inner })
    }

    /// A reference for other threads.
    pub fn handle(&self) -> Handle {
        Handle(self.inner.shared.clone())
    }

    /// Runs everything on this thread until `future` is done.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        let mut future = pin!(future);
        let header = Header::new(None, self.inner.shared.clone());
        let waker = Waker::from(header.clone());
        loop {
            if header.due.swap(false, Ordering::AcqRel)
                && let Poll::Ready(out) = future.as_mut().poll(&mut Context::from_waker(&waker))
            {
                return out;
            }
            self.turn(Wait::Forever);
        }
    }

    /// Runs `future` as a task of this thread.
    pub fn spawn(&self, future: impl Future<Output = ()> + 'static) {
        self.inner.spawn(Box::pin(future));
    }

    /// One round: hands over I/O, takes completions, runs messages, timers and ready tasks. When there is nothing
    /// to do it first sleeps as `wait` allows. True when anything happened.
    pub fn turn(&self, wait: Wait) -> bool {
        self.inner.turn(wait, &mut |_| false)
    }

    /// As [`Self::turn`], for a caller with work of its own that no completion announces, such as a ring in guest
    /// memory. `poll` is asked for it before sleeping, as [`Idle`] says; true ends the wait.
    pub fn turn_polling(&self, wait: Wait, poll: &mut dyn FnMut(Idle) -> bool) -> bool {
        self.inner.turn(wait, poll)
    }

    /// Transfers, syncs and the like that are started and not complete. Waits for descriptors don't count.
    pub fn in_flight(&self) -> usize {
        self.inner.io.borrow().transfers()
    }

    /// True when I/O goes through io_uring, false when a pool of threads does it.
    pub fn is_uring(&self) -> bool {
        self.inner.io.borrow().is_uring()
    }

    /// Starts a transfer without a future or an allocation; its completion comes out of [`Self::take_direct`] with
    /// `token`. It goes to the kernel with the next [`Self::turn`]. False when there is no room: take a turn and
    /// try again.
    ///
    /// # Safety
    /// `iov` must point to `n` (at most 1024) segments. They and all memory they name must stay valid (for a read:
    /// for writing) until the completion with this token has been taken, or the runtime has been dropped.
    #[inline]
    pub unsafe fn submit_direct(
        &self,
        op: DirectOp,
        file: &Arc<File>,
        iov: *const libc::iovec,
        n: u32,
        at: HostOffset,
        token: u64,
    ) -> bool {
        // SAFETY: the caller's promise.
        unsafe { self.inner.io.borrow_mut().direct(op, file, iov, n, at.get(), token) }
    }

    /// Adds the completions of direct transfers that past turns have seen to `out`: token, and bytes moved or a
    /// negative error number.
    #[inline]
    pub fn take_direct(&self, out: &mut Vec<(u64, i32)>) {
        self.inner.io.borrow_mut().take_direct(out);
    }

    #[cfg(test)]
    pub(crate) fn ring_entries(&self) -> u32 {
        self.inner.io.borrow().ring_entries()
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        self.inner.end();
        // The last reference may go here; not while `CURRENT` is borrowed.
        let last = CURRENT.try_with(|c| c.borrow_mut().take());
        drop(last);
    }
}

impl std::fmt::Debug for Runtime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Runtime({} in flight)", self.in_flight())
    }
}

impl Inner {
    fn turn(&self, wait: Wait, poll: &mut dyn FnMut(Idle) -> bool) -> bool {
        let mut io = self.io.borrow_mut();
        let mut any = io.has_staged() && io.run_staged();
        drop(io);
        let limit = match wait {
            _ if any => None,
            Wait::No => None,
            Wait::Forever => self.sleep_limit(None),
            Wait::For(time) => self.sleep_limit(Some(time)),
        };
        match limit {
            Some(limit) if !self.has_work() => self.idle(limit, poll),
            _ => {}
        }
        let mut io = self.io.borrow_mut();
        io.submit();
        any |= io.reap();
        let left = io.leftovers();
        drop(io);
        if let Some(left) = left {
            wake_all(left);
        }
        any |= self.shared.is_pending() && self.run_incoming(self.shared.take());
        any |= self.run_timers();
        any | self.run_ready()
    }

    /// How long a sleep may be, given the timers: `None` not at all, `Some(None)` for ever.
    fn sleep_limit(&self, wait: Option<Duration>) -> Option<Option<Duration>> {
        let Some(deadline) = self.timers.borrow().next_deadline() else { return Some(wait) };
        let left = deadline.checked_duration_since(Instant::now()).filter(|l| !l.is_zero())?;
        Some(Some(wait.map_or(left, |w| w.min(left))))
    }

    /// True when the caller's own code has given this thread something to do.
    fn has_new_work(&self) -> bool {
        !self.ready.borrow().is_empty() || self.io.borrow().has_staged()
    }

    #[inline]
    fn has_work(&self) -> bool {
        self.shared.is_pending()
            || !self.ready.borrow().is_empty()
            || self.io.borrow_mut().has_events()
    }

    /// Looks for work for a while, then sleeps until there is some.
    fn idle(&self, limit: Option<Duration>, poll: &mut dyn FnMut(Idle) -> bool) {
        let begin = self.spin.enabled().then(Instant::now);
        if let Some(begin) = begin
            && self.spin(begin, limit, poll)
        {
            return;
        }
        if poll(Idle::Sleeping) || self.has_new_work() || !self.shared.try_sleep() {
            return;
        }
        let limit = match (limit, begin) {
            (Some(l), Some(b)) => Some(l.saturating_sub(b.elapsed())),
            (l, _) => l,
        };
        self.io.borrow_mut().sleep(limit);
        self.shared.awake();
        if let Some(begin) = begin {
            self.spin.slept(begin.elapsed());
        }
    }

    /// True when looking in a loop found work.
    fn spin(
        &self,
        begin: Instant,
        limit: Option<Duration>,
        poll: &mut dyn FnMut(Idle) -> bool,
    ) -> bool {
        let window = self.spin.window().min(limit.unwrap_or(Duration::MAX));
        if window.is_zero() {
            return false;
        }
        let mut io = self.io.borrow_mut();
        if io.transfers() > SPIN_MAX_IN_FLIGHT {
            return false;
        }
        io.submit();
        drop(io);
        loop {
            for _ in 0..SPINS_PER_CLOCK {
                if self.has_work() || poll(Idle::Spinning) {
                    return true;
                }
                std::hint::spin_loop();
            }
            if begin.elapsed() >= window {
                return false;
            }
            // Whoever makes the work that is looked for may need this core.
            std::thread::yield_now();
        }
    }

    /// Handles what other threads have sent.
    fn run_incoming(&self, incoming: Incoming) -> bool {
        let Incoming { posts, wakes, completions, released, .. } = incoming;
        let any = !(posts.is_empty() && wakes.is_empty() && completions.is_empty());
        if !completions.is_empty() || !released.is_empty() {
            let mut io = self.io.borrow_mut();
            for (data, result) in completions {
                io.complete(data, result);
            }
            released.into_iter().for_each(|slot| io.release(slot));
            let left = io.leftovers();
            drop(io);
            if let Some(left) = left {
                wake_all(left);
            }
        }
        self.ready.borrow_mut().extend(wakes);
        posts.into_iter().for_each(|post| post());
        any
    }

    fn run_timers(&self) -> bool {
        let mut now = None;
        let mut any = false;
        loop {
            let mut timers = self.timers.borrow_mut();
            if timers.next_deadline().is_none() {
                return any;
            }
            let due = timers.pop_due(*now.get_or_insert_with(Instant::now));
            drop(timers);
            match due {
                Some(waker) => waker.wake(),
                None => return any,
            }
            any = true;
        }
    }

    /// Polls the tasks that are ready now; those they wake have their turn in the next round.
    fn run_ready(&self) -> bool {
        let n = self.ready.borrow().len();
        for _ in 0..n {
            let Some(header) = self.ready.borrow_mut().pop_front() else { break };
            self.run_task(header);
        }
        n > 0
    }

    fn run_task(&self, header: Arc<Header>) {
        header.unqueue();
        if header.slot.is_none() {
            header.due.store(true, Ordering::Release);
            return;
        }
        let Some(mut future) = self.tasks.borrow_mut().take(&header) else { return };
        let waker = Waker::from(header.clone());
        if future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
            self.tasks.borrow_mut().remove(&header);
            return;
        }
        let homeless = self.tasks.borrow_mut().put_back(&header, future);
        drop(homeless); // outside of the borrow
    }

    fn spawn(&self, future: LocalFuture) {
        if self.closed.get() {
            return;
        }
        let header = self.tasks.borrow_mut().add(&self.shared, future);
        if header.enqueue() {
            self.ready.borrow_mut().push_back(header);
        }
    }

    /// Starts an operation, or does it at once.
    pub(crate) fn start_op(&self, request: Box<Request>, waker: &Waker) -> Start {
        if self.closed.get() {
            return Start::Done(-libc::ECANCELED);
        }
        let mut io = self.io.borrow_mut();
        let result = io.run_now(&request);
        let start = match result {
            Some(result) => Start::Done(result),
            None => return Start::Started(io.start_op(request, waker.clone())),
        };
        drop(io); // before the request, whose memory may have an owner of any kind
        start
    }

    /// The result of an operation, if it is there; else `waker` is woken when it is.
    pub(crate) fn poll_op(&self, i: u32, waker: &Waker) -> Option<i32> {
        self.io.borrow_mut().poll_op(i, waker)
    }

    /// The future of an operation is gone.
    pub(crate) fn abandon_op(&self, i: u32) {
        let waker = self.io.borrow_mut().abandon_op(i);
        drop(waker); // outside of the borrow
    }

    /// Drops all tasks and waits for what is in flight, whose memory the kernel may still write to.
    fn end(&self) {
        self.closed.set(true);
        self.run_last(self.shared.close());
        loop {
            let futures = self.tasks.borrow_mut().take_all();
            let ready = std::mem::take(&mut *self.ready.borrow_mut());
            if futures.is_empty() && ready.is_empty() {
                break;
            }
            drop((futures, ready));
        }
        let mut io = self.io.borrow_mut();
        io.run_staged();
        io.cancel_polls();
        drop(io);
        while self.io.borrow().is_busy() {
            let mut io = self.io.borrow_mut();
            if io.only_bell_is_out() {
                self.shared.ring_bell(); // ends the read of the eventfd
            }
            // Results of the pool ring the bell only for sleepers.
            if self.shared.try_sleep() {
                io.sleep(None);
                self.shared.awake();
            }
            io.reap();
            let left = io.leftovers();
            drop(io);
            left.into_iter().for_each(wake_all);
            self.run_last(self.shared.take());
        }
        self.io.borrow_mut().end();
        drop(self.shared.seal());
    }

    /// Handles what other threads have sent to a runtime that is ending: results count, closures don't.
    fn run_last(&self, mut incoming: Incoming) {
        drop(std::mem::take(&mut incoming.posts));
        self.run_incoming(incoming);
    }
}

/// Wakes and drops what completions have left.
fn wake_all(left: Leftovers) {
    drop((left.requests, left.files));
    left.wakers.into_iter().for_each(Waker::wake);
}

/// The runtime of this thread.
pub(crate) fn current() -> Option<Rc<Inner>> {
    CURRENT.try_with(|c| c.borrow().clone()).ok().flatten()
}

/// The runtime of this thread, for calls that are an error of the program without one.
pub(crate) fn expect_current(what: &str) -> Rc<Inner> {
    current().unwrap_or_else(|| panic!("{what} was called on a thread without a runtime"))
}

/// Calls `f` with this thread's runtime if it is the one of `shared`.
fn if_here<T>(shared: &Arc<Shared>, f: impl FnOnce(&Inner) -> T) -> Option<T> {
    let call = |c: &RefCell<Option<Rc<Inner>>>| match &*c.borrow() {
        Some(inner) if Arc::ptr_eq(&inner.shared, shared) => Some(f(inner)),
        _ => None,
    };
    CURRENT.try_with(call).ok().flatten()
}

/// Queues a task of this thread; false when it is another's.
pub(crate) fn wake_here(header: &Arc<Header>) -> bool {
    let queue = |inner: &Inner| inner.ready.borrow_mut().push_back(header.clone());
    if_here(&header.shared, queue).is_some()
}

/// Takes a dropped file out of the table of this thread's ring; false when it is another's, or it can't be done
/// at the moment.
pub(crate) fn release_here(shared: &Arc<Shared>, slot: u32) -> bool {
    let release = |inner: &Inner| match inner.io.try_borrow_mut() {
        Ok(mut io) => {
            io.release(slot);
            true
        }
        Err(_) => false,
    };
    if_here(shared, release).unwrap_or(false)
}

/// A handle of this thread's runtime, if it has one.
pub fn handle() -> Option<Handle> {
    current().map(|inner| Handle(inner.shared.clone()))
}

/// Runs `future` as a task of this thread's runtime.
///
/// # Panics
/// On a thread without a runtime.
pub fn spawn(future: impl Future<Output = ()> + 'static) {
    expect_current("spawn").spawn(Box::pin(future));
}
