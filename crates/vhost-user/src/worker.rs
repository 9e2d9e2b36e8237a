//! Queue threads: one runtime each, and the rings they serve.
//!
//! Callers: the session sends commands; everything else of a ring happens here. Locks: none; a thread owns its
//! rings, and is reached by a channel whose sender wakes the runtime.

use crate::export::Shared;
use crate::ring::{NOTIFY_WITHIN, Ring};
use crate::slow::{Context, Done};
use bedplate_runtime::{Config, Handle, Idle, Runtime, Wait, readable};
use bedplate_storage::Storage;
use bedplate_types::{Error, ErrorKind, Result};
use bedplate_virtio::inflight::InflightArea;
use bedplate_virtio::memory::GuestMemory;
use bedplate_virtio::split::RingAddrs;
use rustix::event::epoll;
use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// How often rings without a kick are looked at while nothing else happens.
const POLL_EVERY: Duration = Duration::from_micros(50);

/// All that a ring needs to run.
pub(crate) struct RingStart {
    pub index: usize,
    pub size: u16,
    pub addrs: RingAddrs,
    pub next_avail: u16,
    pub event_idx: bool,
    pub memory: Arc<GuestMemory>,
    pub inflight: Option<Arc<InflightArea>>,
    /// None: the ring is polled.
    pub kick: Option<Arc<OwnedFd>>,
    pub call: Option<Arc<OwnedFd>>,
    pub err: Option<Arc<OwnedFd>>,
}

/// What a queue thread can be told.
pub(crate) enum Command {
    Start(Box<RingStart>, Sender<Result<()>>),
    /// Finish what is under way, then tell the next available index.
    Stop {
        index: usize,
        done: Sender<u16>,
    },
    SetCall {
        index: usize,
        call: Option<Arc<OwnedFd>>,
    },
    Flush(Sender<Result<()>>),
    Quit,
}

/// A queue thread, as other threads know it.
pub(crate) struct Worker {
    handle: Handle,
    commands: Sender<Command>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Waits for a queue thread's answer.
pub(crate) fn wait<T>(answer: &Receiver<T>) -> Result<T> {
    let gone = |_| Error::new(ErrorKind::Cancelled, "a queue thread has ended");
    answer.recv().map_err(gone)
}

impl Worker {
    /// Sends a command.
    pub(crate) fn send(&self, command: Command) {
        // A thread that has ended answers nothing, which the waiter sees.
        let _ = self.commands.send(command);
        self.handle.post(|| ());
    }

    /// Starts a ring.
    pub(crate) fn start(&self, start: RingStart) -> Result<()> {
        let (done, answer) = channel();
        self.send(Command::Start(Box::new(start), done));
        wait(&answer)?
    }

    /// Tells a ring to stop; the answer comes when its requests are done.
    pub(crate) fn begin_stop(&self, index: usize) -> Receiver<u16> {
        let (done, answer) = channel();
        self.send(Command::Stop { index, done });
        answer
    }

    /// Stops a ring; returns the next available index.
    pub(crate) fn stop(&self, index: usize) -> Result<u16> {
        wait(&self.begin_stop(index))
    }

    /// Makes completed writes durable.
    pub(crate) fn flush(&self) -> Result<()> {
        let (done, answer) = channel();
        self.send(Command::Flush(done));
        wait(&answer)?
    }

