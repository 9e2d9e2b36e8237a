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
        let mut out: Vec<AtomicU64> = Vec::with_capacity(count.div_ceil(64) as usize);
        for raw in self.read_bitmap_table(bitmap).await? {
            let bytes = match self.bitmap_entry(bitmap, raw)? {
                Some(host) => read_bytes(&self.storage, host, cluster).await?,
                None => vec![if raw & 1 != 0 { 0xff } else { 0 }; cluster],
            };
            let words = bytes.as_chunks::<8>().0.iter().map(|w| u64::from_le_bytes(*w));
            out.extend(words.map(AtomicU64::new));
        }
        out.resize_with(count.div_ceil(64) as usize, AtomicU64::default);
        // Bits beyond the disk's end mean nothing.
        if let Some(last) = out.last()
            && !count.is_multiple_of(64)
        {
            last.fetch_and(u64::MAX >> (64 - count % 64), Ordering::Relaxed);
        }
        Ok(out.into())
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
        for tracked in list.iter().filter(|t| t.is_known()) {
            self.store_bits(tracked).await?;
        }
        self.set_in_use(&list, false).await?;
        self.bitmaps.state.store(State::QUIET, Ordering::Release);
        Ok(())
    }

    async fn store_bits(&self, tracked: &Tracked) -> Result<()> {
        let Some(bits) = tracked.bits.get() else { return Ok(()) };
        let old = self.read_bitmap_table(&tracked.bitmap).await?;
        let table = self.write_bits(&tracked.bitmap, bits, &old).await?;
        let bytes = table.iter().flat_map(|w| w.to_be_bytes()).collect();
        let write = async {
            self.write_all(vec![(tracked.bitmap.table_offset, bytes)]).await?;
            self.storage.sync().await
        };
        write.await.map_err(|e| self.poison(e))?;
        let gone = old.iter().zip(&table).filter(|(old, new)| **old & !1 != **new & !1);
        for (raw, _) in gone {
            if let Ok(Some(host)) = Bitmap::table_entry(*raw, self.tables.geo) {
                let cluster = self.space.cluster_of(host);
                self.space.note_freed([Freed { cluster, table: false }]);
            }
        }
        Ok(())
    }

    /// Writes bits to the clusters that a table has for them, and to new ones; returns the table for that. All is
    /// durable then, and counted.
    pub(super) async fn write_bits(
        &self,
        bitmap: &Bitmap,
        bits: &[AtomicU64],
        old: &[u64],
    ) -> Result<Vec<u64>> {
        let per_cluster = (self.tables.cluster() / 8) as usize;
        let mut table = Vec::with_capacity(old.len());
        let mut writes = Vec::new();
        let mut new = Vec::new();
        for (raw, words) in old.iter().zip(bits.chunks(per_cluster)) {
            if words.iter().all(|w| w.load(Ordering::Relaxed) == 0) {
                table.push(0);
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
        let write = async {
            self.write_all(writes).await?;
            self.space.count_leased(new.into_iter())?;
            self.write_blocks().await?;
            self.storage.sync().await
        };
        write.await.map_err(|e| self.poison(e))?;
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
