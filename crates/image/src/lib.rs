//! Whole-image work: opening a disk with its backing chain, creating, describing, checking and mapping images.
//!
//! Callers: the command and the daemon. Everything here runs on a thread that has a runtime.
//!
//! Invariants: no file is opened but the one that was named, unless the operator allowed its backing and data files; a
//! format is stated or told by the file's extension, never guessed from content; what is refused is not changed.
#![forbid(unsafe_code)]

mod bitmap;
mod chain;
mod check;
mod create;
mod data_file;
mod describe;
mod encryption;
mod info;
mod map;
mod name;
mod resize;
mod snapshot;
mod state;
mod text;

pub use bedplate_qcow2::{BitmapChange, Passphrase};
pub use bitmap::{BitmapEdit, BitmapSource, change_bitmap};
pub use chain::{ChainOptions, OpenLayer, OpenedDisk, open_chain, open_null};
pub use check::{CheckOptions, CheckReport, Finding, Progress, Repair, Severity, check};
pub use create::{Backing, CreateOptions, Created, create};
pub use describe::{describe, specific_text};
pub use encryption::{EncryptInfo, NewEncryption, SlotInfo};
pub use info::{
    FormatSpecific, ImageInfo, InfoOptions, Qcow2Info, SnapshotInfo, backing_chain, info,
};
pub use map::{MapEntry, map};
pub use name::format_of;
pub use resize::{NewSize, ResizeOptions, resize};
pub use snapshot::{SnapshotChange, change_snapshots, describe_snapshots, snapshots};
pub use state::StateDir;
pub use text::human_size;
