//! The open disk as the commands use it.
//!
//! Requests of `aio_read` and `aio_write` run as tasks of their own on the same thread; they share this by `Rc`.

use super::hold::{Holds, Point};
use super::target::Target;
use bedplate_disk::Disk;
use bedplate_image::OpenedDisk;
use bedplate_qcow2::Qcow2;
use bedplate_runtime::buf::{IoVec, SharedBuf};
use bedplate_runtime::sync::{Event, RangeGuard, RangeLock};
use bedplate_storage::{FileStorage, ZeroMode};
use bedplate_types::{ByteLen, Error, ErrorKind, GuestOffset, Preallocation, Result};
use std::cell::Cell;
use std::sync::Arc;

/// Where memory starts that direct I/O can't use as it is.
const MISALIGNED_BY: usize = 16;
/// Bytes that copy-on-read copies at once.
const COPY_BYTES: u64 = 4 << 20;

/// An open disk.
pub struct Device {
    /// The disk.
    pub disk: Arc<Disk<FileStorage>>,
    /// How it was asked for.
    pub target: Target,
    /// Requests that are held.
    pub holds: Holds,
    /// Requests that must not pass each other: those that change what a held or copying one works on.
    ranges: RangeLock,
    running: Cell<usize>,
    ended: Event,
}

/// One request under way, for [`Device::settle`].
pub struct Running<'a>(&'a Device);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.running.set(self.0.running.get().saturating_sub(1));
        self.0.ended.notify_all();
    }
}

/// How zeroes are written.
#[derive(Clone, Copy, Debug, Default)]
pub struct Zeroing {
    /// The space may be given back.
    pub unmap: bool,
    /// Fail rather than write zeroes as data.
    pub fast_only: bool,
    /// Durable when done.
    pub fua: bool,
}

impl Device {
    /// The disk that was opened for `target`.
    pub fn new(opened: &OpenedDisk, target: Target) -> Self {
        Self {
            disk: opened.disk.clone(),
            target,
            holds: Holds::default(),
            ranges: RangeLock::new(),
            running: Cell::new(0),
            ended: Event::new(),
        }
    }

    /// The disk's size in whole sectors.
    pub fn size(&self) -> u64 {
        let size = self.disk.size();
        size.align_up(512).unwrap_or(size).get()
    }

    /// Memory for a request, one segment for each length.
    pub fn memory(&self, lens: &[u64]) -> Result<IoVec> {
        let skip = if self.target.misalign { MISALIGNED_BY } else { 0 };
        let total: u64 = lens.iter().sum();
        let all = SharedBuf::zeroed(
            ByteLen::new(total).to_usize().unwrap_or(usize::MAX).saturating_add(skip),
        )?
        .iovec();
        let mut segments = IoVec::default();
        let mut at = skip;
        for len in lens {
            let len = ByteLen::new(*len).to_usize().unwrap_or(0);
            segments.append(all.slice(at, len));
            at += len;
        }
        Ok(segments)
    }

