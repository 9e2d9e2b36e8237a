//! What lies under an image: the content that unallocated clusters show.

use bedplate_runtime::buf::IoVec;
use bedplate_types::{ByteLen, GuestOffset, Result};

/// The disk under an image, asked by copy-on-write.
#[allow(async_fn_in_trait)] // Futures stay on the thread that made them, by design.
pub trait Below {
    /// True when there is nothing: every byte reads as zero.
    fn is_empty(&self) -> bool;

    /// Fills `buf` with what shows at `at`.
    async fn read(&self, at: GuestOffset, buf: IoVec) -> Result<()>;

    /// Whether the run that starts at `at` is known to read as zeroes, and how long it is (at most `len`).
    async fn zero_run(&self, at: GuestOffset, len: ByteLen) -> Result<(bool, ByteLen)>;
}

/// Nothing under the image.
#[derive(Clone, Copy, Debug)]
pub struct Nothing;

impl Below for Nothing {
    fn is_empty(&self) -> bool {
        true
    }

    async fn read(&self, _at: GuestOffset, buf: IoVec) -> Result<()> {
        buf.fill(0, buf.len(), 0);
        Ok(())
    }

    async fn zero_run(&self, _at: GuestOffset, len: ByteLen) -> Result<(bool, ByteLen)> {
        Ok((true, len))
    }
}
