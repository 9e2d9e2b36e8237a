//! What the tests across crates, the demo and the benchmark share: where things lie, how the tools of the host are run,
//! servers of disks (Bedplate and its peer), and real Linux guests in QEMU.
//!
//! Callers: `tests/tests/*.rs` and `xtask`. The library holds no engine code, so that `cargo xtask` builds quickly; it only ever
//! talks to Bedplate as a user does, through the `bedplate` command and its sockets.
//!
//! Invariants: every process started here is owned by a value and ended when that value is dropped, by its own process id; a
//! test that can't run here says so through [`skip()`] and never passes silently.

#![forbid(unsafe_code)]

pub mod fixture;
pub mod guest;
pub mod host;
pub mod paths;
pub mod random;
pub mod server;
mod skip;

pub use skip::{has_or_skip, skip};
