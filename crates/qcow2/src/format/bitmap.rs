//! Persistent dirty bitmaps: their directory and their tables.
//!
//! Callers: `info` (names), the checker (clusters in use), and the engine, which keeps them while it writes.

use super::bytes::{be16, be32, be64, pad8};
use super::entry::{EntryError, OFFSET_MASK};
use bedplate_types::{Error, ErrorKind, HostOffset, Result};

/// Bitmaps of one image (as QEMU).
pub const MAX_BITMAPS: u32 = 65535;
/// Bytes of the bitmap directory (as QEMU).
pub const MAX_DIRECTORY_BYTES: u64 = 1024 * MAX_BITMAPS as u64;
/// Entries of one bitmap's table (as QEMU).
pub const MAX_BITMAP_TABLE: u32 = 0x800_0000;
/// Bytes of a bitmap's name (as QEMU).
pub const MAX_BITMAP_NAME: u16 = 1023;
/// Bytes of a directory entry before its variable parts.
const FIXED_BYTES: usize = 24;
const GRANULARITY_BITS: std::ops::RangeInclusive<u8> = 9..=31;

/// The bitmaps header extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BitmapExtension {
    /// Number of bitmaps.
    pub count: u32,
    /// Bytes of the directory.
    pub directory_size: u64,
    /// Where the directory lies.
    pub directory_offset: HostOffset,
}

/// A bitmap in the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bitmap {
    /// The name, as bytes.
    pub name: Vec<u8>,
    /// Where the bitmap's table lies.
    pub table_offset: HostOffset,
    /// That table's number of entries.
    pub table_size: u32,
    /// The flag bits; see the methods.
    pub flags: u32,
    /// 1: a dirty tracking bitmap.
    pub kind: u8,
    /// A bit stands for `1 << granularity_bits` bytes.
    pub granularity_bits: u8,
    /// Extra data, as it was.
    pub extra: Vec<u8>,
}

impl Bitmap {
    /// The bitmap was not saved and is not consistent.
    pub const fn in_use(&self) -> bool {
        self.flags & 1 != 0
    }

    /// It may be used although its extra data is not known.
    pub const fn extra_compatible(&self) -> bool {
        self.flags & 4 != 0
    }

    /// Bytes of its directory entry, padding included.
    pub fn entry_len(&self) -> usize {
        (FIXED_BYTES + self.extra.len() + self.name.len()).next_multiple_of(8)
    }

    /// The bytes of its directory entry.
    ///
    /// # Errors
    /// `InvalidInput` when its name or extra data is too long.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let long = || Error::new(ErrorKind::InvalidInput, "the bitmap's name is too long");
        let name = u16::try_from(self.name.len()).ok().filter(|n| *n <= MAX_BITMAP_NAME);
        let extra = u32::try_from(self.extra.len()).map_err(|_| long())?;
        let mut out = self.table_offset.get().to_be_bytes().to_vec();
        out.extend_from_slice(&self.table_size.to_be_bytes());
        out.extend_from_slice(&self.flags.to_be_bytes());
        out.extend_from_slice(&[self.kind, self.granularity_bits]);
        out.extend_from_slice(&name.ok_or_else(long)?.to_be_bytes());
        out.extend_from_slice(&extra.to_be_bytes());
        out.extend_from_slice(&self.extra);
        out.extend_from_slice(&self.name);
        out.resize(self.entry_len(), 0);
        Ok(out)
    }

    /// The bitmap must track writes whenever the image is open for writing.
    pub const fn auto(&self) -> bool {
        self.flags & 2 != 0
    }
}

fn bad(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::BadImage, text)
}

