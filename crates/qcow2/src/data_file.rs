//! Guest data in a file of its own ("external data file" in the qcow2 specification).
//!
//! Callers: everything in the engine that reads, writes or syncs guest data. Invariants: a guest cluster's data lies at
//! the guest's own offset, so it is neither allocated nor counted, and never shared; metadata stays in the image's file.
//! Where the header says that the data file is *raw*, it reads as the disk at any time: discards and zeroes change the
//! file itself then, and mappings stay.

use crate::format::{Header, autoclear, incompat};
use crate::image::Qcow2;
use bedplate_storage::{Storage, ZeroMode};
use bedplate_types::{ByteLen, Error, ErrorKind, GuestOffset, HostOffset, Result};

/// True when the image keeps its guest data in another file.
pub(crate) fn is_external(header: &Header) -> bool {
    header.version >= 3 && header.incompatible & incompat::EXTERNAL_DATA != 0
}

/// True when that file reads as the disk.
pub(crate) fn is_raw(header: &Header) -> bool {
    is_external(header) && header.autoclear & autoclear::RAW_EXTERNAL_DATA != 0
}

/// Checks that an image and what is to hold its data go together.
///
/// # Errors
/// `Denied` when the image needs a data file and has none here, `InvalidInput` when it needs none, `BadImage` when the
/// file is shorter than the disk.
pub(crate) fn check_data_file<S: Storage>(header: &Header, data: Option<&S>) -> Result<()> {
    match (is_external(header), data) {
        (false, None) => Ok(()),
        (true, None) => Err(Error::new(
            ErrorKind::Denied,
            "the image keeps its data in an external data file, which was not opened with it",
        )),
        (false, Some(data)) => Err(Error::new(
            ErrorKind::InvalidInput,
            format!("the image holds its data itself, so '{}' can't be its data file", data.name()),
        )),
        (true, Some(data)) if data.len() < header.disk_size() => Err(Error::new(
            ErrorKind::BadImage,
            format!(
                "its data file '{}' is shorter than the disk ({} of {} bytes); either it is not the data file of this \
                 image, or data is lost",
                data.name(),
                data.len().get(),
                header.disk_size().get()
            ),
        )),
        (true, Some(_)) => Ok(()),
    }
}

impl<S: Storage> Qcow2<S> {
    /// The file or device that holds the guest's data: the image's own, or its external data file. What a look-up names
    /// lies there.
    pub fn data_storage(&self) -> &S {
        self.data.as_ref().unwrap_or(&self.storage)
    }

    /// True when the guest's data lies in a file of its own.
    pub fn has_data_file(&self) -> bool {
        self.data.is_some()
    }

    /// Makes all that was written to the image and its data file durable.
    pub(crate) async fn sync_all(&self) -> Result<()> {
        match &self.data {
            None => self.storage.sync().await,
            Some(data) => {
                let (one, two) = futures_util::future::join(data.sync(), self.storage.sync()).await;
                one.and(two)
            }
        }
    }

    /// Where the disk ends, in bytes, as guests see it.
    pub(crate) fn disk_end(&self) -> u64 {
        self.size().get().next_multiple_of(512)
    }

    /// Refuses what images with a data file can't have.
    pub(crate) fn refuse_data_file(&self, what: &str) -> Result<()> {
        if self.data.is_none() {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "image '{}' keeps its data in an external data file; such images have no {what}",
                self.storage.name()
            ),
        ))
    }

    /// Discards or zeroes a range of a raw data file, which must read as the disk. `None` discards.
    ///
    /// # Errors
    /// What the storage reports.
    pub(crate) async fn clear_raw(
        &self,
        at: GuestOffset,
        len: ByteLen,
        zero: Option<ZeroMode>,
    ) -> Result<()> {
        let (data, cluster) = (self.data_storage(), self.tables.cluster());
        let end = at.get().saturating_add(len.get()).min(self.disk_end().min(data.len().get()));
        let (mut from, span) = (at.get(), self.tables.geo.slice_coverage());
        while from < end {
            let to = end.min((from - from % span).saturating_add(span));
            let start = from - from % cluster;
            let _range = self.ranges.exclusive(start, to.next_multiple_of(cluster) - start).await;
            let (host, len) = (HostOffset::new(from), ByteLen::new(to - from));
            match zero {
                Some(mode) => data.write_zeroes(host, len, mode).await?,
                // A device may leave anything where it discards, but here it is the disk.
                None => {
                    let mode = ZeroMode { unmap: true, fast_only: true };
                    match data.write_zeroes(host, len, mode).await {
                        Err(e) if e.kind() == ErrorKind::Unsupported => return Ok(()),
                        other => other?,
                    }
                }
            }
            from = to;
        }
        Ok(())
    }

    /// Gives the space of clusters of the data file back to the host, which nothing maps any more. The caller holds their
    /// range: nobody writes there but requests that are concurrent with the discard.
    pub(crate) async fn give_back_data(&self, clusters: &[u64]) {
        let Some(data) = &self.data else { return };
        let (cluster, end) = (self.tables.cluster(), self.disk_end());
        // Only what is sure to read as zeroes: until the mapping's removal is durable, a crash shows this space again.
        let mode = ZeroMode { unmap: true, fast_only: true };
        for run in clusters.chunk_by(|a, b| a.saturating_add(cluster) == *b) {
            let (Some(first), Some(last)) = (run.first(), run.last()) else { continue };
            let stop = last.saturating_add(cluster).min(end);
            let len = ByteLen::new(stop.saturating_sub(*first));
            if let Err(e) = data.write_zeroes(HostOffset::new(*first), len, mode).await {
                tracing::debug!(image = self.storage.name(), "space is not given back: {e:#}");
            }
        }
    }

    /// Makes the data file long enough for a disk of `new` bytes. Where it must read as the disk, what lies beyond the
    /// old end becomes zeroes.
    ///
    /// # Errors
    /// `NoSpace` for a device that is too small, or what the storage reports.
    pub(crate) async fn grow_data(&self, old: ByteLen, new: ByteLen) -> Result<()> {
        let Some(data) = &self.data else { return Ok(()) };
        if self.raw_data && data.len() > old {
            let len = ByteLen::new(data.len().get().min(new.get()).saturating_sub(old.get()));
            let mode = ZeroMode { unmap: true, fast_only: false };
            data.write_zeroes(HostOffset::new(old.get()), len, mode).await?;
        }
        data.grow(new).await?;
        if data.len() < new {
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!(
                    "the data file '{}' has {} bytes, too few for a disk of {}; enlarge it first",
                    data.name(),
                    data.len().get(),
                    new.get()
                ),
            ));
        }
        data.sync().await
    }

    /// Cuts the data file to the disk's new end; on a device the rest of the last cluster becomes zeroes.
    ///
    /// # Errors
    /// What the storage reports.
    pub(crate) async fn shrink_data(&self, old: ByteLen, new: ByteLen) -> Result<()> {
        let Some(data) = &self.data else { return Ok(()) };
        match data.set_len(new).await {
            Err(e) if e.kind() == ErrorKind::Unsupported => {
                let end = new.get().next_multiple_of(self.tables.cluster()).min(old.get());
                let len = ByteLen::new(end.saturating_sub(new.get()));
                let mode = ZeroMode { unmap: false, fast_only: false };
                data.write_zeroes(HostOffset::new(new.get()), len, mode).await?;
            }
            other => other?,
        }
        data.sync().await
    }
}
