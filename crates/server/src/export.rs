//! One disk offered over one protocol.

use crate::counted::{Counted, Counters};
use bedplate_disk::Disk;
use bedplate_nbd::{NbdAddr, NbdExport, NbdOptions, NbdServer};
use bedplate_storage::FileStorage;
use bedplate_types::Result;
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
    /// All requests.
    pub fn requests(&self) -> u64 {
        self.reads + self.writes + self.flushes + self.discards + self.other
    }
}

/// A running export.
pub(crate) struct Running {
    pub(crate) kind: ExportKind,
    inner: Inner,
}

enum Inner {
    Nbd { server: NbdServer, counters: Arc<Counters> },
}

impl Running {
    /// Starts an NBD export; clients can connect when it returns.
    pub(crate) fn nbd(
        disk: Arc<Disk<FileStorage>>,
        addr: &NbdAddr,
        name: &str,
        options: NbdOptions,
    ) -> Result<Self> {
        let counters = Arc::<Counters>::default();
        let export = NbdExport {
            name: name.to_owned(),
            description: disk.name().to_owned(),
            read_only: disk.read_only(),
            disk: Arc::new(Counted { disk, counters: counters.clone() }),
        };
        let server = NbdServer::start(addr, vec![export], options)?;
        let kind = ExportKind::Nbd { addr: server.local_addr().clone(), name: name.to_owned() };
        Ok(Self { kind, inner: Inner::Nbd { server, counters } })
    }

    /// Finishes what is under way, ends all connections and threads, removes the socket.
    pub(crate) fn stop(self) -> (ExportKind, ExportStats) {
        let stats = match self.inner {
            Inner::Nbd { mut server, counters } => {
                server.stop();
                counters.snapshot()
            }
        };
        (self.kind, stats)
    }
}
