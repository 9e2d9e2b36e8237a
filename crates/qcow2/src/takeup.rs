//! Taking up what a killed process had changed in memory only.
//!
//! Caller: opening for writing, before any request. The journal is judged first; nothing in the file is changed by a
//! journal that is refused. Then its changes are made again, as a guest's would be: counts, then mappings, then a
//! write-back in the usual order. The journal keeps them until that is durable, so a kill meanwhile costs nothing but
//! another start (`docs/on-disk-order.md`, "The daemon's own death").

use crate::check::{patch_header, recount};
use crate::format::{ENTRY_BYTES, Header, L1Entry, L2Entry, OFFSET_MASK, autoclear, field};
use crate::image::Qcow2;
use crate::journal::{Change, Found, Journal, JournalStart, Kept, examine};
use crate::slice::{SliceId, WordChange};
use crate::space::Freed;
use bedplate_storage::Storage;
use bedplate_types::{Error, ErrorKind, GuestOffset, HostOffset, Result};
use std::collections::{BTreeMap, BTreeSet, HashSet};

/// The last word of each place that the journal tells of.
#[derive(Default)]
struct Changes {
    l1: BTreeMap<u32, u64>,
    slices: BTreeMap<SliceId, BTreeMap<usize, u64>>,
}

/// What there is to take up. None when there is nothing, or nothing of this file.
///
/// # Errors
/// `Stale` when changes are there that don't fit the image as it is.
pub(crate) fn judge_journal(
    start: &JournalStart,
    header: &Header,
    image: &str,
) -> Result<Option<Kept>> {
    let kept = match examine(&*start.memory) {
        Found::Empty => return Ok(None),
        Found::Unknown if start.discard => return Ok(None),
        Found::Unknown => return Err(stale(image, "they are damaged, or of another version")),
        Found::Kept(kept) => kept,
    };
    let (was, is) = (kept.owner, start.owner);
    let why = if was.boot != is.boot {
        "the host has been started anew since, and what was not flushed is lost"
    } else if was.file[..2] != is.file[..2] {
        "they belong to another image"
    } else if was.file != is.file {
        tracing::info!(image, "state of a server of an earlier file, which is gone, is dropped");
        return Ok(None);
    } else if header.autoclear & autoclear::SESSION != kept.token {
        "another program has opened the image for writing since"
    } else if !start.discard {
        return Ok(Some(kept));
    } else {
        "they are to be discarded"
    };
    if kept.changes.is_empty() {
        return Ok(None);
    }
    if start.discard {
        let changes = kept.changes.len();
        tracing::warn!(
            image,
            changes,
            "state of a killed server is discarded; writes that it had completed and not flushed are lost"
        );
        return Ok(None);
    }
    Err(stale(image, why))
}

fn stale(image: &str, why: &str) -> Error {
    Error::new(
        ErrorKind::Stale,
        format!(
            "a server of image '{image}' was killed and left changes that are not in the file, but they can't be taken \
             up: {why}; if the image is good as it is, discard them with --discard-state"
        ),
    )
}

impl<S: Storage> Qcow2<S> {
    fn stale(&self, why: &str) -> Error {
        stale(&self.storage.name(), why)
    }

