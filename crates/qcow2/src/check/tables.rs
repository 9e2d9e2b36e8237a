//! Entries of L2 tables: which are right, and what they refer to.
//!
//! Callers: the census, which brings the tables. Pure: no I/O. Any number of threads judge tables of one image at once.
//! Entries are taken as raw words, because wrong ones must be counted for what they name.

use super::cells::{Cells, Use};
use super::outline::L2Table;
use super::report::CheckReport;
use super::stored::Stored;
use crate::format::{
    COMPRESSED, COPIED, EntryCodec, Geometry, Header, OFFSET_MASK, RefcountFormat, ZERO, incompat,
};
use bedplate_types::{ByteLen, Result};

/// Bits of a standard L2 entry that must be zero, but for the zero flag.
const RESERVED: u64 = !(COPIED | COMPRESSED | OFFSET_MASK | ZERO);

/// What must be known of an image to judge its tables.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) geometry: Geometry,
    pub(super) codec: EntryCodec,
    pub(super) refcounts: RefcountFormat,
    pub(super) version: u32,
    /// L2 entries have 16 bytes and describe subclusters (specification, "Extended L2 Entries").
    pub(super) extended: bool,
    /// Guest data lies in another file, whose space is not counted.
    pub(super) data_file: bool,
    pub(super) file_len: u64,
}

/// An L2 entry as it is in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Raw {
    pub(super) entry: u64,
    /// Which subclusters have data (low half) and which read as zeroes (high half); zero without subclusters.
    pub(super) bitmap: u64,
}

/// What is wrong with an L2 entry, short of what its counts say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wrong {
    Reserved,
    ZeroFlag,
    Unaligned,
    CopiedCompressed,
    CompressedInDataFile,
    CompressedBitmap,
    BothInBitmap,
    BitmapWithoutSpace,
}

impl Shape {
    pub(super) fn new(header: &Header, file_len: u64) -> Result<Self> {
        let geometry = header.geometry()?;
        Ok(Self {
            geometry,
            codec: EntryCodec::new(geometry, header.version),
            refcounts: header.refcounts()?,
            version: header.version,
            extended: header.incompatible & incompat::EXTENDED_L2 != 0,
            data_file: header.incompatible & incompat::EXTERNAL_DATA != 0,
            file_len,
        })
    }

    pub(super) const fn cluster(&self) -> u64 {
        self.geometry.cluster_size()
    }

    pub(super) const fn cluster_of(&self, at: u64) -> u64 {
        at >> self.geometry.cluster_bits()
    }

    /// The end of a region, if it lies in the file. The file's last cluster may be short.
    pub(super) fn end_inside(&self, at: u64, len: u64) -> Option<u64> {
        let end = at.checked_add(len)?;
        (end.saturating_sub(self.file_len) < self.cluster()).then_some(end)
    }

    /// Just past the last cluster that can be referenced.
    pub(super) fn end_cluster(&self) -> u64 {
        self.cluster_of(self.file_len).saturating_add(2)
    }

