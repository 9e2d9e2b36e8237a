//! Look-ups: from guest addresses to host addresses.
//!
//! [`Qcow2::lookup_run`] and [`Qcow2::lookup`] take no lock and never wait. What they answer stays true, in the
//! sense that the host space is not given to anything else, for as long as the caller holds a pin of
//! [`Qcow2::epochs`] that it took before.

use crate::format::{COMPRESSED, COPIED, Cluster, L2Entry, OFFSET_MASK, ZERO};
use crate::image::Qcow2;
use crate::slice::{Slice, SliceId};
use bedplate_storage::Storage;
use bedplate_types::{ByteLen, Error, ErrorKind, GuestOffset, HostOffset, Result};
use std::sync::Arc;

/// Clusters that one look-up joins at most, so that it never takes long.
const LONGEST_RUN: usize = 16384;

/// A compressed cluster's place in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompressedCluster {
    /// First byte of the compressed data.
    pub host: HostOffset,
    /// Bytes that may belong to it, up to the end of its last 512-byte sector.
    pub len: ByteLen,
}

/// What the first run of a guest range is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mapping {
    /// Nothing here: the layer below shows.
    Unallocated {
        /// Length of the run.
        len: ByteLen,
    },
    /// Reads as zeroes.
    Zero {
        /// Length of the run.
        len: ByteLen,
        /// Host space is kept for it.
        allocated: bool,
    },
    /// Bytes of the file, or of the data file ([`Qcow2::data_storage`]).
    Data {
        /// Where the run starts in the file.
        host: HostOffset,
        /// Length of the run; its clusters follow each other in the file.
        len: ByteLen,
        /// It may be written in place.
        in_place: bool,
    },
    /// Inside a compressed cluster.
    Compressed {
        /// The cluster.
        cluster: CompressedCluster,
        /// Where the run starts in the cluster's content.
        within: ByteLen,
        /// Length of the run.
        len: ByteLen,
    },
}

/// What a whole guest range is, when it is one run that needs no work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Run {
    /// Contiguous bytes of the file, or of the data file ([`Qcow2::data_storage`]); for a write, writable in place.
    At(HostOffset),
    /// Zeroes.
    Zero,
    /// Nothing: the layer below shows.
    Unallocated,
    /// Several runs, work to do, or not in memory.
    Other,
}

/// Reads entries one after another, keeping the slice at hand.
struct Cursor<'a, S: Storage> {
    image: &'a Qcow2<S>,
    slice: Option<(SliceId, Arc<Slice>)>,
}

impl<S: Storage> Qcow2<S> {
    /// Answers for a whole range at once, if it is one run. Never waits. The caller holds a pin of [`Self::epochs`].
    pub fn lookup_run(&self, write: bool, at: GuestOffset, len: ByteLen) -> Run {
        if !self.gate.answers() {
            return Run::Other; // requests are held, or the bytes of the file are not those of the disk
        }
        let tables = &self.tables;
        let (id, index) = tables.locate(at);
        let Some(slot) = tables.slot(id) else {
            let empty = tables.l1(id.l1) == 0 && len <= tables.to_table_end(at);
            return if empty { Run::Unallocated } else { Run::Other };
        };
        let guard = slot.load();
        let Some(slice) = guard.as_ref() else { return Run::Other };
        let within = tables.geo.in_cluster(at);
        let clusters = (within + len.get()).div_ceil(tables.cluster()) as usize;
        // A range that crosses into another slice is rare and left to the slow road.
        if slice.careful || index + clusters > tables.geo.slice_entries() {
            return Run::Other;
        }
        slice.touch();
        if tables.geo.is_extended() {
            return match self.lookup_parts(slice, write, at, len) {
                Run::At(_) if write && !self.track(at, len) => Run::Other,
                run => run,
            };
        }
        let mut rest = (1..clusters).map(|k| (k as u64, slice.get(index + k)));
        match tables.codec.l2(slice.get(index)) {
            Ok(L2Entry::Data { host, copied }) if copied || !write => {
                let flag = if write { COPIED } else { 0 };
                let mask = OFFSET_MASK | COMPRESSED | ZERO | flag;
                let want = |k: u64| (host.get() + k * tables.cluster()) | flag;
                let one = rest.all(|(k, word)| word & mask == want(k));
                if one && (!write || self.track(at, len)) {
                    Run::At(HostOffset::new(host.get() + within))
                } else {
                    Run::Other
                }
            }
            Ok(L2Entry::Zero { .. })
                if !write && rest.all(|(_, w)| w & (COMPRESSED | ZERO) == ZERO) =>
            {
                Run::Zero
            }
            Ok(L2Entry::Unallocated) if rest.all(|(_, w)| w == 0) => Run::Unallocated,
            _ => Run::Other,
        }
    }

