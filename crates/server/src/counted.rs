//! A disk as NBD sessions use it, with its requests counted.

use bedplate_disk::Disk;
use bedplate_nbd::device::{Device, Run};
use bedplate_nbd::{DirtyMap, NamedBitmap};
use bedplate_qcow2::BitmapView;
use bedplate_runtime::buf::IoVec;
use bedplate_storage::{Storage, ZeroMode};
use bedplate_types::{ByteLen, GuestOffset, RequestStats, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What was asked of the disk over NBD.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    reads: AtomicU64,
    read_bytes: AtomicU64,
    writes: AtomicU64,
    write_bytes: AtomicU64,
    flushes: AtomicU64,
    discards: AtomicU64,
    other: AtomicU64,
    errors: AtomicU64,
}

impl Counters {
    pub(crate) fn snapshot(&self) -> RequestStats {
        let get = |n: &AtomicU64| n.load(Relaxed);
        RequestStats {
            reads: get(&self.reads),
            read_bytes: get(&self.read_bytes),
            writes: get(&self.writes),
            write_bytes: get(&self.write_bytes),
            flushes: get(&self.flushes),
            discards: get(&self.discards),
            other: get(&self.other),
            errors: get(&self.errors),
        }
    }

    fn result<T>(&self, result: Result<T>) -> Result<T> {
        if result.is_err() {
            self.errors.fetch_add(1, Relaxed);
        }
        result
    }
}

/// The disk and its counters.
pub(crate) struct Counted<S: Storage> {
    pub(crate) disk: Arc<Disk<S>>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) bitmaps: Vec<NamedBitmap>,
}

/// A bitmap of the disk's image.
pub(crate) struct Dirty(pub(crate) BitmapView);

impl DirtyMap for Dirty {
    fn run(&self, at: u64, most: u64) -> (bool, u64) {
        self.0.run(at, most)
    }
}

impl<S: Storage> Counted<S> {
    fn count_write(&self, len: ByteLen) {
        self.counters.writes.fetch_add(1, Relaxed);
        self.counters.write_bytes.fetch_add(len.get(), Relaxed);
    }
}

impl<S: Storage> Device for Counted<S> {
    fn size(&self) -> u64 {
        self.disk.size().get()
    }

    fn read_only(&self) -> bool {
        self.disk.read_only()
    }

    fn align(&self) -> u32 {
        self.disk.limits().align
    }

    fn bitmaps(&self) -> &[NamedBitmap] {
        &self.bitmaps
    }

    async fn read(&self, at: GuestOffset, buf: IoVec) -> Result<()> {
        self.counters.reads.fetch_add(1, Relaxed);
        self.counters.read_bytes.fetch_add(buf.byte_len().get(), Relaxed);
        self.counters.result(self.disk.read(at, buf).await)
    }

    async fn write(&self, at: GuestOffset, buf: IoVec, fua: bool) -> Result<()> {
        self.count_write(buf.byte_len());
        self.counters.result(self.disk.write(at, buf, fua).await)
    }

    async fn write_batch(&self, writes: Vec<(GuestOffset, IoVec)>) -> Vec<Result<()>> {
        writes.iter().for_each(|(_, buf)| self.count_write(buf.byte_len()));
        let results = self.disk.write_batch(writes).await;
        let failed = results.iter().filter(|r| r.is_err()).count();
        self.counters.errors.fetch_add(failed as u64, Relaxed);
        results
    }

    async fn flush(&self) -> Result<()> {
        self.counters.flushes.fetch_add(1, Relaxed);
        self.counters.result(self.disk.flush().await)
    }

    async fn discard(&self, at: GuestOffset, len: ByteLen) -> Result<()> {
        self.counters.discards.fetch_add(1, Relaxed);
        self.counters.result(self.disk.discard(at, len).await)
    }

    async fn write_zeroes(&self, at: GuestOffset, len: ByteLen, mode: ZeroMode) -> Result<()> {
        self.counters.discards.fetch_add(1, Relaxed);
        self.counters.result(self.disk.write_zeroes(at, len, mode).await)
    }

    async fn block_status(&self, at: GuestOffset, len: ByteLen, max: usize) -> Result<Vec<Run>> {
        self.counters.other.fetch_add(1, Relaxed);
        let runs = self.counters.result(self.disk.block_status(at, len, max).await)?;
        let run =
            |r: &bedplate_disk::BlockStatus| Run { len: r.len.get(), hole: r.hole, zero: r.zero };
        Ok(runs.iter().map(run).collect())
    }
}
