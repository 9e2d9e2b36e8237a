//! Giving space back, zeroing, allocating, changing the length.

use super::Inner;
use crate::{ZeroMode, sys};
use bedplate_runtime::buf::IoVec;
use bedplate_runtime::fs;
use bedplate_types::{ByteLen, Error, ErrorKind, HostOffset, Result};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

/// Zeroes that are written as data go out in pieces of this size.
const ZERO_CHUNK: u64 = 8 << 20;

const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;

/// The system's ways of saying that it can't do this on this file.
fn is_unsupported(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOTTY | libc::EINVAL))
}

impl Inner {
    async fn fallocate(&self, mode: i32, at: u64, end: u64) -> io::Result<()> {
        let (start, len) = (HostOffset::new(at), ByteLen::new(end - at));
        fs::fallocate(&self.file, mode, start, len).await
    }

    /// Gives `at..end` back, which lies inside the file.
    pub(super) async fn discard(&self, at: u64, end: u64) -> Result<()> {
        if self.no_punch.load(Ordering::Relaxed) {
            return Ok(());
        }
        let result = if self.device {
            let (start, end) = self.blocks_inside(at, end);
            if start >= end {
                return Ok(());
            }
            let guard = self.guard_write(start, end - start).await;
            let file = self.file.clone();
            let r =
                fs::blocking(move || sys::discard_device(file.as_fd(), start, end - start)).await;
            drop(guard);
            r
        } else {
            let guard = self.guard_write(at, end - at).await;
            let r = self.fallocate(PUNCH, at, end).await;
            drop(guard);
            r
        };
        self.extents.note_change();
        match result {
            Err(e) if is_unsupported(&e) => {
                tracing::info!("'{}' gives no space back: {e}", self.name);
                self.no_punch.store(true, Ordering::Relaxed);
                Ok(())
            }
            other => other.map_err(|e| self.error("discard", at, end - at, e)),
        }
    }

    /// The whole blocks of the device inside a range.
    fn blocks_inside(&self, at: u64, end: u64) -> (u64, u64) {
        let block = self.align().max(u64::from(self.blocks.logical));
        (at.checked_next_multiple_of(block).unwrap_or(u64::MAX), end - end % block)
    }

    /// Where writes are to be durable when they complete, the file system must be told so about space too.
    pub(super) async fn settle(&self) -> Result<()> {
        if !self.write_through {
            return Ok(());
        }
        fs::fsync(&self.file, true).await.map_err(|e| self.error("make durable", 0, self.len(), e))
    }

    /// Makes `at..end` read as zeroes; files grow to `end`.
    pub(super) async fn write_zeroes(&self, at: u64, end: u64, mode: ZeroMode) -> Result<()> {
        if self.device {
            return self.zero_device(at, end, mode).await;
        }
        let len = self.len();
        // A hole behind the end is made by writing its last block: that can't race with others' growth, as setting
        // the length would.
        let (sparse_end, inside) = if mode.unmap { (end, end.min(len)) } else { (0, end) };
        let mut by_data = false;
        if at < inside {
            let keep = if inside <= len { libc::FALLOC_FL_KEEP_SIZE } else { 0 };
            let zero_range = libc::FALLOC_FL_ZERO_RANGE | keep;
            let ways: &[(i32, &AtomicBool)] = if mode.unmap {
                &[(PUNCH, &self.no_punch), (zero_range, &self.no_zero_range)]
            } else {
                &[(zero_range, &self.no_zero_range)]
            };
            by_data = !self.zero_by(ways, at, inside).await?;
        }
        if by_data {
            self.zero_with_data(at, inside, mode).await?;
        }
        if sparse_end > len {
            let block = self.align().max(512);
            let last = (end - 1) - (end - 1) % block;
            self.write_zero_bytes(last.max(at).max(len), end).await?;
        }
        self.settle().await
    }

    /// Tries ways of zeroing without data; false when there is none.
    async fn zero_by(&self, ways: &[(i32, &AtomicBool)], at: u64, end: u64) -> Result<bool> {
        let guard = self.guard_write(at, end - at).await;
        for (mode, missing) in ways {
            if missing.load(Ordering::Relaxed) {
                continue;
            }
            match self.fallocate(*mode, at, end).await {
                Ok(()) => {
                    let grown = if mode & libc::FALLOC_FL_KEEP_SIZE == 0 { end } else { 0 };
                    self.changed(grown);
                    drop(guard);
                    return Ok(true);
                }
                Err(e) if is_unsupported(&e) => missing.store(true, Ordering::Relaxed),
                Err(e) => {
                    self.changed(0);
                    return Err(self.error("zero", at, end - at, e));
                }
            }
        }
        Ok(false)
    }

