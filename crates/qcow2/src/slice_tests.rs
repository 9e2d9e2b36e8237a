//! A slice's states, and its changes seen from other threads.

use crate::slice::{Slice, Updated, WordChange};

#[test]
fn a_dirty_slice_is_never_retired_and_a_retired_one_never_changed() {
    let s = Slice::new([0, 1].into_iter(), false);
    assert_eq!(s.update(&[WordChange::whole(1, 5)], |_| true), Updated::NewlyDirty);
    assert_eq!(s.update(&[WordChange::whole(1, 6)], |_| false), Updated::Full);
    assert!(!s.retire() && !s.retire());
    assert_eq!(s.collect()[8..], 5u64.to_be_bytes());
    assert!(!s.retire(), "still being written");
    s.written();
    assert!(s.retire());
    assert_eq!(s.update(&[WordChange::whole(0, 9)], |_| true), Updated::Gone);
    assert_eq!(s.get(0), 0);
}

#[test]
fn a_change_keeps_the_other_bits_of_a_word() {
    let s = Slice::new([1, 0b1010].into_iter(), false);
    let mut told = Vec::new();
    s.update(&[WordChange { index: 1, keep: !0b10, set: 1 }], |words| {
        told.extend_from_slice(words);
        true
    });
    assert_eq!((s.pair(0), told), ((1, 0b1001), vec![(1, 0b1001)]));
}

#[test]
fn pairs_of_words_are_never_seen_half_changed() {
    let s = Slice::new([0, 0].into_iter(), false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in 1..=20_000 {
                s.update(&[WordChange::whole(1, n), WordChange::whole(0, n)], |_| true);
            }
        });
        loop {
            let (a, b) = s.pair(0);
            assert_eq!(a, b);
            if a == 20_000 {
                break;
            }
        }
    });
}