    /// As [`Self::lookup_run`], for a range inside a slice of extended entries.
    fn lookup_parts(&self, slice: &Slice, write: bool, at: GuestOffset, len: ByteLen) -> Run {
        let geo = self.tables.geo;
        let (_, first) = self.tables.locate(at);
        let (mut within, mut left) = (geo.in_cluster(at), len.get());
        let mut answer = None;
        for index in first.. {
            if left == 0 {
                break;
            }
            let here = left.min(geo.cluster_size() - within);
            let (word, map) = slice.pair(index * geo.entry_words());
            let Ok(cluster) = self.tables.codec.cluster(word, map) else { return Run::Other };
            let touched = geo.parts_touched(within, here);
            let run = one_run(cluster, touched, write, within);
            let expected = match answer {
                Some(Run::At(start)) => {
                    start.checked_add(ByteLen::new(len.get() - left)).map(Run::At)
                }
                other => other,
            };
            if run == Run::Other || expected.is_some_and(|e| e != run) {
                return Run::Other;
            }
            answer.get_or_insert(run);
            left -= here;
            within = 0;
        }
        answer.unwrap_or(Run::Other)
    }

    /// The first run of a range; `None` when a slice is not in memory.
    ///
    /// # Errors
    /// `Corrupt` when an entry breaks the format's rules.
    pub(crate) fn lookup(&self, at: GuestOffset, len: ByteLen) -> Result<Option<Mapping>> {
        let (id, _) = self.tables.locate(at);
        if self.tables.l1(id.l1) == 0 {
            let len = len.min(self.tables.to_table_end(at));
            return Ok(Some(Mapping::Unallocated { len }));
        }
        let mut cursor = Cursor { image: self, slice: None };
        let geo = self.tables.geo;
        let Some(cluster) = cursor.cluster(at)? else { return Ok(None) };
        let first = placed(cluster.part(geo.part(at)), geo.in_cluster(at));
        let mut run = geo.part_size() - at.get() % geo.part_size();
        // More parts belong to the run while they continue it; what is not in memory ends it.
        for _ in 0..LONGEST_RUN {
            if run >= len.get() {
                break;
            }
            let Some(next) = at.checked_add(ByteLen::new(run)) else { break };
            let Ok(Some(cluster)) = cursor.cluster(next) else { break };
            let entry = placed(cluster.part(geo.part(next)), geo.in_cluster(next));
            if !continues(first, entry, run, geo.in_cluster(next)) {
                break;
            }
            run += geo.part_size();
        }
        let len = ByteLen::new(run.min(len.get()));
        Ok(Some(match first {
            L2Entry::Unallocated => Mapping::Unallocated { len },
            L2Entry::Zero { host, .. } => Mapping::Zero { len, allocated: host.is_some() },
            L2Entry::Data { host, copied } => Mapping::Data { host, len, in_place: copied },
            L2Entry::Compressed { host, len: size } => {
                let cluster = CompressedCluster { host, len: size };
                Mapping::Compressed { cluster, within: ByteLen::new(geo.in_cluster(at)), len }
            }
        }))
    }

