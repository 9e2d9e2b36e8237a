//! The consistency check and the repair: every reference is counted and compared with what the image says.
//!
//! Callers: `image` (the `check` command), opening an image that was not closed cleanly, and tests.
//!
//! - [`outline`] reads what the header leads to: L1 tables, snapshots, bitmaps; it lists the L2 tables.
//! - [`tables`] judges L2 entries, and counts what they refer to in [`cells`].
//! - [`census`] runs both over the image, in windows of the file that fit in memory, on several threads.
//! - [`compare`] sets the counts beside the stored ones ([`stored`]).
//! - [`repair()`] puts right what is wrong: [`mend`] entries, [`correct`] counts (or [`rebuild`] their tables), [`flags`].
//!
//! Invariants: memory is bounded by [`CheckOptions::max_memory`] and what [`outline`] adds for L2 tables, whatever the
//! image says; each L2 table is read once a window, however many L1 tables name it; a check writes nothing. Its
//! counts agree with those of `qemu-img check`; beyond them it counts zero flags where the format has none, and space
//! that is used for two different things although its reference count allows for both.

mod cells;
mod census;
mod compare;
mod correct;
mod flags;
mod mend;
mod outline;
mod reader;
mod rebuild;
mod repair;
mod report;
mod stored;
mod tables;
#[cfg(test)]
mod tests;

pub use repair::{Repair, repair};
pub use report::{CheckReport, Finding, Severity};

pub(crate) use correct::recount;
pub(crate) use repair::patch_header;

use crate::format::{Header, check_checkable};
use crate::open::read_header;
use bedplate_storage::Storage;
use bedplate_types::{Result, ResultExt};
use census::{Census, Judge};
use std::fmt;
use std::sync::Arc;

/// How much a check may use, and whom it tells how far it is.
#[derive(Clone, Debug)]
pub struct CheckOptions {
    /// Findings that are kept as sentences; all are counted.
    pub max_findings: usize,
    /// Bytes of memory for counting. Images that need more are gone through several times.
    pub max_memory: u64,
    /// Threads that read and judge L2 tables. With more than one, the calling thread waits for them without serving
    /// its own runtime meanwhile: not for threads that serve guests.
    pub threads: usize,
    /// Is told how far the work is.
    pub progress: Option<Progress>,
}

impl Default for CheckOptions {
    fn default() -> Self {
        Self { max_findings: 1000, max_memory: 384 << 20, threads: 1, progress: None }
    }
}

/// Somebody who wants to know how far the work is.
#[derive(Clone)]
pub struct Progress(Arc<dyn Fn(&'static str, f64) + Send + Sync>);

impl Progress {
    /// `tell` gets the name of the stage that the work is in, and how much of that stage is done, from 0 to 1. It is
    /// called from several threads, and may be called often.
    pub fn new(tell: impl Fn(&'static str, f64) + Send + Sync + 'static) -> Self {
        Self(Arc::new(tell))
    }
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Progress")
    }
}

impl CheckOptions {
    fn tell(&self, stage: &'static str, done: f64) {
        if let Some(Progress(tell)) = &self.progress {
            tell(stage, done);
        }
    }
}

/// Checks the qcow2 image in `storage`, which nothing may change meanwhile.
///
/// # Errors
/// When the image can't be opened at all, needs features that are not known, can't be read, or needs more
/// memory than allowed. Everything that is wrong inside the image is in the report instead.
pub async fn check<S: Storage>(storage: &S, options: CheckOptions) -> Result<CheckReport> {
    examine(storage, &options, "checking").await
}

async fn examine<S: Storage>(
    storage: &S,
    options: &CheckOptions,
    stage: &'static str,
) -> Result<CheckReport> {
    let header = header_of(storage).await?;
    let mut census = Census::new(storage, header, options, Judge::ALL, stage).await?;
    while let Some(cells) = census.next().await? {
        census.compare(&cells).await?;
    }
    census.compare_rest().await?;
    Ok(census.report)
}

async fn header_of<S: Storage>(storage: &S) -> Result<Header> {
    let header = read_header(storage).await?;
    check_checkable(&header).context(|| format!("cannot check '{}'", storage.name()))?;
    Ok(header)
}
