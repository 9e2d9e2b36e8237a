//! The first metadata of a new image: what must be written where, without writing it.
//!
//! Callers: `create` and tests. The order in the file is header, refcount table, refcount blocks, L1 table,
//! the encryption's header.
//! The refcount table is made long enough for the disk when all of it is allocated, so that it need not be
//! moved while a guest writes.

use super::features::{autoclear, compat, incompat};
use super::header::{
    EXT_BACKING_FORMAT, EXT_DATA_FILE, EXT_ENCRYPTION, EXT_FEATURE_NAMES, V2_HEADER_BYTES,
};
use super::{
    BackingFile, CompressionType, ENTRY_BYTES, Extension, Geometry, Header, RefcountFormat,
    encode_feature_names,
};
use bedplate_types::{ByteLen, Error, ErrorKind, HostOffset, Result, limits};

/// What a new image shall be like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewImage {
    /// The disk's size; rounded up to whole sectors of 512 bytes.
    pub size: ByteLen,
    /// 2 (`compat=0.10`) or 3 (`compat=1.1`).
    pub version: u32,
    /// Bytes of a cluster: a power of two from 512 to 2 MiB.
    pub cluster_size: u64,
    /// Bits of a reference count: a power of two from 1 to 64.
    pub refcount_bits: u32,
    /// L2 entries describe subclusters; clusters are 16 KiB or more.
    pub extended_l2: bool,
    /// Reference counts may be written late, under the dirty bit.
    pub lazy_refcounts: bool,
    /// How compressed clusters will be compressed.
    pub compression_type: CompressionType,
    /// The backing file's name and format.
    pub backing: Option<(Vec<u8>, Option<String>)>,
    /// The name of the external data file that holds the guest's data.
    pub data_file: Option<Vec<u8>>,
    /// That file reads as the disk.
    pub data_file_raw: bool,
    /// The encryption.
    pub luks: Option<LuksArea>,
}

/// The LUKS header of a new image, with its key material.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LuksArea {
    /// Its first bytes; the others are zero.
    pub bytes: Vec<u8>,
    /// All of it.
    pub len: ByteLen,
}

impl Default for NewImage {
    /// As `qemu-img create` without options, with a size of zero.
    fn default() -> Self {
        Self {
            size: ByteLen::ZERO,
            version: 3,
            cluster_size: 65536,
            refcount_bits: 16,
            extended_l2: false,
            lazy_refcounts: false,
            compression_type: CompressionType::Zlib,
            backing: None,
            luks: None,
            data_file: None,
            data_file_raw: false,
        }
    }
}

/// The metadata of a new image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The header as it will be.
    pub header: Header,
    /// What to write, in ascending order; everything else up to `file_len` must read as zeroes.
    pub writes: Vec<(HostOffset, Vec<u8>)>,
    /// The file's length.
    pub file_len: ByteLen,
}

fn invalid(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidInput, text)
}

/// Sizes of the parts in clusters, in file order behind the header's cluster.
struct Parts {
    table: u64,
    blocks: u64,
    l1: u64,
    luks: u64,
}

impl Parts {
    fn total(&self) -> u64 {
        1 + self.table + self.blocks + self.l1 + self.luks
    }
}

