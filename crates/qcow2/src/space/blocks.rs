//! Refcount blocks in memory, and counting in them.

use super::{Space, State};
use crate::image::Qcow2;
use bedplate_runtime::buf::SharedBuf;
use bedplate_storage::Storage;
use bedplate_types::{Error, ErrorKind, HostOffset, Result};
use std::ops::Range;

/// One refcount block.
pub(crate) struct Block {
    pub(crate) bytes: Vec<u8>,
    /// Clusters of this block that are leased and not yet counted: it stays in memory for them.
    pub(crate) pins: u64,
    /// A flush is writing it.
    pub(crate) writing: bool,
}

impl State {
    /// The place of block `index` in the file.
    pub(crate) fn block_at(&self, index: u64) -> Option<HostOffset> {
        let at = *self.table.get(usize::try_from(index).ok()?)?;
        (at != 0).then(|| HostOffset::new(at))
    }

    /// Puts a loaded block in memory and drops clean ones that are too many.
    pub(crate) fn place_block(&mut self, index: u64, bytes: Vec<u8>) {
        if self.blocks.len() >= self.capacity {
            let dirty = &self.dirty;
            let idle = |i: &u64, b: &Block| b.pins == 0 && !b.writing && !dirty.contains(i);
            let victim = self.blocks.iter().find(|(i, b)| idle(i, b)).map(|(i, _)| *i);
            if let Some(victim) = victim {
                self.blocks.remove(&victim);
                self.drops += 1;
            }
        }
        self.blocks.entry(index).or_insert(Block { bytes, pins: 0, writing: false });
    }
}

impl Space {
    /// The refcount of a cluster; `None` when its block is not in memory. Without a block it is zero.
    pub(crate) fn count(&self, state: &State, cluster: u64) -> Option<u64> {
        let (index, entry) = self.counts.position(cluster);
        if state.block_at(index).is_none() {
            return Some(0);
        }
        self.counts.get(&state.blocks.get(&index)?.bytes, entry)
    }

    /// Sets the refcount of a cluster whose block is in memory.
    pub(crate) fn set_count(&self, state: &mut State, cluster: u64, count: u64) -> Result<()> {
        self.set_counts(state, cluster, 1, count)
    }

    /// Sets the refcount of clusters that follow each other, whose blocks are in memory.
    fn set_counts(&self, state: &mut State, first: u64, clusters: u64, count: u64) -> Result<()> {
        let wrong = |what: &str| {
            let text = format!("cannot set the refcount of cluster {first} to {count}: {what}");
            Error::new(ErrorKind::Corrupt, text)
        };
        let mut result = Ok(());
        self.for_blocks(first, clusters, |index, entry, n| {
            let Some(block) = state.blocks.get_mut(&index) else {
                result = Err(wrong("its refcount block is not in memory"));
                return;
            };
            for entry in entry..entry + n as usize {
                if let Err(e) = self.counts.set(&mut block.bytes, entry, count) {
                    result = Err(wrong(&e.to_string()));
                }
            }
            state.dirty.insert(index);
        });
        result
    }

    /// Counts clusters that were taken from a lease: from now on each has one reference.
    pub(crate) fn count_leased(&self, clusters: impl Iterator<Item = u64>) -> Result<()> {
        let mut state = self.state();
        let mut run = 0..0;
        for cluster in clusters {
            if cluster != run.end {
                self.count_run(&mut state, run)?;
                run = cluster..cluster;
            }
            run.end += 1;
        }
        self.count_run(&mut state, run)
    }

    fn count_run(&self, state: &mut State, run: Range<u64>) -> Result<()> {
        let clusters = run.end - run.start;
        self.set_counts(state, run.start, clusters, 1)?;
        self.unpin(state, run.start, clusters);
        Ok(())
    }

    /// Undoes what [`Block::pins`] was raised by, for these clusters.
    pub(crate) fn unpin(&self, state: &mut State, first: u64, clusters: u64) {
        self.for_blocks(first, clusters, |index, _, n| {
            if let Some(block) = state.blocks.get_mut(&index) {
                block.pins = block.pins.saturating_sub(n);
            }
        });
    }

    /// Calls `f` with each block that counts some of the clusters, the first of their entries in it, and how many.
    pub(crate) fn for_blocks(&self, first: u64, clusters: u64, mut f: impl FnMut(u64, usize, u64)) {
        let (mut at, end) = (first, first.saturating_add(clusters));
        let per_block = self.counts.entries_per_block();
        while at < end {
            let (index, entry) = self.counts.position(at);
            let n = (per_block - entry as u64).min(end - at);
            f(index, entry, n);
            at += n;
        }
    }
}

impl<S: Storage> Qcow2<S> {
    /// Brings a refcount block into memory, if there is one.
    ///
    /// # Errors
    /// What the storage reports.
    pub(crate) async fn load_block(&self, index: u64) -> Result<()> {
        loop {
            let (at, drops) = {
                let state = self.space.state();
                match state.block_at(index) {
                    Some(at) if !state.blocks.contains_key(&index) => (at, state.drops),
                    _ => return Ok(()),
                }
            };
            let good = matches!(self.space.counts.table_entry(at.get()), Ok(Some(_)))
                && self.space.contains(at, self.tables.cluster())
                && !self.space.is_contested(at);
            if !good {
                let e = Error::new(
                    ErrorKind::Corrupt,
                    format!(
                        "image '{}' is corrupt: refcount table entry {index} ({:#018x}) is not the place of a \
                         refcount block; repair it with 'bedplate check -r all'",
                        self.storage.name(),
                        at.get()
                    ),
                );
                return Err(self.mark_corrupt(e).await);
            }
            let buf = SharedBuf::zeroed(self.tables.cluster() as usize)?;
            self.storage.read(at, buf.iovec()).await.map_err(|e| {
                e.context(format!("cannot read a refcount block of '{}'", self.storage.name()))
            })?;
            let bytes = buf.into_buf()?.to_vec();
            let mut state = self.space.state();
            // Two loads of one block may race; the first stays, since it may have been changed already. If blocks
            // were dropped meanwhile, this one may have been among them, changed and written: read it again.
            if state.blocks.contains_key(&index) {
                return Ok(());
            }
            if state.drops == drops {
                state.place_block(index, bytes);
                return Ok(());
            }
        }
    }
}
