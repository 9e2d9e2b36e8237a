//! Another size for the disk in an image.
//!
//! Caller: the command. The backing files of an image are opened only where a growing disk could show what they hold
//! beyond its old end, or where it has an external data file.

use crate::chain::{ChainOptions, open_chain};
use crate::data_file::has_data_file;
use crate::name::format_of;
use crate::state::refuse_left_behind;
use bedplate_disk::{Disk, Layer};
use bedplate_qcow2::{OpenOptions as Qcow2Options, Passphrase, Qcow2, read_header};
use bedplate_storage::{FileStorage, OpenOptions, Storage};
use bedplate_types::{
    ByteLen, CacheMode, Error, ErrorKind, Format, Preallocation, Result, ResultExt,
};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

/// The new size, as it is stated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewSize {
    /// This many bytes.
    To(ByteLen),
    /// This many more.
    Grow(ByteLen),
    /// This many fewer.
    Shrink(ByteLen),
}

impl FromStr for NewSize {
    type Err = Error;

    /// Reads a size as qemu-img spells it: `10G`, `+1G` or `-1G`.
    fn from_str(s: &str) -> Result<Self> {
        let (make, size): (fn(ByteLen) -> Self, _) = match s.as_bytes().first() {
            Some(b'+') => (Self::Grow, s.get(1..)),
            Some(b'-') => (Self::Shrink, s.get(1..)),
            _ => (Self::To, Some(s)),
        };
        Ok(make(bedplate_types::parse_size(size.unwrap_or_default())?))
    }
}

impl NewSize {
    fn of(self, old: ByteLen) -> Option<ByteLen> {
        let size = match self {
            Self::To(size) => Some(size),
            Self::Grow(by) => old.checked_add(by),
            Self::Shrink(by) => old.checked_sub(by),
        };
        size.filter(|size| *size > ByteLen::ZERO)
    }
}

/// How a disk's size is changed.
#[derive(Clone, Debug)]
pub struct ResizeOptions {
    /// The image's format; `None`: the one that its extension tells.
    pub format: Option<Format>,
    /// The new size.
    pub size: NewSize,
    /// It may be smaller than the old one.
    pub shrink: bool,
    /// How the space that the disk grows by is taken.
    pub preallocation: Preallocation,
    /// Backing files may be opened.
    pub allow_backing: bool,
    /// The format of backing files whose overlay does not state it.
    pub backing_format: Option<Format>,
    /// What may open encrypted images.
    pub passphrases: Vec<Passphrase>,
    /// External data files that headers name may be opened.
    pub allow_data_file: bool,
    /// The image's external data file, whatever its header says.
    pub data_file: Option<PathBuf>,
}

/// Changes the size of the disk in the image at `path`; returns the new size.
///
/// # Errors
/// `InvalidInput` for a size that can't be, or that is smaller without leave to shrink; `Denied` when a backing file
/// must be looked at and may not; or what opening and the storage report. The disk has its old size then.
pub async fn resize(path: &Path, options: &ResizeOptions) -> Result<ByteLen> {
    let failed = || format!("cannot resize '{}'", path.display());
    let format = format_of(path, options.format)?;
    let cache = match options.preallocation {
        Preallocation::Prepared => CacheMode::None,
        _ => CacheMode::Writeback,
    };
    let storage = FileStorage::open(&OpenOptions::new(path).cache(cache))?;
    let (old, overlay, external) = match format {
        Format::Raw => (storage.len(), false, false),
        Format::Qcow2 => {
            refuse_left_behind(path)?;
            let header = read_header(&storage).await?;
            (header.disk_size(), header.backing_file.is_some(), has_data_file(&header))
        }
    };
    let new = check_size(old, options).context(failed)?;
    let disk = if (overlay && new > old) || external || options.data_file.is_some() {
        drop(storage);
        let chain = ChainOptions {
            format: Some(format),
            cache,
            allow_backing: options.allow_backing,
            backing_format: options.backing_format,
            passphrases: options.passphrases.clone(),
            allow_data_file: options.allow_data_file,
            data_file: options.data_file.clone(),
            ..ChainOptions::default()
        };
        open_chain(path, &chain).await?.disk
    } else {
        let layer = match format {
            Format::Raw => Layer::Raw(Arc::new(storage)),
            Format::Qcow2 => {
                let passphrases = options.passphrases.clone();
                let how = Qcow2Options { passphrases, ..Qcow2Options::default() };
                Layer::Qcow2(Arc::new(Qcow2::open(storage, &how).await?))
            }
        };
        Arc::new(Disk::new(path.display().to_string(), vec![layer], false, cache)?)
    };
    disk.resize(new, options.preallocation).await.context(failed)?;
    disk.close().await?;
    Ok(new)
}

fn check_size(old: ByteLen, options: &ResizeOptions) -> Result<ByteLen> {
    let invalid = |text: String| Err(Error::new(ErrorKind::InvalidInput, text));
    let Some(new) = options.size.of(old) else {
        return invalid(format!(
            "the new size must be larger than zero and not too large; the disk has {} bytes",
            old.get()
        ));
    };
    if new < old && !options.shrink {
        return invalid(format!(
            "the disk would shrink from {} to {} bytes, and all that lies beyond would be lost; use --shrink if \
             nothing there is needed",
            old.get(),
            new.get()
        ));
    }
    if new <= old && options.preallocation != Preallocation::Off {
        return invalid("--preallocation is for disks that grow".into());
    }
    Ok(new)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_absolute_or_relative() {
        let of = |text: &str| text.parse::<NewSize>().ok().and_then(|s| s.of(ByteLen::new(4096)));
        assert_eq!(of("1K"), Some(ByteLen::new(1024)));
        assert_eq!(of("+1K"), Some(ByteLen::new(5120)));
        assert_eq!(of("-1K"), Some(ByteLen::new(3072)));
        for bad in ["-4K", "-5K", "0", "+", "-", "", "+-1", "x"] {
            assert_eq!(of(bad), None, "{bad}");
        }
    }
}