    /// The first run of a range, loading what is missing.
    ///
    /// # Errors
    /// `Corrupt` for bad metadata, or what the storage reports.
    pub async fn map(&self, at: GuestOffset, len: ByteLen) -> Result<Mapping> {
        loop {
            match self.lookup(at, len) {
                Ok(Some(mapping)) => return Ok(mapping),
                Ok(None) => {
                    if let Some(len) = self.hole_of_table(at, len).await? {
                        return Ok(Mapping::Unallocated { len });
                    }
                    self.load_slice(self.tables.locate(at).0).await?;
                }
                Err(e) => return Err(self.mark_corrupt(e).await),
            }
        }
    }

    /// How much of a range is mapped by an L2 table that lies in a hole of the file, and so says nothing; `None` where that
    /// is not known. Of such tables a sparse file may have millions.
    async fn hole_of_table(&self, at: GuestOffset, len: ByteLen) -> Result<Option<ByteLen>> {
        let (id, index) = self.tables.locate(at);
        let whole = self.tables.to_table_end(at);
        let first = id.part == 0 && index == 0;
        // A table that may be changed may have its content in memory only.
        if !self.read_only || !first || self.table_fault(id.l1).is_some() {
            return Ok(None);
        }
        let Some(table) = self.tables.slice_at(id) else { return Ok(None) };
        let cluster = ByteLen::new(self.tables.cluster());
        let extent = self.storage.extent(table, cluster).await?;
        Ok((!extent.data && extent.len >= cluster).then(|| whole.min(len)))
    }

    /// Refuses an L1 table that names an L2 table twice: a small file could seem to hold more than can be looked through.
    ///
    /// # Errors
    /// `Corrupt`.
    pub fn refuse_shared_tables(&self) -> Result<()> {
        let mut tables = self.tables.all_tables();
        tables.sort_unstable();
        match tables.windows(2).find(|pair| pair.first() == pair.last()) {
            None => Ok(()),
            Some(pair) => Err(Error::new(
                ErrorKind::Corrupt,
                format!(
                    "image '{}' is corrupt: its L1 table names the L2 table at {:#x} more than once",
                    self.storage.name(),
                    pair.first().copied().unwrap_or_default()
                ),
            )),
        }
    }

    /// What the tables say of one cluster, loading its slice when missing.
    pub(crate) async fn cluster(&self, at: GuestOffset) -> Result<Cluster> {
        loop {
            match (Cursor { image: self, slice: None }).cluster(at) {
                Ok(Some(cluster)) => return Ok(cluster),
                Ok(None) => self.load_slice(self.tables.locate(at).0).await?,
                Err(e) => return Err(self.mark_corrupt(e).await),
            }
        }
    }
}

impl<S: Storage> Cursor<'_, S> {
    fn cluster(&mut self, at: GuestOffset) -> Result<Option<Cluster>> {
        let tables = &self.image.tables;
        let (id, index) = tables.locate(at);
        if self.slice.as_ref().is_none_or(|(have, _)| *have != id) {
            if tables.l1(id.l1) == 0 {
                return Ok(tables.codec.cluster(0, 0).ok());
            }
            let Some(slice) = tables.slot(id).and_then(|s| s.load_full()) else {
                return Ok(None);
            };
            slice.touch();
            self.slice = Some((id, slice));
        }
        let Some((_, slice)) = &self.slice else { return Ok(None) };
        let words = match tables.geo.entry_words() {
            1 => (slice.get(index), 0),
            n => slice.pair(index * n),
        };
        let fault = match tables.codec.cluster(words.0, words.1) {
            Ok(cluster) if !slice.careful => return Ok(Some(cluster)),
            Ok(cluster) => {
                match self.image.entry_fault(tables.geo.cluster_start(at), &[words.0, words.1]) {
                    None => return Ok(Some(cluster)),
                    Some(fault) => fault,
                }
            }
            Err(e) => e.to_string(),
        };
        let (name, word) = (self.image.storage.name(), words.0);
        Err(Error::new(
            ErrorKind::Corrupt,
            format!(
                "image '{name}' is corrupt: the L2 entry {word:#018x} for guest offset {at} is wrong: {fault}"
            ),
        ))
    }
}