    /// Ends the thread, whose rings have been stopped.
    pub(crate) fn end(&self) {
        self.send(Command::Quit);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if thread.is_some_and(|t| t.join().is_err()) {
            tracing::error!("a queue thread has failed");
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.end();
    }
}

/// Starts queue thread `n` of `threads`.
pub(crate) fn start<S: Storage>(
    n: u16,
    threads: u16,
    shared: Arc<Shared<S>>,
    config: Config,
) -> Result<Worker> {
    let (commands, inbox) = channel();
    let (ready, answer) = channel();
    let run = move || {
        let made = Runtime::new(config).and_then(|rt| Loop::new(rt, threads, shared, inbox));
        match made {
            Ok(mut queues) => {
                if ready.send(Ok(queues.context.rt.handle())).is_ok() {
                    queues.run();
                }
            }
            Err(e) => {
                // The starter waits for this answer.
                let _ = ready.send(Err(e));
            }
        }
    };
    let thread = std::thread::Builder::new().name(format!("vub-queue{n}")).spawn(run);
    let thread = thread.map_err(|e| Error::io("cannot start a thread", e))?;
    let handle = wait(&answer)??;
    Ok(Worker { handle, commands, thread: Mutex::new(Some(thread)) })
}

/// The kick descriptors of a thread's rings behind one epoll descriptor: one wait in the ring serves all of them,
/// and a ring that stops takes its descriptor out without leaving a wait behind.
struct Kicks {
    epoll: Rc<OwnedFd>,
    fds: Rc<RefCell<Vec<Option<Arc<OwnedFd>>>>>,
}

impl Kicks {
    fn new(rt: &Runtime, rings: usize) -> Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|e| Error::io("cannot make an epoll descriptor", e.into()))?;
        let kicks = Self { epoll: Rc::new(epoll), fds: Rc::new(RefCell::new(vec![None; rings])) };
        let (epoll, fds) = (kicks.epoll.clone(), kicks.fds.clone());
        rt.spawn(async move {
            loop {
                if let Err(e) = readable(&*epoll).await {
                    return tracing::error!("cannot wait for kicks any more: {e}");
                }
                drain(&epoll, &fds.borrow());
            }
        });
        Ok(kicks)
    }

    fn add(&self, ring: usize, fd: Arc<OwnedFd>) -> Result<()> {
        let data = epoll::EventData::new_u64(ring as u64);
        epoll::add(&*self.epoll, &*fd, data, epoll::EventFlags::IN)
            .map_err(|e| Error::io("cannot wait for kicks of this descriptor", e.into()))?;
        self.fds.borrow_mut()[ring] = Some(fd);
        Ok(())
    }

    fn remove(&self, ring: usize) {
        if let Some(fd) = self.fds.borrow_mut()[ring].take() {
            // It fails only when the descriptor was taken out by `drain` already.
            let _ = epoll::delete(&*self.epoll, &*fd);
        }
    }
}

/// Resets the counters of descriptors that were kicked.
fn drain(epoll: &OwnedFd, fds: &[Option<Arc<OwnedFd>>]) {
    let mut events = Vec::with_capacity(64);
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    let _ = epoll::wait(epoll, rustix::buffer::spare_capacity(&mut events), Some(&now));
    for event in events {
        let ring = event.data.u64() as usize;
        let Some(fd) = fds.get(ring).and_then(Option::as_ref) else { continue };
        match rustix::io::read(&**fd, &mut [0; 8]) {
            Ok(8) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
            // No eventfd, or one that fails: it would wake this thread for ever.
            _ => {
                let _ = epoll::delete(epoll, &**fd);
            }
        }
    }
}

/// A queue thread's state.
struct Loop<S: Storage> {
    context: Context<S>,
    /// Ring `index` is at `index / threads`.
    rings: Vec<Option<Ring>>,
    threads: usize,
    kicks: Kicks,
    inbox: Receiver<Command>,
    direct: Vec<(u64, i32)>,
    quit: bool,
}

impl<S: Storage> Loop<S> {
    fn new(
        rt: Runtime,
        threads: u16,
        shared: Arc<Shared<S>>,
        inbox: Receiver<Command>,
    ) -> Result<Self> {
        let threads = usize::from(threads.max(1));
        let count = usize::from(shared.queues).div_ceil(threads);
        let kicks = Kicks::new(&rt, count)?;
        let context = Context { shared, rt, done: Done::default() };
        let rings = (0..count).map(|_| None).collect();
        Ok(Self { context, rings, threads, kicks, inbox, direct: Vec::new(), quit: false })
    }

