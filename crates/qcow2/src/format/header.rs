//! The image header of versions 2 and 3, its extensions and the backing file's name.
//!
//! Callers: opening, `info`, the checker, the layout of new images. Everything up to the end of the first
//! cluster belongs to the header. Invariant: a [`Header`] that [`Header::parse`] returned has every size,
//! offset and count within the limits, so later code may allocate and loop by them.

use super::bytes::{be32, be64, pad8};
use super::features::{autoclear, compat, incompat};
use super::{ENTRY_BYTES, Geometry, RefcountFormat};
use bedplate_types::{ByteLen, Error, ErrorKind, HostOffset, Result, limits};

/// The first four bytes of an image: "QFI" and 0xfb.
pub const MAGIC: u32 = 0x5146_49fb;
/// Bytes of the header of version 2.
pub const V2_HEADER_BYTES: u32 = 72;
/// The least bytes of the header of version 3.
pub const V3_HEADER_BYTES: u32 = 104;
/// Bytes of the header that new version 3 images have: with the compression type.
pub const V3_FULL_HEADER_BYTES: u32 = 112;

/// Byte offsets of the header fields that are changed in place.
pub mod field {
    /// The virtual size, 8 bytes.
    pub const SIZE: u64 = 24;
    /// The L1 table's number of entries, 4 bytes.
    pub const L1_SIZE: u64 = 36;
    /// The L1 table's offset, 8 bytes.
    pub const L1_OFFSET: u64 = 40;
    /// The refcount table's offset, 8 bytes, and behind it its number of clusters, 4 bytes.
    pub const REFCOUNT_TABLE: u64 = 48;
    /// The incompatible feature bits, 8 bytes (version 3).
    pub const INCOMPATIBLE: u64 = 72;
    /// The compatible feature bits, 8 bytes (version 3).
    pub const COMPATIBLE: u64 = 80;
    /// The autoclear feature bits, 8 bytes (version 3).
    pub const AUTOCLEAR: u64 = 88;
}

/// The end of the header extensions.
pub const EXT_END: u32 = 0;
/// The backing file's format, as text.
pub const EXT_BACKING_FORMAT: u32 = 0xe279_2aca;
/// The feature name table.
pub const EXT_FEATURE_NAMES: u32 = 0x6803_f857;
/// The bitmaps extension.
pub const EXT_BITMAPS: u32 = 0x2385_2875;
/// The full disk encryption header's place.
pub const EXT_ENCRYPTION: u32 = 0x0537_be77;
/// The external data file's name.
pub const EXT_DATA_FILE: u32 = 0x4441_5441;

/// How compressed clusters are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum CompressionType {
    /// Raw deflate.
    #[default]
    Zlib,
    /// Zstandard.
    Zstd,
}

impl CompressionType {
    /// The name that qemu-img uses.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Zlib => "zlib",
            Self::Zstd => "zstd",
        }
    }
}

/// A header extension, kept as it is whether it is known or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extension {
    /// The extension's type.
    pub id: u32,
    /// Its data without padding.
    pub data: Vec<u8>,
}

/// The backing file as the header names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackingFile {
    /// Where the name lies in the first cluster; zero lets [`Header::encode`] choose.
    pub offset: HostOffset,
    /// The name's bytes.
    pub name: Vec<u8>,
}

/// An image header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    /// The backing file, if there is one.
    pub backing_file: Option<BackingFile>,
    /// The cluster size as a power of two.
    pub cluster_bits: u32,
    /// The disk's size as the header has it; see [`Self::disk_size`].
    pub size: ByteLen,
    /// 0: none, 1: AES, 2: LUKS.
    pub crypt_method: u32,
    /// Entries of the active L1 table.
    pub l1_size: u32,
    /// The active L1 table.
    pub l1_offset: HostOffset,
    /// The refcount table.
    pub refcount_table_offset: HostOffset,
    /// The refcount table's length in clusters.
    pub refcount_table_clusters: u32,
    /// Number of internal snapshots.
    pub nb_snapshots: u32,
    /// The snapshot table; meaningless without snapshots.
    pub snapshots_offset: HostOffset,
    /// Incompatible feature bits.
    pub incompatible: u64,
    /// Compatible feature bits.
    pub compatible: u64,
    /// Autoclear feature bits.
    pub autoclear: u64,
    /// Reference counts are `1 << refcount_order` bits wide.
    pub refcount_order: u32,
    /// Bytes of the header itself.
    pub header_length: u32,
    /// How compressed clusters are compressed.
    pub compression_type: CompressionType,
    /// What follows the compression type inside the header, as it was.
    pub unknown_fields: Vec<u8>,
    /// The header extensions in order.
    pub extensions: Vec<Extension>,
}

