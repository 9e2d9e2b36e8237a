//! Timers: an ordered table of deadlines. The next one bounds the sleep of a turn, so a timer costs no I/O operation.

use crate::executor::{self, Inner};
use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// Identifies a timer: its deadline, and a number that makes it unique.
pub(crate) type Key = (Instant, u64);

/// Sleeps longer than this are cut to it: far beyond any use, and safe to add to any instant.
const LONGEST: Duration = Duration::from_secs(60 * 60 * 24 * 365);

/// All timers of a runtime.
#[derive(Default)]
pub(crate) struct Timers {
    waiting: BTreeMap<Key, Waker>,
    next: u64,
}

impl Timers {
    fn add(&mut self, deadline: Instant, waker: Waker) -> Key {
        self.next = self.next.wrapping_add(1);
        let key = (deadline, self.next);
        self.waiting.insert(key, waker);
        key
    }

    /// The next deadline.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.waiting.first_key_value().map(|((at, _), _)| *at)
    }

    /// Takes out one timer whose time has come.
    pub(crate) fn pop_due(&mut self, now: Instant) -> Option<Waker> {
        let first = self.waiting.first_entry()?;
        (first.key().0 <= now).then(|| first.remove())
    }
}

/// The future of [`sleep`].
#[must_use = "futures do nothing unless awaited"]
pub struct Sleep {
    deadline: Instant,
    registered: Option<(Rc<Inner>, Key)>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if Instant::now() >= self.deadline {
            return Poll::Ready(());
        }
        if let Some((rt, key)) = &self.registered {
            if let Some(waker) = rt.timers.borrow_mut().waiting.get_mut(key) {
                waker.clone_from(cx.waker());
            }
            return Poll::Pending;
        }
        let rt = executor::expect_current("sleep");
        let key = rt.timers.borrow_mut().add(self.deadline, cx.waker().clone());
        self.registered = Some((rt, key));
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some((rt, key)) = self.registered.take() {
            let waker = rt.timers.borrow_mut().waiting.remove(&key);
            drop(waker); // outside of the borrow
        }
    }
}

/// Waits for `time` to pass.
///
/// # Panics
/// When awaited on a thread without a runtime.
pub fn sleep(time: Duration) -> Sleep {
    Sleep { deadline: Instant::now() + time.min(LONGEST), registered: None }
}

/// Awaits `future`, but at most for `time`; `None` when the time was over first.
///
/// # Panics
/// When awaited on a thread without a runtime.
pub async fn timeout<F: Future>(time: Duration, future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    let mut over = pin!(sleep(time));
    poll_fn(|cx| {
        if let Poll::Ready(out) = future.as_mut().poll(cx) {
            return Poll::Ready(Some(out));
        }
        over.as_mut().poll(cx).map(|()| None)
    })
    .await
}
