//! A fair lock on byte ranges, shared or exclusive.
//!
//! Callers: allocation, copy-on-write, discard, unaligned read-modify-write and jobs: whatever must not meet
//! itself on the same bytes. Requests that don't conflict never wait for each other.
//!
//! Invariant: a request is granted exactly when no *earlier* request that conflicts with it is still present,
//! be it held or waiting. So a stream of readers can't starve a writer, and waiting follows arrival order, which
//! has no cycles. Each waiter counts the conflicting pairs of ranges in front of it; whoever leaves, by release
//! or by cancellation, takes its pairs off those behind it. Lists are short (a few hundred at most), and
//! scanning 32-byte entries beats any tree at that size.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use smallvec::SmallVec;

use super::prim::{Mutex, lock};

/// One byte range of a request; never empty.
#[derive(Clone, Copy)]
struct Span {
    start: u64,
    end: u64,
    ticket: u64,
    exclusive: bool,
}

impl Span {
    fn conflicts(&self, other: &Span) -> bool {
        self.start < other.end && other.start < self.end && (self.exclusive || other.exclusive)
    }
}

/// A request that is not granted yet.
struct Waiting {
    /// Conflicting pairs (range of an earlier request, own range). Above zero while in the table.
    blockers: usize,
    waker: Waker,
}

#[derive(Default)]
struct State {
    /// The next request's ticket: arrival order.
    next: u64,
    /// The ranges of all requests, held and waiting, in no order.
    spans: Vec<Span>,
    /// Requests that wait, by ticket; a request with spans that is not here is held.
    waiting: BTreeMap<u64, Waiting>,
}

impl State {
    /// The conflicts that a request for `ranges` would have now.
    fn blockers(&self, ranges: &[(u64, u64)], exclusive: bool) -> usize {
        let news = spans_of(ranges, exclusive, self.next);
        news.map(|new| self.spans.iter().filter(|old| old.conflicts(&new)).count()).sum()
    }

    /// Adds a request and returns its ticket.
    fn enter(&mut self, ranges: &[(u64, u64)], exclusive: bool) -> u64 {
        let ticket = self.next;
        self.next += 1;
        self.spans.extend(spans_of(ranges, exclusive, ticket));
        ticket
    }

    /// Takes a request away, held or waiting, and returns the wakers of those that are granted by that.
    /// The request's own waker, if it had one, comes back too, to be dropped outside the lock.
    fn leave(&mut self, ticket: u64) -> (SmallVec<[Waker; 2]>, Option<Waiting>) {
        let own_waiting = self.waiting.remove(&ticket);
        let mut own: SmallVec<[Span; 4]> = SmallVec::new();
        let mut i = 0;
        while let Some(span) = self.spans.get(i) {
            if span.ticket == ticket {
                own.push(self.spans.swap_remove(i));
            } else {
                i += 1;
            }
        }
        let mut granted = SmallVec::new();
        if self.waiting.is_empty() {
            return (granted, own_waiting);
        }
        for behind in self.spans.iter().filter(|s| s.ticket > ticket) {
            let pairs = own.iter().filter(|s| s.conflicts(behind)).count();
            if pairs == 0 {
                continue;
            }
            // A later request in conflict with a present one is always waiting.
            let Some(waiting) = self.waiting.get_mut(&behind.ticket) else { continue };
            waiting.blockers -= pairs;
            if waiting.blockers == 0
                && let Some(waiting) = self.waiting.remove(&behind.ticket)
            {
                granted.push(waiting.waker);
            }
        }
        (granted, own_waiting)
    }
}

/// The ranges as spans; empty ones conflict with nothing and are left out.
fn spans_of(ranges: &[(u64, u64)], exclusive: bool, ticket: u64) -> impl Iterator<Item = Span> {
    ranges.iter().filter(|&&(_, len)| len > 0).map(move |&(start, len)| Span {
        start,
        end: start.saturating_add(len),
        ticket,
        exclusive,
    })
}

/// A fair lock on ranges of `u64` positions, shared or exclusive.
///
/// Requests in conflict are served in the order of their first poll; others never wait. An empty range
/// conflicts with nothing; a range that would pass `u64::MAX` ends there.
///
/// A task must not ask for a range that overlaps one it already holds (unless both are shared and nobody
/// exclusive waits, which it can't know): it would wait for itself. Use [`exclusive_many`](Self::exclusive_many)
/// to take several ranges at once.
#[derive(Default)]
pub struct RangeLock {
    // Lock order: a leaf; nothing else is taken while it is held.
    state: Mutex<State>,
}

