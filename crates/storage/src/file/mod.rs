//! Files and block devices as [`Storage`], by direct or page-cached I/O on the current thread's runtime.
//!
//! # Requests that fit and requests that don't
//! Direct I/O takes whole blocks only (`align` bytes). Reads of parts of blocks read whole ones and copy. Writes of
//! parts of blocks are a read-modify-write of the edges, and nothing else may write to those blocks meanwhile:
//!
//! - A write of whole blocks takes a pin ([`Epochs`]) for as long as its I/O runs, if no read-modify-write is about
//!   (`partial` is zero); else it takes its range shared, in `ranges`.
//! - A read-modify-write first raises `partial`, so that no new pins count, then waits until all pins are given
//!   back, then takes its blocks exclusively. Afterwards it lowers `partial` again.
//!
//! So whole-block writes, the hot path, touch nothing but their own thread's pin counter as long as nobody sends
//! partial blocks. Pins are never held while a lock is awaited.
//!
//! # Growth and the end
//! `len` follows completed writes and only grows, except by `set_len`, which excludes all writes. A last block that
//! reaches beyond the file's end can't be written directly without making the file longer; its bytes go through
//! the page cache (`tail`) under the same exclusive range, and the pages are clean again before it ends.

mod direct;
mod extent;
mod rw;
mod space;

use crate::lock::{ImageLock, IoMark};
use crate::probe::{Blocks, DirectAlign};
use crate::{DirectPin, Extent, IoLimits, SegmentBits, Storage, ZeroMode};
use bedplate_runtime::File;
use bedplate_runtime::buf::IoVec;
use bedplate_runtime::fs;
use bedplate_runtime::sync::{Epochs, PinGuard, RangeGuard, RangeLock};
use bedplate_types::{ByteLen, Error, ErrorKind, HostOffset, Result};
use extent::ExtentCache;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};

/// What opening a file gives.
pub(crate) struct Parts {
    pub(crate) file: Arc<File>,
    /// The same file through the page cache, for last blocks; regular files opened for direct writing have it.
    pub(crate) tail: Option<Arc<File>>,
    pub(crate) lock: Option<ImageLock>,
    pub(crate) mark: Option<IoMark>,
    pub(crate) name: String,
    pub(crate) len: u64,
    pub(crate) read_only: bool,
    pub(crate) ignore_sync: bool,
    /// Every change is durable before it completes.
    pub(crate) write_through: bool,
    pub(crate) device: bool,
    pub(crate) align: DirectAlign,
    pub(crate) blocks: Blocks,
}

struct Inner {
    file: Arc<File>,
    tail: Option<Arc<File>>,
    name: String,
    read_only: bool,
    ignore_sync: bool,
    write_through: bool,
    device: bool,
    align: DirectAlign,
    blocks: Blocks,
    len: AtomicU64,
    /// Writers of partial blocks that are waiting or at work.
    partial: AtomicUsize,
    epochs: Epochs,
    /// Blocks of partial writes (exclusive) and of whole-block writes beside them (shared).
    // Lock order: the innermost of all suspending locks; only this file's own I/O is awaited under it.
    ranges: RangeLock,
    extents: ExtentCache,
    /// What the file system or device has turned out not to have.
    no_punch: AtomicBool,
    no_zero_range: AtomicBool,
    _mark: Option<IoMark>,
    _lock: Option<ImageLock>,
}

/// A host file or block device. Clones are handles on the same open file.
#[derive(Clone)]
pub struct FileStorage {
    inner: Arc<Inner>,
}

/// Keeps partial-block writers away from a whole-block write, or the reverse.
enum WriteGuard<'a> {
    Pinned { _pin: PinGuard<'a> },
    Shared { _range: RangeGuard<'a> },
    Exclusive { _range: RangeGuard<'a>, _count: PartialCount<'a> },
}

struct PartialCount<'a>(&'a AtomicUsize);

impl Drop for PartialCount<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

impl Inner {
    fn align(&self) -> u64 {
        u64::from(self.align.offset)
    }

    fn len(&self) -> u64 {
        self.len.load(Ordering::Acquire)
    }

    fn is_whole_blocks(&self, at: u64, len: u64) -> bool {
        (at | len) & (self.align() - 1) == 0
    }

    /// The blocks that the range touches, as start and length.
    fn blocks_of(&self, at: u64, len: u64) -> (u64, u64) {
        let start = at - at % self.align();
        let end = at.saturating_add(len);
        let end = end.checked_next_multiple_of(self.align()).unwrap_or(u64::MAX);
        (start, end - start)
    }

