//! What other threads may do to a runtime: wake its tasks, send it closures, hand in results.
//!
//! Callers: [`Handle`] for users, [`crate::task`] for wakers, [`crate::threads`] for the pool's results.
//! Invariant: whoever adds something sets `pending` and then looks at `sleeping`; the owner sets `sleeping` and then
//! looks at `pending`. Both in sequentially consistent order, so that one of the two always sees the other.

use crate::executor;
use crate::task::Header;
use rustix::event::EventfdFlags;
use std::future::Future;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A closure for the runtime's thread.
pub(crate) type Post = Box<dyn FnOnce() + Send>;

/// What has come in since the owner last looked.
#[derive(Default)]
pub(crate) struct Incoming {
    pub posts: Vec<Post>,
    pub wakes: Vec<Arc<Header>>,
    /// Results of the thread pool: user data and result.
    pub completions: Vec<(u64, i32)>,
    /// Slots of registered files whose last reference is gone.
    pub released: Vec<u32>,
    closed: bool,
}

/// The part of a runtime that all threads see.
pub(crate) struct Shared {
    /// Taken alone; held for a few instructions.
    incoming: Mutex<Incoming>,
    pending: AtomicBool,
    sleeping: AtomicBool,
    closed: AtomicBool,
    wake_fd: OwnedFd,
}

impl Shared {
    pub(crate) fn new() -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            incoming: Mutex::new(Incoming::default()),
            pending: AtomicBool::new(false),
            sleeping: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            wake_fd: rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?,
        }))
    }

    fn lock(&self) -> MutexGuard<'_, Incoming> {
        self.incoming.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds something and wakes the owner. Does nothing when the runtime has ended.
    fn add(&self, f: impl FnOnce(&mut Incoming)) {
        {
            let mut incoming = self.lock();
            if incoming.closed {
                drop(incoming);
                return; // `f`, with what it carries, is dropped outside of the lock.
            }
            f(&mut incoming);
        }
        self.pending.store(true, Ordering::SeqCst);
        if self.sleeping.load(Ordering::SeqCst) && self.sleeping.swap(false, Ordering::SeqCst) {
            self.ring_bell();
        }
    }

    /// Makes the eventfd readable.
    pub(crate) fn ring_bell(&self) {
        // It fails only when the counter is full, and then the owner is being woken already.
        let _ = rustix::io::write(&self.wake_fd, &1u64.to_ne_bytes());
    }

    pub(crate) fn post(&self, post: Post) {
        self.add(move |i| i.posts.push(post));
    }

    pub(crate) fn wake(&self, task: Arc<Header>) {
        self.add(move |i| i.wakes.push(task));
    }

    pub(crate) fn complete(&self, user_data: u64, result: i32) {
        self.add(move |i| i.completions.push((user_data, result)));
    }

    pub(crate) fn release(&self, slot: u32) {
        self.add(move |i| i.released.push(slot));
    }

    /// True when there may be something to take.
    #[inline]
    pub(crate) fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    /// Takes all that came in.
    pub(crate) fn take(&self) -> Incoming {
        // Cleared before the lock: what is added after it sets the flag again.
        self.pending.store(false, Ordering::SeqCst);
        let mut incoming = self.lock();
        let closed = incoming.closed;
        std::mem::replace(&mut *incoming, Incoming { closed, ..Incoming::default() })
    }

    /// Announces sleep. False when something came in, so that there must be none.
    pub(crate) fn try_sleep(&self) -> bool {
        self.sleeping.store(true, Ordering::SeqCst);
        if self.pending.load(Ordering::SeqCst) {
            self.awake();
            return false;
        }
        true
    }

    /// Ends what [`Self::try_sleep`] announced.
    pub(crate) fn awake(&self) {
        self.sleeping.store(false, Ordering::SeqCst);
    }

    pub(crate) fn wake_fd(&self) -> RawFd {
        self.wake_fd.as_raw_fd()
    }

    /// Refuses everything from now on but results of the pool, which are waited for.
    pub(crate) fn close(&self) -> Incoming {
        self.closed.store(true, Ordering::Release);
        self.take()
    }

    /// Refuses results as well.
    pub(crate) fn seal(&self) -> Incoming {
        self.lock().closed = true;
        self.take()
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }
}

/// A reference to a thread's runtime that any thread may use.
///
/// It does not keep the runtime alive: once that has ended, what is sent is dropped.
#[derive(Clone)]
pub struct Handle(pub(crate) Arc<Shared>);

impl Handle {
    /// Runs `f` on the runtime's thread, soon. Closures of one sender run in the order they were sent.
    pub fn post(&self, f: impl FnOnce() + Send + 'static) {
        if !self.0.is_closed() {
            self.0.post(Box::new(f));
        }
    }

    /// Makes a future on the runtime's thread, and runs it there as a task.
    pub fn spawn<F, Fut>(&self, make: F)
    where
        F: FnOnce() -> Fut + Send + 'static,
        Fut: Future<Output = ()> + 'static,
    {
        self.post(move || executor::spawn(make()));
    }

    /// True when the runtime has ended.
    pub fn is_closed(&self) -> bool {
        self.0.is_closed()
    }
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.is_closed() { "Handle(ended)" } else { "Handle" })
    }
}
