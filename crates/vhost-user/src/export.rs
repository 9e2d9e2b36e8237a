//! Starting and stopping an export, and what all its threads share.

use crate::listener::Listener;
use crate::session::Session;
use crate::stats::{Counters, QueueStats};
use crate::worker::Worker;
use crate::{serve, worker};
use bedplate_disk::Disk;
use bedplate_runtime::{Backend, Config};
use bedplate_storage::Storage;
use bedplate_types::limits::{
    MAX_DISCARD_SECTORS, MAX_DISCARD_SEGMENTS, MAX_QUEUE_SIZE, MAX_QUEUES, MAX_SEGMENTS,
};
use bedplate_types::{ByteLen, Error, ErrorKind, Result};
use bedplate_virtio::blk::{self, SECTOR};
use bedplate_virtio::config::BlkConfig;
use bedplate_virtio::spec;
use rustix::event::EventfdFlags;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// How a disk is exported.
#[derive(Clone, Debug)]
pub struct BlkOptions {
    /// Number of queues a front end may use.
    pub queues: u16,
    /// Threads that serve them; queue n belongs to thread n modulo this. More than queues are not started.
    pub threads: u16,
    /// The largest queue a front end may set up, a power of two.
    pub queue_size: u16,
    /// What the guest sees as the disk's serial number; cut to 20 bytes.
    pub serial: String,
    /// The longest time to look for requests before sleeping; zero switches that off.
    pub spin: Duration,
    /// The logical block size that the guest is told; 512 or 4096.
    pub block_size: u32,
    /// How the threads do their I/O.
    pub backend: Backend,
}

impl Default for BlkOptions {
    fn default() -> Self {
        Self {
            queues: 1,
            threads: 1,
            queue_size: MAX_QUEUE_SIZE,
            serial: String::new(),
            spin: Config::default().spin,
            block_size: SECTOR as u32,
            backend: Backend::Auto,
        }
    }
}

impl BlkOptions {
    fn check(&self) -> Result<()> {
        let bad = |text: String| Err(Error::new(ErrorKind::InvalidInput, text));
        if self.queues == 0 || usize::from(self.queues) > MAX_QUEUES {
            return bad(format!("{} queues are not possible, only 1 to {MAX_QUEUES}", self.queues));
        }
        if self.threads == 0 {
            return bad("an export needs at least one thread".into());
        }
        if !self.queue_size.is_power_of_two() || self.queue_size > MAX_QUEUE_SIZE {
            let size = self.queue_size;
            return bad(format!("queue size {size} is no power of two up to {MAX_QUEUE_SIZE}"));
        }
        if !matches!(self.block_size, 512 | 4096) {
            return bad(format!("block size {} is neither 512 nor 4096", self.block_size));
        }
        Ok(())
    }
}

/// What all threads of an export share. Only the write cache's mode ever changes.
pub(crate) struct Shared<S: Storage> {
    /// The disk's name, for messages.
    pub name: String,
    pub disk: Arc<Disk<S>>,
    pub queues: u16,
    pub queue_size: u16,
    pub limits: blk::Limits,
    pub id: [u8; blk::ID_BYTES],
    config: BlkConfig,
    features: u64,
    /// False: writes are made durable one by one.
    writeback: AtomicBool,
    pub counters: Vec<Arc<Counters>>,
}

impl<S: Storage> Shared<S> {
    fn new(disk: Arc<Disk<S>>, options: &BlkOptions) -> Self {
        let (limits, read_only) = (disk.limits(), disk.read_only());
        // The disk answers for the whole of a last sector that it only begins.
        let size = ByteLen::new(disk.size().get().div_ceil(SECTOR).saturating_mul(SECTOR));
        let mut features = spec::F_VERSION_1
            | spec::F_EVENT_IDX
            | spec::F_INDIRECT_DESC
            | spec::VHOST_USER_F_PROTOCOL_FEATURES
            | spec::BLK_F_BLK_SIZE
            | spec::BLK_F_TOPOLOGY
            | spec::BLK_F_SEG_MAX;
        if options.queues > 1 {
            features |= spec::BLK_F_MQ;
        }
        if read_only {
            features |= spec::BLK_F_RO;
        } else {
            features |= spec::BLK_F_DISCARD | spec::BLK_F_WRITE_ZEROES;
        }
        if disk.write_cache() && !read_only {
            // A guest that may flush believes in a volatile cache, so this is only offered where there is one.
            features |= spec::BLK_F_FLUSH | spec::BLK_F_CONFIG_WCE;
        }
        let config = BlkConfig {
            size,
            size_max: 0,
            seg_max: MAX_SEGMENTS as u32,
            block: options.block_size,
            physical_block: limits.physical_block.max(options.block_size),
            optimal_io: 0,
            writeback: disk.write_cache(),
            queues: options.queues,
            discard: !read_only,
            discard_align: limits.discard_align,
            max_discard_sectors: MAX_DISCARD_SECTORS,
            max_discard_segments: MAX_DISCARD_SEGMENTS,
            zeroes_may_unmap: true,
        };
        let limits = blk::Limits {
            capacity: config.capacity(),
            read_only,
            discard: !read_only,
            max_discard_sectors: MAX_DISCARD_SECTORS,
            max_discard_segments: MAX_DISCARD_SEGMENTS,
        };
        Self {
            name: disk.name().to_owned(),
            queues: options.queues,
            queue_size: options.queue_size,
            limits,
            id: blk::id_bytes(&options.serial),
            config,
            features,
            writeback: AtomicBool::new(true),
            counters: (0..options.queues).map(|_| Arc::default()).collect(),
            disk,
        }
    }