impl BitmapExtension {
    /// Reads the extension's data.
    ///
    /// # Errors
    /// `BadImage` when it has the wrong length or breaks a bound.
    pub fn parse(data: &[u8], geometry: super::Geometry) -> Result<Self> {
        let short = || bad("the bitmaps header extension has the wrong length");
        if data.len() != 24 {
            return Err(short());
        }
        let ext = Self {
            count: be32(data, 0).ok_or_else(short)?,
            directory_size: be64(data, 8).ok_or_else(short)?,
            directory_offset: HostOffset::new(be64(data, 16).ok_or_else(short)?),
        };
        if be32(data, 4) != Some(0) {
            return Err(bad("the bitmaps header extension has bits set that must be zero"));
        }
        if ext.count == 0 || ext.count > MAX_BITMAPS {
            return Err(bad(format!(
                "the bitmaps header extension names {} bitmaps; 1 to {MAX_BITMAPS} are allowed",
                ext.count
            )));
        }
        let least = u64::from(ext.count) * FIXED_BYTES as u64;
        if ext.directory_size > MAX_DIRECTORY_BYTES || ext.directory_size < least {
            return Err(bad(format!(
                "the bitmap directory has {} bytes, which can't be right for {} bitmaps",
                ext.directory_size, ext.count
            )));
        }
        let end = ext.directory_offset.get().checked_add(ext.directory_size);
        if !ext.directory_offset.is_aligned(geometry.cluster_size())
            || ext.directory_offset == HostOffset::ZERO
            || end.is_none_or(|end| end > i64::MAX as u64)
        {
            return Err(bad(format!(
                "the bitmap directory's offset {} is not valid",
                ext.directory_offset
            )));
        }
        Ok(ext)
    }

    /// The extension's data.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = self.count.to_be_bytes().to_vec();
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&self.directory_size.to_be_bytes());
        out.extend_from_slice(&self.directory_offset.get().to_be_bytes());
        out
    }

    /// Reads the directory's bytes.
    ///
    /// # Errors
    /// `BadImage` when an entry is cut short or breaks a bound, or their number or length is not as the
    /// extension says.
    pub fn parse_directory(
        &self,
        directory: &[u8],
        geometry: super::Geometry,
    ) -> Result<Vec<Bitmap>> {
        let mut rest = directory;
        let mut out = Vec::new();
        while !rest.is_empty() {
            if out.len() as u64 >= u64::from(self.count) {
                return Err(bad("the bitmap directory holds more bitmaps than the header says"));
            }
            let (bitmap, len) = Bitmap::parse(rest, geometry)?;
            out.push(bitmap);
            rest = rest.get(len..).unwrap_or(&[]);
        }
        if out.len() as u64 != u64::from(self.count) {
            return Err(bad("the bitmap directory holds fewer bitmaps than the header says"));
        }
        Ok(out)
    }
}

impl Bitmap {
    fn parse(bytes: &[u8], geometry: super::Geometry) -> Result<(Self, usize)> {
        let short = || bad("the bitmap directory is cut short");
        let name_len = be16(bytes, 18).ok_or_else(short)?;
        let extra_len = usize::try_from(be32(bytes, 20).ok_or_else(short)?).map_err(|_| short())?;
        let rest = bytes.get(FIXED_BYTES..).ok_or_else(short)?;
        let (extra, rest) = rest.split_at_checked(extra_len).ok_or_else(short)?;
        let name = rest.get(..usize::from(name_len)).ok_or_else(short)?;
        let len = (FIXED_BYTES + usize::from(name_len))
            .checked_add(extra_len)
            .and_then(pad8)
            .filter(|len| *len <= bytes.len())
            .ok_or_else(short)?;
        let bitmap = Self {
            name: name.to_vec(),
            table_offset: HostOffset::new(be64(bytes, 0).ok_or_else(short)?),
            table_size: be32(bytes, 8).ok_or_else(short)?,
            flags: be32(bytes, 12).ok_or_else(short)?,
            kind: *bytes.get(16).ok_or_else(short)?,
            granularity_bits: *bytes.get(17).ok_or_else(short)?,
            extra: extra.to_vec(),
        };
        // Made only when it is told: there may be 65535 long ones.
        let shown = || super::printable(name);
        if name_len == 0 || name_len > MAX_BITMAP_NAME {
            return Err(bad(format!(
                "a bitmap's name is {name_len} bytes long; 1 to {MAX_BITMAP_NAME} are allowed"
            )));
        }
        if bitmap.kind != 1 || !GRANULARITY_BITS.contains(&bitmap.granularity_bits) {
            return Err(bad(format!(
                "bitmap '{}' has type {} and granularity 2^{}, which is not allowed",
                shown(),
                bitmap.kind,
                bitmap.granularity_bits
            )));
        }
        let table_end = bitmap
            .table_offset
            .get()
            .checked_add(u64::from(bitmap.table_size) * super::ENTRY_BYTES);
        if bitmap.table_size == 0
            || bitmap.table_size > MAX_BITMAP_TABLE
            || bitmap.table_offset == HostOffset::ZERO
            || !bitmap.table_offset.is_aligned(geometry.cluster_size())
            || table_end.is_none_or(|end| end > i64::MAX as u64)
        {
            return Err(bad(format!(
                "bitmap '{}' has a table of {} entries at {}, which is not allowed",
                shown(),
                bitmap.table_size,
                bitmap.table_offset
            )));
        }
        Ok((bitmap, len))
    }