    /// To be held while the range is changed; see the module's text.
    async fn guard_write(&self, at: u64, len: u64) -> WriteGuard<'_> {
        if !self.is_whole_blocks(at, len) {
            let (start, len) = self.blocks_of(at, len);
            return self.guard_exclusive(start, len).await;
        }
        let pin = self.epochs.guard();
        if self.partial.load(Ordering::Acquire) == 0 {
            return WriteGuard::Pinned { _pin: pin };
        }
        drop(pin);
        WriteGuard::Shared { _range: self.ranges.shared(at, len).await }
    }

    /// Keeps all other changes off the range.
    async fn guard_exclusive(&self, start: u64, len: u64) -> WriteGuard<'_> {
        self.partial.fetch_add(1, Ordering::AcqRel);
        let count = PartialCount(&self.partial);
        self.epochs.quiesce().await;
        WriteGuard::Exclusive { _range: self.ranges.exclusive(start, len).await, _count: count }
    }

    /// Takes note that contents up to `end` were changed; before the change counts as completed.
    fn changed(&self, end: u64) {
        if end > self.len() {
            self.len.fetch_max(end, Ordering::AcqRel);
        }
        self.extents.note_change();
    }

    fn error(&self, doing: &str, at: u64, len: u64, e: io::Error) -> Error {
        Error::io(format!("cannot {doing} {len} bytes at {at:#x} of '{}'", self.name), e)
    }

    fn check_writable(&self) -> Result<()> {
        if self.read_only {
            let text = format!("'{}' was opened for reading only", self.name);
            return Err(Error::new(ErrorKind::ReadOnly, text));
        }
        Ok(())
    }

    /// The end of the range, if there can be such an offset.
    fn end_of(&self, at: HostOffset, len: ByteLen) -> Result<u64> {
        let end = at.checked_add(len).map(HostOffset::get).filter(|e| *e <= i64::MAX as u64);
        end.ok_or_else(|| {
            Error::new(
                ErrorKind::OutOfRange,
                format!("{len} bytes at {at} are beyond the largest offset of '{}'", self.name),
            )
        })
    }

    /// As [`Self::end_of`], and devices don't grow.
    fn end_of_change(&self, at: HostOffset, len: ByteLen) -> Result<u64> {
        self.check_writable()?;
        let end = self.end_of(at, len)?;
        if self.device && end > self.len() {
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!("{len} bytes at {at} are beyond the end of the device '{}'", self.name),
            ));
        }
        Ok(end)
    }
}

impl FileStorage {
    pub(crate) fn from_parts(p: Parts) -> Self {
        let inner = Inner {
            file: p.file,
            tail: p.tail,
            name: p.name,
            read_only: p.read_only,
            ignore_sync: p.ignore_sync,
            write_through: p.write_through,
            device: p.device,
            align: p.align,
            blocks: p.blocks,
            len: AtomicU64::new(p.len),
            partial: AtomicUsize::new(0),
            epochs: Epochs::new(),
            ranges: RangeLock::new(),
            extents: ExtentCache::new(p.read_only),
            no_punch: AtomicBool::new(false),
            no_zero_range: AtomicBool::new(false),
            _mark: p.mark,
            _lock: p.lock,
        };
        Self { inner: Arc::new(inner) }
    }

    /// True for a block device.
    pub fn is_device(&self) -> bool {
        self.inner.device
    }

    /// Looks at the length again, in case another program has changed it (when sharing by force).
    ///
    /// # Errors
    /// What the system says.
    pub async fn refresh_len(&self) -> Result<ByteLen> {
        let (file, name) = (self.inner.file.clone(), self.inner.name.clone());
        let len = fs::blocking(move || crate::open::length(file.as_fd(), &name)).await?;
        self.inner.len.fetch_max(len, Ordering::AcqRel);
        Ok(ByteLen::new(len))
    }
}

impl std::fmt::Debug for FileStorage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FileStorage('{}', {} bytes)", self.inner.name, self.inner.len())
    }
}

impl Storage for FileStorage {
    #[inline]
    fn begin_direct(
        &self,
        write: bool,
        at: HostOffset,
        len: ByteLen,
        memory: SegmentBits,
    ) -> Option<DirectPin> {
        self.direct_begin(write, at, len, memory)
    }

    #[inline]
    fn end_direct(&self, pin: DirectPin) {
        self.direct_end(pin);
    }

    fn direct_file(&self) -> Option<&Arc<File>> {
        Some(&self.inner.file)
    }

    fn name(&self) -> String {
        self.inner.name.clone()
    }

