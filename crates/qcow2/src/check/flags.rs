//! COPIED flags are set to what the counted references say.
//!
//! Caller: the repair. A flag that is cleared forbids writing in place, which is always safe; one is set only where the
//! cluster has one reference. So any part of these writes may be lost by a crash.

use super::cells::Cells;
use super::census::{Census, Judge};
use super::reader::write_changed;
use super::stored::Stored;
use super::tables::Shape;
use super::{CheckOptions, header_of};
use crate::format::{COMPRESSED, COPIED, ENTRY_BYTES, OFFSET_MASK};
use bedplate_runtime::buf::AlignedBuf;
use bedplate_storage::Storage;
use bedplate_types::Result;
use std::ops::RangeInclusive;

/// Bytes of an L1 table that are changed at once.
const PIECE: u64 = 1 << 20;

/// What may be changed.
#[derive(Clone, Debug)]
pub(super) struct How {
    /// Flags are set where the stored count is one of these.
    pub(super) set: RangeInclusive<u64>,
    pub(super) clear: bool,
}

/// Corrects the flags, durably.
///
/// # Errors
/// What the storage reports, or `Limit`.
pub(super) async fn correct_flags<S: Storage>(
    storage: &S,
    options: &CheckOptions,
    how: How,
) -> Result<()> {
    const STAGE: &str = "correcting flags";
    let header = header_of(storage).await?;
    let mut census = Census::new(storage, header, options, Judge::TABLES, STAGE).await?;
    let end = census.shape.end_cluster();
    census.stored.learn(census.reader, end, how.set).await?;
    while let Some(cells) = census.next().await? {
        let marker = Marker {
            shape: &census.shape,
            cells: &cells,
            stored: &census.stored,
            set: census.report.damage.unknown == 0,
            clear: how.clear,
        };
        for l1 in census.outline.l1.iter().filter(|l1| l1.active) {
            let start = l1.at.get();
            let end = start.saturating_add(l1.entries * ENTRY_BYTES);
            let end = end.min(census.reader.file_len.next_multiple_of(ENTRY_BYTES));
            for at in (start..end).step_by(PIECE as usize) {
                let old = census.reader.bytes(at..at.saturating_add(PIECE).min(end)).await?;
                let new = marker.l1(&old)?;
                write_changed(storage, at, &old, &new).await?;
            }
        }
        let aligned = |at: u64| at.is_multiple_of(census.shape.cluster());
        for table in census.outline.tables.iter().filter(|t| t.active > 0 && aligned(t.at)) {
            let end = table.at.saturating_add(census.shape.cluster());
            if let Some(old) = census.reader.bytes_or_hole(table.at..end).await? {
                let new = marker.l2(&old)?;
                write_changed(storage, table.at, &old, &new).await?;
            }
        }
    }
    storage.sync().await
}

struct Marker<'a> {
    shape: &'a Shape,
    cells: &'a Cells,
    stored: &'a Stored,
    set: bool,
    clear: bool,
}

impl Marker<'_> {
    fn marked(&self, entry: u64) -> u64 {
        let host = entry & OFFSET_MASK;
        let cluster = self.shape.cluster_of(host);
        let unknown = !self.cells.window().contains(&cluster);
        if unknown || !host.is_multiple_of(self.shape.cluster()) {
            return entry;
        }
        match self.cells.get(cluster) == 1 {
            true if self.stored.is_wanted(cluster) != Some(true) => entry,
            one => self.with_flag(entry, one),
        }
    }

    fn with_flag(&self, entry: u64, right: bool) -> u64 {
        match right {
            true if self.set => entry | COPIED,
            false if self.clear => entry & !COPIED,
            _ => entry,
        }
    }

    fn l1(&self, old: &[u8]) -> Result<AlignedBuf> {
        let mut new = AlignedBuf::from_slice(old)?;
        for word in new.as_chunks_mut::<8>().0 {
            let entry = u64::from_be_bytes(*word);
            if entry & OFFSET_MASK != 0 {
                *word = self.marked(entry).to_be_bytes();
            }
        }
        Ok(new)
    }

    fn l2(&self, old: &[u8]) -> Result<AlignedBuf> {
        let mut new = AlignedBuf::from_slice(old)?;
        let step = if self.shape.extended { 2 } else { 1 };
        for (raw, words) in self.shape.entries(old).zip(new.as_chunks_mut::<8>().0.chunks_mut(step))
        {
            if raw.entry & COMPRESSED != 0 || !self.shape.has_space(raw) {
                continue;
            }
            let entry = if self.shape.data_file {
                self.with_flag(raw.entry, true)
            } else {
                self.marked(raw.entry)
            };
            if let Some(word) = words.first_mut() {
                *word = entry.to_be_bytes();
            }
        }
        Ok(new)
    }
}
