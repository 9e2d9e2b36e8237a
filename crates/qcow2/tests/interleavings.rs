//! Tries interleavings between threads of the engine's parts that work without waiting: slices and the journal.
//!
//! Their own source files are compiled here once more, on top of a `prim` whose mutex and atomics belong to the `shuttle`
//! scheduler: each use of one is a point where another thread may go on, and a test runs thousands of schedules. The
//! scheduler knows sequentially consistent memory only; why weaker orderings suffice is argued in each file.

#![forbid(unsafe_code)]
// Each file offers more than these tests use.
#![allow(dead_code)]

#[path = "../src/journal.rs"]
mod journal;
#[path = "../src/slice.rs"]
mod slice;

/// The same names as in `src/prim.rs`.
mod prim {
    pub(super) use shuttle::hint::spin_loop;
    pub(super) use shuttle::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
    pub(super) use shuttle::sync::{Mutex, MutexGuard};
    pub(super) use shuttle::thread::yield_now;

    pub trait SharedWords: Send + Sync {
        fn words(&self) -> &[AtomicU64];
    }

    impl SharedWords for Box<[AtomicU64]> {
        fn words(&self) -> &[AtomicU64] {
            self
        }
    }
}

use journal::{Change, Found, HEADER, Journal, JournalOwner, JournalStart, RECORD, examine};
use prim::SharedWords;
use shuttle::sync::atomic::{AtomicU64, Ordering};
use shuttle::thread;
use slice::{Slice, Updated, WordChange};
use std::collections::HashMap;
use std::sync::Arc;

/// Tries schedules at random, and with few switches at chosen points, which finds other mistakes.
fn explore(test: impl Fn() + Send + Sync + Clone + 'static) {
    shuttle::check_random(test.clone(), 3000);
    shuttle::check_pct(test, 3000, 3);
}

fn spawn_all(threads: Vec<Box<dyn FnOnce() + Send>>) {
    let threads: Vec<_> = threads.into_iter().map(|f| thread::spawn(f)).collect();
    for thread in threads {
        thread.join().expect("the thread ends well");
    }
}

#[test]
fn the_two_words_of_an_entry_are_always_of_one_moment() {
    explore(|| {
        let slice = Arc::new(Slice::new([0, 0].into_iter(), false));
        let (writer, reader) = (slice.clone(), slice);
        spawn_all(vec![
            Box::new(move || {
                for n in 1..=3 {
                    let whole = |index| WordChange::whole(index, n);
                    assert_ne!(writer.update(&[whole(1), whole(0)], |_| true), Updated::Gone);
                }
            }),
            Box::new(move || {
                let mut last = 0;
                for _ in 0..3 {
                    let (a, b) = reader.pair(0);
                    assert_eq!(a, b, "half of a change");
                    assert!(a >= last, "an older entry than before");
                    last = a;
                }
            }),
        ]);
    });
}

#[test]
fn bits_that_threads_set_in_one_bitmap_are_all_there() {
    explore(|| {
        let slice = Arc::new(Slice::new([0, 0].into_iter(), false));
        let set = |bit: u64| -> Box<dyn FnOnce() + Send> {
            let slice = slice.clone();
            Box::new(move || {
                let change = WordChange { index: 1, keep: !0, set: 1 << bit };
                assert_ne!(slice.update(&[change], |_| true), Updated::Gone);
            })
        };
        spawn_all(vec![set(0), set(1), set(2)]);
        assert_eq!(slice.pair(0), (0, 0b111));
    });
}

/// A cache of one slice: the slot that look-ups use, and what the file holds.
struct Cache {
    slot: shuttle::sync::Mutex<Option<Arc<Slice>>>,
    file: AtomicU64,
}

