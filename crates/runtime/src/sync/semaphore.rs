//! A fair counting semaphore.
//!
//! Callers: whoever bounds work in flight (buffers, requests, background jobs); [`AsyncMutex`](super::AsyncMutex).
//!
//! Invariants: free permits and granted ones add up to the capacity; while someone waits, the first in the queue
//! needs more than is free. A waiter that is not in the queue any more has been granted its permits.

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use smallvec::SmallVec;

use super::prim::{Mutex, lock};

struct Waiting {
    id: u64,
    need: usize,
    waker: Waker,
}

struct State {
    next: u64,
    free: usize,
    queue: VecDeque<Waiting>,
}

type Wakers = SmallVec<[Waker; 2]>;

impl State {
    /// Grants from the front what can be granted.
    fn grant(&mut self) -> Wakers {
        let mut granted = Wakers::new();
        while self.queue.front().is_some_and(|first| first.need <= self.free) {
            let Some(first) = self.queue.pop_front() else { break };
            self.free -= first.need;
            granted.push(first.waker);
        }
        granted
    }
}

/// A number of permits, handed out first come, first served.
pub struct Semaphore {
    capacity: usize,
    // Lock order: a leaf; nothing else is taken while it is held.
    state: Mutex<State>,
}

impl Semaphore {
    /// A semaphore with this many permits, at least one.
    pub fn new(permits: usize) -> Self {
        let capacity = permits.max(1);
        let state = State { next: 0, free: capacity, queue: VecDeque::new() };
        Self { capacity, state: Mutex::new(state) }
    }

    /// Takes `n` permits, waiting for them if need be.
    ///
    /// More than there are in all counts as all: a request that is too large runs alone instead of never.
    pub async fn acquire(&self, n: usize) -> Permit<'_> {
        Acquire { semaphore: self, need: n.min(self.capacity), id: None }.await
    }

    /// Takes `n` permits (at most all) if they are free and nobody waits.
    pub fn try_acquire(&self, n: usize) -> Option<Permit<'_>> {
        let need = n.min(self.capacity);
        let mut state = lock(&self.state);
        if !state.queue.is_empty() || need > state.free {
            return None;
        }
        state.free -= need;
        Some(Permit { semaphore: self, n: need })
    }

    /// Permits that nobody holds now.
    pub fn free(&self) -> usize {
        lock(&self.state).free
    }

    fn release(&self, n: usize) {
        let granted = {
            let mut state = lock(&self.state);
            state.free += n;
            state.grant()
        };
        for waker in granted {
            waker.wake();
        }
    }

    /// The future of request `id` for `need` permits is dropped: out of the queue, or back what it was granted.
    fn abandon(&self, id: u64, need: usize) {
        // Declared before the lock, so dropped after it.
        let _own: Option<Waiting>;
        let granted = {
            let mut state = lock(&self.state);
            match state.queue.iter().position(|w| w.id == id) {
                Some(at) => _own = state.queue.remove(at),
                None => state.free += need,
            }
            state.grant()
        };
        for waker in granted {
            waker.wake();
        }
    }
}

impl fmt::Debug for Semaphore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = lock(&self.state);
        f.debug_struct("Semaphore")
            .field("capacity", &self.capacity)
            .field("free", &state.free)
            .field("waiting", &state.queue.len())
            .finish()
    }
}

/// Waits for permits; takes its place in the queue at the first poll.
struct Acquire<'a> {
    semaphore: &'a Semaphore,
    need: usize,
    /// Set while the request is in the queue, or granted without the caller knowing yet.
    id: Option<u64>,
}

impl<'a> Future for Acquire<'a> {
    type Output = Permit<'a>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Permit<'a>> {
        let semaphore = self.semaphore;
        // Declared before the lock, so dropped after it.
        let _stale: Waker;
        let mut state = lock(&semaphore.state);
        if let Some(id) = self.id {
            if let Some(own) = state.queue.iter_mut().find(|w| w.id == id) {
                if !own.waker.will_wake(cx.waker()) {
                    _stale = std::mem::replace(&mut own.waker, cx.waker().clone());
                }
                return Poll::Pending;
            }
        } else if !state.queue.is_empty() || self.need > state.free {
            let id = state.next;
            state.next += 1;
            state.queue.push_back(Waiting { id, need: self.need, waker: cx.waker().clone() });
            self.id = Some(id);
            return Poll::Pending;
        } else {
            state.free -= self.need;
        }
        self.id = None;
        Poll::Ready(Permit { semaphore, n: self.need })
    }
}

impl Drop for Acquire<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id.take() {
            self.semaphore.abandon(id, self.need);
        }
    }
}

/// Permits, given back when this is dropped; may be sent to another thread.
#[must_use = "the permits are given back when this is dropped"]
#[derive(Debug)]
pub struct Permit<'a> {
    semaphore: &'a Semaphore,
    n: usize,
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.semaphore.release(self.n);
    }
}
