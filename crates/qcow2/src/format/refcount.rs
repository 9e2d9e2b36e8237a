//! Reference counts of 1 to 64 bits, packed in refcount blocks.
//!
//! Callers: the allocator, the checker and the layout of new images. Counts of 8 bits and more are
//! big-endian; smaller ones fill each byte from its lowest bit.

use super::Geometry;
use super::bytes::be64;
use bedplate_types::{Error, ErrorKind, HostOffset, Result, limits};
use std::fmt;
use std::ops::Range;

/// The widest counts: 64 bits.
pub const MAX_REFCOUNT_ORDER: u32 = 6;
/// Refcount table entries: the low 9 bits must be zero.
const TABLE_RESERVED: u64 = 0x1ff;

/// Why a count can't be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefcountError {
    /// The index lies outside the block.
    OutOfRange,
    /// The value needs more bits than the image's counts have.
    TooLarge,
}

impl fmt::Display for RefcountError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OutOfRange => "the index lies outside the refcount block",
            Self::TooLarge => "the count is larger than the image's refcount width can hold",
        })
    }
}

/// How one image counts references.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RefcountFormat {
    order: u32,
    cluster_bits: u32,
}

impl RefcountFormat {
    /// Counts of `1 << order` bits in blocks of one cluster.
    ///
    /// # Errors
    /// `BadImage` for an order above 6.
    pub fn new(order: u32, geometry: Geometry) -> Result<Self> {
        if order > MAX_REFCOUNT_ORDER {
            return Err(Error::new(
                ErrorKind::BadImage,
                format!("reference counts are 2^{order} bits wide; at most 64 bits are allowed"),
            ));
        }
        Ok(Self { order, cluster_bits: geometry.cluster_bits() })
    }

    /// Bits of a count.
    pub const fn bits(self) -> u32 {
        1 << self.order
    }

    /// The largest count.
    pub const fn max(self) -> u64 {
        u64::MAX >> (64 - self.bits())
    }

    /// Counts in one block.
    pub const fn entries_per_block(self) -> u64 {
        1 << self.block_bits()
    }

    const fn block_bits(self) -> u32 {
        self.cluster_bits + 3 - self.order
    }

    /// The refcount table index and the index inside the block for host cluster `cluster`.
    pub const fn position(self, cluster: u64) -> (u64, usize) {
        let index = cluster & (self.entries_per_block() - 1);
        (cluster >> self.block_bits(), index as usize)
    }

    /// As [`Self::position`], for the cluster that holds the byte at `at`.
    pub const fn position_of(self, at: HostOffset) -> (u64, usize) {
        self.position(at.get() >> self.cluster_bits)
    }

    /// The first host cluster that block `index` counts, or `None` when it leaves 64 bits.
    pub fn first_cluster(self, index: u64) -> Option<u64> {
        index.checked_mul(self.entries_per_block())
    }

    /// Refcount table entries that counts for `clusters` host clusters need.
    pub const fn blocks_for(self, clusters: u64) -> u64 {
        clusters.div_ceil(self.entries_per_block())
    }

    /// The largest number of refcount table entries.
    pub const fn max_table_entries() -> u64 {
        limits::MAX_REFTABLE_BYTES / super::ENTRY_BYTES
    }

    /// The count at `index` of `block`, or `None` outside of it.
    pub fn get(self, block: &[u8], index: usize) -> Option<u64> {
        Some(match self.order {
            0..=2 => {
                let (byte, shift, mask) = self.sub_byte(index);
                u64::from((*block.get(byte)? >> shift) & mask)
            }
            3 => u64::from(*block.get(index)?),
            4 => {
                let at = index.checked_mul(2)?;
                u64::from(u16::from_be_bytes(*block.get(at..)?.first_chunk()?))
            }
            5 => {
                let at = index.checked_mul(4)?;
                u64::from(u32::from_be_bytes(*block.get(at..)?.first_chunk()?))
            }
            _ => be64(block, index.checked_mul(8)?)?,
        })
    }

    /// Sets the count at `index` of `block`.
    ///
    /// # Errors
    /// When the index or the value does not fit; the block is unchanged then.
    pub fn set(self, block: &mut [u8], index: usize, value: u64) -> Result<(), RefcountError> {
        if value > self.max() {
            return Err(RefcountError::TooLarge);
        }
        if self.order < 3 {
            let (byte, shift, mask) = self.sub_byte(index);
            let b = block.get_mut(byte).ok_or(RefcountError::OutOfRange)?;
            // The value was checked to fit the mask.
            *b = (*b & !(mask << shift)) | ((value as u8) << shift);
            return Ok(());
        }
        let width = 1usize << (self.order - 3);
        let start = index.checked_mul(width).ok_or(RefcountError::OutOfRange)?;
        let end = start.checked_add(width).ok_or(RefcountError::OutOfRange)?;
        let slot = block.get_mut(start..end).ok_or(RefcountError::OutOfRange)?;
        slot.copy_from_slice(&value.to_be_bytes()[8 - width..]);
        Ok(())
    }

