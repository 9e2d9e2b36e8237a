//! The journal on plain memory: kills at every store, and threads that append while write-backs come and go.

use crate::journal::*;
use bedplate_storage::SharedWords;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

const OWNER: JournalOwner = JournalOwner { boot: [1, 2], file: [3, 4, 5, 6] };

fn memory(room: usize) -> Arc<dyn SharedWords> {
    let words: Box<[AtomicU64]> =
        (0..HEADER + 2 * RECORD * room).map(|_| AtomicU64::new(0)).collect();
    Arc::new(words)
}

fn begin(memory: &Arc<dyn SharedWords>) -> Journal {
    let start = JournalStart { memory: memory.clone(), owner: OWNER, nonce: 0, discard: false };
    Journal::begin(&start, 77)
}

fn l2(entry: u32, word: u64) -> Change {
    Change::L2 { l1: 9, entry, word }
}

fn kept(memory: &dyn SharedWords) -> Vec<Change> {
    match examine(memory) {
        Found::Kept(kept) => {
            assert_eq!((kept.owner, kept.token), (OWNER, 77));
            kept.changes
        }
        other => panic!("expected a journal, found {other:?}"),
    }
}

fn copy(memory: &dyn SharedWords) -> Vec<u64> {
    memory.words().iter().map(|w| w.load(Ordering::Relaxed)).collect()
}

fn put(words: &[u64]) -> Box<[AtomicU64]> {
    words.iter().map(|w| AtomicU64::new(*w)).collect()
}

#[test]
fn changes_are_found_in_their_order_until_they_are_retired() {
    let memory = memory(8);
    let journal = begin(&memory);
    assert_eq!(kept(&*memory), []);
    assert_eq!(journal.turn(), None, "nothing to write back");
    let top = Change::L1 { index: (1 << 22) - 1, word: 1 << 63 | 0x5_0000 };
    let far = Change::L2 { l1: 3, entry: (1 << 18) - 1, word: u64::MAX };
    drop(journal.append([top, far].into_iter()).expect("room"));
    let first = journal.turn().expect("something");
    drop(journal.append([l2(1, 5)].into_iter()).expect("room"));
    assert_eq!(kept(&*memory), [top, far, l2(1, 5)]);
    journal.retire(first);
    assert_eq!(kept(&*memory), [l2(1, 5)]);
    let second = journal.turn().expect("something");
    drop(journal.append([l2(1, 6)].into_iter()).expect("room"));
    assert_eq!(kept(&*memory), [l2(1, 5), l2(1, 6)]);
    journal.retire(second);
    let next = Journal::go_on(memory.clone());
    assert_eq!(kept(&*memory), [], "all was taken up");
    drop(next.append([l2(2, 2)].into_iter()).expect("room"));
    assert_eq!(kept(&*memory), [l2(2, 2)]);
    next.end();
    assert!(matches!(examine(&*memory), Found::Empty));
}

#[test]
fn a_full_half_takes_nothing_until_a_write_back_has_ended() {
    let memory = memory(4);
    let journal = begin(&memory);
    drop(journal.append([l2(0, 1), l2(1, 1)].into_iter()).expect("room"));
    assert!(!journal.wants_write_back());
    drop(journal.append([l2(2, 1)].into_iter()).expect("room"));
    assert!(journal.wants_write_back());
    assert!(journal.append([l2(3, 1), l2(4, 1)].into_iter()).is_none());
    let generation = journal.turn().expect("something");
    drop(journal.append([l2(3, 1), l2(4, 1), l2(5, 1), l2(6, 1)].into_iter()).expect("room"));
    assert!(journal.append([l2(7, 1)].into_iter()).is_none());
    journal.retire(generation);
    assert!(journal.append([l2(7, 1)].into_iter()).is_none(), "the half in use is still full");
    journal.retire(journal.turn().expect("something"));
    drop(journal.append([l2(7, 1)].into_iter()).expect("room"));
    assert_eq!(kept(&*memory), [l2(7, 1)]);
}

#[test]
fn a_group_that_a_kill_cut_off_does_not_count_and_all_others_do() {
    let memory = memory(8);
    let journal = begin(&memory);
    // Both halves hold whole old records, which a torn new one could be taken for.
    for round in 0..4 {
        let group = [l2(0, round), l2(1, round), l2(2, round), l2(3, round)];
        drop(journal.append(group.into_iter()).expect("room"));
        journal.retire(journal.turn().expect("something"));
    }
    let whole = [l2(5, 50), l2(6, 60)];
    drop(journal.append(whole.into_iter()).expect("room"));
    let before = copy(&*memory);
    drop(journal.append([l2(7, 1), l2(8, 2), l2(9, 3)].into_iter()).expect("room"));
    let after = copy(&*memory);
    let last = [l2(1, 9)];
    drop(journal.append(last.into_iter()).expect("room"));
    let end = copy(&*memory);
    // The order of the stores: the tail, then of each record the word and what tells of it.
    let at =
        HEADER + half(journal.word(AT_CURRENT).load(Ordering::Relaxed)) * 8 * RECORD + 2 * RECORD;
    let order = [at + 1, at, at + 3, at + 2, at + 5, at + 4];
    let changed: Vec<usize> = (0..before.len()).filter(|i| before[*i] != after[*i]).collect();
    assert!(changed.iter().all(|i| order.contains(i) || *i < HEADER), "stores: {changed:?}");
    for done in 0..order.len() {
        let mut words = end.clone();
        for at in &order[done..] {
            words[*at] = before[*at];
        }
        let expected = [&whole[..], &last[..]].concat();
        assert_eq!(kept(&put(&words)), expected, "killed after {done} stores");
    }
    let whole = [&whole[..], &[l2(7, 1), l2(8, 2), l2(9, 3)], &last[..]].concat();
    assert_eq!(kept(&put(&end)), whole);
}