impl Default for Header {
    /// An empty version 3 image of 64 KiB clusters and 16-bit counts that has no tables.
    fn default() -> Self {
        Self {
            version: 3,
            backing_file: None,
            cluster_bits: 16,
            size: ByteLen::ZERO,
            crypt_method: 0,
            l1_size: 0,
            l1_offset: HostOffset::ZERO,
            refcount_table_offset: HostOffset::ZERO,
            refcount_table_clusters: 0,
            nb_snapshots: 0,
            snapshots_offset: HostOffset::ZERO,
            incompatible: 0,
            compatible: 0,
            autoclear: 0,
            refcount_order: 4,
            header_length: V3_FULL_HEADER_BYTES,
            compression_type: CompressionType::Zlib,
            unknown_fields: vec![0; 7],
            extensions: Vec::new(),
        }
    }
}

fn bad(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::BadImage, text)
}

fn short() -> Error {
    bad("the file ends inside the qcow2 header")
}

impl Header {
    /// How many bytes from the start of the file [`Self::parse`] needs: the first cluster.
    /// `start` holds at least the first 24 bytes.
    ///
    /// # Errors
    /// `BadImage` when this is no qcow2 image or its cluster size is not allowed; `Unsupported` for a
    /// version other than 2 and 3.
    pub fn bytes_needed(start: &[u8]) -> Result<usize> {
        let geometry = Geometry::new(Self::check_magic(start)?)?;
        usize::try_from(geometry.cluster_size()).map_err(|_| bad("the cluster size is too large"))
    }

