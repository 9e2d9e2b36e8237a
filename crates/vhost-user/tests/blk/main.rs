//! The back end against the front end of this crate: requests, bad chains, protocol, loads.

mod bad;
mod inflight;
mod loads;
mod protocol;
mod requests;
mod rig;
