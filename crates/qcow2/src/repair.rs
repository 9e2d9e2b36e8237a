//! Refcounts of an image that was not closed cleanly, rebuilt from its tables.
//!
//! Caller: opening for writing, before any request. Each step may be cut off by a crash: the dirty bit stays until
//! all refcounts are durable, so the next opening starts over.

use crate::check::count_references;
use crate::image::Qcow2;
use bedplate_storage::Storage;
use bedplate_types::Result;

/// Corrected refcount blocks that are kept in memory before they are written.
const WRITE_AFTER: usize = 64;

impl<S: Storage> Qcow2<S> {
    /// Counts all references, corrects the refcounts, then clears the dirty bit.
    ///
    /// # Errors
    /// `Corrupt` when the tables can't be trusted, or what the storage reports.
    pub(crate) async fn rebuild_refcounts(&self) -> Result<()> {
        let references = count_references(&self.storage).await?;
        let end = self.space.state().end;
        let per_block = self.space.counts.entries_per_block();
        for index in 0..self.space.counts.blocks_for(end) {
            let first = index.saturating_mul(per_block);
            let last = first.saturating_add(per_block).min(end);
            let exists = self.space.state().block_at(index).is_some();
            if !exists {
                if references.referenced(first, last).next().is_none() {
                    continue;
                }
                // New structures go past the end of what is checked here, and count themselves.
                self.grow_refcounts(index).await?;
            }
            self.load_block(index).await?;
            let full = {
                let mut state = self.space.state();
                for cluster in first..last {
                    let right = references.get(cluster);
                    if self.space.count(&state, cluster) != Some(right) {
                        self.space.set_count(&mut state, cluster, right)?;
                    }
                }
                state.dirty.len() >= WRITE_AFTER
            };
            if full {
                self.write_blocks().await?;
            }
        }
        self.write_blocks().await?;
        self.storage.sync().await?;
        self.clear_dirty_bit().await
    }
}
