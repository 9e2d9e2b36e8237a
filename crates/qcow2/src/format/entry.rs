//! L1 and L2 table entries: 64-bit words to what they mean, and back.
//!
//! Callers: the engine's mapping (hot path, so errors are plain values) and the checker. Invariant: an entry
//! that decodes re-encodes to the same bits (but for a missing COPIED flag of an external data file's cluster), and its host offset is cluster-aligned.

use super::subcluster::{Cluster, SubMap};
use bedplate_types::{ByteLen, HostOffset};
use std::fmt;

/// The cluster's refcount is exactly 1: it may be written in place.
pub const COPIED: u64 = 1 << 63;
/// The L2 entry describes a compressed cluster.
pub const COMPRESSED: u64 = 1 << 62;
/// The cluster reads as zeroes (version 3).
pub const ZERO: u64 = 1;
/// The host offset of L1 and standard L2 entries.
pub const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
/// Host offsets end below this: 56 bits.
pub const MAX_HOST: u64 = 1 << 56;

const L1_RESERVED: u64 = !(COPIED | OFFSET_MASK);
const L2_RESERVED: u64 = !(COPIED | COMPRESSED | OFFSET_MASK | ZERO);
const SECTOR: u64 = 512;

/// What is wrong with a table entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryError {
    /// Bits that must be zero are set.
    Reserved,
    /// The host offset is not a multiple of the cluster size.
    Unaligned,
    /// The zero flag in a version 2 image.
    ZeroInV2,
    /// The COPIED flag on a compressed cluster.
    CopiedCompressed,
    /// A compressed cluster beyond the largest host offset.
    BeyondLimit,
    /// A compressed cluster in an image with an external data file.
    CompressedInDataFile,
    /// A bitmap of subclusters that contradicts itself or its entry.
    Subclusters,
}

impl fmt::Display for EntryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Reserved => "bits are set that must be zero",
            Self::Unaligned => "the offset is not a multiple of the cluster size",
            Self::ZeroInV2 => "the zero flag is set, which version 2 does not have",
            Self::CopiedCompressed => "a compressed cluster has the COPIED flag",
            Self::BeyondLimit => "the offset does not fit in 56 bits",
            Self::CompressedInDataFile => {
                "a compressed cluster in an image with an external data file"
            }
            Self::Subclusters => "its bitmap of subclusters contradicts itself or the entry",
        })
    }
}

/// An entry of the L1 table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum L1Entry {
    /// No L2 table: everything it would map is unallocated.
    Unallocated,
    /// An L2 table.
    Table {
        /// Where the L2 table lies.
        host: HostOffset,
        /// The table's refcount is 1: it may be changed in place.
        copied: bool,
    },
}

/// An entry of an L2 table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum L2Entry {
    /// Reads from the backing file, or as zeroes.
    Unallocated,
    /// Reads as zeroes.
    Zero {
        /// Space that the cluster keeps.
        host: Option<HostOffset>,
        /// That space's refcount is 1.
        copied: bool,
    },
    /// Plain data.
    Data {
        /// Where the data lies.
        host: HostOffset,
        /// Its refcount is 1: it may be written in place.
        copied: bool,
    },
    /// Compressed data.
    Compressed {
        /// The first byte, not aligned to anything.
        host: HostOffset,
        /// Bytes up to the end of the last 512-byte sector; the stream may end earlier.
        len: ByteLen,
    },
}

/// How one image's entries are read and written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryCodec {
    cluster_mask: u64,
    /// Low bits of a compressed descriptor that hold the offset; the rest up to bit 61 counts sectors.
    offset_bits: u32,
    /// Clusters, or with extended entries subclusters, can read as zeroes.
    zeroes: bool,
    extended: bool,
    /// Data lies in another file, at the guest's own offset.
    data_file: bool,
}

impl EntryCodec {
    /// The codec for a cluster size (9 to 21 bits, as [`super::Geometry`] has checked) and a version.
    pub const fn new(geometry: super::Geometry, version: u32) -> Self {
        Self {
            cluster_mask: geometry.cluster_size() - 1,
            offset_bits: 62 - (geometry.cluster_bits() - 8),
            zeroes: version >= 3,
            extended: geometry.is_extended(),
            data_file: false,
        }
    }

    /// The codec of an image that keeps its data in an external data file, or not. In that file the offset 0 is one like
    /// others, and every cluster may be written in place (specification, "Standard Cluster Descriptor").
    pub const fn with_data_file(self, data_file: bool) -> Self {
        Self { data_file, ..self }
    }

