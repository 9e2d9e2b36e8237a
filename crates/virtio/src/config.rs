//! The configuration space of a virtio-blk device (virtio 1.2, 5.2.4), as bytes that can be read at any place.

use crate::blk::SECTOR;
use bedplate_types::ByteLen;

/// Bytes of the configuration space up to the end of the write-zeroes fields.
pub const CONFIG_BYTES: usize = 60;
/// Offset of the field that switches the write cache, the only one a driver may write.
pub const WRITEBACK_OFFSET: u32 = 32;

/// What the configuration space announces.
#[derive(Clone, Copy, Debug)]
pub struct BlkConfig {
    /// Size of the disk; a last part of a sector is not seen by the guest.
    pub size: ByteLen,
    /// Most bytes of one segment.
    pub size_max: u32,
    /// Most data segments of one request.
    pub seg_max: u32,
    /// Logical block size in bytes.
    pub block: u32,
    /// Physical block size in bytes.
    pub physical_block: u32,
    /// Best transfer size in bytes; 0 when there is none.
    pub optimal_io: u32,
    /// The disk keeps writes in a volatile cache until a flush.
    pub writeback: bool,
    /// Number of queues.
    pub queues: u16,
    /// Discards and zeroing are offered.
    pub discard: bool,
    /// Granularity of discards in bytes.
    pub discard_align: u32,
    /// Most sectors of one discard or write-zeroes segment.
    pub max_discard_sectors: u32,
    /// Most segments of one discard or write-zeroes request.
    pub max_discard_segments: u32,
    /// Zeroing with the unmap flag may give space back.
    pub zeroes_may_unmap: bool,
}

impl BlkConfig {
    /// The disk's sectors.
    pub fn capacity(&self) -> u64 {
        self.size.get() / SECTOR
    }

    /// The configuration space.
    pub fn to_bytes(&self) -> [u8; CONFIG_BYTES] {
        let block = self.block.max(SECTOR as u32);
        let exponent = (self.physical_block.max(block) / block).ilog2() as u8;
        let mut b = [0; CONFIG_BYTES];
        let mut put = |at: usize, bytes: &[u8]| b[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &self.capacity().to_le_bytes());
        put(8, &self.size_max.to_le_bytes());
        put(12, &self.seg_max.to_le_bytes());
        put(20, &block.to_le_bytes());
        put(24, &[exponent]);
        // The smallest transfer without a penalty is a physical block, counted in logical ones.
        put(26, &(1_u16 << exponent.min(15)).to_le_bytes());
        put(28, &(self.optimal_io / block).to_le_bytes());
        put(32, &[u8::from(self.writeback)]);
        put(34, &self.queues.to_le_bytes());
        if self.discard {
            let align = (self.discard_align / SECTOR as u32).max(1);
            put(36, &self.max_discard_sectors.to_le_bytes());
            put(40, &self.max_discard_segments.to_le_bytes());
            put(44, &align.to_le_bytes());
            put(48, &self.max_discard_sectors.to_le_bytes());
            put(52, &self.max_discard_segments.to_le_bytes());
            put(56, &[u8::from(self.zeroes_may_unmap)]);
        }
        b
    }

    /// `len` bytes of the configuration space from `offset`; what lies past its end reads as zeroes.
    pub fn read(&self, offset: u32, len: u32) -> Vec<u8> {
        let bytes = self.to_bytes();
        let at = |i: u32| bytes.get(u64::from(offset) as usize + i as usize).copied().unwrap_or(0);
        (0..len).map(at).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> BlkConfig {
        BlkConfig {
            size: ByteLen::new(0x1234_5678_9a00 + 511),
            size_max: 1 << 20,
            seg_max: 254,
            block: 512,
            physical_block: 4096,
            optimal_io: 65536,
            writeback: true,
            queues: 4,
            discard: true,
            discard_align: 65536,
            max_discard_sectors: 77,
            max_discard_segments: 16,
            zeroes_may_unmap: true,
        }
    }

    #[test]
    fn fields_are_where_drivers_look_for_them() {
        let b = config().to_bytes();
        let u32_at = |i: usize| u32::from_le_bytes([b[i], b[i + 1], b[i + 2], b[i + 3]]);
        assert_eq!(b[..8], (0x1234_5678_9a00_u64 / 512).to_le_bytes());
        assert_eq!((u32_at(8), u32_at(12), u32_at(20)), (1 << 20, 254, 512));
        assert_eq!((b[24], b[25], b[26], u32_at(28)), (3, 0, 8, 128));
        assert_eq!((b[32], b[34], b[35]), (1, 4, 0));
        assert_eq!((u32_at(36), u32_at(40), u32_at(44)), (77, 16, 128));
        assert_eq!((u32_at(48), u32_at(52), b[56]), (77, 16, 1));
    }

    #[test]
    fn reads_past_the_end_give_zeroes() {
        let c = config();
        assert_eq!(c.read(0, 60), c.to_bytes());
        assert_eq!(c.read(34, 2), [4, 0]);
        assert_eq!(c.read(56, 8), [1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(c.read(u32::MAX, 3), [0; 3]);
    }

    #[test]
    fn discard_limits_are_never_zero_when_offered() {
        let c = BlkConfig { discard_align: 0, ..config() };
        assert_eq!(c.read(44, 4), [1, 0, 0, 0]);
        let c = BlkConfig { discard: false, ..config() };
        assert_eq!(c.read(36, 24), [0; 24]);
    }
}
