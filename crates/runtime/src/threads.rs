//! The backend without io_uring: positioned reads and writes on a pool of threads, and poll(2) for descriptors.
//!
//! Callers: [`crate::io`]. Results come back through the runtime's [`Shared`], as messages of other threads do.

use crate::file::File;
use crate::io::{DirectOp, MAX_SEGMENTS};
use crate::ops::Request;
use crate::pool::Pool;
use crate::remote::Shared;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// One pool for all runtimes of the process.
static POOL: Pool = Pool::new("bedplate-io", 8);

/// The backend's state: descriptors that are waited for.
pub(crate) struct Threads {
    shared: Arc<Shared>,
    /// Entry 0 is the eventfd of other threads.
    polled: Vec<libc::pollfd>,
    /// User data of the entries from 1 on.
    waiting: Vec<u64>,
    /// Waits that were cancelled, to be reported.
    cancelled: Vec<u64>,
}

/// A list of segments on its way to another thread.
struct Segments {
    iov: *const libc::iovec,
    n: usize,
}

// SAFETY: whoever starts the transfer vouches for the list and its memory until the completion, on any thread.
unsafe impl Send for Segments {}

impl Threads {
    pub(crate) fn new(shared: &Arc<Shared>) -> Self {
        let bell = libc::pollfd { fd: shared.wake_fd(), events: libc::POLLIN, revents: 0 };
        Self {
            shared: shared.clone(),
            polled: vec![bell],
            waiting: Vec::new(),
            cancelled: Vec::new(),
        }
    }

    /// Starts a transfer.
    ///
    /// # Safety
    /// The list and the memory it names must stay valid until the completion.
    pub(crate) unsafe fn transfer(
        &self,
        op: DirectOp,
        file: &Arc<File>,
        iov: *const libc::iovec,
        n: usize,
        at: u64,
        data: u64,
    ) {
        let (file, shared) = (file.clone(), self.shared.clone());
        let segments = Segments { iov, n: n.min(MAX_SEGMENTS) };
        POOL.run(Box::new(move || {
            let segments = segments; // the whole of it, which is Send
            // SAFETY: the caller's promise.
            let result = unsafe { transfer_now(op, &file, segments.iov, segments.n, at) };
            // Before the result is seen, as it may be what the other side waits for to close the file.
            drop(file);
            shared.complete(data, result);
        }));
    }

    /// Starts an operation whose request stays where it is until the completion.
    ///
    /// # Safety
    /// `request` must neither move nor be dropped before the completion.
    pub(crate) unsafe fn start(&mut self, request: &Request, data: u64) {
        let shared = self.shared.clone();
        match request {
            Request::Transfer { op, file, buf, at } => {
                let (iov, n) = buf.as_iovecs();
                // SAFETY: the list is part of the request, which owns the memory too.
                unsafe { self.transfer(*op, file, iov, n, *at, data) }
            }
            Request::Fsync { file, data_only } => {
                let (file, data_only) = (file.clone(), *data_only);
                POOL.run(Box::new(move || {
                    let fd = file.raw();
                    // SAFETY: the file is open while `file` lives.
                    let n =
                        unsafe { if data_only { libc::fdatasync(fd) } else { libc::fsync(fd) } };
                    let result = result_of(n as isize);
                    drop(file);
                    shared.complete(data, result);
                }));
            }
            Request::Fallocate { file, mode, at, len } => {
                let (file, mode, at, len) = (file.clone(), *mode, *at, *len);
                POOL.run(Box::new(move || {
                    let result = fallocate_now(&file, mode, at, len);
                    drop(file);
                    shared.complete(data, result);
                }));
            }
            Request::Poll { fd, events } => {
                self.polled.push(libc::pollfd { fd: *fd, events: *events, revents: 0 });
                self.waiting.push(data);
            }
        }
    }

    /// Ends a wait for a descriptor; its completion still comes.
    pub(crate) fn cancel(&mut self, data: u64) {
        if let Some(i) = self.waiting.iter().position(|d| *d == data) {
            self.waiting.swap_remove(i);
            self.polled.swap_remove(i + 1);
            self.cancelled.push(data);
        }
    }

