//! A deterministic executor: one thread, futures polled in an order that a seed chooses.
//!
//! A future that is pending and that nothing has woken can never go on, since there is no other thread and no
//! kernel; when all are like that, the run is a deadlock.

use crate::Rng;
use std::cell::RefCell;
use std::fmt;
use std::future::Future;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

/// Polls after which a run counts as one that goes round in circles.
const MAX_POLLS: u64 = 50_000_000;

struct Flag(AtomicBool);

impl Flag {
    fn new() -> Arc<Self> {
        Arc::new(Self(AtomicBool::new(true)))
    }

    fn take(&self) -> bool {
        self.0.swap(false, Ordering::AcqRel)
    }
}

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Release);
    }
}

/// Runs one future to its end.
///
/// # Panics
/// When the future waits for something that can never happen.
#[track_caller]
pub fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let flag = Flag::new();
    let waker = Waker::from(flag.clone());
    while flag.take() {
        if let Poll::Ready(out) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return out;
        }
    }
    panic!("deadlock: the future is pending and nothing has woken it")
}

/// Lets other tasks run once.
pub async fn yield_now() {
    let mut yielded = false;
    std::future::poll_fn(|cx| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// Why a run could not go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stuck {
    /// The tasks of these numbers wait, and nothing can wake them.
    Deadlock(Vec<usize>),
    /// The tasks kept waking each other without an end.
    Endless,
}

impl fmt::Display for Stuck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Deadlock(tasks) => write!(f, "deadlock: tasks {tasks:?} wait for ever"),
            Self::Endless => write!(f, "no end after {MAX_POLLS} polls"),
        }
    }
}

impl std::error::Error for Stuck {}

struct Task<'a> {
    number: usize,
    future: Pin<Box<dyn Future<Output = ()> + 'a>>,
    flag: Arc<Flag>,
    waker: Waker,
}

/// Several futures that run side by side on this thread.
pub struct Pool<'a> {
    tasks: Vec<Task<'a>>,
    spawned: usize,
    rng: Rng,
}

impl<'a> Pool<'a> {
    /// A pool whose order is decided by `seed`.
    pub fn new(seed: u64) -> Self {
        Self { tasks: Vec::new(), spawned: 0, rng: Rng::new(seed) }
    }

    /// Adds a future; returns its number.
    pub fn spawn(&mut self, future: impl Future<Output = ()> + 'a) -> usize {
        let number = self.spawned;
        self.spawned += 1;
        let flag = Flag::new();
        let waker = Waker::from(flag.clone());
        self.tasks.push(Task { number, future: Box::pin(future), flag, waker });
        number
    }

    /// Futures that are not finished.
    pub fn unfinished(&self) -> usize {
        self.tasks.len()
    }

    /// Polls one woken future, chosen at random. False when none is woken.
    pub fn step(&mut self) -> bool {
        let woken = |t: &Task<'_>| t.flag.0.load(Ordering::Acquire);
        let ready = self.tasks.iter().filter(|t| woken(t)).count() as u64;
        let chosen = self.rng.below(ready) as usize;
        let Some(index) = (0..self.tasks.len()).filter(|i| woken(&self.tasks[*i])).nth(chosen)
        else {
            return false;
        };
        let task = &mut self.tasks[index];
        task.flag.take();
        let done = task.future.as_mut().poll(&mut Context::from_waker(&task.waker)).is_ready();
        if done {
            drop(self.tasks.swap_remove(index));
        }
        true
    }

    /// Runs all futures to their ends.
    ///
    /// # Errors
    /// [`Stuck`] when they can't get there. What has not finished stays in the pool.
    pub fn run(&mut self) -> Result<(), Stuck> {
        self.run_with(|| {})
    }

    /// As [`Self::run`], with `between` called after each poll.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn run_with(&mut self, mut between: impl FnMut()) -> Result<(), Stuck> {
        let mut polls = 0;
        while self.step() {
            between();
            polls += 1;
            if polls > MAX_POLLS {
                return Err(Stuck::Endless);
            }
        }
        if self.tasks.is_empty() {
            return Ok(());
        }
        let mut waiting: Vec<usize> = self.tasks.iter().map(|t| t.number).collect();
        waiting.sort_unstable();
        Err(Stuck::Deadlock(waiting))
    }
}

/// Runs all `futures` side by side in an order chosen by `seed`; their results come back in their own order.
///
/// # Errors
/// [`Stuck`] when they can't all finish.
pub fn join_all<'a, T: 'a, F: Future<Output = T> + 'a>(
    seed: u64,
    futures: impl IntoIterator<Item = F>,
) -> Result<Vec<T>, Stuck> {
    let results = Rc::new(RefCell::new(Vec::<Option<T>>::new()));
    let mut pool = Pool::new(seed);
    for (i, future) in futures.into_iter().enumerate() {
        results.borrow_mut().push(None);
        let results = results.clone();
        pool.spawn(async move {
            let value = future.await;
            results.borrow_mut()[i] = Some(value);
        });
    }
    pool.run()?;
    Ok(results.take().into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn order(seed: u64) -> Vec<u32> {
        let log = RefCell::new(Vec::new());
        let log = &log;
        join_all(
            seed,
            (0..4).map(|i| async move {
                yield_now().await;
                log.borrow_mut().push(i);
            }),
        )
        .expect("all finish");
        log.borrow().clone()
    }

    #[test]
    fn a_seed_repeats_its_order_and_seeds_differ() {
        assert_eq!(order(3), order(3));
        let all: BTreeSet<Vec<u32>> = (0..50).map(order).collect();
        assert!(all.len() > 10, "only {} orders", all.len());
    }

    #[test]
    fn a_deadlock_names_the_tasks_that_wait() {
        let mut pool = Pool::new(0);
        pool.spawn(async {});
        pool.spawn(std::future::pending());
        assert_eq!(pool.run(), Err(Stuck::Deadlock(vec![1])));
    }

    #[test]
    fn results_come_back_in_the_order_of_the_futures() {
        let got = join_all(9, (0..10).map(|i| async move { i * 2 })).expect("all finish");
        assert_eq!(got, (0..10).map(|i| i * 2).collect::<Vec<_>>());
    }
}
