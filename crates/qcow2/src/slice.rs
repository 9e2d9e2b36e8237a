//! A piece of an L2 table in memory: what one cache entry holds.
//!
//! Entries are atomics, so look-ups read them without a lock. Changes go through [`Slice::update`], under a
//! short mutex that also guards the slice's dirty state; no I/O happens under it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Which slice: the index of its L2 table in the L1 table, and its place in that table.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct SliceId {
    pub(crate) l1: u32,
    pub(crate) part: u32,
}

/// Entries of one slice, as raw 64-bit words in host byte order.
pub(crate) struct Slice {
    entries: Box<[AtomicU64]>,
    /// Some entry breaks the format's rules: each must be checked before it is used.
    pub(crate) careful: bool,
    /// Used since the cache last looked for something to drop.
    recent: AtomicBool,
    /// Innermost lock of the engine; nothing is awaited and no other lock is taken under it.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Changed since its content was last collected for writing.
    dirty: bool,
    /// Being written by a flush; must stay in the cache until that is durable.
    writing: bool,
    /// No longer in the cache: a change would be lost.
    gone: bool,
}

/// What became of a change.
#[derive(PartialEq, Eq, Debug)]
pub(crate) enum Updated {
    /// Done, and the slice was clean before: it must be put on the list of dirty slices.
    NewlyDirty,
    /// Done.
    Dirty,
    /// Not done: the slice has left the cache and must be loaded again.
    Gone,
    /// Not done: the journal has no room for it.
    Full,
}

impl Slice {
    pub(crate) fn new(entries: impl Iterator<Item = u64>, careful: bool) -> Self {
        Self {
            entries: entries.map(AtomicU64::new).collect(),
            careful,
            recent: AtomicBool::new(true),
            state: Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The entry at `index`; an index past the end reads as unallocated.
    pub(crate) fn get(&self, index: usize) -> u64 {
        // Acquire pairs with the Release in `update`: who sees a mapping sees all that was done before it was set.
        self.entries.get(index).map_or(0, |e| e.load(Ordering::Acquire))
    }

    /// Notes a use, for the cache.
    pub(crate) fn touch(&self) {
        if !self.recent.load(Ordering::Relaxed) {
            self.recent.store(true, Ordering::Relaxed);
        }
    }

    /// Sets entries, given as index and new word, once `log` has told the journal of them; it says whether it could.
    pub(crate) fn update(&self, changes: &[(usize, u64)], log: impl FnOnce() -> bool) -> Updated {
        let mut state = self.state();
        if state.gone {
            return Updated::Gone;
        }
        // Under the mutex, so that the journal has the changes of an entry in the order in which they are made.
        if !log() {
            return Updated::Full;
        }
        for (index, word) in changes {
            if let Some(entry) = self.entries.get(*index) {
                entry.store(*word, Ordering::Release);
            }
        }
        if std::mem::replace(&mut state.dirty, true) { Updated::Dirty } else { Updated::NewlyDirty }
    }

    /// Takes the content as it is for writing, in file byte order, and calls it clean.
    pub(crate) fn collect(&self) -> Vec<u8> {
        let mut state = self.state();
        state.dirty = false;
        state.writing = true;
        self.entries.iter().flat_map(|e| e.load(Ordering::Relaxed).to_be_bytes()).collect()
    }

    /// Ends what [`Self::collect`] began.
    pub(crate) fn written(&self) {
        self.state().writing = false;
    }

    /// Marks the slice as dropped from the cache because its table is another one now. It must be clean.
    pub(crate) fn forget(&self) {
        self.state().gone = true;
    }

    /// Marks the slice as dropped from the cache, unless it is in use or holds what is not yet written.
    pub(crate) fn retire(&self) -> bool {
        if self.recent.swap(false, Ordering::Relaxed) {
            return false;
        }
        let mut state = self.state();
        if state.dirty || state.writing {
            return false;
        }
        state.gone = true;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dirty_slice_is_never_retired_and_a_retired_one_never_changed() {
        let s = Slice::new([0, 1].into_iter(), false);
        assert_eq!(s.update(&[(1, 5)], || true), Updated::NewlyDirty);
        assert_eq!(s.update(&[(1, 6)], || false), Updated::Full);
        assert!(!s.retire() && !s.retire());
        assert_eq!(s.collect()[8..], 5u64.to_be_bytes());
        assert!(!s.retire(), "still being written");
        s.written();
        assert!(s.retire());
        assert_eq!(s.update(&[(0, 9)], || true), Updated::Gone);
        assert_eq!(s.get(0), 0);
    }
}
