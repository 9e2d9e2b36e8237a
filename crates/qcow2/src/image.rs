//! An open image: what all parts of the engine share.

use crate::bitmaps::Bitmaps;
use crate::cache::SliceCache;
use crate::crypt::Protection;
use crate::data_file::is_raw;
use crate::faults::OrderFaults;
use crate::format::Header;
use crate::gate::Gate;
use crate::journal::Journal;
use crate::read::Unpacked;
use crate::slice::SliceId;
use crate::space::Space;
use crate::tables::Tables;
use bedplate_runtime::sync::{AsyncMutex, Epochs, FlushSequencer, RangeLock};
use bedplate_storage::Storage;
use bedplate_types::{ByteLen, Error, ErrorKind, Result};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

/// An open qcow2 image, used from any number of threads at once.
///
/// Dropping it without [`Self::close`] is like a crash of the program: what was flushed is there, space may leak. With
/// a journal ([`OpenOptions::journal`](crate::OpenOptions)), the next opening finds all that was completed.
pub struct Qcow2<S: Storage> {
    pub(crate) storage: S,
    /// The external data file, in images that have one ([`crate::data_file`]).
    pub(crate) data: Option<S>,
    /// That file reads as the disk.
    pub(crate) raw_data: bool,
    pub(crate) read_only: bool,
    /// The disk's size in bytes.
    pub(crate) size: AtomicU64,
    pub(crate) tables: Tables,
    pub(crate) cache: SliceCache,
    pub(crate) space: Space,
    /// Who reads mapped space; freed space is not used again before all who may have seen it are gone.
    pub(crate) epochs: Epochs,
    /// Requests are held here while the metadata is replaced.
    pub(crate) gate: Gate,
    /// Guest ranges whose mapping is being changed (allocation, copy-on-write, discard). May be held across I/O:
    /// it is a lock of requests, not of memory. Taken in ascending order; before every other lock.
    pub(crate) ranges: RangeLock,
    /// L2 tables being made or copied, one range unit an L1 entry. Taken after `ranges`.
    pub(crate) table_gate: RangeLock,
    /// One writer of compressed clusters at a time; held across I/O by design. Taken after `ranges` and
    /// `table_gate`, before the locks of `space`.
    pub(crate) packer: AsyncMutex<()>,
    pub(crate) sequencer: FlushSequencer,
    pub(crate) dirty: Mutex<Dirty>,
    /// The L1 table as it is in the file. Only the write-back that is under way uses it.
    pub(crate) l1_in_file: Mutex<Vec<u64>>,
    pub(crate) header: Mutex<Header>,
    /// One change of the header at a time; held across I/O by design.
    pub(crate) header_writer: AsyncMutex<()>,
    /// Refcounts may lag behind, under the dirty bit.
    pub(crate) lazy_refcounts: bool,
    /// The dirty bit is durably set: refcounts need not be right before mappings are durable.
    pub(crate) lazy: AtomicBool,
    /// The first failure of a sync or metadata write; set once, for ever.
    poison: OnceLock<Error>,
    pub(crate) unpacked: Unpacked,
    /// How the data of clusters is encrypted.
    pub(crate) protection: Protection,
    /// Persistent bitmaps that record changes.
    pub(crate) bitmaps: Bitmaps,
    pub(crate) faults: OrderFaults,
    /// Changes that are only in memory, for the next process if this one is killed.
    pub(crate) journal: Option<Journal>,
    /// An earlier process was killed: space that it had counted and not mapped is found when the image is closed.
    pub(crate) recount: bool,
}

/// What is newer in memory than in the file. A short mutex; nothing is awaited under it.
#[derive(Default)]
pub(crate) struct Dirty {
    pub(crate) slices: BTreeSet<SliceId>,
    pub(crate) l1: BTreeSet<u32>,
    pub(crate) since: Option<Instant>,
}

