//! Tests of the simulated storage: does it find the bugs that it was made to find?

use super::*;
use crate::exec;
use bedplate_runtime::buf::SharedBuf;
use std::collections::BTreeSet;

const EIO: i32 = 5;

fn at(n: u64) -> HostOffset {
    HostOffset::new(n)
}

fn filled(byte: u8, len: usize) -> IoVec {
    let buf = SharedBuf::zeroed(len).expect("memory").iovec();
    buf.fill(0, len, byte);
    buf
}

async fn write(s: &SimStorage, offset: u64, byte: u8, len: usize) -> Result<()> {
    s.write(at(offset), filled(byte, len)).await
}

fn byte(image: &Image, offset: u64) -> u8 {
    let mut b = [0];
    image.read(offset, &mut b);
    b[0]
}

/// A file system in small: the record at 4096, and a header at 0 that says that the record is there.
async fn commit(s: &SimStorage, with_barrier: bool) -> Result<()> {
    write(s, 4096, 7, 4096).await?;
    if with_barrier {
        s.sync().await?;
    }
    write(s, 0, 1, 512).await?;
    s.sync().await
}

/// States, over all moments of the run, whose header points to a record that is not wholly there.
fn broken_states(seed: u64, with_barrier: bool) -> usize {
    let s = SimStorage::new(0, SimOptions::seeded(seed));
    exec::block_on(commit(&s, with_barrier)).expect("no faults");
    let history = s.history();
    let mut replay = history.replay();
    let mut broken = 0;
    while replay.step().is_some() {
        for state in replay.crash_point().states(seed, 1000) {
            let record = (0..8).all(|i| byte(&state.image, 4096 + i * 512) == 7);
            if byte(&state.image, 0) == 1 && !record {
                broken += 1;
            }
        }
    }
    broken
}

#[test]
fn a_protocol_without_a_barrier_is_caught_and_one_with_it_is_not() {
    for seed in 0..20 {
        assert!(broken_states(seed, false) > 0, "seed {seed} misses the bug");
        assert_eq!(broken_states(seed, true), 0, "seed {seed}");
    }
}

#[test]
fn after_the_last_sync_there_is_one_state() {
    let s = SimStorage::new(0, SimOptions::seeded(1));
    exec::block_on(commit(&s, true)).expect("no faults");
    let states: Vec<_> = s.crash_point().states(0, 100).collect();
    assert_eq!(states.len(), 1);
    assert_eq!(states[0].image, s.image());
    assert_eq!(s.durable(), s.image());
}

#[test]
fn few_changes_are_listed_completely_and_without_repeats() {
    let s = SimStorage::new(4096, SimOptions::default());
    exec::block_on(async {
        write(&s, 0, 1, 1024).await.expect("write");
        write(&s, 4096, 2, 512).await.expect("write");
    });
    let states = s.crash_point().states(0, 100);
    assert!(states.is_complete());
    let seen: BTreeSet<Vec<u8>> = states.map(|st| st.image.to_vec()).collect();
    // Two sectors inside; behind the end: short, long with zeroes, long with data.
    assert_eq!(seen.len(), 4 * 3);
}

#[test]
fn samples_hold_the_corners_and_differ() {
    let s = SimStorage::new(1 << 20, SimOptions::default());
    exec::block_on(async {
        for i in 0..20u64 {
            write(&s, i * 4096, i as u8 + 1, 4096).await.expect("write");
        }
    });
    let point = s.crash_point();
    let states = point.states(3, 500);
    assert!(!states.is_complete());
    let seen: BTreeSet<String> = states.map(|st| st.to_string()).collect();
    assert_eq!(seen.len(), 500);
    assert!(seen.contains(&point.keep_all().to_string()));
    assert!(seen.contains(&point.drop_all().to_string()));
}

#[test]
fn data_beyond_the_old_end_and_the_length_arrive_independently() {
    let s = SimStorage::new(512, SimOptions::default());
    exec::block_on(write(&s, 512, 9, 512)).expect("write");
    let seen: BTreeSet<(u64, u8)> =
        s.crash_point().states(0, 10).map(|st| (st.image.len(), byte(&st.image, 512))).collect();
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), [(512, 0), (1024, 0), (1024, 9)]);
}

#[test]
fn a_shrink_and_a_discard_may_or_may_not_have_happened() {
    let s = SimStorage::from_image(Image::from_bytes(&[5; 8192]), SimOptions::default());
    exec::block_on(async {
        s.discard(at(0), ByteLen::new(512)).await.expect("discard");
        s.set_len(ByteLen::new(4096)).await.expect("set_len");
    });
    let seen: BTreeSet<(u64, u8)> =
        s.crash_point().states(0, 10).map(|st| (st.image.len(), byte(&st.image, 0))).collect();
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), [(4096, 0), (4096, 5), (8192, 0), (8192, 5)]);
}

