//! Growth of the refcount structures: new blocks, and a larger table.
//!
//! Rare (one block counts 2 GiB of an image with the usual sizes), so it is done in full at once, each step
//! durable before the next depends on it: blocks with their own counts, then the table entry that names them, or
//! a whole new table and then the header that names it. A crash in between leaks clusters, nothing more.

use super::{Block, FreeRun, Space, State};
use crate::format::ENTRY_BYTES;
use crate::image::Qcow2;
use bedplate_runtime::buf::{AlignedBuf, SharedBuf};
use bedplate_storage::Storage;
use bedplate_types::{ByteLen, Error, ErrorKind, HostOffset, Result, limits};
use std::collections::BTreeMap;

/// Host space that the blocks made in one growth count ahead, and how many blocks that is at most.
const AHEAD_BYTES: u64 = 128 << 20;
const AHEAD_BLOCKS: u64 = 64;
/// Table entries in one sector: what a crash leaves or takes as a whole.
const SECTOR_ENTRIES: u64 = 512 / ENTRY_BYTES;

/// What a growth will write.
struct Growth {
    /// New blocks: index to the cluster that holds each.
    blocks: BTreeMap<u64, u64>,
    /// Place and size of a new table, where the old one is too small.
    table: Option<(u64, u64)>,
    /// All clusters reserved for the growth; those not used go to the free ones.
    first: u64,
    reserved: u64,
    used: u64,
    /// They read as zeroes.
    zeroed: bool,
    /// They lie past what was the end.
    extends: bool,
}

impl<S: Storage> Qcow2<S> {
    /// Makes the refcount block `index`, and some after it.
    ///
    /// # Errors
    /// `Limit` when the table can't hold it; what the storage reports, which poisons the image.
    pub(crate) async fn grow_refcounts(&self, index: u64) -> Result<()> {
        let _one = self.space.one_writer().await;
        // A growth that failed has left entries in memory that must not reach the file.
        self.check_writable()?;
        if self.space.state().block_at(index).is_some() {
            return Ok(());
        }
        let growth = {
            let mut state = self.space.state();
            self.space.plan_growth(&mut state, index).ok_or_else(|| {
                Error::new(
                    ErrorKind::Limit,
                    format!(
                        "image '{}' can't grow any more: its refcount table has reached {} bytes; use larger \
                         clusters",
                        self.storage.name(),
                        limits::MAX_REFTABLE_BYTES
                    ),
                )
            })?
        };
        self.check_room(&growth).await?;
        // The blocks that count the new clusters and exist already must be at hand before anything is changed.
        let mut existing = Vec::new();
        self.space.for_blocks(growth.first, growth.used, |i, _, _| {
            if !growth.blocks.contains_key(&i) {
                existing.push(i);
            }
        });
        let mut pinned = Vec::new();
        let mut result = Ok(());
        for i in existing {
            result = self.pin_block(i).await;
            if result.is_err() {
                break;
            }
            pinned.push(i);
        }
        if result.is_ok() {
            let blocks: Vec<u64> = growth.blocks.keys().copied().collect();
            result = self.write_growth(growth, &pinned).await.map_err(|e| {
                self.poison(e.context(format!(
                    "cannot extend the refcount structures of '{}'",
                    self.storage.name()
                )))
            });
            pinned.extend(blocks);
        }
        let mut state = self.space.state();
        for i in pinned {
            if let Some(block) = state.blocks.get_mut(&i) {
                block.pins = block.pins.saturating_sub(1);
            }
        }
        result
    }

    /// Has the host allocate space past the end, while it can still say no without harm.
    async fn check_room(&self, growth: &Growth) -> Result<()> {
        if !growth.extends {
            return Ok(());
        }
        let len = ByteLen::new(growth.reserved.saturating_mul(self.tables.cluster()));
        let at = self.space.offset_of(growth.first);
        match self.storage.allocate(at, len).await {
            Err(e) if e.kind() == ErrorKind::NoSpace => {
                let mut state = self.space.state();
                if state.end == growth.first + growth.reserved {
                    self.space.set_end(&mut state, growth.first);
                } else {
                    let (first, clusters) = (growth.first, growth.reserved);
                    state.free.insert(FreeRun { first, clusters, zeroed: true });
                }
                Err(e.context(format!(
                    "there is no space for the refcounts that '{}' needs to grow",
                    self.storage.name()
                )))
            }
            // Other hosts can't allocate ahead.
            _ => Ok(()),
        }
    }

