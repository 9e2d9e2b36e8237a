//! The table of internal snapshots.
//!
//! Callers: opening (shared clusters), `info`, the checker. Entries are of variable length, so the table's
//! length is only known once all of them were read.

use super::bytes::{be16, be32, be64, pad8};
use bedplate_types::{ByteLen, Error, ErrorKind, HostOffset, Result, limits};

/// Bytes of an entry before its variable parts.
pub const FIXED_BYTES: usize = 40;
/// The largest entry: extra data, id and name at their limits.
pub const MAX_ENTRY_BYTES: usize =
    FIXED_BYTES + limits::MAX_SNAPSHOT_EXTRA_BYTES as usize + 2 * u16::MAX as usize + 8;

/// An internal snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Snapshot {
    /// The snapshot's L1 table.
    pub l1_offset: HostOffset,
    /// That table's number of entries.
    pub l1_size: u32,
    /// The unique id, as bytes.
    pub id: Vec<u8>,
    /// The name, as bytes.
    pub name: Vec<u8>,
    /// Seconds since 1970 when it was taken.
    pub date_sec: u32,
    /// The nanoseconds within that second.
    pub date_nsec: u32,
    /// Nanoseconds that the guest had run.
    pub vm_clock_nsec: u64,
    /// Bytes of VM state.
    pub vm_state_size: u64,
    /// The disk's size when it was taken; `None` in old entries: that of the image.
    pub disk_size: Option<ByteLen>,
    /// The guest's instruction count; `None` when it was not counted.
    pub icount: Option<u64>,
    /// Extra data behind the known fields, as it was.
    pub unknown_extra: Vec<u8>,
}

fn bad(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::BadImage, text)
}

impl Snapshot {
    /// The length of the entry that starts with `fixed` (at least [`FIXED_BYTES`]), padding included.
    ///
    /// # Errors
    /// `BadImage` when there are too few bytes or too much extra data.
    pub fn entry_len(fixed: &[u8]) -> Result<usize> {
        let short = || bad("the snapshot table is cut short");
        let id = usize::from(be16(fixed, 12).ok_or_else(short)?);
        let name = usize::from(be16(fixed, 14).ok_or_else(short)?);
        let extra = be32(fixed, 36).ok_or_else(short)?;
        if extra > limits::MAX_SNAPSHOT_EXTRA_BYTES {
            return Err(bad(format!(
                "a snapshot table entry has {extra} bytes of extra data; at most {} are allowed",
                limits::MAX_SNAPSHOT_EXTRA_BYTES
            )));
        }
        // Bounded by MAX_ENTRY_BYTES.
        pad8(FIXED_BYTES + extra as usize + id + name).ok_or_else(short)
    }

    /// Reads the entry at the start of `bytes`; returns it with its length, padding included. The padding
    /// of the last entry may be missing.
    ///
    /// # Errors
    /// `BadImage` when it is cut short or breaks a bound.
    pub fn parse(bytes: &[u8]) -> Result<(Self, usize)> {
        let short = || bad("the snapshot table is cut short");
        let len = Self::entry_len(bytes)?;
        let extra_len = be32(bytes, 36).ok_or_else(short)? as usize;
        let id_len = usize::from(be16(bytes, 12).ok_or_else(short)?);
        let name_len = usize::from(be16(bytes, 14).ok_or_else(short)?);
        let rest = bytes.get(FIXED_BYTES..).ok_or_else(short)?;
        let (extra, rest) = rest.split_at_checked(extra_len).ok_or_else(short)?;
        let (id, rest) = rest.split_at_checked(id_len).ok_or_else(short)?;
        let name = rest.get(..name_len).ok_or_else(short)?;
        let small_state = u64::from(be32(bytes, 32).ok_or_else(short)?);
        let entry = Self {
            l1_offset: HostOffset::new(be64(bytes, 0).ok_or_else(short)?),
            l1_size: be32(bytes, 8).ok_or_else(short)?,
            id: id.to_vec(),
            name: name.to_vec(),
            date_sec: be32(bytes, 16).ok_or_else(short)?,
            date_nsec: be32(bytes, 20).ok_or_else(short)?,
            vm_clock_nsec: be64(bytes, 24).ok_or_else(short)?,
            vm_state_size: be64(extra, 0).unwrap_or(small_state),
            disk_size: be64(extra, 8).map(ByteLen::new),
            // All ones say that instructions were not counted.
            icount: be64(extra, 16).filter(|v| *v != u64::MAX),
            unknown_extra: extra.get(24..).unwrap_or(&[]).to_vec(),
        };
        Ok((entry, len))
    }

