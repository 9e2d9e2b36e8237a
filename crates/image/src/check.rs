//! Checking an image: only reports, never repairs.

use crate::name::format_of;
pub use bedplate_qcow2::check::{CheckOptions, CheckReport, Finding, Severity};
use bedplate_storage::{FileStorage, LockMode, OpenOptions};
use bedplate_types::{CacheMode, Error, ErrorKind, Format, Result};
use std::path::Path;

/// Checks the image at `path`, which is opened read-only.
///
/// # Errors
/// `Unsupported` for raw images, which have nothing to check; `Locked` while another program writes; or what
/// opening and reading the image gives.
pub async fn check(
    path: &Path,
    format: Option<Format>,
    force_share: bool,
    options: CheckOptions,
) -> Result<CheckReport> {
    if format_of(path, format)? == Format::Raw {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "'{}' is a raw image, which has no metadata that could be checked",
                path.display()
            ),
        ));
    }
    let lock = if force_share { LockMode::ForceShare } else { LockMode::Auto };
    let how = OpenOptions::new(path).read_only(true).cache(CacheMode::Writeback).lock(lock);
    bedplate_qcow2::check::check(&FileStorage::open(&how)?, options).await
}
