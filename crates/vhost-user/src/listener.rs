//! The socket on which front ends are awaited.
//!
//! A socket file that a dead process left behind is replaced; one on which somebody listens, or a file that is
//! no socket, is left alone and the export refused.

use bedplate_types::{Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// A listening socket whose file disappears with it.
pub(crate) struct Listener {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode of the socket file, so that only this very file is removed.
    file: Option<(u64, u64)>,
}

fn bind(path: &Path) -> io::Result<UnixListener> {
    let listener = UnixListener::bind(path)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// True when a process listens on the socket file.
fn is_alive(path: &Path) -> io::Result<bool> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
        // EAGAIN: its queue of connections is full, so it listens.
        Ok(()) | Err(rustix::io::Errno::AGAIN) => Ok(true),
        Err(rustix::io::Errno::CONNREFUSED | rustix::io::Errno::NOENT) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

fn bind_or_replace(path: &Path) -> Result<UnixListener> {
    let failed = |e| Error::io(format!("cannot listen on '{}'", path.display()), e);
    match bind(path) {
        Err(e) if e.kind() == io::ErrorKind::AddrInUse => {}
        other => return other.map_err(failed),
    }
    let taken = |why: &str| {
        let text = format!("cannot listen on '{}': {why}", path.display());
        Error::new(ErrorKind::Locked, text)
    };
    let meta = std::fs::symlink_metadata(path).map_err(failed)?;
    if !meta.file_type().is_socket() {
        return Err(taken("a file of that name exists and is no socket"));
    }
    if is_alive(path).map_err(failed)? {
        return Err(taken("another process listens there"));
    }
    std::fs::remove_file(path).map_err(failed)?;
    bind(path).map_err(failed)
}

impl Listener {
    /// Listens on `path`.
    pub(crate) fn new(path: &Path) -> Result<Self> {
        let listener = bind_or_replace(path)?;
        let file = std::fs::symlink_metadata(path).ok().map(|m| (m.dev(), m.ino()));
        Ok(Self { listener, path: path.to_owned(), file })
    }

    /// The next front end, or None when `stop` became readable.
    pub(crate) fn accept(&self, stop: &OwnedFd) -> io::Result<Option<UnixStream>> {
        loop {
            let mut fds = [
                PollFd::from_borrowed_fd(stop.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.listener.as_fd(), PollFlags::IN),
            ];
            match poll(&mut fds, None) {
                Err(rustix::io::Errno::INTR) => continue,
                other => other?,
            };
            if !fds[0].revents().is_empty() {
                return Ok(None);
            }
            match self.listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false)?;
                    return Ok(Some(stream));
                }
                // It has gone again, or there is nothing after all.
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(e) => return Err(e),
            }
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let now = std::fs::symlink_metadata(&self.path).ok().map(|m| (m.dev(), m.ino()));
        if now.is_some() && now == self.file {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sockets_that_nobody_listens_on_are_replaced() {
        let dir = tempfile::tempdir().expect("directory");
        let path = dir.path().join("s");
        let first = Listener::new(&path).expect("fresh");
        assert_eq!(Listener::new(&path).map(drop).unwrap_err().kind(), ErrorKind::Locked);
        drop(first);
        assert!(!path.exists());
        drop(UnixListener::bind(&path).expect("bind"));
        assert!(path.exists(), "a dead process leaves its file");
        drop(Listener::new(&path).expect("replaced"));
        std::fs::write(&path, "data").expect("write");
        assert_eq!(Listener::new(&path).map(drop).unwrap_err().kind(), ErrorKind::Locked);
        assert_eq!(std::fs::read(&path).expect("read"), b"data");
    }

    #[test]
    fn a_file_that_took_the_sockets_place_is_not_removed() {
        let dir = tempfile::tempdir().expect("directory");
        let path = dir.path().join("s");
        let listener = Listener::new(&path).expect("fresh");
        std::fs::remove_file(&path).expect("remove");
        std::fs::write(&path, "other").expect("write");
        drop(listener);
        assert!(path.exists());
    }
}
