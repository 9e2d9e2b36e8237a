//! Stream sockets: Unix and TCP.
//!
//! Every call tries the system call first, which does not block, and waits for the descriptor only when it must.
//! Methods take `&self`, so that one task may read while another writes; two readers at once would mix the data.

use crate::buf::IoVec;
use crate::event::{readable, writable};
use crate::io::MAX_SEGMENTS;
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType,
};
use std::io::{self, IoSlice};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

/// How long to wait before trying again to connect to a Unix socket whose queue is full.
const FULL_QUEUE_PAUSE: Duration = Duration::from_millis(5);

/// A socket that accepts connections.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
    tcp: bool,
}

/// A connection.
#[derive(Debug)]
pub struct Stream {
    fd: OwnedFd,
}

impl Listener {
    /// Listens on a new Unix socket at `path`, which must not exist.
    ///
    /// # Errors
    /// As bind(2).
    pub fn unix(path: impl AsRef<Path>) -> io::Result<Self> {
        Self::from_fd(UnixListener::bind(path)?.into())
    }

    /// Listens on a TCP address.
    ///
    /// # Errors
    /// As bind(2).
    pub fn tcp(addr: SocketAddr) -> io::Result<Self> {
        Self::from_fd(TcpListener::bind(addr)?.into())
    }

    /// Takes over a listening socket, as service managers hand them in.
    ///
    /// # Errors
    /// As fcntl(2) and getsockname(2).
    pub fn from_fd(fd: OwnedFd) -> io::Result<Self> {
        set_nonblocking(&fd)?;
        let family = rustix::net::getsockname(&fd)?.address_family();
        let tcp = matches!(family, AddressFamily::INET | AddressFamily::INET6);
        Ok(Self { fd, tcp })
    }

    /// The address that a TCP socket is bound to, for instance to learn the port that the system chose.
    ///
    /// # Errors
    /// `Unsupported` for Unix sockets.
    pub fn tcp_addr(&self) -> io::Result<SocketAddr> {
        let addr = rustix::net::getsockname(&self.fd)?;
        SocketAddr::try_from(addr).map_err(|_| io::ErrorKind::Unsupported.into())
    }

