//! Tests of files and devices. What needs root says so on the terminal when it is skipped.

mod bed;
mod devices;
mod locks;
mod model;
mod partial;

use super::*;
use crate::{LockMode, OpenOptions};
use bed::{at, filled, get, len, on_both, put};
use bedplate_types::CacheMode;
use std::os::unix::fs::{FileExt, symlink};

#[test]
fn reads_beyond_the_end_are_zeroes() {
    on_both(|dir| async move {
        let path = dir.join("a");
        std::fs::write(&path, vec![7; 1000]).expect("file");
        let s = FileStorage::open(&OpenOptions::new(&path)).expect("open");
        let mut want = vec![7; 1000];
        want.resize(8192, 0);
        assert!(get(&s, 0, 8192).await == want);
        assert!(get(&s, 999, 3).await == [7, 0, 0]);
        assert!(get(&s, 1 << 40, 512).await == vec![0; 512]);
    });
}

#[test]
fn writing_parts_of_the_last_block_does_not_change_an_odd_length() {
    on_both(|dir| async move {
        let path = dir.join("a");
        std::fs::write(&path, vec![7; 5000]).expect("file");
        let s = FileStorage::open(&OpenOptions::new(&path)).expect("open");
        put(&s, 4990, &[1; 10]).await;
        put(&s, 4000, &[2; 700]).await;
        assert_eq!(
            (Storage::len(&s).get(), std::fs::metadata(&path).expect("stat").len()),
            (5000, 5000)
        );
        put(&s, 4999, &[3; 4]).await;
        assert_eq!(
            (Storage::len(&s).get(), std::fs::metadata(&path).expect("stat").len()),
            (5003, 5003)
        );
        let mut want = vec![7; 5003];
        want[4990..5000].fill(1);
        want[4000..4700].fill(2);
        want[4999..].fill(3);
        assert!(std::fs::read(&path).expect("read") == want);
        assert!(get(&s, 0, 5003).await == want);
    });
}

#[test]
fn direct_requests_are_only_let_through_when_the_kernel_takes_them_as_they_are() {
    on_both(|dir| async move {
        let path = dir.join("a");
        let s = FileStorage::create(&OpenOptions::new(&path), len(1 << 20)).expect("create");
        let block = s.limits().align as usize;
        let buf = filled(1, 2 * block);
        let base = buf.raw().next().expect("segment").0;
        let begin = |write, offset: usize, ptr, n| {
            let pin = s.begin_direct(write, at(offset as u64), ByteLen::from(n), bits([(ptr, n)]));
            pin.map(|p| s.end_direct(p)).is_some()
        };
        for write in [false, true] {
            assert!(begin(write, block, base, block));
            assert!(!begin(write, 1, base, block), "offset");
            assert!(!begin(write, 0, base, block + 1), "length");
            assert!(!begin(write, 1 << 20, base, block), "beyond the end");
            assert!(!begin(write, 0, base.wrapping_add(1), block), "memory");
        }
        assert!(
            s.begin_direct(true, HostOffset::new(u64::MAX), ByteLen::new(512), bits([(base, 512)]))
                .is_none()
        );
        drop(s);
        let s = FileStorage::open(&OpenOptions::new(&path).read_only(true)).expect("open");
        assert!(s.begin_direct(true, at(0), ByteLen::from(block), bits([(base, block)])).is_none());
        assert!(
            s.begin_direct(false, at(0), ByteLen::from(block), bits([(base, block)])).is_some()
        );
    });
}