    /// The entries of an L2 table.
    pub(super) fn entries<'b>(&self, bytes: &'b [u8]) -> impl Iterator<Item = Raw> + 'b {
        let step = if self.extended { 2 } else { 1 };
        let words = bytes.as_chunks::<8>().0;
        words.chunks(step).map(|pair| Raw {
            entry: pair.first().map_or(0, |b| u64::from_be_bytes(*b)),
            bitmap: pair.get(1).map_or(0, |b| u64::from_be_bytes(*b)),
        })
    }

    /// True when an entry that is not compressed has space: an offset, or in a data file the flag alone.
    pub(super) const fn has_space(&self, raw: Raw) -> bool {
        raw.entry & OFFSET_MASK != 0 || (self.data_file && raw.entry & COPIED != 0)
    }

    /// Calls `each` with all that is wrong with an entry.
    pub(super) fn judge(&self, raw: Raw, mut each: impl FnMut(Wrong)) {
        let Raw { entry, bitmap } = raw;
        let (data, zero) = (bitmap as u32, (bitmap >> 32) as u32);
        if entry & COMPRESSED != 0 {
            if entry & COPIED != 0 {
                each(Wrong::CopiedCompressed);
            }
            if self.data_file {
                each(Wrong::CompressedInDataFile);
            }
            if bitmap != 0 {
                each(Wrong::CompressedBitmap);
            }
            return;
        }
        if entry & RESERVED != 0 {
            each(Wrong::Reserved);
        }
        if entry & ZERO != 0 && (self.extended || self.version < 3) {
            each(Wrong::ZeroFlag);
        }
        if !(entry & OFFSET_MASK).is_multiple_of(self.cluster()) {
            each(Wrong::Unaligned);
        }
        if self.has_space(raw) {
            if data & zero != 0 {
                each(Wrong::BothInBitmap);
            }
        } else if data != 0 {
            each(Wrong::BitmapWithoutSpace);
        }
    }

    /// In active tables the COPIED flag must say whether the stored refcount is 1.
    pub(super) fn check_copied(
        &self,
        stored: &Stored,
        host: u64,
        raw: u64,
        what: &str,
        times: u64,
        report: &mut CheckReport,
    ) {
        let copied = raw & COPIED != 0;
        if times == 0 || stored.is_wanted(self.cluster_of(host)).is_none_or(|one| one == copied) {
            return;
        }
        report.corrupt(times, || {
            let (flag, is) = if copied { ("set", "not 1") } else { ("not set", "1") };
            format!("the COPIED flag of the {what} at {host:#x} is {flag} but its refcount is {is}")
        });
    }
}

impl Wrong {
    fn text(self, raw: Raw, shape: &Shape) -> String {
        let Raw { entry, bitmap } = raw;
        let host = entry & OFFSET_MASK;
        match self {
            Self::Reserved => format!("L2 entry {entry:#018x} has bits set that must be zero"),
            Self::ZeroFlag if shape.extended => {
                format!(
                    "L2 entry {entry:#018x} has the zero flag, which extended L2 entries do not have"
                )
            }
            Self::ZeroFlag => {
                format!("L2 entry {entry:#018x} has the zero flag, which version 2 does not have")
            }
            Self::Unaligned => format!(
                "L2 entry {entry:#018x} names the offset {host:#x}, which is not aligned to a cluster"
            ),
            Self::CopiedCompressed => {
                let (host, _) = shape.codec.compressed_range(entry);
                format!("the compressed cluster at {host} has the COPIED flag, which it never may")
            }
            Self::CompressedInDataFile => format!(
                "L2 entry {entry:#018x} is a compressed cluster, which there can't be with a data file"
            ),
            Self::CompressedBitmap => format!(
                "the compressed L2 entry {entry:#018x} has the subcluster bitmap {bitmap:#018x} instead of zero"
            ),
            Self::BothInBitmap => format!(
                "L2 entry {entry:#018x} has subclusters with data that also read as zeroes (bitmap {bitmap:#018x})"
            ),
            Self::BitmapWithoutSpace => format!(
                "L2 entry {entry:#018x} has no space but subclusters with data (bitmap {bitmap:#018x})"
            ),
        }
    }
}

/// Judges and counts L2 tables.
pub(super) struct Visitor<'a> {
    pub(super) shape: &'a Shape,
    pub(super) cells: &'a Cells,
    /// For judging COPIED flags; `None` when refcounts are not believed.
    pub(super) stored: Option<&'a Stored>,
    /// False when the tables have been judged before, and are only counted in another window.
    pub(super) judging: bool,
}

/// How often the entries of a table count.
#[derive(Clone, Copy)]
struct Times {
    all: u64,
    active: u64,
    /// `active`, or zero when the table's own refcount is not known: its COPIED flags can't be judged then.
    judged: u64,
}

