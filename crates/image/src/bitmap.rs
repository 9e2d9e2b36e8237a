//! Persistent bitmaps of qcow2 images: added, removed, cleared, started, stopped and merged.
//!
//! Caller: the command.

use bedplate_qcow2::format::printable;
use bedplate_qcow2::{BitmapChange, OpenOptions, Qcow2};
use bedplate_storage::{FileStorage, OpenOptions as FileOptions};
use bedplate_types::{CacheMode, Error, ErrorKind, Format, Result, ResultExt};
use std::path::Path;

/// What is to be done with a bitmap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BitmapEdit {
    /// A change of it alone.
    Change(BitmapChange),
    /// Mark in it what the bitmap of this name marks.
    Merge(Vec<u8>),
}

/// Another image, from which bitmaps are merged.
#[derive(Clone, Copy, Debug)]
pub struct BitmapSource<'a> {
    /// Where it is.
    pub path: &'a Path,
    /// Its format; `None`: the one that its extension tells, else qcow2.
    pub format: Option<Format>,
}

/// Makes changes of the bitmap `name` of the image at `path`, one after the other. Nobody else may use the image. Bitmaps
/// that are merged are those of `source`; `None`: of the image itself.
///
/// # Errors
/// `Unsupported` for a raw or version 2 image, `NotFound` when there is no such bitmap, `InvalidInput` for one that can't be
/// added, or what opening and the storage report. The changes before the one that failed are made then.
pub async fn change_bitmap(
    path: &Path,
    format: Option<Format>,
    name: &[u8],
    changes: &[BitmapEdit],
    source: Option<BitmapSource<'_>>,
) -> Result<()> {
    let image = open(path, format, false).await?;
    let source = match source {
        Some(source) => Some(open(source.path, source.format, true).await?),
        None => None,
    };
    for change in changes {
        let made = match change {
            BitmapEdit::Change(change) => image.change_bitmap(name, *change).await,
            BitmapEdit::Merge(from) => merge(&image, name, source.as_ref(), from).await,
        };
        made.context(|| {
            let what = match change {
                BitmapEdit::Change(BitmapChange::Add { .. }) => "add",
                BitmapEdit::Change(BitmapChange::Remove) => "remove",
                BitmapEdit::Change(BitmapChange::Clear) => "clear",
                BitmapEdit::Change(BitmapChange::Enable) => "enable",
                BitmapEdit::Change(BitmapChange::Disable) => "disable",
                BitmapEdit::Merge(from) => &format!("merge '{}' into", printable(from)),
            };
            format!("cannot {what} bitmap '{}'", printable(name))
        })?;
    }
    image.close().await
}

async fn merge(
    image: &Qcow2<FileStorage>,
    name: &[u8],
    source: Option<&Qcow2<FileStorage>>,
    from: &[u8],
) -> Result<()> {
    let view = source.unwrap_or(image).bitmap(from).await?;
    image.merge_bitmap(name, &view).await
}

async fn open(path: &Path, format: Option<Format>, read_only: bool) -> Result<Qcow2<FileStorage>> {
    let told = format.or_else(|| Format::from_extension(path).ok());
    if told == Some(Format::Raw) {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!("'{}' is a raw image, which has no bitmaps", path.display()),
        ));
    }
    let how = FileOptions::new(path).cache(CacheMode::Writeback).read_only(read_only);
    let options = OpenOptions {
        metadata_only: true,
        bitmaps_only: true,
        read_only,
        ..OpenOptions::default()
    };
    Qcow2::open(FileStorage::open(&how)?, &options).await
}