impl RangeLock {
    /// A lock of which nothing is held.
    pub fn new() -> Self {
        Self::default()
    }

    /// Locks `len` positions from `start` against exclusive holders.
    pub async fn shared(&self, start: u64, len: u64) -> RangeGuard<'_> {
        self.acquire(&[(start, len)], false).await
    }

    /// Locks `len` positions from `start` against everybody else.
    pub async fn exclusive(&self, start: u64, len: u64) -> RangeGuard<'_> {
        self.acquire(&[(start, len)], true).await
    }

    /// Locks several ranges `(start, len)` exclusively, as one request: nothing is held until all is.
    ///
    /// Any two such requests, or mixtures with single ranges, can't deadlock, whatever the order of the ranges.
    pub async fn exclusive_many(&self, ranges: &[(u64, u64)]) -> RangeGuard<'_> {
        self.acquire(ranges, true).await
    }

    /// Locks shared, if that is possible without waiting for a holder or passing an earlier waiter.
    pub fn try_shared(&self, start: u64, len: u64) -> Option<RangeGuard<'_>> {
        self.try_acquire(start, len, false)
    }

    /// Locks exclusively, if that is possible without waiting for a holder or passing an earlier waiter.
    pub fn try_exclusive(&self, start: u64, len: u64) -> Option<RangeGuard<'_>> {
        self.try_acquire(start, len, true)
    }

    /// Whether nothing is held and nobody waits.
    pub fn is_idle(&self) -> bool {
        let state = lock(&self.state);
        state.spans.is_empty() && state.waiting.is_empty()
    }

    fn try_acquire(&self, start: u64, len: u64, exclusive: bool) -> Option<RangeGuard<'_>> {
        let ranges = [(start, len)];
        let mut state = lock(&self.state);
        if state.blockers(&ranges, exclusive) > 0 {
            return None;
        }
        Some(RangeGuard { lock: self, ticket: state.enter(&ranges, exclusive) })
    }

    fn acquire<'a, 'r>(&'a self, ranges: &'r [(u64, u64)], exclusive: bool) -> Acquire<'a, 'r> {
        Acquire { lock: self, ranges, exclusive, ticket: None }
    }

    fn leave(&self, ticket: u64) {
        let (granted, _own) = lock(&self.state).leave(ticket);
        for waker in granted {
            waker.wake();
        }
    }
}

impl fmt::Debug for RangeLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = lock(&self.state);
        f.debug_struct("RangeLock")
            .field("ranges", &state.spans.len())
            .field("waiting", &state.waiting.len())
            .finish()
    }
}

/// Waits for a request to be granted; takes its place in the queue at the first poll.
struct Acquire<'a, 'r> {
    lock: &'a RangeLock,
    ranges: &'r [(u64, u64)],
    exclusive: bool,
    /// Set while the request is in the queue, or granted without the caller knowing yet.
    ticket: Option<u64>,
}

impl<'a> Future for Acquire<'a, '_> {
    type Output = RangeGuard<'a>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<RangeGuard<'a>> {
        let lock_ref = self.lock;
        // Declared before the lock, so dropped after it.
        let _stale: Waker;
        let mut state = lock(&lock_ref.state);
        let ticket = match self.ticket {
            None => {
                let blockers = state.blockers(self.ranges, self.exclusive);
                let ticket = state.enter(self.ranges, self.exclusive);
                if blockers > 0 {
                    let waker = cx.waker().clone();
                    state.waiting.insert(ticket, Waiting { blockers, waker });
                    self.ticket = Some(ticket);
                    return Poll::Pending;
                }
                ticket
            }
            Some(ticket) => {
                if let Some(waiting) = state.waiting.get_mut(&ticket) {
                    if !waiting.waker.will_wake(cx.waker()) {
                        _stale = std::mem::replace(&mut waiting.waker, cx.waker().clone());
                    }
                    return Poll::Pending;
                }
                ticket
            }
        };
        self.ticket = None;
        Poll::Ready(RangeGuard { lock: lock_ref, ticket })
    }
}

impl Drop for Acquire<'_, '_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            self.lock.leave(ticket);
        }
    }
}

/// Holds the ranges of one request until it is dropped; may be sent to another thread.
#[must_use = "the range is unlocked when the guard is dropped"]
pub struct RangeGuard<'a> {
    lock: &'a RangeLock,
    ticket: u64,
}

impl Drop for RangeGuard<'_> {
    fn drop(&mut self) {
        self.lock.leave(self.ticket);
    }
}

impl fmt::Debug for RangeGuard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RangeGuard").field("ticket", &self.ticket).finish()
    }
}
