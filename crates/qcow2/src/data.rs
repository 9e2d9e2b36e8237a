//! Cluster data in the file: whatever reads or writes what a guest has stored goes through here, metadata never does.
//!
//! Callers: writing, copy-on-write, and `disk` for reads. Compressed clusters are read by [`crate::read`].

use crate::image::Qcow2;
use bedplate_runtime::buf::IoVec;
use bedplate_storage::Storage;
use bedplate_types::{HostOffset, Result};

impl<S: Storage> Qcow2<S> {
    /// Fills `buf` with data from `at`, a place that a mapping gave. The caller holds a pin of [`Self::epochs`].
    ///
    /// # Errors
    /// What the storage reports.
    pub async fn read_data(&self, at: HostOffset, buf: IoVec) -> Result<()> {
        self.storage.read(at, buf).await
    }

    /// Writes data to `at`: clusters that are the writer's own, or mapped and writable in place.
    ///
    /// # Errors
    /// What the storage reports.
    pub(crate) async fn write_data(&self, at: HostOffset, buf: IoVec) -> Result<()> {
        self.storage.write(at, buf).await
    }
}
