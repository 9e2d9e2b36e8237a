//! How far a server's end has come, and waiting for it.
//!
//! Every session polls its waits again and again while it works, so a poll that finds nothing new costs two loads.

use bedplate_runtime::sync::{Event, Listener};
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, Ordering::SeqCst};
use std::task::{Context, Poll, Waker};

/// No new requests; those under way are finished.
pub(super) const STOP: u8 = 1;
/// Nothing is sent any more.
pub(super) const KILL: u8 = 2;

/// A level that only rises.
#[derive(Default)]
pub(super) struct Control {
    level: AtomicU8,
    raised: Event,
}

impl Control {
    pub fn raise(&self, level: u8) {
        self.level.fetch_max(level, SeqCst);
        self.raised.notify_all();
    }

    /// Waits until the level is `level` or higher.
    pub fn wait(&self, level: u8) -> Wait<'_> {
        Wait { control: self, level, asleep: None }
    }
}

pub(super) struct Wait<'a> {
    control: &'a Control,
    level: u8,
    /// The wait that has begun, and the waker it knows.
    asleep: Option<(Listener<'a>, Waker)>,
}

impl Future for Wait<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            if self.control.level.load(SeqCst) >= self.level {
                return Poll::Ready(());
            }
            if let Some((listener, waker)) = &self.asleep
                && !listener.is_notified()
                && waker.will_wake(cx.waker())
            {
                return Poll::Pending;
            }
            // A wait that begins here sees every later rise; an earlier one is seen by the check after it.
            let mut listener = self.control.raised.wait();
            if self.control.level.load(SeqCst) < self.level
                && Pin::new(&mut listener).poll(cx).is_pending()
            {
                self.asleep = Some((listener, cx.waker().clone()));
                return Poll::Pending;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::task::Wake;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, SeqCst);
        }
    }

    #[test]
    fn a_wait_for_a_higher_level_survives_a_lower_one_and_is_woken_by_its_own() {
        let control = Control::default();
        let count = Arc::new(Count::default());
        let waker = Waker::from(count.clone());
        let mut cx = Context::from_waker(&waker);
        let mut wait = control.wait(KILL);
        let mut poll = || Pin::new(&mut wait).poll(&mut cx);
        assert!(poll().is_pending() && poll().is_pending());
        control.raise(STOP);
        assert_eq!(count.0.load(SeqCst), 1);
        assert!(poll().is_pending());
        control.raise(KILL);
        assert_eq!(count.0.load(SeqCst), 2);
        assert!(poll().is_ready());
        control.raise(STOP);
        assert!(Pin::new(&mut control.wait(KILL)).poll(&mut cx).is_ready(), "it never falls");
    }

    #[test]
    fn the_latest_waker_is_the_one_that_is_woken() {
        let control = Control::default();
        let counts = [Arc::new(Count::default()), Arc::new(Count::default())];
        let mut wait = control.wait(STOP);
        for count in &counts {
            let waker = Waker::from(count.clone());
            assert!(Pin::new(&mut wait).poll(&mut Context::from_waker(&waker)).is_pending());
        }
        control.raise(STOP);
        assert_eq!(counts.map(|c| c.0.load(SeqCst)), [0, 1]);
    }
}
