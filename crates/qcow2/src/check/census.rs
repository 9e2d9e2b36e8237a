//! Counts all references of an image, window by window of its file.
//!
//! Callers: the check and the parts of the repair. A window is as many clusters as fit in memory, mostly all; each window
//! goes through all tables again. L2 tables are read with many reads in flight, on several threads where that is wanted.

use super::cells::{CELL_BYTES, Cells, Use};
use super::outline::{Draft, L2Table, Outline};
use super::reader::Reader;
use super::report::CheckReport;
use super::stored::Stored;
use super::tables::{Shape, Visitor, count};
use super::{CheckOptions, Progress};
use crate::format::{ENTRY_BYTES, Header};
use bedplate_runtime::buf::AlignedBuf;
use bedplate_runtime::{Config, Runtime};
use bedplate_storage::Storage;
use bedplate_types::{Error, ErrorKind, Result};
use futures_util::stream::{FuturesUnordered, StreamExt};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Neighbouring L2 tables are read at once up to this many bytes.
const RUN_BYTES: u64 = 256 << 10;
/// Bytes of L2 tables in flight for each thread.
const FLIGHT_BYTES: u64 = 8 << 20;
/// More windows are not gone through: such images are not made by use.
const MAX_WINDOWS: u64 = 256;

/// What is judged while counting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Judge {
    /// COPIED flags are compared with the stored refcounts.
    pub(super) refcounts: bool,
    /// The refcounts' own table and blocks are left out, but not free.
    pub(super) reserve: bool,
}

impl Judge {
    /// Everything.
    pub(super) const ALL: Self = Self { refcounts: true, reserve: false };
    /// Only what does not depend on refcounts, because these are stale.
    pub(super) const TABLES: Self = Self { refcounts: false, reserve: false };
    /// As if the image had no refcounts, and will get new ones.
    pub(super) const ANEW: Self = Self { refcounts: false, reserve: true };
}

/// Counting that is under way.
pub(super) struct Census<'a, S: Storage> {
    pub(super) reader: Reader<'a, S>,
    pub(super) header: Header,
    pub(super) shape: Shape,
    pub(super) outline: Outline,
    pub(super) stored: Stored,
    pub(super) report: CheckReport,
    /// Up to which cluster the comparison has come, and the highest in use so far.
    pub(super) compared: u64,
    pub(super) highest: u64,
    judge: Judge,
    options: &'a CheckOptions,
    stage: &'static str,
    next: Option<u64>,
    window: u64,
    windows: u64,
}

impl<'a, S: Storage> Census<'a, S> {
    /// Reads what leads to the L2 tables.
    ///
    /// # Errors
    /// What the storage reports, or `Limit`.
    pub(super) async fn new(
        storage: &'a S,
        header: Header,
        options: &'a CheckOptions,
        judge: Judge,
        stage: &'static str,
    ) -> Result<Self> {
        options.tell(stage, 0.0);
        let reader = Reader::new(storage);
        let shape = Shape::new(&header, reader.file_len)?;
        let mut report = CheckReport {
            filename: storage.name(),
            format: "qcow2",
            total_clusters: shape.geometry.clusters(header.disk_size()),
            max_findings: options.max_findings,
            ..CheckReport::default()
        };
        let mut stored = read_refcount_table(reader, &header, &shape).await?;
        if judge.refcounts {
            stored.learn(reader, shape.end_cluster(), 1..=1).await?;
        }
        let draft = Draft {
            reader,
            shape: &shape,
            header: &header,
            stored: judge.refcounts.then_some(&stored),
            report: &mut report,
            outline: Outline::default(),
        };
        let outline = draft.read().await?;
        let lists = (outline.tables.len() * size_of::<L2Table>()) as u64;
        let memory = options.max_memory.saturating_sub(lists).max(options.max_memory / 4);
        let unit = shape.refcounts.entries_per_block().max(1024);
        let window = (memory / CELL_BYTES / unit).max(1).saturating_mul(unit);
        Ok(Self {
            reader,
            header,
            shape,
            outline,
            stored,
            report,
            compared: 0,
            highest: 0,
            judge,
            options,
            stage,
            next: Some(0),
            window,
            windows: 0,
        })
    }

    /// True when one window is enough.
    pub(super) fn is_single(&self) -> bool {
        self.shape.end_cluster() <= self.window
    }

