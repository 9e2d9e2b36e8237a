//! Event counters of the kernel, and waiting for descriptors.

use crate::ops::{Op, Request};
use rustix::event::EventfdFlags;
use rustix::fs::OFlags;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// Waits until `fd` can be read from, has ended, or has an error that reading will report.
///
/// # Errors
/// As poll(2); `Other` on a thread without a runtime.
pub async fn readable(fd: impl AsFd) -> io::Result<()> {
    poll(fd.as_fd(), libc::POLLIN).await
}

/// Waits until `fd` can be written to, or has an error that writing will report.
///
/// # Errors
/// As [`readable`].
pub async fn writable(fd: impl AsFd) -> io::Result<()> {
    poll(fd.as_fd(), libc::POLLOUT).await
}

async fn poll(fd: BorrowedFd<'_>, events: i16) -> io::Result<()> {
    Op::run(Request::Poll { fd: fd.as_raw_fd(), events }).await.map(drop)
}

/// An eventfd: a counter in the kernel that processes and virtual machines signal each other with.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// A new one whose counter is zero.
    ///
    /// # Errors
    /// As eventfd(2).
    pub fn new() -> io::Result<Self> {
        Ok(Self(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Takes over one that came from elsewhere, and makes it non-blocking.
    ///
    /// # Errors
    /// As fcntl(2).
    pub fn from_fd(fd: OwnedFd) -> io::Result<Self> {
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        if !flags.contains(OFlags::NONBLOCK) {
            rustix::fs::fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?;
        }
        Ok(Self(fd))
    }

    /// Adds one to the counter, which wakes whoever waits for it. Any thread may do it.
    ///
    /// # Errors
    /// As write(2). A full counter is no error: its waiters are being woken already.
    pub fn write(&self) -> io::Result<()> {
        match rustix::io::write(&self.0, &1u64.to_ne_bytes()) {
            Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// Takes the counter's value, leaving zero; `None` when it is zero.
    ///
    /// # Errors
    /// As read(2); `InvalidData` when this isn't an eventfd.
    pub fn try_take(&self) -> io::Result<Option<u64>> {
        let mut count = [0; 8];
        match rustix::io::read(&self.0, &mut count) {
            Ok(8) => Ok(Some(u64::from_ne_bytes(count))),
            Ok(_) => Err(io::Error::new(io::ErrorKind::InvalidData, "this is not an eventfd")),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// Waits until the counter isn't zero, and takes its value. A dropped future takes nothing.
    ///
    /// # Errors
    /// As [`Self::try_take`] and [`readable`].
    pub async fn wait(&self) -> io::Result<u64> {
        loop {
            readable(&self.0).await?;
            if let Some(count) = self.try_take()? {
                return Ok(count);
            }
        }
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