    /// Sets all counts of `range`.
    ///
    /// # Errors
    /// As [`Self::set`]; nothing is changed then.
    pub fn fill(
        self,
        block: &mut [u8],
        range: Range<usize>,
        value: u64,
    ) -> Result<(), RefcountError> {
        if range.end > range.start && self.get(block, range.end - 1).is_none() {
            return Err(RefcountError::OutOfRange);
        }
        for index in range {
            self.set(block, index, value)?;
        }
        Ok(())
    }

    const fn sub_byte(self, index: usize) -> (usize, u32, u8) {
        let per_byte_bits = 3 - self.order;
        let within = (index & ((1 << per_byte_bits) - 1)) as u32;
        (index >> per_byte_bits, within << self.order, self.max() as u8)
    }

    /// Reads an entry of the refcount table: the block's place, or `None` when there is no block.
    ///
    /// # Errors
    /// When bits are set that must be zero, or the block is not aligned to a cluster.
    pub fn table_entry(self, raw: u64) -> Result<Option<HostOffset>, super::EntryError> {
        if raw & TABLE_RESERVED != 0 {
            return Err(super::EntryError::Reserved);
        }
        if raw == 0 {
            return Ok(None);
        }
        if raw & ((1 << self.cluster_bits) - 1) != 0 {
            return Err(super::EntryError::Unaligned);
        }
        Ok(Some(HostOffset::new(raw)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn format(order: u32, bits: u32) -> RefcountFormat {
        RefcountFormat::new(order, Geometry::new(bits).expect("allowed")).expect("allowed")
    }

    #[test]
    fn small_counts_fill_a_byte_from_its_lowest_bit() {
        assert_eq!(format(0, 9).get(&[0b0000_0010], 1), Some(1));
        assert_eq!(format(1, 9).get(&[0b1100_0000], 3), Some(3));
        assert_eq!(format(2, 9).get(&[0xa5, 0x0f], 2), Some(15));
        assert_eq!(format(2, 9).get(&[0xa5], 1), Some(10));
        assert_eq!(format(4, 9).get(&[0, 1, 2, 3], 1), Some(0x203));
    }

    #[test]
    fn values_and_indexes_that_do_not_fit_change_nothing() {
        for order in 0..=MAX_REFCOUNT_ORDER {
            let f = format(order, 9);
            let mut block = vec![0u8; 512];
            let n = f.entries_per_block() as usize;
            assert_eq!(f.set(&mut block, n, 1), Err(RefcountError::OutOfRange));
            assert_eq!(f.set(&mut block, usize::MAX, 1), Err(RefcountError::OutOfRange));
            assert_eq!(f.fill(&mut block, 0..n + 1, 1), Err(RefcountError::OutOfRange));
            if order < 6 {
                assert_eq!(f.set(&mut block, 0, f.max() + 1), Err(RefcountError::TooLarge));
            }
            assert!(block.iter().all(|&b| b == 0));
            assert_eq!(f.fill(&mut block, 0..n, f.max()), Ok(()));
            assert!(block.iter().all(|&b| b == 0xff));
            assert_eq!(f.get(&block, n), None);
        }
        assert!(RefcountFormat::new(7, Geometry::new(16).expect("allowed")).is_err());
    }

    #[test]
    fn positions_follow_from_the_cluster_size_and_the_width() {
        assert_eq!(format(4, 16).entries_per_block(), 32768);
        assert_eq!(format(4, 16).position(32769), (1, 1));
        assert_eq!(format(0, 21).entries_per_block(), 1 << 24);
        assert_eq!(format(6, 9).position(u64::MAX), (u64::MAX >> 6, 63));
        assert_eq!(format(4, 16).blocks_for(32769), 2);
    }

    proptest! {
        #[test]
        fn setting_one_count_leaves_its_neighbours(
            order in 0u32..=6, index in 0usize..64, value: u64, seed: u8,
        ) {
            let f = format(order, 9);
            let mut block = vec![seed; 512];
            let before: Vec<_> = (0..64).map(|i| f.get(&block, i)).collect();
            let value = value & f.max();
            prop_assert_eq!(f.set(&mut block, index, value), Ok(()));
            for (i, b) in before.iter().enumerate() {
                let want = if i == index { Some(value) } else { *b };
                prop_assert_eq!(f.get(&block, i), want);
            }
        }
    }
}
