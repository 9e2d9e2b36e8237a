//! The server: accepts connections, spreads them over threads, and stops without losing what is under way.
//!
//! Callers: the daemon and the command. Each thread has one runtime and any number of connections; the first one
//! accepts. Locks: none of its own; threads meet in atomics and events.

mod control;

use self::control::{Control, KILL, STOP};
use crate::addr::NbdAddr;
use crate::device::Device;
use crate::listen::{self, SocketPath};
use crate::negotiate::{Agreed, BlockSizes, ExportInfo, Outcome, negotiate};
use crate::proto::export_flag;
use crate::stream::{ByteStream, Input};
use crate::transmission::transmit;
use bedplate_disk::Disk;
use bedplate_runtime::net::{Listener, Stream};
use bedplate_runtime::sync::Event;
use bedplate_runtime::{Config, Handle, Runtime};
use bedplate_storage::FileStorage;
use bedplate_types::limits::{
    MAX_NBD_CLIENTS, MAX_NBD_REQUEST, MAX_NBD_STRING, NBD_HANDSHAKE_SECONDS,
};
use bedplate_types::{Error, ErrorKind, Result, ResultExt};
use futures_util::future::{Either, select};
use std::io::{self, IoSlice};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// A disk under a name.
pub struct NbdExport<D = Disk<FileStorage>> {
    /// The name clients ask for; the first export also answers to the empty name.
    pub name: String,
    /// A text for people; empty: none.
    pub description: String,
    /// The disk.
    pub disk: Arc<D>,
    /// Refuse writes even when the disk would take them.
    pub read_only: bool,
}

/// How a server works.
#[derive(Clone, Debug)]
pub struct NbdOptions {
    /// Threads that connections are spread over.
    pub threads: usize,
    /// Connections at once; further ones are closed at once.
    pub max_clients: usize,
    /// How long a client may take to choose an export.
    pub handshake: Duration,
    /// How long a stopping server waits for clients to take their last replies.
    pub drain: Duration,
    /// How each thread's runtime is set up.
    pub runtime: Config,
}

impl Default for NbdOptions {
    fn default() -> Self {
        Self {
            threads: 1,
            max_clients: MAX_NBD_CLIENTS,
            handshake: Duration::from_secs(NBD_HANDSHAKE_SECONDS),
            drain: Duration::from_secs(5),
            runtime: Config::default(),
        }
    }
}

/// What all threads share.
struct Shared<D> {
    exports: Vec<NbdExport<D>>,
    options: NbdOptions,
    control: Control,
    /// Connections of each thread.
    active: Vec<AtomicUsize>,
    /// A connection has ended.
    ended: Event,
    /// Connections so far; the number names a connection in the log.
    accepted: AtomicU64,
}

/// Counts a connection for as long as it lives.
struct Slot<D> {
    shared: Arc<Shared<D>>,
    thread: usize,
}

impl<D> Drop for Slot<D> {
    fn drop(&mut self) {
        self.shared.active[self.thread].fetch_sub(1, SeqCst);
        self.shared.ended.notify_all();
    }
}

/// A running server. Dropping it stops it.
pub struct NbdServer {
    addr: NbdAddr,
    /// Raises the level of the control.
    raise: Box<dyn Fn(u8) + Send + Sync>,
    /// Counts connections.
    clients: Box<dyn Fn() -> usize + Send + Sync>,
    threads: Vec<JoinHandle<()>>,
    path: Option<SocketPath>,
}

