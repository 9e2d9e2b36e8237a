//! The cache of L2 slices: loading, and dropping what was not used lately.
//!
//! A miss blocks only those who need that very slice. Slices that hold unwritten changes are never dropped; when
//! there are too many of them, a write-back is made first.

use crate::format::{L1Entry, L2Entry};
use crate::image::Qcow2;
use crate::slice::{Slice, SliceId};
use bedplate_runtime::buf::{AlignedBuf, SharedBuf};
use bedplate_runtime::sync::Event;
use bedplate_storage::Storage;
use bedplate_types::{Error, ErrorKind, GuestOffset, Result};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Which slices are in memory and which are on their way.
pub(crate) struct SliceCache {
    /// Slices that may be in memory.
    capacity: usize,
    /// Guards only the lists; never held across I/O. Taken before a slice's own mutex.
    state: Mutex<Lists>,
}

#[derive(Default)]
struct Lists {
    /// Slices in memory, oldest look first.
    resident: VecDeque<SliceId>,
    /// Slices being read; the event fires when that has ended.
    loading: HashMap<SliceId, Arc<Event>>,
    /// Buffers that slices were read into. Small ones of strict alignment leave gaps in the heap, which would make the
    /// smallest slices cost many times their size.
    spare: Vec<AlignedBuf>,
}

/// Buffers that are kept for the next slice.
const SPARE: usize = 32;

impl SliceCache {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity: capacity.max(16), state: Mutex::default() }
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    fn lists(&self) -> MutexGuard<'_, Lists> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A buffer for a slice of so many bytes, with anything in it.
    fn buffer(&self, len: usize) -> Result<SharedBuf> {
        let spare = self.lists().spare.pop();
        Ok(SharedBuf::new(match spare {
            Some(buf) => buf,
            None => AlignedBuf::zeroed(len)?,
        }))
    }

    fn keep_buffer(&self, buf: AlignedBuf) {
        let mut lists = self.lists();
        if lists.spare.len() < SPARE {
            lists.spare.push(buf);
        }
    }

    /// Takes all slices off the list of those in memory.
    pub(crate) fn take_resident(&self) -> VecDeque<SliceId> {
        std::mem::take(&mut self.lists().resident)
    }
}

/// Ends a load, however it went.
struct Loading<'a> {
    cache: &'a SliceCache,
    id: SliceId,
    event: Arc<Event>,
}

impl Drop for Loading<'_> {
    fn drop(&mut self) {
        self.cache.lists().loading.remove(&self.id);
        self.event.notify_all();
    }
}

impl<S: Storage> Qcow2<S> {
    /// Brings a slice into memory. Its table must be allocated.
    ///
    /// # Errors
    /// What the storage reports.
    pub(crate) async fn load_slice(&self, id: SliceId) -> Result<()> {
        let event = {
            let mut lists = self.cache.lists();
            if self.slice(id).is_some() {
                return Ok(());
            }
            match lists.loading.get(&id) {
                Some(event) => Err(event.clone()),
                None => {
                    let event = Arc::new(Event::new());
                    lists.loading.insert(id, event.clone());
                    Ok(event)
                }
            }
        };
        match event {
            Err(other) => {
                // Registered before the second look, so that the end of the load can't be missed.
                let ended = other.wait();
                if self.cache.lists().loading.contains_key(&id) {
                    ended.await;
                }
                Ok(())
            }
            Ok(event) => {
                let _loading = Loading { cache: &self.cache, id, event };
                self.make_room().await;
                self.read_slice(id).await
            }
        }
    }

    /// The slice, if it is in memory.
    pub(crate) fn slice(&self, id: SliceId) -> Option<Arc<Slice>> {
        self.tables.slot(id)?.load_full()
    }

