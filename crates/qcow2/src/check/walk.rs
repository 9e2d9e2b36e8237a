//! The walk over all metadata, and the comparison of what it found with the stored reference counts.
//!
//! Callers: [`super::check`]. Each distinct L2 table is read once, however many L1 tables name it: its
//! references then count as often as it is named. That keeps the work bounded by the image's size.

use super::CheckOptions;
use super::counts::{Budget, Counts, Use};
use super::report::{CheckReport, Severity};
use super::stored::{Block, Stored};
use crate::format::{
    Bitmap, BitmapExtension, COMPRESSED, COPIED, ENTRY_BYTES, EXT_BITMAPS, EntryCodec, EntryError,
    Geometry, Header, OFFSET_MASK, RefcountFormat, ZERO, printable,
};
use crate::open::{read_bytes, read_snapshots};
use bedplate_storage::Storage;
use bedplate_types::{ByteLen, Error, ErrorKind, HostOffset, Result};
use futures_util::future::join_all;
use std::collections::BTreeMap;

/// Tables are read in pieces of this many bytes.
const READ_BYTES: u64 = 1 << 20;
/// Bytes of L2 tables read at once.
const L2_READ_BYTES: u64 = 4 << 20;
/// Bytes of L1 tables of snapshots that are read at most, all together.
const MAX_SNAPSHOT_L1_BYTES: u64 = 4 << 30;
/// What a known L2 table costs in memory, about.
const L2_COST: u64 = 48;

/// How often an L2 table is named.
#[derive(Clone, Copy, Default)]
struct L2Named {
    active: u64,
    snapshots: u64,
    /// `active`, or zero when the table's own refcount is not known: its COPIED flags can't be judged then.
    judged: u64,
}

/// The state of one check.
pub(super) struct Walker<'a, S: Storage> {
    storage: &'a S,
    header: Header,
    geometry: Geometry,
    codec: EntryCodec,
    refcounts: RefcountFormat,
    file_len: u64,
    counts: Counts,
    stored: Stored,
    l2_tables: BTreeMap<u64, L2Named>,
    /// The refcounts are known to be stale: nothing is judged by them.
    stale: bool,
    pub(super) report: CheckReport,
}

impl<'a, S: Storage> Walker<'a, S> {
    pub(super) async fn new(storage: &'a S, header: Header, options: CheckOptions) -> Result<Self> {
        let geometry = header.geometry()?;
        let refcounts = header.refcounts()?;
        let cluster = usize::try_from(geometry.cluster_size())
            .map_err(|_| Error::new(ErrorKind::Limit, "the cluster size is too large"))?;
        let mut walker = Self {
            storage,
            geometry,
            codec: EntryCodec::new(geometry, header.version),
            refcounts,
            file_len: storage.len().get(),
            counts: Counts::new(refcounts.max(), Budget::new(options.max_memory)),
            stored: Stored::new(Vec::new(), refcounts, cluster),
            l2_tables: BTreeMap::new(),
            stale: false,
            report: CheckReport {
                filename: storage.name(),
                format: "qcow2",
                total_clusters: geometry.clusters(header.disk_size()),
                max_findings: options.max_findings,
                ..CheckReport::default()
            },
            header,
        };
        let len = u64::from(walker.header.refcount_table_clusters) * geometry.cluster_size();
        walker.stored.table = walker.read_table(walker.header.refcount_table_offset, len).await?;
        Ok(walker)
    }

    /// Judges nothing by the stored refcounts.
    pub(super) fn ignore_refcounts(&mut self) {
        self.stale = true;
    }

    /// The references counted, if the tables they come from are sound.
    ///
    /// # Errors
    /// `Corrupt` with the first finding.
    pub(super) fn into_counts(self) -> Result<Counts> {
        if self.report.corruptions + self.report.check_errors == 0 {
            return Ok(self.counts);
        }
        let first = self.report.findings.first().map_or("", |f| f.text.as_str());
        Err(Error::new(
            ErrorKind::Corrupt,
            format!(
                "the refcounts of '{}' can't be rebuilt, because its tables are damaged ({first}); repair it with \
                 'qemu-img check -r all'",
                self.storage.name()
            ),
        ))
    }

