//! Tests of the locks on one thread: futures are polled by hand, so every step is chosen by the test.
//!
//! Interleavings between threads are tried in `tests/interleavings.rs`, which compiles the locks' own files once
//! more; that is why these tests are not inside those files.

mod epochs;
mod flush;
mod others;
mod range;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

/// Remembers being woken.
#[derive(Default)]
struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A future under the test's control.
struct Task<'a, T> {
    future: Pin<Box<dyn Future<Output = T> + 'a>>,
    flag: Arc<Flag>,
}

impl<'a, T> Task<'a, T> {
    fn new(future: impl Future<Output = T> + 'a) -> Self {
        Self { future: Box::pin(future), flag: Arc::default() }
    }

    /// Polls once, with a waker that replaces the one before.
    fn poll(&mut self) -> Option<T> {
        self.flag = Arc::default();
        match self.future.as_mut().poll(&mut Context::from_waker(&Waker::from(self.flag.clone()))) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    /// Whether it was woken since the last poll.
    fn woken(&self) -> bool {
        self.flag.0.load(Ordering::Relaxed)
    }

    /// Polls only if it was woken, as an executor does.
    fn poll_if_woken(&mut self) -> Option<T> {
        if self.woken() { self.poll() } else { None }
    }
}

#[test]
fn futures_and_guards_may_cross_threads() {
    fn is_send<T: Send>(_: &T) {}
    let (range, epochs, event) =
        (super::RangeLock::new(), super::Epochs::new(), super::Event::new());
    let (mutex, semaphore, flush) =
        (super::AsyncMutex::new(0_u8), super::Semaphore::new(1), super::FlushSequencer::new());
    is_send(&range.exclusive(0, 1));
    is_send(&epochs.quiesce());
    is_send(&event.wait());
    is_send(&mutex.lock());
    is_send(&semaphore.acquire(1));
    is_send(&flush.run(async || Ok(())));
    is_send(&range.try_exclusive(0, 1));
    is_send(&mutex.try_lock());
}
