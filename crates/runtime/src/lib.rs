//! One thread, one io_uring, one local executor; and the locks that storage work needs.
//!
//! Callers: storage, disk engines and servers. This crate and `storage`, `virtio`, `vhost-user` are the only
//! ones that hold `unsafe` code.

pub mod buf;
pub mod sync;
