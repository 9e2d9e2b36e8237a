//! Checking an image, and repairing it when asked.

use crate::name::format_of;
use crate::state::refuse_left_behind;
pub use bedplate_qcow2::check::{CheckOptions, CheckReport, Finding, Progress, Repair, Severity};
use bedplate_storage::{FileStorage, LockMode, OpenOptions};
use bedplate_types::{CacheMode, Error, ErrorKind, Format, Result};
use std::path::Path;

/// Checks the image at `path`. It is opened read-only, unless it shall be repaired.
///
/// # Errors
/// `InvalidInput` when an image that others may use shall be repaired; `Unsupported` for raw images, which have
/// nothing to check; `Locked` while another program writes; or what opening, reading and writing the image gives.
pub async fn check(
    path: &Path,
    format: Option<Format>,
    force_share: bool,
    repair: Option<Repair>,
    options: CheckOptions,
) -> Result<CheckReport> {
    // Only qcow2 can be checked, so that is the format unless something else is stated or told by the extension.
    if matches!(format_of(path, format), Ok(Format::Raw)) {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "'{}' is a raw image, which has no metadata that could be checked",
                path.display()
            ),
        ));
    }
    let lock = if force_share { LockMode::ForceShare } else { LockMode::Auto };
    let how = OpenOptions::new(path).cache(CacheMode::Writeback).lock(lock);
    match repair {
        None => {
            let storage = FileStorage::open(&how.read_only(true))?;
            bedplate_qcow2::check::check(&storage, options).await
        }
        Some(_) if force_share => Err(Error::new(
            ErrorKind::InvalidInput,
            format!("'{}' can't be repaired while other programs may use it", path.display()),
        )),
        Some(what) => {
            let storage = FileStorage::open(&how)?;
            refuse_left_behind(path)?;
            bedplate_qcow2::check::repair(&storage, what, options).await
        }
    }
}