#[test]
fn a_kill_while_a_write_back_begins_or_a_journal_is_made_loses_nothing() {
    let memory = memory(8);
    let journal = begin(&memory);
    drop(journal.append([l2(0, 1)].into_iter()).expect("room"));
    journal.retire(journal.turn().expect("something"));
    drop(journal.append([l2(0, 2)].into_iter()).expect("room"));
    let before = copy(&*memory);
    let generation = before[AT_CURRENT];
    journal.turn().expect("something");
    let after = copy(&*memory);
    let next = AT_HALVES[half(generation + 1)];
    let order = [next, next + 1, AT_CURRENT, AT_HALVES[half(generation)] + 1];
    let changed: Vec<usize> = (0..before.len()).filter(|i| before[*i] != after[*i]).collect();
    assert!(changed.iter().all(|i| order.contains(i)), "stores: {changed:?}");
    for done in 0..=order.len() {
        let mut words = before.clone();
        order[..done].iter().for_each(|at| words[*at] = after[*at]);
        assert_eq!(kept(&put(&words)), [l2(0, 2)], "killed after {done} stores");
    }
}

#[test]
fn foreign_and_damaged_words_are_not_believed() {
    let memory = memory(8);
    assert!(matches!(examine(&*memory), Found::Empty));
    let journal = begin(&memory);
    drop(journal.append([l2(0, 1)].into_iter()).expect("room"));
    let good = copy(&*memory);
    for at in 0..AT_LIVE {
        let mut words = good.clone();
        words[at] ^= 1 << 17;
        assert!(matches!(examine(&put(&words)), Found::Unknown), "word {at}");
    }
    let record = HEADER + half(good[AT_CURRENT]) * 8 * RECORD;
    for bit in 0..128 {
        let mut words = good.clone();
        words[record + bit / 64] ^= 1 << (bit % 64);
        assert_eq!(kept(&put(&words)), [], "bit {bit} of a record");
    }
    assert!(matches!(examine(&put(&good[..600 - 90])), Found::Unknown), "shorter");
}

/// What the file and the journal hold together must always be at least what was appended before.
#[test]
fn threads_append_while_write_backs_come_and_go_and_no_change_is_lost() {
    const THREADS: u32 = 3;
    let memory = memory(64);
    let journal = begin(&memory);
    // Entry to word, in memory and in the file, as the engine's slices are.
    let (table, file) = (Mutex::new(HashMap::new()), Mutex::new(HashMap::new()));
    let write_back = |one: &Mutex<()>| {
        let _one = one.lock().expect("lock");
        let generation = journal.turn();
        let now = table.lock().expect("lock").clone();
        *file.lock().expect("lock") = now;
        if let Some(generation) = generation {
            journal.retire(generation);
        }
    };
    let one = Mutex::new(());
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (journal, table, file, write_back, one) =
                (&journal, &table, &file, &write_back, &one);
            let memory = &memory;
            scope.spawn(move || {
                for round in 1..3000_u64 {
                    let entry = thread * 8 + (round % 8) as u32;
                    let logged = loop {
                        match journal.append([l2(entry, round)].into_iter()) {
                            Some(logged) => break logged,
                            None => write_back(one),
                        }
                    };
                    table.lock().expect("lock").insert(entry, round);
                    drop(logged);
                    if round % 64 == 0 {
                        // The journal first: what leaves it meanwhile is in the file.
                        let found = kept(&**memory).into_iter().rev().find_map(|c| match c {
                            Change::L2 { entry: e, word, .. } if e == entry => Some(word),
                            _ => None,
                        });
                        let written = file.lock().expect("lock").get(&entry).copied();
                        assert!(found.max(written) == Some(round), "{found:?} {written:?} {round}");
                    }
                }
            });
        }
        scope.spawn(|| (0..500).for_each(|_| write_back(&one)));
    });
    write_back(&one);
    assert_eq!(kept(&*memory), []);
    assert_eq!(*file.lock().expect("lock"), *table.lock().expect("lock"));
}