#[test]
fn a_hole_that_was_written_to_is_no_longer_told_as_a_hole() {
    on_both(|dir| async move {
        let s =
            FileStorage::create(&OpenOptions::new(dir.join("a")), len(1 << 20)).expect("create");
        let ask = async |start| {
            let e = s.extent(at(start), len(1 << 20)).await.expect("extent");
            (e.len.get(), e.data)
        };
        assert_eq!(ask(0).await, (1 << 20, false));
        put(&s, 65536, &[1; 65536]).await;
        assert_eq!(ask(0).await, (65536, false));
        assert_eq!(ask(65536).await, (65536, true));
        assert_eq!(ask(65536 + 4096).await, (65536 - 4096, true));
        let buf = filled(2, 4096);
        assert_eq!(ask(0).await, (65536, false));
        let pin =
            s.begin_direct(true, at(0), ByteLen::new(4096), bits(buf.raw())).expect("aligned");
        fs::write_full(s.direct_file().expect("a file"), buf, at(0)).await.expect("write");
        s.end_direct(pin);
        assert_eq!(ask(0).await, (4096, true));
    });
}

#[test]
fn what_is_opened_for_reading_only_is_not_changed() {
    on_both(|dir| async move {
        let path = dir.join("a");
        std::fs::write(&path, vec![7; 4096]).expect("file");
        let s = FileStorage::open(&OpenOptions::new(&path).read_only(true)).expect("open");
        let zero = ZeroMode { unmap: true, fast_only: false };
        let errors = [
            s.write(at(0), filled(1, 512)).await,
            s.discard(at(0), len(4096)).await,
            s.write_zeroes(at(0), len(4096), zero).await,
            s.allocate(at(0), len(8192)).await,
            s.set_len(len(0)).await,
        ];
        for e in errors {
            assert_eq!(e.expect_err("read-only").kind(), ErrorKind::ReadOnly);
        }
        assert!(std::fs::read(&path).expect("read") == vec![7; 4096]);
    });
}

#[test]
fn growing_never_makes_a_file_shorter_and_allocates_nothing() {
    on_both(|dir| async move {
        let path = dir.join("a");
        let s = FileStorage::create(&OpenOptions::new(&path), len(0)).expect("create");
        s.grow(len(1 << 20)).await.expect("grow");
        assert_eq!(s.len(), len(1 << 20));
        s.grow(len(4096)).await.expect("shorter");
        let meta = std::fs::metadata(&path).expect("metadata");
        assert_eq!((meta.len(), s.len()), (1 << 20, len(1 << 20)));
        assert_eq!(std::os::unix::fs::MetadataExt::blocks(&meta), 0);
    });
}

#[test]
fn offsets_that_no_file_has_are_refused() {
    on_both(|dir| async move {
        let s = FileStorage::create(&OpenOptions::new(dir.join("a")), len(0)).expect("create");
        for start in [u64::MAX, i64::MAX as u64, u64::MAX - 511] {
            let e = s.write(at(start), filled(1, 512)).await.expect_err("write");
            assert_eq!(e.kind(), ErrorKind::OutOfRange);
            let e = s.read(at(start), filled(1, 512)).await.expect_err("read");
            assert_eq!(e.kind(), ErrorKind::OutOfRange);
        }
        assert_eq!(
            s.set_len(len(u64::MAX)).await.expect_err("length").kind(),
            ErrorKind::OutOfRange
        );
    });
}

#[test]
fn what_cannot_hold_a_disk_is_refused_with_a_sentence_and_without_waiting() {
    let dir = tempfile::tempdir().expect("tempdir");
    let pipe = dir.path().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo");
    assert!(made.success());
    for (path, word) in [(pipe.as_path(), "a pipe"), (dir.path(), "a directory")] {
        let e = FileStorage::open(&OpenOptions::new(path).read_only(true)).expect_err("no disk");
        assert_eq!(e.kind(), ErrorKind::InvalidInput);
        assert!(e.to_string().contains(word), "{e}");
    }
    let e = FileStorage::open(&OpenOptions::new(dir.path().join("none"))).expect_err("missing");
    assert_eq!(e.kind(), ErrorKind::NotFound);
    let share = OpenOptions::new(dir.path().join("none")).lock(LockMode::ForceShare);
    assert_eq!(
        FileStorage::open(&share).expect_err("shared writing").kind(),
        ErrorKind::InvalidInput
    );
}

