//! One disk and its exports, from opening to the clean end.

use crate::export::{ExportKind, Running};
use crate::signals::Signals;
use bedplate_disk::Disk;
use bedplate_image::{ChainOptions, OpenedDisk, open_chain, open_null};
use bedplate_nbd::{MAX_BITMAPS, NbdAddr, NbdOptions};
use bedplate_runtime::{Backend, Config, Runtime};
use bedplate_storage::FileStorage;
use bedplate_types::{ByteLen, CacheMode, Error, ErrorKind, RequestStats, Result, ResultExt};
use bedplate_vhost_user::BlkOptions;
use futures_util::future::{Either, select};
use sd_notify::NotifyState;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

/// How often the disk is looked after.
const MAINTENANCE: Duration = Duration::from_secs(1);

/// A disk that is being served.
pub struct Daemon {
    // Dropped in this order: exports end before the disk and the runtime that it was opened on.
    exports: Vec<Running>,
    opened: OpenedDisk,
    runtime: Runtime,
}

/// What a daemon did, told at its end.
#[derive(Clone, Debug)]
pub struct Stopped {
    /// Each export with its counters.
    pub exports: Vec<(ExportKind, RequestStats)>,
}

impl Daemon {
    fn runtime(backend: Backend) -> Result<Runtime> {
        // This thread waits most of the time and is never in a guest's way.
        Runtime::new(Config { spin: Duration::ZERO, backend, ..Config::default() })
    }

    /// Opens the disk whose top image is `path`.
    ///
    /// # Errors
    /// As [`open_chain`], or when the thread's runtime can't be made.
    pub fn open(path: &Path, options: &ChainOptions) -> Result<Self> {
        let runtime = Self::runtime(Backend::Auto)?;
        let opened = runtime.block_on(open_chain(path, options))?;
        Ok(Self { exports: Vec::new(), opened, runtime })
    }

    /// Makes a disk of `size` bytes that keeps nothing.
    ///
    /// # Errors
    /// When the thread's runtime can't be made.
    pub fn null(size: ByteLen, read_only: bool, cache: CacheMode) -> Result<Self> {
        let runtime = Self::runtime(Backend::Auto)?;
        Ok(Self { exports: Vec::new(), opened: open_null(size, read_only, cache)?, runtime })
    }

    /// The disk and its images.
    pub fn opened(&self) -> &OpenedDisk {
        &self.opened
    }

    fn disk(&self) -> Arc<Disk<FileStorage>> {
        self.opened.disk.clone()
    }

    /// Offers the disk over NBD under `name`, with these persistent bitmaps of its image; clients can connect when this
    /// returns.
    ///
    /// # Errors
    /// When the address or the name can't be, or is in use; `NotFound` or `Unsupported` for a bitmap that is not there or
    /// can't be trusted; `Limit` for too many.
    pub fn export_nbd(
        &mut self,
        addr: &NbdAddr,
        name: &str,
        bitmaps: &[String],
        options: NbdOptions,
    ) -> Result<()> {
        if bitmaps.len() > MAX_BITMAPS {
            let text = format!("at most {MAX_BITMAPS} bitmaps can be offered over NBD");
            return Err(Error::new(ErrorKind::Limit, text));
        }
        let mut views = Vec::new();
        for bitmap in bitmaps {
            let view = self.runtime.block_on(self.opened.disk.bitmap(bitmap))?;
            views.push((bitmap.clone(), view));
        }
        self.exports.push(Running::nbd(self.disk(), addr, name, views, options)?);
        Ok(())
    }

    /// Offers the disk as a virtio-blk device on the Unix socket `socket`; front ends can connect when this returns.
    ///
    /// # Errors
    /// When the options or the socket can't be, or somebody listens there.
    pub fn export_vhost_user_blk(&mut self, socket: &Path, options: BlkOptions) -> Result<()> {
        self.exports.push(Running::vhost_user_blk(self.disk(), socket, options)?);
        Ok(())
    }

    /// The exports.
    pub fn exports(&self) -> impl Iterator<Item = &ExportKind> {
        self.exports.iter().map(|e| &e.kind)
    }

    /// Serves until a signal asks for the end, then stops.
    ///
    /// # Errors
    /// As [`Self::stop`].
    pub fn run(self, signals: &Signals) -> Result<Stopped> {
        notify(NotifyState::Ready);
        self.runtime.block_on(look_after(&self.opened.disk, signals));
        notify(NotifyState::Stopping);
        self.stop()
    }

    /// Ends all exports once what is under way is done, and closes the disk: everything is durable then, and the
    /// image is one that was closed cleanly.
    ///
    /// # Errors
    /// When the disk can't be closed cleanly; what was flushed before is safe.
    pub fn stop(self) -> Result<Stopped> {
        let exports = self.exports.into_iter().map(Running::stop).collect();
        let disk = &self.opened.disk;
        self.runtime.block_on(disk.close()).context(|| {
            format!(
                "disk '{}' could not be closed cleanly; what guests flushed before is safe",
                disk.name()
            )
        })?;
        tracing::info!("disk '{}' is closed", disk.name());
        if let Some(state) = &self.opened.state
            && let Err(e) = state.remove()
        {
            // The journal in it says that it has ended, so the next server takes nothing up.
            tracing::warn!("{e:#}");
        }
        Ok(Stopped { exports })
    }
}

/// Does the disk's background work until a signal comes.
async fn look_after(disk: &Disk<FileStorage>, signals: &Signals) {
    let mut asked = pin!(signals.wait());
    let mut last = String::new();
    loop {
        let pause = pin!(bedplate_runtime::sleep(MAINTENANCE));
        if let Either::Left(_) = select(asked.as_mut(), pause).await {
            return;
        }
        // The same failure each second is told once.
        let now = disk.maintain().await.err().map(|e| format!("{e:#}")).unwrap_or_default();
        if !now.is_empty() && now != last {
            tracing::error!("background work of disk '{}' failed: {now}", disk.name());
        }
        last = now;
    }
}

fn notify(state: NotifyState<'_>) {
    if let Err(e) = sd_notify::notify(&[state]) {
        tracing::warn!("cannot tell the service manager: {e}");
    }
}
