//! The counted references beside the stored ones.
//!
//! Caller: the check, with each window of the census, in order.

use super::cells::Cells;
use super::census::Census;
use super::report::{CheckReport, Severity};
use super::stored::{Block, Loaded, Stored};
use super::tables::Shape;
use bedplate_storage::Storage;
use bedplate_types::Result;
use std::ops::Range;

/// Counts that leak together are reported one by one up to this number.
const ONE_BY_ONE: u64 = 64;

impl<S: Storage> Census<'_, S> {
    /// Compares a window, and what lies between it and the one before.
    ///
    /// # Errors
    /// What the storage reports.
    pub(super) async fn compare(&mut self, cells: &Cells) -> Result<()> {
        let file_end = self.reader.file_len.div_ceil(self.shape.cluster());
        let window = cells.window();
        // References may go a little beyond the file's end; stored counts there are nobody's.
        let last = cells.referenced(file_end.max(window.start)..window.end).last();
        let end = last.map_or(0, |(cluster, _)| cluster + 1).max(file_end.min(window.end));
        self.compare_range(cells, self.compared..end).await?;
        self.compared = self.compared.max(window.end);
        self.report_mixed_use(cells).await
    }

    /// Compares what lies behind the last window.
    ///
    /// # Errors
    /// What the storage reports.
    pub(super) async fn compare_rest(&mut self) -> Result<()> {
        let file_end = self.reader.file_len.div_ceil(self.shape.cluster());
        let nothing = Cells::new(0..0, 0);
        self.compare_range(&nothing, self.compared..file_end).await?;
        self.report.image_end_offset = (self.highest + 1).saturating_mul(self.shape.cluster());
        Ok(())
    }

    async fn compare_range(&mut self, cells: &Cells, range: Range<u64>) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        // Windows start where blocks do.
        let (first, _) = self.stored.format.position(range.start);
        let blocks = self.stored.blocks().min(self.stored.format.blocks_for(range.end));
        let mut next = first;
        while next < blocks {
            let batch = next..(next + self.stored.batch()).min(blocks);
            let loaded = self.stored.read(self.reader, batch.clone()).await?;
            for (index, block) in batch.clone().zip(loaded) {
                self.compare_block(cells, index, &block, range.end);
            }
            next = batch.end;
        }
        let rest = self.stored.range(blocks).start.max(range.start);
        self.uncounted(cells, rest..range.end);
        Ok(())
    }

    fn compare_block(&mut self, cells: &Cells, index: u64, block: &Block, end: u64) {
        let range = self.stored.range(index);
        let range = range.start..range.end.min(end);
        match block {
            Block::Absent | Block::Zeroes => self.uncounted(cells, range),
            Block::Unreadable => {
                let n = range.end.saturating_sub(range.start);
                self.report.error(n, || {
                    format!("refcount block {index} can't be read, so {n} refcounts are not known")
                });
            }
            Block::Loaded(loaded) => self.compare_loaded(cells, range, loaded),
        }
    }

    fn compare_loaded(&mut self, cells: &Cells, range: Range<u64>, loaded: &Loaded) {
        let last = range.start + loaded.last;
        if last < range.end && !cells.touches(range.clone()) {
            let room = self.report.max_findings.saturating_sub(self.report.findings.len()) as u64;
            if loaded.used > ONE_BY_ONE.min(room) {
                self.highest = self.highest.max(last);
                let bits = self.shape.geometry.cluster_bits();
                let (from, to) = (range.start << bits, (last + 1) << bits);
                let used = loaded.used;
                self.report.add(Severity::Leak, used, || {
                    format!("{used} clusters between {from:#x} and {to:#x} leak space: nothing refers to them")
                });
                return;
            }
        }
        for (offset, cluster) in range.enumerate() {
            let stored = self.stored.format.get(&loaded.bytes, offset).unwrap_or(0);
            let references = cells.get(cluster);
            if stored | references != 0 {
                self.highest = self.highest.max(cluster);
                compare_one(&self.shape, cluster, stored, references, &mut self.report);
            }
        }
    }

    /// Compares clusters whose stored count is zero.
    fn uncounted(&mut self, cells: &Cells, range: Range<u64>) {
        for (cluster, references) in cells.referenced(range) {
            self.highest = self.highest.max(cluster);
            compare_one(&self.shape, cluster, 0, references, &mut self.report);
        }
    }

    /// Space used for different things is corrupt even where the stored count allows for all of them; where
    /// it does not, the comparison has counted it already.
    async fn report_mixed_use(&mut self, cells: &Cells) -> Result<()> {
        for (cluster, uses) in cells.mixed() {
            let stored = Stored::get(&mut self.stored, self.reader, cluster).await?;
            if stored.is_some_and(|n| n >= cells.get(cluster)) {
                let at = cluster << self.shape.geometry.cluster_bits();
                self.report.corrupt(1, || {
                    format!("the cluster at {at:#x} is used for {} at once", uses.text())
                });
            }
        }
        Ok(())
    }
}

fn compare_one(
    shape: &Shape,
    cluster: u64,
    stored: u64,
    references: u64,
    report: &mut CheckReport,
) {
    if stored == references {
        return;
    }
    let at = cluster << shape.geometry.cluster_bits();
    let low = stored < references;
    let severity = if low { Severity::Corruption } else { Severity::Leak };
    report.add(severity, 1, || {
        let word = if low { "is too low" } else { "leaks space" };
        format!("the cluster at {at:#x} {word}: refcount {stored}, references {references}")
    });
}
