//! Repairing an image: check, put right, check again.
//!
//! Callers: `image` (`check -r`). The steps and why each may be cut off by a crash: `docs/on-disk-order.md`, "Repair".
//! The image must not be in use. What a repair can't put right is left as it is, and stays in the report.

use super::correct::{How, correct};
use super::flags::{self, correct_flags};
use super::mend::{Refcounts, mend_entries};
use super::{CheckOptions, CheckReport, examine, header_of};
use crate::format::{autoclear, field, incompat};
use bedplate_runtime::buf::{AlignedBuf, SharedBuf};
use bedplate_storage::Storage;
use bedplate_types::{Error, ErrorKind, HostOffset, Result, ResultExt};

pub(super) const STAGE_ENTRIES: &str = "mending tables";
const STAGE_COUNTS: &str = "correcting refcounts";

/// What a repair may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repair {
    /// Only give leaked clusters back.
    Leaks,
    /// Everything that can be put right. Entries of tables that can't be used any more are dropped, so that guest data
    /// behind them, which can't be read anyway, reads as zeroes.
    All,
}

/// Checks the image in `storage` and repairs it. The report says how it is afterwards, and how much was put right; its
/// findings are those from before.
///
/// # Errors
/// As [`super::check()`]; `ReadOnly` when the storage is; what the storage reports while it is written. A repair that was
/// cut off may be repeated.
pub async fn repair<S: Storage>(
    storage: &S,
    what: Repair,
    options: CheckOptions,
) -> Result<CheckReport> {
    if storage.read_only() {
        let text = format!("'{}' can't be repaired: it is open read-only", storage.name());
        return Err(Error::new(ErrorKind::ReadOnly, text));
    }
    let before = examine(storage, &options, "checking").await?;
    if before.is_clean() {
        clear_marks(storage, what).await?;
        return Ok(before);
    }
    match what {
        Repair::Leaks => give_back_leaks(storage, &before, &options).await?,
        Repair::All => put_right(storage, &before, &options).await?,
    }
    let mut after = examine(storage, &options, "checking again").await?;
    if after.corruptions + after.check_errors == 0 {
        clear_marks(storage, what).await?;
    }
    after.corruptions_fixed = before.corruptions.saturating_sub(after.corruptions);
    after.leaks_fixed = before.leaks.saturating_sub(after.leaks);
    after.findings = before.findings;
    after.findings_left_out = before.findings_left_out;
    Ok(after)
}

async fn give_back_leaks<S: Storage>(
    storage: &S,
    before: &CheckReport,
    options: &CheckOptions,
) -> Result<()> {
    let damage = before.damage;
    // What looks leaked may belong to what can't be read, and counts can't be trusted to be in one block.
    if before.leaks == 0 || damage.entries + damage.unknown > 0 || damage.refcounts {
        return Ok(());
    }
    // Where a count becomes 1, the flag must say so. It comes first: while anything leaks, a repair that was cut off
    // goes on with both.
    let flags = flags::How { set: 1..=u64::MAX, clear: false };
    correct_flags(storage, options, flags).await?;
    let how = How { raise: false, lower: true, rebuild: false, strict: false, stage: STAGE_COUNTS };
    correct(storage, options, how).await
}

async fn put_right<S: Storage>(
    storage: &S,
    before: &CheckReport,
    options: &CheckOptions,
) -> Result<()> {
    if before.damage.bitmaps {
        // Without this bit the bitmaps are not valid, and take no space (specification, "Bitmaps extension").
        patch_header(storage, field::AUTOCLEAR, |bits| bits & !autoclear::BITMAPS).await?;
    }
    let how = How { raise: true, lower: true, rebuild: true, strict: false, stage: STAGE_COUNTS };
    let tables = before.damage.entries > 0 || before.damage.refcounts;
    if tables && !mend_entries(storage, options, Refcounts::Anywhere).await? {
        // These tables wait until the refcounts, which they overlap, have been made anew elsewhere.
        correct(storage, options, how).await?;
        mend_entries(storage, options, Refcounts::Apart).await?;
    }
    correct(storage, options, how).await?;
    correct_flags(storage, options, flags::How { set: 1..=1, clear: true }).await
}

/// Clears the bits that say that the image is not sound.
async fn clear_marks<S: Storage>(storage: &S, what: Repair) -> Result<()> {
    let header = header_of(storage).await?;
    let marks = match what {
        Repair::Leaks => incompat::DIRTY,
        Repair::All => incompat::DIRTY | incompat::CORRUPT,
    };
    if header.incompatible & marks == 0 {
        return Ok(());
    }
    patch_header(storage, field::INCOMPATIBLE, |bits| bits & !marks).await
}

/// Changes eight bytes of the header, durably. The others stay as they are, also those that are not known here.
pub(crate) async fn patch_header<S: Storage>(
    storage: &S,
    at: u64,
    change: impl FnOnce(u64) -> u64,
) -> Result<()> {
    patch(storage, |sector| {
        let start = usize::try_from(at).unwrap_or(usize::MAX);
        if let Some(word) = sector.get_mut(start..).and_then(|s| s.first_chunk_mut::<8>()) {
            *word = change(u64::from_be_bytes(*word)).to_be_bytes();
        }
    })
    .await
}

/// Names another refcount table in the header, durably.
pub(super) async fn patch_refcount_table<S: Storage>(
    storage: &S,
    place: u64,
    clusters: u32,
) -> Result<()> {
    patch(storage, |sector| {
        let start = usize::try_from(field::REFCOUNT_TABLE).unwrap_or(usize::MAX);
        if let Some(bytes) = sector.get_mut(start..).and_then(|s| s.first_chunk_mut::<12>()) {
            bytes[..8].copy_from_slice(&place.to_be_bytes());
            bytes[8..].copy_from_slice(&clusters.to_be_bytes());
        }
    })
    .await
}

/// The fields lie in the first sector, which a crash takes or leaves as a whole.
async fn patch<S: Storage>(storage: &S, change: impl FnOnce(&mut [u8])) -> Result<()> {
    const SECTOR: usize = 512;
    let buf = SharedBuf::zeroed(SECTOR)?;
    storage.read(HostOffset::ZERO, buf.iovec()).await?;
    let mut sector = buf.into_buf()?;
    change(&mut sector);
    let buf = SharedBuf::new(AlignedBuf::from_slice(&sector)?);
    let written = storage.write(HostOffset::ZERO, buf.iovec()).await;
    written.context(|| format!("cannot change the header of '{}'", storage.name()))?;
    storage.sync().await
}
