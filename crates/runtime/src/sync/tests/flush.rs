//! The flush sequencer, step by step.

use std::cell::Cell;

use bedplate_types::{Error, ErrorKind, Result};

use super::super::{Event, FlushSequencer};
use super::Task;

/// Work that ends when the test says so.
#[derive(Default)]
struct Device {
    started: Cell<u32>,
    done: Event,
}

impl Device {
    async fn flush(&self) -> Result<()> {
        self.started.set(self.started.get() + 1);
        self.done.wait().await;
        Ok(())
    }

    fn call<'a>(&'a self, flushes: &'a FlushSequencer) -> Task<'a, Result<()>> {
        Task::new(flushes.run(|| self.flush()))
    }
}

#[test]
fn calls_during_a_run_share_the_next_one() {
    let (flushes, device) = (FlushSequencer::new(), Device::default());
    let mut first = device.call(&flushes);
    assert!(first.poll().is_none());
    let mut later: Vec<_> = (0..5).map(|_| device.call(&flushes)).collect();
    assert!(later.iter_mut().all(|call| call.poll().is_none()));
    device.done.notify_all();
    assert!(first.poll_if_woken().is_some());
    // The run that was going on answers nobody who came later; exactly one of them leads.
    assert!(later.iter_mut().all(|call| call.poll_if_woken().is_none()));
    assert_eq!(device.started.get(), 2);
    device.done.notify_all();
    // The leader first, since it answers the others.
    for _ in 0..2 {
        later.retain_mut(|call| call.poll_if_woken().is_none());
    }
    assert!(later.is_empty());
    assert_eq!((device.started.get(), flushes.runs()), (2, 2));
}

#[test]
fn a_dropped_leader_passes_the_lead_on() {
    let (flushes, device) = (FlushSequencer::new(), Device::default());
    let (mut first, mut second) = (device.call(&flushes), device.call(&flushes));
    assert!(first.poll().is_none() && second.poll().is_none());
    drop(first);
    assert!(second.poll_if_woken().is_none());
    assert_eq!(device.started.get(), 2, "the abandoned run counts for nobody");
    device.done.notify_all();
    assert!(second.poll_if_woken().is_some());
}

#[test]
fn the_chosen_next_leader_may_be_dropped_before_it_is_polled() {
    let (flushes, device) = (FlushSequencer::new(), Device::default());
    let mut calls: Vec<_> = (0..3).map(|_| device.call(&flushes)).collect();
    assert!(calls.iter_mut().all(|call| call.poll().is_none()));
    drop(calls.remove(0));
    assert!(calls[0].woken() && !calls[1].woken());
    drop(calls.remove(0));
    assert!(calls[0].poll_if_woken().is_none());
    assert_eq!(device.started.get(), 2);
    device.done.notify_all();
    assert!(calls[0].poll_if_woken().is_some());
}

#[test]
fn an_error_goes_to_all_who_shared_the_run_and_to_nobody_else() {
    let (flushes, device) = (FlushSequencer::new(), Device::default());
    let failing = || async {
        device.flush().await?;
        Err(Error::new(ErrorKind::Io, "the sync failed"))
    };
    let mut first = device.call(&flushes);
    assert!(first.poll().is_none());
    let mut sharing: Vec<_> = (0..3).map(|_| Task::new(flushes.run(failing))).collect();
    assert!(sharing.iter_mut().all(|call| call.poll().is_none()));
    device.done.notify_all();
    assert!(first.poll_if_woken().is_some_and(|result| result.is_ok()));
    assert!(sharing.iter_mut().all(|call| call.poll_if_woken().is_none()));
    let mut last = device.call(&flushes);
    assert!(last.poll().is_none());
    device.done.notify_all();
    let mut errors = 0;
    for _ in 0..2 {
        sharing.retain_mut(|call| match call.poll_if_woken() {
            Some(result) => {
                errors += u32::from(result.is_err_and(|e| e.kind() == ErrorKind::Io));
                false
            }
            None => true,
        });
    }
    assert_eq!(errors, 3);
    assert!(last.poll_if_woken().is_none());
    device.done.notify_all();
    assert!(last.poll_if_woken().is_some_and(|result| result.is_ok()));
}

#[test]
fn a_panic_in_the_work_passes_the_lead_on() {
    let (flushes, device) = (FlushSequencer::new(), Device::default());
    let mut bad = Task::new(flushes.run(async || {
        device.done.wait().await;
        panic!("on purpose")
    }));
    let mut good = device.call(&flushes);
    assert!(bad.poll().is_none() && good.poll().is_none());
    device.done.notify_all();
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| bad.poll()));
    assert!(panicked.is_err());
    drop(bad);
    assert!(good.poll_if_woken().is_none());
    device.done.notify_all();
    assert!(good.poll_if_woken().is_some());
}
