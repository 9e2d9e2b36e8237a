//! What the header leads to, short of L2 tables: the places of all metadata, and which L2 tables there are.
//!
//! Callers: the census, and the parts of the repair that change tables. Work is bounded by the file's data: tables
//! that several snapshots name are read once, holes are not read, and tables that overlap count against a limit.

use super::cells::Use;
use super::reader::{PIECE_BYTES, Reader};
use super::report::CheckReport;
use super::stored::Stored;
use super::tables::Shape;
use crate::format::{
    Bitmap, BitmapExtension, COPIED, ENTRY_BYTES, EXT_BITMAPS, EXT_ENCRYPTION, Header, OFFSET_MASK,
    printable,
};
use crate::open::read_snapshots;
use bedplate_storage::Storage;
use bedplate_types::{Error, ErrorKind, HostOffset, Result};
use std::collections::BTreeMap;

/// Bytes of tables that may lie over other tables, in all; more is no accident.
const MAX_OVERLAP: u64 = 64 << 20;
/// L2 tables that are remembered.
const MAX_TABLES: usize = 12 << 20;
/// Regions that are remembered.
const MAX_CLAIMS: usize = 4 << 20;
/// L2 tables at places that are not a cluster's start: they can't be in use, and each costs a whole read.
const MAX_ODD_TABLES: usize = 1024;
/// Names of L2 tables that are gathered before equal ones are joined.
const JOIN_AFTER: usize = 1 << 20;

/// A region that is in use.
#[derive(Clone, Copy, Debug)]
pub(super) struct Claim {
    pub(super) at: u64,
    pub(super) len: u64,
    pub(super) kind: Use,
    pub(super) times: u64,
}

/// An L2 table, and how often it is named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct L2Table {
    pub(super) at: u64,
    /// By the active L1 table.
    pub(super) active: u32,
    /// By those of snapshots.
    pub(super) snapshots: u32,
}

/// An L1 table.
#[derive(Clone, Copy, Debug)]
pub(super) struct L1Table {
    pub(super) at: HostOffset,
    pub(super) entries: u64,
    pub(super) active: bool,
}

/// All metadata but the refcounts', and the L2 tables.
#[derive(Default)]
pub(super) struct Outline {
    pub(super) claims: Vec<Claim>,
    /// In ascending order, each place once.
    pub(super) tables: Vec<L2Table>,
    /// The active one first. Snapshots that share a table's start are one, as long as the longest.
    pub(super) l1: Vec<L1Table>,
    joined: usize,
    /// Bytes of tables read so far, where each ends, and by how much tables overlap.
    read_to: u64,
    overlap: u64,
}

/// Reads the outline of an image.
pub(super) struct Draft<'a, S: Storage> {
    pub(super) reader: Reader<'a, S>,
    pub(super) shape: &'a Shape,
    pub(super) header: &'a Header,
    /// For judging COPIED flags; `None` when refcounts are not believed.
    pub(super) stored: Option<&'a Stored>,
    pub(super) report: &'a mut CheckReport,
    pub(super) outline: Outline,
}