#[test]
fn no_change_is_lost_between_writing_back_and_dropping_a_slice() {
    explore(|| {
        let slice = Arc::new(Slice::new([0].into_iter(), false));
        let slot = shuttle::sync::Mutex::new(Some(slice));
        let cache = Arc::new(Cache { slot, file: AtomicU64::new(0) });
        let get = |cache: &Cache| cache.slot.lock().expect("lock").clone();
        let (changing, writing, dropping) = (cache.clone(), cache.clone(), cache.clone());
        spawn_all(vec![
            Box::new(move || {
                for bit in 0..2 {
                    let change = WordChange { index: 0, keep: !0, set: 1 << bit };
                    loop {
                        let done = get(&changing).map(|s| s.update(&[change], |_| true));
                        if done.is_some_and(|d| d != Updated::Gone) {
                            break;
                        }
                        // It has left the cache: it is loaded again.
                        let mut slot = changing.slot.lock().expect("lock");
                        let word = changing.file.load(Ordering::SeqCst);
                        slot.get_or_insert_with(|| Arc::new(Slice::new([word].into_iter(), false)));
                    }
                }
            }),
            Box::new(move || {
                if let Some(slice) = get(&writing) {
                    let bytes = slice.collect();
                    let word = bytes.first_chunk::<8>().map_or(0, |b| u64::from_be_bytes(*b));
                    writing.file.store(word, Ordering::SeqCst);
                    slice.written();
                }
            }),
            Box::new(move || {
                for _ in 0..3 {
                    let mut slot = dropping.slot.lock().expect("lock");
                    if slot.as_ref().is_some_and(|s| s.retire()) {
                        *slot = None;
                    }
                }
            }),
        ]);
        let in_memory = get(&cache).map(|s| s.get(0));
        assert_eq!(in_memory.unwrap_or_else(|| cache.file.load(Ordering::SeqCst)), 0b11);
    });
}

/// Words for a journal of so many records a half.
fn memory(room: usize) -> Arc<dyn SharedWords> {
    let words: Box<[AtomicU64]> =
        (0..HEADER + 2 * RECORD * room).map(|_| AtomicU64::new(0)).collect();
    Arc::new(words)
}

#[test]
fn whatever_threads_append_is_in_the_file_or_in_the_journal() {
    shuttle::check_random(
        || {
            let memory = memory(4);
            let start = JournalStart {
                memory: memory.clone(),
                owner: JournalOwner::default(),
                nonce: 0,
                discard: false,
            };
            let journal = Arc::new(Journal::begin(&start, 7));
            let live: Arc<Vec<AtomicU64>> = Arc::new((0..3).map(|_| AtomicU64::new(0)).collect());
            let file: Arc<Vec<AtomicU64>> = Arc::new((0..3).map(|_| AtomicU64::new(0)).collect());
            let mut threads: Vec<Box<dyn FnOnce() + Send>> = Vec::new();
            for entry in 0..2u32 {
                let (journal, live) = (journal.clone(), live.clone());
                threads.push(Box::new(move || {
                    for word in 1..=2u64 {
                        let change = Change::L2 { l1: 0, entry, word };
                        let Some(logged) = journal.append(std::iter::once(change)) else { return };
                        live[entry as usize].store(word, Ordering::SeqCst);
                        drop(logged);
                    }
                }));
            }
            let (writer, from, to) = (journal.clone(), live.clone(), file.clone());
            threads.push(Box::new(move || {
                for _ in 0..2 {
                    let Some(generation) = writer.turn() else { continue };
                    let collected: Vec<u64> =
                        from.iter().map(|w| w.load(Ordering::SeqCst)).collect();
                    for (place, word) in to.iter().zip(collected) {
                        place.store(word, Ordering::SeqCst);
                    }
                    writer.retire(generation);
                }
            }));
            spawn_all(threads);
            // The process dies here. The next one has the file and the journal.
            let mut found: HashMap<u32, u64> =
                (0..2).map(|e| (e, file[e as usize].load(Ordering::SeqCst))).collect();
            if let Found::Kept(kept) = examine(&*memory) {
                for change in kept.changes {
                    if let Change::L2 { entry, word, .. } = change {
                        found.insert(entry, word);
                    }
                }
            }
            for entry in 0..2u32 {
                let want = live[entry as usize].load(Ordering::SeqCst);
                assert_eq!(found.get(&entry), Some(&want), "entry {entry}");
            }
        },
        3000,
    );
}
