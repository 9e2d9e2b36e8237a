//! What fuzzing tries: bytes as an image that is opened, worked with, checked and repaired. Nothing may panic, and what is
//! promised for sound images must not be broken by others.
//!
//! Callers: the programs in `fuzz/`, and a test that goes through the corpus that is kept.

use bedplate_qcow2::check::{CheckOptions, Repair, check, repair};
use bedplate_qcow2::{Mapping, Nothing, OpenOptions, Qcow2};
use bedplate_runtime::buf::SharedBuf;
use bedplate_sim::exec::block_on;
use bedplate_sim::{Image, SimOptions, SimStorage};
use bedplate_storage::{Storage, ZeroMode};
use bedplate_types::{ByteLen, GuestOffset};

/// Files may not grow beyond this: a fuzzer has little memory.
const CAPACITY: u64 = 64 << 20;
/// Larger images say nothing that smaller ones don't.
const MOST_BYTES: usize = 1 << 20;
/// Runs of a disk that are looked at: a hostile image may have very many.
const MOST_RUNS: usize = 256;
/// Bytes of an operation in the input, and how many operations one may have.
const OP_BYTES: usize = 6;
const MOST_OPS: usize = 24;

fn storage(bytes: &[u8], read_only: bool) -> SimStorage {
    let options = SimOptions { read_only, capacity: CAPACITY, ..SimOptions::default() };
    SimStorage::from_image(Image::from_bytes(bytes), options)
}

async fn open_image(storage: &SimStorage, read_only: bool) -> Option<Qcow2<SimStorage>> {
    let options = OpenOptions { read_only, ..OpenOptions::default() };
    Qcow2::open(storage.clone(), &options).await.ok()
}

/// Looks at the disk's runs from its start, and reads a little of each.
async fn look_through(image: &Qcow2<SimStorage>) {
    let end = image.size().get();
    let mut at = 0;
    for _ in 0..MOST_RUNS {
        if at >= end {
            return;
        }
        let mapped = image.map(GuestOffset::new(at), ByteLen::new(end - at)).await;
        let len = match mapped {
            Err(_) => image.cluster_size(),
            Ok(Mapping::Unallocated { len } | Mapping::Zero { len, .. }) => len,
            Ok(Mapping::Data { host, len, .. }) => {
                if let Ok(buf) = SharedBuf::zeroed(512) {
                    // What the storage says of a bad place is its own matter.
                    let _ = image.storage().read(host, buf.iovec()).await;
                }
                len
            }
            Ok(Mapping::Compressed { cluster, within, len }) => {
                let n = len.get().min(512) as usize;
                if let Ok(buf) = SharedBuf::zeroed(n) {
                    let _ = image.read_compressed(&cluster, within, &buf.iovec()).await;
                }
                len
            }
        };
        assert!(len.get() > 0, "an empty run at {at}");
        at = at.saturating_add(len.get());
    }
}

/// Opens the bytes as an image for reading, and looks through it.
///
/// # Panics
/// When the image was changed by that.
pub fn open(bytes: &[u8]) {
    if bytes.len() > MOST_BYTES {
        return;
    }
    let storage = storage(bytes, false);
    block_on(async {
        if let Some(image) = open_image(&storage, true).await {
            look_through(&image).await;
            // A list that can't be read is an error like others.
            let _ = image.snapshots().await;
        }
    });
    assert!(storage.image().to_vec() == bytes, "an image that was only read has changed");
}

/// One operation of a script.
async fn step(image: &Qcow2<SimStorage>, op: [u8; OP_BYTES]) {
    let [kind, a, b, c, d, e] = op;
    let end = image.size().get();
    let at = (u64::from(a) << 16 | u64::from(b) << 8 | u64::from(c)) * 512 % end.max(1) / 512 * 512;
    let len = (u64::from(d) << 4 | u64::from(e) & 15) * 128 % (1 << 16) / 512 * 512 + 512;
    let len = len.min(end.next_multiple_of(512).saturating_sub(at));
    if len == 0 {
        return;
    }
    let (at, len) = (GuestOffset::new(at), ByteLen::new(len));
    // Hostile images give errors; what counts is that nothing panics and nothing hangs.
    match kind % 8 {
        0..=2 => {
            let Ok(buf) = SharedBuf::zeroed(len.get() as usize) else { return };
            buf.iovec().fill(0, len.get() as usize, kind);
            image.write_batch(&Nothing, vec![(at, buf.iovec())]).await.clear();
        }
        3 => drop(image.discard(&Nothing, at, len).await),
        4 => {
            let mode = ZeroMode { unmap: kind & 8 != 0, fast_only: kind & 16 != 0 };
            drop(image.write_zeroes(&Nothing, at, len, mode).await);
        }
        5 => drop(image.map(at, len).await),
        6 => drop(image.maintain().await),
        _ => drop(image.flush().await),
    }
}

/// Opens the bytes as an image for writing, does what the script before them says, and closes it. The first byte of
/// the input is the number of operations.
pub fn work(input: &[u8]) {
    let Some((count, rest)) = input.split_first() else { return };
    let ops = (usize::from(*count) % MOST_OPS).min(rest.len() / OP_BYTES);
    let (script, bytes) = rest.split_at(ops * OP_BYTES);
    if bytes.len() > MOST_BYTES {
        return;
    }
    let storage = storage(bytes, false);
    block_on(async {
        let Some(image) = open_image(&storage, false).await else { return };
        for op in script.as_chunks::<OP_BYTES>().0 {
            step(&image, *op).await;
        }
        look_through(&image).await;
        drop(image.close().await);
    });
}

/// Checks the bytes as an image, repairs them, and checks again.
///
/// # Panics
/// When the repair says that all is well and the check says something else, or when checking changes the image.
pub fn examine(bytes: &[u8]) {
    if bytes.len() > MOST_BYTES {
        return;
    }
    let storage = storage(bytes, false);
    let options =
        CheckOptions { max_memory: 32 << 20, max_findings: 16, ..CheckOptions::default() };
    block_on(async {
        let Ok(before) = check(&storage, options.clone()).await else { return };
        assert!(storage.image().to_vec() == bytes, "an image that was only checked has changed");
        let what = if bytes.len().is_multiple_of(3) { Repair::Leaks } else { Repair::All };
        let Ok(after) = repair(&storage, what, options.clone()).await else { return };
        assert!(!before.is_clean() || after.is_clean(), "a clean image was damaged: {after:?}");
        let Ok(again) = check(&storage, options).await else {
            panic!("a repaired image can't be checked any more: {after:?}");
        };
        let found =
            |r: &bedplate_qcow2::check::CheckReport| (r.corruptions, r.leaks, r.check_errors);
        assert_eq!(found(&again), found(&after), "the repair does not say what is left");
    });
}