impl<S: Storage> Qcow2<S> {
    pub(crate) fn assemble(
        (storage, data): (S, Option<S>),
        header: Header,
        read_only: bool,
        tables: Tables,
        cache: SliceCache,
        space: Space,
        l1: Vec<u64>,
    ) -> Self {
        Self {
            storage,
            data,
            raw_data: is_raw(&header),
            read_only,
            size: AtomicU64::new(header.disk_size().get()),
            tables,
            cache,
            space,
            epochs: Epochs::new(),
            gate: Gate::default(),
            ranges: RangeLock::new(),
            table_gate: RangeLock::new(),
            packer: AsyncMutex::new(()),
            sequencer: FlushSequencer::new(),
            dirty: Mutex::default(),
            l1_in_file: Mutex::new(l1),
            lazy: AtomicBool::new(false),
            lazy_refcounts: Self::wants_lazy_refcounts(&header),
            header: Mutex::new(header),
            header_writer: AsyncMutex::new(()),
            poison: OnceLock::new(),
            unpacked: Unpacked::default(),
            protection: Protection::None,
            bitmaps: Bitmaps::default(),
            faults: OrderFaults::default(),
            journal: None,
            recount: false,
        }
    }

    /// Switches for tests that break an ordering rule.
    #[doc(hidden)]
    pub fn order_faults(&self) -> &OrderFaults {
        &self.faults
    }

    /// The size of the disk in the image.
    pub fn size(&self) -> ByteLen {
        ByteLen::new(self.size.load(Ordering::Acquire))
    }

    /// The cluster size.
    pub fn cluster_size(&self) -> ByteLen {
        ByteLen::new(self.tables.cluster())
    }

    /// The file or device that holds the image; see also [`Self::data_storage`].
    pub fn storage(&self) -> &S {
        &self.storage
    }

    /// True when the image may not be changed.
    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// The grace periods of mapped space: a mapping that was looked up under a pin stays usable until it is released.
    pub fn epochs(&self) -> &Epochs {
        &self.epochs
    }

    /// A copy of the header as it is in the file.
    pub fn header(&self) -> Header {
        self.header.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// True after a failed sync or metadata write: changes are refused.
    pub fn is_poisoned(&self) -> bool {
        self.poison.get().is_some()
    }

    /// Refuses when the image is read-only or poisoned.
    pub(crate) fn check_writable(&self) -> Result<()> {
        if let Some(cause) = self.poison.get() {
            return Err(cause.clone().with_kind(ErrorKind::Poisoned).context(format!(
                "image '{}' takes no more changes, because an earlier write of its metadata failed; stop the VM, \
                 check the host's storage, then check the image",
                self.storage.name()
            )));
        }
        if self.read_only {
            return Err(Error::new(
                ErrorKind::ReadOnly,
                format!("image '{}' is open read-only", self.storage.name()),
            ));
        }
        Ok(())
    }

    /// Stops all changes for ever; the first cause stays. Returns it.
    pub(crate) fn poison(&self, cause: Error) -> Error {
        if self.poison.set(cause.clone()).is_ok() {
            tracing::error!(
                image = self.storage.name(),
                "no more changes are accepted after a failed metadata write: {cause:#}"
            );
        }
        cause
    }

    pub(crate) fn dirty(&self) -> MutexGuard<'_, Dirty> {
        self.dirty.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn has_dirty_slices(&self) -> bool {
        !self.dirty().slices.is_empty()
    }

    pub(crate) fn note_dirty_slice(&self, id: SliceId) {
        let mut dirty = self.dirty();
        dirty.slices.insert(id);
        dirty.since.get_or_insert_with(Instant::now);
    }

    pub(crate) fn note_dirty_l1(&self, index: u32) {
        let mut dirty = self.dirty();
        dirty.l1.insert(index);
        dirty.since.get_or_insert_with(Instant::now);
    }

    /// True when changes that are only in memory outlive this process.
    pub fn has_journal(&self) -> bool {
        self.journal.is_some()
    }

    pub(crate) fn is_lazy(&self) -> bool {
        self.lazy.load(Ordering::Acquire)
    }
}