/// What these parts of a cluster are together, the first byte asked for being `within` it.
fn one_run(cluster: Cluster, parts: u32, write: bool, within: u64) -> Run {
    let map = cluster.map.unwrap_or_default();
    match cluster.entry {
        L2Entry::Data { host, copied }
            if map.allocated() & parts == parts && (copied || !write) =>
        {
            host.checked_add(ByteLen::new(within)).map_or(Run::Other, Run::At)
        }
        L2Entry::Compressed { .. } => Run::Other,
        _ if map.zero() & parts == parts => {
            if write {
                Run::Other
            } else {
                Run::Zero
            }
        }
        _ if (map.allocated() | map.zero()) & parts == 0 => Run::Unallocated,
        _ => Run::Other,
    }
}

/// An entry whose data is given by where the byte `within` the cluster lies.
fn placed(entry: L2Entry, within: u64) -> L2Entry {
    match entry {
        L2Entry::Data { host, copied } => {
            L2Entry::Data { host: HostOffset::new(host.get().saturating_add(within)), copied }
        }
        entry => entry,
    }
}

/// True when `next`, `distance` bytes behind `first`, belongs to the same run. It begins `within` bytes into its cluster.
fn continues(first: L2Entry, next: L2Entry, distance: u64, within: u64) -> bool {
    match (first, next) {
        (L2Entry::Unallocated, L2Entry::Unallocated) => true,
        (L2Entry::Zero { host: a, .. }, L2Entry::Zero { host: b, .. }) => {
            a.is_some() == b.is_some()
        }
        (L2Entry::Data { host: a, copied: x }, L2Entry::Data { host: b, copied: y }) => {
            x == y && a.checked_add(ByteLen::new(distance)) == Some(b)
        }
        // Only the parts of one cluster: two may lie side by side in the file, but each is unpacked on its own.
        (L2Entry::Compressed { .. }, L2Entry::Compressed { .. }) => within != 0 && first == next,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::SubMap;

    fn data(host: u64, copied: bool) -> L2Entry {
        L2Entry::Data { host: HostOffset::new(host), copied }
    }

    #[test]
    fn runs_continue_only_over_neighbouring_host_clusters() {
        let a = data(0x50000, true);
        assert!(continues(a, data(0x60000, true), 0x10000, 0));
        assert!(!continues(a, data(0x60000, false), 0x10000, 0));
        assert!(!continues(a, data(0x70000, true), 0x10000, 0));
    }

    #[test]
    fn parts_are_one_run_when_all_of_them_are_the_same() {
        let cluster = |entry, map| Cluster { entry, map: Some(map) };
        let mixed = cluster(data(0x50000, true), SubMap::new(0b0110, 0b1000));
        let at = Run::At(HostOffset::new(0x50800));
        assert_eq!(one_run(mixed, 0b0110, true, 0x800), at);
        assert_eq!(one_run(mixed, 0b1110, true, 0x800), Run::Other);
        assert_eq!(one_run(mixed, 0b1000, false, 0), Run::Zero);
        assert_eq!(one_run(mixed, 0b1000, true, 0), Run::Other);
        assert_eq!(one_run(mixed, 0b0001, true, 0), Run::Unallocated);
        let shared = cluster(data(0x50000, false), SubMap::new(1, 0));
        assert_eq!(one_run(shared, 1, true, 0), Run::Other);
        assert_eq!(one_run(shared, 1, false, 0), Run::At(HostOffset::new(0x50000)));
    }
}