impl<S: Storage> Draft<'_, S> {
    /// Reads it all.
    ///
    /// # Errors
    /// What the storage reports, or `Limit`. What is wrong in the image goes to the report.
    pub(super) async fn read(mut self) -> Result<Outline> {
        self.claim(0, self.shape.cluster(), Use::Header, 1);
        let active = L1Table {
            at: self.header.l1_offset,
            entries: u64::from(self.header.l1_size),
            active: true,
        };
        self.read_l1(active, &[active.entries]).await?;
        self.outline.read_to = 0;
        self.read_snapshots().await?;
        self.read_bitmaps().await?;
        self.encryption();
        self.join()?;
        self.odd_tables();
        Ok(self.outline)
    }

    fn claim(&mut self, at: u64, len: u64, kind: Use, times: u64) {
        if len == 0 || times == 0 {
            return;
        }
        if self.shape.end_inside(at, len).is_some() {
            self.outline.claims.push(Claim { at, len, kind, times });
        } else {
            self.report.damage.unknown += u64::from(kind != Use::Bitmaps);
            self.report.damage.bitmaps |= kind == Use::Bitmaps;
            let end = self.shape.file_len;
            self.report.corrupt(times, || {
                format!(
                    "{} of {len:#x} bytes at {at:#x} lies beyond the file's end at {end:#x}",
                    kind.text()
                )
            });
        }
    }

    /// Counts bytes of tables against the limit of what may overlap. Tables come in the order of their places.
    fn note_read(&mut self, at: u64, len: u64, read: u64) -> Result<()> {
        let overlap = self.outline.read_to.saturating_sub(at).min(read);
        self.outline.overlap = self.outline.overlap.saturating_add(overlap);
        self.outline.read_to = self.outline.read_to.max(at.saturating_add(len));
        if self.outline.overlap > MAX_OVERLAP {
            return Err(Error::new(
                ErrorKind::Limit,
                format!(
                    "tables of '{}' lie over each other for more than {MAX_OVERLAP} bytes; \
                     the image is damaged or malicious and can't be checked",
                    self.reader.storage.name()
                ),
            ));
        }
        Ok(())
    }

    /// Claims the clusters of L1 tables of these lengths, in ascending order, that begin at one place. Each cluster is
    /// claimed once, as often as it is used, so that the work does not grow with the number of tables.
    fn claim_l1(&mut self, at: u64, sizes: &[u64]) {
        let cluster = self.shape.cluster();
        let inside =
            sizes.partition_point(|s| self.shape.end_inside(at, s * ENTRY_BYTES).is_some());
        let mut claimed = 0;
        for (index, size) in sizes.iter().take(inside).enumerate() {
            let len = (size * ENTRY_BYTES).next_multiple_of(cluster);
            if len > claimed {
                let from = at.saturating_add(claimed);
                let times = (inside - index) as u64;
                let claim = Claim { at: from, len: len - claimed, kind: Use::L1, times };
                self.outline.claims.push(claim);
                claimed = len;
            }
        }
        for size in sizes.iter().skip(inside) {
            self.claim(at, size * ENTRY_BYTES, Use::L1, 1);
        }
    }

    /// Reads an L1 table that is used by tables of these lengths, the longest of which is its own.
    async fn read_l1(&mut self, l1: L1Table, sizes: &[u64]) -> Result<()> {
        self.claim_l1(l1.at.get(), sizes);
        self.outline.l1.push(l1);
        // Tables beyond the end have been reported; those are not read.
        if l1.at.get() >= self.reader.file_len {
            return Ok(());
        }
        let mut found = Vec::new();
        let len = l1.entries * ENTRY_BYTES;
        let read = self.reader.entries(l1.at, len, |index, raw| found.push((index, raw))).await?;
        self.note_read(l1.at.get(), len, read)?;
        for (index, raw) in found {
            let times = sizes.len() - sizes.partition_point(|size| *size <= index);
            let times = u32::try_from(times).unwrap_or(u32::MAX);
            self.l1_entry(l1.active, index, raw, times);
        }
        if self.outline.tables.len() - self.outline.joined > JOIN_AFTER {
            self.join()?;
        }
        Ok(())
    }

    fn l1_entry(&mut self, active: bool, index: u64, raw: u64, times: u32) {
        let (host, n) = (raw & OFFSET_MASK, u64::from(times));
        if raw & !(COPIED | OFFSET_MASK) != 0 {
            self.report.bad_entry(n, || {
                format!("L1 entry {index} ({raw:#018x}) has bits set that must be zero")
            });
        }
        if host == 0 {
            return;
        }
        if !host.is_multiple_of(self.shape.cluster()) {
            self.report.bad_entry(n, || {
                format!("L1 entry {index} names an L2 table at {host:#x}, which is not aligned to a cluster")
            });
        }
        if active && let Some(stored) = self.stored {
            self.shape.check_copied(stored, host, raw, "L2 table", 1, self.report);
        }
        let (active, snapshots) = if active { (times, 0) } else { (0, times) };
        self.outline.tables.push(L2Table { at: host, active, snapshots });
    }

    /// Sorts the L2 tables and joins those at one place.
    fn join(&mut self) -> Result<()> {
        let tables = &mut self.outline.tables;
        tables.sort_unstable_by_key(|t| t.at);
        tables.dedup_by(|b, a| {
            let same = a.at == b.at;
            if same {
                a.active = a.active.saturating_add(b.active);
                a.snapshots = a.snapshots.saturating_add(b.snapshots);
            }
            same
        });
        self.outline.joined = tables.len();
        if tables.len() > MAX_TABLES {
            return Err(Error::new(
                ErrorKind::Limit,
                format!(
                    "the image has more than {MAX_TABLES} L2 tables, which are too many to check"
                ),
            ));
        }
        Ok(())
    }

    /// Keeps only so many L2 tables at odd places as are worth reading.
    fn odd_tables(&mut self) {
        let cluster = self.shape.cluster();
        let mut odd = 0;
        self.outline.tables.retain(|t| {
            odd += usize::from(!t.at.is_multiple_of(cluster));
            t.at.is_multiple_of(cluster) || odd <= MAX_ODD_TABLES
        });
    }

    async fn read_snapshots(&mut self) -> Result<()> {
        if self.header.nb_snapshots == 0 {
            return Ok(());
        }
        let (snapshots, len) = match read_snapshots(self.reader.storage, self.header).await {
            Ok(found) => found,
            Err(e) if e.kind() == ErrorKind::BadImage => {
                self.report.damage.unknown += 1;
                self.report.error(1, || format!("{e:#}"));
                return Ok(());
            }
            Err(e) => return Err(e),
        };
        // Tables at one place are read once, as the longest of them.
        let mut tables: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
        for snapshot in &snapshots {
            match snapshot.check_l1(self.shape.geometry) {
                Ok(()) => {
                    let sizes = tables.entry(snapshot.l1_offset.get()).or_default();
                    sizes.push(u64::from(snapshot.l1_size));
                }
                Err(e) => {
                    self.report.damage.unknown += 1;
                    self.report.corrupt(1, || e.to_string());
                }
            }
        }
        for (at, mut sizes) in tables {
            sizes.sort_unstable();
            let entries = sizes.iter().copied().max().unwrap_or(0);
            let l1 = L1Table { at: HostOffset::new(at), entries, active: false };
            self.read_l1(l1, &sizes).await?;
        }
        self.claim(self.header.snapshots_offset.get(), len as u64, Use::Snapshots, 1);
        Ok(())
    }

    /// Bitmaps that a program without knowledge of them has made stale count as leaked, as they will be.
    async fn read_bitmaps(&mut self) -> Result<()> {
        if !self.header.bitmaps_valid() {
            return Ok(());
        }
        let Some(data) = self.header.extension(EXT_BITMAPS) else { return Ok(()) };
        let ext = match BitmapExtension::parse(data, self.shape.geometry) {
            Ok(ext) => ext,
            Err(e) => {
                self.bad_bitmaps(|| e.to_string());
                return Ok(());
            }
        };
        let (at, len) = (ext.directory_offset, ext.directory_size);
        self.claim(at.get(), len, Use::Bitmaps, 1);
        let end = at.get().saturating_add(len);
        if end > self.reader.file_len.next_multiple_of(512) {
            return Ok(());
        }
        let directory = self.reader.bytes(at.get()..end).await?;
        let mut bitmaps = match ext.parse_directory(&directory, self.shape.geometry) {
            Ok(list) => list,
            Err(e) => {
                self.bad_bitmaps(|| e.to_string());
                return Ok(());
            }
        };
        bitmaps.sort_by_key(|b| b.table_offset);
        self.outline.read_to = 0;
        for bitmap in bitmaps {
            self.read_bitmap(&bitmap).await?;
        }
        Ok(())
    }

    fn bad_bitmaps(&mut self, text: impl FnOnce() -> String) {
        self.report.damage.bitmaps = true;
        self.report.corrupt(1, text);
    }

    async fn read_bitmap(&mut self, bitmap: &Bitmap) -> Result<()> {
        let len = u64::from(bitmap.table_size) * ENTRY_BYTES;
        let at = bitmap.table_offset.get();
        self.claim(at, len, Use::Bitmaps, 1);
        let mut done = 0;
        while done < len {
            // Piece by piece, because a table may be as long as a gibibyte.
            let piece = (len - done).min(16 * PIECE_BYTES);
            let mut found = Vec::new();
            let from = HostOffset::new(at.saturating_add(done));
            let read = self.reader.entries(from, piece, |_, raw| found.push(raw)).await?;
            self.note_read(from.get(), piece, read)?;
            if self.outline.claims.len() > MAX_CLAIMS {
                return Err(Error::new(
                    ErrorKind::Limit,
                    format!("bitmaps and other metadata have more than {MAX_CLAIMS} parts"),
                ));
            }
            for raw in found {
                match Bitmap::table_entry(raw, self.shape.geometry) {
                    Ok(None) => {}
                    Ok(Some(host)) => {
                        let cluster = self.shape.cluster();
                        self.claim(host.get(), cluster, Use::Bitmaps, 1);
                    }
                    Err(e) => self.bad_bitmaps(|| {
                        format!(
                            "the table of bitmap '{}' has the wrong entry {raw:#018x}: {e}",
                            printable(&bitmap.name)
                        )
                    }),
                }
            }
            if from.get() >= self.reader.file_len {
                break;
            }
            done += piece;
        }
        Ok(())
    }

    /// The header of the encryption, which lies outside of all tables (specification, "Full disk encryption header").
    fn encryption(&mut self) {
        let Some(data) = self.header.extension(EXT_ENCRYPTION) else { return };
        let word = |at: usize| {
            let bytes = data.get(at..)?.first_chunk()?;
            Some(u64::from_be_bytes(*bytes))
        };
        match (word(0), word(8), data.len()) {
            (Some(at), Some(len), 16) => self.claim(at, len, Use::Encryption, 1),
            _ => {
                self.report.damage.unknown += 1;
                self.report.corrupt(1, || {
                    format!(
                        "the encryption header extension has {} bytes instead of 16",
                        data.len()
                    )
                });
            }
        }
    }
}
