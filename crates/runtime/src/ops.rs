//! Operations as futures. The request, with its buffers, lives in a table until the completion, whatever becomes
//! of the future.

use crate::buf::IoVec;
use crate::executor::{self, Inner, Start};
use crate::file::File;
use crate::io::DirectOp;
use std::future::Future;
use std::io;
use std::os::fd::RawFd;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// What the system is asked to do.
pub(crate) enum Request {
    Transfer { op: DirectOp, file: Arc<File>, buf: IoVec, at: u64 },
    Fsync { file: Arc<File>, data_only: bool },
    Fallocate { file: Arc<File>, mode: i32, at: u64, len: u64 },
    Poll { fd: RawFd, events: i16 },
}

impl Request {
    pub(crate) fn file(&self) -> Option<&Arc<File>> {
        match self {
            Self::Transfer { file, .. }
            | Self::Fsync { file, .. }
            | Self::Fallocate { file, .. } => Some(file),
            Self::Poll { .. } => None,
        }
    }

    pub(crate) fn is_poll(&self) -> bool {
        matches!(self, Self::Poll { .. })
    }
}

/// A place in the table of operations.
enum Slot {
    Free,
    /// In flight. `waker` is `None` once nobody waits any more.
    Busy {
        request: Box<Request>,
        waker: Option<Waker>,
    },
    /// Complete, the result not yet taken.
    Done(i32),
}

/// What a completion left to be woken or dropped after the tables are no longer borrowed.
#[derive(Default)]
pub(crate) struct Leftovers {
    pub wakers: Vec<Waker>,
    #[allow(clippy::vec_box)] // They are boxed already; moving them out would only copy them.
    pub requests: Vec<Box<Request>>,
    pub files: Vec<Arc<File>>,
}

/// All operations of a runtime that have a future.
#[derive(Default)]
pub(crate) struct OpTable {
    slots: Vec<Slot>,
    free: Vec<u32>,
    transfers: usize,
    polls: usize,
}

impl OpTable {
    /// Takes a request in. It stays at its address until the completion.
    pub(crate) fn add(&mut self, request: Box<Request>, waker: Waker) -> u32 {
        *self.counter(request.is_poll()) += 1;
        let slot = Slot::Busy { request, waker: Some(waker) };
        if let Some(i) = self.free.pop() {
            self.slots[i as usize] = slot;
            return i;
        }
        self.slots.push(slot);
        (self.slots.len() - 1) as u32
    }

    fn counter(&mut self, poll: bool) -> &mut usize {
        if poll { &mut self.polls } else { &mut self.transfers }
    }

    pub(crate) fn request(&self, i: u32) -> Option<&Request> {
        match self.slots.get(i as usize)? {
            Slot::Busy { request, .. } => Some(request),
            _ => None,
        }
    }

    /// The result, once it is there; the place is free again then.
    pub(crate) fn poll(&mut self, i: u32, waker: &Waker) -> Option<i32> {
        match self.slots.get_mut(i as usize)? {
            Slot::Done(result) => {
                let result = *result;
                self.set_free(i);
                Some(result)
            }
            Slot::Busy { waker: Some(w), .. } => {
                w.clone_from(waker);
                None
            }
            _ => None,
        }
    }

    fn set_free(&mut self, i: u32) {
        self.slots[i as usize] = Slot::Free;
        self.free.push(i);
    }

    /// Notes that nobody waits for the result any more. True when the operation is a wait that should be cancelled.
    pub(crate) fn abandon(&mut self, i: u32) -> (bool, Option<Waker>) {
        match self.slots.get_mut(i as usize) {
            Some(Slot::Done(_)) => {
                self.set_free(i);
                (false, None)
            }
            Some(Slot::Busy { request, waker }) => (request.is_poll(), waker.take()),
            _ => (false, None),
        }
    }

    /// Records a completion.
    pub(crate) fn complete(&mut self, i: u32, result: i32, left: &mut Leftovers) {
        let Some(slot) = self.slots.get_mut(i as usize) else { return };
        match std::mem::replace(slot, Slot::Done(result)) {
            Slot::Busy { request, waker } => {
                *self.counter(request.is_poll()) -= 1;
                left.requests.push(request);
                match waker {
                    Some(w) => left.wakers.push(w),
                    None => self.set_free(i),
                }
            }
            other => self.slots[i as usize] = other,
        }
    }

    /// Operations that move data or change files.
    pub(crate) fn transfers(&self) -> usize {
        self.transfers
    }

    /// All operations in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.transfers + self.polls
    }

    /// The waits for descriptors in flight.
    pub(crate) fn polls(&self) -> Vec<u32> {
        let is_poll = |s: &Slot| matches!(s, Slot::Busy { request, .. } if request.is_poll());
        let indexed = self.slots.iter().enumerate();
        indexed.filter(|(_, s)| is_poll(s)).map(|(i, _)| i as u32).collect()
    }
}

/// The future of an operation. It starts when first polled.
pub(crate) struct Op {
    rt: Rc<Inner>,
    state: State,
}

enum State {
    New(Box<Request>),
    Started(u32),
    Finished,
}

impl Op {
    /// Prepares an operation on the current thread's runtime.
    pub(crate) fn new(request: Request) -> io::Result<Self> {
        let no_runtime = || io::Error::other("there is no runtime on this thread");
        let rt = executor::current().ok_or_else(no_runtime)?;
        Ok(Self { rt, state: State::New(Box::new(request)) })
    }

    /// Runs an operation on the current thread's runtime.
    pub(crate) async fn run(request: Request) -> io::Result<usize> {
        let result = Self::new(request)?.await;
        usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result))
    }
}

impl Future for Op {
    type Output = i32;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<i32> {
        match std::mem::replace(&mut self.state, State::Finished) {
            State::New(request) => match self.rt.start_op(request, cx.waker()) {
                Start::Started(i) => self.state = State::Started(i),
                Start::Done(result) => return Poll::Ready(result),
            },
            State::Started(i) => match self.rt.poll_op(i, cx.waker()) {
                Some(result) => return Poll::Ready(result),
                None => self.state = State::Started(i),
            },
            State::Finished => {}
        }
        Poll::Pending
    }
}

impl Drop for Op {
    fn drop(&mut self) {
        if let State::Started(i) = self.state {
            self.rt.abandon_op(i);
        }
    }
}