    /// Reads an entry of a bitmap's table: the cluster of bits, or `None` when it has none (all zeroes or
    /// all ones).
    ///
    /// # Errors
    /// When bits are set that must be zero, or the cluster is not aligned.
    pub fn table_entry(
        raw: u64,
        geometry: super::Geometry,
    ) -> Result<Option<HostOffset>, EntryError> {
        let host = raw & OFFSET_MASK;
        let flag = raw & !OFFSET_MASK;
        if flag > 1 || (flag == 1 && host != 0) {
            return Err(EntryError::Reserved);
        }
        if host & (geometry.cluster_size() - 1) != 0 {
            return Err(EntryError::Unaligned);
        }
        Ok((host != 0).then_some(HostOffset::new(host)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::Geometry;
    use super::*;
    use proptest::prelude::*;

    fn geometry() -> Geometry {
        Geometry::new(16).expect("allowed")
    }

    fn entry(name: &str, table: u64) -> Vec<u8> {
        let mut e = table.to_be_bytes().to_vec();
        e.extend_from_slice(&[0, 0, 0, 1, 0, 0, 0, 2, 1, 16, 0, name.len() as u8, 0, 0, 0, 0]);
        e.extend_from_slice(name.as_bytes());
        e.resize(e.len().next_multiple_of(8), 0);
        e
    }

    #[test]
    fn directories_list_their_bitmaps() {
        let mut dir = entry("first", 0x10000);
        dir.extend(entry("second one", 0x20000));
        let mut ext = BitmapExtension {
            count: 2,
            directory_size: dir.len() as u64,
            directory_offset: HostOffset::new(0x30000),
        };
        let list = ext.parse_directory(&dir, geometry()).expect("valid");
        assert_eq!(list[1].name, b"second one");
        assert!(list[0].auto() && !list[0].in_use());
        for wrong in [1, 3] {
            ext.count = wrong;
            assert!(ext.parse_directory(&dir, geometry()).is_err());
        }
        let unaligned = entry("x", 0x10200);
        ext.count = 1;
        assert!(ext.parse_directory(&unaligned, geometry()).is_err());
    }

    #[test]
    fn what_is_encoded_reads_back() {
        let bitmap = Bitmap {
            name: b"name of odd len".to_vec(),
            table_offset: HostOffset::new(0x7_0000),
            table_size: 9,
            flags: 6,
            kind: 1,
            granularity_bits: 17,
            extra: b"extra".to_vec(),
        };
        let bytes = bitmap.encode().expect("short");
        let ext = BitmapExtension {
            count: 1,
            directory_size: bytes.len() as u64,
            directory_offset: HostOffset::new(0x30000),
        };
        assert_eq!(BitmapExtension::parse(&ext.encode(), geometry()).expect("valid"), ext);
        assert_eq!(ext.parse_directory(&bytes, geometry()).expect("valid"), [bitmap]);
    }

    #[test]
    fn table_entries_without_a_cluster_hold_only_one_flag() {
        assert_eq!(Bitmap::table_entry(1, geometry()), Ok(None));
        assert_eq!(Bitmap::table_entry(0x10001, geometry()), Err(EntryError::Reserved));
        assert_eq!(Bitmap::table_entry(0x10200, geometry()), Err(EntryError::Unaligned));
        assert_eq!(Bitmap::table_entry(0x10000, geometry()), Ok(Some(HostOffset::new(0x10000))));
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(
            data in proptest::collection::vec(any::<u8>(), 0..64), dir: Vec<u8>, at in 0usize..48, byte: u8,
        ) {
            let _ = BitmapExtension::parse(&data, geometry());
            let ext = BitmapExtension { count: 2, directory_size: 0, directory_offset: HostOffset::ZERO };
            let _ = ext.parse_directory(&dir, geometry());
            let mut valid = entry("first", 0x10000);
            valid.extend(entry("second one", 0x20000));
            if let Some(b) = valid.get_mut(at) { *b = byte; }
            let _ = ext.parse_directory(&valid, geometry());
        }
    }
}