    async fn zero_device(&self, at: u64, end: u64, mode: ZeroMode) -> Result<()> {
        let (first, last) = self.blocks_inside(at, end);
        let mut by_data = (at, end);
        if first < last {
            // Zeroing without unmapping falls back to data inside the kernel, which is not what fast means.
            let fast = self.blocks.fast_zeroes;
            let zero_range = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
            let unmap = (PUNCH, &self.no_punch);
            let plain = (zero_range, &self.no_zero_range);
            let ways: &[(i32, &AtomicBool)] = match (mode.unmap, mode.fast_only && !fast) {
                (true, false) => &[unmap, plain],
                (true, true) => &[unmap],
                (false, false) => &[plain],
                (false, true) => &[],
            };
            if self.zero_by(ways, first, last).await? {
                by_data = (0, 0);
                for (from, to) in [(at, first.min(end)), (last.max(at), end)] {
                    if from < to {
                        self.write_zero_bytes(from, to).await?;
                    }
                }
            }
        }
        if by_data.0 < by_data.1 {
            self.zero_with_data(at, end, mode).await?;
        }
        self.settle().await
    }

    async fn zero_with_data(&self, at: u64, end: u64, mode: ZeroMode) -> Result<()> {
        if mode.fast_only {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("'{}' has no fast way of zeroing", self.name),
            ));
        }
        self.write_zero_bytes(at, end).await
    }

    /// Writes zeroes as data.
    async fn write_zero_bytes(&self, at: u64, end: u64) -> Result<()> {
        let mut now = at;
        while now < end {
            // Pieces end at block boundaries, so that only the edges are partial.
            let stop = (now + ZERO_CHUNK).min(end);
            let whole = stop - stop % self.align();
            let stop = if stop < end && whole > now { whole } else { stop };
            let n = ByteLen::new(stop - now).to_usize().unwrap_or(0);
            let zeroes = IoVec::zeroes(n)?;
            if self.is_whole_blocks(now, stop - now) {
                self.write_whole(now, zeroes).await?;
            } else {
                self.write_partial(now, zeroes).await?;
            }
            now = stop;
        }
        Ok(())
    }

    /// Allocates space for `at..end`.
    pub(super) async fn allocate(&self, at: u64, end: u64) -> Result<()> {
        if self.device || at >= end {
            return Ok(());
        }
        let guard = self.guard_shared(at, end).await;
        let result = self.fallocate(0, at, end).await;
        self.changed(if result.is_ok() { end } else { 0 });
        drop(guard);
        result.map_err(|e| {
            let unsupported = is_unsupported(&e);
            let error = self.error("allocate", at, end - at, e);
            if unsupported { error.with_kind(ErrorKind::Unsupported) } else { error }
        })
    }

    /// Allocating changes no bytes, so it goes along with everything but a change of length.
    async fn guard_shared(&self, at: u64, end: u64) -> super::WriteGuard<'_> {
        let (start, len) = self.blocks_of(at, end - at);
        self.guard_write(start, len).await
    }

    /// Sets the length, while nobody writes between the old and the new one or beyond.
    pub(super) async fn set_len(&self, len: u64) -> Result<()> {
        if self.device {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("the length of the device '{}' can't be changed", self.name),
            ));
        }
        self.change_len(|_| Some(len)).await
    }

    /// Makes a file longer, if it is shorter. Nothing is allocated.
    pub(super) async fn grow(&self, len: u64) -> Result<()> {
        if self.device || len <= self.len() {
            return Ok(());
        }
        // Others may have made it longer by the time that nobody writes there.
        self.change_len(|now| (now < len).then_some(len)).await
    }

    /// Sets the length that `wish` gives for the present one, while nobody writes between the two or beyond.
    async fn change_len(&self, wish: impl Fn(u64) -> Option<u64>) -> Result<()> {
        let now = self.len();
        let from = wish(now).map_or(now, |len| len.min(now));
        let page = self.align().max(4096);
        let from = from - from % page;
        let guard = self.guard_exclusive(from, u64::MAX - from).await;
        let Some(len) = wish(self.len()) else { return Ok(()) };
        let file = self.file.clone();
        let result = fs::blocking(move || rustix::fs::ftruncate(file.as_fd(), len)).await;
        if result.is_ok() {
            self.len.store(len, Ordering::Release);
        }
        self.extents.note_change();
        drop(guard);
        result.map_err(|e| {
            Error::io(format!("cannot set the length of '{}' to {len}", self.name), e.into())
        })?;
        self.settle().await
    }
}
