//! One disk offered over one protocol.

use crate::counted::{Counted, Counters, Dirty};
use bedplate_disk::Disk;
use bedplate_nbd::{NamedBitmap, NbdAddr, NbdExport, NbdOptions, NbdServer};
use bedplate_qcow2::BitmapView;
use bedplate_storage::FileStorage;
use bedplate_types::Result;
use bedplate_vhost_user::{BlkOptions, Export, QueueStats, VhostUserBlk};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The protocol of an export and where it listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExportKind {
    /// The network block device protocol.
    Nbd {
        /// Where it listens; with the port that the system chose.
        addr: NbdAddr,
        /// The export's name.
        name: String,
    },
    /// A virtio-blk device for virtual machines.
    VhostUserBlk {
        /// The Unix socket.
        socket: PathBuf,
        /// Queues that a virtual machine may use.
        queues: u16,
        /// Entries that a queue may have.
        queue_size: u16,
    },
}

/// What was asked of an export.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExportStats {
    /// Read requests.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Write requests.
    pub writes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// Flush requests.
    pub flushes: u64,
    /// Discard and write-zeroes requests.
    pub discards: u64,
    /// All other requests.
    pub other: u64,
    /// Requests that failed.
    pub errors: u64,
}

impl ExportStats {
    fn with_queue(self, queue: &QueueStats) -> Self {
        Self {
            reads: self.reads + queue.reads,
            read_bytes: self.read_bytes + queue.read_bytes,
            writes: self.writes + queue.writes,
            write_bytes: self.write_bytes + queue.write_bytes,
            flushes: self.flushes + queue.flushes,
            discards: self.discards + queue.discards,
            other: self.other + queue.other,
            errors: self.errors + queue.errors + queue.malformed,
        }
    }

    /// All requests.
    pub fn requests(&self) -> u64 {
        self.reads + self.writes + self.flushes + self.discards + self.other
    }
}

/// The path as programs in other folders find it.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf())
}

/// A running export.
pub(crate) struct Running {
    pub(crate) kind: ExportKind,
    inner: Inner,
}

enum Inner {
    Nbd { server: NbdServer, counters: Arc<Counters> },
    VhostUserBlk(Export),
}

impl Running {
    /// Starts an NBD export; clients can connect when it returns.
    pub(crate) fn nbd(
        disk: Arc<Disk<FileStorage>>,
        addr: &NbdAddr,
        name: &str,
        bitmaps: Vec<(String, BitmapView)>,
        options: NbdOptions,
    ) -> Result<Self> {
        let bitmaps = bitmaps
            .into_iter()
            .map(|(name, view)| NamedBitmap { name, map: Arc::new(Dirty(view)) })
            .collect();
        let counters = Arc::<Counters>::default();
        let export = NbdExport {
            name: name.to_owned(),
            description: disk.name().to_owned(),
            read_only: disk.read_only(),
            disk: Arc::new(Counted { disk, counters: counters.clone(), bitmaps }),
        };
        let server = NbdServer::start(addr, vec![export], options)?;
        let addr = match server.local_addr() {
            // Clients run in other folders.
            NbdAddr::Unix(path) => NbdAddr::Unix(absolute(path)),
            tcp => tcp.clone(),
        };
        let kind = ExportKind::Nbd { addr, name: name.to_owned() };
        Ok(Self { kind, inner: Inner::Nbd { server, counters } })
    }

    /// Starts a vhost-user-blk export; front ends can connect when it returns.
    pub(crate) fn vhost_user_blk(
        disk: Arc<Disk<FileStorage>>,
        socket: &Path,
        options: BlkOptions,
    ) -> Result<Self> {
        let (queues, queue_size) = (options.queues, options.queue_size);
        let export = VhostUserBlk::start(socket, disk, options)?;
        let kind = ExportKind::VhostUserBlk { socket: absolute(socket), queues, queue_size };
        Ok(Self { kind, inner: Inner::VhostUserBlk(export) })
    }

    /// Finishes what is under way, ends all connections and threads, removes the socket.
    pub(crate) fn stop(self) -> (ExportKind, ExportStats) {
        let stats = match self.inner {
            Inner::Nbd { mut server, counters } => {
                server.stop();
                counters.snapshot()
            }
            Inner::VhostUserBlk(export) => {
                export.stop().iter().fold(ExportStats::default(), ExportStats::with_queue)
            }
        };
        (self.kind, stats)
    }
}
