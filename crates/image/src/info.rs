//! Describing an image without opening it as a disk: its header, its snapshots, its bitmaps.
//!
//! Caller: the command. Only the named file is opened; whatever features the image asks for, it is described.
//! Time and memory are bounded by the limits of the format, since tables of the disk are never read.

use crate::chain::{Seen, backing_of, looks_like_qcow2};
use crate::encryption::{EncryptInfo, encrypt_info};
use crate::name::{format_of, resolve_backing};
use bedplate_qcow2::format::{
    BitmapExtension, EXT_BITMAPS, EXT_DATA_FILE, Header, Snapshot, autoclear, check_supported,
    compat, incompat, printable,
};
use bedplate_qcow2::{read_header, read_luks_header, read_snapshots};
use bedplate_runtime::buf::SharedBuf;
use bedplate_storage::{FileStorage, LockMode, OpenOptions, Storage};
use bedplate_types::{CacheMode, Error, ErrorKind, Format, Result, ResultExt};
use serde::Serialize;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// How images are looked at.
#[derive(Clone, Copy, Debug, Default)]
pub struct InfoOptions {
    /// The format; `None`: the one that the extension tells.
    pub format: Option<Format>,
    /// The format of backing files whose overlay does not state it.
    pub backing_format: Option<Format>,
    /// Look although another program may be writing.
    pub force_share: bool,
}

/// A description of an image; serialised with the keys of `qemu-img info --output=json`.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct ImageInfo {
    /// The image's name as given.
    pub filename: String,
    /// Its format.
    pub format: String,
    /// The disk's size.
    pub virtual_size: u64,
    /// Bytes that the file takes on the host.
    pub actual_size: u64,
    /// Bytes of a cluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster_size: Option<u64>,
    /// The image is encrypted. Left out when it is not.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub encrypted: bool,
    /// It was not closed cleanly.
    pub dirty_flag: bool,
    /// The backing file's name as stored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing_filename: Option<String>,
    /// Where that is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub full_backing_filename: Option<String>,
    /// The backing file's format as stored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing_filename_format: Option<String>,
    /// Internal snapshots.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub snapshots: Vec<SnapshotInfo>,
    /// What only this format has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format_specific: Option<FormatSpecific>,
    /// Why this version can't use the image, when it can't. Not one of qemu-img's keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unsupported: Option<String>,
    /// The raw image's content looks like qcow2.
    #[serde(skip)]
    pub looks_like_qcow2: bool,
}

/// What only one format has.
#[derive(Clone, Debug, Serialize)]
pub struct FormatSpecific {
    /// The format: "qcow2".
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// The details.
    pub data: Qcow2Info,
}

/// What only qcow2 images have.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Qcow2Info {
    /// The version: "0.10" or "1.1".
    pub compat: &'static str,
    /// How compressed clusters are compressed.
    pub compression_type: &'static str,
    /// Refcounts may be written late (version 3).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lazy_refcounts: Option<bool>,
    /// Bits of a reference count.
    pub refcount_bits: u32,
    /// The image is marked corrupt (version 3).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub corrupt: Option<bool>,
    /// L2 entries describe subclusters (version 3).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub extended_l2: Option<bool>,
    /// The external data file's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_file: Option<String>,
    /// The external data file can be read as a raw image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_file_raw: Option<bool>,
    /// The encryption.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub encrypt: Option<EncryptInfo>,
    /// Persistent bitmaps.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub bitmaps: Vec<BitmapInfo>,
}

/// A persistent bitmap.
#[derive(Clone, Debug, Serialize)]
pub struct BitmapInfo {
    /// Its name.
    pub name: String,
    /// Bytes that one bit stands for.
    pub granularity: u64,
    /// "in-use" and "auto".
    pub flags: Vec<&'static str>,
}

