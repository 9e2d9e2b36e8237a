//! Making new images.
//!
//! Caller: the command. Everything is checked before the file is touched; a file that was not there before is
//! removed again when something fails, and one that another program uses is not touched.

use crate::chain::cannot_find;
use crate::encryption::NewEncryption;
use crate::name::{plain_path, resolve_backing};
use bedplate_qcow2::format::{CompressionType, NewImage};
use bedplate_qcow2::{OpenOptions as Qcow2Options, Passphrase, Qcow2, read_header};
use bedplate_runtime::buf::{AlignedBuf, IoVec, SharedBuf};
use bedplate_storage::{FileStorage, OpenOptions, Storage, ZeroMode, take_space};
use bedplate_types::{
    ByteLen, CacheMode, Error, ErrorKind, Format, HostOffset, Preallocation, Result, ResultExt,
    parse_size,
};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// The backing file of a new image.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Backing {
    /// Its name as it will be stored.
    pub name: PathBuf,
    /// Its format.
    pub format: Option<Format>,
    /// Do not look at it. The size must be given then.
    pub unchecked: bool,
}

/// What is to be created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CreateOptions {
    /// Where.
    pub path: PathBuf,
    /// In which format.
    pub format: Format,
    /// The disk's size; `None`: that of the backing file.
    pub size: Option<ByteLen>,
    /// Space that is taken at once.
    pub preallocation: Preallocation,
    /// The backing file.
    pub backing: Option<Backing>,
    /// The external data file that will hold the guest data, as its name will be stored; it is made too.
    pub data_file: Option<PathBuf>,
    /// That file reads as the disk at any time.
    pub data_file_raw: bool,
    /// What the image is like, for qcow2. Its size, backing file, data file and encryption are ignored.
    pub qcow2: NewImage,
    /// The encryption, for qcow2.
    pub encryption: NewEncryption,
    /// The passphrase of the encryption.
    pub passphrase: Option<Passphrase>,
}

/// What was created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Created {
    /// The disk's size.
    pub size: ByteLen,
}

fn invalid(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidInput, text)
}

fn on_off(key: &str, value: &str) -> Result<bool> {
    match value {
        "on" | "yes" | "true" => Ok(true),
        "off" | "no" | "false" => Ok(false),
        _ => Err(invalid(format!("{key}={value} must be on or off"))),
    }
}

impl CreateOptions {
    /// An image of `format` at `path` with nothing else set.
    pub fn new(path: impl Into<PathBuf>, format: Format) -> Self {
        Self {
            path: path.into(),
            format,
            size: None,
            preallocation: Preallocation::Off,
            backing: None,
            data_file: None,
            data_file_raw: false,
            qcow2: NewImage::default(),
            encryption: NewEncryption::default(),
            passphrase: None,
        }
    }

    /// Applies options as `-o` takes them: `key=value`, separated by commas; a comma in a value is doubled.
    ///
    /// # Errors
    /// `InvalidInput` or `Unsupported` with a sentence for an unknown option or a value that can't be.
    pub fn apply(&mut self, text: &str) -> Result<()> {
        // A doubled comma stands for one; NUL can't come from a command line.
        for part in text.replace(",,", "\0").split(',').filter(|part| !part.is_empty()) {
            let part = part.replace('\0', ",");
            let (key, value) = part.split_once('=').unwrap_or((&part, "on"));
            self.set(key, value)?;
        }
        Ok(())
    }

    fn set(&mut self, key: &str, value: &str) -> Result<()> {
        match (self.format, key) {
            (_, "size") => self.size = Some(parse_size(value)?),
            (_, "preallocation") => self.preallocation = value.parse()?,
            (Format::Qcow2, _) => return self.set_qcow2(key, value),
            (Format::Raw, _) => {
                return Err(invalid(format!(
                    "unknown option '{key}' for raw; known are size and preallocation"
                )));
            }
        }
        Ok(())
    }

