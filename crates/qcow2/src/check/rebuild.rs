//! A new refcount table with new blocks, beside the old ones.
//!
//! Caller: the correction of counts, where the old structures are damaged, incomplete, or lie over something else.
//! Order: the new blocks and the new table are written to space that nothing refers to and that the old structures do
//! not use, made durable, and then named by the header, which lies in one sector. Until then the old ones are valid.

use super::cells::Cells;
use super::census::{Census, Judge};
use super::repair::patch_refcount_table;
use super::{CheckOptions, header_of};
use crate::format::{ENTRY_BYTES, RefcountFormat};
use bedplate_runtime::buf::{AlignedBuf, SharedBuf};
use bedplate_storage::Storage;
use bedplate_types::{Error, ErrorKind, HostOffset, Result, ResultExt};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Runs of free clusters that are remembered.
const MAX_RUNS: usize = 1 << 16;
/// Bytes of blocks that are written at once.
const RUN_BYTES: usize = 1 << 20;
/// Blocks that may always be written, in bytes; beyond it they must be filled reasonably.
const FREE_BYTES: u64 = 64 << 20;
/// How much longer than needed for dense clusters the blocks may be in all.
const MAX_SPARSE: u64 = 8;

/// What is known of the space before anything is placed.
#[derive(Default)]
struct Space {
    /// Blocks that count something.
    blocks: BTreeSet<u64>,
    references: u64,
    /// Free clusters between others, in ascending order.
    runs: Vec<Range<u64>>,
    /// Just past the last cluster in use.
    end: u64,
    /// Clusters behind the file's end that the old table names. While it is valid, they must stay behind the end, or hold
    /// nothing.
    avoided: BTreeSet<u64>,
}

/// Where the new structures go.
struct Plan {
    table: Range<u64>,
    /// The blocks by index, with their clusters.
    blocks: BTreeMap<u64, u64>,
}

/// Makes the refcounts anew, durably.
///
/// # Errors
/// `NoSpace` when there is no room for them, `Limit` when they would be unreasonably large, or what the storage
/// reports.
pub(super) async fn rebuild<S: Storage>(storage: &S, options: &CheckOptions) -> Result<()> {
    const STAGE: &str = "rebuilding refcounts";
    let header = header_of(storage).await?;
    let mut census = Census::new(storage, header.clone(), options, Judge::ANEW, STAGE).await?;
    let named = census.stored.entries().map(|(_, raw)| census.shape.cluster_of(raw));
    let file_clusters = census.reader.file_len / census.shape.cluster();
    let avoided = named.filter(|c| *c >= file_clusters).collect();
    let mut space = Space { avoided, ..Space::default() };
    let mut kept = None;
    while let Some(cells) = census.next().await? {
        space.note(&cells, census.shape.refcounts)?;
        kept = Some(cells);
    }
    let old_table = u64::from(header.refcount_table_clusters);
    let format = census.shape.refcounts;
    let plan = space.place(format, census.shape.cluster(), old_table, file_clusters)?;
    let mut writer = Writer {
        storage,
        format,
        cluster: census.shape.cluster(),
        plan: &plan,
        run: (0, Vec::new()),
    };
    if census.is_single() {
        if let Some(cells) = &kept {
            writer.blocks(cells, 0..u64::MAX).await?;
        }
    } else {
        let mut again = Census::new(storage, header, options, Judge::ANEW, STAGE).await?;
        let mut from = 0;
        while let Some(cells) = again.next().await? {
            let end = cells.window().end;
            writer.blocks(&cells, from..end).await?;
            from = end;
        }
        writer.blocks(&Cells::new(0..0, 0), from..u64::MAX).await?;
    }
    writer.table().await?;
    storage.sync().await?;
    let clusters = u32::try_from(plan.table.end - plan.table.start).unwrap_or(u32::MAX);
    let at = plan.table.start.saturating_mul(census.shape.cluster());
    patch_refcount_table(storage, at, clusters).await
}

impl Space {
    /// Takes up what a window holds.
    ///
    /// # Errors
    /// `Limit` when something lies where no refcount table reaches.
    fn note(&mut self, cells: &Cells, format: RefcountFormat) -> Result<()> {
        let window = cells.window();
        let mut last_block = None;
        for (cluster, _) in cells.referenced(window.clone()) {
            let (block, _) = format.position(cluster);
            self.references += 1;
            if last_block != Some(block) {
                // Told at once: the space between such clusters may be immense.
                if block >= RefcountFormat::max_table_entries() {
                    return Err(too_large());
                }
                self.blocks.insert(block);
                last_block = Some(block);
            }
        }
        // What comes behind the last used cluster is not between others.
        let Some(last) = cells.last_used() else { return Ok(()) };
        let mut cluster = if window.start > self.end { self.end } else { window.start };
        while let Some(used) = cells.next_used(cluster.max(window.start)) {
            if used > cluster && self.runs.len() < MAX_RUNS {
                self.runs.push(cluster..used);
            }
            cluster = used + 1;
        }
        self.end = self.end.max(last + 1);
        Ok(())
    }

