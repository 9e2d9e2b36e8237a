//! Internal snapshots of qcow2 images: listed, made, gone back to, deleted.
//!
//! Caller: the command. The image's backing files are not opened: snapshots share what the image itself holds.

use crate::data_file::has_data_file;
use crate::describe::snapshot_list;
use crate::info::{SnapshotInfo, snapshot_info};
use crate::state::refuse_left_behind;
use bedplate_qcow2::{NewSnapshot, OpenOptions, Qcow2, SnapshotRef, read_header, read_snapshots};
use bedplate_storage::{FileStorage, LockMode, OpenOptions as FileOptions};
use bedplate_types::{CacheMode, Error, ErrorKind, Format, Result, ResultExt};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// A change of an image's snapshots.
#[derive(Clone, Copy, Debug)]
pub enum SnapshotChange<'a> {
    /// Make one of this name.
    Create(&'a [u8]),
    /// Take the disk back to the one of this id or name.
    Apply(&'a [u8]),
    /// Delete the first one of this name.
    Delete(&'a [u8]),
}

/// Only qcow2 has snapshots, so that is the format unless something else is stated or told by the extension.
fn check_format(path: &Path, stated: Option<Format>) -> Result<()> {
    let told = stated.or_else(|| Format::from_extension(path).ok());
    if told == Some(Format::Raw) {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!("'{}' is a raw image, which has no snapshots", path.display()),
        ));
    }
    Ok(())
}

/// The snapshots of the image at `path`, in the order of their table.
///
/// # Errors
/// `Unsupported` for a raw image, or what opening and reading the file gives.
pub async fn snapshots(
    path: &Path,
    format: Option<Format>,
    force_share: bool,
) -> Result<Vec<SnapshotInfo>> {
    check_format(path, format)?;
    let lock = if force_share { LockMode::ForceShare } else { LockMode::Auto };
    let how = FileOptions::new(path).read_only(true).cache(CacheMode::Writeback).lock(lock);
    let storage = FileStorage::open(&how)?;
    let header = read_header(&storage).await?;
    if header.nb_snapshots == 0 {
        return Ok(Vec::new());
    }
    let (list, _) = read_snapshots(&storage, &header)
        .await
        .context(|| format!("cannot read the snapshots of '{}'", path.display()))?;
    Ok(list.iter().map(snapshot_info).collect())
}

/// Changes the snapshots of the image at `path`, which nobody else may use.
///
/// # Errors
/// `Unsupported` for a raw image, `NotFound` when there is no such snapshot, `Limit` when the image can't have one
/// more, or what opening and the storage report. The image is as it was then.
pub async fn change_snapshots(
    path: &Path,
    format: Option<Format>,
    change: SnapshotChange<'_>,
) -> Result<()> {
    check_format(path, format)?;
    let storage = FileStorage::open(&FileOptions::new(path).cache(CacheMode::Writeback))?;
    refuse_left_behind(path)?;
    if has_data_file(&read_header(&storage).await?) {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "'{}' keeps its data in an external data file; such images have no internal snapshots",
                path.display()
            ),
        ));
    }
    let image =
        Qcow2::open(storage, &OpenOptions { metadata_only: true, ..OpenOptions::default() })
            .await?;
    let failed = |what: &str, name: &[u8]| {
        let name = bedplate_qcow2::format::printable(name);
        format!("cannot {what} snapshot '{name}' of '{}'", path.display())
    };
    match change {
        SnapshotChange::Create(name) => {
            let date = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let new = NewSnapshot { name, date };
            image.create_snapshot(&new).await.context(|| failed("create", name))?;
        }
        SnapshotChange::Apply(name) => {
            let which = SnapshotRef::IdOrName(name);
            image.apply_snapshot(which).await.context(|| failed("apply", name))?;
        }
        SnapshotChange::Delete(name) => {
            let which = SnapshotRef::Name(name);
            image.delete_snapshot(which).await.context(|| failed("delete", name))?;
        }
    }
    image.close().await
}

/// The list for people, laid out like that of `qemu-img snapshot -l`; empty when there are none.
pub fn describe_snapshots(list: &[SnapshotInfo]) -> String {
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = snapshot_list(&mut out, list);
    out
}
