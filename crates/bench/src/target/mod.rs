//! What can be loaded: files and devices, exports over vhost-user-blk and NBD.
//!
//! Callers: [`crate::run()`] and the command, which reads a [`Target`] from its arguments.

pub(crate) mod file;
#[cfg(test)]
pub(crate) mod memory;
pub(crate) mod nbd;
pub(crate) mod vhost;

use bedplate_types::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;

/// How a file or device is read and written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Engine {
    /// io_uring: one ring a thread, as fast as it can simply be driven.
    #[default]
    IoUring,
    /// `pread` and `pwrite`: one request at a time a thread.
    Psync,
}

/// What is loaded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum Target {
    /// A file or block device.
    File {
        /// Its path.
        path: PathBuf,
        /// How it is read and written.
        engine: Engine,
        /// Past the page cache (`O_DIRECT`).
        direct: bool,
    },
    /// A back end that serves a disk to virtual machines.
    VhostUserBlk {
        /// Its socket.
        socket: PathBuf,
        /// Microseconds that a thread looks for completions before it sleeps; for ever when not set. One that never sleeps takes
        /// the core that the server may need.
        spin_us: Option<u64>,
    },
    /// An NBD server.
    Nbd {
        /// Its address, as `unix:PATH`, `tcp:HOST:PORT` or a URI without the export.
        address: String,
        /// The name of the export; empty: the first.
        export: String,
    },
}

/// How long a front end looks for completions before it sleeps.
const SPIN_US: u64 = 10;

impl Target {
    /// Reads `vhost-user-blk:SOCKET`, `nbd:ADDRESS`, an NBD URI (`nbd://HOST:PORT/EXPORT`,
    /// `nbd+unix:///EXPORT?socket=PATH`), or the path of a file or device.
    ///
    /// # Errors
    /// `InvalidInput` for an address that is none.
    pub fn parse(text: &str) -> Result<Self> {
        if let Some(socket) = text.strip_prefix("vhost-user-blk:") {
            let socket = PathBuf::from(socket);
            return Ok(Self::VhostUserBlk { socket, spin_us: Some(SPIN_US) });
        }
        if text.starts_with("nbd") && text.contains(':') {
            return nbd::parse(text);
        }
        if text.is_empty() {
            return Err(Error::new(ErrorKind::InvalidInput, "a target needs a name"));
        }
        Ok(Self::File { path: text.into(), engine: Engine::default(), direct: true })
    }

    /// The name by which permission to overwrite it must be given: the path of the file, device or socket; the address of a server
    /// on a port.
    pub fn name(&self) -> String {
        match self {
            Self::File { path, .. } => path.display().to_string(),
            Self::VhostUserBlk { socket, .. } => socket.display().to_string(),
            Self::Nbd { address, .. } => {
                address.strip_prefix("unix:").unwrap_or(address).to_owned()
            }
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { path, engine, direct } => {
                let engine = match engine {
                    Engine::IoUring => "io_uring",
                    Engine::Psync => "psync",
                };
                let cache = if *direct { "direct" } else { "buffered" };
                write!(f, "{} ({engine}, {cache})", path.display())
            }
            Self::VhostUserBlk { socket, .. } => write!(f, "vhost-user-blk:{}", socket.display()),
            Self::Nbd { address, export } if export.is_empty() => write!(f, "NBD {address}"),
            Self::Nbd { address, export } => write!(f, "NBD {address}, export {export}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_told_by_their_spelling() {
        let file = Target::parse("/dev/zram1").expect("a path");
        assert!(matches!(&file, Target::File { direct: true, .. }) && file.name() == "/dev/zram1");
        let blk = Target::parse("vhost-user-blk:/run/a.sock").expect("a socket");
        assert_eq!(blk.name(), "/run/a.sock");
        let nbd = Target::parse("nbd:unix:/run/n").expect("an address");
        assert_eq!(nbd.name(), "/run/n");
        let uri = Target::parse("nbd+unix:///disk%31?socket=/run/n%20m").expect("a URI");
        let wanted = Target::Nbd { address: "unix:/run/n m".into(), export: "disk1".into() };
        assert_eq!(uri, wanted);
        let tcp = Target::parse("nbd://localhost/x").expect("a URI");
        let wanted = Target::Nbd { address: "tcp:localhost:10809".into(), export: "x".into() };
        assert_eq!(tcp, wanted);
        assert!(Target::parse("").is_err() && Target::parse("nbd:").is_err());
    }
}