    /// Chooses the places: inside the file where there is room, else behind its end.
    fn place(
        mut self,
        format: RefcountFormat,
        cluster: u64,
        old_table: u64,
        file_clusters: u64,
    ) -> Result<Plan> {
        if self.end < file_clusters {
            self.runs.push(self.end..file_clusters);
        }
        let growth = self.end.max(file_clusters);
        // Blocks count themselves, so their number grows until it fits.
        for _ in 0..64 {
            self.refuse_sparse(format, cluster)?;
            let entries = self.blocks.last().map_or(0, |last| last + 1);
            if entries > RefcountFormat::max_table_entries() {
                return Err(too_large());
            }
            let needed = entries.saturating_mul(ENTRY_BYTES).div_ceil(cluster).max(1);
            let most = RefcountFormat::max_table_entries() * ENTRY_BYTES / cluster;
            let table = needed.max(old_table.min(most));
            let plan = self.try_place(table, growth);
            let mut counted: BTreeSet<u64> =
                plan.blocks.values().map(|c| format.position(*c).0).collect();
            counted.extend(
                format.position(plan.table.start).0..=format.position(plan.table.end - 1).0,
            );
            let before = self.blocks.len();
            self.blocks.extend(counted);
            if self.blocks.len() == before {
                return Ok(plan);
            }
        }
        Err(Error::new(ErrorKind::NoSpace, "there is no room for new refcounts"))
    }

    fn refuse_sparse(&self, format: RefcountFormat, cluster: u64) -> Result<()> {
        let blocks = self.blocks.len() as u64;
        let dense = format.blocks_for(self.references).max(1);
        if blocks.saturating_mul(cluster) > FREE_BYTES && blocks > dense.saturating_mul(MAX_SPARSE)
        {
            return Err(Error::new(
                ErrorKind::Limit,
                format!(
                    "new refcounts would take {} bytes for only {} clusters in use, which lie too far apart; the image \
                     is malicious, or so damaged that only its content can be saved, with 'qemu-img convert'",
                    blocks.saturating_mul(cluster),
                    self.references
                ),
            ));
        }
        Ok(())
    }

    /// Places a table of so many clusters, and a cluster for each block.
    fn try_place(&self, table: u64, growth: u64) -> Plan {
        let mut growth = growth;
        let mut take = |n: u64| {
            while let Some(hit) = self.avoided.range(growth..growth.saturating_add(n)).next() {
                growth = hit.saturating_add(1);
            }
            let start = growth;
            growth = start.saturating_add(n);
            start..growth
        };
        let len = |run: &Range<u64>| run.end - run.start;
        let fitting = self.runs.iter().position(|run| len(run) >= table);
        let mut runs = self.runs.clone();
        let table = match fitting.and_then(|i| runs.get_mut(i)) {
            Some(run) => {
                let start = run.start;
                run.start += table;
                start..run.start
            }
            None => take(table),
        };
        let mut free = runs.into_iter().flatten();
        let blocks = self
            .blocks
            .iter()
            .map(|b| (*b, free.next().unwrap_or_else(|| take(1).start)))
            .collect();
        Plan { table, blocks }
    }
}

fn too_large() -> Error {
    Error::new(
        ErrorKind::Limit,
        "the image is too large for its refcounts: a table that counts all of it would be too long",
    )
}

struct Writer<'a, S: Storage> {
    storage: &'a S,
    format: RefcountFormat,
    cluster: u64,
    plan: &'a Plan,
    /// Blocks that follow each other in the file, to be written at once: their first cluster, and their bytes.
    run: (u64, Vec<u8>),
}

impl<S: Storage> Writer<'_, S> {
    /// Writes the blocks that count the clusters from `range`, whose references are in `cells`.
    async fn blocks(&mut self, cells: &Cells, range: Range<u64>) -> Result<()> {
        let per = self.format.entries_per_block();
        let own: BTreeSet<u64> =
            self.plan.blocks.values().copied().chain(self.plan.table.clone()).collect();
        let first = range.start.div_ceil(per);
        for (index, place) in self.plan.blocks.range(first..range.end.div_ceil(per)) {
            let mut bytes = AlignedBuf::zeroed(self.cluster as usize)?;
            let counted = index * per..(index + 1) * per;
            let mut set = |cluster: u64, count: u64| {
                let at = (cluster - counted.start) as usize;
                // The value is cut at the largest that fits, and the index lies in the block.
                let _ = self.format.set(&mut bytes, at, count.min(self.format.max()));
            };
            cells.referenced(counted.clone()).for_each(|(cluster, n)| set(cluster, n));
            own.range(counted.clone()).for_each(|cluster| set(*cluster, 1));
            let (start, run) = &mut self.run;
            let follows = *start + run.len() as u64 / self.cluster == *place;
            if !follows || run.len() >= RUN_BYTES {
                self.end_run().await?;
            }
            let (start, run) = &mut self.run;
            if run.is_empty() {
                *start = *place;
            }
            run.extend_from_slice(&bytes);
        }
        self.end_run().await
    }

    /// Writes the blocks that were put together.
    async fn end_run(&mut self) -> Result<()> {
        let (start, run) = std::mem::take(&mut self.run);
        if run.is_empty() {
            return Ok(());
        }
        self.write(start, AlignedBuf::from_slice(&run)?).await
    }

    async fn table(&self) -> Result<()> {
        let len = (self.plan.table.end - self.plan.table.start).saturating_mul(self.cluster);
        let mut bytes = AlignedBuf::zeroed(usize::try_from(len).unwrap_or(0))?;
        let (entries, _) = bytes.as_chunks_mut::<8>();
        for (index, place) in &self.plan.blocks {
            if let Some(entry) = entries.get_mut(*index as usize) {
                *entry = (place * self.cluster).to_be_bytes();
            }
        }
        self.write(self.plan.table.start, bytes).await
    }

    async fn write(&self, cluster: u64, bytes: AlignedBuf) -> Result<()> {
        let at = cluster
            .checked_mul(self.cluster)
            .map(HostOffset::new)
            .ok_or_else(|| Error::new(ErrorKind::NoSpace, "there is no room for new refcounts"))?;
        let written = self.storage.write(at, SharedBuf::new(bytes).iovec()).await;
        written.context(|| format!("cannot write new refcounts of '{}'", self.storage.name()))
    }
}