    /// Brings an existing block into memory and keeps it there.
    async fn pin_block(&self, index: u64) -> Result<()> {
        loop {
            self.load_block(index).await?;
            // It may have been dropped again between the load and here.
            if let Some(block) = self.space.state().blocks.get_mut(&index) {
                block.pins += 1;
                return Ok(());
            }
        }
    }

    async fn write_growth(&self, growth: Growth, existing: &[u64]) -> Result<()> {
        let mut writes = Vec::new();
        let old_table = {
            let mut state = self.space.state();
            for i in growth.blocks.keys() {
                // Kept in memory until they are in the file: reading them before would find something else.
                let bytes = vec![0; self.tables.cluster() as usize];
                state.blocks.insert(*i, Block { bytes, pins: 1, writing: false });
            }
            if let Some((_, clusters)) = growth.table {
                let entries = clusters * self.tables.cluster() / ENTRY_BYTES;
                state.table.resize(entries as usize, 0);
            }
            for (i, cluster) in &growth.blocks {
                if let Some(entry) = state.table.get_mut(*i as usize) {
                    *entry = self.space.offset_of(*cluster).get();
                }
            }
            for cluster in growth.first..growth.first + growth.used {
                self.space.set_count(&mut state, cluster, 1)?;
            }
            for i in growth.blocks.keys().chain(existing) {
                if let (Some(at), Some(block)) = (state.block_at(*i), state.blocks.get(i)) {
                    writes.push((at, block.bytes.clone()));
                }
            }
            if growth.reserved > growth.used {
                let first = growth.first + growth.used;
                let clusters = growth.reserved - growth.used;
                state.free.insert(FreeRun { first, clusters, zeroed: growth.zeroed });
            }
            (state.table_at, state.table_clusters)
        };
        self.space.add_metadata(growth.first, growth.used);
        self.write_all(writes).await?;
        match growth.table {
            None => {
                self.storage.sync().await?;
                self.write_table_entries(growth.blocks.keys().copied()).await
            }
            Some((cluster, clusters)) => {
                self.write_table(cluster, clusters).await?;
                self.storage.sync().await?;
                self.switch_table(cluster, clusters).await?;
                self.release_table(old_table).await
            }
        }
    }

    async fn write_table_entries(&self, blocks: impl Iterator<Item = u64>) -> Result<()> {
        let writes = {
            let state = self.space.state();
            // Whole sectors, so that direct I/O needs no read first.
            let sectors: std::collections::BTreeSet<u64> =
                blocks.map(|i| i * ENTRY_BYTES / 512).collect();
            sectors
                .into_iter()
                .map(|sector| {
                    let first = (sector * 512 / ENTRY_BYTES) as usize;
                    let words = state.table.iter().skip(first).take(64);
                    let mut bytes: Vec<u8> = words.flat_map(|w| w.to_be_bytes()).collect();
                    bytes.resize(512, 0);
                    (HostOffset::new(state.table_at.get() + sector * 512), bytes)
                })
                .collect()
        };
        self.write_all(writes).await
    }

    async fn write_table(&self, cluster: u64, clusters: u64) -> Result<()> {
        let mut bytes: Vec<u8> = {
            let state = self.space.state();
            state.table.iter().flat_map(|w| w.to_be_bytes()).collect()
        };
        bytes.resize((clusters * self.tables.cluster()) as usize, 0);
        self.write_all(vec![(self.space.offset_of(cluster), bytes)]).await
    }

    /// Makes the header name the new table.
    async fn switch_table(&self, cluster: u64, clusters: u64) -> Result<()> {
        let at = self.space.offset_of(cluster);
        self.change_header(|header| {
            header.refcount_table_offset = at;
            header.refcount_table_clusters = clusters as u32;
        })
        .await?;
        let mut state = self.space.state();
        state.table_at = at;
        state.table_clusters = clusters;
        Ok(())
    }

    /// Frees the clusters of the old table; the header that no longer names it is durable.
    async fn release_table(&self, (at, clusters): (HostOffset, u64)) -> Result<()> {
        let first = self.space.cluster_of(at);
        self.space.drop_metadata(first, clusters);
        self.release_durable((first..first + clusters).collect()).await
    }

