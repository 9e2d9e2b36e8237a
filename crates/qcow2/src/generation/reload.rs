//! Taking over a new generation in memory, and giving back the space that only the old one used.

use crate::format::{ENTRY_BYTES, RefcountFormat};
use crate::image::{Dirty, Qcow2};
use crate::open::{OpenOptions, find_space, read_bytes, words};
use bedplate_storage::Storage;
use bedplate_types::{ByteLen, Error, ErrorKind, HostOffset, Result};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

impl<S: Storage> Qcow2<S> {
    /// Forgets all that is known of the tables and reads them from the file again. No request may be under way, and
    /// nothing may be newer in memory than in the file.
    ///
    /// # Errors
    /// What the storage reports.
    pub(crate) async fn reload(&self) -> Result<()> {
        let header = self.header();
        let (geo, codec) = (self.tables.geo, self.tables.codec);
        let l1_bytes = u64::from(header.l1_size) * ENTRY_BYTES;
        let l1 = words(&read_bytes(&self.storage, header.l1_offset, l1_bytes as usize).await?);
        let options = OpenOptions::default();
        let found = find_space(&self.storage, &header, geo, codec, &l1, &options).await?;
        if !found.contested.is_empty() {
            let text = "structures of the image overlap after a change of its metadata";
            return Err(Error::new(ErrorKind::Corrupt, text));
        }
        self.space.reset(found);
        for id in self.cache.take_resident() {
            if let Some(slice) = self.tables.slot(id).and_then(|slot| slot.swap(None)) {
                slice.forget();
            }
        }
        self.tables.replace_l1(&l1);
        *self.l1_in_file.lock().unwrap_or_else(PoisonError::into_inner) = l1;
        *self.dirty() = Dirty::default();
        self.unpacked.clear();
        self.size.store(header.disk_size().get(), Ordering::Release);
        Ok(())
    }

    /// Gives the host back what the generation before used and this one does not. It only helps: what can't be done
    /// costs space, not correctness.
    pub(crate) async fn give_back_unused(&self, old: &[u64]) {
        let new = self.space.state().table.clone();
        if let Err(e) = self.discard_unused(old, &new).await {
            tracing::debug!(image = self.storage.name(), "cannot give space back: {e:#}");
        }
    }

    async fn discard_unused(&self, old: &[u64], new: &[u64]) -> Result<()> {
        let counts = self.space.counts;
        for (index, old_at) in old.iter().enumerate().filter(|(_, at)| **at != 0) {
            let new_at = new.get(index).copied().unwrap_or(0);
            let Some(first) = counts.first_cluster(index as u64) else { break };
            if new_at == *old_at {
                continue;
            }
            let (old, new) = (self.counts_at(*old_at).await?, self.counts_at(new_at).await?);
            for (from, len) in unused_runs(counts, &old, &new) {
                let at = self.space.offset_of(first.saturating_add(from));
                self.storage.discard(at, ByteLen::new(len * self.tables.cluster())).await?;
            }
        }
        Ok(())
    }

    async fn counts_at(&self, at: u64) -> Result<Vec<u8>> {
        let bytes = self.tables.cluster() as usize;
        if at == 0 {
            return Ok(vec![0; bytes]);
        }
        read_bytes(&self.storage, HostOffset::new(at), bytes).await
    }
}

/// Runs of clusters that `old` counts and `new` does not, as first and length inside the block.
fn unused_runs(counts: RefcountFormat, old: &[u8], new: &[u8]) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for entry in 0..counts.entries_per_block() {
        let count = |bytes| counts.get(bytes, entry as usize).unwrap_or(0);
        if count(old) == 0 || count(new) != 0 {
            continue;
        }
        match runs.last_mut() {
            Some((first, len)) if *first + *len == entry => *len += 1,
            _ => runs.push((entry, 1)),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Geometry;

    #[test]
    fn only_clusters_that_have_lost_their_last_reference_are_given_back() {
        let counts = RefcountFormat::new(3, Geometry::new(9).expect("allowed")).expect("allowed");
        let mut old = vec![0; 512];
        let mut new = vec![0; 512];
        old[3..9].fill(2);
        new[5] = 1;
        new[20] = 1;
        old[511] = 1;
        assert_eq!(unused_runs(counts, &old, &new), [(3, 2), (6, 3), (511, 1)]);
    }
}
