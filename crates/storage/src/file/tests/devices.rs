//! Block devices with either sector size. Need root.

use super::bed::{LoopDevice, at, filled, get, len, on, put, skipped};
use super::model::random_operations;
use super::partial::race;
use crate::{FileStorage, OpenOptions, Storage, ZeroMode};
use bedplate_runtime::Backend;
use bedplate_types::{CacheMode, ErrorKind};

const SIZE: u64 = 8 << 20;

/// Runs a test on a device of each sector size.
fn on_devices(what: &str, test: impl Fn(&LoopDevice, u32)) {
    for sector in [512, 4096] {
        match LoopDevice::new(sector, SIZE) {
            Ok(device) => test(&device, sector),
            Err(why) => skipped(&format!("{what} (sectors of {sector})"), &why),
        }
    }
}

#[test]
fn devices_hold_what_was_written_whatever_their_sector_size() {
    on_devices("writing to devices", |device, sector| {
        for (seed, backend, mode) in [
            (21, Backend::Uring, CacheMode::None),
            (22, Backend::Threads, CacheMode::None),
            (23, Backend::Uring, CacheMode::Writeback),
        ] {
            let options = OpenOptions::new(&device.path).cache(mode);
            let s = FileStorage::open(&options).expect("open");
            assert!(s.is_device() && Storage::len(&s).get() == SIZE);
            assert_eq!(s.limits().align, if mode.direct() { sector } else { 1 });
            on(backend, async {
                let zeroes = ZeroMode { unmap: true, fast_only: false };
                s.write_zeroes(at(0), len(SIZE), zeroes).await.expect("zero");
                random_operations(&s, vec![0; SIZE as usize], false, seed, 300).await;
            });
        }
    });
}

#[test]
fn devices_end_where_they_end() {
    on_devices("the end of devices", |device, _| {
        let s = FileStorage::open(&OpenOptions::new(&device.path)).expect("open");
        on(Backend::Uring, async {
            let e = s.write(at(SIZE - 512), filled(1, 1024)).await.expect_err("beyond the end");
            assert_eq!(e.kind(), ErrorKind::NoSpace);
            assert_eq!(s.set_len(len(1)).await.expect_err("fixed").kind(), ErrorKind::Unsupported);
            put(&s, SIZE - 100, &[4; 100]).await;
            let seen = get(&s, SIZE - 101, 200).await;
            assert!(seen[0] == 0 && seen[1..101] == [4; 100] && seen[101..] == [0; 99]);
        });
    });
}

#[test]
fn a_partial_write_on_a_device_never_undoes_a_whole_block_write_beside_it() {
    on_devices("partial and whole writes on devices", |device, _| {
        race(&FileStorage::open(&OpenOptions::new(&device.path)).expect("open"), 1000);
    });
}

#[test]
fn a_discard_of_a_device_leaves_what_is_around_it() {
    on_devices("discards on devices", |device, _| {
        let s = FileStorage::open(&OpenOptions::new(&device.path)).expect("open");
        on(Backend::Uring, async {
            put(&s, 0, &[6; 1 << 20]).await;
            s.discard(at(5000), len(500_000)).await.expect("discard");
            assert!(get(&s, 0, 5000).await == vec![6; 5000]);
            assert!(get(&s, 505_000, 100_000).await == vec![6; 100_000]);
            // Smaller than a block: nothing to give back, nothing to fail.
            s.discard(at(1), len(10)).await.expect("discard");
            let fast = ZeroMode { unmap: true, fast_only: true };
            s.write_zeroes(at(0), len(1 << 20), fast).await.expect("fast zeroes");
            assert!(get(&s, 0, 1 << 20).await == vec![0; 1 << 20]);
        });
    });
}

#[test]
fn a_mounted_device_is_not_opened_for_writing() {
    let mount = match super::bed::Mount::new("ext4", 512) {
        Ok(m) => m,
        Err(why) => return skipped("opening mounted devices", &why),
    };
    let path = mount.device_path();
    let e = FileStorage::open(&OpenOptions::new(path)).expect_err("mounted");
    assert_eq!(e.kind(), ErrorKind::Locked);
    assert!(e.to_string().contains("unmount"), "{e}");
    FileStorage::open(&OpenOptions::new(path).read_only(true)).expect("reading is allowed");
}
