//! Grace periods: knowing when everybody who could still use something old is done with it.
//!
//! Callers: the disk's planners pin around "look up the mapping, do the I/O there"; reclaimers take a place out of
//! the mapping, wait for a grace period, and only then reuse it.
//!
//! # How it works
//! Each thread has a slot (a cache line of its own) with two counters of pins; which one a pin goes to is the
//! parity of the global epoch at that moment, and the token remembers slot and counter, so that any thread can
//! unpin. A grace period that starts in epoch `e` is over in epoch `e + 2`. To go from `e` to `e + 1`, somebody who
//! holds the inner lock has to see the *other* counter (the one of `e - 1`) at zero in every slot. New pins go to
//! the counter of `e` meanwhile, so they don't delay that.
//!
//! # Why it is right
//! 1. *Both counters of each slot are seen at zero after the start.* Starts and scans exclude each other by the
//!    inner lock, and the two steps from `e` to `e + 2` scan one counter each. Which counter a pin chose, from
//!    however old an epoch, does not matter.
//! 2. *A pin is seen, or it sees.* Pins, unpins and scans are read-modify-writes of one atomic, so they are totally
//!    ordered and each reads the one before it. If the pin comes before the scan, the scan counts it. If it comes
//!    after, it reads from the scan (through other read-modify-writes, which carry a release on), its acquire
//!    pairs with the scan's release, and what was done before the grace period started (the start released it
//!    through the inner lock) is visible to whatever the pinned thread looks up. It can't find what was taken away.
//!    No fence is needed, because both sides meet in one location.
//! 3. *What was done under the pin is over.* An unpin releases, the scan that finds zero acquires it and releases
//!    the new epoch by a store; [`Epochs::elapsed`] acquires that.
//! 4. *No wake-up is lost.* While tasks wait, the scan marks the first slot it finds in use, in the same
//!    read-modify-write that reads the count. The unpin that takes the count to zero comes after it in that
//!    atomic's order, so it sees the mark, takes the inner lock and goes on with the scan. Marks are set and
//!    removed under the inner lock only.
//!
//! A pin that chose its counter from an old epoch, but counted late, can delay a step by its own length; each
//! thread can do that once per step.

use std::fmt;
use std::future::Future;
use std::task::{Context, Poll, Waker};

use crossbeam_utils::CachePadded;
use smallvec::SmallVec;

use super::prim::{AtomicU64, Mutex, Ordering, SLOTS, lock, slots_in_use, thread_slot};

/// Set in a counter whose fall to zero somebody waits for.
const MARK: u64 = 1 << 63;

type Slot = CachePadded<[AtomicU64; 2]>;
type Wakers = SmallVec<[Waker; 4]>;

struct Waiting {
    id: u64,
    target: u64,
    waker: Waker,
}

#[derive(Default)]
struct State {
    next: u64,
    waiting: Vec<Waiting>,
}

/// Pins and grace periods.
///
/// Never await a lock while holding a pin: whoever holds that lock may be waiting for a grace period.
pub struct Epochs {
    /// Changed under the lock of `state` only; its parity chooses the counter of new pins.
    epoch: CachePadded<AtomicU64>,
    slots: Box<[Slot; SLOTS]>,
    // Lock order: a leaf; nothing else is taken while it is held.
    state: Mutex<State>,
}

/// A pin taken by [`Epochs::pin`]; give it to [`Epochs::unpin`] of the same `Epochs`, on any thread.
///
/// It is a plain token without a destructor. A token that is lost stops all later grace periods for good;
/// use [`Epochs::guard`] where that could happen.
#[must_use = "a pin must be given back with unpin"]
#[derive(Debug)]
pub struct Pin {
    slot: u8,
    parity: u8,
}

/// A grace period under way, made by [`Epochs::start`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grace {
    target: u64,
}

impl Default for Epochs {
    fn default() -> Self {
        Self {
            epoch: CachePadded::new(AtomicU64::new(0)),
            slots: Box::new(std::array::from_fn(|_| Slot::default())),
            state: Mutex::new(State::default()),
        }
    }
}

impl Epochs {
    /// No pins, no grace periods.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes a pin: grace periods that start from now on wait for it. Wait-free; touches only this thread's line.
    #[inline]
    pub fn pin(&self) -> Pin {
        let slot = thread_slot();
        let parity = usize::from(self.epoch.load(Ordering::Relaxed) & 1 == 1);
        self.slots[slot][parity].fetch_add(1, Ordering::Acquire);
        // Both fit: SLOTS is at most 256, a parity is 0 or 1.
        Pin { slot: slot as u8, parity: parity as u8 }
    }

    /// Gives a pin back, from any thread. Wait-free, unless it was the last one a waiting task needs.
    #[inline]
    pub fn unpin(&self, pin: Pin) {
        let counter = &self.slots[usize::from(pin.slot) % SLOTS][usize::from(pin.parity & 1)];
        if counter.fetch_sub(1, Ordering::Release) == MARK | 1 {
            self.marked_is_zero(counter);
        }
    }

