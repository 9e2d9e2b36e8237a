//! Reads and writes: whole blocks as they are, edges and odd memory by way of buffers of our own.

use super::Inner;
use bedplate_runtime::File;
use bedplate_runtime::buf::{AlignedBuf, IoVec, SharedBuf};
use bedplate_runtime::fs;
use bedplate_types::{HostOffset, Result};
use std::io;
use std::sync::Arc;

/// Largest buffer that data is copied through, so that odd memory can't make us hold large amounts.
const BOUNCE: usize = 1 << 20;
/// What the kernel takes in one request (`IOV_MAX`, `MAX_RW_COUNT` without its last page).
const MAX_SEGMENTS: usize = 1024;
const MAX_TRANSFER: usize = 0x7fff_0000;

impl Inner {
    /// Fills `buf` from `at`; beyond the end there are zeroes.
    pub(super) async fn read(&self, at: u64, buf: IoVec) -> Result<()> {
        let len = self.len();
        let n = usize::try_from(len.saturating_sub(at)).unwrap_or(usize::MAX).min(buf.len());
        buf.fill(n, buf.len() - n, 0);
        if n == 0 {
            return Ok(());
        }
        let (start, span) = self.blocks_of(at, n as u64);
        let whole = (start, span) == (at, n as u64);
        // At the end of the file the kernel takes the whole block, and stops at the end.
        let reaches = span as usize <= buf.len();
        let result = if whole && self.fits_memory(&buf.slice(0, n)) {
            read_all(&self.file, buf.slice(0, n), at, n).await
        } else if start == at && reaches && self.fits_memory(&buf.slice(0, span as usize)) {
            let got = read_all(&self.file, buf.slice(0, span as usize), at, n).await;
            // A file that has grown meanwhile may have filled more than was asked for.
            buf.fill(n, buf.len() - n, 0);
            got
        } else {
            self.read_bounced(at, &buf.slice(0, n)).await
        };
        result.map_err(|e| self.error("read", at, n as u64, e))
    }

    /// Reads through buffers of our own, a bounded chunk at a time.
    async fn read_bounced(&self, at: u64, buf: &IoVec) -> io::Result<()> {
        let mut done = 0;
        while done < buf.len() {
            let now = at + done as u64;
            let skip = (now % self.align()) as usize;
            let n = (buf.len() - done).min(BOUNCE - skip);
            let span = (skip + n).next_multiple_of(self.align.offset as usize);
            let bounce = SharedBuf::zeroed(span).map_err(io::Error::other)?;
            read_all(&self.file, bounce.iovec(), now - skip as u64, skip + n).await?;
            buf.copy_between(done, &bounce.iovec(), skip, n);
            done += n;
        }
        Ok(())
    }

    /// Writes whole blocks.
    pub(super) async fn write_whole(&self, at: u64, buf: IoVec) -> Result<()> {
        let len = buf.len() as u64;
        let guard = self.guard_write(at, len).await;
        let result = self.put(&self.file, at, buf).await;
        self.changed(if result.is_ok() { at + len } else { 0 });
        drop(guard);
        result.map_err(|e| self.error("write", at, len, e))
    }

    /// Writes a range that covers some block only in part.
    pub(super) async fn write_partial(&self, at: u64, buf: IoVec) -> Result<()> {
        let (len, end) = (buf.len() as u64, at + buf.len() as u64);
        let (start, span) = self.blocks_of(at, len);
        // The page cache works in pages, so a last block is kept apart by pages.
        let page = self.align().max(4096);
        let locked_end = (start + span).next_multiple_of(page);
        let locked_start = start - start % page;
        let guard = self.guard_exclusive(locked_start, locked_end - locked_start).await;
        let result = match &self.tail {
            Some(tail) if start + span > self.len().max(end) => {
                self.write_tail(tail, at, &buf).await
            }
            _ => self.write_edges(at, &buf).await,
        };
        self.changed(if result.is_ok() { end } else { 0 });
        drop(guard);
        result.map_err(|e| self.error("write", at, len, e))
    }

    /// The last block reaches beyond the end of the file: what lies in it goes through the page cache.
    async fn write_tail(&self, tail: &Arc<File>, at: u64, buf: &IoVec) -> io::Result<()> {
        let end = at + buf.len() as u64;
        let last = (end - end % self.align()).max(at);
        let head = (last - at) as usize;
        if head > 0 {
            self.write_edges(at, &buf.slice(0, head)).await?;
        }
        write_all(tail, last, buf.slice(head, buf.len() - head)).await?;
        let (tail, len) = (tail.clone(), end - last);
        // A dirty page would overwrite what direct writes put into its other blocks later.
        fs::blocking(move || crate::sys::clean_pages(tail.as_fd(), last, len)).await
    }