    /// The features offered.
    pub(crate) fn features(&self) -> u64 {
        self.features
    }

    /// The configuration space as it is now.
    pub(crate) fn config(&self) -> BlkConfig {
        BlkConfig { writeback: self.config.writeback && self.is_writeback(), ..self.config }
    }

    /// False when each write must be durable before it completes, and is not so by itself.
    #[inline]
    pub(crate) fn is_writeback(&self) -> bool {
        self.writeback.load(Ordering::Relaxed)
    }

    /// Switches the write cache, where there is one.
    pub(crate) fn set_writeback(&self, on: bool) {
        self.writeback.store(on || !self.config.writeback, Ordering::Relaxed);
    }
}

/// How the control thread is told to end.
pub(crate) struct Control {
    /// Readable when it is to end.
    pub stop: OwnedFd,
    /// Whether it is to end, and the connection it serves.
    state: Mutex<(bool, Option<UnixStream>)>,
}

impl Control {
    /// Notes the connection that is now served; false when it is not to be.
    pub(crate) fn begin(&self, stream: &UnixStream) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.1 = stream.try_clone().ok();
        !state.0 && state.1.is_some()
    }

    /// The connection has ended.
    pub(crate) fn end(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).1 = None;
    }

    fn request_stop(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.0 = true;
        if let Some(stream) = &state.1 {
            // Ends a read of the control thread. It fails only when the front end has gone, which does it as well.
            let _ = stream.shutdown(Shutdown::Both);
        }
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
    }
}

/// A vhost-user-blk back end.
pub struct VhostUserBlk;

impl VhostUserBlk {
    /// Offers `disk` on the Unix socket `socket`, to one front end after the other.
    ///
    /// # Errors
    /// `InvalidInput` for options that can't be, `Locked` when somebody listens on the socket, or what the system
    /// reports.
    pub fn start<S: Storage>(
        socket: &Path,
        disk: Arc<Disk<S>>,
        options: BlkOptions,
    ) -> Result<Export> {
        options.check()?;
        let shared = Arc::new(Shared::new(disk, &options));
        let counters = shared.counters.clone();
        let listener = Listener::new(socket)?;
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)
            .map_err(|e| Error::io("cannot make an eventfd", e.into()))?;
        let control = Arc::new(Control { stop, state: Mutex::default() });
        let threads = options.threads.min(options.queues);
        let runtime = Config { spin: options.spin, backend: options.backend, ..Config::default() };
        let mut workers = Vec::new();
        for n in 0..threads {
            workers.push(worker::start(n, threads, shared.clone(), runtime.clone())?);
        }
        let workers = Arc::new(workers);
        let session = Session::new(shared, workers.clone());
        let run = {
            let control = control.clone();
            move || serve::run(listener, &control, session)
        };
        let thread = std::thread::Builder::new()
            .name("vub-control".into())
            .spawn(run)
            .map_err(|e| Error::io("cannot start a thread", e))?;
        let (thread, socket) = (Some(thread), socket.to_owned());
        Ok(Export { control, workers, thread, counters, socket })
    }
}

/// An export that runs. Dropping it stops it.
pub struct Export {
    control: Arc<Control>,
    workers: Arc<Vec<Worker>>,
    thread: Option<JoinHandle<()>>,
    counters: Vec<Arc<Counters>>,
    socket: PathBuf,
}

impl Export {
    /// Disconnects the front end, finishes all requests, ends all threads and removes the socket. Returns what each
    /// queue has done.
    pub fn stop(mut self) -> Vec<QueueStats> {
        self.end();
        self.stats()
    }

    /// What each queue has done.
    pub fn stats(&self) -> Vec<QueueStats> {
        self.counters.iter().map(|c| c.snapshot()).collect()
    }

    /// The socket's path.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    fn end(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.control.request_stop();
        if thread.join().is_err() {
            tracing::error!("the control thread of '{}' has failed", self.socket.display());
        }
        for worker in self.workers.iter() {
            worker.end();
        }
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        self.end();
    }
}
