//! Disks for virtual machines over vhost-user: a vhost-user-blk back end, and a front end to test and measure it.
//!
//! Callers: `bedplate-server` starts exports with [`VhostUserBlk::start`]; tests and benchmarks drive any
//! vhost-user-blk back end with [`frontend`].
//!
//! A control thread speaks the protocol with one front end at a time and keeps what it said (`session`). Queue
//! threads (`worker`) own the rings: each has one runtime and any number of rings, and is told by commands to
//! start and to stop them. Invariants: a ring that was stopped has no request under way and never touches guest
//! memory again; guest memory is unmapped only after that; nothing a front end or a guest does ends the process.

mod export;
pub mod frontend;
mod handler;
mod listener;
mod ring;
mod serve;
mod session;
mod slow;
mod stats;
mod worker;

pub use export::{BlkOptions, Export, VhostUserBlk};
pub use stats::QueueStats;