    async fn read_slice(&self, id: SliceId) -> Result<()> {
        // The table's space must not be given to anything else while it is read.
        let _pin = self.epochs.guard();
        if let Some(e) = self.table_fault(id.l1) {
            return Err(self.mark_corrupt(e).await);
        }
        let Some(at) = self.tables.slice_at(id) else { return Ok(()) };
        let buf = self.cache.buffer(self.tables.geo.slice_bytes())?;
        self.storage.read(at, buf.iovec()).await.map_err(|e| {
            e.context(format!("cannot read the L2 table of '{}'", self.storage.name()))
        })?;
        let bytes = buf.into_buf()?;
        let words: Vec<u64> =
            bytes.as_chunks::<8>().0.iter().map(|b| u64::from_be_bytes(*b)).collect();
        self.cache.keep_buffer(bytes);
        let first = self.tables.slice_start(id).get();
        let guests =
            (0..).map(|n| GuestOffset::new(first.saturating_add(n * self.tables.cluster())));
        let mut entries = words.chunks_exact(self.tables.geo.entry_words()).zip(guests);
        let careful = entries.any(|(entry, at)| self.entry_fault(at, entry).is_some());
        self.place_slice(id, Slice::new(words.into_iter(), careful))
    }

    /// Why an L1 entry must not be used, if so.
    pub(crate) fn table_fault(&self, index: u32) -> Option<Error> {
        let word = self.tables.l1(index);
        let fault = match self.tables.codec.l1(word) {
            Ok(L1Entry::Unallocated) => return None,
            Ok(L1Entry::Table { host, .. }) if self.space.is_contested(host) => {
                "another structure of the image lies there too".to_string()
            }
            Ok(L1Entry::Table { host, .. }) if self.space.contains(host, self.tables.cluster()) => {
                return None;
            }
            Ok(L1Entry::Table { .. }) => "it points past the end of the file".to_string(),
            Err(e) => e.to_string(),
        };
        Some(Error::new(
            ErrorKind::Corrupt,
            format!(
                "image '{}' is corrupt: L1 entry {index} ({word:#018x}) is wrong: {fault}",
                self.storage.name()
            ),
        ))
    }

    fn place_slice(&self, id: SliceId, slice: Slice) -> Result<()> {
        let slot = self.tables.slot_or_new(id).ok_or_else(|| {
            Error::new(ErrorKind::Corrupt, "an L2 table lies beyond the end of the L1 table")
        })?;
        slot.store(Some(Arc::new(slice)));
        self.cache.lists().resident.push_back(id);
        Ok(())
    }

    /// Why the L2 entry of the cluster at `at`, given as its words, must not be used, if so: its own rules, or where it
    /// points.
    pub(crate) fn entry_fault(&self, at: GuestOffset, words: &[u64]) -> Option<String> {
        let (word, map) = (words.first().copied(), words.get(1).copied());
        let cluster = self.tables.codec.cluster(word.unwrap_or(0), map.unwrap_or(0));
        let (host, len) = match cluster.map(|c| c.entry) {
            Err(e) => return Some(e.to_string()),
            Ok(L2Entry::Data { host, .. } | L2Entry::Zero { host: Some(host), .. }) => {
                (host, self.tables.cluster())
            }
            Ok(L2Entry::Compressed { host, .. }) => (host, 1),
            Ok(_) => return None,
        };
        if self.tables.codec.has_data_file() {
            let wrong = host.get() != at.get();
            return wrong
                .then(|| "data in an external data file lies at the guest's own offset".into());
        }
        if !self.space.contains(host, len) {
            return Some("it points past the end of the file".into());
        }
        self.space.is_metadata(host).then(|| "it points into the image's own metadata".into())
    }

    /// Drops slices until one more fits, writing back when all are dirty. Slices that are all in use may exceed the
    /// capacity for a moment; that is better than to wait.
    async fn make_room(&self) {
        if self.drop_unused() || !self.has_dirty_slices() || self.is_poisoned() {
            return;
        }
        match self.write_back().await {
            Ok(()) => {
                self.drop_unused();
            }
            // That is not the failure of who needs room, perhaps only to read.
            Err(e) => tracing::debug!("write-back for room failed: {e:#}"),
        }
    }

    fn drop_unused(&self) -> bool {
        let mut lists = self.cache.lists();
        let mut looks = lists.resident.len().min(256) * 2;
        while lists.resident.len() >= self.cache.capacity {
            let Some(id) = lists.resident.pop_front() else { break };
            let slot = self.tables.slot(id);
            let retired = match slot.map(|s| s.load()) {
                Some(guard) => guard.as_ref().is_none_or(|slice| slice.retire()),
                None => true,
            };
            if retired {
                if let Some(slot) = slot {
                    slot.store(None);
                }
            } else {
                lists.resident.push_back(id);
                if looks == 0 {
                    return false;
                }
                looks -= 1;
            }
        }
        true
    }
}
