//! Persistent bitmaps of qcow2 images: added, removed, cleared, started and stopped.
//!
//! Caller: the command.

use bedplate_qcow2::{BitmapChange, OpenOptions, Qcow2};
use bedplate_storage::{FileStorage, OpenOptions as FileOptions};
use bedplate_types::{CacheMode, Error, ErrorKind, Format, Result, ResultExt};
use std::path::Path;

/// Makes changes of the bitmap `name` of the image at `path`, one after the other. Nobody else may use the image.
///
/// # Errors
/// `Unsupported` for a raw or version 2 image, `NotFound` when there is no such bitmap, `InvalidInput` for one that can't be
/// added, or what opening and the storage report. The changes before the one that failed are made then.
pub async fn change_bitmap(
    path: &Path,
    format: Option<Format>,
    name: &[u8],
    changes: &[BitmapChange],
) -> Result<()> {
    let told = format.or_else(|| Format::from_extension(path).ok());
    if told == Some(Format::Raw) {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!("'{}' is a raw image, which has no bitmaps", path.display()),
        ));
    }
    let storage = FileStorage::open(&FileOptions::new(path).cache(CacheMode::Writeback))?;
    let image =
        Qcow2::open(storage, &OpenOptions { metadata_only: true, ..OpenOptions::default() })
            .await?;
    for change in changes {
        image.change_bitmap(name, *change).await.context(|| {
            let what = match change {
                BitmapChange::Add { .. } => "add",
                BitmapChange::Remove => "remove",
                BitmapChange::Clear => "clear",
                BitmapChange::Enable => "enable",
                BitmapChange::Disable => "disable",
            };
            format!("cannot {what} bitmap '{}'", bedplate_qcow2::format::printable(name))
        })?;
    }
    image.close().await
}
