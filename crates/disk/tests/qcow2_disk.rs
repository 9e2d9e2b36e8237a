//! A disk over a qcow2 image on simulated storage, step by step.

use bedplate_disk::{Disk, Layer};
use bedplate_qcow2::check::{CheckOptions, check};
use bedplate_qcow2::format::NewImage;
use bedplate_qcow2::{OpenOptions, Qcow2};
use bedplate_runtime::buf::{AlignedBuf, IoVec, SharedBuf};
use bedplate_sim::exec::{block_on, join_all};
use bedplate_sim::{Image, OpKind, SimOptions, SimStorage};
use bedplate_storage::ZeroMode;
use bedplate_types::{ByteLen, CacheMode, GuestOffset};
use std::sync::Arc;

fn image(cluster_bits: u32, size: u64) -> Image {
    laid_out(&NewImage {
        size: ByteLen::new(size),
        cluster_size: 1 << cluster_bits,
        ..NewImage::default()
    })
}

fn laid_out(new: &NewImage) -> Image {
    let layout = new.layout().expect("layout");
    let mut image = Image::new(layout.file_len.get());
    for (at, bytes) in &layout.writes {
        image.write(at.get(), bytes);
    }
    image
}

fn open(image: Image) -> Disk<SimStorage> {
    let storage = SimStorage::from_image(image, SimOptions::default());
    let qcow2 = block_on(Qcow2::open(storage, &OpenOptions::default())).expect("opens");
    Disk::new("d", vec![Layer::Qcow2(Arc::new(qcow2))], false, CacheMode::None).expect("disk")
}

fn iov(bytes: &[u8]) -> IoVec {
    SharedBuf::new(AlignedBuf::from_slice(bytes).expect("memory")).iovec()
}

fn read(disk: &Disk<SimStorage>, at: u64, len: usize) -> Vec<u8> {
    let buf = SharedBuf::zeroed(len).expect("memory").iovec();
    block_on(disk.read(GuestOffset::new(at), buf.clone())).expect("read");
    let mut out = vec![0; len];
    buf.copy_to(0, &mut out);
    out
}

#[test]
fn what_was_written_and_flushed_is_there_after_reopening() {
    for bits in [9, 12, 16, 21] {
        let disk = open(image(bits, 64 << 20));
        let write = |at: u64, byte: u8, len: usize| {
            block_on(disk.write(GuestOffset::new(at), iov(&vec![byte; len]), false))
                .expect("write");
        };
        write(0, 1, 4096);
        write(100_000, 2, 200_000);
        write(512, 3, 512);
        write((64 << 20) - 512, 4, 512);
        let zero = ZeroMode { unmap: true, fast_only: false };
        block_on(disk.write_zeroes(GuestOffset::new(150_000), ByteLen::new(100_000), zero))
            .expect("zero");
        block_on(disk.flush()).expect("flush");
        block_on(disk.close()).expect("close");
        let Some(storage) = disk_storage(&disk) else { panic!("storage") };
        let disk = open(storage);
        let mut expect = vec![0; 400_000];
        expect[..4096].fill(1);
        expect[512..1024].fill(3);
        expect[100_000..300_000].fill(2);
        expect[150_000..250_000].fill(0);
        assert!(read(&disk, 0, 400_000) == expect, "cluster bits {bits}");
        assert_eq!(read(&disk, (64 << 20) - 1024, 1024)[510..514], [0, 0, 4, 4]);
    }
}

fn disk_storage(disk: &Disk<SimStorage>) -> Option<Image> {
    Some(disk.storage()?.image())
}

#[test]
fn an_image_that_was_not_closed_gets_its_refcounts_back() {
    let new = NewImage {
        size: ByteLen::new(8 << 20),
        cluster_size: 512,
        lazy_refcounts: true,
        ..NewImage::default()
    };
    let disk = open(laid_out(&new));
    for at in (0..4 << 20).step_by(100_000) {
        block_on(disk.write(GuestOffset::new(at), iov(&[7; 3000]), false)).expect("write");
    }
    block_on(disk.flush()).expect("flush");
    let crashed = disk_storage(&disk).expect("storage");
    let report = |image: &Image| {
        let storage = SimStorage::from_image(image.clone(), SimOptions::default());
        block_on(check(&storage, CheckOptions::default())).expect("check")
    };
    assert!(report(&crashed).corruptions > 0, "lazy refcounts were written after all");
    let disk = open(crashed);
    let repaired = disk_storage(&disk).expect("storage");
    assert!(report(&repaired).is_clean(), "{:?}", report(&repaired));
    assert_eq!(read(&disk, 100_000, 3000), [7; 3000]);
}

