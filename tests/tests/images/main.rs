//! Images of QEMU's making read the same through Bedplate, stay whole when Bedplate writes to them, and read the same to
//! QEMU's tools afterwards; what Bedplate can't do is refused; damaged and hostile images end in an error and nothing worse.
//!
//! All in this process: a disk over files, on a runtime. `harness` opens images, makes random requests and keeps the model of
//! what must be there; `tools` runs QEMU's side.

mod bitmaps;
mod chains;
mod compressed;
mod created;
mod damaged;
mod data_files;
mod encrypted;
mod formats;
mod harness;
mod headers;
mod hostile;
mod imago;
mod kept;
mod raw;
mod refused;
mod snapshots;
mod threads;
mod tools;
