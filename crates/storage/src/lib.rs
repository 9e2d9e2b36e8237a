//! Where bytes live: files and devices.
//!
//! Callers: format engines and the disk. [`Storage`] is what they see; `sim` implements it for tests.

mod traits;

pub use traits::{Extent, IoLimits, Storage, ZeroMode};