#[test]
fn concurrent_requests_complete_in_any_order() {
    let run = |seed| {
        let s = SimStorage::new(0, SimOptions::seeded(seed));
        let done = std::cell::RefCell::new(Vec::new());
        let (s, done_ref) = (&s, &done);
        exec::join_all(
            seed,
            (0..4u8).map(|i| async move {
                write(s, 0, i, 512).await.expect("write");
                done_ref.borrow_mut().push(i);
            }),
        )
        .expect("no deadlock");
        (done.take(), byte(&s.image(), 0))
    };
    assert_eq!(run(5), run(5));
    let all: BTreeSet<_> = (0..100).map(run).collect();
    let last_done_lost = all.iter().any(|(order, value)| order.last() != Some(value));
    assert!(all.len() > 20 && last_done_lost, "{} outcomes", all.len());
}

#[test]
fn faults_strike_and_a_torn_write_leaves_its_beginning() {
    let mut torn = false;
    for seed in 0..20 {
        let s = SimStorage::new(8192, SimOptions::seeded(seed));
        s.inject(Fault::nth_of(OpKind::Write, 1, EIO).torn());
        exec::block_on(async {
            write(&s, 0, 1, 512).await.expect("first");
            let e = write(&s, 4096, 2, 4096).await.expect_err("second");
            assert_eq!(e.raw_errno(), Some(EIO));
            write(&s, 512, 3, 512).await.expect("third");
        });
        let image = s.image();
        torn |= byte(&image, 4096) == 2 && byte(&image, 8191) == 0;
        assert_eq!((s.counts().of(OpKind::Write), s.counts().failed), (3, 1));
    }
    assert!(torn);
}

#[test]
fn a_failed_sync_promises_nothing() {
    let s = SimStorage::new(4096, SimOptions::default());
    s.inject(Fault::nth_of(OpKind::Sync, 0, EIO));
    exec::block_on(async {
        write(&s, 0, 1, 512).await.expect("write");
        s.sync().await.expect_err("fault");
        s.sync().await.expect("second sync");
    });
    assert_eq!(s.crash_point().states(0, 10).count(), 2);
}

#[test]
fn held_requests_wait_and_a_hold_that_is_never_released_is_a_deadlock() {
    let s = SimStorage::new(4096, SimOptions::default());
    let hold = s.hold(Some(OpKind::Write), 0..512);
    let mut pool = exec::Pool::new(0);
    pool.spawn(async { write(&s, 0, 1, 512).await.expect("write") });
    pool.spawn(async { write(&s, 512, 2, 512).await.expect("write") });
    assert_eq!(pool.run(), Err(exec::Stuck::Deadlock(vec![0])));
    assert_eq!((hold.caught(), byte(&s.image(), 0), byte(&s.image(), 512)), (1, 0, 2));
    hold.release();
    assert_eq!(pool.run(), Ok(()));
    assert_eq!(byte(&s.image(), 0), 1);
}

#[test]
fn a_dropped_request_runs_to_its_end() {
    let s = SimStorage::new(4096, SimOptions::default());
    let hold = s.hold(None, 0..u64::MAX);
    let mut pool = exec::Pool::new(0);
    pool.spawn(async { write(&s, 0, 1, 512).await.expect("write") });
    assert!(pool.run().is_err());
    drop(pool);
    assert_eq!(s.abandoned(), 1);
    hold.release();
    s.settle();
    assert_eq!((s.abandoned(), byte(&s.image(), 0)), (0, 1));
}

#[test]
fn devices_neither_grow_nor_shrink_and_files_grow_to_their_capacity() {
    let device = SimStorage::new(4096, SimOptions { device: true, ..SimOptions::default() });
    let full = SimStorage::new(0, SimOptions { capacity: 4096, ..SimOptions::default() });
    exec::block_on(async {
        for s in [&device, &full] {
            write(s, 0, 1, 4096).await.expect("inside");
            let e = write(s, 4096, 1, 512).await.expect_err("outside");
            assert_eq!(e.kind(), ErrorKind::NoSpace);
        }
        let e = device.set_len(ByteLen::new(10)).await.expect_err("fixed");
        assert_eq!(e.kind(), ErrorKind::Unsupported);
    });
}

#[test]
fn reads_beyond_the_end_are_zeroes_and_extents_tell_holes() {
    let s = SimStorage::new(1 << 20, SimOptions::default());
    exec::block_on(async {
        write(&s, 65536, 3, 4096).await.expect("write");
        let buf = filled(1, 8192);
        s.read(at((1 << 20) - 4096), buf.clone()).await.expect("read");
        let mut out = [1; 8192];
        buf.copy_to(0, &mut out);
        assert_eq!(out, [0; 8192]);
        let e = s.extent(at(0), ByteLen::new(1 << 20)).await.expect("extent");
        assert_eq!((e.len.get(), e.data), (65536, false));
        let e = s.extent(at(65536), ByteLen::new(1 << 20)).await.expect("extent");
        assert_eq!((e.len.get(), e.data), (4096, true));
    });
    let s = s.counts();
    assert_eq!((s.of(OpKind::Extent), s.of(OpKind::Read), s.unaligned), (2, 1, 0));
}