impl NewImage {
    /// Works out the metadata.
    ///
    /// # Errors
    /// `InvalidInput` with a sentence for options that don't go together and for a disk that is too large
    /// for its cluster size.
    pub fn layout(&self) -> Result<Layout> {
        let (geometry, refcounts) = self.check_options()?;
        let cluster = geometry.cluster_size();
        let size = self
            .size
            .align_up(512)
            .filter(|s| *s <= geometry.max_disk_size())
            .ok_or_else(|| self.too_large(geometry))?;
        let l1_entries = geometry.l1_entries(size);
        let luks = self.luks.as_ref().map_or(0, |l| l.len.get().div_ceil(cluster));
        let parts = Self::place(geometry, refcounts, size, l1_entries * ENTRY_BYTES, luks)?;
        let at = |index: u64| {
            geometry.host_offset(index).ok_or_else(|| invalid("the image's metadata is too large"))
        };
        let small = |v: u64| u32::try_from(v).map_err(|_| invalid("a table is too large"));
        let blocks_at = 1 + parts.table;
        let l1_at = blocks_at + parts.blocks;
        let luks_at = at(l1_at + parts.l1)?;
        let header = self.header(
            luks_at,
            Header {
                size,
                cluster_bits: geometry.cluster_bits(),
                refcount_order: self.refcount_bits.trailing_zeros(),
                refcount_table_offset: at(1)?,
                refcount_table_clusters: small(parts.table)?,
                l1_size: small(l1_entries)?,
                l1_offset: if l1_entries == 0 { HostOffset::ZERO } else { at(l1_at)? },
                ..Header::default()
            },
        );
        let mut writes = vec![(HostOffset::ZERO, Self::encode_header(header.clone())?)];
        let header = Header::parse(&padded(&writes[0].1, cluster)?)?;

        let mut table = Vec::new();
        for block in 0..parts.blocks {
            table.extend_from_slice(&at(blocks_at + block)?.get().to_be_bytes());
        }
        writes.push((at(1)?, table));
        let total = parts.total();
        for block in 0..parts.blocks {
            let first = block * refcounts.entries_per_block();
            let used = (total - first).min(refcounts.entries_per_block());
            let mut bytes = padded(&[], cluster)?;
            let used =
                usize::try_from(used).map_err(|_| invalid("a refcount block is too large"))?;
            refcounts.fill(&mut bytes, 0..used, 1).map_err(|e| invalid(e.to_string()))?;
            writes.push((at(blocks_at + block)?, bytes));
        }
        if let Some(luks) = &self.luks {
            writes.push((luks_at, luks.bytes.clone()));
        }
        Ok(Layout { header, writes, file_len: ByteLen::new(at(total)?.get()) })
    }

    fn check_options(&self) -> Result<(Geometry, RefcountFormat)> {
        if !self.cluster_size.is_power_of_two() {
            return Err(invalid(format!(
                "the cluster size of {} bytes is not a power of two from 512 bytes to 2 MiB",
                self.cluster_size
            )));
        }
        let geometry = if self.extended_l2 { Geometry::extended } else { Geometry::new };
        let geometry = geometry(self.cluster_size.trailing_zeros())
            .map_err(|e| e.with_kind(ErrorKind::InvalidInput))?;
        if !self.refcount_bits.is_power_of_two() || self.refcount_bits > 64 {
            return Err(invalid(format!(
                "refcount_bits={} is not a power of two from 1 to 64",
                self.refcount_bits
            )));
        }
        if !(2..=3).contains(&self.version) {
            return Err(invalid(format!("qcow2 has versions 2 and 3, not {}", self.version)));
        }
        if self.version == 2 {
            let what = if self.refcount_bits != 16 {
                Some("reference counts other than 16 bits")
            } else if self.lazy_refcounts {
                Some("lazy refcounts")
            } else if self.extended_l2 {
                Some("extended L2 entries")
            } else if self.data_file.is_some() {
                Some("external data files")
            } else if self.compression_type != CompressionType::Zlib {
                Some("zstd compression")
            } else {
                None
            };
            if let Some(what) = what {
                return Err(invalid(format!("{what} need compat=1.1 (version 3)")));
            }
        }
        self.check_data_file()?;
        if let Some((name, format)) = &self.backing {
            if name.is_empty() || name.len() as u64 > u64::from(limits::MAX_BACKING_NAME) {
                return Err(invalid(format!(
                    "the backing file's name is {} bytes long; 1 to {} are allowed",
                    name.len(),
                    limits::MAX_BACKING_NAME
                )));
            }
            if name.contains(&0) || format.as_ref().is_some_and(|f| f.is_empty() || f.len() > 15) {
                return Err(invalid("the backing file's name or format can't be stored"));
            }
        }
        Ok((geometry, RefcountFormat::new(self.refcount_bits.trailing_zeros(), geometry)?))
    }

    fn check_data_file(&self) -> Result<()> {
        match &self.data_file {
            None if self.data_file_raw => Err(invalid(
                "data_file_raw=on says something about a data file; name one with data_file",
            )),
            Some(_) if self.data_file_raw && self.backing.is_some() => Err(invalid(
                "a data file that reads as the disk (data_file_raw=on) can't lie over a backing file; leave one of the \
                 two out",
            )),
            Some(_) if self.luks.is_some() => Err(invalid(
                "an encrypted image can't have an external data file; leave one of the two out",
            )),
            Some(name) if name.len() as u64 > u64::from(limits::MAX_BACKING_NAME) => {
                Err(invalid(format!(
                    "the data file's name is {} bytes long; 1 to {} are allowed",
                    name.len(),
                    limits::MAX_BACKING_NAME
                )))
            }
            _ => Ok(()),
        }
    }

