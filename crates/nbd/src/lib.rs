//! Serves disks over the network block device protocol, and speaks it as a client for tests.
//!
//! Callers: the daemon and the command (`serve --nbd`). Knows disks, not formats.
//!
//! Written from the public protocol document. What is spoken: fixed newstyle with EXPORT_NAME, ABORT, LIST, INFO, GO,
//! STRUCTURED_REPLY, LIST_META_CONTEXT and SET_META_CONTEXT (`base:allocation`); READ, WRITE, DISC, FLUSH, TRIM,
//! CACHE, WRITE_ZEROES and BLOCK_STATUS with all of their flags; several connections to one disk. Not spoken: TLS
//! (refused by policy), extended headers and old style (unknown). There is no authentication: who reaches the socket
//! may use the disk, so a TCP socket belongs on a trusted network or on the loopback address.
#![forbid(unsafe_code)]

pub mod addr;
mod bitmap;
pub mod client;
pub mod device;
mod disk;
mod listen;
pub mod negotiate;
pub mod pipe;
mod pool;
pub mod proto;
#[cfg(test)]
mod ram;
mod reply;
mod request;
pub mod server;
pub mod stream;
pub mod transmission;

pub use addr::NbdAddr;
pub use bitmap::{DirtyMap, MAX_BITMAPS, NamedBitmap};
pub use server::{NbdExport, NbdOptions, NbdServer};