    fn len(&self) -> ByteLen {
        ByteLen::new(self.inner.len())
    }

    fn read_only(&self) -> bool {
        self.inner.read_only
    }

    fn limits(&self) -> IoLimits {
        let i = &self.inner;
        IoLimits {
            align: i.align.offset,
            mem_align: i.align.memory,
            discard_align: i.blocks.discard,
            physical_block: i.blocks.physical,
        }
    }

    async fn read(&self, at: HostOffset, buf: IoVec) -> Result<()> {
        self.inner.end_of(at, buf.byte_len())?;
        self.inner.read(at.get(), buf).await
    }

    async fn write(&self, at: HostOffset, buf: IoVec) -> Result<()> {
        let end = self.inner.end_of_change(at, buf.byte_len())?;
        if buf.is_empty() {
            return Ok(());
        }
        if self.inner.is_whole_blocks(at.get(), end - at.get()) {
            return self.inner.write_whole(at.get(), buf).await;
        }
        let inner = self.inner.clone();
        to_the_end(async move { inner.write_partial(at.get(), buf).await }).await
    }

    async fn sync(&self) -> Result<()> {
        if self.inner.ignore_sync || self.inner.read_only {
            return Ok(());
        }
        fs::fsync(&self.inner.file, true).await.map_err(|e| {
            Error::io(format!("cannot make the writes to '{}' durable", self.inner.name), e)
        })
    }

    async fn discard(&self, at: HostOffset, len: ByteLen) -> Result<()> {
        self.inner.check_writable()?;
        let end = self.inner.end_of(at, len)?.min(self.inner.len());
        if at.get() >= end {
            return Ok(());
        }
        let inner = self.inner.clone();
        to_the_end(async move { inner.discard(at.get(), end).await }).await
    }

    async fn write_zeroes(&self, at: HostOffset, len: ByteLen, mode: ZeroMode) -> Result<()> {
        let end = self.inner.end_of_change(at, len)?;
        if at.get() == end {
            return Ok(());
        }
        let inner = self.inner.clone();
        to_the_end(async move { inner.write_zeroes(at.get(), end, mode).await }).await
    }

    async fn allocate(&self, at: HostOffset, len: ByteLen) -> Result<()> {
        let end = self.inner.end_of_change(at, len)?;
        self.inner.allocate(at.get(), end).await
    }

    async fn grow(&self, len: ByteLen) -> Result<()> {
        self.inner.end_of_change(HostOffset::ZERO, len)?;
        let inner = self.inner.clone();
        to_the_end(async move { inner.grow(len.get()).await }).await
    }

    async fn set_len(&self, len: ByteLen) -> Result<()> {
        self.inner.check_writable()?;
        self.inner.end_of(HostOffset::ZERO, len)?;
        let inner = self.inner.clone();
        to_the_end(async move { inner.set_len(len.get()).await }).await
    }

    async fn extent(&self, at: HostOffset, len: ByteLen) -> Result<Extent> {
        let end = self.inner.end_of(at, len)?;
        self.inner.extent(at.get(), end).await
    }
}

/// What a task leaves for whoever waits for it.
struct Outcome<T> {
    value: Option<T>,
    waker: Option<Waker>,
}

/// Runs work that must not stop half way when its caller is dropped: else locks would be given back while the
/// last write is still in flight.
async fn to_the_end<T: 'static>(work: impl Future<Output = T> + 'static) -> T {
    use std::cell::RefCell;
    use std::rc::Rc;
    let outcome = Rc::new(RefCell::new(Outcome { value: None, waker: None }));
    let theirs = outcome.clone();
    let mut work: Pin<Box<dyn Future<Output = T>>> = Box::pin(work);
    // Most work is done or submitted by its first poll here, which saves a turn of the executor.
    if let Some(value) = std::future::poll_fn(|cx| {
        Poll::Ready(match work.as_mut().poll(cx) {
            Poll::Ready(v) => Some(v),
            Poll::Pending => None,
        })
    })
    .await
    {
        return value;
    }
    bedplate_runtime::spawn(async move {
        let value = work.await;
        let waker = {
            let mut o = theirs.borrow_mut();
            o.value = Some(value);
            o.waker.take()
        };
        if let Some(w) = waker {
            w.wake();
        }
    });
    std::future::poll_fn(|cx: &mut Context<'_>| {
        let mut o = outcome.borrow_mut();
        match o.value.take() {
            Some(v) => Poll::Ready(v),
            None => {
                o.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    })
    .await
}

#[cfg(test)]
mod tests;
