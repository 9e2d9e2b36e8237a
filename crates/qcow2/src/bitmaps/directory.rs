//! The bitmap directory with each entry's own bytes, so that what is not changed stays as it was.

use super::has_bitmaps;
use crate::format::{Bitmap, BitmapExtension, EXT_BITMAPS, Header, MAX_BITMAPS};
use crate::open::read_bytes;
use bedplate_storage::Storage;
use bedplate_types::{Error, ErrorKind, HostOffset, Result};

/// An entry and its bytes.
#[derive(Clone)]
pub(super) struct Entry {
    pub(super) bitmap: Bitmap,
    bytes: Vec<u8>,
}

/// The directory.
#[derive(Clone)]
pub(super) struct Directory {
    pub(super) entries: Vec<Entry>,
    /// Where it lies, and its length.
    pub(super) at: HostOffset,
    pub(super) len: u64,
}

impl Entry {
    pub(super) fn new(bitmap: Bitmap) -> Result<Self> {
        let bytes = bitmap.encode()?;
        Ok(Self { bitmap, bytes })
    }

    /// Sets the flags; all other bytes stay.
    pub(super) fn set_flags(&mut self, flags: u32) {
        self.bitmap.flags = flags;
        if let Some(place) = self.bytes.get_mut(12..16) {
            place.copy_from_slice(&flags.to_be_bytes());
        }
    }

    /// Sets where the table lies; all other bytes stay.
    pub(super) fn set_table(&mut self, at: HostOffset, entries: u32) {
        self.bitmap.table_offset = at;
        self.bitmap.table_size = entries;
        if let Some(place) = self.bytes.get_mut(..12) {
            let (offset, size) = place.split_at_mut(8);
            offset.copy_from_slice(&at.get().to_be_bytes());
            size.copy_from_slice(&entries.to_be_bytes());
        }
    }
}

impl Directory {
    /// An image's directory; `None` when it has no bitmaps that it vouches for.
    pub(super) async fn read<S: Storage>(storage: &S, header: &Header) -> Result<Option<Self>> {
        let Some(data) = header.extension(EXT_BITMAPS).filter(|_| has_bitmaps(header)) else {
            return Ok(None);
        };
        let geometry = header.geometry()?;
        let ext = BitmapExtension::parse(data, geometry)?;
        if ext.directory_offset.get() >= storage.len().get() {
            return Err(Error::new(
                ErrorKind::BadImage,
                "the bitmap directory lies beyond the end of the file",
            ));
        }
        let bytes = read_bytes(storage, ext.directory_offset, ext.directory_size as usize).await?;
        let mut rest = bytes.as_slice();
        let mut entries = Vec::new();
        for bitmap in ext.parse_directory(&bytes, geometry)? {
            let len = bitmap.entry_len().min(rest.len());
            let (own, more) = rest.split_at(len);
            entries.push(Entry { bitmap, bytes: own.to_vec() });
            rest = more;
        }
        Ok(Some(Self { entries, at: ext.directory_offset, len: ext.directory_size }))
    }

    /// A directory without entries, and without a place.
    pub(super) const fn empty() -> Self {
        Self { entries: Vec::new(), at: HostOffset::ZERO, len: 0 }
    }

    pub(super) fn bitmaps(&self) -> impl Iterator<Item = &Bitmap> {
        self.entries.iter().map(|e| &e.bitmap)
    }

    pub(super) fn find(&self, name: &[u8]) -> Option<usize> {
        self.entries.iter().position(|e| e.bitmap.name == name)
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        self.entries.iter().flat_map(|e| e.bytes.iter().copied()).collect()
    }

    /// What the header says of it; `None` when it has no entries.
    ///
    /// # Errors
    /// `Limit` when there are too many.
    pub(super) fn extension(&self, at: HostOffset) -> Result<Option<BitmapExtension>> {
        let count = u32::try_from(self.entries.len()).unwrap_or(u32::MAX);
        if count > MAX_BITMAPS {
            return Err(Error::new(
                ErrorKind::Limit,
                format!("an image can have at most {MAX_BITMAPS} bitmaps"),
            ));
        }
        let directory_size = self.entries.iter().map(|e| e.bytes.len() as u64).sum();
        Ok((count > 0).then_some(BitmapExtension { count, directory_size, directory_offset: at }))
    }
}
