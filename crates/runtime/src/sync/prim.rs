//! The few `std` primitives that the locks are made of, in one place.
//!
//! Callers: the other files of `sync`, always as `super::prim`. The interleaving tests compile those files a
//! second time beside their own `prim`, which offers the same names on a scheduler that tries interleavings.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::PoisonError;

pub(super) use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
pub(super) use std::sync::{Mutex, MutexGuard};

/// Locks `mutex`; a panic elsewhere does not spread, since no lock here is left half changed.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How many cache lines pins are spread over; threads beyond that share.
pub(super) const SLOTS: usize = 64;

/// Numbers for threads: small, and given back when a thread ends, so that few slots go a long way.
struct Numbers {
    free: BTreeSet<usize>,
    next: usize,
}

// Lock order: a leaf; nothing else is taken while it is held.
static NUMBERS: Mutex<Numbers> = Mutex::new(Numbers { free: BTreeSet::new(), next: 0 });
/// One more than the largest number given out so far.
static SEEN: AtomicUsize = AtomicUsize::new(0);
const NONE: usize = usize::MAX;

/// Gives its number back when its thread ends.
struct Number(usize);

impl Number {
    fn take() -> Self {
        let mut numbers = lock(&NUMBERS);
        let number = numbers.free.pop_first().unwrap_or_else(|| {
            let fresh = numbers.next;
            numbers.next += 1;
            fresh
        });
        SEEN.fetch_max(number + 1, Ordering::AcqRel);
        Self(number)
    }
}

impl Drop for Number {
    fn drop(&mut self) {
        lock(&NUMBERS).free.insert(self.0);
    }
}

thread_local! {
    // Apart from its owner, because a plain cell needs no "is it initialised" check on each use.
    static CURRENT: Cell<usize> = const { Cell::new(NONE) };
    static OWNER: Number = Number::take();
}

/// This thread's slot, below [`SLOTS`]. Two threads may have the same one.
#[inline]
pub(super) fn thread_slot() -> usize {
    let current = CURRENT.get();
    let number = if current == NONE { assign() } else { current };
    number % SLOTS
}

#[cold]
fn assign() -> usize {
    // A thread that is ending has no number any more: slots can be shared, so any will do.
    let number = OWNER.try_with(|owner| owner.0).unwrap_or(0);
    CURRENT.set(number);
    number
}

/// Slots from this one on have never been used. A read-modify-write: a thread numbered later sees everything
/// that happened before this call.
pub(super) fn slots_in_use() -> usize {
    SEEN.fetch_add(0, Ordering::AcqRel).min(SLOTS)
}
