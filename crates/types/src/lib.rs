//! Words shared by every crate of Bedplate: addresses, lengths, errors and limits.
//!
//! Callers: all crates. Depends on nothing. Nothing here does I/O.
#![forbid(unsafe_code)]

mod addr;
mod error;
pub mod limits;
mod option;
mod stats;

pub use addr::{ByteLen, GuestOffset, GuestRange, HostOffset, HostRange};
pub use error::{Error, ErrorKind, Result, ResultExt};
pub use option::{CacheMode, Format, Preallocation, parse_size};
pub use stats::RequestStats;
