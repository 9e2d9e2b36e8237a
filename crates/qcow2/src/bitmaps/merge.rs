//! Adding to a bitmap what another one has recorded.
//!
//! The bits of both are written to a new place, with a new table, as a change of the directory (`change.rs`): a crash leaves the
//! bitmap as it was, or with all of the other's bits.

use super::directory::Directory;
use super::{BitmapView, Tracked};
use crate::image::Qcow2;
use bedplate_storage::Storage;
use bedplate_types::{ByteLen, Error, ErrorKind, Result};

impl<S: Storage> Qcow2<S> {
    /// Marks in bitmap `name` all that `source` marks, from this image or another one. Granularities may differ: a grain is
    /// marked when a part of it is. Requests wait meanwhile.
    ///
    /// # Errors
    /// `NotFound` when there is no such bitmap, `InvalidInput` when the source is of a disk of another size, `Unsupported` for
    /// one that can't be trusted, `Limit` for one that needs too much memory; `NoSpace`, or what else the storage
    /// reports.
    pub async fn merge_bitmap(&self, name: &[u8], source: &BitmapView) -> Result<()> {
        self.check_writable()?;
        let _still = self.hold_still().await;
        self.write_everything().await?;
        let old = Directory::read(&self.storage, &self.header()).await?;
        let found = old.and_then(|old| Some((old.find(name)?, old)));
        let Some((index, mut directory)) = found else { return Err(self.no_such_bitmap(name)) };
        let Some(entry) = directory.entries.get_mut(index) else { return Ok(()) };
        self.check_trusted(&entry.bitmap)?;
        let (own, other) = (self.size(), source.disk_size());
        if own != other {
            let (own, other) = (own.get(), other.get());
            let text = format!(
                "the disk of '{}' has {own} bytes, and that of the source {other}; bitmaps of disks of different sizes \
                 can't be merged",
                self.storage.name()
            );
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        let merged = Tracked::new(&entry.bitmap, index, own, self.tables.geo)?;
        if !merged.is_known() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "the bitmap has extra data that is not known here, and which a merge could make wrong",
            ));
        }
        let bits = self.load_bits(&merged.bitmap, merged.count).await?;
        // Just made, so nobody else sets it.
        let _ = merged.bits.set(bits.clone());
        add(&merged, source, own);
        let nothing = vec![0; entry.bitmap.table_size as usize];
        let mut new = Vec::new();
        let table = self.write_bits(&entry.bitmap, &bits, &nothing, &mut new).await?;
        self.space.count_leased(new.into_iter()).map_err(|e| self.poison(e))?;
        let bytes = table.iter().flat_map(|word| word.to_be_bytes()).collect();
        let at = self.write_run(bytes).await?;
        let dropped = self.clusters_of_bitmap(&entry.bitmap).await?;
        entry.set_table(at, entry.bitmap.table_size);
        self.take_over(&directory, dropped).await
    }
}

/// Sets every bit of which `source` marks a part.
fn add(merged: &Tracked, source: &BitmapView, size: ByteLen) {
    let mut at = 0;
    while at < size.get() {
        let (dirty, len) = source.run(at, size.get() - at);
        if dirty {
            merged.set(at, len);
        }
        at = at.saturating_add(len.max(1));
    }
}