#[test]
fn creating_empties_an_old_file_unless_it_must_not_exist_or_is_in_use() {
    on_both(|dir| async move {
        let path = dir.join("a");
        std::fs::write(&path, vec![7; 100_000]).expect("file");
        symlink(&path, dir.join("link")).expect("link");
        let options = OpenOptions::new(&path);
        let e =
            FileStorage::create(&options.clone().exclusive(true), len(4096)).expect_err("exists");
        assert_eq!(e.kind(), ErrorKind::InvalidInput);
        let user = FileStorage::open(&options).expect("open");
        let e = FileStorage::create(&OpenOptions::new(dir.join("link")), len(4096))
            .expect_err("in use");
        assert_eq!(e.kind(), ErrorKind::Locked);
        assert_eq!(std::fs::metadata(&path).expect("stat").len(), 100_000);
        drop(user);
        let s = FileStorage::create(&options, len(4096)).expect("create");
        assert!(get(&s, 0, 4096).await == vec![0; 4096]);
        assert_eq!(std::fs::metadata(&path).expect("stat").len(), 4096);
    });
}

#[test]
fn files_without_direct_io_are_refused_with_a_way_out() {
    // The kernel's own files are regular ones without direct I/O.
    let options = OpenOptions::new("/proc/version").read_only(true).lock(LockMode::Off);
    let e = FileStorage::open(&options).expect_err("no direct I/O");
    assert!(e.to_string().contains("--cache writeback"), "{e}");
}

#[test]
fn each_cache_mode_opens_the_file_as_it_says() {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("a");
    std::fs::write(&path, vec![0; 4096]).expect("file");
    for (mode, direct, dsync) in [
        (CacheMode::None, true, false),
        (CacheMode::Directsync, true, true),
        (CacheMode::Writeback, false, false),
        (CacheMode::Writethrough, false, true),
        (CacheMode::Unsafe, false, false),
    ] {
        let s = FileStorage::open(&OpenOptions::new(&path).cache(mode)).expect("open");
        let flags =
            rustix::fs::fcntl_getfl(s.direct_file().expect("a file").as_fd()).expect("flags");
        assert_eq!(flags.contains(rustix::fs::OFlags::DIRECT), direct, "{mode}");
        assert_eq!(flags.contains(rustix::fs::OFlags::DSYNC), dsync, "{mode}");
        assert_eq!(s.limits().align == 1, !direct, "{mode}");
    }
}

#[test]
fn zeroing_gives_space_back_or_keeps_it_as_asked() {
    on_both(|dir| async move {
        let path = dir.join("a");
        let s = FileStorage::create(&OpenOptions::new(&path), len(0)).expect("create");
        let blocks = || rustix::fs::stat(&path).expect("stat").st_blocks;
        put(&s, 0, &[1; 1 << 20]).await;
        let full = blocks();
        let keep = ZeroMode { unmap: false, fast_only: false };
        s.write_zeroes(at(0), len(1 << 20), keep).await.expect("zero");
        assert_eq!(blocks(), full);
        s.write_zeroes(at(0), len(1 << 20), ZeroMode { unmap: true, ..keep }).await.expect("zero");
        assert!(blocks() < full / 8, "{} of {full}", blocks());
        s.write_zeroes(at(1 << 20), len(1 << 20), ZeroMode { unmap: true, ..keep })
            .await
            .expect("grow");
        assert!(blocks() < full / 8 && Storage::len(&s).get() == 2 << 20);
        s.allocate(at(0), len(3 << 20)).await.expect("allocate");
        assert!(blocks() >= 3 * full && Storage::len(&s).get() == 3 << 20);
        let mut byte = [9];
        std::fs::File::open(&path)
            .expect("open")
            .read_exact_at(&mut byte, (3 << 20) - 1)
            .expect("read");
        assert_eq!(byte, [0]);
    });
}

/// The alignment of these segments.
fn bits(segs: impl IntoIterator<Item = (*mut u8, usize)>) -> SegmentBits {
    segs.into_iter().fold(SegmentBits::default(), |b, (ptr, n)| SegmentBits {
        addresses: b.addresses | ptr as usize,
        lengths: b.lengths | n,
    })
}
