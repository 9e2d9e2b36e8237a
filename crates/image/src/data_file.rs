//! External data files: the files that hold the guest data of qcow2 images which keep only metadata themselves.
//!
//! Callers: whatever opens or makes such an image. Invariant: a data file is opened only when the operator states it or
//! allows what the header names, and it is never one of the chain's own images.

use crate::chain::{ChainOptions, Seen};
use crate::name::plain_path;
use bedplate_qcow2::format::{EXT_DATA_FILE, Header, incompat, printable};
use bedplate_storage::{FileStorage, LockMode, OpenOptions};
use bedplate_types::{Error, ErrorKind, Result, ResultExt};
use std::path::{Path, PathBuf};

/// True when the image keeps its guest data in another file.
pub(crate) fn has_data_file(header: &Header) -> bool {
    header.incompatible & incompat::EXTERNAL_DATA != 0
}

/// An open data file, with its path.
pub(crate) type DataFile = (PathBuf, FileStorage);

/// Opens the data file of the image at `path`, where it has one. For the image on `top` it may be stated.
///
/// # Errors
/// `Denied` when the operator did not allow it, `InvalidInput` when one is stated for an image that has none or nothing
/// names it, `BadImage` when it is an image of the chain, or what opening gives.
pub(crate) fn open_data_file(
    path: &Path,
    header: &Header,
    options: &ChainOptions,
    top: bool,
    seen: &mut Seen,
) -> Result<Option<DataFile>> {
    let stated = options.data_file.as_deref().filter(|_| top);
    if !has_data_file(header) {
        return match stated {
            None => Ok(None),
            Some(data) => Err(not_wanted(path, data)),
        };
    }
    let data = match stated {
        Some(data) => data.to_path_buf(),
        None => named(path, header, options.allow_data_file)?,
    };
    let failed = || {
        format!(
            "cannot use '{}', the data file of '{}' (relative names are relative to the current folder; another one can \
             be stated with --data-file)",
            data.display(),
            path.display()
        )
    };
    if !seen.is_new(&data).context(failed)? {
        return Err(Error::new(
            ErrorKind::BadImage,
            format!(
                "'{}' is named as the data file of '{}', but it is that image itself or another file of its chain",
                data.display(),
                path.display()
            ),
        ));
    }
    let read_only = options.read_only || !top;
    let lock = match options.force_share && read_only {
        true => LockMode::ForceShare,
        false => LockMode::Auto,
    };
    let how = OpenOptions::new(&data).read_only(read_only).cache(options.cache).lock(lock);
    let storage = FileStorage::open(&how).context(failed)?;
    Ok(Some((data, storage)))
}

/// The data file that the header names, when it may be opened.
fn named(path: &Path, header: &Header, allowed: bool) -> Result<PathBuf> {
    let (image, name) = (path.display(), header.extension(EXT_DATA_FILE));
    let Some(name) = name.filter(|name| !name.is_empty()) else {
        return Err(Error::new(
            ErrorKind::InvalidInput,
            format!(
                "'{image}' keeps its data in an external data file and doesn't name it; state it with --data-file"
            ),
        ));
    };
    if !allowed {
        return Err(Error::new(
            ErrorKind::Denied,
            format!(
                "'{image}' keeps its data in the external data file '{}', and using that was not allowed; if you trust the \
                 image, allow it with --allow-data-file, or state the file with --data-file",
                printable(name)
            ),
        ));
    }
    plain_path("data file", path, name)
}

fn not_wanted(path: &Path, data: &Path) -> Error {
    Error::new(
        ErrorKind::InvalidInput,
        format!(
            "'{}' holds its data itself, so '{}' can't be its data file; leave --data-file out",
            path.display(),
            data.display()
        ),
    )
}