    /// True when a look at the descriptors may find something.
    pub(crate) fn has_events(&self) -> bool {
        !self.cancelled.is_empty()
    }

    /// Looks at the descriptors, sleeping until one is ready, at most for `limit` (`None`: for ever).
    pub(crate) fn poll(&mut self, limit: Option<Duration>) {
        if self.waiting.is_empty() && limit == Some(Duration::ZERO) {
            return;
        }
        // What was cancelled is to be reported now.
        let limit = if self.cancelled.is_empty() { limit } else { Some(Duration::ZERO) };
        let time = limit.map(|t| libc::timespec {
            tv_sec: i64::try_from(t.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: t.subsec_nanos().into(),
        });
        let time_ptr = time.as_ref().map_or(std::ptr::null(), |t| &raw const *t);
        // SAFETY: the list is valid for its length, and the time is null or valid.
        let n = unsafe {
            let len = self.polled.len() as libc::nfds_t;
            libc::ppoll(self.polled.as_mut_ptr(), len, time_ptr, std::ptr::null())
        };
        if n < 0 {
            self.polled.iter_mut().for_each(|p| p.revents = 0);
            let e = io::Error::last_os_error();
            if e.raw_os_error() != Some(libc::EINTR) {
                tracing::error!("poll failed: {e}");
            }
            return;
        }
        if std::mem::take(&mut self.polled[0].revents) != 0 {
            let mut counter = [0; 8];
            // SAFETY: the buffer has the eight bytes that an eventfd gives; poll says that it won't block.
            unsafe { libc::read(self.shared.wake_fd(), counter.as_mut_ptr().cast(), 8) };
        }
    }

    /// Takes what [`Self::poll`] found, and what was cancelled.
    pub(crate) fn reap(&mut self, mut each: impl FnMut(u64, i32)) -> bool {
        let mut any = !self.cancelled.is_empty();
        for data in self.cancelled.drain(..) {
            each(data, -libc::ECANCELED);
        }
        let mut i = 0;
        while let Some(data) = self.waiting.get(i) {
            let revents = self.polled[i + 1].revents;
            if revents == 0 {
                i += 1;
                continue;
            }
            any = true;
            let bad = revents & libc::POLLNVAL != 0;
            each(*data, if bad { -libc::EBADF } else { revents.into() });
            self.waiting.swap_remove(i);
            self.polled.swap_remove(i + 1);
        }
        any
    }
}

/// One positioned transfer by this thread, repeated only when a signal came before its begin.
///
/// # Safety
/// `iov` must point to `n` segments, which must be valid.
pub(crate) unsafe fn transfer_now(
    op: DirectOp,
    file: &File,
    iov: *const libc::iovec,
    n: usize,
    at: u64,
) -> i32 {
    let Ok(at) = i64::try_from(at) else { return -libc::EINVAL };
    let (fd, n) = (file.raw(), n as libc::c_int);
    loop {
        // SAFETY: the caller's promise; the file is open.
        let done = unsafe {
            match op {
                DirectOp::Read => libc::preadv(fd, iov, n, at),
                DirectOp::Write => libc::pwritev(fd, iov, n, at),
            }
        };
        match result_of(done) {
            e if e == -libc::EINTR => {}
            result => return result,
        }
    }
}

fn fallocate_now(file: &File, mode: i32, at: u64, len: u64) -> i32 {
    let (Ok(at), Ok(len)) = (i64::try_from(at), i64::try_from(len)) else { return -libc::EFBIG };
    // SAFETY: the file is open; no memory is involved.
    result_of(unsafe { libc::fallocate(file.raw(), mode, at, len) } as isize)
}

/// The result of a system call in the form that completions have. Linux transfers at most 2 GiB at once.
fn result_of(n: isize) -> i32 {
    if n < 0 {
        return -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
    }
    i32::try_from(n).unwrap_or(i32::MAX)
}
