//! Good requests: what is written is read, in every layout, and the used length is right.

use crate::rig::{Rig, SIZE, cached, raw};
use bedplate_types::CacheMode;
use bedplate_vhost_user::BlkOptions;
use bedplate_vhost_user::frontend::ClientOptions;
use bedplate_virtio::spec;

fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 512 + seed) as u8).collect()
}

#[test]
fn what_is_written_is_on_the_host_and_is_read_back() {
    let modes = [CacheMode::Writeback, CacheMode::None, CacheMode::Directsync, CacheMode::Unsafe];
    for (features, mode) in [u64::MAX, !spec::F_EVENT_IDX].into_iter().cycle().zip(modes) {
        let rig = Rig::with(BlkOptions::default(), |d| cached(d, false, mode));
        let options = ClientOptions { features, ..ClientOptions::default() };
        let mut client = rig.client(&options);
        let mut q = client.take_queues().pop().expect("queue");
        for (i, len) in [512, 4096, 5120, 65536, 1 << 20].into_iter().enumerate() {
            let (at, data) = (i * (2 << 20) + 512, pattern(i, len));
            q.write(at as u64, &data).expect("write");
            assert_eq!(q.read(at as u64, len as u32).expect("read"), data);
            assert_eq!(rig.file()[at..at + len], data);
        }
        q.flush().expect("flush");
        assert_eq!(client.features() & spec::BLK_F_FLUSH != 0, mode.write_cache(), "{mode:?}");
        let last = pattern(9, 512);
        q.write(SIZE - 512, &last).expect("write");
        assert_eq!(q.read(SIZE - 512, 512).expect("read"), last);
    }
}

#[test]
fn zeroing_and_discarding_leave_zeroes_and_nothing_else_changes() {
    let rig = Rig::raw();
    let (_client, mut q) = rig.one();
    for unmap in [false, true] {
        q.write(0, &[0xff; 65536]).expect("write");
        q.write_zeroes(8192, 16384, unmap).expect("zero");
        let data = q.read(0, 65536).expect("read");
        assert!(data[8192..24576].iter().all(|&b| b == 0));
        assert!(data[..8192].iter().chain(&data[24576..]).all(|&b| b == 0xff));
    }
    q.discard(32768, 8192).expect("discard");
    let data = q.read(0, 65536).expect("read");
    assert!(data[32768..40960].iter().all(|&b| b == 0));
    assert!(data[40960..].iter().all(|&b| b == 0xff));
}

#[test]
fn used_lengths_cover_the_data_and_the_status() {
    let rig = Rig::raw();
    let (_client, mut q) = rig.one();
    let mut used = |kind, data: &[u8], room| {
        let a = q.request(kind, 0, data, room).expect("answer");
        assert_eq!(a.status, spec::S_OK);
        a.used
    };
    assert_eq!(used(spec::T_IN, &[], 4096), 4097);
    assert_eq!(used(spec::T_OUT, &[0; 4096], 0), 1);
    assert_eq!(used(spec::T_FLUSH, &[], 0), 1);
    assert_eq!(used(spec::T_GET_ID, &[], 20), 21);
}

#[test]
fn any_layout_of_descriptors_is_accepted() {
    let rig = Rig::raw();
    let (_client, mut q) = rig.one();
    let data = pattern(1, 1024);
    let header = |kind: u32| [&kind.to_le_bytes()[..], &[0; 12]].concat();
    let driver = [header(spec::T_OUT), data.clone()].concat();
    for readable in [&[16, 1024][..], &[1040], &[8, 8, 512, 512], &[17, 1023], &[1, 15, 1, 1023]] {
        let a = q.chain(&driver, readable, &[1]).expect("answer");
        assert_eq!((a.status, a.used), (spec::S_OK, 1), "{readable:?}");
    }
    for writable in [&[1024, 1][..], &[1025], &[512, 513], &[1, 1023, 1], &[1000, 24, 1]] {
        let a = q.chain(&header(spec::T_IN), &[16], writable).expect("answer");
        assert_eq!((a.status, a.used), (spec::S_OK, 1025), "{writable:?}");
        assert_eq!(a.data, data);
    }
    for room in [8, 20, 64] {
        let a = q.request(spec::T_GET_ID, 0, &[], room).expect("answer");
        assert_eq!((a.status, &a.data[..8]), (spec::S_OK, &b"bed-1\0\0\0"[..]));
        assert!(a.data.get(20..).unwrap_or(&[]).iter().all(|&b| b == 0xff), "20 bytes at most");
    }
}

