//! The hot path: may this request go to the file as it is? No lock, no allocation, no future.

use super::FileStorage;
use bedplate_runtime::sync::Pin;
use bedplate_types::HostOffset;
use std::sync::atomic::Ordering;

/// Permission for one direct request; give it to [`FileStorage::end_direct`] once its I/O has ended.
///
/// It has no destructor. One that is lost stops partial-block writes for good.
#[must_use = "a direct request must be ended"]
#[derive(Debug)]
pub struct DirectPin {
    /// Reads need none.
    write: Option<Pin>,
}

impl FileStorage {
    /// Whether a request may be submitted on [`FileStorage::file`] as it is. `None` when it must go through
    /// [`crate::Storage::read`] or [`crate::Storage::write`]: offset, length or memory not aligned, beyond the end, a
    /// change of a read-only file, or a partial-block write going on.
    #[inline]
    pub fn begin_direct(
        &self,
        write: bool,
        at: HostOffset,
        mut segs: impl Iterator<Item = (*mut u8, usize)>,
        len: usize,
    ) -> Option<DirectPin> {
        let inner = &*self.inner;
        let (block, memory) = (inner.align.offset as usize - 1, inner.align.memory as usize - 1);
        let end = at.get().checked_add(len as u64)?;
        let whole = at.get() & block as u64 == 0 && len & block == 0;
        if !whole || end > inner.len() || (write && inner.read_only) {
            return None;
        }
        if !segs.all(|(ptr, n)| (ptr as usize) & memory == 0 && n & block == 0) {
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

    /// Ends a direct request, before its completion is told to anybody.
    #[inline]
    pub fn end_direct(&self, pin: DirectPin) {
        if let Some(pin) = pin.write {
            self.inner.extents.note_change();
            self.inner.epochs.unpin(pin);
        }
    }
}