    fn set_qcow2(&mut self, key: &str, value: &str) -> Result<()> {
        if self.encryption.set(key, value)? {
            return Ok(());
        }
        let new = &mut self.qcow2;
        match key {
            "cluster_size" => new.cluster_size = parse_size(value)?.get(),
            "compat" => {
                new.version = match value {
                    "0.10" | "v2" => 2,
                    "1.1" | "v3" => 3,
                    _ => {
                        return Err(invalid(format!(
                            "compat={value} is unknown; known are 0.10 (or v2) and 1.1 (or v3)"
                        )));
                    }
                }
            }
            "refcount_bits" => {
                new.refcount_bits = value
                    .parse()
                    .map_err(|_| invalid(format!("refcount_bits={value} is not a number")))?;
            }
            "lazy_refcounts" => new.lazy_refcounts = on_off(key, value)?,
            "compression_type" => {
                new.compression_type = match value {
                    "zlib" => CompressionType::Zlib,
                    "zstd" => CompressionType::Zstd,
                    _ => {
                        return Err(invalid(format!(
                            "compression_type={value} is unknown; known are zlib and zstd"
                        )));
                    }
                }
            }
            "backing_file" => self.backing.get_or_insert_default().name = value.into(),
            "backing_fmt" => {
                self.backing.get_or_insert_default().format = Some(value.parse()?);
            }
            "extended_l2" => new.extended_l2 = on_off(key, value)?,
            "data_file" => self.data_file = Some(value.into()),
            "data_file_raw" => self.data_file_raw = on_off(key, value)?,
            _ => {
                return Err(invalid(format!(
                    "unknown option '{key}' for qcow2; known are backing_file, backing_fmt, cluster_size, compat, \
                     compression_type, data_file, data_file_raw, encrypt.*, extended_l2, lazy_refcounts, preallocation, \
                     refcount_bits and size"
                )));
            }
        }
        Ok(())
    }
}

/// Makes the image.
///
/// # Errors
/// `InvalidInput` for options that don't go together, `Locked` when another program uses the file, or what the
/// storage reports.
pub async fn create(options: &CreateOptions) -> Result<Created> {
    let failed = || format!("cannot create '{}'", options.path.display());
    let backing_size = match &options.backing {
        Some(backing) => check_backing(options, backing).await.context(failed)?,
        None => None,
    };
    let Some(size) = options.size.or(backing_size) else {
        let text = "state the disk's size, for instance 10G";
        return Err(invalid(text)).context(failed);
    };
    match options.format {
        Format::Raw => create_raw(options, size).await.context(failed),
        Format::Qcow2 => create_qcow2(options, size).await.context(failed),
    }
}

/// Refuses a backing file that can't be; its size, unless it is not to be looked at.
async fn check_backing(options: &CreateOptions, backing: &Backing) -> Result<Option<ByteLen>> {
    if options.format == Format::Raw {
        return Err(invalid("raw images have no backing file; use -f qcow2"));
    }
    let below = resolve_backing(&options.path, backing.name.as_os_str().as_bytes())?;
    let shown = below.display();
    let Some(format) = backing.format else {
        return Err(invalid(format!(
            "state the format of the backing file '{shown}' with -F raw or -F qcow2"
        )));
    };
    if backing.unchecked {
        return Ok(None);
    }
    if is_same(&below, &options.path) {
        return Err(invalid("an image can't be its own backing file"));
    }
    let how = OpenOptions::new(&below).read_only(true).cache(CacheMode::Writeback);
    let storage = FileStorage::open(&how).context(|| {
        format!("the backing file '{shown}' can't be used (relative names are relative to the new image)")
    })?;
    match format {
        Format::Raw => Ok(Some(storage.len())),
        Format::Qcow2 => Ok(Some(read_header(&storage).await?.disk_size())),
    }
}

/// A file that is being made; it is removed again unless it is kept.
struct NewFile<'a> {
    path: &'a Path,
    /// It was not there before.
    remove: bool,
}

