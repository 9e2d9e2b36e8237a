//! Waiting for "something changed", without losing a change.
//!
//! Callers: whoever waits for a condition that others make true and announce. An event has no state of its own
//! besides the count of announcements: a wait is over at the first [`Event::notify_all`] after the wait *began*
//! (the call, not the first poll). Begin the wait, then check the condition, then await.
//!
//! Why no announcement is lost: a listener remembers the count from its beginning. If it read the count from
//! before an announcement, its polls see the difference. If it read the new count, that read acquires what the
//! announcer released, so the check that follows sees the change. A listener that goes to sleep first makes its
//! waker known, then reads the count again; an announcer first counts, then looks for wakers. All four are
//! SeqCst, so at least one of the two sees the other.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use super::prim::{AtomicU64, AtomicUsize, Mutex, Ordering, lock};

#[derive(Default)]
struct List {
    next: u64,
    sleepers: Vec<(u64, Waker)>,
}

/// An announcement that any number of tasks can wait for.
#[derive(Default)]
pub struct Event {
    /// Announcements so far.
    count: AtomicU64,
    /// The length of `list.sleepers`; written under its lock.
    sleeping: AtomicUsize,
    // Lock order: a leaf; nothing else is taken while it is held.
    list: Mutex<List>,
}

impl Event {
    /// An event that was never announced.
    pub fn new() -> Self {
        Self::default()
    }

    /// Wakes everybody whose wait has begun. Costs one atomic addition when nobody sleeps.
    pub fn notify_all(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
        if self.sleeping.load(Ordering::SeqCst) == 0 {
            return;
        }
        let sleepers = {
            let mut list = lock(&self.list);
            self.sleeping.store(0, Ordering::SeqCst);
            std::mem::take(&mut list.sleepers)
        };
        for (_, waker) in sleepers {
            waker.wake();
        }
    }

    /// Begins a wait for the next announcement. It has begun when this call returns: check the condition after it.
    pub fn wait(&self) -> Listener<'_> {
        Listener { event: self, seen: self.count.load(Ordering::SeqCst), id: None }
    }

    /// Waits until `check` gives something; it is asked at once and after each announcement.
    pub async fn wait_until<T>(&self, mut check: impl FnMut() -> Option<T>) -> T {
        loop {
            let listener = self.wait();
            if let Some(found) = check() {
                return found;
            }
            listener.await;
        }
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event")
            .field("count", &self.count.load(Ordering::Relaxed))
            .field("sleeping", &self.sleeping.load(Ordering::Relaxed))
            .finish()
    }
}

/// A wait that has begun; ready after the next [`Event::notify_all`].
#[must_use = "a wait does nothing unless it is awaited"]
pub struct Listener<'a> {
    event: &'a Event,
    /// The count when the wait began.
    seen: u64,
    /// The entry in the list of sleepers, once there was one.
    id: Option<u64>,
}

impl Listener<'_> {
    /// Whether the announcement has come.
    pub fn is_notified(&self) -> bool {
        self.event.count.load(Ordering::SeqCst) != self.seen
    }
}

impl Future for Listener<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.is_notified() {
            return Poll::Ready(());
        }
        let event = self.event;
        // Declared before the lock, so dropped after it.
        let _stale: Waker;
        let mut list = lock(&event.list);
        let id = *self.id.get_or_insert_with(|| {
            list.next += 1;
            list.next
        });
        match list.sleepers.iter_mut().find(|(other, _)| *other == id) {
            Some((_, waker)) if waker.will_wake(cx.waker()) => {}
            Some((_, waker)) => _stale = std::mem::replace(waker, cx.waker().clone()),
            None => list.sleepers.push((id, cx.waker().clone())),
        }
        event.sleeping.store(list.sleepers.len(), Ordering::SeqCst);
        if self.is_notified() { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl Drop for Listener<'_> {
    fn drop(&mut self) {
        let Some(id) = self.id else { return };
        // Declared before the lock, so dropped after it.
        let _stale: (u64, Waker);
        let mut list = lock(&self.event.list);
        if let Some(at) = list.sleepers.iter().position(|(other, _)| *other == id) {
            _stale = list.sleepers.swap_remove(at);
            self.event.sleeping.store(list.sleepers.len(), Ordering::SeqCst);
        }
    }
}
