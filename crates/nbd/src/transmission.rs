//! The second phase of a session: requests in, replies out, many under way at once.
//!
//! Caller: the server. One future does it all on one thread: it reads and checks requests, keeps those that were
//! accepted running on the disk, and sends replies in the order they become ready, several in one system call.
//! Invariants: a request that was accepted is finished even when the client is gone; requests and memory under way
//! are bounded (a request counts until its reply is sent, so a client that does not read stops being read);
//! a refused request leaves the stream in step.

use crate::device::Device;
use crate::negotiate::Agreed;
use crate::pool::Pool;
use crate::proto::{self, Errno, Request, command};
use crate::reply::{Form, Reply};
use crate::request::{self, MAX_EXTENTS, Rights};
use crate::stream::{ByteStream, Input};
use bedplate_runtime::buf::AlignedBuf;
use bedplate_types::limits::{MAX_NBD_IN_FLIGHT, MAX_NBD_REQUEST};
use futures_util::stream::{FuturesUnordered, StreamExt};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::pin;
use std::task::Poll;

/// Bytes of payload that one session may have under way.
const MAX_BYTES: usize = 2 * MAX_NBD_REQUEST as usize;
/// Slices sent in one system call; below the kernel's limit of 1024.
const MAX_SLICES: usize = 512;
/// Replies taken up in one round of sending.
const MAX_SENT: usize = 64;
/// Longest write that is given to the disk together with others: larger ones gain nothing from waiting for each other.
const MAX_BATCHED: usize = 64 << 10;
/// Rounds of work in one poll before other tasks of the thread get their turn.
const MAX_ROUNDS: usize = 16;

/// How a session ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The client said so.
    Disconnected,
    /// The client closed the connection between two requests.
    Closed,
    /// A request did not start with the magic number.
    BadMagic,
    /// The server stops.
    Stopped,
}

/// A request that was accepted.
struct Job {
    request: Request,
    payload: Option<AlignedBuf>,
    bytes: usize,
}

impl Job {
    /// A small write without a promise of durability is given to the disk together with others that arrived with it.
    fn can_be_batched(&self) -> bool {
        self.payload.is_some() && self.request.flags == 0 && self.bytes <= MAX_BATCHED
    }
}

/// What is carried out as one.
enum Work {
    One(Job),
    Writes(Vec<Job>),
}

/// State shared by the reading, the working and the sending half.
struct Session {
    rights: Rights,
    pool: Pool,
    jobs: RefCell<VecDeque<Job>>,
    /// Replies to send, each with the bytes it gives back.
    replies: RefCell<VecDeque<(Reply, usize)>>,
    in_flight: Cell<usize>,
    bytes: Cell<usize>,
    /// Grows whenever one half did something another may wait for.
    progress: Cell<u64>,
}