    fn run(&mut self) {
        loop {
            while let Ok(command) = self.inbox.try_recv() {
                self.command(command);
            }
            let mut busy = false;
            for ring in self.rings.iter_mut().flatten() {
                busy |= ring.pump(&self.context);
            }
            self.end_drained();
            if self.quit {
                return;
            }
            self.turn(busy);
            self.complete();
        }
    }

    /// One round of the runtime, with a wait when there is nothing to do.
    fn turn(&mut self, busy: bool) {
        let rings = &mut self.rings;
        let wait = if busy {
            Wait::No
        } else if rings.iter().flatten().any(Ring::owes_interrupt) {
            Wait::For(NOTIFY_WITHIN)
        } else if rings.iter().flatten().any(Ring::is_polled) {
            Wait::For(POLL_EVERY)
        } else {
            Wait::Forever
        };
        self.context.rt.turn_polling(wait, &mut |idle| match idle {
            Idle::Spinning => rings.iter().flatten().any(Ring::has_avail),
            Idle::Sleeping => {
                // Every ring must ask for kicks, so no `any` here.
                rings.iter_mut().flatten().fold(false, |found, r| r.before_sleep() | found)
            }
        });
        rings.iter_mut().flatten().for_each(Ring::after_sleep);
    }

    /// Gives completed requests back to their drivers.
    fn complete(&mut self) {
        self.context.rt.take_direct(&mut self.direct);
        for (token, result) in self.direct.drain(..) {
            if let Some(Some(ring)) = self.rings.get_mut((token >> 32) as usize) {
                ring.direct_done(&self.context, token as u32, result);
            }
        }
        let mut done = self.context.done.borrow_mut();
        for (token, result) in done.drain(..) {
            if let Some(Some(ring)) = self.rings.get_mut((token >> 32) as usize) {
                ring.slow_done(token as u32, result);
            }
        }
        drop(done);
        self.rings.iter_mut().flatten().for_each(Ring::settle);
    }

    /// Drops the rings that were to stop and have nothing under way any more.
    fn end_drained(&mut self) {
        for (i, place) in self.rings.iter_mut().enumerate() {
            if place.as_mut().is_some_and(Ring::end_if_drained) {
                self.kicks.remove(i);
                *place = None;
            }
        }
    }

    fn start_ring(&mut self, start: RingStart) -> Result<()> {
        let local = start.index / self.threads;
        let kick = start.kick.clone();
        let counters = self.context.shared.counters.get(start.index).cloned();
        let counters = counters.unwrap_or_default();
        let name = format!("queue {} of {}", start.index, self.context.shared.name);
        let ring = Ring::new(start, (local as u64) << 32, name, counters)?;
        let place = self.rings.get_mut(local);
        let place = place.ok_or_else(|| Error::new(ErrorKind::InvalidInput, "no such queue"))?;
        if let Some(fd) = kick {
            self.kicks.add(local, fd)?;
        }
        *place = Some(ring);
        Ok(())
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::Start(start, done) => {
                // The asker waits for the answer; if it has gone nobody wants it.
                let _ = done.send(self.start_ring(*start));
            }
            Command::Stop { index, done } => {
                // Without a ring the sender is dropped, which the asker sees as an error.
                if let Some(Some(ring)) = self.rings.get_mut(index / self.threads) {
                    ring.stop(done);
                }
            }
            Command::SetCall { index, call } => {
                if let Some(Some(ring)) = self.rings.get_mut(index / self.threads) {
                    ring.set_call(call);
                }
            }
            Command::Flush(done) => {
                let shared = self.context.shared.clone();
                self.context.rt.spawn(async move {
                    let _ = done.send(shared.disk.flush().await);
                });
            }
            Command::Quit => self.quit = true,
        }
    }
}