    /// Counts every reference of the image.
    pub(super) async fn count_tables(&mut self) -> Result<()> {
        let cluster = self.geometry.cluster_size();
        self.reference(0, cluster, Use::Header, 1)?;
        let (at, size) = (self.header.l1_offset, self.header.l1_size);
        self.count_l1(at, size, true, 1).await?;
        self.count_snapshots().await?;
        self.count_bitmaps().await?;
        self.count_l2_tables().await?;
        // The blocks come last: each of them must then have been named once.
        let table = u64::from(self.header.refcount_table_clusters) * cluster;
        self.reference(self.header.refcount_table_offset.get(), table, Use::Refcounts, 1)?;
        self.count_refcount_blocks()
    }

    fn corrupt(&mut self, times: u64, text: impl FnOnce() -> String) {
        self.report.add(Severity::Corruption, times, text);
    }

    /// Counts `times` references to the clusters of a region. The file's last cluster may be short.
    fn reference(&mut self, at: u64, len: u64, kind: Use, times: u64) -> Result<()> {
        if len == 0 || times == 0 {
            return Ok(());
        }
        let end = at
            .checked_add(len)
            .filter(|end| end.saturating_sub(self.file_len) < self.geometry.cluster_size());
        let Some(end) = end else {
            let file_len = self.file_len;
            self.corrupt(times, || {
                format!(
                    "{} of {len:#x} bytes at {at:#x} lies beyond the file's end at {file_len:#x}",
                    kind.text()
                )
            });
            return Ok(());
        };
        let bits = self.geometry.cluster_bits();
        for cluster in at >> bits..=(end - 1) >> bits {
            let too_many = self.counts.add(cluster, kind, times)?;
            let max = self.refcounts.max();
            self.corrupt(too_many, || {
                format!(
                    "the cluster at {:#x} has more references than the {max} that the refcount width allows",
                    cluster << bits
                )
            });
        }
        Ok(())
    }

    /// Reads a table of 8-byte entries. What lies beyond the file's end is left out: it would be zeroes.
    async fn read_table(&self, at: HostOffset, len: u64) -> Result<Vec<u64>> {
        let len = len.min(self.file_len.saturating_sub(at.get()).next_multiple_of(ENTRY_BYTES));
        let mut out = Vec::new();
        let mut done = 0;
        while done < len {
            let n = (len - done).min(READ_BYTES);
            let size = usize::try_from(n).unwrap_or(0);
            let from = at.checked_add(ByteLen::new(done)).ok_or_else(|| {
                Error::new(ErrorKind::BadImage, "a table ends beyond the largest offset")
            })?;
            let bytes = read_bytes(self.storage, from, size).await?;
            out.extend(bytes.as_chunks().0.iter().map(|b| u64::from_be_bytes(*b)));
            done += n;
        }
        Ok(out)
    }

    /// Counts an L1 table and notes the L2 tables it names; `times` tables are the same.
    async fn count_l1(
        &mut self,
        at: HostOffset,
        size: u32,
        active: bool,
        times: u64,
    ) -> Result<()> {
        let len = u64::from(size) * ENTRY_BYTES;
        self.reference(at.get(), len, Use::L1, times)?;
        // The reference check has reported tables beyond the end; those are not read.
        if at.get() >= self.file_len {
            return Ok(());
        }
        for (index, raw) in self.read_table(at, len).await?.into_iter().enumerate() {
            let host = raw & OFFSET_MASK;
            if let Err(EntryError::Reserved) = self.codec.l1(raw) {
                self.corrupt(times, || {
                    format!("L1 entry {index} ({raw:#018x}) has bits set that must be zero")
                });
            }
            if host == 0 {
                continue;
            }
            if !host.is_multiple_of(self.geometry.cluster_size()) {
                self.corrupt(times, || {
                    format!("L1 entry {index} names an L2 table at {host:#x}, which is not aligned to a cluster")
                });
            }
            if active {
                self.check_copied(host, raw, "L2 table", 1).await?;
            }
            let named = match self.l2_tables.entry(host) {
                std::collections::btree_map::Entry::Occupied(e) => e.into_mut(),
                std::collections::btree_map::Entry::Vacant(e) => {
                    self.counts.budget.take(L2_COST)?;
                    e.insert(L2Named::default())
                }
            };
            let number = if active { &mut named.active } else { &mut named.snapshots };
            *number = number.saturating_add(times);
        }
        Ok(())
    }

