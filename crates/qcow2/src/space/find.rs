//! Finding free clusters: known free ones first, then those not yet looked at, then fresh space at the end.

use super::{FreeRun, Space, State};
use crate::image::Qcow2;
use crate::write::WRITTEN_WHOLE;
use bedplate_storage::Storage;
use bedplate_types::{ByteLen, Error, ErrorKind, Result};

/// How far ahead of need the file is made longer, without allocating anything.
const GROW_BYTES: u64 = 256 << 20;
/// How much space is allocated ahead of need at once, for clusters that are not written whole.
const ALLOCATE_BYTES: u64 = 64 << 20;

enum Step {
    Found(FreeRun),
    /// This refcount block must be in memory to go on.
    Load(u64),
    /// The file has reached the largest offset that the format can express.
    Full,
}

impl Space {
    fn find(&self, state: &mut State, want: u64) -> Step {
        loop {
            if let Some(run) = state.free.take(want) {
                return Step::Found(run);
            }
            if state.scan >= state.scan_end {
                return match self.extend(state, want) {
                    Some(first) => Step::Found(FreeRun { first, clusters: want, zeroed: true }),
                    None => Step::Full,
                };
            }
            let (index, _) = self.counts.position(state.scan);
            if state.block_at(index).is_some() && !state.blocks.contains_key(&index) {
                return Step::Load(index);
            }
            self.scan_block(state, index);
        }
    }

    /// Looks through one block for clusters that nothing refers to. What they hold is unknown.
    pub(super) fn scan_block(&self, state: &mut State, index: u64) {
        let first = state.scan;
        let end = self
            .counts
            .first_cluster(index + 1)
            .map_or(state.scan_end, |next| next.min(state.scan_end));
        let mut free: Option<FreeRun> = None;
        let mut runs = Vec::new();
        match state.blocks.get(&index) {
            None => runs.push(FreeRun { first, clusters: end - first, zeroed: false }),
            Some(block) => {
                for cluster in first..end {
                    let (_, entry) = self.counts.position(cluster);
                    if self.counts.get(&block.bytes, entry) == Some(0) {
                        free.get_or_insert(FreeRun {
                            first: cluster,
                            clusters: 0,
                            zeroed: false,
                        })
                        .clusters += 1;
                    } else if let Some(run) = free.take() {
                        runs.push(run);
                    }
                }
            }
        }
        runs.extend(free);
        for run in runs {
            state.free.insert(run);
        }
        state.scan = end;
    }
}

impl<S: Storage> Qcow2<S> {
    /// Grants a run of up to `want` free clusters, with refcount blocks in memory that cover them.
    ///
    /// # Errors
    /// `Corrupt` when the refcounts call metadata free, `Limit` at the end of the format's address space, or what
    /// the storage reports.
    pub(super) async fn grant(&self, want: u64) -> Result<FreeRun> {
        loop {
            let step = {
                let mut state = self.space.state();
                self.space.find(&mut state, want)
            };
            let run = match step {
                Step::Load(index) => {
                    self.load_block(index).await?;
                    continue;
                }
                Step::Full => {
                    return Err(Error::new(
                        ErrorKind::Limit,
                        format!(
                            "image '{}' has reached the largest file size that qcow2 allows",
                            self.storage.name()
                        ),
                    ));
                }
                Step::Found(run) => run,
            };
            if let Some(cluster) = self.space.metadata_in(run.first, run.clusters) {
                let e = Error::new(
                    ErrorKind::Corrupt,
                    format!(
                        "image '{}' is corrupt: its refcounts call the cluster at {} free, which holds metadata; \
                         repair it with 'bedplate check -r all'",
                        self.storage.name(),
                        self.space.offset_of(cluster)
                    ),
                );
                return Err(self.mark_corrupt(e).await);
            }
            self.prepare(run).await;
            if let Err(e) = self.cover(run).await {
                self.space.state().free.insert(run);
                return Err(e);
            }
            return Ok(run);
        }
    }

    /// Makes sure that refcount blocks for the run exist and are in memory, and keeps them there.
    async fn cover(&self, run: FreeRun) -> Result<()> {
        let mut parts = Vec::new();
        self.space.for_blocks(run.first, run.clusters, |index, _, n| parts.push((index, n)));
        let mut pinned = 0;
        for (index, n) in parts {
            // Each is kept at once: a run may need more blocks than the cache holds.
            if let Err(e) = self.cover_block(index, n).await {
                self.space.unpin(&mut self.space.state(), run.first, pinned);
                return Err(e);
            }
            pinned += n;
        }
        Ok(())
    }

    async fn cover_block(&self, index: u64, clusters: u64) -> Result<()> {
        loop {
            let exists = {
                let mut state = self.space.state();
                if let Some(block) = state.blocks.get_mut(&index) {
                    block.pins += clusters;
                    return Ok(());
                }
                state.block_at(index).is_some()
            };
            if exists {
                self.load_block(index).await?;
            } else {
                self.grow_refcounts(index).await?;
            }
        }
    }

    /// Readies fresh space for clusters in large steps, so that first writes don't extend the file one by one. It only
    /// helps: where it can't be done, writes extend and allocate as they go.
    ///
    /// Clusters that are written whole are best left unallocated: their writes lie one after the other, and
    /// need no conversion of space that was allocated unwritten. Larger ones would be scattered over the host.
    async fn prepare(&self, run: FreeRun) {
        let whole = self.tables.cluster() <= WRITTEN_WHOLE;
        let bytes = if whole { GROW_BYTES } else { ALLOCATE_BYTES };
        let (from, clusters) = {
            let mut state = self.space.state();
            if !run.zeroed || run.end() <= state.prepared {
                return;
            }
            let step = (bytes >> self.tables.geo.cluster_bits()).max(run.clusters);
            let from = state.prepared.max(run.first);
            state.prepared = run.end() + step;
            (from, state.prepared - from)
        };
        let at = self.space.offset_of(from);
        let len = ByteLen::new(clusters.saturating_mul(self.tables.cluster()));
        let result = if whole {
            self.storage.grow(ByteLen::new(at.get().saturating_add(len.get()))).await
        } else {
            self.storage.allocate(at, len).await
        };
        if let Err(e) = result {
            tracing::debug!(image = self.storage.name(), "cannot ready space ahead: {e:#}");
        }
    }
}
