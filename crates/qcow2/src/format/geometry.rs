//! Where a guest address is found in the two-level table, as arithmetic on cluster sizes.
//!
//! Callers: the engine, the checker, the header parser and the layout of new images. Invariant: a
//! [`Geometry`] only exists for cluster sizes that the specification allows, so shifts never overflow.

use super::subcluster::{SUBCLUSTERS, SubMap};
use bedplate_types::{ByteLen, Error, ErrorKind, GuestOffset, HostOffset, Result, limits};

/// The smallest cluster: 512 bytes.
pub const MIN_CLUSTER_BITS: u32 = 9;
/// The smallest cluster with subclusters: 16 KiB.
const MIN_EXTENDED_BITS: u32 = 14;
/// The largest cluster that QEMU accepts: 2 MiB.
pub const MAX_CLUSTER_BITS: u32 = 21;
/// Bytes of an L1, L2 or refcount table entry.
pub const ENTRY_BYTES: u64 = 8;
/// L2 tables are cached in slices of this many bytes, or of a cluster where that is smaller.
const SLICE_BITS: u32 = 12;

/// Cluster size and table sizes of one image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    cluster_bits: u32,
    l2_bits: u32,
}

impl Geometry {
    /// The geometry of standard (8-byte) L2 entries.
    ///
    /// # Errors
    /// `BadImage` when the cluster size is not one of 512 bytes to 2 MiB.
    pub fn new(cluster_bits: u32) -> Result<Self> {
        Self::with_entry_bits(cluster_bits, 3)
    }

    /// The geometry of extended (16-byte) L2 entries.
    ///
    /// # Errors
    /// As [`Self::new`]; also for clusters below 16 KiB, whose subclusters would be smaller than a sector.
    pub fn extended(cluster_bits: u32) -> Result<Self> {
        if cluster_bits < MIN_EXTENDED_BITS {
            return Err(Error::new(
                ErrorKind::BadImage,
                "extended L2 entries need clusters of 16 KiB or more",
            ));
        }
        Self::with_entry_bits(cluster_bits, 4)
    }

    fn with_entry_bits(cluster_bits: u32, entry_bits: u32) -> Result<Self> {
        if !(MIN_CLUSTER_BITS..=MAX_CLUSTER_BITS).contains(&cluster_bits) {
            return Err(Error::new(
                ErrorKind::BadImage,
                format!(
                    "the cluster size is 2^{cluster_bits} bytes; it must be a power of two from 512 bytes to 2 MiB"
                ),
            ));
        }
        Ok(Self { cluster_bits, l2_bits: cluster_bits - entry_bits })
    }

    /// True with extended (16-byte) L2 entries.
    pub const fn is_extended(self) -> bool {
        self.cluster_bits - self.l2_bits == 4
    }

    /// 64-bit words of an L2 entry.
    pub const fn entry_words(self) -> usize {
        if self.is_extended() { 2 } else { 1 }
    }

    /// Bytes of the smallest part that has a mapping of its own: a subcluster, or a cluster with standard entries.
    pub const fn part_size(self) -> u64 {
        self.cluster_size() >> if self.is_extended() { SUBCLUSTERS.ilog2() } else { 0 }
    }

    /// The part of its cluster that holds `at`.
    pub const fn part(self, at: GuestOffset) -> u32 {
        (self.in_cluster(at) / self.part_size()) as u32
    }

    /// The parts that `len` bytes from `within` a cluster touch, as a mask.
    pub const fn parts_touched(self, within: u64, len: u64) -> u32 {
        let (first, end) = (within / self.part_size(), (within + len).div_ceil(self.part_size()));
        SubMap::mask(first as u32, (end - first) as u32)
    }

    /// The cluster size as a power of two.
    pub const fn cluster_bits(self) -> u32 {
        self.cluster_bits
    }

    /// Bytes of a cluster.
    pub const fn cluster_size(self) -> u64 {
        1 << self.cluster_bits
    }

    /// Entries of an L2 table.
    pub const fn l2_entries(self) -> usize {
        1 << self.l2_bits
    }

    /// Guest bytes that one L2 table maps.
    pub const fn l2_coverage(self) -> u64 {
        1 << (self.cluster_bits + self.l2_bits)
    }

    /// The index in the L1 table.
    pub const fn l1_index(self, at: GuestOffset) -> u64 {
        at.get() >> (self.cluster_bits + self.l2_bits)
    }

    /// The index in the L2 table.
    pub const fn l2_index(self, at: GuestOffset) -> usize {
        ((at.get() >> self.cluster_bits) & ((1 << self.l2_bits) - 1)) as usize
    }

    /// The byte offset inside the cluster.
    pub const fn in_cluster(self, at: GuestOffset) -> u64 {
        at.get() & (self.cluster_size() - 1)
    }

    /// The first byte of the cluster that holds `at`.
    pub const fn cluster_start(self, at: GuestOffset) -> GuestOffset {
        at.align_down(self.cluster_size())
    }

