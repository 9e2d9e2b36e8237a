//! Bitmaps of a disk that changes its size.
//!
//! While the size changes all bitmaps are marked in-use, since their tables have the wrong length for a moment. A new
//! directory, without the marks, then names tables of the right length.

use super::directory::Directory;
use super::store::IN_USE;
use super::{bits_of, find_bitmaps, table_entries};
use crate::format::Bitmap;
use crate::image::Qcow2;
use crate::open::read_bytes;
use crate::space::Freed;
use bedplate_runtime::sync::AsyncMutexGuard;
use bedplate_storage::Storage;
use bedplate_types::{ByteLen, Error, ErrorKind, HostOffset, Result};

impl<S: Storage> Qcow2<S> {
    /// Refuses a change of the size that a bitmap can't follow: one that can't be trusted has no bits to keep.
    pub(crate) async fn check_bitmaps_follow(&self) -> Result<()> {
        let directory = Directory::read(&self.storage, &self.header()).await?;
        let stale = directory.iter().flat_map(Directory::bitmaps).find(|b| b.in_use());
        match stale.filter(|_| !self.bitmaps.is_tracking()) {
            None => Ok(()),
            Some(bitmap) => Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "the size of '{}' can't be changed while it has the bitmap '{}', which can't be trusted; remove it \
                     with 'bedplate bitmap --remove'",
                    self.storage.name(),
                    crate::format::printable(&bitmap.name)
                ),
            )),
        }
    }

    /// Marks all bitmaps in-use. While the guard lives, no change of guest data is recorded.
    pub(crate) async fn suspend_bitmaps(&self) -> Result<AsyncMutexGuard<'_, ()>> {
        let guard = self.bitmaps.gate.lock().await;
        if self.bitmaps.is_tracking() {
            return Err(Error::new(
                ErrorKind::Locked,
                format!(
                    "image '{}' was written to while its size was changed",
                    self.storage.name()
                ),
            ));
        }
        self.mark_all(true).await?;
        Ok(guard)
    }

    async fn mark_all(&self, on: bool) -> Result<()> {
        let Some(mut directory) = Directory::read(&self.storage, &self.header()).await? else {
            return Ok(());
        };
        for entry in &mut directory.entries {
            let flags = entry.bitmap.flags;
            entry.set_flags(if on { flags | IN_USE } else { flags & !IN_USE });
        }
        let write = async {
            self.write_all(vec![(directory.at, directory.bytes())]).await?;
            self.storage.sync().await
        };
        write.await.map_err(|e| self.poison(e))
    }

    /// Gives all bitmaps tables for the size that the disk has now, and takes the marks away.
    pub(crate) async fn resume_bitmaps(&self, old: ByteLen) -> Result<()> {
        let size = self.size();
        if size == old {
            return self.mark_all(false).await;
        }
        let Some(mut after) = Directory::read(&self.storage, &self.header()).await? else {
            return Ok(());
        };
        let mut dropped = Vec::new();
        for entry in &mut after.entries {
            let bitmap = entry.bitmap.clone();
            entry.set_flags(bitmap.flags & !IN_USE);
            let table = self.read_bitmap_table(&bitmap).await?;
            let wanted = table_entries(size, bitmap.granularity_bits, self.tables.geo).max(1);
            self.clear_beyond(&bitmap, &table, size).await?;
            if wanted == table.len() as u64 {
                continue;
            }
            for raw in table.iter().skip(wanted as usize) {
                if let Some(host) = self.bitmap_entry(&bitmap, *raw)? {
                    dropped.push(self.space.cluster_of(host));
                }
            }
            let first = self.space.cluster_of(bitmap.table_offset);
            let clusters = (table.len() as u64 * 8).div_ceil(self.tables.cluster());
            dropped.extend(first..first + clusters);
            let mut bytes: Vec<u8> = table.iter().flat_map(|w| w.to_be_bytes()).collect();
            bytes.resize(wanted as usize * 8, 0);
            let at = self.write_run(bytes).await?;
            entry.set_table(at, wanted as u32);
        }
        self.replace_directory(&after).await?;
        self.space.note_freed(dropped.into_iter().map(|cluster| Freed { cluster, table: false }));
        let list = find_bitmaps(&self.storage, &self.header(), self.tables.geo).await?;
        self.bitmaps.install(list);
        Ok(())
    }

    /// Clears the bits behind the end of a smaller disk, in the cluster of bits where it ends.
    async fn clear_beyond(&self, bitmap: &Bitmap, table: &[u64], size: ByteLen) -> Result<()> {
        let (count, bytes) = bits_of(size, bitmap.granularity_bits);
        let cluster = self.tables.cluster();
        let raw = bytes.checked_sub(1).and_then(|last| table.get((last / cluster) as usize));
        let Some(host) = raw.map(|raw| self.bitmap_entry(bitmap, *raw)).transpose()?.flatten()
        else {
            return Ok(());
        };
        let mut bits = read_bytes(&self.storage, host, cluster as usize).await?;
        let first = count % (cluster * 8);
        if first == 0 {
            return Ok(());
        }
        let (byte, bit) = ((first / 8) as usize, first % 8);
        if let Some(rest) = bits.get_mut(byte..) {
            if let Some(cut) = rest.first_mut() {
                *cut &= (1u8 << bit) - 1;
            }
            rest.iter_mut().skip(1).for_each(|b| *b = 0);
        }
        self.write_bits_at(host, bits).await
    }

    async fn write_bits_at(&self, host: HostOffset, bits: Vec<u8>) -> Result<()> {
        self.write_all(vec![(host, bits)]).await.map_err(|e| self.poison(e))
    }
}
