//! Counters of one queue. Written by its thread only, read by anybody.

use bedplate_types::RequestStats;
use std::sync::atomic::{AtomicU64, Ordering};

/// A counter with one writer.
#[derive(Default, Debug)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`. Only the owning thread may call it: it is no atomic addition, so that it costs nothing.
    #[inline]
    pub(crate) fn add(&self, n: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The counters behind [`QueueStats`].
#[derive(Default, Debug)]
#[repr(align(128))]
pub(crate) struct Counters {
    pub reads: Counter,
    pub read_bytes: Counter,
    pub writes: Counter,
    pub write_bytes: Counter,
    pub flushes: Counter,
    pub discards: Counter,
    pub other: Counter,
    pub errors: Counter,
    pub malformed: Counter,
    pub direct: Counter,
    pub interrupts: Counter,
    pub sleeps: Counter,
}

/// What one queue has done since the export was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueStats {
    /// What was asked of it.
    pub asked: RequestStats,
    /// Chains that broke the rules of the ring.
    pub malformed: u64,
    /// Reads and writes that went straight between guest memory and the file.
    pub direct: u64,
    /// Interrupts sent to the guest.
    pub interrupts: u64,
    /// Times the queue's thread went to sleep while this queue was running.
    pub sleeps: u64,
}

impl Counters {
    pub(crate) fn snapshot(&self) -> QueueStats {
        let asked = RequestStats {
            reads: self.reads.get(),
            read_bytes: self.read_bytes.get(),
            writes: self.writes.get(),
            write_bytes: self.write_bytes.get(),
            flushes: self.flushes.get(),
            discards: self.discards.get(),
            other: self.other.get(),
            errors: self.errors.get(),
        };
        QueueStats {
            asked,
            malformed: self.malformed.get(),
            direct: self.direct.get(),
            interrupts: self.interrupts.get(),
            sleeps: self.sleeps.get(),
        }
    }
}
