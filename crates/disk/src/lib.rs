//! The disk that a VM sees: a chain of layers, read through and written on top.
//!
//! Callers: exports (vhost-user, NBD) and whole-image work. Any number of threads use one [`Disk`] at once.
//! Hot path: [`Disk::plan`] answers without waiting and names the place in the file, and the caller does the
//! I/O; everything else goes through the async methods.
//!
//! Invariants: only the top layer is ever written; a request is checked against the disk's size before
//! anything else looks at it.
#![forbid(unsafe_code)]

mod chain;
mod disk;
mod layer;
mod map;
mod plan;
mod status;

pub use disk::{Disk, DiskLimits};
pub use layer::Layer;
pub use map::MapRun;
pub use plan::{Plan, PlanPin};
pub use status::BlockStatus;