    /// Writes metadata blocks, all at once.
    pub(crate) async fn write_all(&self, writes: Vec<(HostOffset, Vec<u8>)>) -> Result<()> {
        let mut all = Vec::with_capacity(writes.len());
        for (at, bytes) in writes {
            let buf = SharedBuf::new(AlignedBuf::from_slice(&bytes)?);
            all.push(self.storage.write(at, buf.iovec()));
        }
        for result in futures_util::future::join_all(all).await {
            result?;
        }
        Ok(())
    }
}

impl Space {
    /// Clusters for new blocks, with those that count the blocks and a table of this many clusters.
    fn reserve(&self, table_clusters: u64, ahead: u64) -> u64 {
        ahead + (table_clusters + ahead) / self.counts.entries_per_block() + 4
    }

    /// True when the entry of block `index` and those of the blocks that would count new blocks from cluster `first`
    /// on are not all in one sector of the table. A crash could then leave an entry without the one that its count
    /// depends on, so the table is replaced as a whole instead.
    fn apart(&self, state: &State, index: u64, first: u64, ahead: u64) -> bool {
        let last = first.saturating_add(self.reserve(0, ahead) - 1);
        let (low, high) = (self.counts.position(first).0, self.counts.position(last).0);
        (low..=high)
            .any(|i| i / SECTOR_ENTRIES != index / SECTOR_ENTRIES && state.block_at(i).is_none())
    }

    /// A long run of free clusters, if one is known or can be found without reading blocks.
    fn take_long(&self, state: &mut State, want: u64) -> Option<FreeRun> {
        loop {
            if let Some(run) = state.free.take_long(want) {
                return Some(run);
            }
            let (index, _) = self.counts.position(state.scan);
            if state.scan >= state.scan_end || state.block_at(index).is_some() {
                return None;
            }
            self.scan_block(state, index);
        }
    }

    /// Decides where the new blocks (and table) go; reserves their clusters. `None` when the limit is reached.
    fn plan_growth(&self, state: &mut State, index: u64) -> Option<Growth> {
        let ahead = (AHEAD_BYTES / (self.counts.entries_per_block() * self.geo.cluster_size()))
            .clamp(1, AHEAD_BLOCKS);
        let entries_per_cluster = self.geo.cluster_size() / ENTRY_BYTES;
        // Blocks wanted: those asked for, and any that count the reserved clusters themselves.
        let capacity = state.table.len() as u64;
        let (top, _) = self.counts.position(state.end);
        let least = index.max(top) + ahead + 8;
        let larger = if least > capacity { least * 3 / 2 } else { capacity };
        // Free space first: a device has nothing behind its end.
        let most = larger.div_ceil(entries_per_cluster);
        let most = most + self.reserve(most, ahead);
        let run = self.take_long(state, most);
        let at = run.map_or(state.end, |run| run.first);
        let replace = least > capacity || self.apart(state, index, at, ahead);
        let table_clusters = if replace { larger.div_ceil(entries_per_cluster) } else { 0 };
        if table_clusters * self.geo.cluster_size() > limits::MAX_REFTABLE_BYTES {
            if let Some(run) = run {
                state.free.insert(run);
            }
            return None;
        }
        // Each block that counts reserved clusters takes one of them; a few more than needed do no harm.
        let reserved = table_clusters + self.reserve(table_clusters, ahead);
        let (first, zeroed) = match run {
            Some(run) => {
                let (first, clusters) = (run.first + reserved, run.clusters - reserved);
                state.free.insert(FreeRun { first, clusters, ..run });
                (run.first, run.zeroed)
            }
            None => (self.extend(state, reserved)?, true),
        };
        let mut blocks = BTreeMap::new();
        let mut next = first + table_clusters;
        let end = first + reserved;
        let covered =
            |blocks: &BTreeMap<u64, u64>, i| blocks.contains_key(&i) || state.block_at(i).is_some();
        let (low, _) = self.counts.position(first);
        let (high, _) = self.counts.position(end - 1);
        // In an old table all new entries lie in one sector, see `apart`.
        let last = if table_clusters > 0 { u64::MAX } else { index | (SECTOR_ENTRIES - 1) };
        let more = index + 1..(index + ahead).min(last.saturating_add(1));
        let wanted = std::iter::once(index).chain(low..=high).chain(more);
        for i in wanted {
            if next < end && !covered(&blocks, i) {
                blocks.insert(i, next);
                next += 1;
            }
        }
        let table = (table_clusters > 0).then_some((first, table_clusters));
        let (used, extends) = (next - first, run.is_none());
        Some(Growth { blocks, table, first, reserved, used, zeroed, extends })
    }
}
