//! Where bytes live: files and devices.
//!
//! Callers: format engines and the disk. [`Storage`] is what they see; `sim` implements it for tests.
//! [`FileStorage`] is the real one. [`StateFile`] is memory that outlives the process.

pub mod bare;
mod file;
mod holder;
mod lock;
mod open;
mod prepare;
mod probe;
mod state;
mod state_folder;
mod sys;
mod traits;

pub use file::FileStorage;
pub use lock::LockMode;
pub use open::OpenOptions;
pub use prepare::take_space;
pub use state::{SharedWords, StateFile};
pub use state_folder::SharedPlace;
pub use traits::{DirectPin, Extent, IoLimits, SegmentBits, Storage, ZeroMode};
