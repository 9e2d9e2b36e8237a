//! Internal snapshots: listed, made, gone back to, deleted.
//!
//! Caller: `image`. Each change is one new generation of the metadata ([`crate::generation`]), so a crash leaves it
//! done or not begun. A snapshot owns an L1 table; L2 tables and clusters are shared, each counted once for every
//! way that leads to it. Entries of the snapshot table are kept byte for byte: only the one that is added or removed
//! changes.

mod change;
mod table;

use crate::format::Snapshot;
use crate::image::Qcow2;
use bedplate_storage::Storage;
use bedplate_types::Result;
use std::time::Duration;

/// How a snapshot is named by its user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotRef<'a> {
    /// The first one of this name.
    Name(&'a [u8]),
    /// The one of this id or, when there is none, the first one of this name.
    IdOrName(&'a [u8]),
}

/// What a new snapshot is to say about itself.
#[derive(Clone, Debug)]
pub struct NewSnapshot<'a> {
    /// Its name: at most 255 bytes. Need not be unique; its id is.
    pub name: &'a [u8],
    /// When it is taken, since 1970.
    pub date: Duration,
}

impl<S: Storage> Qcow2<S> {
    /// The image's snapshots in the order of their table.
    ///
    /// # Errors
    /// `BadImage` when the table breaks its rules, or what the storage reports.
    pub async fn snapshots(&self) -> Result<Vec<Snapshot>> {
        let table = table::Raw::read(&self.storage, &self.header()).await?;
        Ok(table.entries.into_iter().map(|e| e.snapshot).collect())
    }
}
