//! Replacing an image's metadata as a whole: a new generation of it, taken over by one write of the header.
//!
//! Callers: internal snapshots, resize. What changes is written beside what is there, in clusters that the old refcounts
//! call free: new refcount blocks, a new refcount table, new L1 and L2 tables. Nothing that the header names is
//! touched. When all is durable, one sector of the header names the new structures. So a crash leaves the old image or
//! the new one, with right refcounts and flags and without a leak, and whatever fails before that write leaves the
//! image as it was (`docs/on-disk-order.md`, "Generations").
//!
//! Invariants: requests are held (`gate.rs`) and all metadata was written back. New counts are only kept here. Space that
//! loses its last reference is not used before the next generation, since the old one still needs it.

mod blocks;
mod place;
mod reload;
mod walk;

pub(crate) use walk::pad_table;

use crate::faults::OrderRule;
use crate::format::{ENTRY_BYTES, Geometry, Header, RefcountFormat};
use crate::image::Qcow2;
use bedplate_storage::Storage;
use bedplate_types::{ByteLen, Error, ErrorKind, HostOffset, Result, limits};
use blocks::{Block, OldBlock};
use std::collections::HashMap;

/// Memory for new refcount blocks.
const BLOCK_BYTES: u64 = 32 << 20;

/// A generation that is being made.
pub(crate) struct Generation<'a, S: Storage> {
    image: &'a Qcow2<S>,
    geo: Geometry,
    counts: RefcountFormat,
    /// The refcount table as it is in the file.
    old_table: Vec<u64>,
    old_table_at: HostOffset,
    old_table_clusters: u64,
    /// First cluster past the file when the generation was begun.
    old_end: u64,
    /// The refcount table to be.
    table: Vec<u64>,
    /// New counts in memory.
    blocks: HashMap<u64, Block>,
    capacity: usize,
    /// Blocks that were changed and have no place of their own yet.
    unplaced: Vec<u64>,
    /// Where to look for the next free cluster, and the old block that is being looked through.
    scan: u64,
    scanned: Option<OldBlock>,
    /// Runs that were taken ahead of `scan`.
    taken: Vec<(u64, u64)>,
    /// First cluster past everything.
    end: u64,
}

impl<S: Storage> Qcow2<S> {
    /// Brings the file up to date and holds still, then makes a new generation by `work` and takes it over. `work`
    /// returns how the header changes, besides what the generation itself needs.
    ///
    /// The caller holds still ([`Self::hold_still`]).
    ///
    /// # Errors
    /// What `work` or the storage reports; the image is as it was then, or poisoned when nobody can know.
    pub(crate) async fn next_generation<T, W, C>(&self, work: W) -> Result<T>
    where
        W: AsyncFnOnce(&mut Generation<'_, S>) -> Result<(T, C)>,
        C: FnOnce(&mut Header),
    {
        self.check_writable()?;
        if self.space.has_contested() {
            return Err(Error::new(
                ErrorKind::Corrupt,
                format!(
                    "image '{}' is corrupt: two of its structures lie in one place; repair it first with \
                     'bedplate check -r all'",
                    self.storage.name()
                ),
            ));
        }
        // The journal holds nothing afterwards that could be made again over the new tables.
        self.write_everything().await?;
        let len = self.storage.len();
        let mut generation = Generation::new(self);
        let made = match work(&mut generation).await {
            Ok((value, change)) => generation.finish().await.map(|place| (value, change, place)),
            Err(e) => Err(e),
        };
        let result = match made {
            Ok((value, change, (table, clusters))) => {
                let switched = self.change_header(|h| {
                    change(h);
                    h.refcount_table_offset = table;
                    h.refcount_table_clusters = clusters;
                });
                // From here on nobody knows which generation the medium has, until it is written.
                switched.await.map_err(|e| self.poison(e))?;
                Ok(value)
            }
            Err(e) => {
                self.drop_tail(len).await;
                Err(e)
            }
        };
        let old = generation.into_old();
        self.reload().await.map_err(|e| self.poison(e))?;
        if result.is_ok() {
            self.give_back_unused(&old).await;
        }
        result
    }

    /// Cuts off what a generation that failed has written behind the end.
    async fn drop_tail(&self, len: ByteLen) {
        if self.storage.len() > len
            && let Err(e) = self.storage.set_len(len).await
        {
            // Nothing refers to it; the space is found free at the next opening.
            tracing::debug!(image = self.storage.name(), "cannot cut the file again: {e:#}");
        }
    }
}

impl<'a, S: Storage> Generation<'a, S> {
    fn new(image: &'a Qcow2<S>) -> Self {
        let (table, at, clusters) = {
            let state = image.space.state();
            (state.table.clone(), state.table_at, state.table_clusters)
        };
        let geo = image.tables.geo;
        let end = geo.clusters(image.storage.len()).max(1);
        Self {
            image,
            geo,
            counts: image.space.counts,
            old_table: table.clone(),
            old_table_at: at,
            old_table_clusters: clusters,
            old_end: end,
            table,
            blocks: HashMap::new(),
            capacity: (BLOCK_BYTES >> geo.cluster_bits()).max(16) as usize,
            unplaced: Vec::new(),
            scan: 0,
            scanned: None,
            taken: Vec::new(),
            end,
        }
    }

