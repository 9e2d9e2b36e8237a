//! The snapshot table with each entry's own bytes, so that what is not changed stays as it was.

use super::SnapshotRef;
use crate::format::{Header, SNAPSHOT_FIXED_BYTES, Snapshot};
use crate::open::{read_bytes, read_snapshots};
use bedplate_storage::Storage;
use bedplate_types::{Error, ErrorKind, Result, limits};

/// An entry and its bytes, padded to a multiple of 8.
pub(super) struct RawEntry {
    pub(super) snapshot: Snapshot,
    bytes: Vec<u8>,
}

/// The table.
pub(super) struct Raw {
    pub(super) entries: Vec<RawEntry>,
    /// Bytes that it takes in the file.
    pub(super) len: u64,
}

impl Raw {
    pub(super) async fn read<S: Storage>(storage: &S, header: &Header) -> Result<Self> {
        let mut raw = Self { entries: Vec::new(), len: 0 };
        if header.nb_snapshots == 0 {
            return Ok(raw);
        }
        let (snapshots, len) = read_snapshots(storage, header).await?;
        let bytes = read_bytes(storage, header.snapshots_offset, len).await?;
        raw.len = len as u64;
        let mut rest = bytes.as_slice();
        for snapshot in snapshots {
            let len = Snapshot::entry_len(rest)?.max(SNAPSHOT_FIXED_BYTES);
            let mut own = rest.get(..len).unwrap_or(rest).to_vec();
            own.resize(len, 0);
            rest = rest.get(len..).unwrap_or(&[]);
            raw.entries.push(RawEntry { snapshot, bytes: own });
        }
        Ok(raw)
    }

    /// The place of a snapshot in the table.
    pub(super) fn find(&self, which: SnapshotRef<'_>) -> Option<usize> {
        let named = |name: &[u8]| self.entries.iter().position(|e| e.snapshot.name == name);
        match which {
            SnapshotRef::Name(name) => named(name),
            SnapshotRef::IdOrName(text) => {
                let id = self.entries.iter().position(|e| e.snapshot.id == text);
                id.or_else(|| named(text))
            }
        }
    }

    /// One more than the largest id that is a number, as QEMU numbers them.
    pub(super) fn next_id(&self) -> Vec<u8> {
        let number = |e: &RawEntry| {
            let digits = e.snapshot.id.iter().take_while(|b| b.is_ascii_digit());
            digits.fold(0u64, |n, b| n.saturating_mul(10).saturating_add(u64::from(b - b'0')))
        };
        let largest = self.entries.iter().map(number).max().unwrap_or(0);
        largest.saturating_add(1).to_string().into_bytes()
    }

    pub(super) fn push(&mut self, snapshot: Snapshot) -> Result<()> {
        let bytes = snapshot.encode()?;
        self.entries.push(RawEntry { snapshot, bytes });
        if self.entries.len() as u64 > u64::from(limits::MAX_SNAPSHOTS)
            || self.bytes().len() as u64 > limits::MAX_SNAPSHOT_TABLE_BYTES
        {
            return Err(Error::new(
                ErrorKind::Limit,
                format!(
                    "an image can have {} snapshots in a table of {} bytes; delete some first",
                    limits::MAX_SNAPSHOTS,
                    limits::MAX_SNAPSHOT_TABLE_BYTES
                ),
            ));
        }
        Ok(())
    }

    /// The table's bytes.
    pub(super) fn bytes(&self) -> Vec<u8> {
        self.entries.iter().flat_map(|e| e.bytes.iter().copied()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(ids: &[&str]) -> Raw {
        let mut raw = Raw { entries: Vec::new(), len: 0 };
        for id in ids {
            let snapshot =
                Snapshot { id: (*id).into(), name: format!("n{id}").into(), ..Snapshot::default() };
            raw.push(snapshot).expect("short");
        }
        raw
    }

    #[test]
    fn ids_go_on_from_the_largest_number() {
        for (ids, next) in
            [(&[][..], "1"), (&["1", "7", "x"], "8"), (&["3b", "2"], "4"), (&["x"], "1")]
        {
            assert_eq!(raw(ids).next_id(), next.as_bytes());
        }
    }

    #[test]
    fn an_id_goes_before_a_name() {
        let mut table = raw(&["1", "2"]);
        table.entries[0].snapshot.name = b"2".to_vec();
        assert_eq!(table.find(SnapshotRef::IdOrName(b"2")), Some(1));
        assert_eq!(table.find(SnapshotRef::Name(b"2")), Some(0));
        assert_eq!(table.find(SnapshotRef::IdOrName(b"n2")), Some(1));
        assert_eq!(table.find(SnapshotRef::Name(b"1")), None);
    }
}
