//! Host space: reference counts, free clusters, leases.
//!
//! All state in memory is guarded by one short mutex, [`Space::state`]; no I/O happens under it. Queue threads
//! take clusters from their own lease and touch the shared state once a lease, and once a batch to count what
//! they used.
//!
//! A cluster is in exactly one of these places: counted (refcount above zero), leased (or taken from a lease
//! by a write under way), free (in [`FreeMap`]), not yet scanned, being reclaimed (still counted), or past the end.

mod blocks;
mod find;
mod free;
mod grow;
mod lease;
mod packing;
mod reclaim;
mod reset;

pub(crate) use blocks::Block;
pub(crate) use free::{FreeMap, FreeRun};
pub(crate) use packing::{Layout, Packing};
pub(crate) use reclaim::Freed;

use crate::format::{Geometry, RefcountFormat};
use bedplate_runtime::sync::{AsyncMutex, AsyncMutexGuard};
use bedplate_types::{ByteLen, HostOffset};
use lease::Lease;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};

/// Leases are kept for this many threads; more threads share.
const LEASES: usize = 32;

/// The allocator of one image.
pub(crate) struct Space {
    pub(crate) geo: Geometry,
    pub(crate) counts: RefcountFormat,
    /// Short mutex, see the module's header. Taken after a lease's mutex, before none.
    state: Mutex<State>,
    /// Copy of `State::end` for checks without the lock.
    end: AtomicU64,
    /// Clusters that hold metadata: nothing may be allocated there, and no data entry may point there.
    metadata: RwLock<HashSet<u64>>,
    /// Clusters that two structures claimed when the image was opened: a change of one would damage the other.
    contested: HashSet<u64>,
    /// One writer of the refcount structures at a time; held across I/O by design.
    growth: AsyncMutex<()>,
    leases: Box<[Mutex<Lease>]>,
    /// One refill of each lease at a time, or all requests that find it empty would take a whole one; held across
    /// I/O by design. Taken before `growth`.
    refills: Box<[AsyncMutex<()>]>,
    /// Space whose last reference was removed, on its way to being free. Taken before `state`.
    freed: Mutex<reclaim::Lists>,
}

pub(crate) struct State {
    /// Refcount table: the place of each block, zero for none.
    pub(crate) table: Vec<u64>,
    pub(crate) table_at: HostOffset,
    /// Clusters that the table takes in the file.
    pub(crate) table_clusters: u64,
    pub(crate) blocks: HashMap<u64, Block>,
    /// Blocks that are newer in memory than in the file.
    pub(crate) dirty: BTreeSet<u64>,
    /// Blocks that may be in memory.
    pub(crate) capacity: usize,
    /// How often a block was dropped from memory.
    pub(crate) drops: u64,
    pub(crate) free: FreeMap,
    /// Clusters from here to `scan_end` were there at opening and have not been looked at.
    pub(crate) scan: u64,
    pub(crate) scan_end: u64,
    /// First cluster past everything that is or was in use: fresh space, which reads as zeroes.
    pub(crate) end: u64,
    /// First cluster past what was readied in the host's file system ahead of need.
    pub(crate) prepared: u64,
    /// The cluster with room for more compressed data.
    pub(crate) packing: Option<Packing>,
}

/// What opening found out about an image's space.
pub(crate) struct Found {
    pub(crate) table: Vec<u64>,
    pub(crate) table_at: HostOffset,
    pub(crate) table_clusters: u64,
    pub(crate) file_len: ByteLen,
    pub(crate) metadata: HashSet<u64>,
    pub(crate) contested: HashSet<u64>,
    pub(crate) cache_bytes: ByteLen,
}

