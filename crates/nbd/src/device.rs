//! What a session needs of a disk.
//!
//! Callers: transmission uses it, the server takes it; `Disk` has it, and tests have disks in memory that fail and
//! wait on demand. Ranges were checked against [`Device::size`] before any call.

use crate::bitmap::NamedBitmap;
use bedplate_runtime::buf::IoVec;
use bedplate_storage::ZeroMode;
use bedplate_types::{ByteLen, GuestOffset, Result};

/// A run of bytes in one state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Bytes.
    pub len: u64,
    /// The run takes no space.
    pub hole: bool,
    /// The run reads as zeroes.
    pub zero: bool,
}

/// A disk as NBD clients use it. A flush through any session covers what was completed through all of them:
/// that is what lets the server promise multi-conn.
#[allow(async_fn_in_trait)] // Futures stay on the thread that made them, by design.
pub trait Device: Send + Sync + 'static {
    /// Bytes.
    fn size(&self) -> u64;

    /// True when nothing may be changed.
    fn read_only(&self) -> bool;

    /// Requests whose offset and length are multiples of this are cheap; 1 where the host caches pages.
    fn align(&self) -> u32;

    /// Bitmaps that clients may ask for, at most [`crate::MAX_BITMAPS`].
    fn bitmaps(&self) -> &[NamedBitmap] {
        &[]
    }

    /// Fills `buf` from `at`.
    async fn read(&self, at: GuestOffset, buf: IoVec) -> Result<()>;

    /// Writes `buf` at `at`; with `fua` it is durable afterwards.
    async fn write(&self, at: GuestOffset, buf: IoVec, fua: bool) -> Result<()>;

    /// Writes several requests that are under way at once, so that the disk can place neighbours together. The
    /// results are in the order of the requests.
    async fn write_batch(&self, writes: Vec<(GuestOffset, IoVec)>) -> Vec<Result<()>>;

    /// Makes everything that was completed before durable.
    async fn flush(&self) -> Result<()>;

    /// Gives space back.
    async fn discard(&self, at: GuestOffset, len: ByteLen) -> Result<()>;

    /// Makes the range read as zeroes.
    async fn write_zeroes(&self, at: GuestOffset, len: ByteLen, mode: ZeroMode) -> Result<()>;

    /// What the range is made of, in at most `max` runs: at least one for a range that is not empty; they may end
    /// early.
    async fn block_status(&self, at: GuestOffset, len: ByteLen, max: usize) -> Result<Vec<Run>>;
}
