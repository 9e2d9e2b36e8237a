//! The counts of a generation: old blocks as they are in the file, and changed copies with places of their own.

use super::Generation;
use crate::format::{RefcountError, RefcountFormat};
use crate::open::read_bytes;
use bedplate_storage::Storage;
use bedplate_types::{Error, ErrorKind, HostOffset, Result};

/// A block of new counts in memory.
pub(super) struct Block {
    pub(super) bytes: Vec<u8>,
    /// Newer than in the file.
    changed: bool,
    /// It has a place that the old generation does not name.
    own_place: bool,
}

/// An old block, or none.
pub(super) struct OldBlock {
    pub(super) index: u64,
    pub(super) bytes: Option<Vec<u8>>,
}

/// Why a count can't be changed.
enum Fault {
    TooLow,
    Refused(RefcountError),
}

/// Changes counts of a block that follow each other; on a fault also says which of them it was.
fn change_counts(
    counts: RefcountFormat,
    block: &mut [u8],
    first: usize,
    number: u64,
    by: i64,
) -> std::result::Result<(), (u64, Fault)> {
    for (n, entry) in (0..number).zip(first..) {
        let old = counts.get(block, entry).unwrap_or(0);
        let new = old.checked_add_signed(by).ok_or((n, Fault::TooLow))?;
        counts.set(block, entry, new).map_err(|e| (n, Fault::Refused(e)))?;
    }
    Ok(())
}

