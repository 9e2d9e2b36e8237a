//! One disk offered over one protocol.

use crate::counted::{Counted, Counters, Dirty};
use bedplate_disk::Disk;
use bedplate_nbd::{NamedBitmap, NbdAddr, NbdExport, NbdOptions, NbdServer};
use bedplate_qcow2::BitmapView;
use bedplate_storage::FileStorage;
use bedplate_types::{RequestStats, Result};
use bedplate_vhost_user::{BlkOptions, Export, VhostUserBlk};
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
    pub(crate) fn stop(self) -> (ExportKind, RequestStats) {
        let stats = match self.inner {
            Inner::Nbd { mut server, counters } => {
                server.stop();
                counters.snapshot()
            }
            Inner::VhostUserBlk(export) => {
                let mut all = RequestStats::default();
                for queue in export.stop() {
                    all += queue.asked;
                    all.errors += queue.malformed;
                }
                all
            }
        };
        (self.kind, stats)
    }
}