    /// The guest address of an entry, or `None` when it leaves 64 bits.
    pub fn guest_offset(self, l1_index: u64, l2_index: usize) -> Option<GuestOffset> {
        let base = l1_index.checked_mul(self.l2_coverage())?;
        let within = u64::try_from(l2_index).ok()?.checked_mul(self.cluster_size())?;
        base.checked_add(within).map(GuestOffset::new)
    }

    /// The number of the host cluster that holds `at`.
    pub const fn host_cluster(self, at: HostOffset) -> u64 {
        at.get() >> self.cluster_bits
    }

    /// The offset of host cluster `index`, or `None` when it leaves 64 bits.
    pub fn host_offset(self, index: u64) -> Option<HostOffset> {
        index.checked_mul(self.cluster_size()).map(HostOffset::new)
    }

    /// Clusters that `len` bytes need.
    pub const fn clusters(self, len: ByteLen) -> u64 {
        len.get().div_ceil(self.cluster_size())
    }

    /// L1 entries that a disk of `size` bytes needs.
    pub const fn l1_entries(self, size: ByteLen) -> u64 {
        size.get().div_ceil(self.l2_coverage())
    }

    /// The largest disk that this cluster size can hold, given the largest L1 table.
    pub const fn max_disk_size(self) -> ByteLen {
        // 2^22 entries of at most 2^39 bytes: 2^61, and below 2^63 in every case.
        ByteLen::new((limits::MAX_L1_BYTES / ENTRY_BYTES) << (self.cluster_bits + self.l2_bits))
    }

    /// Bytes of an L2 slice, the unit of caching and of metadata writes: 4096, or a cluster if smaller.
    pub const fn slice_bytes(self) -> usize {
        if self.cluster_bits < SLICE_BITS { 1 << self.cluster_bits } else { 1 << SLICE_BITS }
    }

    /// Entries of an L2 slice.
    pub const fn slice_entries(self) -> usize {
        self.slice_bytes() >> (self.cluster_bits - self.l2_bits)
    }

    /// Slices of an L2 table.
    pub const fn slices_per_table(self) -> usize {
        (self.cluster_size() as usize) / self.slice_bytes()
    }

    /// The number of the slice, counted through all L2 tables of the disk, that maps `at`.
    pub const fn global_slice(self, at: GuestOffset) -> u64 {
        at.get() / self.slice_coverage()
    }

    /// Guest bytes that one slice maps.
    pub const fn slice_coverage(self) -> u64 {
        (self.slice_entries() as u64) << self.cluster_bits
    }

    /// The slice's index inside its L2 table.
    pub const fn slice_index(self, at: GuestOffset) -> usize {
        self.l2_index(at) / self.slice_entries()
    }

    /// The entry's index inside its slice.
    pub const fn index_in_slice(self, at: GuestOffset) -> usize {
        self.l2_index(at) % self.slice_entries()
    }

    /// Where slice `index` of the table at `table` lies, or `None` when that leaves 64 bits.
    pub fn slice_offset(self, table: HostOffset, index: usize) -> Option<HostOffset> {
        let bytes = u64::try_from(index).ok()?.checked_mul(self.slice_bytes() as u64)?;
        table.checked_add(ByteLen::new(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn cluster_sizes_outside_512_bytes_to_2_mib_are_refused() {
        for bits in [0, 8, 22, 63, 64, u32::MAX] {
            assert!(Geometry::new(bits).is_err(), "{bits}");
        }
        assert!(Geometry::new(9).is_ok() && Geometry::new(21).is_ok());
    }

    #[test]
    fn largest_disks_are_those_of_a_32_mib_l1_table() {
        let max = |bits| Geometry::new(bits).map(|g| g.max_disk_size().get()).ok();
        assert_eq!(max(9), Some(128 << 30));
        assert_eq!(max(16), Some(2 << 50));
        assert_eq!(max(21), Some(2 << 60));
    }

    proptest! {
        #[test]
        fn indexes_and_offsets_are_inverse(bits in 9u32..=21, at in 0u64..(1 << 62)) {
            let g = Geometry::new(bits).expect("allowed");
            let at = GuestOffset::new(at);
            let back = g.guest_offset(g.l1_index(at), g.l2_index(at)).expect("small");
            prop_assert_eq!(back, g.cluster_start(at));
            prop_assert_eq!(back.get() + g.in_cluster(at), at.get());
            prop_assert_eq!(
                g.slice_index(at) * g.slice_entries() + g.index_in_slice(at), g.l2_index(at)
            );
            prop_assert_eq!(
                g.global_slice(at),
                g.l1_index(at) * g.slices_per_table() as u64 + g.slice_index(at) as u64
            );
            prop_assert_eq!(g.slices_per_table() * g.slice_entries(), g.l2_entries());
        }
    }
}
