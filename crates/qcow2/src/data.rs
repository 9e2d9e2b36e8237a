//! Cluster data in the file: whatever reads or writes what a guest has stored goes through here, metadata never does.
//!
//! Callers: writing, copy-on-write, and `disk` for reads. Compressed clusters are read by [`crate::read`].

use crate::crypt::{Cipher, Protection};
use crate::image::Qcow2;
use bedplate_runtime::buf::IoVec;
use bedplate_storage::Storage;
use bedplate_types::{Error, ErrorKind, HostOffset, Result};

impl<S: Storage> Qcow2<S> {
    /// Fills `buf` with data from `at`, a place that a mapping gave. The caller holds a pin of [`Self::epochs`].
    ///
    /// # Errors
    /// `Denied` when the image is encrypted and was opened without its key, or what the storage reports.
    pub async fn read_data(&self, at: HostOffset, buf: IoVec) -> Result<()> {
        match self.cipher()? {
            None => self.data_storage().read(at, buf).await,
            Some(cipher) => cipher.read(self.data_storage(), at, &buf).await,
        }
    }

    /// Writes data to `at`: clusters that are the writer's own, or mapped and writable in place.
    ///
    /// # Errors
    /// As [`Self::read_data`].
    pub(crate) async fn write_data(&self, at: HostOffset, buf: IoVec) -> Result<()> {
        match self.cipher()? {
            None => self.data_storage().write(at, buf).await,
            Some(cipher) => cipher.write(self.data_storage(), at, &buf).await,
        }
    }

    /// True when the data of clusters is encrypted.
    pub fn is_encrypted(&self) -> bool {
        !matches!(self.protection, Protection::None)
    }

    fn cipher(&self) -> Result<Option<&Cipher>> {
        match &self.protection {
            Protection::None => Ok(None),
            Protection::Cipher(cipher) => Ok(Some(cipher)),
            Protection::Locked => Err(Error::new(
                ErrorKind::Denied,
                format!(
                    "the data of '{}' is encrypted, and its key was not given",
                    self.storage.name()
                ),
            )),
        }
    }
}