    /// True when data lies in an external data file.
    pub const fn has_data_file(self) -> bool {
        self.data_file
    }

    /// True when the image can say that something reads as zeroes.
    pub const fn has_zeroes(self) -> bool {
        self.zeroes
    }

    /// Reads an L2 entry with the word behind it, which standard entries don't have (0 then).
    ///
    /// # Errors
    /// What the specification forbids.
    pub const fn cluster(self, raw: u64, map: u64) -> Result<Cluster, EntryError> {
        match self.l2(raw) {
            Ok(entry) if self.extended => Cluster::extended(entry, SubMap::from_raw(map)),
            Ok(entry) => Ok(Cluster::standard(entry)),
            Err(e) => Err(e),
        }
    }

    /// Reads an L1 entry.
    ///
    /// # Errors
    /// What the specification forbids.
    pub const fn l1(self, raw: u64) -> Result<L1Entry, EntryError> {
        if raw & L1_RESERVED != 0 {
            return Err(EntryError::Reserved);
        }
        let host = raw & OFFSET_MASK;
        if host == 0 {
            return Ok(L1Entry::Unallocated);
        }
        if host & self.cluster_mask != 0 {
            return Err(EntryError::Unaligned);
        }
        Ok(L1Entry::Table { host: HostOffset::new(host), copied: raw & COPIED != 0 })
    }

    /// Reads an L2 entry, of an extended one the first word.
    ///
    /// # Errors
    /// What the specification forbids.
    pub const fn l2(self, raw: u64) -> Result<L2Entry, EntryError> {
        if raw & COMPRESSED != 0 && self.data_file {
            return Err(EntryError::CompressedInDataFile);
        }
        if raw & COMPRESSED != 0 {
            return self.compressed(raw);
        }
        if raw & L2_RESERVED != 0 {
            return Err(EntryError::Reserved);
        }
        let host = raw & OFFSET_MASK;
        // In a data file, the flag with an offset of 0 is what tells space from none.
        let some = host != 0 || (self.data_file && raw & COPIED != 0);
        let copied = raw & COPIED != 0 || self.data_file;
        if host & self.cluster_mask != 0 {
            return Err(EntryError::Unaligned);
        }
        if raw & ZERO != 0 {
            if self.extended {
                return Err(EntryError::Reserved);
            }
            if !self.zeroes {
                return Err(EntryError::ZeroInV2);
            }
            return Ok(if some {
                L2Entry::Zero { host: Some(HostOffset::new(host)), copied }
            } else {
                L2Entry::Zero { host: None, copied: false }
            });
        }
        if !some {
            return Ok(L2Entry::Unallocated);
        }
        Ok(L2Entry::Data { host: HostOffset::new(host), copied })
    }

    const fn compressed(self, raw: u64) -> Result<L2Entry, EntryError> {
        if raw & COPIED != 0 {
            return Err(EntryError::CopiedCompressed);
        }
        let (host, len) = self.compressed_range(raw);
        if host.get() >= MAX_HOST {
            return Err(EntryError::BeyondLimit);
        }
        Ok(L2Entry::Compressed { host, len })
    }

    /// The bytes a compressed descriptor names, whatever else is wrong with it.
    pub const fn compressed_range(self, raw: u64) -> (HostOffset, ByteLen) {
        let host = raw & ((1 << self.offset_bits) - 1);
        let extra = (raw & (COMPRESSED - 1)) >> self.offset_bits;
        // At most 2^13 + 1 sectors, so this is small; and a sector is longer than an offset inside it.
        let len = (extra + 1) * SECTOR - host % SECTOR;
        (HostOffset::new(host), ByteLen::new(len))
    }

    /// Writes an L1 entry.
    pub const fn encode_l1(self, entry: L1Entry) -> u64 {
        match entry {
            L1Entry::Unallocated => 0,
            L1Entry::Table { host, copied } => host.get() | if copied { COPIED } else { 0 },
        }
    }

