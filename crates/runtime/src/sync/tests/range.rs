//! The range lock against a slow model that thinks in single bytes.

use proptest::prelude::*;

use super::super::{RangeGuard, RangeLock};
use super::Task;

const BYTES: u64 = 24;

#[derive(Clone, Debug)]
enum Step {
    Ask {
        ranges: Vec<(u64, u64)>,
        exclusive: bool,
    },
    Try {
        range: (u64, u64),
        exclusive: bool,
    },
    /// Drops the future or the guard of the n-th request that is present.
    Leave(usize),
    /// Polls the n-th present request without having been woken.
    Poll(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let range = || (0..BYTES, 0_u64..8).prop_map(|(start, len)| (start, len.min(BYTES - start)));
    prop_oneof![
        3 => (range(), any::<bool>()).prop_map(|(r, exclusive)| Step::Ask { ranges: vec![r], exclusive }),
        1 => proptest::collection::vec(range(), 0..4).prop_map(|ranges| Step::Ask { ranges, exclusive: true }),
        1 => (range(), any::<bool>()).prop_map(|(range, exclusive)| Step::Try { range, exclusive }),
        4 => any::<usize>().prop_map(Step::Leave),
        1 => any::<usize>().prop_map(Step::Poll),
    ]
}

/// A present request: what it asked for, and its future or its guard.
struct Request<'a> {
    ranges: Vec<(u64, u64)>,
    exclusive: bool,
    task: Option<Task<'a, RangeGuard<'a>>>,
    guard: Option<RangeGuard<'a>>,
}

fn covers(ranges: &[(u64, u64)], byte: u64) -> bool {
    ranges.iter().any(|&(start, len)| byte >= start && byte - start < len)
}

/// The specification: a request waits for every earlier one with which it shares a byte, unless both are shared.
fn must_wait(earlier: &[Request<'_>], ranges: &[(u64, u64)], exclusive: bool) -> bool {
    earlier.iter().any(|e| {
        (e.exclusive || exclusive) && (0..BYTES).any(|b| covers(&e.ranges, b) && covers(ranges, b))
    })
}

fn ask<'a>(
    lock: &'a RangeLock,
    ranges: &[(u64, u64)],
    exclusive: bool,
) -> Task<'a, RangeGuard<'a>> {
    match (ranges, exclusive) {
        (&[(start, len)], true) => Task::new(lock.exclusive(start, len)),
        (&[(start, len)], false) => Task::new(lock.shared(start, len)),
        (ranges, _) => {
            let ranges = ranges.to_vec();
            Task::new(async move { lock.exclusive_many(&ranges).await })
        }
    }
}

/// Runs what was woken; then exactly those that the specification grants must have their guards.
fn settle(requests: &mut [Request<'_>]) -> Result<(), TestCaseError> {
    for i in 0..requests.len() {
        let (earlier, rest) = requests.split_at_mut(i);
        let request = &mut rest[0];
        let granted = !must_wait(earlier, &request.ranges, request.exclusive);
        if let Some(task) = &mut request.task {
            prop_assert_eq!(
                task.woken(),
                granted,
                "only those that can go on are woken, and all of them"
            );
            request.guard = task.poll_if_woken();
            if request.guard.is_some() {
                request.task = None;
            }
        }
        prop_assert_eq!(request.guard.is_some(), granted);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn exactly_the_requests_without_an_earlier_conflict_are_granted(steps in proptest::collection::vec(step(), 1..60)) {
        let lock = RangeLock::new();
        let mut requests: Vec<Request<'_>> = Vec::new();
        for step in steps {
            match step {
                Step::Ask { ranges, exclusive } => {
                    let mut task = ask(&lock, &ranges, exclusive);
                    let guard = task.poll();
                    let granted = guard.is_some();
                    requests.push(Request { ranges, exclusive, guard, task: (!granted).then_some(task) });
                }
                Step::Try { range: (start, len), exclusive } => {
                    let ranges = vec![(start, len)];
                    let guard =
                        if exclusive { lock.try_exclusive(start, len) } else { lock.try_shared(start, len) };
                    prop_assert_eq!(guard.is_none(), must_wait(&requests, &ranges, exclusive));
                    if guard.is_some() {
                        requests.push(Request { ranges, exclusive, guard, task: None });
                    }
                }
                Step::Leave(n) if !requests.is_empty() => drop(requests.remove(n % requests.len())),
                Step::Poll(n) if !requests.is_empty() => {
                    let n = n % requests.len();
                    if let Some(task) = &mut requests[n].task {
                        prop_assert!(task.poll().is_none(), "not woken, so not granted");
                    }
                }
                Step::Leave(_) | Step::Poll(_) => {}
            }
            settle(&mut requests)?;
        }
        // Whoever is still there goes in some order, and nothing is left over.
        while !requests.is_empty() {
            requests.remove(requests.len() / 2);
            settle(&mut requests)?;
        }
        prop_assert!(lock.is_idle());
    }
}

#[test]
fn a_stream_of_readers_does_not_starve_a_writer() {
    let lock = RangeLock::new();
    let first = lock.try_shared(0, 10).expect("free");
    let mut writer = Task::new(lock.exclusive(0, 10));
    assert!(writer.poll().is_none());
    assert!(lock.try_shared(0, 10).is_none(), "a later reader does not pass the writer");
    drop(first);
    assert!(writer.poll_if_woken().is_some());
}

#[test]
fn a_waiter_granted_but_dropped_before_its_poll_passes_the_range_on() {
    let lock = RangeLock::new();
    let first = lock.try_exclusive(0, 1).expect("free");
    let (mut second, mut third) =
        (Task::new(lock.exclusive(0, 1)), Task::new(lock.exclusive(0, 1)));
    assert!(second.poll().is_none() && third.poll().is_none());
    drop(first);
    assert!(second.woken() && !third.woken());
    drop(second);
    assert!(third.poll_if_woken().is_some());
}

#[test]
fn ranges_at_the_end_of_the_address_space_end_there() {
    let lock = RangeLock::new();
    let _last = lock.try_exclusive(u64::MAX - 1, u64::MAX).expect("free");
    assert!(lock.try_exclusive(0, u64::MAX - 1).is_some());
    assert!(lock.try_shared(u64::MAX - 1, 1).is_none());
}
