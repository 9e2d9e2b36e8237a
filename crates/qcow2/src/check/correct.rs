//! Stored reference counts are set to the references that were counted.
//!
//! Callers: the repair, and opening an image that was not closed cleanly. No reference changes meanwhile, so each
//! count that moves to its right value is right for itself: any part of these writes may be lost by a crash.

use super::cells::Cells;
use super::census::{Census, Judge};
use super::reader::write_changed;
use super::rebuild::rebuild;
use super::repair::patch_header;
use super::report::CheckReport;
use super::stored::Block;
use super::{CheckOptions, header_of};
use crate::format::{field, incompat};
use bedplate_runtime::buf::AlignedBuf;
use bedplate_storage::Storage;
use bedplate_types::{Error, ErrorKind, Result};
use std::ops::Range;

/// What may be changed.
#[derive(Clone, Copy, Debug)]
pub(super) struct How {
    /// Counts that are too low become right.
    pub(super) raise: bool,
    /// Counts that are too high become right.
    pub(super) lower: bool,
    /// The table and the blocks may be made anew where they are damaged or incomplete.
    pub(super) rebuild: bool,
    /// Nothing is changed when any table is damaged.
    pub(super) strict: bool,
    pub(super) stage: &'static str,
}

/// Makes the refcounts of an image right that was not closed cleanly, and clears its dirty bit.
///
/// # Errors
/// `Corrupt` when a table can't be trusted, so that its references can't be counted, or what the storage reports.
pub(crate) async fn recount<S: Storage>(storage: &S) -> Result<()> {
    let options = CheckOptions::default();
    let how =
        How { raise: true, lower: true, rebuild: true, strict: true, stage: "counting references" };
    correct(storage, &options, how).await?;
    patch_header(storage, field::INCOMPATIBLE, |bits: u64| bits & !incompat::DIRTY).await
}

/// Corrects the counts, durably.
///
/// # Errors
/// What the storage reports, `Limit`, or with [`How::strict`] `Corrupt`.
pub(super) async fn correct<S: Storage>(
    storage: &S,
    options: &CheckOptions,
    how: How,
) -> Result<()> {
    let header = header_of(storage).await?;
    let judge = Judge::TABLES;
    let mut census = Census::new(storage, header.clone(), options, judge, how.stage).await?;
    if how.strict && !census.is_single() {
        let mut before = Census::new(storage, header, options, judge, how.stage).await?;
        while before.next().await?.is_some() {}
        refuse_damaged(&before.report)?;
    }
    let mut from = 0;
    while let Some(cells) = census.next().await? {
        if how.strict {
            refuse_damaged(&census.report)?;
        }
        let damage = census.report.damage;
        let known = damage.unknown == 0;
        if damage.refcounts {
            return if how.rebuild && known { rebuild(storage, options).await } else { Ok(()) };
        }
        let end = cells.window().end;
        let how = How { lower: how.lower && known, ..how };
        if !fix_range(&mut census, &cells, from..end, how).await? && how.rebuild && known {
            return rebuild(storage, options).await;
        }
        from = end;
    }
    let end = census.shape.end_cluster();
    let how = How { lower: how.lower && census.report.damage.unknown == 0, ..how };
    fix_range(&mut census, &Cells::new(0..0, 0), from..end, how).await?;
    storage.sync().await
}

fn refuse_damaged(report: &CheckReport) -> Result<()> {
    if report.corruptions + report.check_errors == 0 {
        return Ok(());
    }
    let first = report.findings.first().map_or("", |f| f.text.as_str());
    Err(Error::new(
        ErrorKind::Corrupt,
        format!(
            "the refcounts of '{}' can't be rebuilt, because its tables are damaged ({first}); copy the file, then \
             repair it with 'bedplate check -r all'",
            report.filename
        ),
    ))
}

/// Corrects the counts of some clusters; false when a block is missing that is needed.
async fn fix_range<S: Storage>(
    census: &mut Census<'_, S>,
    cells: &Cells,
    range: Range<u64>,
    how: How,
) -> Result<bool> {
    if range.is_empty() {
        return Ok(true);
    }
    let mut whole = true;
    let (first, _) = census.stored.format.position(range.start);
    let blocks = census.stored.blocks().min(census.stored.format.blocks_for(range.end));
    let mut next = first;
    while next < blocks {
        let batch = next..(next + census.stored.batch()).min(blocks);
        let loaded = census.stored.read(census.reader, batch.clone()).await?;
        for (index, block) in batch.clone().zip(loaded) {
            let counted = census.stored.range(index);
            let counted = counted.start..counted.end.min(range.end);
            let old = match &block {
                Block::Absent | Block::Unreadable => {
                    whole &= cells.referenced(counted).next().is_none();
                    continue;
                }
                Block::Zeroes if !cells.touches(counted.clone()) => continue,
                Block::Zeroes => &AlignedBuf::zeroed(census.shape.cluster() as usize)?,
                Block::Loaded(loaded) => &loaded.bytes,
            };
            let new = corrected(census, cells, counted, old, how)?;
            let place = census.stored.place(index);
            write_changed(census.reader.storage, place, old, &new).await?;
        }
        next = batch.end;
    }
    let rest = census.stored.range(blocks).start.max(range.start);
    Ok(whole && cells.referenced(rest..range.end).next().is_none())
}

/// A block with the counts of `counted` as they should be.
fn corrected<S: Storage>(
    census: &Census<'_, S>,
    cells: &Cells,
    counted: Range<u64>,
    old: &[u8],
    how: How,
) -> Result<AlignedBuf> {
    let format = census.stored.format;
    let mut new = AlignedBuf::from_slice(old)?;
    for (offset, cluster) in counted.enumerate() {
        let stored = format.get(old, offset).unwrap_or(0);
        let right = cells.get(cluster).min(format.max());
        if (how.raise && right > stored) || (how.lower && right < stored) {
            // The value fits: it was cut at the largest; and the index lies in the block.
            let _ = format.set(&mut new, offset, right);
        }
    }
    Ok(new)
}
