//! Writing metadata to the file, in the order that no crash can turn into corruption.
//!
//! 1. Collected, in this order: removed references, dirty slices, L1 entries, refcount blocks. So every mapping
//!    collected has its refcount among those collected, and its data was written before.
//! 2. Refcount blocks are written; barrier (which covers all guest data too).
//! 3. Slices and L1 entries are written as they were collected; barrier.
//! 4. The journal forgets what it told of these changes; removed references may now be reclaimed.
//!
//! With the dirty bit set, refcount blocks wait until the image is closed. `docs/on-disk-order.md` has the argument.

use crate::faults::OrderRule;
use crate::format::ENTRY_BYTES;
use crate::image::Qcow2;
use crate::journal::Journal;
use crate::slice::{Slice, SliceId};
use bedplate_storage::Storage;
use bedplate_types::{HostOffset, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

/// Metadata older than this is written without waiting for a flush, so that a crash loses little.
const DIRTY_AGE: Duration = Duration::from_secs(5);
/// Bytes of neighbouring slices or blocks joined in one write.
const JOIN_BYTES: usize = 1 << 20;

/// What one flush makes durable.
struct Collected {
    slices: Vec<(HostOffset, Vec<u8>, Arc<Slice>)>,
    l1: Vec<(HostOffset, Vec<u8>)>,
}

impl<S: Storage> Qcow2<S> {
    /// Makes every write that completed before this call durable, with all the metadata it needs.
    ///
    /// # Errors
    /// What the storage reports; the image then takes no more changes.
    pub async fn flush(&self) -> Result<()> {
        if self.read_only {
            return Ok(());
        }
        let _upkeep = self.upkeep().await;
        self.write_back().await?;
        self.reclaim().await
    }

    /// Writes dirty metadata back and syncs; concurrent calls share one run.
    pub(crate) async fn write_back(&self) -> Result<()> {
        self.check_writable()?;
        self.sequencer.run(|| self.write_back_once()).await
    }

    async fn write_back_once(&self) -> Result<()> {
        self.check_writable()?;
        let removed = self.space.take_removed();
        // What was journaled up to here is collected below; later changes may be, and stay in the journal.
        let journaled = self.journal.as_ref().and_then(Journal::turn);
        if !self.faults.keeps(OrderRule::JournalLasts) {
            self.retire_journal(journaled);
        }
        let collected = self.collect();
        self.write_in_order(&collected).await.map_err(|e| {
            // The slices stay in memory for good, or reads would show what was before the changes.
            self.poison(e.context(format!("cannot make '{}' durable", self.storage.name())))
        })?;
        for (.., slice) in &collected.slices {
            slice.written();
        }
        // Before anything is freed: a change that is still told of may refer to it.
        self.retire_journal(journaled);
        self.settle(removed);
        Ok(())
    }

    fn retire_journal(&self, generation: Option<u64>) {
        if let (Some(journal), Some(generation)) = (&self.journal, generation) {
            journal.retire(generation);
        }
    }

    async fn write_in_order(&self, collected: &Collected) -> Result<()> {
        let refcounts_first = self.faults.keeps(OrderRule::RefcountsFirst);
        let mapped = !collected.slices.is_empty() || !collected.l1.is_empty();
        if !self.is_lazy() && refcounts_first {
            self.write_blocks().await?;
        }
        if !mapped || self.faults.keeps(OrderRule::DataFirst) {
            self.sync_all().await?;
        }
        if !mapped {
            return Ok(());
        }
        let slices = collected.slices.iter().map(|(at, bytes, _)| (*at, bytes.clone()));
        self.write_all(join_neighbours(slices.chain(collected.l1.iter().cloned()).collect()))
            .await?;
        if self.faults.keeps(OrderRule::FlushWaits) {
            self.storage.sync().await?;
        }
        if !refcounts_first {
            self.write_blocks().await?;
        }
        Ok(())
    }

    /// Takes the content of all dirty slices and L1 entries as it is now.
    fn collect(&self) -> Collected {
        let ids: BTreeSet<SliceId> = {
            let mut dirty = self.dirty();
            dirty.since = None;
            std::mem::take(&mut dirty.slices)
        };
        let mut slices = Vec::with_capacity(ids.len());
        for id in ids {
            // A dirty slice is never dropped, and its table was placed before it became dirty.
            if let (Some(slice), Some(at)) = (self.slice(id), self.tables.slice_at(id)) {
                slices.push((at, slice.collect(), slice));
            }
        }
        let changed = std::mem::take(&mut self.dirty().l1);
        Collected { slices, l1: self.l1_sectors(&changed) }
    }

    /// The sectors of the L1 table with these entries as they are now, and all others as they are in the file.
    fn l1_sectors(&self, changed: &BTreeSet<u32>) -> Vec<(HostOffset, Vec<u8>)> {
        let mut durable = self.l1_in_file.lock().unwrap_or_else(PoisonError::into_inner);
        let mut sectors = BTreeSet::new();
        for index in changed {
            if let Some(entry) = durable.get_mut(*index as usize) {
                *entry = self.tables.l1(*index);
                sectors.insert(u64::from(*index) * ENTRY_BYTES / 512);
            }
        }
        let table = self.header().l1_offset.get();
        let sector = |sector: u64| {
            let words = durable.iter().skip((sector * 512 / ENTRY_BYTES) as usize).take(64);
            let bytes = words.flat_map(|w| w.to_be_bytes()).collect();
            (HostOffset::new(table.saturating_add(sector * 512)), bytes)
        };
        sectors.into_iter().map(sector).collect()
    }

    /// Writes the refcount blocks that are newer in memory than in the file.
    pub(crate) async fn write_blocks(&self) -> Result<()> {
        // Growth writes blocks too; the same block must not be written twice at once.
        let _one = self.space.one_writer().await;
        // Growth may just have failed: what counts on its blocks must not reach the file.
        self.check_writable()?;
        let (writes, indexes) = {
            let mut state = self.space.state();
            let dirty = std::mem::take(&mut state.dirty);
            let mut writes = Vec::with_capacity(dirty.len());
            for index in &dirty {
                let Some(at) = state.block_at(*index) else { continue };
                if let Some(block) = state.blocks.get_mut(index) {
                    block.writing = true;
                    writes.push((at, block.bytes.clone()));
                }
            }
            (writes, dirty)
        };
        let result = self.write_all(join_neighbours(writes)).await;
        let mut state = self.space.state();
        for index in indexes {
            if let Some(block) = state.blocks.get_mut(&index) {
                block.writing = false;
            }
        }
        result
    }

    /// Background work, called about once a second: writes back metadata that has been dirty for long, frees what
    /// has waited long enough.
    ///
    /// # Errors
    /// What the storage reports.
    pub async fn maintain(&self) -> Result<()> {
        if self.read_only || self.is_poisoned() {
            return Ok(());
        }
        let _upkeep = self.upkeep().await;
        let old = self.dirty().since.is_some_and(|t| t.elapsed() >= DIRTY_AGE);
        if old {
            self.write_back().await?;
        }
        self.reclaim().await
    }

    /// Makes everything durable, frees what was to be freed, gives unused space back, and clears the dirty bit. No
    /// request may be under way, and none may follow.
    ///
    /// # Errors
    /// What the storage reports.
    pub async fn close(&self) -> Result<()> {
        if self.read_only {
            return Ok(());
        }
        self.write_everything().await?;
        self.end_journal().await.map_err(|e| self.poison(e))
    }

    /// What closing does but for the end of the journal, which later changes need. No request may be under way.
    ///
    /// # Errors
    /// What the storage reports.
    pub(crate) async fn write_everything(&self) -> Result<()> {
        self.check_writable()?;
        self.store_bitmaps().await?;
        self.write_back().await?;
        self.reclaim_all().await?;
        self.end_leases();
        self.write_blocks().await.map_err(|e| self.poison(e))?;
        self.storage.sync().await.map_err(|e| self.poison(e))?;
        if self.is_lazy() {
            self.clear_dirty_bit().await.map_err(|e| self.poison(e))?;
        }
        self.trim_tail().await
    }

    /// Cuts off space past the last used cluster that was allocated ahead of need.
    async fn trim_tail(&self) -> Result<()> {
        let end = {
            let mut state = self.space.state();
            let mut end = state.end;
            while let Some(run) = state.free.take_tail(end) {
                end = run.first;
            }
            self.space.set_end(&mut state, end);
            self.space.offset_of(end).get()
        };
        if self.storage.len().get() <= end {
            return Ok(());
        }
        match self.storage.set_len(bedplate_types::ByteLen::new(end)).await {
            // A device keeps its length.
            Err(e) if e.kind() == bedplate_types::ErrorKind::Unsupported => Ok(()),
            other => other,
        }
    }
}

/// Joins writes that follow each other in the file.
fn join_neighbours(writes: Vec<(HostOffset, Vec<u8>)>) -> Vec<(HostOffset, Vec<u8>)> {
    let sorted: BTreeMap<HostOffset, Vec<u8>> = writes.into_iter().collect();
    let mut joined: Vec<(HostOffset, Vec<u8>)> = Vec::with_capacity(sorted.len());
    for (at, bytes) in sorted {
        match joined.last_mut() {
            Some((first, have))
                if first.get() + have.len() as u64 == at.get()
                    && have.len() + bytes.len() <= JOIN_BYTES =>
            {
                have.extend(bytes);
            }
            _ => joined.push((at, bytes)),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_writes_become_one() {
        let w = |at, len| (HostOffset::new(at), vec![at as u8; len]);
        let joined = join_neighbours(vec![w(8, 4), w(0, 4), w(4, 4), w(20, 4)]);
        assert_eq!(
            joined.iter().map(|(a, b)| (a.get(), b.len())).collect::<Vec<_>>(),
            [(0, 12), (20, 4)]
        );
    }
}