impl<S: Storage> Generation<'_, S> {
    /// The new count of a cluster.
    pub(crate) async fn count(&mut self, cluster: u64) -> Result<u64> {
        let (index, entry) = self.counts.position(cluster);
        self.load(index).await?;
        Ok(self.blocks.get(&index).and_then(|b| self.counts.get(&b.bytes, entry)).unwrap_or(0))
    }

    /// Changes the count of a cluster. [`Self::settle`] must be called before long.
    ///
    /// # Errors
    /// `Limit` when the image's refcounts are not wide enough, `Corrupt` when the count was too low.
    pub(crate) async fn change(&mut self, cluster: u64, by: i64) -> Result<()> {
        self.change_run(cluster, 1, by).await
    }

    /// As [`Self::change`], for clusters that follow each other.
    pub(crate) async fn change_run(&mut self, first: u64, clusters: u64, by: i64) -> Result<()> {
        let (mut first, end) = (first, first.saturating_add(clusters));
        while first < end {
            let (index, entry) = self.counts.position(first);
            let here = (end - first).min(self.counts.entries_per_block() - entry as u64);
            self.load(index).await?;
            let Some(block) = self.blocks.get_mut(&index) else { return Ok(()) };
            let changed = change_counts(self.counts, &mut block.bytes, entry, here, by);
            block.changed = true;
            if !block.own_place && !self.unplaced.contains(&index) {
                self.unplaced.push(index);
            }
            match changed {
                Ok(()) => {}
                Err((at, fault)) => {
                    let at = self.image.space.offset_of(first + at);
                    return Err(match fault {
                        Fault::TooLow => {
                            self.corrupt(format!("the refcount of the cluster at {at} is too low"))
                        }
                        Fault::Refused(RefcountError::TooLarge) => self.too_narrow(at),
                        Fault::Refused(e) => self.corrupt(e),
                    });
                }
            }
            first += here;
        }
        Ok(())
    }

    fn too_narrow(&self, at: HostOffset) -> Error {
        Error::new(
            ErrorKind::Limit,
            format!(
                "image '{}' counts references with {} bit(s), so a cluster can't have more than {} (the cluster at \
                 {at} would); delete a snapshot, or convert the image to one with wider refcounts",
                self.image.storage.name(),
                self.counts.bits(),
                self.counts.max()
            ),
        )
    }

    /// Gives every changed block a place of its own.
    pub(crate) async fn settle(&mut self) -> Result<()> {
        // Counting a place may change one more block; that ends, because each has one place only.
        while let Some(index) = self.unplaced.pop() {
            let cluster = self.free_run(1).await?;
            let needed = index as usize + 1;
            if self.table.len() < needed {
                self.table.resize(needed, 0);
            }
            let Some(entry) = self.table.get_mut(index as usize) else { continue };
            let old = std::mem::replace(entry, self.image.space.offset_of(cluster).get());
            if let Some(block) = self.blocks.get_mut(&index) {
                block.own_place = true;
            }
            self.change(cluster, 1).await?;
            if old != 0 {
                self.change(self.geo.host_cluster(HostOffset::new(old)), -1).await?;
            }
        }
        Ok(())
    }

    /// The new counts of a refcount block, by its index.
    pub(super) async fn counts_of_block(&mut self, index: u64) -> Result<&[u8]> {
        self.load(index).await?;
        Ok(self.blocks.get(&index).map_or(&[], |b| b.bytes.as_slice()))
    }

    /// Brings a block of new counts into memory.
    async fn load(&mut self, index: u64) -> Result<()> {
        if self.blocks.contains_key(&index) {
            return Ok(());
        }
        if self.blocks.len() >= self.capacity {
            self.make_room().await?;
        }
        let at = self.table.get(index as usize).copied().unwrap_or(0);
        let own_place = at != self.old_table.get(index as usize).copied().unwrap_or(0);
        let bytes = match self.read_block(index, at).await? {
            Some(bytes) => bytes,
            None => vec![0; self.geo.cluster_size() as usize],
        };
        self.blocks.insert(index, Block { bytes, changed: false, own_place });
        Ok(())
    }

    /// Drops half of the blocks that have a place or are as they were.
    async fn make_room(&mut self) -> Result<()> {
        let idle = |b: &Block| !b.changed || b.own_place;
        let victims: Vec<u64> = self
            .blocks
            .iter()
            .filter(|(_, b)| idle(b))
            .map(|(i, _)| *i)
            .take(self.capacity / 2)
            .collect();
        let mut writes = Vec::new();
        for index in victims {
            let Some(block) = self.blocks.remove(&index) else { continue };
            if block.changed {
                let at = self.table.get(index as usize).copied().unwrap_or(0);
                writes.push((HostOffset::new(at), block.bytes));
            }
        }
        self.image.write_all(writes).await
    }

    /// Writes all changed blocks to their places.
    pub(super) async fn write_blocks(&mut self) -> Result<()> {
        self.settle().await?;
        let mut writes = Vec::new();
        for (index, block) in self.blocks.drain() {
            if block.changed {
                let at = self.table.get(index as usize).copied().unwrap_or(0);
                writes.push((HostOffset::new(at), block.bytes));
            }
        }
        self.image.write_all(writes).await
    }

    /// Reads the block at a place that a table names; `None` when it names none.
    async fn read_block(&self, index: u64, at: u64) -> Result<Option<Vec<u8>>> {
        match self.counts.table_entry(at) {
            Ok(None) => Ok(None),
            // New places may lie behind the file's old end.
            Ok(Some(at)) if self.geo.host_cluster(at) < self.end => {
                let bytes = self.geo.cluster_size() as usize;
                read_bytes(&self.image.storage, at, bytes).await.map(Some)
            }
            _ => Err(self.corrupt(format!(
                "refcount table entry {index} ({at:#018x}) is not the place of a refcount block"
            ))),
        }
    }

    /// The old block that counts a cluster, kept until another one is asked for.
    pub(super) async fn old_block(&mut self, index: u64) -> Result<&OldBlock> {
        let known = self.scanned.take().filter(|b| b.index == index);
        let block = match known {
            Some(block) => block,
            None => {
                let at = self.old_table.get(index as usize).copied().unwrap_or(0);
                OldBlock { index, bytes: self.read_block(index, at).await? }
            }
        };
        Ok(self.scanned.insert(block))
    }
}