    async fn count_snapshots(&mut self) -> Result<()> {
        if self.header.nb_snapshots == 0 {
            return Ok(());
        }
        let (snapshots, len) = match read_snapshots(self.storage, &self.header).await {
            Ok(found) => found,
            Err(e) if e.kind() == ErrorKind::BadImage => {
                self.report.add(Severity::Error, 1, || format!("{e:#}"));
                return Ok(());
            }
            Err(e) => return Err(e),
        };
        // Snapshots that share a table are walked once.
        let mut tables: BTreeMap<(u64, u32), u64> = BTreeMap::new();
        for snapshot in &snapshots {
            match snapshot.check_l1(self.geometry) {
                Ok(()) => {
                    *tables.entry((snapshot.l1_offset.get(), snapshot.l1_size)).or_default() += 1;
                }
                Err(e) => self.corrupt(1, || e.to_string()),
            }
        }
        let mut bytes = 0u64;
        for ((at, size), times) in tables {
            bytes += u64::from(size) * ENTRY_BYTES;
            if bytes > MAX_SNAPSHOT_L1_BYTES {
                return Err(Error::new(
                    ErrorKind::Limit,
                    format!(
                        "the L1 tables of the snapshots of '{}' are longer than {MAX_SNAPSHOT_L1_BYTES} bytes in all",
                        self.storage.name()
                    ),
                ));
            }
            self.count_l1(HostOffset::new(at), size, false, times).await?;
        }
        self.reference(self.header.snapshots_offset.get(), len as u64, Use::Snapshots, 1)
    }

    /// Bitmaps that a program without knowledge of them has made stale count as leaked, as they will be.
    async fn count_bitmaps(&mut self) -> Result<()> {
        if !self.header.bitmaps_valid() {
            return Ok(());
        }
        let Some(data) = self.header.extension(EXT_BITMAPS) else { return Ok(()) };
        let ext = match BitmapExtension::parse(data, self.geometry) {
            Ok(ext) => ext,
            Err(e) => {
                self.corrupt(1, || e.to_string());
                return Ok(());
            }
        };
        let (at, len) = (ext.directory_offset, ext.directory_size);
        self.reference(at.get(), len, Use::Bitmaps, 1)?;
        if at.get().checked_add(len).is_none_or(|end| end > self.file_len.next_multiple_of(512)) {
            return Ok(());
        }
        let size = usize::try_from(len).unwrap_or(0);
        let directory = read_bytes(self.storage, at, size).await?;
        let bitmaps = match ext.parse_directory(&directory, self.geometry) {
            Ok(list) => list,
            Err(e) => {
                self.corrupt(1, || e.to_string());
                return Ok(());
            }
        };
        for bitmap in bitmaps {
            let table_len = u64::from(bitmap.table_size) * ENTRY_BYTES;
            self.reference(bitmap.table_offset.get(), table_len, Use::Bitmaps, 1)?;
            for raw in self.read_table(bitmap.table_offset, table_len).await? {
                match Bitmap::table_entry(raw, self.geometry) {
                    Ok(None) => {}
                    Ok(Some(host)) => {
                        let cluster = self.geometry.cluster_size();
                        self.reference(host.get(), cluster, Use::Bitmaps, 1)?;
                    }
                    Err(e) => self.corrupt(1, || {
                        format!(
                            "the table of bitmap '{}' has the wrong entry {raw:#018x}: {e}",
                            printable(&bitmap.name)
                        )
                    }),
                }
            }
        }
        Ok(())
    }