    pub(crate) fn image(&self) -> &'a Qcow2<S> {
        self.image
    }

    /// Gives up the clusters of a region of the old generation.
    pub(crate) async fn release(&mut self, at: HostOffset, bytes: u64) -> Result<()> {
        let first = self.geo.host_cluster(at);
        for cluster in first..first.saturating_add(bytes.div_ceil(self.geo.cluster_size())) {
            self.change(cluster, -1).await?;
        }
        self.settle().await
    }

    /// Takes clusters for `bytes` in one run and counts them; offset zero for no bytes.
    pub(crate) async fn reserve(&mut self, bytes: u64) -> Result<HostOffset> {
        let clusters = bytes.div_ceil(self.geo.cluster_size());
        if clusters == 0 {
            return Ok(HostOffset::ZERO);
        }
        let first = self.free_run(clusters).await?;
        for cluster in first..first + clusters {
            self.change(cluster, 1).await?;
        }
        self.settle().await?;
        Ok(self.image.space.offset_of(first))
    }

    /// Writes all blocks and the table, and makes everything durable. Returns the table's place and clusters.
    async fn finish(&mut self) -> Result<(HostOffset, u32)> {
        self.release(self.old_table_at, self.old_table_clusters * self.geo.cluster_size()).await?;
        let per_cluster = self.geo.cluster_size() / ENTRY_BYTES;
        let mut clusters = self.old_table_clusters;
        let at = loop {
            let entries = self.counts.blocks_for(self.end).max(self.table.len() as u64);
            clusters = clusters.max(entries.div_ceil(per_cluster));
            if clusters.saturating_mul(self.geo.cluster_size()) > limits::MAX_REFTABLE_BYTES {
                return Err(self.too_large());
            }
            let at = self.reserve(clusters * self.geo.cluster_size()).await?;
            if self.table.len() as u64 <= clusters * per_cluster {
                break at;
            }
            // Counting the table needed a block that it has no entry for: a larger one.
            self.release(at, clusters * self.geo.cluster_size()).await?;
        };
        self.write_blocks().await?;
        let bytes = pad_table(&self.table, clusters * self.geo.cluster_size());
        self.image.write_all(vec![(at, bytes)]).await?;
        if self.image.faults.keeps(OrderRule::GenerationFirst) {
            self.image.sync_all().await?;
        }
        Ok((at, clusters as u32))
    }

    fn too_large(&self) -> Error {
        Error::new(
            ErrorKind::Limit,
            format!(
                "image '{}' can't grow any more: its refcount table has reached {} bytes; use larger clusters",
                self.image.storage.name(),
                limits::MAX_REFTABLE_BYTES
            ),
        )
    }

    /// The refcount table of the generation before.
    fn into_old(self) -> Vec<u64> {
        self.old_table
    }

    /// An error about the image's own fault; nothing was changed.
    pub(crate) fn corrupt(&self, what: impl std::fmt::Display) -> Error {
        Error::new(
            ErrorKind::Corrupt,
            format!(
                "image '{}' is corrupt: {what}; repair it first with 'bedplate check -r all'",
                self.image.storage.name()
            ),
        )
    }
}
