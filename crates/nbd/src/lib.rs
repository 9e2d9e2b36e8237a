//! Serves disks over the network block device protocol, and speaks it as a client for tests.
//!
//! Callers: the daemon and the command (`serve --nbd`). Knows disks, not formats.
#![forbid(unsafe_code)]

pub mod addr;
pub mod client;
pub mod device;
mod listen;
pub mod negotiate;
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
pub use server::{NbdExport, NbdOptions, NbdServer};
