//! What a bitmap says, for those who copy what was changed.

use super::Tracked;
use super::bits_of;
use super::directory::Directory;
use crate::image::Qcow2;
use bedplate_storage::Storage;
use bedplate_types::{ByteLen, Error, ErrorKind, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A look at a bitmap. One that is recording shows what is recorded as it goes on.
#[derive(Clone, Debug)]
pub struct BitmapView {
    size: ByteLen,
    granularity_bits: u8,
    count: u64,
    bits: Arc<[AtomicU64]>,
}

impl BitmapView {
    /// The size of the disk, as it was when the bitmap was looked at.
    pub fn disk_size(&self) -> ByteLen {
        self.size
    }

    /// Bytes that a bit stands for.
    pub fn granularity(&self) -> u64 {
        1 << self.granularity_bits.min(63)
    }

    fn bit(&self, grain: u64) -> bool {
        let word = self.bits.get((grain / 64) as usize).map_or(0, |w| w.load(Ordering::Relaxed));
        word >> (grain % 64) & 1 != 0
    }

    /// The run that starts at byte `at`: whether it was changed, and its length, at most `most` bytes.
    pub fn run(&self, at: u64, most: u64) -> (bool, u64) {
        let first = at >> self.granularity_bits;
        let dirty = self.bit(first);
        let end = at.saturating_add(most);
        let mut grain = first + 1;
        while grain < self.count && grain << self.granularity_bits < end {
            // Whole words at once where they are all alike.
            let alike = if dirty { u64::MAX } else { 0 };
            let word = self.bits.get((grain / 64) as usize).map(|w| w.load(Ordering::Relaxed));
            if grain.is_multiple_of(64) && word == Some(alike) && grain + 64 <= self.count {
                grain += 64;
            } else if self.bit(grain) == dirty {
                grain += 1;
            } else {
                return (dirty, (grain << self.granularity_bits).min(end) - at);
            }
        }
        (dirty, most)
    }
}

impl<S: Storage> Qcow2<S> {
    /// What the bitmap `name` says.
    ///
    /// # Errors
    /// `NotFound` when there is none, `Unsupported` for one that can't be trusted, `Corrupt` when it is damaged, or what
    /// the storage reports.
    pub async fn bitmap(&self, name: &[u8]) -> Result<BitmapView> {
        let _inside = self.enter().await;
        let _one = self.bitmaps.gate.lock().await;
        let list = self.bitmaps.list.load_full();
        if let Some(tracked) = list.iter().find(|t| t.bitmap.name == name) {
            if tracked.bits.get().is_none() {
                let bits = self.load_bits(&tracked.bitmap, tracked.count).await?;
                // Loaded once: the gate is held.
                let _ = tracked.bits.set(bits);
            }
            let bits = tracked.bits.get().cloned().unwrap_or_default();
            let granularity_bits = tracked.bitmap.granularity_bits;
            let (size, count) = (self.size(), tracked.count);
            return Ok(BitmapView { size, granularity_bits, count, bits });
        }
        let directory = Directory::read(&self.storage, &self.header()).await?;
        let found = directory.iter().flat_map(Directory::bitmaps).find(|b| b.name == name);
        let Some(bitmap) = found else { return Err(self.no_such_bitmap(name)) };
        if bitmap.in_use() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "bitmap '{}' of '{}' can't be trusted, because a program that recorded changes in it did not end well",
                    crate::format::printable(name),
                    self.storage.name()
                ),
            ));
        }
        // Checked as one that is to be kept in memory.
        let fits = Tracked::new(bitmap, 0, self.size(), self.tables.geo)?;
        let (count, _) = bits_of(self.size(), bitmap.granularity_bits);
        let bits = self.load_bits(&fits.bitmap, count).await?;
        let (size, granularity_bits) = (self.size(), bitmap.granularity_bits);
        Ok(BitmapView { size, granularity_bits, count, bits })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_end_where_the_bits_change_or_the_question_ends() {
        let word = |w: u64| AtomicU64::new(w);
        let bits = [word(u64::MAX << 60), word(u64::MAX), word(0b1), word(0)];
        let size = ByteLen::new(250 << 9);
        let view = BitmapView { size, granularity_bits: 9, count: 250, bits: bits.into() };
        assert_eq!(view.run(0, 1 << 30), (false, 60 << 9));
        assert_eq!(view.run((60 << 9) + 100, 1 << 30), (true, (69 << 9) - 100));
        assert_eq!(view.run(129 << 9, 1000), (false, 1000));
        assert_eq!(view.run(129 << 9, 1 << 30), (false, 1 << 30));
        assert_eq!(view.run(64 << 9, 64 << 9), (true, 64 << 9));
    }
}