impl<'a> NewFile<'a> {
    /// Makes the file; also tells whether it is a device. What is to be written fast goes past the page cache.
    fn create(
        path: &'a Path,
        len: ByteLen,
        fill: Preallocation,
    ) -> Result<(Self, FileStorage, bool)> {
        let old = std::fs::metadata(path);
        let device = old.as_ref().is_ok_and(|m| m.file_type().is_block_device());
        let remove = old.is_err();
        // Devices are asked for the room; files grow when they are ours to remove again.
        let at_first = if device { len } else { ByteLen::ZERO };
        let how = OpenOptions::new(path).cache(CacheMode::Writeback).exclusive(remove);
        let storage = match fill {
            Preallocation::Prepared => {
                match FileStorage::create(&how.clone().cache(CacheMode::None), at_first) {
                    // A file system without direct I/O is filled all the same. The file is there by now.
                    Err(e) if e.kind() == ErrorKind::Unsupported => {
                        FileStorage::create(&how.exclusive(false), at_first)?
                    }
                    other => other?,
                }
            }
            _ => FileStorage::create(&how, at_first)?,
        };
        Ok((Self { path, remove }, storage, device))
    }

    /// From now on the file stays.
    fn keep(mut self) {
        self.remove = false;
    }
}

impl Drop for NewFile<'_> {
    fn drop(&mut self) {
        if self.remove
            && let Err(e) = std::fs::remove_file(self.path)
        {
            let e = cannot_find(self.path, e);
            tracing::warn!("cannot remove the unfinished image: {e:#}");
        }
    }
}

async fn create_raw(options: &CreateOptions, size: ByteLen) -> Result<Created> {
    let size = size.align_up(512).ok_or_else(|| invalid("the size is too large"))?;
    let fill = options.preallocation;
    if fill == Preallocation::Metadata {
        return Err(invalid(
            "raw images have no metadata; use preallocation=off, falloc, full or prepared",
        ));
    }
    let (file, storage, device) = NewFile::create(&options.path, size, fill)?;
    if device {
        if fill != Preallocation::Off {
            return Err(invalid("a block device has all its space; leave preallocation out"));
        }
    } else {
        let room = || format!("there is no room for {} bytes", size.get());
        storage.set_len(size).await.context(room)?;
        take_space(&storage, HostOffset::ZERO, size, fill).await.context(room)?;
    }
    storage.sync().await?;
    file.keep();
    Ok(Created { size })
}

async fn create_qcow2(options: &CreateOptions, size: ByteLen) -> Result<Created> {
    let fill = options.preallocation;
    if fill != Preallocation::Off && options.backing.is_some() {
        return Err(invalid(
            "an image over a backing file can't be preallocated: all of it would hide the backing file; leave one of \
             the two out",
        ));
    }
    let backing = options.backing.as_ref().map(|b| {
        let name = b.name.as_os_str().as_bytes().to_vec();
        (name, b.format.map(|f| f.to_string()))
    });
    let luks = options.encryption.make(options.passphrase.as_ref())?;
    let data_file = options.data_file.as_ref().map(|d| d.as_os_str().as_bytes().to_vec());
    let raw = options.data_file_raw;
    let new =
        NewImage { size, backing, data_file, data_file_raw: raw, luks, ..options.qcow2.clone() };
    let layout = new.layout()?;
    let data = match &options.data_file {
        Some(path) => Some(create_data_file(options, path, layout.header.disk_size()).await?),
        None => None,
    };
    let (data_file, data) = data.unzip();
    // The image itself stays small then.
    let of_image = if data.is_some() { Preallocation::Off } else { fill };
    let (file, storage, device) = NewFile::create(&options.path, layout.file_len, of_image)?;
    if device {
        let mode = ZeroMode { unmap: false, fast_only: false };
        storage.write_zeroes(HostOffset::ZERO, layout.file_len, mode).await?;
    } else {
        storage.set_len(layout.file_len).await?;
    }
    // The header comes last: until then this is no image.
    for (at, bytes) in layout.writes.iter().rev() {
        if *at == HostOffset::ZERO {
            storage.sync().await?;
        }
        storage.write(*at, iovec(bytes)?).await?;
    }
    storage.sync().await?;
    let size = layout.header.disk_size();
    // What reads as the disk is mapped as a whole from the beginning.
    let fill = if raw && fill == Preallocation::Off { Preallocation::Metadata } else { fill };
    if fill != Preallocation::Off && size > ByteLen::ZERO {
        let room = || format!("there is no room for {} bytes and their metadata", size.get());
        let how = Qcow2Options { metadata_only: true, ..Qcow2Options::default() };
        let image = Qcow2::open_with_data(storage, data, &how).await?;
        image.preallocate(fill).await.context(room)?;
        image.close().await?;
    }
    file.keep();
    data_file.into_iter().for_each(NewFile::keep);
    Ok(Created { size })
}

