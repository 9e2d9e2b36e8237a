//! Subclusters: the second word of an extended L2 entry, and what it makes of the cluster's parts.
//!
//! Callers: the engine's mapping and writes, the checker. Source: the qcow2 specification, "Extended L2 Entries". A cluster has 32
//! subclusters. Each is allocated (its bytes are at their place in the host cluster), reads as zeroes, or neither: then
//! what lies below shows. A standard entry counts as a cluster of one part here.

use super::L2Entry;
use super::entry::EntryError;

/// Subclusters of a cluster with an extended entry.
pub const SUBCLUSTERS: u32 = 32;

/// Which subclusters of a cluster are allocated, and which read as zeroes: the bitmap of an extended entry. Subcluster
/// n is bit n of a mask.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SubMap(u64);

impl SubMap {
    /// All subclusters read as zeroes.
    pub const ZEROES: Self = Self(0xffff_ffff_0000_0000);

    /// The bitmap as it is in the table.
    pub const fn from_raw(raw: u64) -> Self {
        Self(raw)
    }

    /// The bitmap for the table.
    pub const fn raw(self) -> u64 {
        self.0
    }

    /// A bitmap with these subclusters allocated and those reading as zeroes; the two must not meet.
    pub const fn new(allocated: u32, zero: u32) -> Self {
        Self(allocated as u64 | (zero as u64) << 32)
    }

    /// The subclusters that are allocated.
    pub const fn allocated(self) -> u32 {
        self.0 as u32
    }

    /// The subclusters that read as zeroes.
    pub const fn zero(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// The bits of `count` subclusters from `first` on; parts beyond the last are cut off.
    pub const fn mask(first: u32, count: u32) -> u32 {
        if first >= SUBCLUSTERS || count == 0 {
            return 0;
        }
        let count = if count > SUBCLUSTERS { SUBCLUSTERS } else { count };
        (u32::MAX >> (SUBCLUSTERS - count)) << first
    }
}

/// What the tables say of one cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// The entry; with a bitmap never [`L2Entry::Zero`].
    pub entry: L2Entry,
    /// The bitmap, in images with extended entries.
    pub map: Option<SubMap>,
}

impl Cluster {
    /// A cluster of an image with standard entries.
    pub const fn standard(entry: L2Entry) -> Self {
        Self { entry, map: None }
    }

    /// Checks a bitmap against its entry.
    ///
    /// # Errors
    /// `Subclusters` when a subcluster is both allocated and zero, or is allocated without a host cluster; a compressed
    /// cluster has none.
    pub const fn extended(entry: L2Entry, map: SubMap) -> Result<Self, EntryError> {
        let wrong = match entry {
            L2Entry::Compressed { .. } => map.raw() != 0,
            L2Entry::Data { .. } => map.allocated() & map.zero() != 0,
            _ => map.allocated() != 0,
        };
        if wrong {
            return Err(EntryError::Subclusters);
        }
        Ok(Self { entry, map: Some(map) })
    }

    /// What part number `part` is, as if it were a cluster of its own (offsets are still those of the whole cluster).
    pub const fn part(self, part: u32) -> L2Entry {
        let Some(map) = self.map else { return self.entry };
        let bit = SubMap::mask(part, 1);
        let zero = map.zero() & bit != 0;
        match self.entry {
            L2Entry::Data { host, copied } if zero => L2Entry::Zero { host: Some(host), copied },
            L2Entry::Data { .. } if map.allocated() & bit == 0 => L2Entry::Unallocated,
            L2Entry::Unallocated if zero => L2Entry::Zero { host: None, copied: false },
            entry => entry,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bedplate_types::{ByteLen, HostOffset};

    const HOST: HostOffset = HostOffset::new(0x50000);

    #[test]
    fn each_subcluster_is_allocated_zero_or_neither() {
        let entry = L2Entry::Data { host: HOST, copied: true };
        let cluster = Cluster::extended(entry, SubMap::new(1, 1 << 31)).expect("valid");
        assert_eq!(cluster.part(0), entry);
        assert_eq!(cluster.part(1), L2Entry::Unallocated);
        assert_eq!(cluster.part(31), L2Entry::Zero { host: Some(HOST), copied: true });
        let cluster = Cluster::extended(L2Entry::Unallocated, SubMap::new(0, 2)).expect("valid");
        assert_eq!(cluster.part(0), L2Entry::Unallocated);
        assert_eq!(cluster.part(1), L2Entry::Zero { host: None, copied: false });
    }

    #[test]
    fn bitmaps_that_contradict_themselves_or_their_entry_are_refused() {
        let data = L2Entry::Data { host: HOST, copied: true };
        let packed = L2Entry::Compressed { host: HOST, len: ByteLen::new(512) };
        let bad = |entry, map| Cluster::extended(entry, map) == Err(EntryError::Subclusters);
        assert!(bad(data, SubMap::new(4, 4)));
        assert!(bad(L2Entry::Unallocated, SubMap::new(1, 0)));
        assert!(bad(packed, SubMap::new(0, 1)));
        assert!(!bad(packed, SubMap::default()) && !bad(data, SubMap::ZEROES));
    }

    #[test]
    fn masks_stay_inside_the_cluster() {
        assert_eq!(SubMap::mask(0, 32), u32::MAX);
        assert_eq!(SubMap::mask(30, 32), 0xc000_0000);
        assert_eq!(SubMap::mask(3, 2), 0b11000);
        assert_eq!((SubMap::mask(32, 1), SubMap::mask(0, 0)), (0, 0));
    }
}
