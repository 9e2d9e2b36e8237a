//! Event, semaphore and mutex, step by step.

use std::cell::Cell;
use std::collections::VecDeque;

use proptest::prelude::*;

use super::super::{AsyncMutex, Event, Permit, Semaphore};
use super::Task;

#[test]
fn an_announcement_between_the_call_and_the_first_poll_is_not_lost() {
    let event = Event::new();
    let wait = event.wait();
    event.notify_all();
    assert!(Task::new(wait).poll().is_some());
    assert!(
        Task::new(event.wait()).poll().is_none(),
        "an announcement counts for earlier waits only"
    );
}

#[test]
fn all_sleepers_are_woken_and_dropped_ones_are_forgotten() {
    let event = Event::new();
    let mut tasks: Vec<_> = (0..3).map(|_| Task::new(event.wait())).collect();
    assert!(tasks.iter_mut().all(|task| task.poll().is_none()));
    drop(tasks.remove(1));
    event.notify_all();
    assert!(tasks.iter_mut().all(|task| task.poll_if_woken().is_some()));
}

#[test]
fn wait_until_asks_again_after_each_announcement() {
    let (event, ready) = (Event::new(), Cell::new(None));
    let mut task = Task::new(event.wait_until(|| ready.get()));
    assert!(task.poll().is_none());
    event.notify_all();
    assert!(task.poll_if_woken().is_none());
    ready.set(Some(7));
    event.notify_all();
    assert_eq!(task.poll_if_woken(), Some(7));
}

#[test]
fn a_mutex_goes_round_in_order_and_keeps_its_value() {
    let mutex = AsyncMutex::new(vec![0]);
    let mut first = mutex.try_lock().expect("free");
    let mut waiting: Vec<_> = (0..2).map(|_| Task::new(mutex.lock())).collect();
    assert!(waiting.iter_mut().all(|task| task.poll().is_none()));
    first.push(1);
    drop(first);
    assert!(mutex.try_lock().is_none(), "the next in the queue has it");
    let mut second = waiting.remove(0).poll_if_woken().expect("granted");
    assert_eq!(*second, [0, 1]);
    second.push(2);
    drop(second);
    // Granted, but dropped before it knew.
    assert!(waiting[0].woken());
    drop(waiting);
    assert_eq!(*mutex.try_lock().expect("free again"), [0, 1, 2]);
}

#[derive(Clone, Debug)]
enum Step {
    Acquire(usize),
    Try(usize),
    /// Drops the n-th permit or waiting future.
    Leave(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => (0_usize..7).prop_map(Step::Acquire),
        1 => (0_usize..7).prop_map(Step::Try),
        3 => any::<usize>().prop_map(Step::Leave),
    ]
}

const CAPACITY: usize = 5;

struct Client<'a> {
    need: usize,
    task: Option<Task<'a, Permit<'a>>>,
    permit: Option<Permit<'a>>,
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn permits_go_to_the_queue_in_order_and_never_beyond_the_capacity(steps in proptest::collection::vec(step(), 1..60)) {
        let semaphore = Semaphore::new(CAPACITY);
        let mut clients: VecDeque<Client<'_>> = VecDeque::new();
        for step in steps {
            match step {
                Step::Acquire(n) => {
                    let mut task = Task::new(semaphore.acquire(n));
                    let permit = task.poll();
                    let task = permit.is_none().then_some(task);
                    clients.push_back(Client { need: n.min(CAPACITY), task, permit });
                }
                Step::Try(n) => {
                    let waiting = clients.iter().any(|c| c.permit.is_none());
                    let expected = !waiting && n.min(CAPACITY) <= semaphore.free();
                    let permit = semaphore.try_acquire(n);
                    prop_assert_eq!(permit.is_some(), expected);
                    if permit.is_some() {
                        clients.push_back(Client { need: n.min(CAPACITY), task: None, permit });
                    }
                }
                Step::Leave(i) if !clients.is_empty() => drop(clients.remove(i % clients.len())),
                Step::Leave(_) => {}
            }
            for client in &mut clients {
                if let Some(task) = &mut client.task {
                    client.permit = task.poll_if_woken();
                    if client.permit.is_some() {
                        client.task = None;
                    }
                }
            }
            let held: usize = clients.iter().filter(|c| c.permit.is_some()).map(|c| c.need).sum();
            prop_assert_eq!(held + semaphore.free(), CAPACITY);
            // Those that wait are the youngest, and the first of them does not fit.
            let first = clients.iter().position(|c| c.permit.is_none()).unwrap_or(clients.len());
            prop_assert!(clients.iter().skip(first).all(|c| c.permit.is_none()));
            prop_assert!(clients.get(first).is_none_or(|c| c.need > semaphore.free()));
        }
    }
}
