//! Entries of L1 and L2 tables that can't stay as they are.
//!
//! Caller: `repair -r all`. Every change takes a reference away or clears a bit that has no meaning, none adds a
//! reference: so any part of these writes may be lost by a crash, and refcounts are at most too high. A table that lies
//! over refcounts is not written before these have been made anew elsewhere, because what it changes would be counts.

use super::cells::Use;
use super::census::{Census, Judge};
use super::reader::write_changed;
use super::repair::STAGE_ENTRIES;
use super::tables::{Raw, Shape, Wrong};
use super::{CheckOptions, header_of};
use crate::format::{COMPRESSED, COPIED, ENTRY_BYTES, OFFSET_MASK, ZERO};
use bedplate_runtime::buf::AlignedBuf;
use bedplate_storage::Storage;
use bedplate_types::Result;
use std::ops::Range;

/// Bytes of an L1 table that are mended at once.
const PIECE: u64 = 1 << 20;

/// Where the refcounts lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refcounts {
    /// Perhaps over other things. They will give way to these.
    Anywhere,
    /// Where nothing else is; what names their space is wrong.
    Apart,
}

/// Mends the entries of all tables, durably. Returns whether all could be mended: false when some lie over refcounts.
///
/// # Errors
/// What the storage reports, or `Limit`.
pub(super) async fn mend_entries<S: Storage>(
    storage: &S,
    options: &CheckOptions,
    refcounts: Refcounts,
) -> Result<bool> {
    let header = header_of(storage).await?;
    let census =
        Census::new(storage, header.clone(), options, Judge::TABLES, STAGE_ENTRIES).await?;
    let taken = Taken::new(&census, false, refcounts);
    for l1 in &census.outline.l1 {
        let (start, len) = (l1.at.get(), l1.entries * ENTRY_BYTES);
        let end =
            start.saturating_add(len).min(census.reader.file_len.next_multiple_of(ENTRY_BYTES));
        for at in (start..end).step_by(PIECE as usize) {
            let old = census.reader.bytes(at..at.saturating_add(PIECE).min(end)).await?;
            let mut new = AlignedBuf::from_slice(&old)?;
            for word in new.as_chunks_mut::<8>().0 {
                *word = taken.mend_l1(u64::from_be_bytes(*word)).to_be_bytes();
            }
            write_changed(storage, at, &old, &new).await?;
        }
    }
    storage.sync().await?;
    // Tables that are not named any more are left as they are.
    let census = Census::new(storage, header, options, Judge::TABLES, STAGE_ENTRIES).await?;
    let taken = Taken::new(&census, true, refcounts);
    let all = census.outline.tables.len().max(1);
    let (cluster, mut whole) = (census.shape.cluster(), true);
    let counts = Taken { shape: census.shape, ranges: joined(refcount_ranges(&census)) };
    for (done, table) in census.outline.tables.iter().enumerate() {
        options.tell(STAGE_ENTRIES, done as f64 / all as f64);
        if refcounts == Refcounts::Anywhere && counts.forbids(table.at, cluster) {
            whole = false;
            continue;
        }
        let end = table.at.saturating_add(cluster);
        if let Some(old) = census.reader.bytes_or_hole(table.at..end).await? {
            let new = taken.mend_l2(&old)?;
            write_changed(storage, table.at, &old, &new).await?;
        }
    }
    storage.sync().await?;
    Ok(whole)
}

/// The clusters of the refcount table and of all blocks.
fn refcount_ranges<S: Storage>(census: &Census<'_, S>) -> Vec<Range<u64>> {
    let (shape, header) = (census.shape, &census.header);
    let table = shape.cluster_of(header.refcount_table_offset.get());
    let table = table..table.saturating_add(u64::from(header.refcount_table_clusters));
    let blocks = census.stored.entries().map(|(index, _)| {
        let block = shape.cluster_of(census.stored.place(index));
        block..block + 1
    });
    blocks.chain([table]).collect()
}

/// The ranges sorted, and those that touch as one.
fn joined(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|r| r.start);
    ranges.dedup_by(|b, a| {
        let joined = b.start <= a.end;
        a.end = if joined { a.end.max(b.end) } else { a.end };
        joined
    });
    ranges
}

/// What may be named by entries, and what is taken by metadata.
struct Taken {
    shape: Shape,
    /// Clusters that guest data and L2 tables must keep off, as sorted ranges that don't overlap.
    ranges: Vec<Range<u64>>,
}