    /// Checks magic and version; returns the cluster bits, unchecked.
    fn check_magic(bytes: &[u8]) -> Result<u32> {
        if be32(bytes, 0).ok_or_else(short)? != MAGIC {
            return Err(bad("the file is not a qcow2 image: it does not start with 'QFI\\xfb'"));
        }
        let version = be32(bytes, 4).ok_or_else(short)?;
        if !(2..=3).contains(&version) {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "the image has version {version} of the qcow2 format; supported are 2 and 3"
                ),
            ));
        }
        be32(bytes, 20).ok_or_else(short)
    }

    /// Reads the header from the file's first cluster. Bytes past a file's end must be given as zeroes.
    ///
    /// Features are not judged here, so that `info` can describe any image: see
    /// [`super::check_supported`].
    ///
    /// # Errors
    /// `BadImage` with a sentence when anything breaks the specification or leaves its bounds,
    /// `Unsupported` for unknown versions and compression types.
    pub fn parse(cluster: &[u8]) -> Result<Self> {
        let cluster_bits = Self::check_magic(cluster)?;
        let geometry = Geometry::new(cluster_bits)?;
        let u32_at = |at| be32(cluster, at).ok_or_else(short);
        let u64_at = |at| be64(cluster, at).ok_or_else(short);
        let mut header = Self {
            version: u32_at(4)?,
            cluster_bits,
            size: ByteLen::new(u64_at(24)?),
            crypt_method: u32_at(32)?,
            l1_size: u32_at(36)?,
            l1_offset: HostOffset::new(u64_at(40)?),
            refcount_table_offset: HostOffset::new(u64_at(48)?),
            refcount_table_clusters: u32_at(56)?,
            nb_snapshots: u32_at(60)?,
            snapshots_offset: HostOffset::new(u64_at(64)?),
            header_length: V2_HEADER_BYTES,
            unknown_fields: Vec::new(),
            ..Self::default()
        };
        if header.version >= 3 {
            header.parse_v3(cluster, geometry)?;
        }
        header.check_tables(geometry)?;
        let extensions_end = header.parse_backing_name(cluster, geometry)?;
        header.parse_extensions(cluster, extensions_end)?;
        Ok(header)
    }

    fn parse_v3(&mut self, cluster: &[u8], geometry: Geometry) -> Result<()> {
        let u64_at = |at| be64(cluster, at).ok_or_else(short);
        self.incompatible = u64_at(72)?;
        self.compatible = u64_at(80)?;
        self.autoclear = u64_at(88)?;
        self.refcount_order = be32(cluster, 96).ok_or_else(short)?;
        self.header_length = be32(cluster, 100).ok_or_else(short)?;
        let len = self.header_length;
        if len < V3_HEADER_BYTES || !len.is_multiple_of(8) {
            return Err(bad(format!(
                "the header says that it is {len} bytes long; it must be a multiple of 8 and at least 104"
            )));
        }
        if u64::from(len) > geometry.cluster_size() {
            return Err(bad(format!(
                "the header is {len} bytes long and does not fit in the first cluster of {} bytes",
                geometry.cluster_size()
            )));
        }
        let end = usize::try_from(len).map_err(|_| short())?;
        let extra = cluster.get(V3_HEADER_BYTES as usize..end).ok_or_else(short)?;
        let (kind, rest) = extra.split_first().map_or((0, &[][..]), |(k, rest)| (*k, rest));
        self.unknown_fields = rest.to_vec();
        let flagged = self.incompatible & incompat::COMPRESSION != 0;
        self.compression_type = match kind {
            0 => CompressionType::Zlib,
            1 => CompressionType::Zstd,
            other => {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    format!("the image has the unknown compression type {other}"),
                ));
            }
        };
        if flagged != (kind != 0) {
            return Err(bad(format!(
                "the compression type is {kind} but the feature bit that announces a type other than zlib is {}",
                if flagged { "set" } else { "not set" }
            )));
        }
        Ok(())
    }

    /// Bounds of all tables that the header names.
    fn check_tables(&self, geometry: Geometry) -> Result<()> {
        RefcountFormat::new(self.refcount_order, geometry)?;
        let max = geometry.cluster_size();
        let table = |what: &str, at: HostOffset, bytes: u64| {
            if !at.is_aligned(max) {
                return Err(bad(format!(
                    "the {what}'s offset {at} is not a multiple of the cluster size"
                )));
            }
            match at.get().checked_add(bytes) {
                Some(end) if end <= i64::MAX as u64 => Ok(()),
                _ => Err(bad(format!("the {what} at {at} ends beyond the largest file offset"))),
            }
        };
        let reftable = u64::from(self.refcount_table_clusters)
            .checked_mul(max)
            .filter(|bytes| *bytes <= limits::MAX_REFTABLE_BYTES)
            .ok_or_else(|| {
                bad(format!(
                    "the refcount table has {} clusters; at most {} bytes are allowed",
                    self.refcount_table_clusters,
                    limits::MAX_REFTABLE_BYTES
                ))
            })?;
        if reftable == 0 || self.refcount_table_offset == HostOffset::ZERO {
            return Err(bad("the image has no refcount table"));
        }
        table("refcount table", self.refcount_table_offset, reftable)?;
        if self.nb_snapshots > limits::MAX_SNAPSHOTS {
            return Err(bad(format!(
                "the image has {} snapshots; at most {} are allowed",
                self.nb_snapshots,
                limits::MAX_SNAPSHOTS
            )));
        }
        if self.nb_snapshots > 0 {
            let least = u64::from(self.nb_snapshots) * super::snapshot::FIXED_BYTES as u64;
            table("snapshot table", self.snapshots_offset, least)?;
            if self.snapshots_offset == HostOffset::ZERO {
                return Err(bad("the snapshot table's offset is zero"));
            }
        }
        let l1_bytes = u64::from(self.l1_size) * ENTRY_BYTES;
        if l1_bytes > limits::MAX_L1_BYTES {
            return Err(bad(format!(
                "the L1 table has {} entries; at most {} are allowed",
                self.l1_size,
                limits::MAX_L1_BYTES / ENTRY_BYTES
            )));
        }
        table("L1 table", self.l1_offset, l1_bytes)?;
        if l1_bytes > 0 && self.l1_offset == HostOffset::ZERO {
            return Err(bad("the L1 table's offset is zero"));
        }
        self.check_size()
    }

    /// The disk must fit its L1 table; with unknown features the table can't be judged.
    fn check_size(&self) -> Result<()> {
        if self.incompatible & !incompat::KNOWN != 0 {
            return Ok(());
        }
        let geometry = if self.incompatible & incompat::EXTENDED_L2 != 0 {
            Geometry::extended(self.cluster_bits)?
        } else {
            Geometry::new(self.cluster_bits)?
        };
        if self.size > geometry.max_disk_size() {
            return Err(bad(format!(
                "the disk's size of {} bytes is too large for clusters of {} bytes",
                self.size.get(),
                geometry.cluster_size()
            )));
        }
        let needed = geometry.l1_entries(self.size);
        if needed > u64::from(self.l1_size) {
            return Err(bad(format!(
                "the L1 table has {} entries, too few for a disk of {} bytes, which needs {needed}",
                self.l1_size,
                self.size.get()
            )));
        }
        Ok(())
    }

    /// Reads the backing file's name; returns where the extensions must end.
    fn parse_backing_name(&mut self, cluster: &[u8], geometry: Geometry) -> Result<u64> {
        let offset = be64(cluster, 8).ok_or_else(short)?;
        let len = be32(cluster, 16).ok_or_else(short)?;
        if offset == 0 {
            return Ok(geometry.cluster_size());
        }
        if offset < u64::from(self.header_length) || offset > geometry.cluster_size() {
            return Err(bad(format!(
                "the backing file's name lies at {offset:#x}, outside of the rest of the first cluster"
            )));
        }
        if len > limits::MAX_BACKING_NAME {
            return Err(bad(format!(
                "the backing file's name is {len} bytes long; at most {} are allowed",
                limits::MAX_BACKING_NAME
            )));
        }
        // Both are small, so the sum can't wrap.
        let end = offset + u64::from(len);
        if end > geometry.cluster_size() {
            return Err(bad("the backing file's name does not end inside the first cluster"));
        }
        let range = usize::try_from(offset).ok().zip(usize::try_from(end).ok());
        let name = range.and_then(|(a, b)| cluster.get(a..b)).ok_or_else(short)?;
        if name.contains(&0) {
            return Err(bad("the backing file's name contains a zero byte"));
        }
        if !name.is_empty() {
            self.backing_file =
                Some(BackingFile { offset: HostOffset::new(offset), name: name.to_vec() });
        }
        Ok(offset)
    }

    fn parse_extensions(&mut self, cluster: &[u8], end: u64) -> Result<()> {
        let end = usize::try_from(end).map_err(|_| short())?;
        let area = cluster.get(..end).ok_or_else(short)?;
        let mut at = usize::try_from(self.header_length).map_err(|_| short())?;
        // Each step moves at least 8 bytes on. Less than an extension's head is left over as padding.
        while let (Some(id), Some(len)) = (be32(area, at), be32(area, at + 4)) {
            if id == EXT_END {
                break;
            }
            let start = at + 8;
            let data = usize::try_from(len)
                .ok()
                .and_then(|len| area.get(start..)?.get(..len))
                .ok_or_else(|| {
                    bad(format!(
                        "header extension {id:#010x} of {len} bytes does not fit where it lies, at {at:#x}"
                    ))
                })?;
            self.extensions.push(Extension { id, data: data.to_vec() });
            at = pad8(data.len()).and_then(|n| start.checked_add(n)).ok_or_else(short)?;
        }
        Ok(())
    }

    /// The geometry of the image's tables.
    ///
    /// # Errors
    /// `BadImage` when the cluster size is not allowed.
    pub fn geometry(&self) -> Result<Geometry> {
        if self.incompatible & incompat::EXTENDED_L2 != 0 {
            Geometry::extended(self.cluster_bits)
        } else {
            Geometry::new(self.cluster_bits)
        }
    }

    /// How the image counts references.
    ///
    /// # Errors
    /// `BadImage` when the width or the cluster size is not allowed.
    pub fn refcounts(&self) -> Result<RefcountFormat> {
        RefcountFormat::new(self.refcount_order, self.geometry()?)
    }

    /// The size that a guest sees: whole sectors of 512 bytes, as QEMU shows it.
    pub const fn disk_size(&self) -> ByteLen {
        self.size.align_down(512)
    }

    /// True when reference counts may be written late.
    pub const fn lazy_refcounts(&self) -> bool {
        self.compatible & compat::LAZY_REFCOUNTS != 0
    }

    /// True when the bitmaps extension can be trusted.
    pub const fn bitmaps_valid(&self) -> bool {
        self.autoclear & autoclear::BITMAPS != 0
    }

    /// The data of the extension `id`; of several the last, as QEMU takes it.
    pub fn extension(&self, id: u32) -> Option<&[u8]> {
        self.extensions.iter().rev().find(|e| e.id == id).map(|e| e.data.as_slice())
    }

    /// The backing file's format as the header states it.
    pub fn backing_format(&self) -> Option<&[u8]> {
        self.extension(EXT_BACKING_FORMAT).filter(|f| !f.is_empty())
    }

    /// The bytes that belong at the start of the file: header, extensions and backing name, without the
    /// zeroes that fill the rest of the first cluster.
    ///
    /// # Errors
    /// `InvalidInput` when they don't fit in the first cluster, or a version 2 header can't express them.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let no = |text: String| Error::new(ErrorKind::InvalidInput, text);
        let mut out = self.encode_fields()?;
        let mut extension = |id: u32, data: &[u8]| {
            let len = u32::try_from(data.len())
                .map_err(|_| no(format!("header extension {id:#010x} is too long")))?;
            out.extend_from_slice(&id.to_be_bytes());
            out.extend_from_slice(&len.to_be_bytes());
            out.extend_from_slice(data);
            out.resize(out.len().next_multiple_of(8), 0);
            Ok(())
        };
        for e in &self.extensions {
            extension(e.id, &e.data)?;
        }
        extension(EXT_END, &[])?;
        if let Some(backing) = &self.backing_file {
            let len = u32::try_from(backing.name.len())
                .ok()
                .filter(|len| (1..=limits::MAX_BACKING_NAME).contains(len))
                .ok_or_else(|| {
                    no(format!(
                        "the backing file's name is {} bytes long; 1 to {} are allowed",
                        backing.name.len(),
                        limits::MAX_BACKING_NAME
                    ))
                })?;
            // The name stays where it was when the extensions still leave that place free.
            let wanted = usize::try_from(backing.offset.get()).unwrap_or(0);
            let at = if wanted >= out.len() && wanted <= 1 << super::MAX_CLUSTER_BITS {
                wanted
            } else {
                out.len()
            };
            out.resize(at, 0);
            out.extend_from_slice(&backing.name);
            out[8..16].copy_from_slice(&(at as u64).to_be_bytes());
            out[16..20].copy_from_slice(&len.to_be_bytes());
        }
        let room = self.geometry()?.cluster_size();
        if out.len() as u64 > room {
            return Err(no(format!(
                "header, extensions and backing file name need {} bytes but must fit in the first cluster of {room}; \
                 choose a larger cluster size or a shorter name",
                out.len()
            )));
        }
        Ok(out)
    }

    /// The header proper, without a backing file.
    fn encode_fields(&self) -> Result<Vec<u8>> {
        let no = |text: &str| Err(Error::new(ErrorKind::InvalidInput, text));
        let mut out = Vec::with_capacity(1024);
        let mut put32 = |v: u32| out.extend_from_slice(&v.to_be_bytes());
        let halves = |v: u64| [(v >> 32) as u32, v as u32];
        let fields = [MAGIC, self.version, 0, 0, 0, self.cluster_bits];
        fields.into_iter().for_each(&mut put32);
        halves(self.size.get()).into_iter().for_each(&mut put32);
        put32(self.crypt_method);
        put32(self.l1_size);
        halves(self.l1_offset.get()).into_iter().for_each(&mut put32);
        halves(self.refcount_table_offset.get()).into_iter().for_each(&mut put32);
        put32(self.refcount_table_clusters);
        put32(self.nb_snapshots);
        halves(self.snapshots_offset.get()).into_iter().for_each(&mut put32);
        if self.version == 2 {
            let plain = self.incompatible | self.compatible | self.autoclear == 0
                && self.refcount_order == 4
                && self.compression_type == CompressionType::Zlib;
            return if plain {
                Ok(out)
            } else {
                no(
                    "version 2 (compat=0.10) has no feature bits, only 16-bit reference counts and zlib; \
                    use version 3 (compat=1.1)",
                )
            };
        }
        for bits in [self.incompatible, self.compatible, self.autoclear] {
            halves(bits).into_iter().for_each(&mut put32);
        }
        put32(self.refcount_order);
        put32(self.header_length);
        if self.header_length > V3_HEADER_BYTES {
            out.push(match self.compression_type {
                CompressionType::Zlib => 0,
                CompressionType::Zstd => 1,
            });
            out.extend_from_slice(&self.unknown_fields);
        } else if self.compression_type != CompressionType::Zlib {
            return no("a header of 104 bytes has no room for the compression type");
        }
        if out.len() as u64 != u64::from(self.header_length) {
            return no("the header's length does not agree with its fields");
        }
        Ok(out)
    }
}