/// Serves requests from `input` until the client ends the session, the stream fails, or `stop` is ready; what was
/// accepted is finished and answered. When `kill` is ready nothing more is sent.
///
/// # Errors
/// Those of the stream.
pub async fn transmit<S: ByteStream, D: Device>(
    input: &mut Input<'_, S>,
    device: &D,
    agreed: Agreed,
    read_only: bool,
    stop: impl Future<Output = ()>,
    kill: impl Future<Output = ()>,
) -> io::Result<End> {
    let session = Session {
        rights: Rights {
            size: device.size(),
            read_only,
            structured: agreed.structured,
            allocation: agreed.allocation,
            bitmaps: agreed.bitmaps,
        },
        pool: Pool::default(),
        jobs: RefCell::default(),
        replies: RefCell::default(),
        in_flight: Cell::new(0),
        bytes: Cell::new(0),
        progress: Cell::new(0),
    };
    let session = &session;
    let work = |work: Work| session.work(device, work);
    let stream = input.stream();
    let mut running = FuturesUnordered::new();
    let mut reader = pin!(session.receive(input));
    let mut writer = pin!(session.send(stream));
    let (mut stop, mut kill) = (pin!(stop), pin!(kill));
    let mut ended: Option<io::Result<End>> = None;
    let mut dead = false;

    poll_fn(|cx| {
        for _ in 0..MAX_ROUNDS {
            let before = session.progress.get();
            if ended.is_none() {
                if stop.as_mut().poll(cx).is_ready() {
                    ended = Some(Ok(End::Stopped));
                } else if let Poll::Ready(end) = reader.as_mut().poll(cx) {
                    ended = Some(end);
                }
            }
            running.extend(session.take_jobs().into_iter().map(&work));
            while let Poll::Ready(Some(())) = running.poll_next_unpin(cx) {}
            if !dead {
                if kill.as_mut().poll(cx).is_ready() {
                    dead = true;
                } else if let Poll::Ready(e) = writer.as_mut().poll(cx) {
                    dead = true;
                    ended.get_or_insert(Err(e));
                }
            }
            if dead {
                ended.get_or_insert(Ok(End::Stopped));
                session.drop_replies();
            }
            if ended.is_some() && running.is_empty() && (dead || session.in_flight.get() == 0) {
                return Poll::Ready(());
            }
            if session.progress.get() == before {
                return Poll::Pending;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
    ended.unwrap_or(Ok(End::Closed))
}

impl Session {
    fn progressed(&self) {
        self.progress.set(self.progress.get().wrapping_add(1));
    }

    /// Waits until `ready`; the halves are polled again whenever there was progress, so no waker is kept.
    async fn until(&self, ready: impl Fn() -> bool) {
        poll_fn(|_| if ready() { Poll::Ready(()) } else { Poll::Pending }).await;
    }

    fn accept(&self, bytes: usize) {
        self.in_flight.set(self.in_flight.get() + 1);
        self.bytes.set(self.bytes.get() + bytes);
        self.progressed();
    }

    fn release(&self, bytes: usize) {
        self.in_flight.set(self.in_flight.get().saturating_sub(1));
        self.bytes.set(self.bytes.get().saturating_sub(bytes));
        self.progressed();
    }

    fn reply(&self, reply: Reply, bytes: usize) {
        self.replies.borrow_mut().push_back((reply, bytes));
        self.progressed();
    }

    fn drop_replies(&self) {
        for (_, bytes) in self.replies.borrow_mut().drain(..) {
            self.release(bytes);
        }
    }

    fn refuse(&self, r: &Request, errno: Errno, text: &str) {
        let form = Form { cookie: r.cookie, structured: self.rights.structured };
        self.accept(0);
        self.reply(Reply::error(form, errno, text), 0);
    }

    /// What was accepted since the last call, small writes put together.
    fn take_jobs(&self) -> Vec<Work> {
        let mut jobs = self.jobs.borrow_mut();
        let batch = jobs.iter().filter(|job| job.can_be_batched()).count() > 1;
        let (mut all, mut writes) = (Vec::new(), Vec::new());
        for job in jobs.drain(..) {
            if batch && job.can_be_batched() {
                writes.push(job);
            } else {
                all.push(Work::One(job));
            }
        }
        if batch {
            all.push(Work::Writes(writes));
        }
        all
    }

    /// Carries something out and leaves the replies for sending.
    async fn work<D: Device>(&self, device: &D, work: Work) {
        let structured = self.rights.structured;
        match work {
            Work::One(Job { request, payload, bytes }) => {
                let done = request::execute(device, request, payload, &self.rights, &self.pool);
                self.reply(done.await, bytes);
            }
            Work::Writes(jobs) => {
                let bytes: Vec<usize> = jobs.iter().map(|job| job.bytes).collect();
                let writes =
                    jobs.into_iter().filter_map(|j| Some((j.request, j.payload?))).collect();
                let done = request::execute_writes(device, writes, structured, &self.pool).await;
                for (reply, bytes) in done.into_iter().zip(bytes) {
                    self.reply(reply, bytes);
                }
            }
        }
    }

    /// The reading half: takes requests up until the session ends.
    async fn receive<S: ByteStream>(&self, input: &mut Input<'_, S>) -> io::Result<End> {
        loop {
            self.until(|| self.in_flight.get() < MAX_NBD_IN_FLIGHT).await;
            let mut raw = [0; proto::REQUEST_HEADER];
            if !input.read_exact_or_end(&mut raw).await? {
                return Ok(End::Closed);
            }
            let Some(request) = Request::parse(&raw) else {
                return Ok(End::BadMagic);
            };
            if request.command == command::DISC {
                return Ok(End::Disconnected);
            }
            let sent = if request.command == command::WRITE { request.len } else { 0 };
            if let Err((errno, text)) = request::check(&request, &self.rights) {
                tracing::debug!(?request, "refused a request: {text}");
                // The data of a refused write still has to be taken off the stream.
                input.skip(u64::from(sent)).await?;
                self.refuse(&request, errno, text);
                continue;
            }
            let bytes = memory_of(&request);
            self.until(|| self.bytes.get() == 0 || self.bytes.get() + bytes <= MAX_BYTES).await;
            let payload = if sent == 0 {
                None
            } else if let Ok(mut buf) = self.pool.take(sent as usize) {
                input.read_exact(&mut buf[..sent as usize]).await?;
                Some(buf)
            } else {
                input.skip(u64::from(sent)).await?;
                self.refuse(&request, Errno::NoMem, "no memory for the data");
                continue;
            };
            self.accept(bytes);
            self.jobs.borrow_mut().push_back(Job { request, payload, bytes });
        }
    }

    /// The sending half; ends only when the stream fails.
    async fn send<S: ByteStream>(&self, stream: &S) -> io::Error {
        loop {
            self.until(|| !self.replies.borrow().is_empty()).await;
            let batch: Vec<(Reply, usize)> = {
                let mut replies = self.replies.borrow_mut();
                let n = replies.len().min(MAX_SENT);
                replies.drain(..n).collect()
            };
            let mut slices = Vec::with_capacity(2 * batch.len());
            batch.iter().for_each(|(reply, _)| reply.slices(&mut slices));
            for some in slices.chunks_mut(MAX_SLICES) {
                if let Err(e) = stream.write_all(some).await {
                    return e;
                }
            }
            drop(slices);
            for (reply, bytes) in batch {
                if let Some(buf) = reply.into_buf() {
                    self.pool.give(buf);
                }
                self.release(bytes);
            }
        }
    }
}

/// Bytes of memory a request takes while it is under way.
fn memory_of(r: &Request) -> usize {
    match r.command {
        command::READ | command::WRITE => r.len as usize,
        command::CACHE => 1 << 20,
        command::BLOCK_STATUS => MAX_EXTENTS * 32,
        _ => 0,
    }
}

#[cfg(test)]
mod tests;
