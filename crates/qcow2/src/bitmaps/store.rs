//! Marking bitmaps in-use before the first change, and storing them when the image is closed.
//!
//! While a bitmap is marked, its table and its clusters of bits are changed in place: nobody trusts them. New clusters of
//! bits are counted durably before the table names them, and clusters of zeroes are freed after it no longer does.

use super::directory::Directory;
use super::{State, Tracked};
use crate::format::{Bitmap, ENTRY_BYTES};
use crate::image::Qcow2;
use crate::open::{read_bytes, words};
use crate::space::{FreeRun, Freed};
use bedplate_storage::Storage;
use bedplate_types::{Error, ErrorKind, HostOffset, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The bitmap can't be trusted.
pub(super) const IN_USE: u32 = 1;
/// Bytes of bits read or written at once.
const PIECE_BYTES: usize = 4 << 20;
/// Tables written at once.
const TABLES: usize = 256;

impl<S: Storage> Qcow2<S> {
    /// Loads the recording bitmaps and marks them in-use, durably.
    pub(crate) async fn mark_bitmaps(&self) -> Result<()> {
        let _one = self.bitmaps.gate.lock().await;
        if self.bitmaps.state.load(Ordering::Acquire) != State::QUIET {
            return Ok(());
        }
        self.check_writable()?;
        let list = self.bitmaps.list.load_full();
        for tracked in list.iter().filter(|t| t.bits.get().is_none()) {
            let bits = self.load_bits(&tracked.bitmap, tracked.count).await?;
            // Loaded once: the gate is held.
            let _ = tracked.bits.set(bits);
        }
        self.set_in_use(&list, true).await?;
        self.bitmaps.state.store(State::TRACKING, Ordering::Release);
        Ok(())
    }

    /// Sets or clears the mark of these bitmaps in the file, and syncs.
    async fn set_in_use(&self, list: &[Tracked], on: bool) -> Result<()> {
        let Some(mut directory) = Directory::read(&self.storage, &self.header()).await? else {
            let text = "the bitmap directory is gone while its bitmaps are used";
            return Err(Error::new(ErrorKind::Corrupt, text));
        };
        for tracked in list {
            if let Some(entry) = directory.entries.get_mut(tracked.index) {
                let flags = entry.bitmap.flags;
                entry.set_flags(if on || !tracked.is_known() {
                    flags | IN_USE
                } else {
                    flags & !IN_USE
                });
            }
        }
        let write = async {
            self.write_all(vec![(directory.at, directory.bytes())]).await?;
            self.storage.sync().await
        };
        write.await.map_err(|e| self.poison(e))
    }

    /// Reads a bitmap's bits, in words of 64.
    pub(super) async fn load_bits(&self, bitmap: &Bitmap, count: u64) -> Result<Arc<[AtomicU64]>> {
        let cluster = self.tables.cluster() as usize;
        // Of their final size from the start: they may be large.
        let out: Arc<[AtomicU64]> = (0..count.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        let table = self.read_bitmap_table(bitmap).await?;
        for (raw, words) in table.into_iter().zip(out.chunks(cluster / 8)) {
            match self.bitmap_entry(bitmap, raw)? {
                Some(host) => {
                    let bytes = read_bytes(&self.storage, host, cluster).await?;
                    for (word, read) in words.iter().zip(bytes.as_chunks::<8>().0) {
                        word.store(u64::from_le_bytes(*read), Ordering::Relaxed);
                    }
                }
                None if raw & 1 != 0 => {
                    words.iter().for_each(|word| word.store(u64::MAX, Ordering::Relaxed));
                }
                None => {}
            }
        }
        // Bits beyond the disk's end mean nothing.
        if let Some(last) = out.last()
            && !count.is_multiple_of(64)
        {
            last.fetch_and(u64::MAX >> (64 - count % 64), Ordering::Relaxed);
        }
        Ok(out)
    }

    pub(super) async fn read_bitmap_table(&self, bitmap: &Bitmap) -> Result<Vec<u64>> {
        let bytes = u64::from(bitmap.table_size) * ENTRY_BYTES;
        if !self.space.contains(bitmap.table_offset, bytes) {
            return Err(self.bad_bitmap(bitmap, "its table lies beyond the file's end"));
        }
        Ok(words(&read_bytes(&self.storage, bitmap.table_offset, bytes as usize).await?))
    }

    /// The cluster of bits that a table's entry names.
    pub(super) fn bitmap_entry(&self, bitmap: &Bitmap, raw: u64) -> Result<Option<HostOffset>> {
        match Bitmap::table_entry(raw, self.tables.geo) {
            Ok(Some(host)) if !self.space.contains(host, self.tables.cluster()) => {
                Err(self.bad_bitmap(bitmap, "it names space beyond the file's end"))
            }
            Ok(Some(host)) if self.space.is_metadata(host) => {
                Err(self.bad_bitmap(bitmap, "it names the image's own metadata"))
            }
            Ok(host) => Ok(host),
            Err(e) => Err(self.bad_bitmap(bitmap, e)),
        }
    }

    pub(super) fn bad_bitmap(&self, bitmap: &Bitmap, why: impl std::fmt::Display) -> Error {
        Error::new(
            ErrorKind::Corrupt,
            format!(
                "bitmap '{}' of image '{}' is damaged: {why}; remove it, or repair the image",
                crate::format::printable(&bitmap.name),
                self.storage.name()
            ),
        )
    }

    /// Writes the bitmaps that were tracked and takes their mark away. No change may be under way. What they no longer
    /// need is free after the next write-back.
    ///
    /// # Errors
    /// What the storage reports; they stay marked then.
    pub(crate) async fn store_bitmaps(&self) -> Result<()> {
        let _one = self.bitmaps.gate.lock().await;
        if !self.bitmaps.is_tracking() {
            return Ok(());
        }
        let list = self.bitmaps.list.load_full();
        // What can't be kept right stays marked for good.
        let known: Vec<&Tracked> = list.iter().filter(|t| t.is_known()).collect();
        self.store_bits(&known).await?;
        self.set_in_use(&list, false).await?;
        self.bitmaps.state.store(State::QUIET, Ordering::Release);
        Ok(())
    }

    /// Writes bits, then the tables that name them, all bitmaps together: an image may have very many.
    async fn store_bits(&self, list: &[&Tracked]) -> Result<()> {
        let (mut tables, mut new) = (Vec::new(), Vec::new());
        for tracked in list {
            let Some(bits) = tracked.bits.get() else { continue };
            let old = self.read_bitmap_table(&tracked.bitmap).await?;
            let table = self.write_bits(&tracked.bitmap, bits, &old, &mut new).await?;
            if table != old {
                tables.push((tracked.bitmap.table_offset, old, table));
            }
        }
        let write = async {
            self.space.count_leased(new.into_iter())?;
            self.write_blocks().await?;
            self.storage.sync().await?;
            for some in tables.chunks(TABLES) {
                let bytes = |table: &[u64]| table.iter().flat_map(|w| w.to_be_bytes()).collect();
                self.write_all(some.iter().map(|(at, _, new)| (*at, bytes(new))).collect()).await?;
            }
            self.storage.sync().await
        };
        write.await.map_err(|e| self.poison(e))?;
        for (raw, new) in tables.iter().flat_map(|(_, old, new)| old.iter().zip(new)) {
            if let Ok(Some(host)) = Bitmap::table_entry(*raw, self.tables.geo)
                && raw & !1 != new & !1
            {
                let cluster = self.space.cluster_of(host);
                self.space.note_freed([Freed { cluster, table: false }]);
            }
        }
        Ok(())
    }

    /// Writes bits to the clusters that a table has for them, and to `new` ones, which are to be counted; returns the table
    /// for that.
    pub(super) async fn write_bits(
        &self,
        bitmap: &Bitmap,
        bits: &[AtomicU64],
        old: &[u64],
        new: &mut Vec<u64>,
    ) -> Result<Vec<u64>> {
        let per_cluster = (self.tables.cluster() / 8) as usize;
        let mut table = Vec::with_capacity(old.len());
        let mut writes = Vec::new();
        for (raw, words) in old.iter().zip(bits.chunks(per_cluster)) {
            let all = |value: u64| words.iter().all(|w| w.load(Ordering::Relaxed) == value);
            // Neither needs a cluster (specification, "Bitmap table").
            if all(0) || (words.len() == per_cluster && all(u64::MAX)) {
                table.push(u64::from(!all(0)));
                continue;
            }
            let host = match self.bitmap_entry(bitmap, *raw)? {
                Some(host) => host,
                None => {
                    let cluster = self.take_one().await?;
                    new.push(cluster);
                    self.space.offset_of(cluster)
                }
            };
            let mut bytes: Vec<u8> =
                words.iter().flat_map(|w| w.load(Ordering::Relaxed).to_le_bytes()).collect();
            bytes.resize(per_cluster * 8, 0);
            writes.push((host, bytes));
            table.push(host.get());
            if writes.len() * per_cluster * 8 >= PIECE_BYTES {
                self.write_all(std::mem::take(&mut writes)).await.map_err(|e| self.poison(e))?;
            }
        }
        table.resize(old.len(), 0);
        self.write_all(writes).await.map_err(|e| self.poison(e))?;
        Ok(table)
    }

    /// Free clusters that follow each other, not counted yet; returns the first.
    pub(super) async fn take_run(&self, clusters: u64) -> Result<u64> {
        let mut short: Vec<FreeRun> = Vec::new();
        // Shorter runs are held until one is long enough, at the latest behind the end.
        let found = loop {
            let runs = match self.take_clusters(clusters).await {
                Ok(runs) => runs,
                Err(e) => break Err(e),
            };
            let long = runs.iter().position(|run| run.clusters == clusters);
            let first = long.and_then(|i| runs.get(i)).map(|run| run.first);
            short.extend(runs.into_iter().filter(|run| Some(run.first) != first));
            if let Some(first) = first {
                break Ok(first);
            }
        };
        for run in short {
            self.give_back(run);
        }
        found
    }

    /// One free cluster, not counted yet.
    pub(super) async fn take_one(&self) -> Result<u64> {
        let run: Option<FreeRun> = self.take_clusters(1).await?.pop();
        run.map(|run| run.first)
            .ok_or_else(|| Error::new(ErrorKind::NoSpace, "no cluster for a bitmap"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bitmaps::BitmapChange;
    use crate::check::{CheckOptions, check};
    use crate::format::NewImage;
    use crate::{Nothing, OpenOptions};
    use bedplate_runtime::buf::{AlignedBuf, SharedBuf};
    use bedplate_sim::exec::block_on;
    use bedplate_sim::{Image, OpKind, SimOptions, SimStorage};
    use bedplate_types::{ByteLen, GuestOffset, limits};

    const DISK: u64 = 64 << 20;

    fn made(size: u64, cluster_size: u64) -> Image {
        let new = NewImage { size: ByteLen::new(size), cluster_size, ..NewImage::default() };
        let layout = new.layout().expect("valid");
        let mut image = Image::new(layout.file_len.get());
        layout.writes.iter().for_each(|(at, bytes)| image.write(at.get(), bytes));
        image
    }

    fn open(image: Image) -> (SimStorage, Qcow2<SimStorage>) {
        let storage = SimStorage::from_image(image, SimOptions::default());
        let q = block_on(Qcow2::open(storage.clone(), &OpenOptions::default())).expect("opens");
        (storage, q)
    }

    fn add(q: &Qcow2<SimStorage>, name: &str, granularity: u64) -> Result<()> {
        let change = BitmapChange::Add { granularity: Some(granularity) };
        block_on(q.change_bitmap(name.as_bytes(), change))
    }

    fn write(q: &Qcow2<SimStorage>, at: u64) {
        let buf = SharedBuf::new(AlignedBuf::zeroed(512).expect("memory")).iovec();
        let results = block_on(q.write_batch(&Nothing, vec![(GuestOffset::new(at), buf)]));
        results.into_iter().for_each(|result| result.expect("written"));
    }

    fn clean(storage: &SimStorage) {
        let report = block_on(check(storage, CheckOptions::default())).expect("opens");
        assert!(report.is_clean(), "{:#?}", report.findings);
    }

    #[test]
    fn very_many_bitmaps_are_stored_with_a_few_syncs() {
        const MANY: u64 = 300;
        let (storage, q) = open(made(DISK, 4096));
        for index in 0..MANY {
            add(&q, &format!("b{index}"), 65536).expect("added");
        }
        write(&q, 5 << 20);
        storage.reset_counts();
        block_on(q.close()).expect("closes");
        let counts = storage.counts();
        assert!(counts.of(OpKind::Sync) < 20, "{counts:?}");
        clean(&storage);
        let (_, q) = open(storage.image());
        for index in 0..MANY {
            let name = format!("b{index}");
            let view = block_on(q.bitmap(name.as_bytes())).expect("valid");
            assert_eq!(view.run(0, DISK), (false, 5 << 20), "{name}");
            assert_eq!(view.run(5 << 20, DISK), (true, 65536), "{name}");
        }
    }

    #[test]
    fn bits_that_are_all_set_take_no_space() {
        // Four clusters of bits.
        let (storage, q) = open(made(DISK, 4096));
        add(&q, "b", 512).expect("added");
        write(&q, 0);
        block_on(q.close()).expect("closes");
        let (storage, q) = open(storage.image());
        let before = storage.image().len();
        block_on(q.before_change(GuestOffset::ZERO, ByteLen::new(DISK))).expect("marked");
        block_on(q.close()).expect("closes");
        assert!(storage.image().len() <= before, "bits were written");
        clean(&storage);
        let (_, q) = open(storage.image());
        let view = block_on(q.bitmap(b"b")).expect("valid");
        assert_eq!(view.run(0, DISK), (true, DISK));
    }

    #[test]
    fn bitmaps_that_could_not_be_recorded_together_are_refused_before_anything_is_written() {
        // One of them takes all the memory there is for it.
        let size = limits::MAX_BITMAP_BYTES * 8 * 512;
        let (storage, q) = open(made(size, 65536));
        add(&q, "a", 512).expect("added");
        let before = storage.image();
        let refused = |result: Result<()>| {
            let e = result.expect_err("refused");
            assert_eq!(e.kind(), ErrorKind::Limit, "{e}");
        };
        refused(add(&q, "b", 512));
        // The smallest of all needs a cluster.
        refused(add(&q, "b", 1 << 31));
        assert!(storage.image().to_vec() == before.to_vec(), "the image was changed");
        block_on(q.change_bitmap(b"a", BitmapChange::Disable)).expect("stopped");
        add(&q, "b", 512).expect("added");
        refused(block_on(q.change_bitmap(b"a", BitmapChange::Enable)));
        block_on(q.close()).expect("closes");
        clean(&storage);
        // As QEMU may have made it: such an image is not written to, but the way out is open.
        let mut both = storage.image();
        let header = crate::format::Header::parse(&both.to_vec()).expect("valid");
        let directory = block_on(Directory::read(&storage, &header)).expect("read").expect("there");
        both.write(directory.at.get() + 12, &2_u32.to_be_bytes());
        let storage = SimStorage::from_image(both, SimOptions::default());
        let e = block_on(Qcow2::open(storage.clone(), &OpenOptions::default()));
        refused(e.map(drop));
        let options = OpenOptions { bitmaps_only: true, ..OpenOptions::default() };
        let q = block_on(Qcow2::open(storage.clone(), &options)).expect("opens");
        refused(add(&q, "c", 65536));
        block_on(q.change_bitmap(b"b", BitmapChange::Remove)).expect("removed");
        block_on(q.close()).expect("closes");
        clean(&storage);
        open(storage.image());
    }
}