    /// The entry's bytes, padded to a multiple of 8, with all extra fields.
    ///
    /// # Errors
    /// `InvalidInput` when id, name or extra data are too long. `disk_size` is needed in version 3.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let long = || Error::new(ErrorKind::InvalidInput, "the snapshot's id or name is too long");
        let known: usize = match (self.disk_size, self.icount) {
            (None, None) if self.unknown_extra.is_empty() => 8,
            (_, None) if self.unknown_extra.is_empty() => 16,
            _ => 24,
        };
        let extra = u32::try_from(known + self.unknown_extra.len())
            .ok()
            .filter(|n| *n <= limits::MAX_SNAPSHOT_EXTRA_BYTES)
            .ok_or_else(long)?;
        let id_len = u16::try_from(self.id.len()).map_err(|_| long())?;
        let name_len = u16::try_from(self.name.len()).map_err(|_| long())?;
        let mut out = Vec::new();
        out.extend_from_slice(&self.l1_offset.get().to_be_bytes());
        out.extend_from_slice(&self.l1_size.to_be_bytes());
        out.extend_from_slice(&id_len.to_be_bytes());
        out.extend_from_slice(&name_len.to_be_bytes());
        out.extend_from_slice(&self.date_sec.to_be_bytes());
        out.extend_from_slice(&self.date_nsec.to_be_bytes());
        out.extend_from_slice(&self.vm_clock_nsec.to_be_bytes());
        // The old 32-bit field says zero where the size needs more; readers take the 64-bit one.
        out.extend_from_slice(&u32::try_from(self.vm_state_size).unwrap_or(0).to_be_bytes());
        out.extend_from_slice(&extra.to_be_bytes());
        out.extend_from_slice(&self.vm_state_size.to_be_bytes());
        if known >= 16 {
            let size = self.disk_size.unwrap_or(ByteLen::ZERO);
            out.extend_from_slice(&size.get().to_be_bytes());
        }
        if known >= 24 {
            out.extend_from_slice(&self.icount.unwrap_or(u64::MAX).to_be_bytes());
        }
        out.extend_from_slice(&self.unknown_extra);
        out.extend_from_slice(&self.id);
        out.extend_from_slice(&self.name);
        out.resize(out.len().next_multiple_of(8), 0);
        Ok(out)
    }

    /// Checks the snapshot's L1 table against the limits; `geometry` is the image's.
    ///
    /// # Errors
    /// `BadImage` when it is unaligned, too long, or ends beyond the largest file offset.
    pub fn check_l1(&self, geometry: super::Geometry) -> Result<()> {
        let bytes = u64::from(self.l1_size) * super::ENTRY_BYTES;
        let name = super::printable(&self.name);
        if !self.l1_offset.is_aligned(geometry.cluster_size()) {
            return Err(bad(format!(
                "the L1 table of snapshot '{name}' at {} is not aligned to a cluster",
                self.l1_offset
            )));
        }
        if bytes > limits::MAX_L1_BYTES {
            return Err(bad(format!(
                "the L1 table of snapshot '{name}' has {} entries; at most {} are allowed",
                self.l1_size,
                limits::MAX_L1_BYTES / super::ENTRY_BYTES
            )));
        }
        match self.l1_offset.get().checked_add(bytes) {
            Some(end) if end <= i64::MAX as u64 => Ok(()),
            _ => Err(bad(format!(
                "the L1 table of snapshot '{name}' ends beyond the largest file offset"
            ))),
        }
    }
}

/// Reads `count` entries from `bytes`; returns them with the table's length.
///
/// # Errors
/// `BadImage` when an entry is cut short or breaks a bound, or the table is longer than allowed.
pub fn parse_table(bytes: &[u8], count: u32) -> Result<(Vec<Snapshot>, usize)> {
    let mut at = 0usize;
    let mut out = Vec::new();
    for _ in 0..count {
        let rest = bytes.get(at..).ok_or_else(|| bad("the snapshot table is cut short"))?;
        let (entry, len) = Snapshot::parse(rest)?;
        out.push(entry);
        at = at.saturating_add(len);
        if at as u64 > limits::MAX_SNAPSHOT_TABLE_BYTES {
            return Err(bad(format!(
                "the snapshot table is longer than {} bytes",
                limits::MAX_SNAPSHOT_TABLE_BYTES
            )));
        }
    }
    Ok((out, at))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    prop_compose! {
        fn snapshots()(
            numbers in any::<[u64; 4]>(), small in any::<[u32; 3]>(), id in "[0-9]{1,5}", name in "\\PC{0,20}",
            disk_size in any::<Option<u64>>(), icount in proptest::option::of(0..u64::MAX),
            unknown_extra in proptest::collection::vec(any::<u8>(), 0..40),
        ) -> Snapshot {
            let full = icount.is_some() || !unknown_extra.is_empty();
            Snapshot {
                l1_offset: HostOffset::new(numbers[0]), l1_size: small[0], id: id.into(), name: name.into(),
                date_sec: small[1], date_nsec: small[2], vm_clock_nsec: numbers[1], vm_state_size: numbers[2],
                disk_size: disk_size.or(full.then_some(7)).map(ByteLen::new), icount, unknown_extra,
            }
        }
    }

    #[test]
    fn extra_data_above_the_limit_is_refused_before_it_is_read() {
        let mut entry = [0u8; FIXED_BYTES];
        entry[36..40].copy_from_slice(&1025u32.to_be_bytes());
        assert!(Snapshot::entry_len(&entry).is_err());
        entry[36..40].copy_from_slice(&1024u32.to_be_bytes());
        assert_eq!(Snapshot::entry_len(&entry).ok(), Some(1064));
        assert!(Snapshot::parse(&entry).is_err());
    }

    #[test]
    fn old_entries_without_extra_data_take_the_small_fields() {
        let mut entry = [0u8; 48];
        entry[15] = 1;
        entry[35] = 9;
        entry[40] = b'x';
        let (s, len) = Snapshot::parse(&entry).expect("valid");
        assert_eq!((s.vm_state_size, s.disk_size, s.icount, len), (9, None, None, 48));
        assert_eq!(s.name, b"x");
    }

    proptest! {
        #[test]
        fn tables_read_back(list in proptest::collection::vec(snapshots(), 0..5)) {
            let mut bytes = Vec::new();
            for s in &list {
                bytes.extend(s.encode().expect("short names"));
            }
            let count = list.len() as u32;
            prop_assert_eq!(parse_table(&bytes, count).expect("valid"), (list, bytes.len()));
            prop_assert!(parse_table(&bytes, count + 1).is_err());
        }

        #[test]
        fn random_bytes_never_panic(bytes: Vec<u8>, count in 0u32..100) {
            let _ = parse_table(&bytes, count);
        }
    }
}
