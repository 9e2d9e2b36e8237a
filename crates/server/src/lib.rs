//! The disks and exports of one daemon: it opens a disk, offers it over NBD and vhost-user-blk, looks after it, and
//! stops without losing anything.
//!
//! Caller: the command. The disk's own work (maintenance, closing) runs on the thread that calls [`Daemon::run`];
//! exports have threads of their own.
//!
//! Invariant: the disk is closed only after all exports have ended, so nothing is written behind a clean image.
#![forbid(unsafe_code)]

mod counted;
mod daemon;
mod export;
mod signals;

pub use daemon::{Daemon, Stopped};
pub use export::ExportKind;
pub use signals::Signals;

pub use bedplate_nbd::{NbdAddr, NbdOptions};
pub use bedplate_vhost_user::BlkOptions;
