//! Tasks of the local executor, and their wakers.
//!
//! The future lives in the runtime's table and never leaves its thread; the waker is a small shared header,
//! which any thread may hold and use.

use crate::executor;
use crate::remote::Shared;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Poll, Wake};

/// A spawned future.
pub(crate) type LocalFuture = Pin<Box<dyn Future<Output = ()>>>;

/// What a waker needs to know.
pub(crate) struct Header {
    /// Place in the table; `None` for the future of a `block_on`.
    pub slot: Option<usize>,
    /// Set while the task is in a queue, so that it is there once.
    queued: AtomicBool,
    /// For `block_on`: the future is to be polled.
    pub due: AtomicBool,
    pub shared: Arc<Shared>,
}

impl Header {
    pub(crate) fn new(slot: Option<usize>, shared: Arc<Shared>) -> Arc<Self> {
        Arc::new(Self {
            slot,
            queued: AtomicBool::new(false),
            due: AtomicBool::new(slot.is_none()),
            shared,
        })
    }

    /// Notes that the task is out of the queue: a wake from now on puts it in again.
    pub(crate) fn unqueue(&self) {
        // Acquire: the poll that follows sees all that the waking thread did before.
        self.queued.swap(false, Ordering::AcqRel);
    }

    /// Marks the task as queued; false when it was already.
    pub(crate) fn enqueue(&self) -> bool {
        !self.queued.swap(true, Ordering::AcqRel)
    }
}

impl Wake for Header {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.enqueue() && !executor::wake_here(self) {
            self.shared.wake(self.clone());
        }
    }
}

/// A task or a free place.
enum Entry {
    Free,
    /// The future is out of its place while it is polled.
    Task(Arc<Header>, Option<LocalFuture>),
}

/// The table of spawned futures.
#[derive(Default)]
pub(crate) struct Tasks {
    entries: Vec<Entry>,
    free: Vec<usize>,
}

impl Tasks {
    /// Adds a future.
    pub(crate) fn add(&mut self, shared: &Arc<Shared>, future: LocalFuture) -> Arc<Header> {
        let slot = self.free.pop().unwrap_or(self.entries.len());
        let header = Header::new(Some(slot), shared.clone());
        let entry = Entry::Task(header.clone(), Some(future));
        match self.entries.get_mut(slot) {
            Some(place) => *place = entry,
            None => self.entries.push(entry),
        }
        header
    }

    /// Takes the future of `header` out for polling; `None` when that task has ended or is being polled.
    pub(crate) fn take(&mut self, header: &Arc<Header>) -> Option<LocalFuture> {
        match self.entries.get_mut(header.slot?)? {
            Entry::Task(h, future) if Arc::ptr_eq(h, header) => future.take(),
            _ => None,
        }
    }

    /// Puts a future back that is not finished. Gives it back when its task has been removed meanwhile.
    pub(crate) fn put_back(
        &mut self,
        header: &Arc<Header>,
        future: LocalFuture,
    ) -> Option<LocalFuture> {
        match header.slot.and_then(|s| self.entries.get_mut(s)) {
            Some(Entry::Task(h, place)) if Arc::ptr_eq(h, header) => {
                *place = Some(future);
                None
            }
            _ => Some(future),
        }
    }

    /// Forgets a task that has finished.
    pub(crate) fn remove(&mut self, header: &Arc<Header>) {
        let Some(slot) = header.slot else { return };
        if let Some(entry) = self.entries.get_mut(slot)
            && matches!(entry, Entry::Task(h, _) if Arc::ptr_eq(h, header))
        {
            *entry = Entry::Free;
            self.free.push(slot);
        }
    }

    /// Takes all futures out, to be dropped.
    pub(crate) fn take_all(&mut self) -> Vec<LocalFuture> {
        self.free.clear();
        let entries = std::mem::take(&mut self.entries);
        entries
            .into_iter()
            .filter_map(|e| if let Entry::Task(_, f) = e { f } else { None })
            .collect()
    }
}

/// Lets the other tasks of this thread run once, and I/O be looked at.
pub async fn yield_now() {
    let mut yielded = false;
    poll_fn(|cx| {
        if yielded {
            return Poll::Ready(());
        }
        yielded = true;
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
