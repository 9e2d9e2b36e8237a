//! The slow road: requests as tasks of the queue thread's runtime, through the disk's asynchronous methods.
//!
//! Callers: [`crate::ring`]. Each task leaves its results in the thread's list of what is done, where the queue
//! loop finds them after the turn that ran the task.

use crate::export::Shared;
use bedplate_runtime::Runtime;
use bedplate_runtime::buf::IoVec;
use bedplate_storage::{Storage, ZeroMode};
use bedplate_types::{GuestOffset, Result};
use bedplate_virtio::blk::Span;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// Requests that are done: token and result.
pub(crate) type Done = Rc<RefCell<Vec<(u64, Result<()>)>>>;

/// What a queue thread's rings work with.
pub(crate) struct Context<S: Storage> {
    pub shared: Arc<Shared<S>>,
    pub rt: Runtime,
    pub done: Done,
}

impl<S: Storage> Context<S> {
    fn run<F, Fut>(&self, token: u64, work: F)
    where
        F: FnOnce(Arc<Shared<S>>) -> Fut + 'static,
        Fut: Future<Output = Result<()>> + 'static,
    {
        let (shared, done) = (self.shared.clone(), self.done.clone());
        self.rt.spawn(async move {
            let result = work(shared).await;
            done.borrow_mut().push((token, result));
        });
    }

    pub(crate) fn read(&self, token: u64, at: GuestOffset, buf: IoVec) {
        self.run(token, move |s| async move { s.disk.read(at, buf).await });
    }

    /// Writes, and makes it durable where the guest has no means to.
    pub(crate) fn write(&self, token: u64, at: GuestOffset, buf: IoVec) {
        self.run(token, move |s| async move { s.disk.write(at, buf, !s.is_writeback()).await });
    }

    /// Writes of one batch, which the disk plans together.
    pub(crate) fn write_batch(&self, tokens: Vec<u64>, writes: Vec<(GuestOffset, IoVec)>) {
        let (shared, done) = (self.shared.clone(), self.done.clone());
        self.rt.spawn(async move {
            let results = shared.disk.write_batch(writes).await;
            done.borrow_mut().extend(tokens.into_iter().zip(results));
        });
    }

    pub(crate) fn flush(&self, token: u64) {
        self.run(token, move |s| async move { s.disk.flush().await });
    }

    pub(crate) fn discard(&self, token: u64, spans: Vec<Span>) {
        self.run(token, move |s| async move {
            for span in spans {
                s.disk.discard(span.at, span.len).await?;
            }
            s.settle().await
        });
    }

    pub(crate) fn write_zeroes(&self, token: u64, spans: Vec<Span>) {
        self.run(token, move |s| async move {
            for span in spans {
                let mode = ZeroMode { unmap: span.unmap, fast_only: false };
                s.disk.write_zeroes(span.at, span.len, mode).await?;
            }
            s.settle().await
        });
    }
}

impl<S: Storage> Shared<S> {
    /// Makes a change durable where the guest has no means to.
    async fn settle(&self) -> Result<()> {
        if self.is_writeback() { Ok(()) } else { self.disk.flush().await }
    }
}
