//! Reading metadata: many reads at once, and holes are not read where that could be endless.
//!
//! Callers: everything in [`super`] that reads tables. A hostile image may name more tables than its file has
//! data, in holes; these are found by asking where the holes are.

use crate::format::ENTRY_BYTES;
use bedplate_runtime::buf::{AlignedBuf, SharedBuf};
use bedplate_storage::Storage;
use bedplate_types::{ByteLen, Error, ErrorKind, HostOffset, Result, ResultExt};
use futures_util::future::join_all;
use std::ops::Range;

/// L1 tables and the like are read in pieces of this many bytes.
pub(super) const PIECE_BYTES: u64 = 1 << 20;
/// Below this many bytes in all it isn't asked for holes.
const TRUSTED_BYTES: u64 = 256 << 20;

/// Reads metadata of one image.
pub(super) struct Reader<'a, S: Storage> {
    pub(super) storage: &'a S,
    pub(super) file_len: u64,
}

impl<S: Storage> Clone for Reader<'_, S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S: Storage> Copy for Reader<'_, S> {}

impl<'a, S: Storage> Reader<'a, S> {
    pub(super) fn new(storage: &'a S) -> Self {
        Self { storage, file_len: storage.len().get() }
    }

    /// True when so many bytes are to be read that holes must be left out.
    pub(super) const fn is_suspicious(bytes: u64) -> bool {
        bytes > TRUSTED_BYTES
    }

    /// The bytes of a range; what lies beyond the file's end is zero.
    pub(super) async fn bytes(&self, range: Range<u64>) -> Result<AlignedBuf> {
        let len = usize::try_from(range.end.saturating_sub(range.start))
            .map_err(|_| Error::new(ErrorKind::Limit, "a table is too large"))?;
        let buf = SharedBuf::zeroed(len)?;
        if range.start < self.file_len {
            let at = HostOffset::new(range.start);
            let read = self.storage.read(at, buf.iovec()).await;
            read.context(|| format!("cannot read the metadata of '{}'", self.storage.name()))?;
        }
        buf.into_buf()
    }

    /// As [`Self::bytes`], but `None` when the range is known to hold only zeroes.
    pub(super) async fn bytes_or_hole(&self, range: Range<u64>) -> Result<Option<AlignedBuf>> {
        let len = range.end.saturating_sub(range.start);
        if range.start >= self.file_len || len == 0 {
            return Ok(None);
        }
        let len = ByteLen::new(len.min(self.file_len - range.start));
        let run = self.storage.extent(HostOffset::new(range.start), len).await?;
        if !run.data && run.len >= len {
            return Ok(None);
        }
        self.bytes(range).await.map(Some)
    }

    /// Calls `each` with the entries of a table that are not zero, and their indexes. What lies beyond the file's end
    /// is left out: it would be zeroes. Returns the bytes that were read.
    pub(super) async fn entries(
        &self,
        at: HostOffset,
        len: u64,
        mut each: impl FnMut(u64, u64),
    ) -> Result<u64> {
        let start = at.get();
        let end = start.saturating_add(len).min(self.file_len.next_multiple_of(ENTRY_BYTES));
        let mut from = start;
        let mut read = 0u64;
        while from < end {
            let run = self.storage.extent(HostOffset::new(from), ByteLen::new(end - from)).await?;
            let stop = from.saturating_add(run.len.get());
            // Entries are whole; an entry that is partly data is data.
            let whole = stop - (stop - start) % ENTRY_BYTES;
            if !run.data && whole > from {
                from = whole;
                continue;
            }
            // Some pieces at once, because one after the other waits for the device most of the time.
            let stop = stop.max(from + ENTRY_BYTES).next_multiple_of(ENTRY_BYTES);
            let next = from.saturating_add(4 * PIECE_BYTES).min(stop).min(end);
            let pieces = (from..next).step_by(PIECE_BYTES as usize);
            let reads = pieces.map(|p| async move {
                (p, self.bytes(p..p.saturating_add(PIECE_BYTES).min(next)).await)
            });
            for (piece, bytes) in join_all(reads).await {
                let bytes = bytes?;
                read = read.saturating_add(bytes.len() as u64);
                let first = (piece - start) / ENTRY_BYTES;
                for (index, word) in bytes.as_chunks::<8>().0.iter().enumerate() {
                    if *word != [0; 8] {
                        each(first + index as u64, u64::from_be_bytes(*word));
                    }
                }
            }
            from = next;
        }
        Ok(read)
    }
}

/// Writes the sectors of `new` that differ from `old`, both being what lies at `at`.
///
/// # Errors
/// What the storage reports.
pub(super) async fn write_changed<S: Storage>(
    storage: &S,
    at: u64,
    old: &[u8],
    new: &[u8],
) -> Result<u64> {
    const SECTOR: usize = 512;
    let mut sectors = old.chunks(SECTOR).zip(new.chunks(SECTOR)).map(|(a, b)| a != b).enumerate();
    let mut written = 0;
    while let Some((first, changed)) = sectors.next() {
        if !changed {
            continue;
        }
        let more = sectors.by_ref().take_while(|(_, changed)| *changed).count();
        let (start, end) = (first * SECTOR, ((first + 1 + more) * SECTOR).min(new.len()));
        let Some(bytes) = new.get(start..end) else { break };
        let buf = SharedBuf::new(AlignedBuf::from_slice(bytes)?);
        let place = HostOffset::new(at.saturating_add(start as u64));
        storage
            .write(place, buf.iovec())
            .await
            .context(|| format!("cannot repair the metadata of '{}'", storage.name()))?;
        written += bytes.len() as u64;
    }
    Ok(written)
}
