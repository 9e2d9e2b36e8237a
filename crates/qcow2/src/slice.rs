//! A piece of an L2 table in memory: what one cache entry holds.
//!
//! Words are atomics, so look-ups read them without a lock. Changes go through [`Slice::update`], under a
//! short mutex that also guards the slice's dirty state; no I/O happens under it. Extended entries have two words, which
//! must be seen together: a counter tells a reader that a change came between, and it looks again.

use super::prim::{
    AtomicBool, AtomicU32, AtomicU64, Mutex, MutexGuard, Ordering, fence, spin_loop,
};
use smallvec::SmallVec;
use std::sync::PoisonError;

/// Which slice: the index of its L2 table in the L1 table, and its place in that table.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct SliceId {
    pub(crate) l1: u32,
    pub(crate) part: u32,
}

/// How often a pair of words is read before the reader waits for the writer.
const TRIES: usize = 64;

/// A change of one word: these bits are kept, and those are set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct WordChange {
    /// The word's index in the slice.
    pub(crate) index: usize,
    pub(crate) keep: u64,
    pub(crate) set: u64,
}

impl WordChange {
    /// Sets a whole word.
    pub(crate) fn whole(index: usize, word: u64) -> Self {
        Self { index, keep: 0, set: word }
    }
}

/// Entries of one slice, as raw 64-bit words in host byte order.
pub(crate) struct Slice {
    words: Box<[AtomicU64]>,
    /// Odd while words are being changed.
    changes: AtomicU32,
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
    pub(crate) fn new(words: impl Iterator<Item = u64>, careful: bool) -> Self {
        Self {
            words: words.map(AtomicU64::new).collect(),
            changes: AtomicU32::new(0),
            careful,
            recent: AtomicBool::new(true),
            state: Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The word at `index`; an index past the end reads as unallocated.
    pub(crate) fn get(&self, index: usize) -> u64 {
        // Acquire pairs with the Release in `update`: who sees a mapping sees all that was done before it was set.
        self.words.get(index).map_or(0, |e| e.load(Ordering::Acquire))
    }

    /// The words at `index` and behind it, as they were at one moment.
    pub(crate) fn pair(&self, index: usize) -> (u64, u64) {
        for _ in 0..TRIES {
            let before = self.changes.load(Ordering::Acquire);
            let pair = (self.get(index), self.get(index + 1));
            // The loads of the words come before this one, since they acquire.
            if before & 1 == 0 && self.changes.load(Ordering::Relaxed) == before {
                return pair;
            }
            spin_loop();
        }
        let _no_change = self.state();
        (self.get(index), self.get(index + 1))
    }

    /// Notes a use, for the cache.
    pub(crate) fn touch(&self) {
        if !self.recent.load(Ordering::Relaxed) {
            self.recent.store(true, Ordering::Relaxed);
        }
    }

    /// Changes words, once `log` has told the journal what they become; it says whether it could.
    pub(crate) fn update(
        &self,
        changes: &[WordChange],
        log: impl FnOnce(&[(usize, u64)]) -> bool,
    ) -> Updated {
        let mut state = self.state();
        if state.gone {
            return Updated::Gone;
        }
        let old = |index: usize| self.words.get(index).map_or(0, |w| w.load(Ordering::Relaxed));
        let new = |c: &WordChange| (c.index, old(c.index) & c.keep | c.set);
        let words: SmallVec<[(usize, u64); 32]> = changes.iter().map(new).collect();
        // Under the mutex, so that the journal has the changes of an entry in the order in which they are made.
        if !log(&words) {
            return Updated::Full;
        }
        let before = self.changes.load(Ordering::Relaxed);
        self.changes.store(before.wrapping_add(1), Ordering::Relaxed);
        // Whoever sees one of the new words sees the odd counter.
        fence(Ordering::Release);
        for (index, word) in words {
            if let Some(place) = self.words.get(index) {
                place.store(word, Ordering::Release);
            }
        }
        self.changes.store(before.wrapping_add(2), Ordering::Release);
        if std::mem::replace(&mut state.dirty, true) { Updated::Dirty } else { Updated::NewlyDirty }
    }

    /// Takes the content as it is for writing, in file byte order, and calls it clean.
    pub(crate) fn collect(&self) -> Vec<u8> {
        let mut state = self.state();
        state.dirty = false;
        state.writing = true;
        self.words.iter().flat_map(|e| e.load(Ordering::Relaxed).to_be_bytes()).collect()
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
