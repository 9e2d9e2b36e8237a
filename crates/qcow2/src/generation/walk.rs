//! Walking the tables under an L1 table: counting what they refer to, and rewriting those whose flags change.

use super::Generation;
use crate::format::{COMPRESSED, COPIED, ENTRY_BYTES, L1Entry, OFFSET_MASK};
use crate::open::{read_bytes, words};
use bedplate_storage::Storage;
use bedplate_types::{ByteLen, GuestOffset, HostOffset, Result};
use futures_util::future::join_all;

/// Bytes of L2 tables read at once.
const READ_BYTES: u64 = 2 << 20;

/// A table's words in file byte order, filled up with zeroes.
pub(crate) fn pad_table(table: &[u64], bytes: u64) -> Vec<u8> {
    let mut out: Vec<u8> = table.iter().flat_map(|w| w.to_be_bytes()).collect();
    out.resize(out.len().max(bytes as usize), 0);
    out
}

/// An L2 table, with the index of the L1 entry that names it.
pub(crate) struct Table {
    pub(crate) index: usize,
    pub(crate) at: HostOffset,
    /// None when all of them are zero.
    pub(crate) words: Vec<u64>,
}

impl<S: Storage> Generation<'_, S> {
    /// Reads an L1 table of the old generation.
    pub(crate) async fn read_l1(&self, at: HostOffset, entries: u32) -> Result<Vec<u64>> {
        let bytes = u64::from(entries) * ENTRY_BYTES;
        if !self.image.space.contains(at, bytes) {
            return Err(self.corrupt(format!("the L1 table at {at} lies beyond the file's end")));
        }
        Ok(words(&read_bytes(&self.image.storage, at, bytes as usize).await?))
    }

    /// Groups of L1 entries whose tables are read at once.
    pub(crate) fn groups(&self, l1: &[u64]) -> Vec<Vec<(usize, u64)>> {
        let at_once = (READ_BYTES / self.geo.cluster_size()).clamp(1, 64) as usize;
        let named: Vec<(usize, u64)> =
            l1.iter().copied().enumerate().filter(|(_, word)| *word & OFFSET_MASK != 0).collect();
        named.chunks(at_once).map(<[_]>::to_vec).collect()
    }

    /// Reads a group of L2 tables and checks their entries.
    pub(crate) async fn read_tables(&self, group: &[(usize, u64)]) -> Result<Vec<Table>> {
        let reads = group.iter().map(|(index, word)| self.read_table(*index, *word));
        join_all(reads).await.into_iter().collect()
    }

    async fn read_table(&self, index: usize, word: u64) -> Result<Table> {
        let bytes = self.geo.cluster_size();
        let at = match self.image.tables.codec.l1(word) {
            Ok(L1Entry::Table { host, .. }) if self.image.space.contains(host, bytes) => host,
            _ => return Err(self.corrupt(format!("L1 entry {index} ({word:#018x}) is wrong"))),
        };
        // What lies in a hole says nothing, and of such tables a sparse file may have millions.
        let extent = self.image.storage.extent(at, ByteLen::new(bytes)).await?;
        if !extent.data && extent.len.get() >= bytes {
            return Ok(Table { index, at, words: Vec::new() });
        }
        let words = words(&read_bytes(&self.image.storage, at, bytes as usize).await?);
        let (first, step) = (index as u64 * self.geo.l2_coverage(), self.geo.cluster_size());
        let guests = (0..).map(|n| GuestOffset::new(first.saturating_add(n * step)));
        for (entry, guest) in words.chunks_exact(self.geo.entry_words()).zip(guests) {
            if let Some(fault) = self.image.entry_fault(guest, entry) {
                return Err(self.corrupt(format!("the L2 entry {entry:#018x?} is wrong: {fault}")));
            }
        }
        Ok(Table { index, at, words })
    }

    /// The first and last cluster that an L2 entry refers to.
    fn clusters_of(&self, entry: u64) -> Option<(u64, u64)> {
        if self.image.has_data_file() {
            return None; // what lies there is not counted
        }
        if entry & COMPRESSED != 0 {
            let (at, len) = self.image.tables.codec.compressed_range(entry);
            let last = at.get().saturating_add(len.get().max(1) - 1);
            return Some((self.geo.host_cluster(at), last >> self.geo.cluster_bits()));
        }
        let host = self.geo.host_cluster(HostOffset::new(entry & OFFSET_MASK));
        (entry & OFFSET_MASK != 0).then_some((host, host))
    }

    /// Changes the counts of what one L2 entry refers to.
    pub(crate) async fn change_entry(&mut self, entry: u64, by: i64) -> Result<()> {
        match self.clusters_of(entry) {
            Some((first, last)) => self.change_run(first, last - first + 1, by).await,
            None => Ok(()),
        }
    }

    /// Changes the counts of what the entries of an L2 table refer to. What lies together is counted together: most
    /// of a large disk does.
    async fn change_table(&mut self, words: &[u64], by: i64) -> Result<()> {
        let (mut start, mut clusters) = (0, 0);
        for entry in words.iter().step_by(self.geo.entry_words()) {
            let Some((first, last)) = self.clusters_of(*entry) else { continue };
            if first != start + clusters {
                self.change_run(start, clusters, by).await?;
                (start, clusters) = (first, 0);
            }
            clusters += last - first + 1;
        }
        self.change_run(start, clusters, by).await
    }

    /// Changes the counts of everything that an L1 table leads to.
    pub(crate) async fn change_all(&mut self, l1: &[u64], by: i64) -> Result<()> {
        for group in self.groups(l1) {
            for table in self.read_tables(&group).await? {
                self.change(self.geo.host_cluster(table.at), by).await?;
                self.change_table(&table.words, by).await?;
                self.settle().await?;
            }
        }
        Ok(())
    }

    /// Makes the flags of the tables under a new active L1 table say what the new counts say; returns its words. A
    /// table that changes gets a new place, and one more that is named `names` times in all (once by the active
    /// table, once more by a snapshot made of it).
    pub(crate) async fn rebuild_active(&mut self, l1: &[u64], names: u32) -> Result<Vec<u64>> {
        let mut active = vec![0; l1.len()];
        for group in self.groups(l1) {
            let mut writes = Vec::new();
            for mut table in self.read_tables(&group).await? {
                let word = if self.set_flags(&mut table.words).await? {
                    let (word, write) = self.move_table(table.at, &table.words, names).await?;
                    writes.push(write);
                    word
                } else {
                    let count = self.count(self.geo.host_cluster(table.at)).await?;
                    table.at.get() | if count == 1 { COPIED } else { 0 }
                };
                if let Some(entry) = active.get_mut(table.index) {
                    *entry = word;
                }
                self.settle().await?;
            }
            self.image.write_all(writes).await?;
        }
        Ok(active)
    }

    /// A new place for a table; returns the L1 entry for it and what is to be written.
    pub(crate) async fn move_table(
        &mut self,
        from: HostOffset,
        words: &[u64],
        names: u32,
    ) -> Result<(u64, (HostOffset, Vec<u8>))> {
        let cluster = self.free_run(1).await?;
        self.change(cluster, i64::from(names)).await?;
        self.change(self.geo.host_cluster(from), -i64::from(names)).await?;
        let at = self.image.space.offset_of(cluster);
        let flag = if names == 1 { COPIED } else { 0 };
        Ok((at.get() | flag, (at, pad_table(words, self.geo.cluster_size()))))
    }

    /// Sets the COPIED flags by the new counts; true when any has changed.
    async fn set_flags(&mut self, words: &mut [u64]) -> Result<bool> {
        let mut changed = false;
        let (counts, geo) = (self.counts, self.geo);
        let position = |word: u64| {
            let host = word & OFFSET_MASK;
            (word & COMPRESSED == 0 && host != 0)
                .then(|| counts.position(geo.host_cluster(HostOffset::new(host))))
        };
        let mut at = 0;
        // A block of counts is looked up once for all entries in a row that it counts.
        while let Some(word) = words.get(at) {
            let Some((index, _)) = position(*word) else {
                at += geo.entry_words();
                continue;
            };
            let block = self.counts_of_block(index).await?;
            while let Some(word) = words.get_mut(at) {
                match position(*word) {
                    Some((other, _)) if other != index => break,
                    Some((_, entry)) => {
                        let alone = counts.get(block, entry) == Some(1);
                        let right = if alone { *word | COPIED } else { *word & !COPIED };
                        changed |= right != *word;
                        *word = right;
                    }
                    None => {}
                }
                at += geo.entry_words();
            }
        }
        Ok(changed)
    }
}
