//! Setting mappings in memory, after the data they show has been written.
//!
//! Order, in memory as on disk: the refcount first, then the mapping, then the note that the old space is free.

use crate::cow::Job;
use crate::format::{L1Entry, L2Entry, OFFSET_MASK, SubMap};
use crate::image::Qcow2;
use crate::journal::{Change, Journal, slice_changes};
use crate::slice::{SliceId, Updated, WordChange};
use crate::space::{FreeRun, Freed};
use bedplate_runtime::buf::SharedBuf;
use bedplate_storage::Storage;
use bedplate_types::{ByteLen, Error, ErrorKind, HostOffset, Result};
use smallvec::SmallVec;

/// Changes of one slice.
type Changes = SmallVec<[WordChange; 32]>;

impl<S: Storage> Qcow2<S> {
    /// Makes the mappings of all jobs whose data was written; the clusters of the others go back.
    pub(crate) async fn commit(&self, jobs: &mut [Job]) {
        let mut used = Vec::new();
        for job in jobs.iter().filter(|j| j.needs_cluster() && !self.has_data_file()) {
            let cluster = self.space.cluster_of(job.host);
            if job.failed.is_some() {
                self.give_back(FreeRun { first: cluster, clusters: 1, zeroed: false });
            } else {
                used.push(cluster);
            }
        }
        let counted = match self.prepare_counts().await {
            Ok(()) => self.space.count_leased(used.into_iter()),
            Err(e) => Err(e),
        };
        if let Err(e) = counted {
            let e = self.poison(e);
            jobs.iter_mut().for_each(|j| j.failed = Some(e.clone()));
            return;
        }
        // Jobs are sorted by guest address, so those of a slice follow each other.
        let mut changes = Changes::new();
        let mut first = 0;
        while let Some(job) = jobs.get(first) {
            let (id, _) = self.tables.locate(job.at);
            let same = |job: &&Job| self.tables.locate(job.at).0 == id;
            let end = first + jobs[first..].iter().take_while(same).count();
            self.commit_slice(id, &mut jobs[first..end], &mut changes).await;
            first = end;
        }
        let filling = self.journal.as_ref().is_some_and(Journal::wants_write_back);
        if (filling || self.dirty().slices.len() * 2 > self.cache.capacity())
            && let Err(e) = self.write_back().await
        {
            tracing::debug!("write-back under pressure failed: {e:#}");
        }
    }

    /// Makes the mappings of jobs that lie in one slice.
    async fn commit_slice(&self, id: SliceId, jobs: &mut [Job], changes: &mut Changes) {
        changes.clear();
        let geo = self.tables.geo;
        for job in jobs.iter_mut().filter(|j| j.failed.is_none() && !j.is_mapped(geo)) {
            let index = self.tables.locate(job.at).1 * geo.entry_words();
            let new = L2Entry::Data { host: job.host, copied: true };
            let Some(word) = self.tables.codec.encode_l2(new) else {
                job.failed = Some(self.unencodable(job.host));
                continue;
            };
            match job.new_map(geo) {
                Some(_) if !job.needs_cluster() => {
                    // Others may be changing the bits of other subclusters.
                    let touched = job.touched(geo);
                    let (keep, set) = (SubMap::new(0, touched), SubMap::new(touched, 0));
                    changes.push(WordChange {
                        index: index + 1,
                        keep: !keep.raw(),
                        set: set.raw(),
                    });
                }
                map => {
                    // The bitmap first: a crash never tears an entry, but its order is easier to follow.
                    changes.extend(map.map(|m| WordChange::whole(index + 1, m.raw())));
                    changes.push(WordChange::whole(index, word));
                }
            }
        }
        if changes.is_empty() {
            return;
        }
        let result = self.change_words(id, changes).await;
        for job in jobs.iter_mut().filter(|j| j.failed.is_none() && !j.is_mapped(geo)) {
            match &result {
                Err(e) => job.failed = Some(e.clone()),
                Ok(()) if job.needs_cluster() && job.old.entry != L2Entry::Unallocated => {
                    self.space.note_freed(self.references(job.old.entry));
                }
                Ok(()) => {}
            }
        }
    }

    pub(crate) fn unencodable(&self, host: HostOffset) -> Error {
        Error::new(
            ErrorKind::Limit,
            format!("image '{}' can't express the host offset {host}", self.storage.name()),
        )
    }

    /// With lazy refcounts, the dirty bit must be set before refcounts may lag behind. A failure poisons the image.
    pub(crate) async fn prepare_counts(&self) -> Result<()> {
        if !self.lazy_refcounts || self.is_lazy() {
            return Ok(());
        }
        self.set_dirty_bit().await.map_err(|e| self.poison(e))
    }

