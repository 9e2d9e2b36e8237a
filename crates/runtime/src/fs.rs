//! Operations on files, on the current thread's runtime.
//!
//! Each call is one operation of the system and may transfer less than asked; [`read_full`] and [`write_full`]
//! go on until all is done. Dropping a future leaves its operation running; its memory lives until the end of it.

use crate::buf::IoVec;
use crate::file::File;
use crate::io::{DirectOp, MAX_SEGMENTS};
use crate::ops::{Op, Request};
use crate::pool::Pool;
use bedplate_types::{ByteLen, HostOffset};
use std::any::Any;
use std::future::poll_fn;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};

/// Threads for [`blocking`], shared by the process.
static BLOCKING: Pool = Pool::new("bedplate-block", 8);

/// Direct reads end inside a sector of this size only at the end of the file.
const SECTOR: usize = 512;

fn transfer(
    op: DirectOp,
    file: &Arc<File>,
    buf: IoVec,
    at: u64,
) -> impl Future<Output = io::Result<usize>> {
    Op::run(Request::Transfer { op, file: file.clone(), buf, at })
}

/// Reads into `buf` from `at`; returns how many bytes there were, which is 0 at the end of the file.
///
/// # Errors
/// As pread(2); `Other` on a thread without a runtime.
pub async fn read(file: &Arc<File>, buf: IoVec, at: HostOffset) -> io::Result<usize> {
    transfer(DirectOp::Read, file, buf, at.get()).await
}

/// Writes `buf` at `at`; returns how many bytes were written.
///
/// # Errors
/// As pwrite(2); `Other` on a thread without a runtime.
pub async fn write(file: &Arc<File>, buf: IoVec, at: HostOffset) -> io::Result<usize> {
    transfer(DirectOp::Write, file, buf, at.get()).await
}

/// Reads until `buf` is full or the file ends; returns the bytes read.
///
/// # Errors
/// As [`read`].
pub async fn read_full(file: &Arc<File>, buf: IoVec, at: HostOffset) -> io::Result<usize> {
    let mut done = 0;
    while done < buf.len() {
        match transfer(DirectOp::Read, file, rest(&buf, done), advanced(at, done)?).await {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(e) if is_transient(&e) => crate::yield_now().await,
            // A direct read stopped at the end of the file, inside a sector, and can't go on from there.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) && !done.is_multiple_of(SECTOR) => {
                break;
            }
            Err(e) => return Err(e),
        }
    }
    Ok(done)
}

/// Writes all of `buf`.
///
/// # Errors
/// As [`write()`]; `WriteZero` when the system takes nothing more.
pub async fn write_full(file: &Arc<File>, buf: IoVec, at: HostOffset) -> io::Result<()> {
    let mut done = 0;
    while done < buf.len() {
        match transfer(DirectOp::Write, file, rest(&buf, done), advanced(at, done)?).await {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => done += n,
            Err(e) if is_transient(&e) => crate::yield_now().await,
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// The part of `buf` that is not done, without a copy of the list where nothing is done and it isn't too long.
fn rest(buf: &IoVec, done: usize) -> IoVec {
    if done == 0 && buf.segments() <= MAX_SEGMENTS {
        return buf.clone();
    }
    buf.slice(done, buf.len() - done)
}

fn advanced(at: HostOffset, done: usize) -> io::Result<u64> {
    let done = u64::try_from(done).map_err(|_| io::ErrorKind::InvalidInput)?;
    at.get().checked_add(done).ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

fn is_transient(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock)
}

/// Makes what was written before durable; with `data_only` without metadata that reading doesn't need.
///
/// # Errors
/// As fsync(2); `Other` on a thread without a runtime.
pub async fn fsync(file: &Arc<File>, data_only: bool) -> io::Result<()> {
    Op::run(Request::Fsync { file: file.clone(), data_only }).await.map(drop)
}

/// Allocates, zeroes or frees space, as fallocate(2) does with `mode`.
///
/// # Errors
/// As fallocate(2); `Other` on a thread without a runtime.
pub async fn fallocate(
    file: &Arc<File>,
    mode: i32,
    at: HostOffset,
    len: ByteLen,
) -> io::Result<()> {
    let request = Request::Fallocate { file: file.clone(), mode, at: at.get(), len: len.get() };
    Op::run(request).await.map(drop)
}

/// The meeting point of a blocking call and the future that awaits it.
struct Meeting<T> {
    result: Option<Result<T, Box<dyn Any + Send>>>,
    waker: Option<Waker>,
}

/// Runs `f`, which may block, on a helper thread. It works without a runtime too.
///
/// Dropping the future does not stop `f`. A panic of `f` goes on in the caller.
pub async fn blocking<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> T {
    let meeting = Arc::new(Mutex::new(Meeting { result: None, waker: None }));
    let theirs = meeting.clone();
    BLOCKING.run(Box::new(move || {
        let result = catch_unwind(AssertUnwindSafe(f));
        let mut m = theirs.lock().unwrap_or_else(PoisonError::into_inner);
        m.result = Some(result);
        let waker = m.waker.take();
        drop(m);
        drop(theirs);
        if let Some(w) = waker {
            w.wake();
        }
    }));
    let result = poll_fn(|cx| {
        let mut m = meeting.lock().unwrap_or_else(PoisonError::into_inner);
        match m.result.take() {
            Some(result) => Poll::Ready(result),
            None => {
                m.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    });
    result.await.unwrap_or_else(|panic| resume_unwind(panic))
}
