//! Simulated storage for tests: delays, reordering, faults, power cuts, and a deterministic executor.
//!
//! Callers: tests of every engine that stands on [`bedplate_storage::Storage`]. One seed decides everything, so
//! a failure is repeated by repeating its seed.
//!
//! - [`SimStorage`] is the storage. Its contents are an [`Image`], whose clones share their pages.
//! - [`Fault`] makes chosen requests fail; [`SimStorage::hold`] stops chosen requests until they are let go.
//! - [`CrashPoint`] lists what could be on the medium if the power failed now; [`History`] and [`Replay`] go
//!   back to every moment of a run.
//! - [`exec`] runs futures in an order that a seed chooses and notices deadlocks.
#![forbid(unsafe_code)]

mod crash;
pub mod exec;
mod fault;
mod files;
mod hold;
mod image;
mod ledger;
mod rng;
mod storage;

pub use crash::{CrashPoint, CrashState, CrashStates};
pub use fault::{Counts, Fault, OpKind};
pub use hold::Hold;
pub use image::Image;
pub use ledger::{Change, Event, History, OpId, Replay};
pub use rng::Rng;
pub use storage::{DiscardMode, SimOptions, SimStorage};

/// The unit in which a power cut tears writes, in bytes.
pub const SECTOR: u64 = 512;