    /// The references that an entry holds.
    pub(crate) fn references(&self, entry: L2Entry) -> Vec<Freed> {
        let (host, len) = match entry {
            _ if self.has_data_file() => return Vec::new(), // what lies there is not counted
            L2Entry::Unallocated | L2Entry::Zero { host: None, .. } => return Vec::new(),
            L2Entry::Data { host, .. } | L2Entry::Zero { host: Some(host), .. } => {
                (host, ByteLen::new(1))
            }
            L2Entry::Compressed { host, len } => (host, len),
        };
        let first = self.space.cluster_of(host);
        let last = host.get().saturating_add(len.get().max(1) - 1);
        let last = self.space.cluster_of(HostOffset::new(last));
        (first..=last).map(|cluster| Freed { cluster, table: false }).collect()
    }

    /// Changes words of one slice, loading it when it has left the cache.
    pub(crate) async fn change_words(&self, id: SliceId, changes: &[WordChange]) -> Result<()> {
        loop {
            match self.try_change_words(id, changes) {
                Updated::NewlyDirty | Updated::Dirty => return Ok(()),
                Updated::Gone => self.load_slice(id).await?,
                Updated::Full => self.write_back().await?,
            }
        }
    }

    fn try_change_words(&self, id: SliceId, changes: &[WordChange]) -> Updated {
        let Some(slice) = self.slice(id) else { return Updated::Gone };
        // Until it is dropped, a write-back that begins waits: it would miss the change, and retire what tells of it.
        let mut logged = None;
        let updated = slice.update(changes, |words| {
            let Some(journal) = &self.journal else { return true };
            logged = journal.append(slice_changes(id, self.slice_words(), words));
            logged.is_some()
        });
        if updated == Updated::NewlyDirty {
            self.note_dirty_slice(id);
        }
        updated
    }

    /// Sets an L1 entry, and tells the journal of it first.
    async fn set_l1_entry(&self, index: u32, word: u64) -> Result<()> {
        let change = Change::L1 { index, word };
        loop {
            let logged = match &self.journal {
                None => None,
                Some(journal) => match journal.append(std::iter::once(change)) {
                    None => {
                        self.write_back().await?;
                        continue;
                    }
                    logged => logged,
                },
            };
            self.tables.set_l1(index, word);
            self.note_dirty_l1(index);
            drop(logged);
            return Ok(());
        }
    }

    /// Makes sure that an L1 entry has an L2 table that may be changed in place.
    pub(crate) async fn ensure_table(&self, index: u32) -> Result<()> {
        let ready = |word: u64| {
            matches!(self.tables.codec.l1(word), Ok(L1Entry::Table { copied: true, .. }))
        };
        if ready(self.tables.l1(index)) {
            return Ok(());
        }
        let _gate = self.table_gate.exclusive(u64::from(index), 1).await;
        let old = self.tables.l1(index);
        if ready(old) {
            return Ok(());
        }
        if let Some(e) = self.table_fault(index) {
            return Err(self.mark_corrupt(e).await);
        }
        self.prepare_counts().await?;
        let run = self
            .take_clusters(1)
            .await?
            .pop()
            .ok_or_else(|| Error::new(ErrorKind::NoSpace, "no cluster for an L2 table"))?;
        let host = self.space.offset_of(run.first);
        let copied = match old & OFFSET_MASK {
            // Also where the space is zero: a flush must find the file long enough to hold the table, and a full
            // device must say so now.
            0 => self.write_all(vec![(host, vec![0; self.tables.cluster() as usize])]).await,
            table => self.copy_table(HostOffset::new(table), host).await,
        };
        if let Err(e) = copied {
            self.give_back(FreeRun { zeroed: false, ..run });
            return Err(
                e.context(format!("cannot write a new L2 table of '{}'", self.storage.name()))
            );
        }
        self.space.count_leased(std::iter::once(run.first))?;
        self.space.add_metadata(run.first, 1);
        let entry = L1Entry::Table { host, copied: true };
        self.set_l1_entry(index, self.tables.codec.encode_l1(entry)).await?;
        if old != 0 {
            let cluster = self.space.cluster_of(HostOffset::new(old & OFFSET_MASK));
            self.space.note_freed([Freed { cluster, table: true }]);
        }
        Ok(())
    }

    /// Copies a shared L2 table. Its clusters stay shared, so none of them may be written in place.
    async fn copy_table(&self, from: HostOffset, to: HostOffset) -> Result<()> {
        let buf = SharedBuf::zeroed(self.tables.cluster() as usize)?;
        self.storage.read(from, buf.iovec()).await?;
        let mut bytes = buf.into_buf()?.to_vec();
        for entry in bytes.as_chunks_mut::<8>().0.iter_mut().step_by(self.tables.geo.entry_words())
        {
            entry[0] &= 0x7f;
        }
        self.write_all(vec![(to, bytes)]).await
    }
}