    /// Counts the next window that has references; `None` at the end.
    ///
    /// # Errors
    /// What the storage reports, or `Limit`.
    pub(super) async fn next(&mut self) -> Result<Option<Cells>> {
        let Some(start) = self.next.take() else { return Ok(None) };
        self.windows += 1;
        if self.windows > MAX_WINDOWS {
            return Err(Error::new(
                ErrorKind::Limit,
                format!(
                    "checking '{}' needs more than {MAX_WINDOWS} times the {} bytes of memory it may use; the image is \
                     very large or malicious",
                    self.reader.storage.name(),
                    self.options.max_memory
                ),
            ));
        }
        let unit = self.shape.refcounts.entries_per_block().max(1024);
        let start = start - start % unit;
        let end = start.saturating_add(self.window).min(self.shape.end_cluster()).max(start);
        let cells = Cells::new(start..end, self.shape.refcounts.max());
        for claim in &self.outline.claims {
            let region = claim.at..claim.at.saturating_add(claim.len);
            count(&self.shape, &cells, region, claim.kind, claim.times, &mut self.report);
        }
        self.walk(&cells).await?;
        self.refcount_structures(&cells);
        cells.complete()?;
        for (_, uses) in cells.mixed() {
            self.report.damage.refcounts |= uses.has(Use::Refcounts);
            self.report.damage.bitmaps |= uses.has(Use::Bitmaps);
            if !uses.has(Use::Refcounts) && !uses.has(Use::Bitmaps) {
                self.report.damage.entries += 1;
            }
        }
        self.next = cells.beyond();
        Ok(Some(cells))
    }

    fn is_first(&self) -> bool {
        self.windows == 1
    }

    async fn walk(&mut self, cells: &Cells) -> Result<()> {
        let visitor = Visitor {
            shape: &self.shape,
            cells,
            stored: self.stored_to_judge().filter(|_| self.is_first()),
            judging: self.is_first(),
        };
        let tables = &self.outline.tables;
        let cluster = self.shape.cluster();
        let runs = runs_of(tables, cluster);
        let job = Job {
            reader: self.reader,
            tables,
            visitor,
            cluster,
            careful: Reader::<S>::is_suspicious(tables.len() as u64 * cluster),
            next: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            max_findings: self.options.max_findings,
            progress: self.options.progress.as_ref(),
            stage: self.stage,
            runs,
        };
        let threads = self.options.threads.min(job.runs.len() / 2);
        let parts = if threads > 1 { job.on_threads(threads)? } else { job.work().await? };
        for (_, part) in parts {
            self.report.merge(part);
        }
        Ok(())
    }

    fn stored_to_judge(&self) -> Option<&Stored> {
        self.judge.refcounts.then_some(&self.stored)
    }

    /// The blocks come last: each of them must then have been named once.
    fn refcount_structures(&mut self, cells: &Cells) {
        let (cluster, first) = (self.shape.cluster(), self.is_first());
        let at = self.header.refcount_table_offset.get();
        let len = u64::from(self.header.refcount_table_clusters) * cluster;
        match self.shape.end_inside(at, len) {
            Some(end) => self.structure(cells, at..end, None),
            None if first => {
                self.report.damage.refcounts = true;
                let file = self.shape.file_len;
                self.report.corrupt(1, || {
                    format!("the refcount table of {len:#x} bytes at {at:#x} lies beyond the file's end at {file:#x}")
                });
            }
            None => {}
        }
        let entries: Vec<_> = self.stored.entries().collect();
        for (index, raw) in entries {
            match self.shape.refcounts.table_entry(raw) {
                Ok(None) => {}
                Ok(Some(host)) => match self.shape.end_inside(host.get(), cluster) {
                    Some(end) => self.structure(cells, host.get()..end, Some(index)),
                    None => self.bad_block(first, || {
                        format!("refcount block {index} at {host} lies beyond the file's end")
                    }),
                },
                Err(e) => self.bad_block(first, || {
                    format!("refcount table entry {index} ({raw:#018x}) is wrong: {e}")
                }),
            }
        }
    }

    fn bad_block(&mut self, first: bool, text: impl FnOnce() -> String) {
        self.report.damage.refcounts = true;
        if first {
            self.report.corrupt(1, text);
        }
    }

    /// Counts the refcount table, or the block `index`.
    fn structure(&mut self, cells: &Cells, region: Range<u64>, index: Option<u64>) {
        let clusters =
            self.shape.cluster_of(region.start)..self.shape.cluster_of(region.end - 1) + 1;
        if self.judge.reserve {
            clusters.for_each(|c| cells.reserve(c));
            return;
        }
        let at = region.start;
        count(&self.shape, cells, region, Use::Refcounts, 1, &mut self.report);
        for cluster in clusters.filter(|c| cells.window().contains(c)) {
            let references = cells.get(cluster);
            if references == 1 {
                continue;
            }
            self.report.damage.refcounts = true;
            if let Some(index) = index {
                self.report.corrupt(1, || {
                    format!("refcount block {index} at {at:#x} has {references} references")
                });
            }
        }
    }
}

async fn read_refcount_table<S: Storage>(
    reader: Reader<'_, S>,
    header: &Header,
    shape: &Shape,
) -> Result<Stored> {
    let cluster = shape.cluster();
    let len = u64::from(header.refcount_table_clusters) * cluster;
    let mut table = vec![0u64; usize::try_from(len / ENTRY_BYTES).unwrap_or(0)];
    let fill = |index: u64, raw| {
        if let Some(entry) = usize::try_from(index).ok().and_then(|i| table.get_mut(i)) {
            *entry = raw;
        }
    };
    reader.entries(header.refcount_table_offset, len, fill).await?;
    // Empty entries at the end say nothing.
    table.truncate(table.iter().rposition(|raw| *raw != 0).map_or(0, |last| last + 1));
    Ok(Stored::new(table, shape.refcounts, cluster))
}

