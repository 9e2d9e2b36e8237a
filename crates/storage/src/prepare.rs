//! Taking space ahead of need, in the ways of [`Preallocation`].
//!
//! Callers: creating and resizing of images.

use crate::Storage;
use bedplate_runtime::buf::SharedBuf;
use bedplate_types::{ByteLen, ErrorKind, HostOffset, Preallocation, Result};
use futures_util::stream::{FuturesUnordered, StreamExt};

/// Bytes written at once by `Full`.
const FULL_BYTES: u64 = 1 << 20;
/// Bytes written at once by `Prepared`, and how many writes are under way.
const STRIDE_BYTES: u64 = 8 << 20;
const STRIDES: usize = 4;

/// Takes space for a range that reads as zeroes, and leaves it so. Ranges that hold something else are overwritten by
/// `Full` and `Prepared`, and kept by the others.
///
/// # Errors
/// `NoSpace`, `Unsupported` where `Falloc` can't be, or what else the storage reports.
pub async fn take_space<S: Storage>(
    storage: &S,
    at: HostOffset,
    len: ByteLen,
    how: Preallocation,
) -> Result<()> {
    if len == ByteLen::ZERO {
        return Ok(());
    }
    match how {
        Preallocation::Off | Preallocation::Metadata => Ok(()),
        Preallocation::Falloc => storage.allocate(at, len).await,
        Preallocation::Full => write_zeroes(storage, at, len, FULL_BYTES, 1).await,
        Preallocation::Prepared => {
            // In one piece, where the file system can promise it; writing then keeps the pieces it has chosen.
            match storage.allocate(at, len).await {
                Err(e) if e.kind() != ErrorKind::Unsupported => return Err(e),
                _ => {}
            }
            write_zeroes(storage, at, len, STRIDE_BYTES, STRIDES).await
        }
    }
}

async fn write_zeroes<S: Storage>(
    storage: &S,
    at: HostOffset,
    len: ByteLen,
    stride: u64,
    at_once: usize,
) -> Result<()> {
    let zeroes = SharedBuf::zeroed(stride.min(len.get()) as usize)?.iovec();
    let (mut next, end) = (at.get(), at.get().saturating_add(len.get()));
    let mut running = FuturesUnordered::new();
    let mut failed = Ok(());
    loop {
        while failed.is_ok() && running.len() < at_once && next < end {
            let n = (end - next).min(stride);
            running.push(storage.write(HostOffset::new(next), zeroes.slice(0, n as usize)));
            next += n;
        }
        match running.next().await {
            Some(Ok(())) => {}
            // What is under way runs to its end.
            Some(Err(e)) => failed = Err(e),
            None => return failed,
        }
    }
}