    /// Read-modify-write of the edges, and the middle, as one write. The blocks are locked, and lie inside the file
    /// or end where the data ends.
    async fn write_edges(&self, at: u64, buf: &IoVec) -> io::Result<()> {
        let align = self.align.offset as usize;
        let (start, span) = self.blocks_of(at, buf.len() as u64);
        let (skip, span) = ((at - start) as usize, span as usize);
        let after = span - skip - buf.len();
        if skip == 0 && after == 0 {
            return self.put(&self.file, at, buf.clone()).await;
        }
        if span <= 2 * align {
            let block = self.read_block(start, span).await?;
            block.copy_between(skip, buf, 0, buf.len());
            return write_all(&self.file, start, block).await;
        }
        let mut whole = IoVec::default();
        let (mut from, mut to) = (0, buf.len());
        if skip > 0 {
            let block = self.read_block(start, align).await?;
            from = block.copy_between(skip, buf, 0, align - skip);
            whole.append(block);
        }
        let tail = if after > 0 {
            let block = self.read_block(start + (span - align) as u64, align).await?;
            to -= align - after;
            block.copy_between(0, buf, to, align - after);
            Some(block)
        } else {
            None
        };
        whole.append(buf.slice(from, to - from));
        whole.append(tail.unwrap_or_default());
        self.put(&self.file, start, whole).await
    }

    /// Whole blocks, zeroes beyond the end of the file.
    async fn read_block(&self, start: u64, len: usize) -> io::Result<IoVec> {
        let buf = SharedBuf::zeroed(len).map_err(io::Error::other)?.iovec();
        read_all(&self.file, buf.clone(), start, len).await?;
        Ok(buf)
    }

    fn fits_memory(&self, buf: &IoVec) -> bool {
        let (memory, block) = (self.align.memory as usize - 1, self.align.offset as usize - 1);
        buf.raw().all(|(ptr, n)| (ptr as usize) & memory == 0 && n & block == 0)
    }

    /// Writes whole blocks from any memory.
    async fn put(&self, file: &Arc<File>, at: u64, buf: IoVec) -> io::Result<()> {
        if self.fits_memory(&buf) {
            return write_all(file, at, buf).await;
        }
        let mut done = 0;
        while done < buf.len() {
            let n = (buf.len() - done).min(BOUNCE);
            let mut copy = AlignedBuf::zeroed(n).map_err(io::Error::other)?;
            buf.copy_to(done, &mut copy);
            write_all(file, at + done as u64, SharedBuf::new(copy).iovec()).await?;
            done += n;
        }
        Ok(())
    }
}

/// The beginning of `buf` that one request may carry.
fn one_request(buf: &IoVec) -> Option<IoVec> {
    if buf.segments() <= MAX_SEGMENTS && buf.len() <= MAX_TRANSFER {
        return None;
    }
    let len: usize = buf.raw().take(MAX_SEGMENTS).map(|(_, n)| n).sum();
    Some(buf.slice(0, len.min(MAX_TRANSFER)))
}

/// Reads until at least `need` bytes are there or the file ends, where the rest stays as it is.
async fn read_all(file: &Arc<File>, buf: IoVec, at: u64, need: usize) -> io::Result<()> {
    let mut done = 0;
    while done < need {
        let rest = if done == 0 { buf.clone() } else { buf.slice(done, buf.len() - done) };
        let part = one_request(&rest).unwrap_or(rest);
        let got = fs::read(file, part, HostOffset::new(at + done as u64)).await?;
        if got == 0 {
            buf.fill(done, need - done, 0);
            return Ok(());
        }
        done += got;
    }
    Ok(())
}

async fn write_all(file: &Arc<File>, at: u64, buf: IoVec) -> io::Result<()> {
    let mut done = 0;
    while done < buf.len() {
        let rest = if done == 0 { buf.clone() } else { buf.slice(done, buf.len() - done) };
        let part = one_request(&rest).unwrap_or(rest);
        let got = fs::write(file, part, HostOffset::new(at + done as u64)).await?;
        if got == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        done += got;
    }
    Ok(())
}
