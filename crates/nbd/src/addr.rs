//! Where a server listens: a Unix socket or a TCP port, and the ways people write it.
//!
//! Callers: the server, the client, and whoever reads an address from an operator.

use bedplate_types::{Error, ErrorKind, Result};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// The port registered for NBD.
pub const DEFAULT_PORT: u16 = 10809;

/// The address of an NBD server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NbdAddr {
    /// A Unix socket's path.
    Unix(PathBuf),
    /// A TCP port.
    Tcp {
        /// A name, or an IPv4 or IPv6 address without brackets.
        host: String,
        /// The port; 0 lets the system choose one when listening.
        port: u16,
    },
}

impl NbdAddr {
    /// The URI that QEMU and libnbd take for the export `name`; the empty name is the first export.
    pub fn uri(&self, name: &str) -> String {
        let name = percent(name.as_bytes(), b"");
        match self {
            Self::Unix(path) => {
                let path = percent(path.as_os_str().as_encoded_bytes(), b"/");
                format!("nbd+unix:///{name}?socket={path}")
            }
            Self::Tcp { host, port } if host.contains(':') => {
                format!("nbd://[{host}]:{port}/{name}")
            }
            Self::Tcp { host, port } => format!("nbd://{host}:{port}/{name}"),
        }
    }
}

/// Percent-encodes all but unreserved characters and those in `keep`.
fn percent(bytes: &[u8], keep: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len());
    for &b in bytes {
        if b.is_ascii_alphanumeric() || b"-._~".contains(&b) || keep.contains(&b) {
            out.push(char::from(b));
        } else {
            out.push_str(&format!("%{b:02X}"));
        }
    }
    out
}

impl fmt::Display for NbdAddr {
    /// The URI of the first export.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.uri("").trim_end_matches('/'))
    }
}

impl FromStr for NbdAddr {
    type Err = Error;

    /// Reads `unix:PATH`, a path with a slash in it, `tcp:HOST:PORT`, `HOST:PORT`, `:PORT` (on 127.0.0.1),
    /// `nbd://HOST[:PORT]` or `nbd+unix:///?socket=PATH`.
    fn from_str(s: &str) -> Result<Self> {
        let bad = || {
            let text = format!(
                "'{s}' is no NBD address: write unix:PATH, tcp:HOST:PORT, nbd://HOST:PORT or nbd+unix:///?socket=PATH"
            );
            Error::new(ErrorKind::InvalidInput, text)
        };
        let unix = |path: &str| match path {
            "" => Err(bad()),
            path => Ok(Self::Unix(path.into())),
        };
        if let Some(path) = s.strip_prefix("unix:").or(s.strip_prefix("nbd+unix:///?socket=")) {
            return unix(path);
        }
        let uri = s.strip_prefix("nbd://").map(|rest| rest.trim_end_matches('/'));
        let tcp = uri.or(s.strip_prefix("tcp:"));
        let Some(rest) = tcp.or_else(|| (!s.contains('/')).then_some(s)) else {
            return unix(s);
        };
        let (host, port) = match rest.rsplit_once(':') {
            // A colon inside brackets belongs to the address.
            Some((host, port)) if !port.contains(']') => (host, port.parse().map_err(|_| bad())?),
            _ if uri.is_some() => (rest, DEFAULT_PORT),
            _ => return Err(bad()),
        };
        let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
        if host.contains(['/', '[', ']']) || (host.is_empty() && uri.is_some()) {
            return Err(bad());
        }
        let host = if host.is_empty() { "127.0.0.1" } else { host };
        Ok(Self::Tcp { host: host.into(), port })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp(host: &str, port: u16) -> NbdAddr {
        NbdAddr::Tcp { host: host.into(), port }
    }

    #[test]
    fn addresses_are_read_in_every_spelling() {
        let ok = |s: &str| s.parse::<NbdAddr>().unwrap_or_else(|e| panic!("{s}: {e}"));
        for s in ["unix:/run/a", "/run/a", "nbd+unix:///?socket=/run/a"] {
            assert_eq!(ok(s), NbdAddr::Unix("/run/a".into()));
        }
        assert_eq!(ok("unix:a"), NbdAddr::Unix("a".into()));
        assert_eq!(ok("tcp:h:1"), tcp("h", 1));
        assert_eq!(ok("127.0.0.1:0"), tcp("127.0.0.1", 0));
        assert_eq!(ok(":10809"), tcp("127.0.0.1", 10809));
        assert_eq!(ok("[::1]:77"), tcp("::1", 77));
        assert_eq!(ok("nbd://h"), tcp("h", DEFAULT_PORT));
        assert_eq!(ok("nbd://[::1]/"), tcp("::1", DEFAULT_PORT));
        for s in ["", "a", "unix:", "h:port", "h:65536", "nbd://", "tcp:h", "nbd://a/b:1"] {
            assert!(s.parse::<NbdAddr>().is_err(), "{s}");
        }
    }

    #[test]
    fn uris_are_what_other_programs_read() {
        let unix = NbdAddr::Unix("/run/a b".into());
        assert_eq!(unix.uri("disk?"), "nbd+unix:///disk%3F?socket=/run/a%20b");
        assert_eq!(unix.to_string(), "nbd+unix:///?socket=/run/a%20b");
        assert_eq!(tcp("::1", 5).uri("x"), "nbd://[::1]:5/x");
        assert_eq!(tcp("h", 5).to_string(), "nbd://h:5");
    }
}
