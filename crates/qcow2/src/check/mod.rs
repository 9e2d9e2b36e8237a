//! The consistency check: counts every reference and compares with what the image says.
//!
//! Callers: `image` (the `check` command) and tests. It only reports: nothing is written, and the storage may
//! be read-only. Memory is bounded: one byte for each host cluster in use, within a budget. Its counts agree
//! with those of `qemu-img check`; beyond them it counts zero flags in version 2 images, and space that is
//! used for two different things although its reference count allows for both.

mod counts;
mod report;
mod stored;
#[cfg(test)]
mod tests;
mod walk;

pub use report::{CheckReport, Finding, Severity};

use crate::format::check_supported;
use crate::open::read_header;
use bedplate_storage::Storage;
use bedplate_types::{Result, ResultExt};

/// How much a check may use.
#[derive(Clone, Copy, Debug)]
pub struct CheckOptions {
    /// Findings that are kept as sentences; all are counted.
    pub max_findings: usize,
    /// Bytes of memory for counting.
    pub max_memory: u64,
}

impl Default for CheckOptions {
    fn default() -> Self {
        Self { max_findings: 1000, max_memory: 2 << 30 }
    }
}

/// Checks the qcow2 image in `storage`, which nothing may change meanwhile.
///
/// # Errors
/// When the image can't be opened at all, needs features that are not supported, can't be read, or needs more
/// memory than allowed. Everything that is wrong inside the image is in the report instead.
pub async fn check<S: Storage>(storage: &S, options: CheckOptions) -> Result<CheckReport> {
    let header = read_header(storage).await?;
    check_supported(&header, false).context(|| format!("cannot check '{}'", storage.name()))?;
    let mut walker = walk::Walker::new(storage, header, options).await?;
    walker.count_tables().await?;
    walker.compare().await?;
    Ok(walker.report)
}

/// The references that the tables of a sound image hold, whatever its refcounts say.
///
/// # Errors
/// `Corrupt` when a table can't be trusted, so that its references can't be counted; else as [`check`].
pub(crate) async fn count_references<S: Storage>(storage: &S) -> Result<counts::Counts> {
    let header = read_header(storage).await?;
    let mut walker = walk::Walker::new(storage, header, CheckOptions::default()).await?;
    walker.ignore_refcounts();
    walker.count_tables().await?;
    walker.into_counts()
}
