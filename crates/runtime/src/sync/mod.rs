//! Locks for storage work: they wait without blocking a thread and work across threads and executors.
//!
//! Callers: storage and the disk engines. Everything here is `std` and wakers: no executor, no `unsafe`.
//!
//! Rules that every primitive keeps:
//! - the inner `std` mutex is held for a few instructions only, never while a waker is woken or dropped
//!   (either may run foreign code, which may come back here);
//! - waiters are served first come, first served; a waiting future that is dropped leaves the queue, and those
//!   behind it move up;
//! - a call takes its place in the queue when its future is first polled ([`Event::wait`]: when it is called).
//!
//! How the locks may be combined is written down in `docs/locks.md`.

#![forbid(unsafe_code)]

mod epochs;
mod event;
mod flush;
mod mutex;
mod prim;
mod range;
mod semaphore;

#[cfg(test)]
mod tests;

pub use epochs::{Epochs, Grace, Pin, PinGuard};
pub use event::{Event, Listener};
pub use flush::FlushSequencer;
pub use mutex::{AsyncMutex, AsyncMutexGuard};
pub use range::{RangeGuard, RangeLock};
pub use semaphore::{Permit, Semaphore};
