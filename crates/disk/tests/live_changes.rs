//! Snapshots, resizes and bitmaps are made while requests run, on the hot path and on the slow road, in orders that a seed
//! chooses: each snapshot holds what was completed before it, and nothing that was begun after it.

use bedplate_disk::{Disk, Layer};
use bedplate_qcow2::check::{CheckOptions, check};
use bedplate_qcow2::format::NewImage;
use bedplate_qcow2::{BitmapChange, NewSnapshot, OpenOptions, Qcow2, Run, SnapshotRef};
use bedplate_runtime::buf::{AlignedBuf, IoVec, SharedBuf};
use bedplate_sim::exec::{Pool, block_on, yield_now};
use bedplate_sim::{Image, Rng, SimOptions, SimStorage};
use bedplate_storage::Storage;
use bedplate_types::{ByteLen, CacheMode, ErrorKind, GuestOffset, Preallocation};
use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::Duration;

const SIZE: u64 = 1 << 20;
const BLOCK: u64 = 512;
const WRITERS: usize = 4;
/// Blocks of a writer; those of different writers share clusters.
const BLOCKS: u64 = 6;
const WRITES: u32 = 40;
const CHANGES: usize = 5;

fn new_image(cluster_size: u64) -> Image {
    let new = NewImage { size: ByteLen::new(SIZE), cluster_size, ..NewImage::default() };
    let layout = new.layout().expect("layout");
    let mut image = Image::new(layout.file_len.get());
    for (at, bytes) in &layout.writes {
        image.write(at.get(), bytes);
    }
    image
}

/// What is known of a block: the number of the last write that was begun, and of the last that was completed.
#[derive(Clone, Default)]
struct Known {
    begun: Cell<u32>,
    done: Cell<u32>,
}

/// A snapshot: its name, what was completed when it was begun, what was begun when it was done.
type Kept = (String, Vec<u32>, Vec<u32>);

struct World {
    disk: Disk<SimStorage>,
    qcow2: Arc<Qcow2<SimStorage>>,
    blocks: Vec<Known>,
    direct: Cell<u32>,
    kept: RefCell<Vec<Kept>>,
    running: Cell<usize>,
}

fn place(block: usize) -> u64 {
    // Neighbours belong to different writers, and a writer's blocks lie in different clusters.
    block as u64 % WRITERS as u64 * BLOCK + block as u64 / WRITERS as u64 * 8192
}

impl World {
    fn open(seed: u64, cluster: u64) -> Self {
        let options = SimOptions { keep_history: false, ..SimOptions::seeded(seed) };
        let storage = SimStorage::from_image(new_image(cluster), options);
        let qcow2 =
            Arc::new(block_on(Qcow2::open(storage, &OpenOptions::default())).expect("open"));
        let layers = vec![Layer::Qcow2(qcow2.clone())];
        let disk = Disk::new("d", layers, false, CacheMode::None).expect("disk");
        let blocks = vec![Known::default(); WRITERS * BLOCKS as usize];
        let (kept, running) = (RefCell::default(), Cell::new(WRITERS));
        Self { disk, qcow2, blocks, direct: Cell::new(0), kept, running }
    }

    fn numbers(&self, of: impl Fn(&Known) -> u32) -> Vec<u32> {
        self.blocks.iter().map(of).collect()
    }

    /// As a queue thread does on its hot path, with its time between look-up and I/O. False where that can't be.
    async fn write_direct(&self, at: GuestOffset, buf: &IoVec, rng: &mut Rng) -> bool {
        let _pin = self.qcow2.epochs().guard();
        let Run::At(host) = self.qcow2.lookup_run(true, at, buf.byte_len()) else { return false };
        let longest = if rng.chance(20) { 300 } else { 20 };
        for _ in 0..rng.below(longest) {
            yield_now().await;
        }
        self.qcow2.storage().write(host, buf.clone()).await.expect("write");
        self.direct.set(self.direct.get() + 1);
        true
    }

    async fn write(&self, seed: u64, writer: usize) {
        let mut rng = Rng::new(seed ^ writer as u64);
        for number in 1..=WRITES {
            let block = rng.below(BLOCKS) as usize * WRITERS + writer;
            let (known, at) = (&self.blocks[block], GuestOffset::new(place(block)));
            let mut bytes = [0; BLOCK as usize];
            bytes[..4].copy_from_slice(&number.to_le_bytes());
            let buf = SharedBuf::new(AlignedBuf::from_slice(&bytes).expect("memory")).iovec();
            known.begun.set(number);
            if !self.write_direct(at, &buf, &mut rng).await {
                self.disk.write(at, buf, false).await.expect("write");
            }
            known.done.set(number);
            match rng.below(16) {
                0 => self.disk.flush().await.expect("flush"),
                1 => self.disk.maintain().await.expect("maintain"),
                2 => assert!(self.read(block).await >= number, "a read goes back"),
                _ => yield_now().await,
            }
        }
        self.running.set(self.running.get() - 1);
    }

