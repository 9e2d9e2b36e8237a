//! The hot path: may this request go to the file as it is? No lock, no allocation, no future.

use super::FileStorage;
use crate::traits::{DirectPin, SegmentBits};
use bedplate_types::{ByteLen, HostOffset};
use std::sync::atomic::Ordering;

impl FileStorage {
    #[inline]
    pub(crate) fn direct_begin(
        &self,
        write: bool,
        at: HostOffset,
        len: ByteLen,
        memory: SegmentBits,
    ) -> Option<DirectPin> {
        let inner = &*self.inner;
        let block = u64::from(inner.align.offset) - 1;
        let end = at.get().checked_add(len.get())?;
        let whole = (at.get() | len.get() | memory.lengths as u64) & block == 0;
        let aligned = memory.addresses & (inner.align.memory as usize - 1) == 0;
        if !whole || !aligned || end > inner.len() || (write && inner.read_only) {
            return None;
        }
        if !write {
            return Some(DirectPin { write: None });
        }
        let pin = inner.epochs.pin();
        if inner.partial.load(Ordering::Acquire) != 0 {
            inner.epochs.unpin(pin);
            return None;
        }
        Some(DirectPin { write: Some(pin) })
    }

    #[inline]
    pub(crate) fn direct_end(&self, pin: DirectPin) {
        if let Some(pin) = pin.write {
            self.inner.extents.note_change();
            self.inner.epochs.unpin(pin);
        }
    }
}
