//! Loads for measuring: the same random pattern on a bare file or device through io_uring, and through vhost-user-blk without a VM.
//!
//! Callers: the program `bedplate-load`, which `cargo xtask bench` runs in the release profile.
//!
//! Invariants: every driver of the same [`Job`] and seed asks for the same blocks in the same order; buffers hold random bytes, so
//! that a compressing device under the file does not flatter anyone.
//!
//! `unsafe` is used in [`native`] alone: the yardstick is plain io_uring, written apart from Bedplate's own runtime on purpose.

pub mod front;
pub mod job;
pub mod native;

pub use job::{Job, Op, Outcome};