/// Small clusters make many refcount blocks at once, and one lease needs many, more than a small cache holds.
#[test]
fn refcounts_may_need_more_blocks_than_the_cache_holds() {
    for refcount_bits in [16, 64] {
        let new = NewImage {
            size: ByteLen::new(4 << 20),
            cluster_size: 512,
            refcount_bits,
            ..NewImage::default()
        };
        let layout = new.layout().expect("layout");
        let mut image = Image::new(layout.file_len.get());
        for (at, bytes) in &layout.writes {
            image.write(at.get(), bytes);
        }
        let storage = SimStorage::from_image(image, SimOptions::default());
        // The second time the blocks are there and must be read.
        for half in [0, 2 << 20] {
            let options = OpenOptions { refcount_cache: ByteLen::ZERO, ..OpenOptions::default() };
            let qcow2 = block_on(Qcow2::open(storage.clone(), &options)).expect("opens");
            let layers = vec![Layer::Qcow2(Arc::new(qcow2))];
            let disk = Disk::new("d", layers, false, CacheMode::None).expect("disk");
            for i in 0..16 {
                let at = GuestOffset::new(half + (i << 16));
                block_on(disk.write(at, iov(&[i as u8 + 1; 1 << 16]), false)).expect("write");
            }
            block_on(disk.close()).expect("close");
        }
        let report = block_on(bedplate_qcow2::check::check(&storage, Default::default()));
        assert!(report.expect("check").is_clean(), "{refcount_bits} bits");
    }
}

/// Requests that all find their thread's lease empty must not take one each: here there is space for one.
#[test]
fn first_writes_at_the_same_time_share_one_lease() {
    for seed in 0..20 {
        let mut image = image(9, 1 << 20);
        image.set_len(256 * 512); // what one refcount block counts
        let options = SimOptions { seed, max_delay: 4, device: true, ..SimOptions::default() };
        let storage = SimStorage::from_image(image, options);
        let qcow2 = block_on(Qcow2::open(storage, &OpenOptions::default())).expect("opens");
        let layers = vec![Layer::Qcow2(Arc::new(qcow2))];
        let disk = &Disk::new("d", layers, false, CacheMode::None).expect("disk");
        let write = |i: u64| async move {
            disk.write(GuestOffset::new(i << 16), iov(&[1; 512]), false).await
        };
        let results = join_all(seed, (0..8u64).map(write)).expect("no deadlock");
        assert!(results.iter().all(Result::is_ok), "seed {seed}: {results:?}");
    }
}

/// A small sparse file may name millions of L2 tables.
#[test]
fn tables_in_holes_are_passed_over_when_a_disk_is_looked_through() {
    const TABLES: u64 = 2_000;
    let mut file = image(12, TABLES * (512 << 12));
    let mut l1 = [0; 8];
    file.read(40, &mut l1);
    let (l1, first) = (u64::from_be_bytes(l1), 64 << 20);
    for index in 0..TABLES {
        let entry: u64 = 1 << 63 | (first + index * 4096);
        file.write(l1 + index * 8, &entry.to_be_bytes());
    }
    // One of them holds something.
    file.write(first + 700 * 4096 + 8 * 5, &1_u64.to_be_bytes());
    file.set_len(first + TABLES * 4096);
    let storage =
        SimStorage::from_image(file, SimOptions { read_only: true, ..SimOptions::default() });
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let qcow2 = block_on(Qcow2::open(storage.clone(), &options)).expect("opens");
    let disk =
        Disk::new("d", vec![Layer::Qcow2(Arc::new(qcow2))], true, CacheMode::None).expect("disk");
    storage.reset_counts();
    let (mut at, mut zeroes) = (0, Vec::new());
    while at < disk.size().get() {
        let left = ByteLen::new(disk.size().get() - at);
        let run = block_on(disk.map_run(GuestOffset::new(at), left)).expect("mapped");
        if run.present {
            zeroes.push((at, run.len.get()));
        }
        at += run.len.get();
    }
    assert_eq!(zeroes, [((700 * 512 + 5) << 12, 1 << 12)]);
    let reads = storage.counts().of(OpKind::Read);
    assert!(reads < 10, "{reads} reads");
}

#[test]
fn an_l1_table_that_names_a_table_twice_is_not_looked_through() {
    let mut file = image(12, 8 << 20);
    let disk = open(file.clone());
    block_on(disk.write(GuestOffset::ZERO, iov(&[1; 512]), false)).expect("write");
    assert!(disk.refuse_shared_tables().is_ok());
    block_on(disk.close()).expect("close");
    file = disk_storage(&disk).expect("storage");
    let (mut l1, mut entry) = ([0; 8], [0; 8]);
    file.read(40, &mut l1);
    file.read(u64::from_be_bytes(l1), &mut entry);
    file.write(u64::from_be_bytes(l1) + 16, &entry);
    let e = open(file).refuse_shared_tables().expect_err("refused");
    assert_eq!(e.kind(), bedplate_types::ErrorKind::Corrupt, "{e}");
}
