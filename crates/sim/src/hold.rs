//! Requests that are stopped until a test lets them go.

use crate::{OpKind, SimStorage};
use std::ops::Range;
use std::task::Waker;

/// Which requests are stopped, and who waits.
pub(crate) struct HoldRule {
    pub(crate) id: u64,
    pub(crate) kind: Option<OpKind>,
    pub(crate) range: Range<u64>,
    pub(crate) caught: usize,
    pub(crate) wakers: Vec<Waker>,
}

impl SimStorage {
    /// Stops requests of `kind` (or any) that touch `range` and start from here on, until the hold is dropped.
    pub fn hold(&self, kind: Option<OpKind>, range: Range<u64>) -> Hold {
        let mut state = self.lock();
        let id = state.new_id();
        state.holds.push(HoldRule { id, kind, range, caught: 0, wakers: Vec::new() });
        drop(state);
        Hold { storage: self.clone(), id }
    }
}

/// Keeps chosen requests from going on; dropping it lets them go.
pub struct Hold {
    storage: SimStorage,
    id: u64,
}

impl Hold {
    /// How many requests this has caught so far.
    pub fn caught(&self) -> usize {
        let state = self.storage.lock();
        state.holds.iter().find(|h| h.id == self.id).map_or(0, |h| h.caught)
    }

    /// Lets the requests go on.
    pub fn release(self) {}
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut state = self.storage.lock();
        let mut wakers = Vec::new();
        state.holds.retain_mut(|h| {
            if h.id == self.id {
                wakers.append(&mut h.wakers);
            }
            h.id != self.id
        });
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
    }
}
