//! A fair mutex that is waited for without blocking the thread.
//!
//! Callers: state that is changed across awaits (a refcount block being loaded, a header being rewritten).
//!
//! The value lives in a box that the guard owns while it is locked; so the guard is an ordinary owner, can move
//! between threads, and no `unsafe` is needed. Invariant: the box is in place exactly while the one permit is free
//! or on its way to the next holder.

use std::fmt;
use std::ops::{Deref, DerefMut};

use super::prim::{Mutex, lock};
use super::semaphore::{Permit, Semaphore};

/// A value that one task at a time may use, first come, first served.
pub struct AsyncMutex<T> {
    turn: Semaphore,
    // Lock order: a leaf; nothing else is taken while it is held.
    value: Mutex<Option<Box<T>>>,
}

impl<T> AsyncMutex<T> {
    /// A mutex around `value`.
    pub fn new(value: T) -> Self {
        Self { turn: Semaphore::new(1), value: Mutex::new(Some(Box::new(value))) }
    }

    /// Waits for the turn and locks.
    pub async fn lock(&self) -> AsyncMutexGuard<'_, T> {
        let permit = self.turn.acquire(1).await;
        self.guard(permit)
    }

    /// Locks if it is free and nobody waits.
    pub fn try_lock(&self) -> Option<AsyncMutexGuard<'_, T>> {
        self.turn.try_acquire(1).map(|permit| self.guard(permit))
    }

    fn guard<'a>(&'a self, permit: Permit<'a>) -> AsyncMutexGuard<'a, T> {
        let value = lock(&self.value).take();
        AsyncMutexGuard { mutex: self, value, _permit: permit }
    }
}

impl<T: Default> Default for AsyncMutex<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> fmt::Debug for AsyncMutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncMutex").field("turn", &self.turn).finish_non_exhaustive()
    }
}

/// The locked value; unlocks when it is dropped.
#[must_use = "the mutex is unlocked when the guard is dropped"]
pub struct AsyncMutexGuard<'a, T> {
    mutex: &'a AsyncMutex<T>,
    /// Always there; taken out only to be put back by `drop`.
    value: Option<Box<T>>,
    /// Dropped after `drop` has put the value back.
    _permit: Permit<'a>,
}

impl<T> Deref for AsyncMutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        match &self.value {
            Some(value) => value,
            None => unreachable!("the value is with the one permit"),
        }
    }
}

impl<T> DerefMut for AsyncMutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        match &mut self.value {
            Some(value) => value,
            None => unreachable!("the value is with the one permit"),
        }
    }
}

impl<T> Drop for AsyncMutexGuard<'_, T> {
    fn drop(&mut self) {
        *lock(&self.mutex.value) = self.value.take();
    }
}

impl<T: fmt::Debug> fmt::Debug for AsyncMutexGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.deref().fmt(f)
    }
}