    /// Waits for the next connection.
    ///
    /// # Errors
    /// As accept(2), but connections that ended before they were accepted are skipped. With `EMFILE` it is wise
    /// to wait a little before the next try.
    pub async fn accept(&self) -> io::Result<Stream> {
        loop {
            match rustix::net::accept_with(&self.fd, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(fd) => {
                    if self.tcp {
                        no_delay(&fd);
                    }
                    return Ok(Stream { fd });
                }
                Err(Errno::AGAIN) => readable(&self.fd).await?,
                Err(Errno::INTR | Errno::CONNABORTED | Errno::PROTO) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Stream {
    /// Connects to the Unix socket at `path`.
    ///
    /// # Errors
    /// As connect(2).
    pub async fn connect_unix(path: impl AsRef<Path>) -> io::Result<Self> {
        let addr = SocketAddrUnix::new(path.as_ref())?;
        let fd = new_socket(AddressFamily::UNIX)?;
        // A Unix socket connects at once or not at all; without room in the other side's queue nothing can be
        // waited for.
        while let Err(e) = rustix::net::connect(&fd, &addr) {
            match e {
                Errno::AGAIN => crate::sleep(FULL_QUEUE_PAUSE).await,
                Errno::INTR => {}
                Errno::ISCONN => break,
                e => return Err(e.into()),
            }
        }
        Ok(Self { fd })
    }

    /// Connects to a TCP address.
    ///
    /// # Errors
    /// As connect(2).
    pub async fn connect_tcp(addr: SocketAddr) -> io::Result<Self> {
        let family = if addr.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let fd = new_socket(family)?;
        match rustix::net::connect(&fd, &addr) {
            Ok(()) => {}
            Err(Errno::INPROGRESS | Errno::INTR) => {
                writable(&fd).await?;
                rustix::net::sockopt::socket_error(&fd)??;
            }
            Err(e) => return Err(e.into()),
        }
        no_delay(&fd);
        Ok(Self { fd })
    }

    /// Two connected Unix sockets.
    ///
    /// # Errors
    /// As socketpair(2).
    pub fn pair() -> io::Result<(Self, Self)> {
        let (a, b) = UnixStream::pair()?;
        Ok((Self::from_fd(a.into())?, Self::from_fd(b.into())?))
    }

    /// Takes over a connected socket.
    ///
    /// # Errors
    /// As fcntl(2).
    pub fn from_fd(fd: OwnedFd) -> io::Result<Self> {
        set_nonblocking(&fd)?;
        Ok(Self { fd })
    }

    /// Reads what there is, at least one byte; 0 when the other side has ended the stream.
    ///
    /// # Errors
    /// As recv(2).
    pub async fn read(&self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            match rustix::net::recv(&self.fd, &mut *buf, RecvFlags::empty()) {
                Ok((n, _)) => return Ok(n),
                Err(Errno::AGAIN) => readable(&self.fd).await?,
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Fills `buf`.
    ///
    /// # Errors
    /// As [`Self::read`]; `UnexpectedEof` when the stream ends before.
    pub async fn read_exact(&self, mut buf: &mut [u8]) -> io::Result<()> {
        while !buf.is_empty() {
            match self.read(buf).await? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                n => buf = &mut buf[n..],
            }
        }
        Ok(())
    }

    /// Fills the memory of `buf`.
    ///
    /// # Errors
    /// As [`Self::read_exact`].
    pub async fn read_exact_into(&self, buf: &IoVec) -> io::Result<()> {
        let mut done = 0;
        while done < buf.len() {
            let rest = if done == 0 { buf.clone() } else { buf.slice(done, buf.len() - done) };
            let (iov, n) = rest.as_iovecs();
            let n = n.min(MAX_SEGMENTS) as libc::c_int;
            // SAFETY: `rest` holds the list and keeps its memory valid through the call.
            match result_of(unsafe { libc::readv(self.fd.as_raw_fd(), iov, n) }) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => done += n,
                Err(e) => self.retry(e, readable(&self.fd)).await?,
            }
        }
        Ok(())
    }

    /// Writes all of `buf`.
    ///
    /// # Errors
    /// As send(2). A connection that the other side has closed gives `BrokenPipe`, never a signal.
    pub async fn write_all(&self, mut buf: &[u8]) -> io::Result<()> {
        while !buf.is_empty() {
            match rustix::net::send(&self.fd, buf, SendFlags::NOSIGNAL) {
                Ok(n) => buf = &buf[n..],
                Err(Errno::AGAIN) => writable(&self.fd).await?,
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    /// Writes all of `bufs`, with as few calls as possible. The slices are used up.
    ///
    /// # Errors
    /// As [`Self::write_all`].
    pub async fn write_all_vectored(&self, mut bufs: &mut [IoSlice<'_>]) -> io::Result<()> {
        IoSlice::advance_slices(&mut bufs, 0); // skips empty ones
        while !bufs.is_empty() {
            // SAFETY: `IoSlice` has the layout of `iovec` on Unix, and the slices live through the call.
            match unsafe { self.send(bufs.as_ptr().cast(), bufs.len()) } {
                Ok(n) => IoSlice::advance_slices(&mut bufs, n),
                Err(e) => self.retry(e, writable(&self.fd)).await?,
            }
        }
        Ok(())
    }

    /// Writes `head` and then the memory of `body`, with as few calls as possible.
    ///
    /// # Errors
    /// As [`Self::write_all`].
    pub async fn write_all_from(&self, head: &[u8], body: &IoVec) -> io::Result<()> {
        let total = head.len().saturating_add(body.len());
        let mut done = 0;
        while done < total {
            let sent = {
                let head = head.get(done..).unwrap_or_default();
                let skip = done.saturating_sub(total - body.len());
                let base = head.as_ptr().cast_mut().cast();
                let mut list = vec![libc::iovec { iov_base: base, iov_len: head.len() }];
                let segment = |(ptr, len): (*mut u8, usize)| libc::iovec {
                    iov_base: ptr.cast(),
                    iov_len: len,
                };
                list.extend(body.slice(skip, body.len()).raw().map(segment));
                // SAFETY: `head` and `body` are borrowed, so their memory is valid through the call.
                unsafe { self.send(list.as_ptr(), list.len()) }
            };
            match sent {
                Ok(n) => done += n,
                Err(e) => self.retry(e, writable(&self.fd)).await?,
            }
        }
        Ok(())
    }

    /// One sendmsg(2) that does not raise a signal.
    ///
    /// # Safety
    /// `iov` must point to `n` segments that are valid for reading.
    unsafe fn send(&self, iov: *const libc::iovec, n: usize) -> io::Result<usize> {
        // SAFETY: all bytes zero is a valid header: no address, no control data, no segments.
        let mut msg: libc::msghdr = unsafe { std::mem::zeroed() };
        msg.msg_iov = iov.cast_mut();
        msg.msg_iovlen = n.min(MAX_SEGMENTS) as _;
        // SAFETY: the caller vouches for the segments; the rest of the header is empty.
        result_of(unsafe { libc::sendmsg(self.fd.as_raw_fd(), &raw const msg, libc::MSG_NOSIGNAL) })
    }

    /// Awaits `ready` when `e` says that the call would block; gives other errors back.
    async fn retry(
        &self,
        e: io::Error,
        ready: impl Future<Output = io::Result<()>>,
    ) -> io::Result<()> {
        match e.kind() {
            io::ErrorKind::WouldBlock => ready.await,
            io::ErrorKind::Interrupted => Ok(()),
            _ => Err(e),
        }
    }

    /// Ends one or both directions. Whoever waits for the connection, here or on the other side, wakes up.
    ///
    /// # Errors
    /// As shutdown(2).
    pub fn shutdown(&self, how: std::net::Shutdown) -> io::Result<()> {
        let how = match how {
            std::net::Shutdown::Read => Shutdown::Read,
            std::net::Shutdown::Write => Shutdown::Write,
            std::net::Shutdown::Both => Shutdown::Both,
        };
        Ok(rustix::net::shutdown(&self.fd, how)?)
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl From<Stream> for OwnedFd {
    fn from(stream: Stream) -> Self {
        stream.fd
    }
}

fn new_socket(family: AddressFamily) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socket_with(family, SocketType::STREAM, flags, None)?)
}

fn set_nonblocking(fd: &OwnedFd) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(fd)?;
    Ok(rustix::fs::fcntl_setfl(fd, flags | OFlags::NONBLOCK)?)
}

/// Requests and replies are small and must not wait for each other.
fn no_delay(fd: &OwnedFd) {
    if let Err(e) = rustix::net::sockopt::set_tcp_nodelay(fd, true) {
        tracing::debug!("cannot set TCP_NODELAY: {e}");
    }
}

fn result_of(n: isize) -> io::Result<usize> {
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}