    /// A pin that is given back when the guard is dropped.
    #[inline]
    pub fn guard(&self) -> PinGuard<'_> {
        PinGuard { epochs: self, pin: Some(self.pin()) }
    }

    /// Starts a grace period: it is over when all pins taken before have been given back.
    ///
    /// Nothing needs to be done to end it: a `Grace` that is forgotten costs nothing.
    pub fn start(&self) -> Grace {
        let (grace, woken) = {
            let mut state = lock(&self.state);
            let epoch = self.epoch.load(Ordering::Relaxed);
            // Go on at once if possible, so that pins from now on don't count.
            (Grace { target: epoch + 2 }, self.advance(&mut state, epoch + 1))
        };
        wake(woken);
        grace
    }

    /// Whether the grace period is over; does the work of finding out, but never waits.
    pub fn elapsed(&self, grace: &Grace) -> bool {
        if self.epoch.load(Ordering::Acquire) >= grace.target {
            return true;
        }
        let woken = {
            let mut state = lock(&self.state);
            self.advance(&mut state, grace.target)
        };
        wake(woken);
        self.epoch.load(Ordering::Acquire) >= grace.target
    }

    /// Returns when all pins taken before this call (its first poll) have been given back.
    ///
    /// Pins taken later don't hold it up, but for those taken while older ones still stop the epoch from
    /// changing: it takes at most about twice as long as the longest pin.
    pub async fn quiesce(&self) {
        let grace = self.start();
        self.wait(grace).await;
    }

    /// Returns when the grace period is over.
    pub async fn wait(&self, grace: Grace) {
        Wait { epochs: self, grace, id: None }.await;
    }

    /// Pins held now, by all threads; exact only while nobody pins or unpins.
    pub fn pinned(&self) -> u64 {
        let counters = self.slots.iter().flat_map(|slot| slot.iter());
        counters.map(|c| c.load(Ordering::Relaxed) & !MARK).sum()
    }

    /// Goes on towards `target`, and to what waiting tasks need, as far as the pins allow; returns whose grace
    /// periods are over. While tasks wait it only stops at a slot that it marked, so that an unpin goes on from there.
    fn advance(&self, state: &mut State, target: u64) -> Wakers {
        let target = state.waiting.iter().map(|w| w.target).fold(target, u64::max);
        let mut epoch = self.epoch.load(Ordering::Relaxed);
        while epoch < target && self.other_is_zero(epoch, !state.waiting.is_empty()) {
            epoch += 1;
            self.epoch.store(epoch, Ordering::Release);
        }
        let over = state.waiting.extract_if(.., |w| w.target <= epoch);
        over.map(|w| w.waker).collect()
    }

    /// Whether the counter that new pins don't use was zero in each slot. With `mark`, the first one that isn't is
    /// marked. The caller holds the lock of `state`.
    fn other_is_zero(&self, epoch: u64, mark: bool) -> bool {
        let parity = usize::from(epoch & 1 == 0);
        self.slots.iter().take(slots_in_use()).all(|slot| {
            let counter = &slot[parity];
            if mark {
                if counter.fetch_or(MARK, Ordering::AcqRel) & !MARK > 0 {
                    return false;
                }
                counter.fetch_and(!MARK, Ordering::Relaxed);
                return true;
            }
            // The load alone would do for "not yet", which leaves the thread's line in its cache.
            counter.load(Ordering::Relaxed) & !MARK == 0
                && counter.fetch_and(!MARK, Ordering::AcqRel) & !MARK == 0
        })
    }

    #[cold]
    fn marked_is_zero(&self, counter: &AtomicU64) {
        let woken = {
            let mut state = lock(&self.state);
            counter.fetch_and(!MARK, Ordering::Relaxed);
            self.advance(&mut state, 0)
        };
        wake(woken);
    }
}

fn wake(wakers: Wakers) {
    for waker in wakers {
        waker.wake();
    }
}

impl fmt::Debug for Epochs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Epochs")
            .field("epoch", &self.epoch.load(Ordering::Relaxed))
            .field("pinned", &self.pinned())
            .finish_non_exhaustive()
    }
}

/// Waits for the end of a grace period.
struct Wait<'a> {
    epochs: &'a Epochs,
    grace: Grace,
    /// Set while there may be an entry in the list of waiting tasks.
    id: Option<u64>,
}

impl Future for Wait<'_> {
    type Output = ();

    fn poll(mut self: std::pin::Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let epochs = self.epochs;
        if epochs.epoch.load(Ordering::Acquire) >= self.grace.target {
            return Poll::Ready(());
        }
        // Declared before the lock, so dropped after it.
        let _stale: Waker;
        let woken = {
            let mut state = lock(&epochs.state);
            let id = *self.id.get_or_insert_with(|| {
                state.next += 1;
                state.next
            });
            // Into the list first, so that the scan leaves a mark.
            match state.waiting.iter_mut().find(|w| w.id == id) {
                Some(own) if own.waker.will_wake(cx.waker()) => {}
                Some(own) => _stale = std::mem::replace(&mut own.waker, cx.waker().clone()),
                None => {
                    let (target, waker) = (self.grace.target, cx.waker().clone());
                    state.waiting.push(Waiting { id, target, waker });
                }
            }
            epochs.advance(&mut state, self.grace.target)
        };
        wake(woken);
        if epochs.epoch.load(Ordering::Acquire) >= self.grace.target {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        let Some(id) = self.id else { return };
        // Declared before the lock, so dropped after it.
        let _own: Waiting;
        let mut state = lock(&self.epochs.state);
        if let Some(at) = state.waiting.iter().position(|w| w.id == id) {
            _own = state.waiting.swap_remove(at);
        }
    }
}

/// A pin that is given back when this is dropped.
#[must_use = "the pin is given back when the guard is dropped"]
#[derive(Debug)]
pub struct PinGuard<'a> {
    epochs: &'a Epochs,
    pin: Option<Pin>,
}

impl Drop for PinGuard<'_> {
    fn drop(&mut self) {
        if let Some(pin) = self.pin.take() {
            self.epochs.unpin(pin);
        }
    }
}
