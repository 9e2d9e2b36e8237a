//! Changes of the header while the image is open: dirty, corrupt and autoclear bits, the refcount table's place.

use crate::format::{Header, incompat};
use crate::image::Qcow2;
use bedplate_runtime::buf::{AlignedBuf, SharedBuf};
use bedplate_storage::Storage;
use bedplate_types::{Error, HostOffset, Result};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

impl<S: Storage> Qcow2<S> {
    /// Changes the header and makes the change durable. One change at a time.
    ///
    /// # Errors
    /// What the storage reports; the header in memory is as before then.
    pub(crate) async fn change_header(&self, change: impl FnOnce(&mut Header)) -> Result<()> {
        let _one = self.header_writer.lock().await;
        let mut header = self.header();
        change(&mut header);
        let bytes = header.encode()?;
        let buf = SharedBuf::new(AlignedBuf::from_slice(&bytes)?);
        self.storage.write(HostOffset::ZERO, buf.iovec()).await?;
        self.storage.sync().await?;
        *self.header.lock().unwrap_or_else(PoisonError::into_inner) = header;
        Ok(())
    }

    /// Sets the dirty bit durably, so that mappings may become durable before their refcounts.
    pub(crate) async fn set_dirty_bit(&self) -> Result<()> {
        if self.is_lazy() {
            return Ok(());
        }
        self.change_header(|h| h.incompatible |= incompat::DIRTY).await?;
        self.lazy.store(true, Ordering::Release);
        Ok(())
    }

    /// Clears the dirty bit; all refcounts are durable.
    pub(crate) async fn clear_dirty_bit(&self) -> Result<()> {
        self.change_header(|h| h.incompatible &= !incompat::DIRTY).await?;
        self.lazy.store(false, Ordering::Release);
        Ok(())
    }

    /// Marks the image as corrupt, where it may be written, and stops all changes. Returns `cause`.
    pub(crate) async fn mark_corrupt(&self, cause: Error) -> Error {
        if self.read_only || self.is_poisoned() {
            return cause;
        }
        let cause = self.poison(cause);
        if let Err(e) = self
            .change_header(|h| {
                if h.version >= 3 {
                    h.incompatible |= incompat::CORRUPT;
                }
            })
            .await
        {
            tracing::error!(image = self.storage.name(), "cannot mark the image as corrupt: {e:#}");
        }
        cause
    }
}
