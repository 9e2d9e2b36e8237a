//! Listening sockets: a Unix socket whose path a dead server left behind is taken over, a live one's is not.
//!
//! Caller: the server. The path is removed again only while it still names the socket that was made here.

use crate::addr::NbdAddr;
use bedplate_runtime::net::Listener;
use bedplate_types::{Error, Result, ResultExt};
use std::fs;
use std::io;
use std::net::TcpListener;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A listening socket and the address it is reached at.
pub(crate) struct Bound {
    pub listener: Listener,
    pub addr: NbdAddr,
    pub path: Option<SocketPath>,
}

/// Binds `addr`.
///
/// # Errors
/// When the address is in use, not to be had, or a name does not resolve.
pub(crate) fn bind(addr: &NbdAddr) -> Result<Bound> {
    let failed = || format!("cannot listen for NBD clients on {addr}");
    match addr {
        NbdAddr::Unix(path) => {
            let socket = bind_unix(path).context(failed)?;
            let listener = Listener::from_fd(socket.into()).context(failed)?;
            let path = SocketPath::new(path).context(failed)?;
            Ok(Bound { listener, addr: addr.clone(), path: Some(path) })
        }
        NbdAddr::Tcp { host, port } => {
            let socket = TcpListener::bind((host.as_str(), *port)).context(failed)?;
            let port = socket.local_addr().context(failed)?.port();
            let listener = Listener::from_fd(socket.into()).context(failed)?;
            let addr = NbdAddr::Tcp { host: host.clone(), port };
            Ok(Bound { listener, addr, path: None })
        }
    }
}

fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    match UnixListener::bind(path) {
        Err(e) if e.kind() == io::ErrorKind::AddrInUse => {}
        other => return other,
    }
    if !fs::symlink_metadata(path)?.file_type().is_socket() {
        return Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "a file that is no socket has this name; remove it or choose another",
        ));
    }
    if !becomes_dead(path) {
        return Err(io::Error::new(
            io::ErrorKind::AddrInUse,
            "another server listens there; stop it or choose another path",
        ));
    }
    tracing::info!("taking over the socket '{}' of a dead server", path.display());
    fs::remove_file(path)?;
    UnixListener::bind(path)
}

/// Whether nobody listens at the socket. The ring of a server that was killed keeps its sockets open for a moment, so
/// that one can still connect to them: who comes right after that, as service managers do, waits for it.
fn becomes_dead(path: &Path) -> bool {
    let mut pause = Duration::from_millis(10);
    loop {
        match UnixStream::connect(path) {
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => return true,
            Ok(_) if pause < Duration::from_secs(1) => std::thread::sleep(pause),
            _ => return false,
        }
        pause *= 2;
    }
}

/// The path of a socket; removed when dropped.
pub(crate) struct SocketPath {
    path: PathBuf,
    id: (u64, u64),
}

impl SocketPath {
    fn new(path: &Path) -> io::Result<Self> {
        let path = std::path::absolute(path)?;
        let m = fs::symlink_metadata(&path)?;
        Ok(Self { path, id: (m.dev(), m.ino()) })
    }
}

impl Drop for SocketPath {
    fn drop(&mut self) {
        let ours = fs::symlink_metadata(&self.path).is_ok_and(|m| (m.dev(), m.ino()) == self.id);
        if ours && let Err(e) = fs::remove_file(&self.path) {
            let e = Error::io(format!("cannot remove the socket '{}'", self.path.display()), e);
            tracing::warn!("{e:#}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bedplate_types::ErrorKind;

    #[test]
    fn a_dead_servers_socket_is_taken_over_and_a_live_ones_is_not() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("s");
        let addr = NbdAddr::Unix(path.clone());
        drop(UnixListener::bind(&path).expect("bound"));
        let bound = bind(&addr).expect("taken over");
        assert!(bind(&addr).is_err(), "a live server's");
        assert!(path.exists());
        drop(bound);
        assert!(!path.exists(), "removed at the end");

        fs::write(&path, b"data").expect("written");
        assert!(bind(&addr).is_err(), "a plain file");
        assert_eq!(fs::read(&path).expect("still there"), b"data");
    }

    #[test]
    fn only_the_own_socket_is_removed() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("s");
        let first = bind(&NbdAddr::Unix(path.clone())).expect("bound");
        fs::rename(&path, dir.path().join("old")).expect("moved");
        let _second = UnixListener::bind(&path).expect("bound");
        drop(first);
        assert!(path.exists());
    }

    #[test]
    fn the_system_chooses_a_port_for_port_zero() {
        let any = NbdAddr::Tcp { host: "127.0.0.1".into(), port: 0 };
        let a = bind(&any).expect("bound");
        assert!(matches!(a.addr, NbdAddr::Tcp { port, .. } if port != 0));
        let e = bind(&a.addr).err().expect("in use");
        assert_eq!(e.kind(), ErrorKind::Io);
    }
}
