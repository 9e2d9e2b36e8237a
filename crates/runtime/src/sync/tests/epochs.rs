//! Epochs on one thread, and their tokens on several.

use proptest::prelude::*;

use super::super::epochs::{Epochs, Grace, Pin};
use super::Task;

#[test]
fn a_grace_period_without_pins_is_over_at_once() {
    let epochs = Epochs::new();
    let grace = epochs.start();
    assert!(epochs.elapsed(&grace));
    assert!(Task::new(epochs.quiesce()).poll().is_some());
}

#[test]
fn pins_from_before_are_waited_for_and_pins_from_after_are_not() {
    let epochs = Epochs::new();
    let before = epochs.pin();
    let grace = epochs.start();
    let after = epochs.pin();
    let mut task = Task::new(epochs.wait(grace));
    assert!(task.poll().is_none());
    assert!(!epochs.elapsed(&grace));
    epochs.unpin(before);
    assert!(task.poll_if_woken().is_some());
    assert!(epochs.elapsed(&grace));
    assert_eq!(epochs.pinned(), 1);
    epochs.unpin(after);
    assert_eq!(epochs.pinned(), 0);
}

#[test]
fn a_dropped_wait_leaves_others_waiting_and_unpins_cheap_again() {
    let epochs = Epochs::new();
    let pin = epochs.pin();
    let (mut one, mut two) = (Task::new(epochs.quiesce()), Task::new(epochs.quiesce()));
    assert!(one.poll().is_none() && two.poll().is_none());
    drop(one);
    assert!(!two.woken());
    epochs.unpin(pin);
    assert!(two.poll_if_woken().is_some());
}

#[test]
fn a_poller_that_moves_the_epoch_on_does_not_leave_a_sleeper_behind() {
    let epochs = Epochs::new();
    let first = epochs.pin();
    let early = epochs.start();
    let second = epochs.pin();
    let mut sleeper = Task::new(epochs.quiesce());
    assert!(sleeper.poll().is_none());
    epochs.unpin(first);
    assert!(epochs.elapsed(&early));
    assert!(sleeper.poll_if_woken().is_none(), "the second pin is older than the quiesce");
    epochs.unpin(second);
    assert!(sleeper.poll_if_woken().is_some());
}

#[test]
fn a_pin_may_be_given_back_by_another_thread() {
    let epochs = Epochs::new();
    let pin = epochs.pin();
    let mut task = Task::new(epochs.quiesce());
    assert!(task.poll().is_none());
    std::thread::scope(|scope| {
        scope.spawn(|| epochs.unpin(pin));
    });
    assert!(task.poll_if_woken().is_some());
}

#[test]
fn more_threads_than_slots_share_them() {
    const THREADS: usize = 100;
    let epochs = Epochs::new();
    let (all_pinned, go) =
        (std::sync::Barrier::new(THREADS + 1), std::sync::Barrier::new(THREADS + 1));
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                let _pin = epochs.guard();
                all_pinned.wait();
                go.wait();
            });
        }
        all_pinned.wait();
        let grace = epochs.start();
        assert_eq!(epochs.pinned(), THREADS as u64);
        assert!(!epochs.elapsed(&grace));
        go.wait();
    });
    assert_eq!(epochs.pinned(), 0);
    assert!(Task::new(epochs.quiesce()).poll().is_some());
}

#[derive(Clone, Debug)]
enum Step {
    Pin,
    Unpin(usize),
    Start,
    Quiesce,
    Forget(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => Just(Step::Pin),
        3 => any::<usize>().prop_map(Step::Unpin),
        1 => Just(Step::Start),
        1 => Just(Step::Quiesce),
        1 => any::<usize>().prop_map(Step::Forget),
    ]
}

/// A grace period, the pins (by number) it has to wait for, and the task that waits, if one does.
struct Watch<'a> {
    grace: Option<Grace>,
    pins: Vec<u64>,
    /// Whether no pin at all was held at the start: then no later pin may delay it.
    at_once: bool,
    task: Option<Task<'a, ()>>,
}

fn check(
    epochs: &Epochs,
    watches: &mut Vec<Watch<'_>>,
    held: &[(u64, Pin)],
) -> Result<(), TestCaseError> {
    for watch in watches.iter_mut() {
        let early = watch.pins.iter().any(|pin| held.iter().any(|(n, _)| n == pin));
        let over = match (&mut watch.task, &watch.grace) {
            (Some(task), _) => task.poll_if_woken().is_some(),
            (None, Some(grace)) => epochs.elapsed(grace),
            (None, None) => true,
        };
        prop_assert!(!(over && early), "a pin from before the start is still held");
        prop_assert!(over || early || !watch.at_once, "only later pins are held");
        prop_assert!(over || !held.is_empty(), "no pin is held");
        if over {
            (watch.task, watch.grace) = (None, None);
        }
    }
    watches.retain(|watch| watch.task.is_some() || watch.grace.is_some());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn grace_periods_end_after_the_pins_before_them_and_not_sooner(steps in proptest::collection::vec(step(), 1..80)) {
        let epochs = Epochs::new();
        let mut held: Vec<(u64, Pin)> = Vec::new();
        let mut watches: Vec<Watch<'_>> = Vec::new();
        for (n, step) in (0_u64..).zip(steps) {
            let pins: Vec<u64> = held.iter().map(|(n, _)| *n).collect();
            let at_once = pins.is_empty();
            match step {
                Step::Pin => held.push((n, epochs.pin())),
                Step::Unpin(i) if !held.is_empty() => epochs.unpin(held.swap_remove(i % held.len()).1),
                Step::Start => watches.push(Watch { grace: Some(epochs.start()), pins, at_once, task: None }),
                Step::Quiesce => {
                    let mut task = Task::new(epochs.quiesce());
                    let over = task.poll().is_some();
                    prop_assert_eq!(over, at_once);
                    if !over {
                        watches.push(Watch { grace: None, pins, at_once, task: Some(task) });
                    }
                }
                Step::Forget(i) if !watches.is_empty() => drop(watches.swap_remove(i % watches.len())),
                Step::Unpin(_) | Step::Forget(_) => {}
            }
            check(&epochs, &mut watches, &held)?;
        }
        for (_, pin) in held.drain(..) {
            epochs.unpin(pin);
        }
        check(&epochs, &mut watches, &[])?;
        prop_assert!(watches.is_empty());
    }
}