    /// Notes that a request runs on its own.
    pub fn begin(&self) -> Running<'_> {
        self.running.set(self.running.get() + 1);
        Running(self)
    }

    /// Waits for all requests that run on their own.
    pub async fn settle(&self) {
        loop {
            let ended = self.ended.wait();
            if self.running.get() == 0 {
                return;
            }
            ended.await;
        }
    }

    /// Keeps requests in the order they came where one is held, or copied between read and write. Whole clusters,
    /// since requests to parts of a cluster depend on each other.
    async fn in_order(&self, at: u64, len: u64) -> Option<RangeGuard<'_>> {
        if !self.target.holds && !self.target.copy_on_read {
            return None;
        }
        let unit = u64::from(self.disk.limits().discard_align.max(1));
        let start = at - at % unit;
        let end = at.saturating_add(len).checked_next_multiple_of(unit).unwrap_or(u64::MAX);
        Some(self.ranges.exclusive(start, end - start).await)
    }

    /// Fills `buf` from `at`.
    pub async fn read(&self, at: u64, buf: IoVec) -> Result<()> {
        if self.target.copy_on_read {
            let _order = self.in_order(at, buf.len() as u64).await;
            self.copy_up(at, buf.len() as u64).await?;
        }
        self.holds.pass(Point::Read).await;
        self.disk.read(GuestOffset::new(at), buf).await
    }

    /// Writes `buf` at `at`.
    pub async fn write(&self, at: u64, buf: IoVec, fua: bool) -> Result<()> {
        let _order = self.in_order(at, buf.len() as u64).await;
        self.holds.pass(Point::Write).await;
        self.disk.write(GuestOffset::new(at), buf, fua).await
    }

    /// Writes `buf` at `at` as compressed clusters.
    pub async fn write_compressed(&self, at: u64, buf: IoVec) -> Result<()> {
        let _order = self.in_order(at, buf.len() as u64).await;
        self.disk.write_compressed(GuestOffset::new(at), buf).await
    }

    /// Fills `buf` from `at` bytes into the space for VM state.
    pub async fn read_vm_state(&self, at: u64, buf: IoVec) -> Result<()> {
        self.qcow2()?.read_vm_state(at, buf).await
    }

    /// Writes `buf` at `at` bytes into the space for VM state.
    pub async fn write_vm_state(&self, at: u64, buf: IoVec) -> Result<()> {
        let image = self.qcow2()?;
        // The table that maps it may have to be replaced, and nothing may use it then.
        self.settle().await;
        image.write_vm_state(at, buf).await?;
        if self.disk.write_cache() { Ok(()) } else { self.disk.flush().await }
    }

    fn qcow2(&self) -> Result<&Qcow2<FileStorage>> {
        let text = "only qcow2 images have space for VM state";
        self.disk.qcow2().ok_or_else(|| Error::new(ErrorKind::Unsupported, text))
    }

    /// Makes a range read as zeroes.
    pub async fn zero(&self, at: u64, len: u64, how: Zeroing) -> Result<()> {
        let _order = self.in_order(at, len).await;
        let mode = ZeroMode { unmap: how.unmap && self.target.unmap, fast_only: how.fast_only };
        self.disk.write_zeroes(GuestOffset::new(at), ByteLen::new(len), mode).await?;
        if how.fua && self.disk.write_cache() { self.disk.flush().await } else { Ok(()) }
    }

    /// Gives up a range's content; checked, then left alone, where discards are to be ignored.
    pub async fn discard(&self, at: u64, len: u64) -> Result<()> {
        let _order = self.in_order(at, len).await;
        let (at, len) = (GuestOffset::new(at), ByteLen::new(len));
        if self.target.unmap {
            self.disk.discard(at, len).await
        } else {
            self.disk.discard(at, ByteLen::ZERO).await?;
            self.disk.block_status(at, len, 0).await.map(drop)
        }
    }

    /// Sets the disk's size; the space that it grows by is taken as `fill` says.
    pub async fn truncate(&self, size: u64, fill: Preallocation) -> Result<()> {
        let _order = self.in_order(0, u64::MAX).await;
        self.disk.resize(ByteLen::new(size), fill).await
    }

    /// Makes everything durable.
    pub async fn flush(&self) -> Result<()> {
        self.holds.pass(Point::Flush).await;
        self.disk.flush().await
    }

    /// Copies what lies below the top image into it, for all clusters that the range touches.
    async fn copy_up(&self, at: u64, len: u64) -> Result<()> {
        let unit = u64::from(self.disk.limits().discard_align.max(1));
        let end = at.saturating_add(len).checked_next_multiple_of(unit).unwrap_or(u64::MAX);
        let end = end.min(self.size());
        let mut at = at - at % unit;
        while at < end {
            let here = GuestOffset::new(at);
            let run = self.disk.map_run(here, ByteLen::new(end - at)).await?;
            let len = run.len.get().clamp(1, end - at).min(COPY_BYTES);
            if run.depth > 0 && run.zero {
                let mode = ZeroMode { unmap: true, fast_only: false };
                self.disk.write_zeroes(here, ByteLen::new(len), mode).await?;
            } else if run.depth > 0 {
                let buf = self.memory(&[len])?;
                self.disk.read(here, buf.clone()).await?;
                self.disk.write(here, buf, false).await?;
            }
            at += len;
        }
        Ok(())
    }
}
