//! Leases: runs of free clusters that one thread takes from, so that threads don't meet and neighbours stay together.

use super::FreeRun;
use crate::image::Qcow2;
use bedplate_storage::Storage;
use bedplate_types::Result;
use std::collections::VecDeque;

/// Bytes that a lease takes at once, where clusters are small enough.
const LEASE_BYTES: u64 = 4 << 20;
/// Clusters that a lease takes at once, at least and at most.
const LEASE_CLUSTERS: (u64, u64) = (4, 1024);

/// Free clusters that one thread may use. Guarded by a short mutex of its own.
#[derive(Default)]
pub(crate) struct Lease {
    runs: VecDeque<FreeRun>,
}

impl Lease {
    fn take(&mut self, want: u64) -> Option<FreeRun> {
        let run = self.runs.front_mut()?;
        let n = run.clusters.min(want);
        let taken = FreeRun { clusters: n, ..*run };
        run.first += n;
        run.clusters -= n;
        if run.clusters == 0 {
            self.runs.pop_front();
        }
        Some(taken)
    }
}

impl<S: Storage> Qcow2<S> {
    /// Takes `want` free clusters, as few runs as can be. They are counted when they are used
    /// ([`super::Space::count_leased`]), or go back by [`Self::give_back`].
    ///
    /// # Errors
    /// `Corrupt` when the refcounts call metadata free, or what the storage reports.
    pub(crate) async fn take_clusters(&self, want: u64) -> Result<Vec<FreeRun>> {
        let mut taken: Vec<FreeRun> = Vec::new();
        let mut left = want;
        while left > 0 {
            let run = self.space.lease().take(left);
            if let Some(run) = run {
                left -= run.clusters;
                match taken.last_mut() {
                    Some(last) if last.end() == run.first && last.zeroed == run.zeroed => {
                        last.clusters += run.clusters;
                    }
                    _ => taken.push(run),
                }
                continue;
            }
            let _one = self.space.one_refill().await;
            if !self.space.lease().runs.is_empty() {
                continue; // somebody else has refilled it meanwhile
            }
            let usual = (LEASE_BYTES >> self.tables.geo.cluster_bits())
                .clamp(LEASE_CLUSTERS.0, LEASE_CLUSTERS.1);
            match self.grant(left.max(usual)).await {
                Ok(run) => self.space.lease().runs.push_back(run),
                Err(e) => {
                    for run in taken {
                        self.give_back(run);
                    }
                    return Err(e);
                }
            }
        }
        Ok(taken)
    }

    /// Returns clusters that were taken and not used. What they hold is unknown unless `zeroed` says so.
    pub(crate) fn give_back(&self, run: FreeRun) {
        self.space.lease().runs.push_front(run);
    }

    /// Takes all leases back and calls their clusters free. No write may be under way.
    pub(crate) fn end_leases(&self) {
        for lease in &self.space.leases {
            let runs = std::mem::take(
                &mut lease.lock().unwrap_or_else(std::sync::PoisonError::into_inner).runs,
            );
            let mut state = self.space.state();
            for run in runs {
                self.space.unpin(&mut state, run.first, run.clusters);
                state.free.insert(run);
            }
        }
    }
}