impl NbdServer {
    /// Starts to serve `exports` at `addr`. When it returns, clients can connect.
    ///
    /// # Errors
    /// `InvalidInput` for exports or options that can't be; what listening and starting threads gives.
    pub fn start<D: Device>(
        addr: &NbdAddr,
        exports: Vec<NbdExport<D>>,
        options: NbdOptions,
    ) -> Result<Self> {
        check_exports(&exports)?;
        let count = options.threads;
        if count == 0 || options.max_clients == 0 {
            let text = "an NBD server needs at least one thread and one client";
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        let bound = listen::bind(addr)?;
        let shared = Arc::new(Shared {
            exports,
            options,
            control: Control::default(),
            active: (0..count).map(|_| AtomicUsize::new(0)).collect(),
            ended: Event::new(),
            accepted: AtomicU64::new(0),
        });
        let (for_raise, for_clients) = (shared.clone(), shared.clone());
        // Dropped on an error below, the server stops the threads that did start.
        let mut server = Self {
            addr: bound.addr,
            raise: Box::new(move |level| for_raise.control.raise(level)),
            clients: Box::new(move || for_clients.clients()),
            threads: Vec::new(),
            path: bound.path,
        };
        let mut handles = Vec::new();
        for thread in (1..count).rev() {
            handles.push(server.spawn(&shared, thread, None)?);
        }
        handles.reverse();
        server.spawn(&shared, 0, Some((bound.listener, handles)))?;
        Ok(server)
    }

    /// Starts one thread and waits until its runtime is there. The one with the listener accepts.
    fn spawn<D: Device>(
        &mut self,
        shared: &Arc<Shared<D>>,
        thread: usize,
        accept: Option<(Listener, Vec<Handle>)>,
    ) -> Result<Handle> {
        let (started, start) = mpsc::channel();
        let shared = shared.clone();
        let run = move || {
            let runtime = match Runtime::new(shared.options.runtime.clone()) {
                Ok(runtime) => runtime,
                Err(e) => {
                    // The receiver waits for just this.
                    let _ = started.send(Err(e));
                    return;
                }
            };
            let _ = started.send(Ok(runtime.handle()));
            runtime.block_on(shared.thread(thread, accept));
        };
        let builder = thread::Builder::new().name(format!("nbd-{thread}"));
        self.threads.push(builder.spawn(run).context(|| "cannot start an NBD thread".into())?);
        let gone = || Error::new(ErrorKind::Cancelled, "an NBD thread ended before it began");
        start.recv().map_err(|_| gone())?
    }

    /// Where clients connect; for TCP with the port the system chose.
    pub fn local_addr(&self) -> &NbdAddr {
        &self.addr
    }

    /// Connections at this moment.
    pub fn clients(&self) -> usize {
        (self.clients)()
    }

    /// Stops: no new clients or requests, those under way are finished and answered, then all connections are
    /// closed. Returns when everything has ended. Disks are not flushed: that is for who owns them.
    pub fn stop(&mut self) {
        self.path = None;
        (self.raise)(STOP);
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("an NBD thread panicked");
            }
        }
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        self.stop();
    }
}

fn check_exports<D: Device>(exports: &[NbdExport<D>]) -> Result<()> {
    let bad = |text: String| Err(Error::new(ErrorKind::InvalidInput, text));
    if exports.is_empty() {
        return bad("an NBD server needs an export".into());
    }
    for (i, e) in exports.iter().enumerate() {
        let too_long = |s: &str| s.len() > MAX_NBD_STRING as usize || s.contains('\0');
        if too_long(&e.name) || too_long(&e.description) {
            return bad(format!(
                "name and description of NBD export {} may have at most {MAX_NBD_STRING} bytes and no NUL",
                i + 1
            ));
        }
        if exports[..i].iter().any(|other| other.name == e.name) {
            return bad(format!("two NBD exports are named '{}'", e.name));
        }
        // Signed offsets are all that many clients have.
        if e.disk.size() > i64::MAX as u64 {
            return bad(format!("the disk of NBD export '{}' is too large", e.name));
        }
    }
    Ok(())
}

impl<D: Device> NbdExport<D> {
    fn is_read_only(&self) -> bool {
        self.read_only || self.disk.read_only()
    }

    fn info(&self) -> ExportInfo {
        // Multi-conn is true: all connections use the one disk, and its flush covers them all.
        let mut flags = export_flag::HAS_FLAGS
            | export_flag::SEND_FLUSH
            | export_flag::SEND_FUA
            | export_flag::SEND_CACHE
            | export_flag::CAN_MULTI_CONN;
        flags |= if self.is_read_only() {
            export_flag::READ_ONLY
        } else {
            export_flag::SEND_TRIM | export_flag::SEND_WRITE_ZEROES | export_flag::SEND_FAST_ZERO
        };
        ExportInfo {
            name: self.name.clone(),
            description: self.description.clone(),
            size: self.disk.size(),
            flags,
            block: BlockSizes {
                // The disk takes any byte range; it locks the sectors that it reads and writes back, which a client
                // can't. Some clients refuse to copy a file of odd length to a disk with a larger minimum.
                minimum: 1,
                preferred: 4096,
                maximum: MAX_NBD_REQUEST,
            },
            bitmaps: self.disk.bitmaps().iter().map(|b| b.name.clone()).collect(),
        }
    }
}

impl<D> Shared<D> {
    fn clients(&self) -> usize {
        self.active.iter().map(|n| n.load(SeqCst)).sum()
    }
}

