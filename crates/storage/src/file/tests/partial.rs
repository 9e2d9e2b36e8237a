//! Partial-block writes beside whole-block writes to the same block, on two threads.

use super::bed::{Random, at, file_in, filled, get, len, on};
use super::bits;
use crate::{FileStorage, OpenOptions, Storage};
use bedplate_runtime::Backend;
use bedplate_types::ByteLen;
use std::sync::atomic::{AtomicBool, Ordering};

/// The first part of the block belongs to the partial writer; all of the rest must be what the whole-block writer
/// wrote last.
async fn whole_blocks(s: &FileStorage, block: usize, part: usize, rounds: u32) {
    for round in 0..rounds {
        let byte = (round % 100) as u8 + 1;
        let buf = filled(byte, block);
        // By turns as the hot path and as the slow one do it.
        let pin = if round % 2 == 0 {
            s.begin_direct(true, at(0), ByteLen::from(block), bits(buf.raw()))
        } else {
            None
        };
        match pin {
            Some(pin) => {
                bedplate_runtime::fs::write_full(s.direct_file().expect("a file"), buf, at(0))
                    .await
                    .expect("write");
                s.end_direct(pin);
            }
            None => s.write(at(0), buf).await.expect("write"),
        }
        let seen = get(s, 0, block).await;
        let stale = seen[part..].iter().position(|b| *b != byte);
        assert_eq!(stale, None, "round {round}: a partial write has brought old bytes back");
    }
}

async fn partial_writes(s: &FileStorage, part: usize, stop: &AtomicBool) {
    let mut r = Random(5);
    while !stop.load(Ordering::Relaxed) {
        let byte = 200 + r.below(50) as u8;
        s.write(at(0), filled(byte, part)).await.expect("write");
    }
}

pub(super) fn race(s: &FileStorage, rounds: u32) {
    let block = s.limits().align as usize;
    let part = block / 4;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let partial = scope.spawn(|| on(Backend::Uring, partial_writes(s, part, &stop)));
        let whole = scope.spawn(|| on(Backend::Uring, whole_blocks(s, block, part, rounds)));
        let result = whole.join();
        stop.store(true, Ordering::Relaxed);
        partial.join().expect("partial writer");
        result.expect("whole-block writer");
    });
}

#[test]
fn a_partial_write_never_undoes_a_whole_block_write_beside_it() {
    let dir = tempfile::tempdir().expect("tempdir");
    let options = OpenOptions::new(file_in(dir.path()));
    race(&FileStorage::create(&options, len(65536)).expect("create"), 300);
}

#[test]
fn partial_writes_to_the_last_odd_block_keep_off_whole_writes_before_it() {
    let dir = tempfile::tempdir().expect("tempdir");
    let options = OpenOptions::new(file_in(dir.path()));
    // The last block shares a page with the one that is written whole.
    let s = FileStorage::create(&options, len(2000)).expect("create");
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            on(Backend::Uring, async {
                while !stop.load(Ordering::Relaxed) {
                    s.write(at(1900), filled(9, 100)).await.expect("write");
                }
            })
        });
        let whole = scope.spawn(|| on(Backend::Uring, whole_blocks(&s, 512, 0, 300)));
        let result = whole.join();
        stop.store(true, Ordering::Relaxed);
        result.expect("whole-block writer");
    });
    assert_eq!(Storage::len(&s).get(), 2000);
}

#[test]
fn a_dropped_partial_write_runs_to_its_end_and_gives_its_locks_back() {
    let dir = tempfile::tempdir().expect("tempdir");
    let options = OpenOptions::new(file_in(dir.path()));
    let s = FileStorage::create(&options, len(65536)).expect("create");
    on(Backend::Uring, async {
        for _ in 0..50 {
            let mut write = Box::pin(s.write(at(100), filled(3, 50)));
            // One poll starts it.
            std::future::poll_fn(|cx| {
                let _ = write.as_mut().poll(cx);
                std::task::Poll::Ready(())
            })
            .await;
            drop(write);
            s.write(at(0), filled(1, 50)).await.expect("write");
        }
        s.sync().await.expect("sync");
        let seen = get(&s, 0, 200).await;
        assert!(seen[..50] == [1; 50] && seen[100..150] == [3; 50]);
    });
}