/// Makes the file for the guest data, as long as the disk and without content.
async fn create_data_file<'a>(
    options: &CreateOptions,
    path: &'a Path,
    size: ByteLen,
) -> Result<(NewFile<'a>, FileStorage)> {
    let shown = path.display();
    plain_path("data file", &options.path, path.as_os_str().as_bytes())?;
    let backing = options.backing.as_ref();
    let backing = backing.map(|b| resolve_backing(&options.path, b.name.as_os_str().as_bytes()));
    let others = [Some(options.path.clone()), backing.transpose()?];
    if others.iter().flatten().any(|other| is_same(other, path)) {
        return Err(invalid(format!(
            "'{shown}' can't hold the data of '{}': it is that image itself or its backing file",
            options.path.display()
        )));
    }
    let failed = || format!("cannot make the data file '{shown}'");
    let (file, storage, device) =
        NewFile::create(path, size, options.preallocation).context(failed)?;
    if device {
        let mode = ZeroMode { unmap: true, fast_only: false };
        storage.write_zeroes(HostOffset::ZERO, size, mode).await.context(failed)?;
    } else {
        storage.set_len(size).await.context(failed)?;
    }
    storage.sync().await.context(failed)?;
    Ok((file, storage))
}

/// True when both paths lead to one file, or would once it is made.
fn is_same(a: &Path, b: &Path) -> bool {
    let real = |path: &Path| {
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty());
        path.canonicalize().ok().or_else(|| {
            let folder = folder.unwrap_or(Path::new(".")).canonicalize().ok()?;
            Some(folder.join(path.file_name()?))
        })
    };
    real(a).is_some_and(|a| Some(a) == real(b))
}

fn iovec(bytes: &[u8]) -> Result<IoVec> {
    Ok(SharedBuf::new(AlignedBuf::from_slice(bytes)?).iovec())
}

impl fmt::Display for CreateOptions {
    /// The options that shape the image, as `-o` takes them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { format, qcow2: q, .. } = self;
        if *format == Format::Raw {
            return write!(f, "fmt=raw");
        }
        write!(
            f,
            "fmt=qcow2 cluster_size={} compat={} refcount_bits={} lazy_refcounts={} compression_type={}",
            q.cluster_size,
            if q.version == 2 { "0.10" } else { "1.1" },
            q.refcount_bits,
            if q.lazy_refcounts { "on" } else { "off" },
            q.compression_type.name()
        )?;
        write!(f, "{}", self.encryption)?;
        if let Some(b) = &self.backing {
            write!(f, " backing_file={}", b.name.display())?;
            if let Some(format) = b.format {
                write!(f, " backing_fmt={format}")?;
            }
        }
        if let Some(data) = &self.data_file {
            let raw = if self.data_file_raw { "on" } else { "off" };
            write!(f, " data_file={} data_file_raw={raw}", data.display())?;
        }
        Ok(())
    }
}