impl Taken {
    /// Bitmaps give way to data, so they are not among what is taken; nor are refcounts that may lie anywhere.
    fn new<S: Storage>(census: &Census<'_, S>, with_tables: bool, refcounts: Refcounts) -> Self {
        let shape = census.shape;
        let clusters =
            |at: u64, len: u64| shape.cluster_of(at)..shape.cluster_of(at + len.max(1) - 1) + 1;
        let claims =
            census.outline.claims.iter().filter(|c| {
                matches!(c.kind, Use::Header | Use::L1 | Use::Snapshots | Use::Encryption)
            });
        let mut ranges: Vec<_> = claims.map(|c| clusters(c.at, c.len)).collect();
        if with_tables {
            ranges.extend(census.outline.tables.iter().map(|t| clusters(t.at, shape.cluster())));
        }
        if refcounts == Refcounts::Apart {
            ranges.extend(refcount_ranges(census));
        }
        Self { shape, ranges: joined(ranges) }
    }

    /// True when any cluster of the region holds metadata that must stay, or lies outside of the file.
    fn forbids(&self, at: u64, len: u64) -> bool {
        let Some(end) = self.shape.end_inside(at, len) else { return true };
        let (first, last) = (self.shape.cluster_of(at), self.shape.cluster_of(end.max(1) - 1));
        let next = self.ranges.partition_point(|r| r.end <= first);
        self.ranges.get(next).is_some_and(|r| r.start <= last)
    }

    fn mend_l1(&self, raw: u64) -> u64 {
        let (host, cluster) = (raw & OFFSET_MASK, self.shape.cluster());
        if host == 0 || !host.is_multiple_of(cluster) || self.forbids(host, cluster) {
            return 0;
        }
        raw & (COPIED | OFFSET_MASK)
    }

    fn mend_l2(&self, old: &[u8]) -> Result<AlignedBuf> {
        let mut new = AlignedBuf::from_slice(old)?;
        let step = if self.shape.extended { 2 } else { 1 };
        for (raw, words) in self.shape.entries(old).zip(new.as_chunks_mut::<8>().0.chunks_mut(step))
        {
            if raw.entry | raw.bitmap == 0 {
                continue;
            }
            let mended = self.mend_entry(raw);
            for (word, value) in words.iter_mut().zip([mended.entry, mended.bitmap]) {
                *word = value.to_be_bytes();
            }
        }
        Ok(new)
    }

    /// The entry as it can stay. What can't be read any more reads as zeroes; where the format has no zero clusters,
    /// as what lies below.
    fn mend_entry(&self, raw: Raw) -> Raw {
        let Raw { mut entry, mut bitmap } = raw;
        let mut lost = false;
        self.shape.judge(raw, |wrong| match wrong {
            Wrong::Reserved => entry &= COPIED | COMPRESSED | OFFSET_MASK | ZERO,
            Wrong::ZeroFlag => entry &= !ZERO,
            Wrong::CopiedCompressed => entry &= !COPIED,
            Wrong::CompressedBitmap => bitmap = 0,
            // Data that is there is kept.
            Wrong::BothInBitmap => bitmap &= !(bitmap << 32),
            Wrong::Unaligned | Wrong::CompressedInDataFile | Wrong::BitmapWithoutSpace => {
                lost = true
            }
        });
        let (host, len) = if entry & COMPRESSED != 0 {
            let (host, len) = self.shape.codec.compressed_range(entry);
            (host.get(), len.get())
        } else {
            (entry & OFFSET_MASK, self.shape.cluster())
        };
        let space = entry & COMPRESSED != 0 || host != 0;
        lost |= space && !self.shape.data_file && self.forbids(host, len);
        match lost {
            false => Raw { entry, bitmap },
            true if self.shape.extended => self.lost_extended(raw),
            true if self.shape.version >= 3 => Raw { entry: ZERO, bitmap: 0 },
            true => Raw { entry: 0, bitmap: 0 },
        }
    }

    /// Subclusters that were not allocated still show what lies below.
    fn lost_extended(&self, raw: Raw) -> Raw {
        let (data, zero) = (raw.bitmap as u32, (raw.bitmap >> 32) as u32);
        let compressed = raw.entry & COMPRESSED != 0;
        let zero = if compressed { u32::MAX } else { data | zero };
        Raw { entry: 0, bitmap: u64::from(zero) << 32 }
    }
}