/// An internal snapshot.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct SnapshotInfo {
    /// The unique id.
    pub id: String,
    /// The name.
    pub name: String,
    /// Bytes of VM state.
    pub vm_state_size: u64,
    /// Seconds since 1970 when it was taken.
    pub date_sec: u32,
    /// The nanoseconds within that second.
    pub date_nsec: u32,
    /// Seconds that the guest had run.
    pub vm_clock_sec: u64,
    /// The nanoseconds within that second.
    pub vm_clock_nsec: u64,
    /// The guest's instruction count, when it was counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub icount: Option<u64>,
}

/// Describes the image at `path`.
///
/// # Errors
/// `BadImage` when it is not of its format, or what opening and reading the file gives.
pub async fn info(path: &Path, options: &InfoOptions) -> Result<ImageInfo> {
    let format = format_of(path, options.format)?;
    Ok(look(path, format, options).await?.0)
}

/// Describes the image at `path` and all images under it, top first.
///
/// # Errors
/// As [`info`], for any of them; and for chains that are loops, too long, or name no format.
pub async fn backing_chain(path: &Path, options: &InfoOptions) -> Result<Vec<ImageInfo>> {
    let mut next = Some((path.to_path_buf(), format_of(path, options.format)?));
    let mut seen = Seen::default();
    let mut all = Vec::new();
    while let Some((path, format)) = next.take() {
        seen.add(&path)?;
        let (info, header) = look(&path, format, options).await?;
        all.push(info);
        let Some((below, format)) = header.map(|h| backing_of(&path, &h)).transpose()?.flatten()
        else {
            continue;
        };
        let Some(format) = format.or(options.backing_format) else {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!(
                    "'{}' does not state the format of its backing file '{}'; state it with --backing-format raw or \
                     --backing-format qcow2",
                    path.display(),
                    below.display()
                ),
            ));
        };
        next = Some((below, format));
    }
    Ok(all)
}

/// The file's own facts.
async fn look(
    path: &Path,
    format: Format,
    options: &InfoOptions,
) -> Result<(ImageInfo, Option<Header>)> {
    let lock = if options.force_share { LockMode::ForceShare } else { LockMode::Auto };
    let how = OpenOptions::new(path).read_only(true).cache(CacheMode::Writeback).lock(lock);
    let storage = FileStorage::open(&how)?;
    let blocks = std::fs::metadata(path)
        .map_err(|e| Error::io(format!("cannot look at '{}'", path.display()), e))?
        .blocks();
    let size = storage.len();
    let mut info = ImageInfo {
        filename: path.display().to_string(),
        format: format.to_string(),
        virtual_size: size.align_up(512).unwrap_or(size).get(),
        actual_size: blocks.saturating_mul(512),
        cluster_size: None,
        encrypted: false,
        dirty_flag: false,
        backing_filename: None,
        full_backing_filename: None,
        backing_filename_format: None,
        snapshots: Vec::new(),
        format_specific: None,
        unsupported: None,
        looks_like_qcow2: false,
    };
    if format == Format::Raw {
        info.looks_like_qcow2 = looks_like_qcow2(&storage).await;
        return Ok((info, None));
    }
    let header = read_header(&storage).await?;
    let snapshots = || format!("cannot read the snapshots of '{}'", path.display());
    if header.nb_snapshots > 0 {
        let (list, _) = read_snapshots(&storage, &header).await.context(snapshots)?;
        info.snapshots = list.iter().map(snapshot_info).collect();
    }
    describe_header(&mut info, path, &header)?;
    if let Some(specific) = &mut info.format_specific {
        if header.crypt_method == 2 {
            match read_luks_header(&storage, &header).await {
                Ok(luks) => {
                    let reason = luks.suite().and_then(|suite| luks.check_iterations(suite)).err();
                    info.unsupported = info.unsupported.or(reason.map(|e| format!("{e:#}")));
                    specific.data.encrypt = encrypt_info(&header, Some(&luks));
                }
                Err(e) => info.unsupported = Some(format!("{e:#}")),
            }
        }
        specific.data.bitmaps = bitmaps(&storage, &header)
            .await
            .context(|| format!("cannot read the bitmaps of '{}'", path.display()))?;
    }
    Ok((info, Some(header)))
}