    async fn count_l2_tables(&mut self) -> Result<()> {
        let cluster = self.geometry.cluster_size();
        let tables: Vec<_> = std::mem::take(&mut self.l2_tables).into_iter().collect();
        // Several tables are read at once, because one after the other waits for the device most of the time.
        let at_once = (L2_READ_BYTES / cluster).clamp(1, 64) as usize;
        for group in tables.chunks(at_once) {
            let reads = group.iter().map(|(at, _)| self.read_table(HostOffset::new(*at), cluster));
            let contents = join_all(reads).await;
            for ((at, named), content) in group.iter().zip(contents) {
                self.count_l2(*at, *named, &content?).await?;
            }
        }
        Ok(())
    }

    async fn count_l2(&mut self, at: u64, mut named: L2Named, content: &[u64]) -> Result<()> {
        let cluster = self.geometry.cluster_size();
        let own = match self.stale {
            true => None,
            false => self.stored.get(self.storage, at >> self.geometry.cluster_bits()).await?,
        };
        named.judged = if own.is_some() { named.active } else { 0 };
        let times = named.active.saturating_add(named.snapshots);
        self.reference(at, cluster, Use::L2, times)?;
        // Contiguity is judged inside each table.
        let mut expected = None;
        for &raw in content {
            if raw & COMPRESSED != 0 {
                self.count_compressed(raw, named)?;
            } else if raw & (OFFSET_MASK | ZERO) != 0 {
                self.count_standard(raw, named, &mut expected).await?;
            } else if self.codec.l2(raw) == Err(EntryError::Reserved) {
                self.reserved(raw, times);
            }
        }
        Ok(())
    }

    fn reserved(&mut self, raw: u64, times: u64) {
        self.corrupt(times, || format!("L2 entry {raw:#018x} has bits set that must be zero"));
    }

    fn count_compressed(&mut self, raw: u64, named: L2Named) -> Result<()> {
        let times = named.active.saturating_add(named.snapshots);
        let (host, len) = self.codec.compressed_range(raw);
        if raw & COPIED != 0 {
            self.corrupt(times, || {
                format!("the compressed cluster at {host} has the COPIED flag, which it never may")
            });
        }
        self.report.allocated_clusters += named.active;
        self.report.compressed_clusters += named.active;
        // Compressed clusters are never contiguous in the sense that matters.
        self.report.fragmented_clusters += named.active;
        self.reference(host.get(), len.get(), Use::Data, times)
    }

    async fn count_standard(
        &mut self,
        raw: u64,
        named: L2Named,
        expected: &mut Option<u64>,
    ) -> Result<()> {
        let cluster = self.geometry.cluster_size();
        let times = named.active.saturating_add(named.snapshots);
        let host = raw & OFFSET_MASK;
        match self.codec.l2(raw) {
            Err(EntryError::Reserved) => self.reserved(raw, times),
            Err(EntryError::ZeroInV2) => self.corrupt(times, || {
                format!("L2 entry {raw:#018x} has the zero flag, which version 2 does not have")
            }),
            _ => {}
        }
        if host == 0 {
            return Ok(());
        }
        if !host.is_multiple_of(cluster) {
            self.corrupt(times, || {
                format!("L2 entry {raw:#018x} names the offset {host:#x}, which is not aligned to a cluster")
            });
        }
        if named.active > 0 {
            self.report.allocated_clusters += named.active;
            if expected.is_some_and(|e| e != host) {
                self.report.fragmented_clusters += named.active;
            }
            *expected = host.checked_add(cluster);
            self.check_copied(host, raw, "data cluster", named.judged).await?;
        }
        self.reference(host, cluster, Use::Data, times)
    }

    /// In active tables the COPIED flag must say whether the stored refcount is 1.
    async fn check_copied(&mut self, host: u64, raw: u64, what: &str, times: u64) -> Result<()> {
        if times == 0 || self.stale {
            return Ok(());
        }
        let cluster = host >> self.geometry.cluster_bits();
        let Some(count) = self.stored.get(self.storage, cluster).await? else { return Ok(()) };
        let copied = raw & COPIED != 0;
        if copied != (count == 1) {
            self.corrupt(times, || {
                let flag = if copied { "set" } else { "not set" };
                format!("the COPIED flag of the {what} at {host:#x} is {flag} but its refcount is {count}")
            });
        }
        Ok(())
    }