impl Visitor<'_> {
    /// A table without its content, for one that is known to hold only zeroes.
    pub(super) fn place(&self, table: &L2Table, report: &mut CheckReport) {
        let times = u64::from(table.active) + u64::from(table.snapshots);
        self.reference(table.at, self.shape.cluster(), Use::L2, times, report);
    }

    /// A table.
    pub(super) fn table(&self, table: &L2Table, bytes: &[u8], report: &mut CheckReport) {
        self.place(table, report);
        let active = u64::from(table.active);
        let own = self.stored.and_then(|s| s.is_wanted(self.shape.cluster_of(table.at)));
        let times = Times {
            all: active + u64::from(table.snapshots),
            active,
            judged: if own.is_some() && self.judging { active } else { 0 },
        };
        // Contiguity is judged inside each table.
        let mut expected = None;
        for raw in self.shape.entries(bytes) {
            if raw.entry | raw.bitmap == 0 {
                continue;
            }
            if self.judging {
                self.shape.judge(raw, |wrong| {
                    report.bad_entry(times.all, || wrong.text(raw, self.shape));
                });
            }
            if raw.entry & COMPRESSED != 0 {
                self.compressed(raw.entry, times, report);
            } else if self.shape.has_space(raw) {
                self.standard(raw.entry, times, &mut expected, report);
            }
        }
    }

    fn compressed(&self, entry: u64, times: Times, report: &mut CheckReport) {
        if self.shape.data_file {
            return;
        }
        let (host, len) = self.shape.codec.compressed_range(entry);
        if self.judging {
            report.allocated_clusters += times.active;
            report.compressed_clusters += times.active;
            // Compressed clusters are never contiguous in the sense that matters.
            report.fragmented_clusters += times.active;
        }
        self.reference(host.get(), len.get(), Use::Data, times.all, report);
    }

    fn standard(
        &self,
        entry: u64,
        times: Times,
        expected: &mut Option<u64>,
        report: &mut CheckReport,
    ) {
        let (host, cluster) = (entry & OFFSET_MASK, self.shape.cluster());
        if self.judging && times.active > 0 {
            report.allocated_clusters += times.active;
            if expected.is_some_and(|e| e != host) {
                report.fragmented_clusters += times.active;
            }
            *expected = host.checked_add(cluster);
        }
        if self.shape.data_file {
            // What lies in a data file is never shared.
            if entry & COPIED == 0 && times.judged > 0 {
                report.bad_entry(times.judged, || {
                    format!("the COPIED flag of the data cluster at {host:#x} in the data file is not set")
                });
            }
            return;
        }
        if let Some(stored) = self.stored {
            self.shape.check_copied(stored, host, entry, "data cluster", times.judged, report);
        }
        self.reference(host, cluster, Use::Data, times.all, report);
    }

    /// Counts `times` references to the clusters of a region.
    fn reference(&self, at: u64, len: u64, kind: Use, times: u64, report: &mut CheckReport) {
        let Some(end) = self.shape.end_inside(at, len) else {
            if self.judging {
                let file = self.shape.file_len;
                report.bad_entry(times, || {
                    format!(
                        "{} of {len:#x} bytes at {at:#x} lies beyond the file's end at {file:#x}",
                        kind.text()
                    )
                });
            }
            return;
        };
        count(self.shape, self.cells, at..end, kind, times, report);
    }
}

/// Counts `times` references to the clusters of a region that is not empty.
pub(super) fn count(
    shape: &Shape,
    cells: &Cells,
    region: std::ops::Range<u64>,
    kind: Use,
    times: u64,
    report: &mut CheckReport,
) {
    let last = ByteLen::new(region.end.saturating_sub(1));
    for cluster in shape.cluster_of(region.start)..=shape.cluster_of(last.get()) {
        let too_many = cells.add(cluster, kind, times);
        if too_many > 0 {
            let (max, at) = (shape.refcounts.max(), cluster << shape.geometry.cluster_bits());
            report.corrupt(too_many, || {
                format!("the cluster at {at:#x} has more references than the {max} that the refcount width allows")
            });
        }
    }
}
