//! Changing the header where its extensions come, go or grow, so that more than one of its sectors changes.
//!
//! Sectors are written from the last to the first, each durable before the next, so that the list of extensions ends
//! before what is not there yet. A backing file's name that must make room is first copied to where it will be.

use crate::format::Header;
use crate::image::Qcow2;
use crate::open::read_bytes;
use bedplate_storage::Storage;
use bedplate_types::{Error, ErrorKind, HostOffset, Result};
use std::sync::PoisonError;

const SECTOR: usize = 512;

impl<S: Storage> Qcow2<S> {
    /// The header as `change` makes it, with a place for the backing file's name that is free now and then.
    ///
    /// # Errors
    /// `InvalidInput` when it does not fit.
    pub(super) fn changed_header(&self, change: impl FnOnce(&mut Header)) -> Result<Header> {
        let old = self.header();
        let (was, mut new) = (old.encode()?, old.clone());
        change(&mut new);
        let is = new.encode()?;
        // One sector is there or not, whatever moves in it.
        if self.tables.cluster() as usize > SECTOR
            && name_place(&was) != name_place(&is)
            && let Some(name) = &mut new.backing_file
        {
            let end = is.len().max(was.len()).next_multiple_of(8);
            name.offset = HostOffset::new(end as u64);
            new.encode()?;
        }
        Ok(new)
    }

    /// Writes a header that [`Self::changed_header`] has made.
    ///
    /// # Errors
    /// What the storage reports.
    pub(super) async fn rewrite_header(&self, new: Header) -> Result<()> {
        let _one = self.header_writer.lock().await;
        let bytes = new.encode()?;
        let len = bytes.len().next_multiple_of(SECTOR);
        let mut file = read_bytes(&self.storage, HostOffset::ZERO, len).await?;
        if let Some(name) = &new.backing_file
            && name_place(&file) != name_place(&bytes)
            && self.tables.cluster() as usize > SECTOR
        {
            let at = name.offset.get() as usize;
            self.write_part(&mut file, at, &name.name).await?;
            // Now the first sector may name the copy.
            let place = bytes.get(8..20).unwrap_or_default().to_vec();
            self.write_part(&mut file, 8, &place).await?;
        }
        for at in (0..len).step_by(SECTOR).rev() {
            let part = bytes.get(at..bytes.len().min(at + SECTOR)).unwrap_or_default().to_vec();
            self.write_part(&mut file, at, &part).await?;
        }
        *self.header.lock().unwrap_or_else(PoisonError::into_inner) = new;
        Ok(())
    }

    /// Changes a part of the header in the file, as far as it differs, in whole sectors; durable afterwards.
    async fn write_part(&self, file: &mut [u8], at: usize, part: &[u8]) -> Result<()> {
        let Some(place) = file.get_mut(at..at + part.len()) else {
            return Err(Error::new(ErrorKind::InvalidInput, "the header does not fit"));
        };
        if place == part {
            return Ok(());
        }
        place.copy_from_slice(part);
        let (first, end) = (at / SECTOR * SECTOR, (at + part.len()).next_multiple_of(SECTOR));
        let sectors = file.get(first..end).unwrap_or_default().to_vec();
        self.write_all(vec![(HostOffset::new(first as u64), sectors)]).await?;
        self.storage.sync().await
    }
}

/// Where a header says that the backing file's name lies, and its length.
fn name_place(header: &[u8]) -> Option<&[u8]> {
    header.get(8..20)
}