    fn count_refcount_blocks(&mut self) -> Result<()> {
        let cluster = self.geometry.cluster_size();
        let table = std::mem::take(&mut self.stored.table);
        for (index, &raw) in table.iter().enumerate().filter(|(_, raw)| **raw != 0) {
            match self.refcounts.table_entry(raw) {
                Ok(None) => {}
                Ok(Some(host)) if host.get() >= self.file_len.next_multiple_of(cluster) => {
                    self.corrupt(1, || {
                        format!("refcount block {index} at {host} lies beyond the file's end")
                    });
                }
                Ok(Some(host)) => {
                    self.reference(host.get(), cluster, Use::Refcounts, 1)?;
                    let count = self.counts.get(self.geometry.host_cluster(host));
                    if count != 1 {
                        self.corrupt(1, || {
                            format!("refcount block {index} at {host} has {count} references")
                        });
                    }
                }
                Err(e) => self.corrupt(1, || {
                    format!("refcount table entry {index} ({raw:#018x}) is wrong: {e}")
                }),
            }
        }
        self.stored.table = table;
        Ok(())
    }

    /// Compares the counted references with the stored reference counts.
    pub(super) async fn compare(&mut self) -> Result<()> {
        let file_end = self.file_len.div_ceil(self.geometry.cluster_size());
        let end = file_end.max(self.counts.end());
        let mut highest = 0;
        let blocks = self.stored.table.len() as u64;
        for index in 0..blocks.min(self.refcounts.blocks_for(end)) {
            let block = self.stored.block(self.storage, index).await?;
            let first = index.saturating_mul(self.refcounts.entries_per_block());
            let last = first.saturating_add(self.refcounts.entries_per_block()).min(end);
            match block {
                Block::Absent => highest = self.all_uncounted(first, last).max(highest),
                Block::Unreadable => {
                    let n = last.saturating_sub(first);
                    self.report.add(Severity::Error, n, || {
                        format!(
                            "refcount block {index} can't be read, so {n} refcounts are not known"
                        )
                    });
                }
                Block::Loaded(_) => {
                    for cluster in first..last {
                        let offset = usize::try_from(cluster - first).unwrap_or(usize::MAX);
                        let count = block.get(self.refcounts, offset).unwrap_or(0);
                        if self.compare_one(cluster, count, self.counts.get(cluster)) {
                            highest = cluster;
                        }
                    }
                }
            }
        }
        let rest = self.refcounts.first_cluster(blocks).unwrap_or(u64::MAX);
        highest = self.all_uncounted(rest, end).max(highest);
        self.report.image_end_offset = (highest + 1).saturating_mul(self.geometry.cluster_size());
        self.report_mixed_use().await
    }

    /// Compares clusters whose stored count is zero; returns the highest in use.
    fn all_uncounted(&mut self, start: u64, end: u64) -> u64 {
        let found: Vec<_> = self.counts.referenced(start, end).collect();
        for (cluster, references) in &found {
            self.compare_one(*cluster, 0, *references);
        }
        found.last().map_or(0, |(cluster, _)| *cluster)
    }

    /// Returns whether the cluster is in use in either sense.
    fn compare_one(&mut self, cluster: u64, stored: u64, references: u64) -> bool {
        if stored != references {
            let at = cluster << self.geometry.cluster_bits();
            let severity = if stored < references { Severity::Corruption } else { Severity::Leak };
            self.report.add(severity, 1, || {
                let word = if stored < references { "is too low" } else { "leaks space" };
                format!("the cluster at {at:#x} {word}: refcount {stored}, references {references}")
            });
        }
        stored > 0 || references > 0
    }

    /// Space used for different things is corrupt even where the stored count allows for all of them; where
    /// it does not, the comparison has counted it already.
    async fn report_mixed_use(&mut self) -> Result<()> {
        let mixed: Vec<_> = self.counts.mixed().collect();
        for (cluster, uses) in mixed {
            let stored = self.stored.get(self.storage, cluster).await?;
            if stored.is_some_and(|n| n >= self.counts.get(cluster)) {
                let at = cluster << self.geometry.cluster_bits();
                self.corrupt(1, || format!("the cluster at {at:#x} is used for {uses} at once"));
            }
        }
        Ok(())
    }
}
