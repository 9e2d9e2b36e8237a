//! The few `std` primitives that lock-free parts are made of, in one place.
//!
//! Callers: `slice` and `journal`, always as `super::prim`. The interleaving tests compile those files a second time beside
//! their own `prim`, which offers the same names on a scheduler that tries interleavings.

pub(super) use bedplate_storage::SharedWords;
pub(super) use std::hint::spin_loop;
pub(super) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
pub(super) use std::sync::{Mutex, MutexGuard};
pub(super) use std::thread::yield_now;
