//! The trait through which engines read and write a host file, device or simulated disk.

use bedplate_runtime::buf::IoVec;
use bedplate_types::{ByteLen, HostOffset, Result};

/// How zeroes may be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZeroMode {
    /// The space may be given back to the host; it must read as zeroes all the same.
    pub unmap: bool,
    /// Fail with `Unsupported` rather than write zeroes as data.
    pub fast_only: bool,
}

/// What a storage asks of requests, and what it is good at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoLimits {
    /// Requests whose offset and length are multiples of this many bytes are passed on as they are; others
    /// cost a read-modify-write of their edges. A power of two, 1 to 4096 (page-cached files: 1).
    pub align: u32,
    /// Memory addresses must be multiples of this many bytes, or the data is copied once. A power of two.
    pub mem_align: u32,
    /// Discards smaller than this or not aligned to it free nothing. A power of two.
    pub discard_align: u32,
    /// The physical block that is best not split, in bytes. A power of two of at least 512.
    pub physical_block: u32,
}

/// A run of bytes that are all data, or all hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Length of the run.
    pub len: ByteLen,
    /// False when the storage knows that the run is a hole: it reads as zeroes and takes no space.
    pub data: bool,
}

/// The alignment of a request's memory: bits that are set in some segment's address, or length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SegmentBits {
    /// Bitwise or of all addresses.
    pub addresses: usize,
    /// Bitwise or of all lengths.
    pub lengths: usize,
}

/// Leave to run one request straight on the file, given by [`Storage::begin_direct`]; it goes back through
/// [`Storage::end_direct`] once its I/O has ended.
///
/// It has no destructor. One that is lost stops partial-block writes for good.
#[must_use = "a direct request must be ended"]
#[derive(Debug)]
pub struct DirectPin {
    /// Reads need none.
    pub(crate) write: Option<bedplate_runtime::sync::Pin>,
}

/// A host file, device or simulated disk. All methods may be called from any number of threads.
///
/// A write is volatile until a [`Self::sync`] that starts after it completed has completed. Overlapping
/// requests in flight at once may be ordered in any way. No method is cancelled half way by dropping its
/// future: what was issued runs to its end, and its memory stays alive until then.
#[allow(async_fn_in_trait)] // Futures stay on the thread that made them, by design.
#[allow(clippy::len_without_is_empty)] // Nobody asks whether a disk is empty.
pub trait Storage: Send + Sync + 'static {
    /// A name for messages, such as the file's path.
    fn name(&self) -> String;

    /// The present length.
    fn len(&self) -> ByteLen;

    /// True when nothing may be changed.
    fn read_only(&self) -> bool;

    /// What requests should look like.
    fn limits(&self) -> IoLimits;

    /// Fills `buf` from `at`. Bytes past the end read as zeroes. Short transfers are continued.
    async fn read(&self, at: HostOffset, buf: IoVec) -> Result<()>;

    /// Writes `buf` at `at`; a file grows when needed (a gap reads as zeroes). Short transfers are continued.
    async fn write(&self, at: HostOffset, buf: IoVec) -> Result<()>;

    /// Makes every write, discard, zeroing and change of length that has completed before this call durable.
    async fn sync(&self) -> Result<()>;

    /// Gives space back. On files the range reads as zeroes afterwards; on devices it may read as anything.
    /// Where it isn't possible nothing happens.
    async fn discard(&self, at: HostOffset, len: ByteLen) -> Result<()>;

    /// Makes the range read as zeroes.
    ///
    /// # Errors
    /// `Unsupported` when `mode.fast_only` is set and only writing zeroes as data would do.
    async fn write_zeroes(&self, at: HostOffset, len: ByteLen, mode: ZeroMode) -> Result<()>;

    /// Allocates space for the range without changing what it reads as; the file grows to hold it.
    ///
    /// # Errors
    /// `Unsupported` where there is no such thing, `NoSpace` when it is not to be had.
    async fn allocate(&self, at: HostOffset, len: ByteLen) -> Result<()>;

    /// Makes a file at least `len` long without allocating space; what is new reads as zeroes. Devices and longer files
    /// stay as they are.
    async fn grow(&self, len: ByteLen) -> Result<()>;

    /// Sets the length. Growth reads as zeroes. Devices refuse.
    async fn set_len(&self, len: ByteLen) -> Result<()>;

    /// Whether a request may be submitted on [`Self::direct_file`] as it is, without a copy, a lock or a future.
    /// `None` when it must go through [`Self::read`] or [`Self::write`]: offset, length or memory not aligned,
    /// beyond the end, a change of a read-only file, a partial-block write going on, or no file at all.
    fn begin_direct(
        &self,
        write: bool,
        at: HostOffset,
        len: ByteLen,
        memory: SegmentBits,
    ) -> Option<DirectPin> {
        let _ = (write, at, len, memory);
        None
    }

    /// Gives back what [`Self::begin_direct`] gave.
    fn end_direct(&self, pin: DirectPin) {
        let _ = pin;
    }

    /// The file that direct requests go to.
    fn direct_file(&self) -> Option<&std::sync::Arc<bedplate_runtime::File>> {
        None
    }

    /// The run that starts at `at`, at most `len` bytes long and never empty for a non-empty `len`.
    async fn extent(&self, at: HostOffset, len: ByteLen) -> Result<Extent>;
}