    fn too_large(&self, geometry: Geometry) -> Error {
        let hint = if geometry.cluster_bits() < super::MAX_CLUSTER_BITS {
            "; choose a larger cluster_size"
        } else {
            ""
        };
        invalid(format!(
            "a disk of {} bytes is too large for clusters of {} bytes: the most is {} bytes{hint}",
            self.size.get(),
            self.cluster_size,
            geometry.max_disk_size().get()
        ))
    }

    /// Sizes of the parts: blocks that count all of them, a table for the fully allocated disk.
    fn place(
        geometry: Geometry,
        refcounts: RefcountFormat,
        size: ByteLen,
        l1_bytes: u64,
        luks: u64,
    ) -> Result<Parts> {
        let cluster = geometry.cluster_size();
        let l1 = l1_bytes.div_ceil(cluster);
        // Guest data, L2 tables, and the blocks that count them, with some room for what moves.
        let data = geometry.clusters(size);
        let tables = geometry.l1_entries(size) + l1 + luks;
        let used = data.saturating_add(tables);
        let full = used.saturating_add(refcounts.blocks_for(used)).saturating_add(used / 64 + 64);
        let wanted =
            refcounts.blocks_for(full).saturating_add(2).min(RefcountFormat::max_table_entries());
        let table = wanted.saturating_mul(ENTRY_BYTES).div_ceil(cluster);
        let mut parts = Parts { table, blocks: 1, l1, luks };
        // Blocks count themselves, so their number grows until it fits; each step adds at least one.
        loop {
            let needed = refcounts.blocks_for(parts.total());
            if needed <= parts.blocks {
                break;
            }
            parts.blocks = needed;
        }
        if parts.blocks > parts.table * cluster / ENTRY_BYTES {
            return Err(invalid(format!(
                "a disk of {} bytes needs more metadata than {}-bit reference counts and clusters of {cluster} bytes can count; \
                 choose a larger cluster_size or smaller refcount_bits",
                size.get(),
                refcounts.bits()
            )));
        }
        Ok(parts)
    }

    fn header(&self, luks_at: HostOffset, tables: Header) -> Header {
        let mut h = Header { version: self.version, ..tables };
        if let Some(luks) = &self.luks {
            h.crypt_method = 2;
            let data = [luks_at.get().to_be_bytes(), luks.len.get().to_be_bytes()].concat();
            h.extensions.push(Extension { id: EXT_ENCRYPTION, data });
        }
        if let Some((name, format)) = &self.backing {
            h.backing_file = Some(BackingFile { offset: HostOffset::ZERO, name: name.clone() });
            if let Some(format) = format {
                let data = format.clone().into_bytes();
                h.extensions.push(Extension { id: EXT_BACKING_FORMAT, data });
            }
        }
        if self.version == 2 {
            h.header_length = V2_HEADER_BYTES;
            h.unknown_fields = Vec::new();
            return h;
        }
        h.compression_type = self.compression_type;
        if self.compression_type != CompressionType::Zlib {
            h.incompatible |= incompat::COMPRESSION;
        }
        if self.extended_l2 {
            h.incompatible |= incompat::EXTENDED_L2;
        }
        if self.lazy_refcounts {
            h.compatible |= compat::LAZY_REFCOUNTS;
        }
        if let Some(name) = &self.data_file {
            h.incompatible |= incompat::EXTERNAL_DATA;
            if self.data_file_raw {
                h.autoclear |= autoclear::RAW_EXTERNAL_DATA;
            }
            h.extensions.push(Extension { id: EXT_DATA_FILE, data: name.clone() });
        }
        h.extensions.push(Extension { id: EXT_FEATURE_NAMES, data: encode_feature_names() });
        h
    }

    /// The header's bytes, without the feature names when they don't fit beside the backing file's name.
    fn encode_header(mut header: Header) -> Result<Vec<u8>> {
        if let Ok(bytes) = header.encode() {
            return Ok(bytes);
        }
        header.extensions.retain(|e| e.id != EXT_FEATURE_NAMES);
        header.encode()
    }
}

fn padded(bytes: &[u8], len: u64) -> Result<Vec<u8>> {
    let len = usize::try_from(len).map_err(|_| invalid("the cluster size is too large"))?;
    let mut out = bytes.to_vec();
    out.resize(len.max(bytes.len()), 0);
    Ok(out)
}
