//! One thread, one io_uring, one local executor; and the locks that storage work needs.
//!
//! Callers: storage, disk engines and servers. This crate and `storage`, `virtio`, `vhost-user` are the only
//! ones that hold `unsafe` code.
//!
//! A [`Runtime`] belongs to the thread that made it. Futures stay on that thread; what other threads may do is
//! wake them, and send closures through a [`Handle`]. Where the system has no io_uring, a small pool of threads
//! does the same work with positioned reads and writes.

pub mod buf;
mod config;
mod event;
mod executor;
mod file;
pub mod fs;
mod helper;
mod inline;
mod io;
pub mod net;
mod ops;
mod pool;
mod remote;
mod ring;
mod setup;
mod spin;
pub mod sync;
mod task;
#[cfg(test)]
mod tests;
mod threads;
mod timers;

pub use config::{Backend, Config, Idle, Wait};
pub use event::{EventFd, readable, writable};
pub use executor::{Runtime, handle, spawn};
pub use file::File;
pub use io::DirectOp;
pub use remote::Handle;
pub use task::yield_now;
pub use timers::{Sleep, sleep, timeout};