impl<D: Device> Shared<D> {
    /// All that one thread does.
    async fn thread(self: Arc<Self>, thread: usize, accept: Option<(Listener, Vec<Handle>)>) {
        if let Some((listener, others)) = accept {
            let accepting = pin!(self.accept(&listener, &others));
            select(accepting, pin!(self.control.wait(STOP))).await;
        } else {
            self.control.wait(STOP).await;
        }
        let idle = || (self.active[thread].load(SeqCst) == 0).then_some(());
        let drained = self.ended.wait_until(idle);
        if bedplate_runtime::timeout(self.options.drain, drained).await.is_none() {
            tracing::warn!("some NBD clients did not take their last replies; closing them");
            self.control.raise(KILL);
            self.ended.wait_until(idle).await;
        }
    }

    async fn accept(self: &Arc<Self>, listener: &Listener, others: &[Handle]) {
        loop {
            let stream = match listener.accept().await {
                Ok(stream) => stream,
                Err(e) => {
                    // Most likely out of descriptors: others must end before it can go on.
                    tracing::warn!("cannot accept an NBD client: {e}");
                    bedplate_runtime::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            if self.clients() >= self.options.max_clients {
                let max = self.options.max_clients;
                tracing::warn!("refused an NBD client: {max} are connected, which is the limit");
                continue;
            }
            let least = |n: &usize| self.active[*n].load(SeqCst);
            let thread = (0..self.active.len()).min_by_key(least).unwrap_or(0);
            self.active[thread].fetch_add(1, SeqCst);
            let slot = Slot { shared: self.clone(), thread };
            let number = self.accepted.fetch_add(1, SeqCst) + 1;
            match thread.checked_sub(1).and_then(|n| others.get(n)) {
                None => bedplate_runtime::spawn(connection(slot, stream, number)),
                Some(other) => {
                    let fd = OwnedFd::from(stream);
                    other.spawn(move || async move {
                        match Stream::from_fd(fd) {
                            Ok(stream) => connection(slot, stream, number).await,
                            Err(e) => tracing::warn!("lost an NBD client: {e}"),
                        }
                    });
                }
            }
        }
    }

    /// Negotiates within the time limit; `None` when the connection is to be closed.
    async fn agree<S: ByteStream>(&self, input: &mut Input<'_, S>, client: u64) -> Option<Agreed> {
        let infos: Vec<ExportInfo> = self.exports.iter().map(NbdExport::info).collect();
        let talk = bedplate_runtime::timeout(self.options.handshake, negotiate(input, &infos));
        match select(pin!(talk), pin!(self.control.wait(STOP))).await {
            Either::Left((Some(Ok(Outcome::Ready(agreed))), _)) => Some(agreed),
            Either::Left((Some(Ok(Outcome::Close(why))), _)) => {
                tracing::debug!(client, "no NBD session: {why}");
                None
            }
            Either::Left((Some(Err(e)), _)) => {
                tracing::debug!(client, "no NBD session: {e}");
                None
            }
            Either::Left((None, _)) => {
                tracing::warn!(client, "an NBD client took too long to choose an export");
                None
            }
            Either::Right(_) => None,
        }
    }
}

/// One connection from greeting to end.
async fn connection<D: Device>(slot: Slot<D>, stream: Stream, client: u64) {
    let shared = &slot.shared;
    if let Err(e) = rustix::net::sockopt::set_socket_keepalive(&stream, true) {
        tracing::debug!(client, "cannot set SO_KEEPALIVE: {e}");
    }
    let mut input = Input::new(&stream);
    if let Some(agreed) = shared.agree(&mut input, client).await {
        let export = &shared.exports[agreed.export];
        tracing::info!(client, export = export.name, "an NBD session begins");
        let stop = shared.control.wait(STOP);
        let kill = shared.control.wait(KILL);
        let read_only = export.is_read_only();
        let end = transmit(&mut input, &*export.disk, agreed, read_only, stop, kill).await;
        match end {
            Ok(end) => tracing::info!(client, "the NBD session has ended: {end:?}"),
            Err(e) => tracing::info!(client, "the NBD session has ended: {e}"),
        }
    }
    // A poll of the socket may still be in the ring and would keep it open.
    if let Err(e) = stream.shutdown(Shutdown::Both) {
        tracing::debug!(client, "cannot shut the socket down: {e}");
    }
}

impl ByteStream for Stream {
    async fn read(&self, buf: &mut [u8]) -> io::Result<usize> {
        Stream::read(self, buf).await
    }

    async fn write_all(&self, bufs: &mut [IoSlice<'_>]) -> io::Result<()> {
        self.write_all_vectored(bufs).await
    }
}

#[cfg(test)]
mod tests;
