//! Refcounts of an image that was not closed cleanly, rebuilt from its tables.

use crate::image::Qcow2;
use bedplate_storage::Storage;
use bedplate_types::{Error, ErrorKind, Result};

impl<S: Storage> Qcow2<S> {
    /// Counts all references and corrects the refcounts, then clears the dirty bit.
    ///
    /// # Errors
    /// `Corrupt` when tables can't be trusted, or what the storage reports.
    pub(crate) async fn rebuild_refcounts(&self) -> Result<()> {
        Err(Error::new(ErrorKind::Unsupported, "not yet"))
    }
}