    async fn read(&self, block: usize) -> u32 {
        let buf = SharedBuf::zeroed(BLOCK as usize).expect("memory").iovec();
        self.disk.read(GuestOffset::new(place(block)), buf.clone()).await.expect("read");
        let mut bytes = [0; 4];
        buf.copy_to(0, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    async fn change(&self, seed: u64) {
        let mut rng = Rng::new(!seed);
        for n in 0..CHANGES {
            for _ in 0..rng.below(300) {
                yield_now().await;
            }
            match rng.below(5) {
                0 => {
                    let size = SIZE - rng.below(8) * 4096 + rng.below(64) * 65536;
                    let size = ByteLen::new(size);
                    self.disk.resize(size, Preallocation::Off).await.expect("resize");
                }
                1 => {
                    let oldest = self.kept.borrow_mut().pop();
                    let Some((name, ..)) = oldest else { continue };
                    let which = SnapshotRef::Name(name.as_bytes());
                    self.qcow2.delete_snapshot(which).await.expect("delete");
                }
                _ => {
                    let name = format!("s{n}");
                    let done = self.numbers(|k| k.done.get());
                    let new = NewSnapshot { name: name.as_bytes(), date: Duration::ZERO };
                    self.qcow2.create_snapshot(&new).await.expect("create");
                    let begun = self.numbers(|k| k.begun.get());
                    self.kept.borrow_mut().push((name, done, begun));
                }
            }
        }
    }

    async fn verify(&self) {
        for block in 0..self.blocks.len() {
            let last = self.blocks[block].done.get();
            assert_eq!(self.read(block).await, last, "block {block} of the disk");
        }
        for (name, done, begun) in self.kept.take() {
            let which = SnapshotRef::Name(name.as_bytes());
            self.qcow2.apply_snapshot(which).await.expect("apply");
            for block in 0..self.blocks.len() {
                let held = self.read(block).await;
                let (least, most) = (done[block], begun[block]);
                assert!(
                    (least..=most).contains(&held),
                    "{name} has write {held} of block {block}, not one of {least} to {most}"
                );
            }
        }
        self.disk.close().await.expect("close");
        let found = check(self.qcow2.storage(), CheckOptions::default()).await.expect("check");
        assert!(found.is_clean(), "{found:?}");
    }
}

fn run(seeds: u64, changes: impl AsyncFn(&World, u64)) {
    let mut direct = 0;
    for seed in 0..seeds {
        let world = World::open(seed, 4096);
        let mut pool = Pool::new(seed);
        for writer in 0..WRITERS {
            pool.spawn(world.write(seed, writer));
        }
        pool.spawn(changes(&world, seed));
        if let Err(stuck) = pool.run() {
            panic!("seed {seed}: {stuck}");
        }
        drop(pool);
        block_on(world.verify());
        direct += world.direct.get();
    }
    assert!(u64::from(direct) > seeds * 10, "the hot path was taken {direct} times only");
}

#[test]
fn snapshots_made_under_requests_hold_what_was_completed_before_them_and_nothing_later() {
    run(150, World::change);
}

#[test]
fn a_bitmap_that_is_added_under_requests_records_all_that_come_after_it() {
    run(60, async |world, _| {
        for name in [b"a", b"b"] {
            let change = BitmapChange::Add { granularity: Some(512) };
            world.qcow2.change_bitmap(name, change).await.expect("add");
            let before = world.numbers(|k| k.begun.get());
            while world.running.get() > 0 {
                yield_now().await;
            }
            let view = world.qcow2.bitmap(name).await.expect("bitmap");
            for (block, known) in world.blocks.iter().enumerate() {
                if known.begun.get() > before[block] {
                    assert!(view.run(place(block), 512).0, "block {block} was written since");
                }
            }
        }
    });
}

#[test]
fn requests_behind_the_new_end_of_a_disk_that_has_shrunk_meanwhile_fail() {
    for seed in 0..40 {
        let world = World::open(seed, 512);
        let mut pool = Pool::new(seed);
        let ones = || SharedBuf::new(AlignedBuf::from_slice(&[1; 65536]).expect("memory")).iovec();
        let at = GuestOffset::new(SIZE - 65536);
        pool.spawn(async {
            for _ in 0..20 {
                match world.disk.write(at, ones(), false).await {
                    Ok(()) => yield_now().await,
                    Err(e) => assert_eq!(e.kind(), ErrorKind::OutOfRange, "{e:#}"),
                }
            }
        });
        pool.spawn(async {
            let size = ByteLen::new(SIZE / 2);
            world.disk.resize(size, Preallocation::Off).await.expect("resize");
        });
        pool.run().expect("an end");
        drop(pool);
        // What was written behind the end would show here.
        let resized = world.disk.resize(ByteLen::new(SIZE), Preallocation::Off);
        block_on(resized).expect("resize");
        let buf = SharedBuf::zeroed(65536).expect("memory").iovec();
        block_on(world.disk.read(at, buf.clone())).expect("read");
        let mut seen = vec![1; 65536];
        buf.copy_to(0, &mut seen);
        assert!(seen.iter().all(|byte| *byte == 0), "seed {seed}: growth must read as zeroes");
        block_on(world.verify());
    }
}
