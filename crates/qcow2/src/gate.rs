//! Holding requests while the metadata is replaced as a whole.
//!
//! Callers: every request enters here before it looks anything up ([`Qcow2::enter`]); snapshots, resize and changes of
//! bitmaps hold all of them ([`Qcow2::hold_still`]). To be inside is to hold a pin of [`Qcow2::epochs`], as every request does
//! anyway, so entering costs a look at a flag that seldom changes, and look-ups that answer without waiting ask that
//! same flag together with one they asked before.
//!
//! Invariant: a pin that is taken after the gate was closed sees it closed, since those of before were waited for (`Epochs`: "a
//! pin is seen, or it sees"). So while a [`Still`] is held no request is inside, and none looks anything up.

use crate::image::Qcow2;
use bedplate_runtime::sync::{AsyncMutex, AsyncMutexGuard, Event, PinGuard, RangeGuard, RangeLock};
use bedplate_storage::Storage;
use bedplate_types::{ByteLen, Error, ErrorKind, GuestOffset, Result};
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether requests may enter.
pub(crate) struct Gate {
    /// Look-ups may answer at once: the gate is open, and the bytes of the file are those of the disk.
    answers: AtomicBool,
    closed: AtomicBool,
    opened: Event,
    /// One holds still at a time; held across I/O by design. Taken before every other lock.
    one: AsyncMutex<()>,
    /// Flushes and background work (shared), which hold no pin, against who holds still (exclusive). Taken after `one`.
    upkeep: RangeLock,
}

impl Default for Gate {
    fn default() -> Self {
        Self {
            answers: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            opened: Event::new(),
            one: AsyncMutex::new(()),
            upkeep: RangeLock::new(),
        }
    }
}

impl Gate {
    /// True when look-ups may answer at once. To be asked under a pin.
    #[inline]
    pub(crate) fn answers(&self) -> bool {
        self.answers.load(Ordering::Acquire)
    }
}

/// As long as this lives no request is inside, nor a flush.
pub(crate) struct Still<'a, S: Storage> {
    image: &'a Qcow2<S>,
    _upkeep: Option<RangeGuard<'a>>,
    _one: AsyncMutexGuard<'a, ()>,
}

impl<S: Storage> Drop for Still<'_, S> {
    fn drop(&mut self) {
        self.image.open_gate();
    }
}

impl<S: Storage> Qcow2<S> {
    /// Lets requests in.
    pub(crate) fn open_gate(&self) {
        self.gate.closed.store(false, Ordering::Release);
        self.gate.answers.store(!self.is_encrypted(), Ordering::Release);
        self.gate.opened.notify_all();
    }

    /// Enters with a request, as soon as nobody replaces the metadata. What is looked up stays in place until the guard
    /// is dropped, which must not wait for another entry.
    pub async fn enter(&self) -> PinGuard<'_> {
        loop {
            let pin = self.epochs.guard();
            if !self.gate.closed.load(Ordering::Acquire) {
                return pin;
            }
            // Who holds still waits for it.
            drop(pin);
            let opened = self.gate.opened.wait();
            if self.gate.closed.load(Ordering::Acquire) {
                opened.await;
            }
        }
    }

    /// As [`Self::enter`], with a request for a range. The disk may have become smaller since it was made.
    ///
    /// # Errors
    /// `OutOfRange` when it leaves the disk's last cluster.
    pub(crate) async fn enter_for(&self, at: GuestOffset, len: ByteLen) -> Result<PinGuard<'_>> {
        let pin = self.enter().await;
        let end = self.size().get().checked_next_multiple_of(self.tables.cluster());
        match at.get().checked_add(len.get()) {
            Some(last) if end.is_none_or(|end| last <= end) => Ok(pin),
            _ => Err(Error::new(
                ErrorKind::OutOfRange,
                format!("a request lies beyond the end of the disk in '{}'", self.storage.name()),
            )),
        }
    }

    /// Waits for all requests that are inside, and keeps others out. The caller holds no lock and is not inside itself.
    pub(crate) async fn hold_still(&self) -> Still<'_, S> {
        let one = self.gate.one.lock().await;
        self.gate.answers.store(false, Ordering::Release);
        self.gate.closed.store(true, Ordering::Release);
        // From here on it is opened again, also when this is cancelled.
        let mut still = Still { image: self, _upkeep: None, _one: one };
        self.epochs.quiesce().await;
        still._upkeep = Some(self.gate.upkeep.exclusive(0, 1).await);
        still
    }

    /// Keeps those out who hold still, as [`Self::enter`] does, for work whose end must not be waited for by the space
    /// that it frees.
    pub(crate) async fn upkeep(&self) -> RangeGuard<'_> {
        self.gate.upkeep.shared(0, 1).await
    }
}