impl Space {
    pub(crate) fn new(geo: Geometry, counts: RefcountFormat, found: Found) -> Self {
        let end = geo.clusters(found.file_len).max(1);
        let capacity = (found.cache_bytes.get() / geo.cluster_size()).max(16) as usize;
        Self {
            geo,
            counts,
            state: Mutex::new(State {
                table: found.table,
                table_at: found.table_at,
                table_clusters: found.table_clusters,
                blocks: HashMap::new(),
                dirty: BTreeSet::new(),
                capacity,
                drops: 0,
                free: FreeMap::default(),
                scan: 0,
                scan_end: end,
                end,
                prepared: end,
                packing: None,
            }),
            end: AtomicU64::new(end),
            metadata: RwLock::new(found.metadata),
            contested: found.contested,
            growth: AsyncMutex::new(()),
            leases: (0..LEASES).map(|_| Mutex::default()).collect(),
            refills: (0..LEASES).map(|_| AsyncMutex::new(())).collect(),
            freed: Mutex::default(),
        }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn cluster_of(&self, host: HostOffset) -> u64 {
        self.geo.host_cluster(host)
    }

    pub(crate) fn offset_of(&self, cluster: u64) -> HostOffset {
        // Cluster numbers come from checked offsets or lie below `end`, so this can't leave 56 bits.
        HostOffset::new(cluster.saturating_mul(self.geo.cluster_size()))
    }

    /// Moves the end of used space up by `clusters`; returns the first of them.
    pub(crate) fn extend(&self, state: &mut State, clusters: u64) -> Option<u64> {
        let first = state.end;
        let end = first.checked_add(clusters)?;
        if end > crate::format::MAX_HOST >> self.geo.cluster_bits() {
            return None;
        }
        state.end = end;
        self.end.store(end, Ordering::Release);
        Some(first)
    }

    pub(crate) fn set_end(&self, state: &mut State, end: u64) {
        state.end = end;
        self.end.store(end, Ordering::Release);
    }

    /// True when the bytes lie inside the used part of the file.
    pub(crate) fn contains(&self, host: HostOffset, len: u64) -> bool {
        let end = self.end.load(Ordering::Acquire).saturating_mul(self.geo.cluster_size());
        host.get().checked_add(len).is_some_and(|last| last <= end)
    }

    pub(crate) fn is_metadata(&self, host: HostOffset) -> bool {
        let cluster = self.cluster_of(host);
        self.metadata.read().unwrap_or_else(PoisonError::into_inner).contains(&cluster)
    }

    /// True when a second structure of the image lies in this cluster.
    pub(crate) fn is_contested(&self, host: HostOffset) -> bool {
        self.contested.contains(&self.cluster_of(host))
    }

    /// Records clusters that hold metadata from now on.
    pub(crate) fn add_metadata(&self, first: u64, clusters: u64) {
        let mut metadata = self.metadata.write().unwrap_or_else(PoisonError::into_inner);
        metadata.extend(first..first.saturating_add(clusters));
    }

    pub(crate) fn drop_metadata(&self, first: u64, clusters: u64) {
        let mut metadata = self.metadata.write().unwrap_or_else(PoisonError::into_inner);
        for cluster in first..first.saturating_add(clusters) {
            metadata.remove(&cluster);
        }
    }

    /// The first of the clusters that holds metadata, if any.
    pub(crate) fn metadata_in(&self, first: u64, clusters: u64) -> Option<u64> {
        let metadata = self.metadata.read().unwrap_or_else(PoisonError::into_inner);
        (first..first.saturating_add(clusters)).find(|c| metadata.contains(c))
    }

    /// Leave to write refcount blocks or the refcount table.
    pub(crate) async fn one_writer(&self) -> AsyncMutexGuard<'_, ()> {
        self.growth.lock().await
    }

    /// This thread's lease.
    fn lease(&self) -> MutexGuard<'_, Lease> {
        self.leases[lease_index()].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leave to refill this thread's lease.
    async fn one_refill(&self) -> AsyncMutexGuard<'_, ()> {
        self.refills[lease_index()].lock().await
    }
}

fn lease_index() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static MINE: usize = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    MINE.with(|i| *i) % LEASES
}
