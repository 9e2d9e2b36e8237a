//! The L1 table and the place of every cached L2 slice, both readable without a lock.

use crate::format::{EntryCodec, Geometry, OFFSET_MASK};
use crate::slice::{Slice, SliceId};
use arc_swap::ArcSwapOption;
use bedplate_types::{ByteLen, GuestOffset, HostOffset};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// The mapping tables in memory.
pub(crate) struct Tables {
    pub(crate) geo: Geometry,
    pub(crate) codec: EntryCodec,
    l1: Box<[AtomicU64]>,
    /// One cell an L1 entry; its slots are made when a slice of that table is first loaded.
    slots: Box<[OnceLock<Box<[Slot]>>]>,
}

pub(crate) type Slot = ArcSwapOption<Slice>;

impl Tables {
    pub(crate) fn new(geo: Geometry, codec: EntryCodec, l1: Vec<u64>) -> Self {
        let slots = l1.iter().map(|_| OnceLock::new()).collect();
        Self { geo, codec, l1: l1.into_iter().map(AtomicU64::new).collect(), slots }
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

    /// Bytes from `at` to the end of what its L2 table maps.
    pub(crate) fn to_table_end(&self, at: GuestOffset) -> ByteLen {
        let span = self.geo.l2_coverage();
        ByteLen::new(span - at.get() % span)
    }

    /// The raw L1 entry; an index past the end reads as unallocated.
    pub(crate) fn l1(&self, index: u32) -> u64 {
        self.l1.get(index as usize).map_or(0, |e| e.load(Ordering::Acquire))
    }

    pub(crate) fn set_l1(&self, index: u32, word: u64) {
        if let Some(entry) = self.l1.get(index as usize) {
            entry.store(word, Ordering::Release);
        }
    }

    /// The slot of a slice, if any slice of its table was ever loaded.
    pub(crate) fn slot(&self, id: SliceId) -> Option<&Slot> {
        self.slots.get(id.l1 as usize)?.get()?.get(id.part as usize)
    }

    /// The slot of a slice, made when missing; `None` for an index past the end.
    pub(crate) fn slot_or_new(&self, id: SliceId) -> Option<&Slot> {
        let parts = self.geo.slices_per_table();
        let table = self.slots.get(id.l1 as usize)?;
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