#[test]
fn a_read_only_disk_is_read_and_named_but_never_changed() {
    let options = BlkOptions { serial: "ro".into(), ..BlkOptions::default() };
    let rig = Rig::with(options, |d| {
        drop(raw(d, false));
        std::fs::write(d.path().join("disk.raw"), pattern(0, SIZE as usize)).expect("fill");
        raw(d, true)
    });
    let (mut client, mut q) = rig.one();
    assert_ne!(client.features() & spec::BLK_F_RO, 0);
    assert_eq!(client.features() & (spec::BLK_F_DISCARD | spec::BLK_F_WRITE_ZEROES), 0);
    assert_eq!(client.config(36, 24).expect("config"), [0; 24]);
    assert_eq!(q.read(4096, 4096).expect("read"), pattern(0, 8192)[4096..]);
    for kind in [spec::T_OUT, spec::T_DISCARD, spec::T_WRITE_ZEROES] {
        let a = q.request(kind, 0, &[0; 512], 0).expect("answer");
        assert_eq!(a.status, spec::S_IOERR);
    }
    let a = q.request(spec::T_GET_ID, 0, &[], 20).expect("answer");
    assert_eq!((a.status, &a.data[..4]), (spec::S_OK, &b"ro\0\0"[..]));
    assert_eq!(rig.file(), pattern(0, SIZE as usize));
}

#[test]
fn two_queues_on_one_or_two_threads_see_each_others_writes() {
    for threads in [1, 2] {
        let options = BlkOptions { queues: 2, threads, ..BlkOptions::default() };
        let rig = Rig::with(options, |d| raw(d, false));
        let mut client = rig.client(&ClientOptions { queues: 2, ..ClientOptions::default() });
        let mut queues = client.take_queues();
        queues[0].write(0, &[1; 4096]).expect("write");
        queues[1].write(4096, &[2; 4096]).expect("write");
        assert_eq!(queues[1].read(0, 4096).expect("read"), [1; 4096]);
        assert_eq!(queues[0].read(4096, 4096).expect("read"), [2; 4096]);
    }
}

#[test]
fn unmapped_zeroes_give_space_back_and_others_keep_it() {
    use std::os::unix::fs::MetadataExt;
    let rig = Rig::raw();
    let path = rig.dir.path().join("disk.raw");
    let taken = || std::fs::metadata(&path).expect("metadata").blocks() * 512;
    let (_client, mut q) = rig.one();
    for i in 0..4 {
        q.write(i << 20, &pattern(3, 1 << 20)).expect("write");
    }
    q.flush().expect("flush");
    let full = taken();
    q.write_zeroes(0, 2 << 20, false).expect("zero");
    q.flush().expect("flush");
    assert!(taken() >= full, "zeroes that may not be unmapped keep their space");
    q.write_zeroes(0, 1 << 20, true).expect("zero");
    assert!(taken() <= full - (1 << 20));
    q.discard(1 << 20, 1 << 20).expect("discard");
    assert!(taken() <= full - (2 << 20));
    assert!(q.read(0, 2 << 20).expect("read").iter().all(|&b| b == 0));
    assert_eq!(q.read(3 << 20, 1 << 20).expect("read"), pattern(3, 1 << 20));
}
