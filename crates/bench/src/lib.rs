//! The load engine: workloads on disks, and what came out of them.
//!
//! Callers: the command `bedplate bench`, and through it `cargo xtask bench`.
//!
//! A [`Job`] says what is asked for, a [`Target`] of whom, [`run()`] does it and gives a [`Run`] with its [`Outcome`]. All of these
//! are data that can be written to JSON and read back. A target is whatever gives each thread a [`Port`]; the same loop drives all
//! of them with the same requests, so that their outcomes can be compared.
//!
//! Invariants: nothing is written to what was not named for it ([`permit()`]); latency counts from the moment a request should have
//! been sent; the bytes written do not compress.
#![forbid(unsafe_code)]

mod content;
mod counters;
mod drive;
#[cfg(test)]
mod drive_tests;
mod environment;
mod fio;
mod job;
mod outcome;
mod permit;
mod plan;
mod port;
mod random;
mod record;
mod run;
mod table;
mod target;

pub use content::{Fault, Finding, Verified};
pub use counters::DeviceUse;
pub use environment::{Environment, Place};
pub use fio::{FioJobs, read_fio};
pub use job::{
    Arrival, Extent, FlushEvery, Job, MAX_BLOCK, MAX_DEPTH, MAX_THREADS, Mix, Op, Pattern, SECTOR,
    Share, SizeShare, Sizes, Verify,
};
pub use outcome::{
    CpuTime, Latency, OpOutcome, Outcome, Report, Run, Schedule, Slice, TimeLine, VERSION,
};
pub use permit::{Permit, permit};
pub use plan::Step;
pub use port::{Done, Port, Status};
pub use run::{Options, run, run_together};
pub use table::text;
pub use target::{Engine, Target};
