//! From "no longer referred to" to "free again".
//!
//! A cluster whose mapping was removed in memory waits, in this order, for: the flush that makes the removal
//! durable (I3); the end of all I/O that may have looked it up before; the host taking its space back. Only then
//! is its refcount lowered and, at zero, the cluster free. A hole is never punched into space that is in use again.

use super::FreeRun;
use crate::faults::OrderRule;
use crate::image::Qcow2;
use bedplate_runtime::sync::Grace;
use bedplate_storage::{Storage, ZeroMode};
use bedplate_types::{ByteLen, Result};
use std::collections::VecDeque;
use std::sync::{MutexGuard, PoisonError};

/// One reference to a cluster that was removed in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Freed {
    pub(crate) cluster: u64,
    /// The cluster held an L2 table.
    pub(crate) table: bool,
}

/// References on their way.
#[derive(Default)]
pub(crate) struct Lists {
    /// Removed since the last flush began.
    removed: Vec<Freed>,
    /// Durably removed; waiting for I/O that began earlier.
    settling: VecDeque<(Grace, Vec<Freed>)>,
}

impl super::Space {
    fn lists(&self) -> MutexGuard<'_, Lists> {
        self.freed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes references that were removed in memory just now.
    pub(crate) fn note_freed(&self, freed: impl IntoIterator<Item = Freed>) {
        self.lists().removed.extend(freed);
    }

    /// Takes what a flush that begins now will make durable.
    pub(crate) fn take_removed(&self) -> Vec<Freed> {
        std::mem::take(&mut self.lists().removed)
    }
}

impl<S: Storage> Qcow2<S> {
    /// The removal of these references is durable now.
    pub(crate) fn settle(&self, freed: Vec<Freed>) {
        if !freed.is_empty() {
            let grace = self.epochs.start();
            self.space.lists().settling.push_back((grace, freed));
        }
    }

    /// Frees what has waited long enough. Never waits for anybody's I/O itself.
    ///
    /// # Errors
    /// What loading a refcount block reports.
    pub(crate) async fn reclaim(&self) -> Result<()> {
        loop {
            let ready = {
                let mut lists = self.space.lists();
                let early = !self.faults.keeps(OrderRule::FreeLater);
                match lists.settling.front() {
                    Some((grace, _)) if self.epochs.elapsed(grace) => {
                        lists.settling.pop_front().map(|(_, freed)| freed)
                    }
                    _ if early && !lists.removed.is_empty() => {
                        Some(std::mem::take(&mut lists.removed))
                    }
                    _ => None,
                }
            };
            let Some(freed) = ready else { return Ok(()) };
            for f in freed.iter().filter(|f| f.table) {
                self.space.drop_metadata(f.cluster, 1);
            }
            self.release_durable(freed.into_iter().map(|f| f.cluster).collect()).await?;
        }
    }

    /// Lowers refcounts whose references are durably gone and not looked at any more; what reaches zero is given
    /// back to the host and becomes free.
    pub(crate) async fn release_durable(&self, mut clusters: Vec<u64>) -> Result<()> {
        clusters.sort_unstable();
        let mut run: Option<FreeRun> = None;
        let mut at = 0;
        while let Some(&cluster) = clusters.get(at) {
            let references = clusters[at..].iter().take_while(|c| **c == cluster).count();
            at += references;
            let last = self.lower(cluster, references as u64).await?;
            let joins = run.is_some_and(|r| last && r.end() == cluster);
            if !joins && let Some(done) = run.take() {
                self.hand_back(done).await?;
            }
            if last {
                run.get_or_insert(FreeRun { first: cluster, clusters: 0, zeroed: false })
                    .clusters += 1;
            }
        }
        match run {
            Some(run) => self.hand_back(run).await,
            None => Ok(()),
        }
    }

    /// Lowers the refcount of a cluster that keeps other references; true when these were the last, in which
    /// case the count stays until the space has been handed back.
    async fn lower(&self, cluster: u64, references: u64) -> Result<bool> {
        let (index, _) = self.space.counts.position(cluster);
        loop {
            {
                let mut state = self.space.state();
                if let Some(count) = self.space.count(&state, cluster) {
                    if count <= references {
                        // From here on nothing more is packed into it.
                        if state.packing.is_some_and(|p| p.cluster == cluster) {
                            state.packing = None;
                        }
                        return Ok(count != 0);
                    }
                    self.space.set_count(&mut state, cluster, count - references)?;
                    return Ok(false);
                }
            }
            self.load_block(index).await?;
        }
    }

    /// Gives the space of clusters without references back to the host, then calls them free.
    async fn hand_back(&self, run: FreeRun) -> Result<()> {
        let at = self.space.offset_of(run.first);
        let len = ByteLen::new(run.clusters.saturating_mul(self.tables.cluster()));
        let mode = ZeroMode { unmap: true, fast_only: true };
        // The space counts as zeroed, since every flush makes the hole durable before a mapping into it.
        let zeroed = match self.storage.write_zeroes(at, len, mode).await {
            Ok(()) => true,
            Err(_) => {
                // A host that can't take it back costs space, not correctness.
                let _ = self.storage.discard(at, len).await;
                false
            }
        };
        let mut next = run.first;
        while next < run.end() {
            let (index, _) = self.space.counts.position(next);
            self.load_block(index).await?;
            let mut state = self.space.state();
            // The block may have been dropped again between the load and here.
            while next < run.end() && self.space.counts.position(next).0 == index {
                if !state.blocks.contains_key(&index) {
                    break;
                }
                // A damaged image may hold more references than it counts: space is handed back once all the same.
                if self.space.count(&state, next) == Some(0) {
                    next += 1;
                    continue;
                }
                self.space.set_count(&mut state, next, 0)?;
                // What the scan has not reached yet it will find by itself.
                if next < state.scan || next >= state.scan_end {
                    state.free.insert(FreeRun { first: next, clusters: 1, zeroed });
                }
                next += 1;
            }
        }
        Ok(())
    }

    /// Waits until everything that was freed is free. No request may be under way.
    pub(crate) async fn reclaim_all(&self) -> Result<()> {
        self.epochs.quiesce().await;
        self.reclaim().await
    }
}
