//! The L1 table and the place of every cached L2 slice, both readable without a lock.
//!
//! The table is kept in chunks that are made when first needed, so that it grows up to the format's limit while it is
//! in use: nothing ever moves, and a look-up costs one load more than in a flat table.

use crate::format::{COPIED, ENTRY_BYTES, EntryCodec, Geometry, OFFSET_MASK};
use crate::slice::{Slice, SliceId};
use arc_swap::ArcSwapOption;
use bedplate_types::{ByteLen, GuestOffset, HostOffset, limits};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// L1 entries of one chunk.
const CHUNK: usize = 1024;
/// Chunks of the longest L1 table.
const CHUNKS: usize = (limits::MAX_L1_BYTES / ENTRY_BYTES) as usize / CHUNK;

/// The mapping tables in memory.
pub(crate) struct Tables {
    pub(crate) geo: Geometry,
    pub(crate) codec: EntryCodec,
    chunks: Box<[OnceLock<Box<Chunk>>]>,
    /// Entries that the table has in the file.
    len: AtomicU32,
}

/// A piece of the L1 table.
struct Chunk {
    entries: Box<[AtomicU64]>,
    /// One cell an L1 entry; its slots are made when a slice of that table is first loaded.
    slots: Box<[OnceLock<Box<[Slot]>>]>,
}

impl Chunk {
    fn new() -> Box<Self> {
        Box::new(Self {
            entries: (0..CHUNK).map(|_| AtomicU64::new(0)).collect(),
            slots: (0..CHUNK).map(|_| OnceLock::new()).collect(),
        })
    }
}

pub(crate) type Slot = ArcSwapOption<Slice>;

impl Tables {
    pub(crate) fn new(geo: Geometry, codec: EntryCodec, l1: &[u64]) -> Self {
        let chunks = (0..CHUNKS).map(|_| OnceLock::new()).collect();
        let tables = Self { geo, codec, chunks, len: AtomicU32::new(0) };
        tables.replace_l1(l1);
        tables
    }

    /// Sets the whole L1 table. Nobody may be using the entries that change.
    pub(crate) fn replace_l1(&self, l1: &[u64]) {
        let old = self.len.load(Ordering::Acquire);
        for (index, word) in (0u32..).zip(l1) {
            self.set_l1(index, *word);
        }
        let len = l1.len() as u32;
        for index in len..old {
            self.set_l1(index, 0);
        }
        self.len.store(len, Ordering::Release);
    }

    fn chunk(&self, index: u32) -> Option<&Chunk> {
        self.chunks.get(index as usize / CHUNK)?.get().map(Box::as_ref)
    }

    pub(crate) fn cluster(&self) -> u64 {
        self.geo.cluster_size()
    }

    /// The slice that maps a guest address, and the entry in it.
    pub(crate) fn locate(&self, at: GuestOffset) -> (SliceId, usize) {
        // Guest addresses are below the disk's size, which a table of at most 2^22 entries covers.
        let l1 = self.geo.l1_index(at) as u32;
        let id = SliceId { l1, part: self.geo.slice_index(at) as u32 };
        (id, self.geo.index_in_slice(at))
    }

    /// The guest address of a slice's first cluster.
    pub(crate) fn slice_start(&self, id: SliceId) -> GuestOffset {
        let table = u64::from(id.l1).saturating_mul(self.geo.l2_coverage());
        let part = u64::from(id.part).saturating_mul(self.geo.slice_coverage());
        GuestOffset::new(table.saturating_add(part))
    }

    /// Bytes from `at` to the end of what its L2 table maps.
    pub(crate) fn to_table_end(&self, at: GuestOffset) -> ByteLen {
        let span = self.geo.l2_coverage();
        ByteLen::new(span - at.get() % span)
    }

    /// The raw L1 entry; an index past the end reads as unallocated.
    pub(crate) fn l1(&self, index: u32) -> u64 {
        let entry = self.chunk(index).and_then(|c| c.entries.get(index as usize % CHUNK));
        entry.map_or(0, |e| e.load(Ordering::Acquire))
    }

    pub(crate) fn set_l1(&self, index: u32, word: u64) {
        // A flag without a table means nothing, and an entry without a table is zero everywhere here.
        let word = if word & !COPIED == 0 { 0 } else { word };
        let Some(cell) = self.chunks.get(index as usize / CHUNK) else { return };
        if word == 0 && cell.get().is_none() {
            return;
        }
        if let Some(entry) = cell.get_or_init(Chunk::new).entries.get(index as usize % CHUNK) {
            entry.store(word, Ordering::Release);
        }
    }

    /// Where all L2 tables lie.
    pub(crate) fn all_tables(&self) -> Vec<u64> {
        let chunks = self.chunks.iter().filter_map(OnceLock::get);
        let words = chunks.flat_map(|c| c.entries.iter()).map(|e| e.load(Ordering::Acquire));
        words.map(|word| word & OFFSET_MASK).filter(|at| *at != 0).collect()
    }

    /// The slot of a slice, if any slice of its table was ever loaded.
    pub(crate) fn slot(&self, id: SliceId) -> Option<&Slot> {
        let slots = &self.chunk(id.l1)?.slots;
        slots.get(id.l1 as usize % CHUNK)?.get()?.get(id.part as usize)
    }

    /// The slot of a slice, made when missing; `None` for an index past the end.
    pub(crate) fn slot_or_new(&self, id: SliceId) -> Option<&Slot> {
        let parts = self.geo.slices_per_table();
        let chunk = self.chunks.get(id.l1 as usize / CHUNK)?.get_or_init(Chunk::new);
        let table = chunk.slots.get(id.l1 as usize % CHUNK)?;
        table.get_or_init(|| (0..parts).map(|_| Slot::empty()).collect()).get(id.part as usize)
    }

    /// Where a slice lies in the file, if its table is allocated.
    pub(crate) fn slice_at(&self, id: SliceId) -> Option<HostOffset> {
        let table = self.l1(id.l1) & OFFSET_MASK;
        if table == 0 {
            return None;
        }
        self.geo.slice_offset(HostOffset::new(table), id.part as usize)
    }
}