/// Neighbouring tables together, as ranges of the list.
fn runs_of(tables: &[L2Table], cluster: u64) -> Vec<Range<u32>> {
    let mut runs: Vec<Range<u32>> = Vec::new();
    let most = (RUN_BYTES / cluster).max(1) as u32;
    let mut last = None;
    for (index, table) in (0u32..).zip(tables) {
        match runs.last_mut() {
            Some(run) if last == Some(table.at) && run.end - run.start < most => run.end += 1,
            _ => runs.push(index..index + 1),
        }
        last = table.at.checked_add(cluster);
    }
    runs
}

/// One walk over the L2 tables, shared by its threads.
struct Job<'a, S: Storage> {
    reader: Reader<'a, S>,
    tables: &'a [L2Table],
    visitor: Visitor<'a>,
    cluster: u64,
    careful: bool,
    runs: Vec<Range<u32>>,
    next: AtomicUsize,
    done: AtomicUsize,
    /// Another thread has failed.
    stop: AtomicBool,
    max_findings: usize,
    progress: Option<&'a Progress>,
    stage: &'static str,
}

/// What was found in which run.
type Parts = Vec<(usize, CheckReport)>;

impl<S: Storage> Job<'_, S> {
    /// Works on threads of its own, each with a runtime.
    fn on_threads(&self, threads: usize) -> Result<Parts> {
        let mut parts = std::thread::scope(|scope| {
            let work = || Runtime::new(Config::default())?.block_on(self.work());
            let started: Vec<_> = (0..threads)
                .map(|n| {
                    std::thread::Builder::new()
                        .name(format!("check-{n}"))
                        .spawn_scoped(scope, work)
                        .map_err(|e| Error::io("cannot start a thread", e))
                })
                .collect();
            let mut all = Vec::new();
            for thread in started {
                let died = |_| Err(Error::new(ErrorKind::Cancelled, "a thread of the check died"));
                all.extend(thread?.join().unwrap_or_else(died)?);
            }
            Ok::<_, Error>(all)
        })?;
        // The order of findings must not depend on which thread was faster.
        parts.sort_by_key(|(run, _)| *run);
        Ok(parts)
    }

    /// Takes run after run until none is left.
    async fn work(&self) -> Result<Parts> {
        let depth = (FLIGHT_BYTES / RUN_BYTES.max(self.cluster)).max(4) as usize;
        let mut flying = FuturesUnordered::new();
        let mut parts = vec![(usize::MAX, CheckReport::default())];
        let mut room = self.max_findings;
        loop {
            while flying.len() < depth && !self.stop.load(Ordering::Relaxed) {
                let index = self.next.fetch_add(1, Ordering::Relaxed);
                let Some(run) = self.runs.get(index) else { break };
                flying.push(async move { (index, self.read(run).await) });
            }
            let Some((index, bytes)) = flying.next().await else { return Ok(parts) };
            let bytes = bytes.inspect_err(|_| self.stop.store(true, Ordering::Relaxed))?;
            let mut part = CheckReport { max_findings: room, ..CheckReport::default() };
            self.visit(index, bytes.as_deref(), &mut part);
            room -= part.findings.len().min(room);
            match parts.first_mut() {
                // Runs without sentences are one sum.
                Some((_, sum)) if part.findings.is_empty() => sum.merge(part),
                _ => parts.push((index, part)),
            }
            self.tell();
        }
    }

    async fn read(&self, run: &Range<u32>) -> Result<Option<AlignedBuf>> {
        let Some(first) = self.tables.get(run.start as usize) else { return Ok(None) };
        let len = u64::from(run.end - run.start) * self.cluster;
        let range = first.at..first.at.saturating_add(len);
        if self.careful || first.at >= self.reader.file_len {
            return self.reader.bytes_or_hole(range).await;
        }
        self.reader.bytes(range).await.map(Some)
    }

    fn visit(&self, index: usize, bytes: Option<&[u8]>, part: &mut CheckReport) {
        let Some(run) = self.runs.get(index) else { return };
        let tables = self.tables.get(run.start as usize..run.end as usize).unwrap_or(&[]);
        let Some(bytes) = bytes else {
            return tables.iter().for_each(|table| self.visitor.place(table, part));
        };
        for (table, content) in tables.iter().zip(bytes.chunks(self.cluster as usize)) {
            self.visitor.table(table, content, part);
        }
    }

    fn tell(&self) {
        let done = self.done.fetch_add(1, Ordering::Relaxed) + 1;
        if let Some(Progress(tell)) = self.progress {
            tell(self.stage, done as f64 / self.runs.len().max(1) as f64);
        }
    }
}