    /// Begins to keep a journal.
    ///
    /// # Errors
    /// `InvalidInput` when there is too little memory for one, or what the storage reports.
    pub(crate) async fn start_journal(
        &mut self,
        start: &JournalStart,
        kept: Option<&Kept>,
    ) -> Result<()> {
        let journal = match kept {
            Some(_) => Journal::go_on(start.memory.clone()),
            None => {
                // Never zero, which is what other programs leave.
                let token = start.nonce & autoclear::SESSION | 1 << 63;
                let journal = Journal::begin(start, token);
                // From here on, a program that opens the image for writing shows it by clearing these bits.
                self.change_header(|h| h.autoclear = h.autoclear & !autoclear::SESSION | token)
                    .await?;
                journal
            }
        };
        if journal.room() < self.slice_words() as u64 {
            let text = "the memory for the changes of an image is too small";
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        self.recount = kept.is_some();
        self.journal = Some(journal);
        Ok(())
    }

    /// The file holds everything, and nothing more is written from memory: ends the journal.
    ///
    /// # Errors
    /// What the storage reports.
    pub(crate) async fn end_journal(&self) -> Result<()> {
        let Some(journal) = &self.journal else { return Ok(()) };
        if self.recount {
            // Space that a killed process had counted and not mapped, or mapped and not counted down.
            recount(&self.storage).await?;
        }
        patch_header(&self.storage, field::AUTOCLEAR, |bits| bits & !autoclear::SESSION).await?;
        journal.end();
        Ok(())
    }

    /// 64-bit words of a slice.
    pub(crate) fn slice_words(&self) -> usize {
        self.tables.geo.slice_bytes() / ENTRY_BYTES as usize
    }

    /// Makes the changes again and writes them to the file. With the dirty bit set, counts are left to those who make
    /// all of them anew.
    ///
    /// # Errors
    /// `Stale` when they don't fit the image, which is as it was then; what the storage reports.
    pub(crate) async fn take_up(&self, changes: &[Change]) -> Result<()> {
        if !changes.is_empty() {
            let (image, changes) = (self.storage.name(), changes.len());
            tracing::info!(image, changes, "changes of a killed server are taken up");
        }
        let last = self.last_words(changes)?;
        let mut freed = Vec::new();
        let mut taken = HashSet::new();
        for (index, word) in &last.l1 {
            freed.extend(self.take_up_l1(*index, *word, &mut taken).await?);
        }
        for (id, words) in &last.slices {
            freed.extend(self.count_slice(*id, words, &mut taken).await?);
        }
        // All fits. From here on the file may be changed.
        for (id, words) in &last.slices {
            if self.tables.slice_at(*id).is_some() {
                let changes: Vec<WordChange> =
                    words.iter().map(|(i, w)| WordChange::whole(*i, *w)).collect();
                self.change_words(*id, &changes).await?;
            }
        }
        if !self.is_lazy() {
            self.space.note_freed(freed);
        }
        self.write_back().await
    }

    fn last_words(&self, changes: &[Change]) -> Result<Changes> {
        let (entries, words) = (self.header().l1_size, self.slice_words());
        let table = self.tables.cluster() / ENTRY_BYTES;
        let mut last = Changes::default();
        for change in changes {
            match *change {
                Change::L1 { index, word } if index < entries => {
                    last.l1.insert(index, word);
                }
                Change::L2 { l1, entry, word } if l1 < entries && u64::from(entry) < table => {
                    let id = SliceId { l1, part: (entry as usize / words) as u32 };
                    last.slices.entry(id).or_default().insert(entry as usize % words, word);
                }
                _ => return Err(self.stale("they lie beyond the image's tables")),
            }
        }
        Ok(last)
    }

    /// Sets an L1 entry in memory, with its table's count. Returns the reference that it gave up.
    async fn take_up_l1(
        &self,
        index: u32,
        word: u64,
        taken: &mut HashSet<u64>,
    ) -> Result<Option<Freed>> {
        let old = self.tables.l1(index);
        if old == word {
            return Ok(None);
        }
        match self.tables.codec.l1(word) {
            Ok(L1Entry::Unallocated) => {}
            Ok(L1Entry::Table { host, copied: true })
                if self.space.contains(host, self.tables.cluster())
                    && !self.space.is_metadata(host) =>
            {
                let cluster = self.space.cluster_of(host);
                self.take_cluster(cluster, true, taken).await?;
                self.space.add_metadata(cluster, 1);
            }
            _ => return Err(self.stale("a table of theirs can't lie where they say")),
        }
        self.tables.set_l1(index, word);
        self.note_dirty_l1(index);
        let table = HostOffset::new(old & OFFSET_MASK);
        let freed = Freed { cluster: self.space.cluster_of(table), table: true };
        Ok((table != HostOffset::ZERO).then_some(freed))
    }

    /// Counts what new entries of a slice refer to. Returns the references that they give up.
    async fn count_slice(
        &self,
        id: SliceId,
        words: &BTreeMap<usize, u64>,
        taken: &mut HashSet<u64>,
    ) -> Result<Vec<Freed>> {
        let mut freed = Vec::new();
        if self.tables.slice_at(id).is_none() {
            return Ok(freed); // its table was removed after the change
        }
        while self.slice(id).is_none() {
            self.load_slice(id).await?;
        }
        let Some(slice) = self.slice(id) else { return Ok(freed) };
        let stride = self.tables.geo.entry_words();
        let entries: BTreeSet<usize> = words.keys().map(|index| index - index % stride).collect();
        for first in entries {
            let old: Vec<u64> = (first..first + stride).map(|i| slice.get(i)).collect();
            let new: Vec<u64> = (first..first + stride)
                .map(|i| words.get(&i).copied().unwrap_or_else(|| slice.get(i)))
                .collect();
            if old == new {
                continue;
            }
            let cluster = self.tables.cluster().saturating_mul((first / stride) as u64);
            let at = self.tables.slice_start(id).get().saturating_add(cluster);
            if self.entry_fault(GuestOffset::new(at), &new).is_some() {
                return Err(self.stale("a mapping of theirs can't be right"));
            }
            let (Ok(old), Ok(new)) = (self.tables.codec.l2(old[0]), self.tables.codec.l2(new[0]))
            else {
                return Err(self.stale("they replace a mapping that is damaged"));
            };
            let (old, refs) = (self.references(old), self.references(new));
            let alone = match new {
                L2Entry::Data { copied, .. } | L2Entry::Zero { copied, .. } => copied,
                L2Entry::Compressed { .. } | L2Entry::Unallocated => false,
            };
            for reference in refs.iter().filter(|r| !old.contains(r)) {
                let shared = matches!(new, L2Entry::Compressed { .. });
                if shared {
                    self.raise_count(reference.cluster).await?;
                } else {
                    self.take_cluster(reference.cluster, alone, taken).await?;
                }
            }
            freed.extend(old.into_iter().filter(|r| !refs.contains(r)));
        }
        Ok(freed)
    }

    /// Sees to it that a cluster that a change refers to is counted. `alone`: the reference must be its only one.
    async fn take_cluster(
        &self,
        cluster: u64,
        alone: bool,
        taken: &mut HashSet<u64>,
    ) -> Result<()> {
        if alone && !taken.insert(cluster) {
            return Err(self.stale("two of them use the same space"));
        }
        if self.is_lazy() {
            return Ok(());
        }
        // Space that is used again may still be counted, in the file, for what lay there before.
        match self.stored_count(cluster).await? {
            1 => Ok(()),
            count if count > 1 && !alone => Ok(()),
            _ => self.space.set_count(&mut self.space.state(), cluster, 1),
        }
    }

    /// Counts one more reference to a cluster that several may refer to. It may be counted already; too high a count is
    /// put right when the image is closed.
    async fn raise_count(&self, cluster: u64) -> Result<()> {
        if self.is_lazy() {
            return Ok(());
        }
        let count = self.stored_count(cluster).await?.saturating_add(1);
        // It has no more references than can be counted.
        let count = count.min(self.space.counts.max());
        self.space.set_count(&mut self.space.state(), cluster, count)
    }

    /// The refcount of a cluster, whose block is in memory afterwards.
    async fn stored_count(&self, cluster: u64) -> Result<u64> {
        let (index, _) = self.space.counts.position(cluster);
        if self.space.state().block_at(index).is_none() {
            return Err(self.stale("the image has no refcounts for space of theirs"));
        }
        loop {
            if let Some(count) = self.space.count(&self.space.state(), cluster) {
                return Ok(count);
            }
            self.load_block(index).await?;
        }
    }
}