fn describe_header(info: &mut ImageInfo, path: &Path, header: &Header) -> Result<()> {
    info.virtual_size = header.disk_size().get();
    info.cluster_size = Some(header.geometry()?.cluster_size());
    info.encrypted = header.crypt_method != 0;
    info.dirty_flag = header.incompatible & incompat::DIRTY != 0;
    if let Some(backing) = &header.backing_file {
        let name = printable(&backing.name);
        // What is no path is shown as it is.
        let full = resolve_backing(path, &backing.name).unwrap_or_else(|_| PathBuf::from(&name));
        info.full_backing_filename = Some(printable(full.as_os_str().as_encoded_bytes()));
        info.backing_filename = Some(name);
        info.backing_filename_format = header.backing_format().map(printable);
    }
    info.unsupported = check_supported(header, false).err().map(|e| format!("{e:#}"));
    info.format_specific = Some(FormatSpecific { kind: "qcow2", data: qcow2_info(header) });
    Ok(())
}

/// What only qcow2 images have, but for the bitmaps: those are not in the header.
pub(crate) fn qcow2_info(header: &Header) -> Qcow2Info {
    let v3 = |bit: bool| (header.version >= 3).then_some(bit);
    let external = header.incompatible & incompat::EXTERNAL_DATA != 0;
    Qcow2Info {
        compat: if header.version == 2 { "0.10" } else { "1.1" },
        compression_type: header.compression_type.name(),
        lazy_refcounts: v3(header.compatible & compat::LAZY_REFCOUNTS != 0),
        refcount_bits: 1 << header.refcount_order.min(6),
        corrupt: v3(header.incompatible & incompat::CORRUPT != 0),
        extended_l2: v3(header.incompatible & incompat::EXTENDED_L2 != 0),
        data_file: header.extension(EXT_DATA_FILE).filter(|_| external).map(printable),
        data_file_raw: external.then_some(header.autoclear & autoclear::RAW_EXTERNAL_DATA != 0),
        encrypt: encrypt_info(header, None),
        bitmaps: Vec::new(),
    }
}

pub(crate) fn snapshot_info(snapshot: &Snapshot) -> SnapshotInfo {
    SnapshotInfo {
        id: printable(&snapshot.id),
        name: printable(&snapshot.name),
        vm_state_size: snapshot.vm_state_size,
        date_sec: snapshot.date_sec,
        date_nsec: snapshot.date_nsec,
        vm_clock_sec: snapshot.vm_clock_nsec / 1_000_000_000,
        vm_clock_nsec: snapshot.vm_clock_nsec % 1_000_000_000,
        icount: snapshot.icount,
    }
}

async fn bitmaps(storage: &FileStorage, header: &Header) -> Result<Vec<BitmapInfo>> {
    // When the extension's bit is not set, a program that knows no bitmaps has written since: it means nothing.
    if header.autoclear & autoclear::BITMAPS == 0 {
        return Ok(Vec::new());
    }
    let Some(data) = header.extension(EXT_BITMAPS) else { return Ok(Vec::new()) };
    let geometry = header.geometry()?;
    let extension = BitmapExtension::parse(data, geometry)?;
    if extension.directory_offset.get() >= storage.len().get() {
        return Err(Error::new(
            ErrorKind::BadImage,
            "the bitmap directory lies beyond the end of the file",
        ));
    }
    let len = usize::try_from(extension.directory_size).unwrap_or(usize::MAX);
    let buf = SharedBuf::zeroed(len)?;
    storage.read(extension.directory_offset, buf.iovec()).await?;
    let found = extension.parse_directory(&buf.into_buf()?, geometry)?;
    Ok(found
        .iter()
        .map(|b| BitmapInfo {
            name: printable(&b.name),
            granularity: 1_u64.checked_shl(u32::from(b.granularity_bits)).unwrap_or(0),
            flags: [(1, "in-use"), (2, "auto")]
                .into_iter()
                .filter(|(bit, _)| b.flags & bit != 0)
                .map(|(_, name)| name)
                .collect(),
        })
        .collect())
}
