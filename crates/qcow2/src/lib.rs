//! The qcow2 engine: mapping, allocation, ordered metadata, on any storage.
//!
//! Callers: `disk` (requests of guests) and `image` (whole-image work). `format` parses and encodes bytes; the
//! engine around it owns an open image, [`Qcow2`], which any number of threads use at once. It makes no system
//! calls itself. `check` verifies an image without opening it. `docs/on-disk-order.md` says in which order
//! metadata is written and why no crash corrupts it; `docs/locks.md` lists the locks.
#![forbid(unsafe_code)]

mod below;
mod bitmaps;
mod cache;
pub mod check;
mod commit;
mod cow;
mod crypt;
mod data;
mod data_file;
mod discard;
mod faults;
pub mod format;
mod gate;
mod generation;
mod header;
mod image;
mod journal;
#[cfg(test)]
mod journal_tests;
mod mapping;
mod open;
mod pack;
mod prim;
mod read;
mod resize;
mod slice;
#[cfg(test)]
mod slice_tests;
mod snapshots;
mod space;
mod tables;
mod takeup;
mod vm_state;
mod write;
mod writeback;

pub use below::{Below, Nothing};
pub use bitmaps::{BitmapChange, BitmapView};
pub use crypt::{Passphrase, new_luks_area, read_luks_header};
pub use faults::{OrderFaults, OrderRule};
pub use image::Qcow2;
pub use journal::{JOURNAL_WORDS, JournalOwner, JournalStart, holds_changes};
pub use mapping::{CompressedCluster, Mapping, Run};
pub use open::{OpenOptions, read_header, read_snapshots};
pub use pack::PackedCluster;
pub use snapshots::{NewSnapshot, SnapshotRef};
