//! Which image of a chain holds which part of a disk, and where.

use bedplate_disk::{Disk, MapRun};
use bedplate_storage::FileStorage;
use bedplate_types::{ByteLen, GuestOffset, Result};
use serde::Serialize;

/// A run of a disk; serialised with the keys of `qemu-img map --output=json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MapEntry {
    /// The first byte.
    pub start: u64,
    /// Bytes.
    pub length: u64,
    /// The image that holds it: 0 is the top.
    pub depth: usize,
    /// An image of the chain says something about it.
    pub present: bool,
    /// It reads as zeroes.
    pub zero: bool,
    /// Bytes of a file belong to it.
    pub data: bool,
    /// It is compressed.
    pub compressed: bool,
    /// Where in the image's file, or its data file, it starts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offset: Option<u64>,
}

impl MapEntry {
    fn new(start: u64, run: &MapRun) -> Self {
        Self {
            start,
            length: run.len.get(),
            depth: run.depth,
            present: run.present,
            zero: run.zero,
            data: run.data,
            compressed: run.compressed,
            offset: run.offset.map(|at| at.get()),
        }
    }

    /// Makes this entry longer by `next` when both are of one piece.
    fn join(&mut self, next: &Self) -> bool {
        let key = |e: &Self| (e.depth, e.present, e.zero, e.data, e.compressed);
        let follows = match (self.offset, next.offset) {
            (Some(a), Some(b)) => a.checked_add(self.length) == Some(b),
            (None, None) => true,
            _ => false,
        };
        let joins = follows && key(self) == key(next);
        if joins {
            self.length += next.length;
        }
        joins
    }
}

/// Tells `each` the runs of the disk from `start` on, up to `len` bytes, in order.
///
/// # Errors
/// What reading the metadata gives, or what `each` returns.
pub async fn map(
    disk: &Disk<FileStorage>,
    start: u64,
    len: u64,
    mut each: impl FnMut(MapEntry) -> Result<()>,
) -> Result<()> {
    disk.refuse_shared_tables()?;
    let size = disk.size();
    let end = size.align_up(512).unwrap_or(size).get().min(start.saturating_add(len));
    let mut at = start;
    let mut last: Option<MapEntry> = None;
    while at < end {
        let run = disk.map_run(GuestOffset::new(at), ByteLen::new(end - at)).await?;
        let entry = MapEntry::new(at, &run);
        at += entry.length;
        if last.as_mut().is_some_and(|before| before.join(&entry)) {
            continue;
        }
        if let Some(before) = last.replace(entry) {
            each(before)?;
        }
    }
    last.map_or(Ok(()), each)
}