    /// Writes an L2 entry, or `None` when it can't be expressed: an unaligned or too large offset, a
    /// compressed length that is zero or too large, a zero cluster in version 2 or with an extended entry.
    pub fn encode_l2(self, entry: L2Entry) -> Option<u64> {
        let aligned = |host: HostOffset| {
            let v = host.get();
            ((v != 0 || self.data_file) && v & self.cluster_mask == 0 && v < MAX_HOST).then_some(v)
        };
        let flag = |copied| if copied { COPIED } else { 0 };
        match entry {
            L2Entry::Unallocated => Some(0),
            L2Entry::Zero { .. } if !self.zeroes || self.extended => None,
            L2Entry::Zero { host: None, .. } => Some(ZERO),
            L2Entry::Zero { host: Some(host), copied } => {
                Some(aligned(host)? | ZERO | flag(copied))
            }
            L2Entry::Data { host, copied } => Some(aligned(host)? | flag(copied)),
            L2Entry::Compressed { host, len } => {
                let start = host.get();
                let last = start.checked_add(len.get().checked_sub(1)?)?;
                let extra = last / SECTOR - start / SECTOR;
                let fits = start < MAX_HOST.min(1 << self.offset_bits)
                    && extra < 1 << (62 - self.offset_bits);
                fits.then_some(COMPRESSED | extra << self.offset_bits | start)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Geometry;
    use super::*;
    use proptest::prelude::*;

    fn codec(bits: u32, version: u32) -> EntryCodec {
        EntryCodec::new(Geometry::new(bits).expect("allowed"), version)
    }

    #[test]
    fn reserved_bits_and_unaligned_offsets_are_told_apart() {
        let c = codec(16, 3);
        assert_eq!(c.l1(0x5_0000 | 1 << 62), Err(EntryError::Reserved));
        assert_eq!(c.l1(0x5_0000 | 1), Err(EntryError::Reserved));
        assert_eq!(c.l1(0x5_0200), Err(EntryError::Unaligned));
        assert_eq!(c.l2(0x5_0000 | 1 << 56), Err(EntryError::Reserved));
        assert_eq!(c.l2(0x5_0002), Err(EntryError::Reserved));
        assert_eq!(c.l2(0x5_0200), Err(EntryError::Unaligned));
        assert_eq!(c.l2(0x5_0201), Err(EntryError::Unaligned));
        assert_eq!(c.l2(COPIED | COMPRESSED | 0x5_0200), Err(EntryError::CopiedCompressed));
    }

    #[test]
    fn the_zero_flag_belongs_to_version_3() {
        assert_eq!(codec(16, 2).l2(1), Err(EntryError::ZeroInV2));
        assert_eq!(codec(16, 3).l2(1), Ok(L2Entry::Zero { host: None, copied: false }));
        assert_eq!(codec(16, 2).encode_l2(L2Entry::Zero { host: None, copied: false }), None);
    }

    #[test]
    fn bit_zero_of_a_compressed_descriptor_is_part_of_its_offset() {
        let raw = COMPRESSED | 2 << 54 | 0x12345;
        let want =
            L2Entry::Compressed { host: HostOffset::new(0x12345), len: ByteLen::new(1536 - 0x145) };
        assert_eq!(codec(16, 3).l2(raw), Ok(want));
    }

    proptest! {
        #[test]
        fn entries_that_decode_encode_to_the_same_bits(raw: u64, bits in 9u32..=21, v in 2u32..=3) {
            let c = codec(bits, v);
            for raw in [raw, raw & !L2_RESERVED, raw & COPIED | raw & OFFSET_MASK & !c.cluster_mask, raw & !COPIED] {
                if let Ok(e) = c.l1(raw)
                    && e != L1Entry::Unallocated { prop_assert_eq!(c.encode_l1(e), raw); }
                match c.l2(raw) {
                    Ok(L2Entry::Unallocated | L2Entry::Zero { host: None, .. }) | Err(_) => {}
                    Ok(e) => prop_assert_eq!(c.encode_l2(e), Some(raw)),
                }
            }
        }

        #[test]
        fn compressed_lengths_round_up_to_sectors(bits in 9u32..=21, at in 1u64..(1 << 49), len in 1u64..(2 << 20)) {
            let c = codec(bits, 3);
            let len = len.min(1 << bits);
            let entry = L2Entry::Compressed { host: HostOffset::new(at), len: ByteLen::new(len) };
            let raw = c.encode_l2(entry).expect("a cluster's worth always fits");
            match c.l2(raw) {
                Ok(L2Entry::Compressed { host, len: l }) => {
                    prop_assert_eq!(host.get(), at);
                    prop_assert!(l.get() >= len && l.get() < len + 512);
                    prop_assert_eq!((at + l.get()) % 512, 0);
                }
                other => prop_assert!(false, "{:?}", other),
            }
        }
    }
}
