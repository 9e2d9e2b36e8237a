//! Holding requests, for tests of what happens while one is under way: `break`, `wait_break`, `resume`, `remove_break`.

use bedplate_runtime::sync::Event;
use std::cell::RefCell;

/// Where a request can be held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// Before a read.
    Read,
    /// Before a write of data.
    Write,
    /// Before a flush.
    Flush,
}

impl Point {
    /// The point that scripts call by this name.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "read_aio" => Some(Self::Read),
            "write_aio" => Some(Self::Write),
            "flush_to_disk" => Some(Self::Flush),
            _ => None,
        }
    }
}

/// Points at which the next request is to be held, and requests that are.
#[derive(Default)]
pub struct Holds {
    state: RefCell<State>,
    changed: Event,
}

#[derive(Default)]
struct State {
    set: Vec<(Point, String)>,
    held: Vec<(u64, String)>,
    next: u64,
}

impl Holds {
    /// Holds the next request that comes to `point`, under the name `tag`.
    pub fn set(&self, point: Point, tag: &str) {
        self.state.borrow_mut().set.push((point, tag.to_owned()));
    }

    /// Lets the requests held as `tag` go on; false when there is none.
    pub fn resume(&self, tag: &str) -> bool {
        let mut state = self.state.borrow_mut();
        let before = state.held.len();
        state.held.retain(|(_, t)| t != tag);
        let any = state.held.len() < before;
        drop(state);
        self.changed.notify_all();
        any
    }

    /// Takes back what was set as `tag`, and lets what it holds go on; false when there is neither.
    pub fn remove(&self, tag: &str) -> bool {
        let mut state = self.state.borrow_mut();
        let before = state.set.len();
        state.set.retain(|(_, t)| t != tag);
        let any = state.set.len() < before;
        drop(state);
        self.resume(tag) || any
    }

    /// Waits until a request is held as `tag`.
    pub async fn wait(&self, tag: &str) {
        loop {
            let changed = self.changed.wait();
            if self.state.borrow().held.iter().any(|(_, t)| t == tag) {
                return;
            }
            changed.await;
        }
    }

    /// A request comes to `point`: returns when it may go on.
    pub async fn pass(&self, point: Point) {
        let id = {
            let mut state = self.state.borrow_mut();
            let Some(at) = state.set.iter().position(|(p, _)| *p == point) else { return };
            let (_, tag) = state.set.remove(at);
            state.next += 1;
            let id = state.next;
            state.held.push((id, tag));
            id
        };
        self.changed.notify_all();
        loop {
            let changed = self.changed.wait();
            if !self.state.borrow().held.iter().any(|(i, _)| *i == id) {
                return;
            }
            changed.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn a_request_is_held_once_and_only_at_its_point() {
        let holds = Holds::default();
        holds.set(Point::Write, "A");
        assert!(holds.pass(Point::Read).now_or_never().is_some());
        let mut held = Box::pin(holds.pass(Point::Write));
        assert!(held.as_mut().now_or_never().is_none());
        assert!(holds.wait("A").now_or_never().is_some());
        assert!(holds.pass(Point::Write).now_or_never().is_some(), "one is held, not all");
        assert!(!holds.resume("B") && held.as_mut().now_or_never().is_none());
        assert!(holds.resume("A") && held.now_or_never().is_some());
    }

    #[test]
    fn a_removed_break_holds_nothing() {
        let holds = Holds::default();
        holds.set(Point::Flush, "A");
        assert!(holds.remove("A") && !holds.remove("A"));
        assert!(holds.pass(Point::Flush).now_or_never().is_some());
        assert!(holds.wait("A").now_or_never().is_none());
    }
}
