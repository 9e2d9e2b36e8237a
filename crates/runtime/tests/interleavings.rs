//! Tries interleavings of the locks between threads.
//!
//! The locks' own source files are compiled here once more, on top of a `prim` whose mutex and atomics belong to
//! the `shuttle` scheduler: each use of one is a point where another thread may go on, and a test runs thousands
//! of schedules. A state in which nobody can go on (a lost wake-up) fails the test as a deadlock. The scheduler
//! knows sequentially consistent memory only; why weaker orderings suffice is argued in each file.

#![forbid(unsafe_code)]
// Each file offers more than these tests use.
#![allow(dead_code)]

#[path = "../src/sync/epochs.rs"]
mod epochs;
#[path = "../src/sync/event.rs"]
mod event;
#[path = "../src/sync/flush.rs"]
mod flush;
#[path = "../src/sync/mutex.rs"]
mod mutex;
#[path = "../src/sync/range.rs"]
mod range;
#[path = "../src/sync/semaphore.rs"]
mod semaphore;

/// The same names as in `src/sync/prim.rs`.
mod prim {
    pub(super) use shuttle::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
    pub(super) use shuttle::sync::{Mutex, MutexGuard};

    pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// So few that threads share.
    pub(super) const SLOTS: usize = 2;

    pub(super) fn thread_slot() -> usize {
        usize::from(shuttle::current::me()) % SLOTS
    }

    pub(super) fn slots_in_use() -> usize {
        SLOTS
    }
}

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bedplate_types::{Error, ErrorKind};
use shuttle::future::block_on;
use shuttle::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use shuttle::thread;

use epochs::Epochs;
use event::Event;
use flush::FlushSequencer;
use mutex::AsyncMutex;
use range::RangeLock;
use semaphore::Semaphore;

/// Tries schedules at random, and with few switches at chosen points, which finds other mistakes.
fn explore(test: impl Fn() + Send + Sync + Clone + 'static) {
    shuttle::check_random(test.clone(), 3000);
    shuttle::check_pct(test, 3000, 3);
}

fn spawn_all(threads: Vec<Box<dyn FnOnce() + Send>>) {
    let threads: Vec<_> = threads.into_iter().map(|f| thread::spawn(f)).collect();
    for thread in threads {
        thread.join().expect("the thread ends well");
    }
}

/// Polls the future at most `polls` times, letting others go on in between, then drops it.
struct GiveUp<F> {
    future: Pin<Box<F>>,
    polls: u32,
}

fn give_up_after<F: Future>(polls: u32, future: F) -> GiveUp<F> {
    GiveUp { future: Box::pin(future), polls }
}

impl<F: Future> Future for GiveUp<F> {
    type Output = Option<F::Output>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if self.polls == 0 {
            return Poll::Ready(None);
        }
        self.polls -= 1;
        if let Poll::Ready(output) = self.future.as_mut().poll(cx) {
            return Poll::Ready(Some(output));
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

/// Lets the executor poll others before it goes on.
async fn yield_once() {
    let _ = give_up_after(1, std::future::pending::<()>()).await;
}

/// Who is in which cell: readers count by one, a writer by a thousand.
#[derive(Default)]
struct Cells([AtomicUsize; 4]);

impl Cells {
    fn visit(&self, cells: std::ops::Range<usize>, exclusive: bool) {
        let weight = if exclusive { 1000 } else { 1 };
        for cell in &self.0[cells.clone()] {
            let others = cell.fetch_add(weight, Ordering::SeqCst);
            assert!(
                if exclusive { others == 0 } else { others < 1000 },
                "not alone in an exclusive range"
            );
        }
        thread::yield_now();
        for cell in &self.0[cells] {
            cell.fetch_sub(weight, Ordering::SeqCst);
        }
    }
}

#[test]
fn range_lock_excludes_and_wakes_whoever_can_go_on() {
    explore(|| {
        let shared = Arc::new((RangeLock::new(), Cells::default()));
        let with = |f: fn(&RangeLock, &Cells)| -> Box<dyn FnOnce() + Send> {
            let shared = shared.clone();
            Box::new(move || f(&shared.0, &shared.1))
        };
        spawn_all(vec![
            with(|lock, cells| {
                let _guard = block_on(lock.exclusive(0, 2));
                cells.visit(0..2, true);
            }),
            with(|lock, cells| {
                let _guard = block_on(lock.shared(1, 2));
                cells.visit(1..3, false);
            }),
            with(|lock, cells| {
                let _guard = block_on(lock.exclusive_many(&[(3, 1), (0, 1)]));
                cells.visit(0..1, true);
                cells.visit(3..4, true);
            }),
            with(|lock, cells| {
                if let Some(_guard) = block_on(give_up_after(2, lock.exclusive(0, 4))) {
                    cells.visit(0..4, true);
                }
                if let Some(_guard) = lock.try_shared(2, 2) {
                    cells.visit(2..4, false);
                }
            }),
        ]);
        assert!(shared.0.is_idle());
    });
}

/// Two places; the mapping names one, and a place that was given up must not be in use any more.
#[derive(Default)]
struct Places {
    epochs: Epochs,
    current: AtomicUsize,
    gone: [AtomicBool; 3],
}

impl Places {
    fn read(&self) {
        let pin = self.epochs.pin();
        let place = self.current.load(Ordering::SeqCst);
        thread::yield_now();
        assert!(!self.gone[place].load(Ordering::SeqCst), "the place went away under the pin");
        self.epochs.unpin(pin);
    }

    fn move_away(&self, poll: bool) {
        let old = self.current.fetch_add(1, Ordering::SeqCst);
        if poll {
            let grace = self.epochs.start();
            while !self.epochs.elapsed(&grace) {
                thread::yield_now();
            }
        } else {
            block_on(self.epochs.quiesce());
        }
        self.gone[old].store(true, Ordering::SeqCst);
    }
}

fn epochs_with(writers: [fn(&Places); 2]) {
    explore(move || {
        let places = Arc::new(Places::default());
        let mut threads: Vec<Box<dyn FnOnce() + Send>> = Vec::new();
        for _ in 0..2 {
            let places = places.clone();
            threads.push(Box::new(move || {
                places.read();
                places.read();
            }));
        }
        for writer in writers {
            let places = places.clone();
            threads.push(Box::new(move || writer(&places)));
        }
        spawn_all(threads);
        assert_eq!(places.epochs.pinned(), 0);
    });
}

#[test]
fn epochs_keep_pinned_places_while_two_tasks_wait() {
    epochs_with([|places| places.move_away(false), |places| places.move_away(false)]);
}

#[test]
fn epochs_keep_pinned_places_while_one_task_waits_and_one_polls() {
    epochs_with([|places| places.move_away(false), |places| places.move_away(true)]);
}

#[test]
fn epochs_wake_a_waiting_task_though_another_gives_up() {
    epochs_with([
        |places| places.move_away(false),
        |places| {
            let _ = block_on(give_up_after(2, places.epochs.quiesce()));
        },
    ]);
}

/// A disk with a volatile cache: what was written before a run looked is durable after it.
#[derive(Default)]
struct Device {
    flushes: FlushSequencer,
    written: AtomicU64,
    durable: AtomicU64,
    busy: AtomicBool,
}

impl Device {
    async fn flush(&self) {
        struct Busy<'a>(&'a AtomicBool);
        impl Drop for Busy<'_> {
            fn drop(&mut self) {
                self.0.store(false, Ordering::SeqCst);
            }
        }
        assert!(!self.busy.swap(true, Ordering::SeqCst), "one leader at a time");
        let _busy = Busy(&self.busy);
        let seen = self.written.load(Ordering::SeqCst);
        yield_once().await;
        self.durable.fetch_max(seen, Ordering::SeqCst);
    }

    fn write_and_flush(&self) {
        let mine = self.written.fetch_add(1, Ordering::SeqCst) + 1;
        let result = block_on(self.flushes.run(async || {
            self.flush().await;
            Ok(())
        }));
        assert!(result.is_ok());
        assert!(self.durable.load(Ordering::SeqCst) >= mine, "an answered flush lost a write");
    }

    fn flush_and_give_up(&self, polls: u32) {
        let call = self.flushes.run(async || {
            self.flush().await;
            Ok(())
        });
        let _ = block_on(give_up_after(polls, call));
    }
}

fn device_with(clients: [fn(&Device); 4]) {
    explore(move || {
        let device = Arc::new(Device::default());
        let boxed = clients.map(|client| -> Box<dyn FnOnce() + Send> {
            let device = device.clone();
            Box::new(move || client(&device))
        });
        spawn_all(boxed.into());
        assert!(device.flushes.runs() <= 5);
    });
}

#[test]
fn an_answered_flush_covers_all_writes_before_it() {
    device_with([Device::write_and_flush; 4]);
}

#[test]
fn flushes_go_on_when_leaders_and_waiters_give_up() {
    device_with([
        Device::write_and_flush,
        Device::write_and_flush,
        |device| device.flush_and_give_up(1),
        |device| device.flush_and_give_up(2),
    ]);
}

#[test]
fn a_failed_run_fails_its_own_callers_only() {
    explore(|| {
        let flushes = Arc::new(FlushSequencer::new());
        let clients = (0..3).map(|_| -> Box<dyn FnOnce() + Send> {
            let flushes = flushes.clone();
            Box::new(move || {
                let before = flushes.runs();
                let result = block_on(flushes.run(async || {
                    let number = flushes.runs();
                    yield_once().await;
                    Err(Error::new(ErrorKind::Io, number.to_string()))
                }));
                let error = result.expect_err("every run fails");
                let run: u64 = error.message().parse().expect("a number");
                assert!(run > before, "the answering run started after the call");
            })
        });
        spawn_all(clients.collect());
    });
}

#[test]
fn an_event_loses_no_announcement() {
    explore(|| {
        let shared = Arc::new((Event::new(), AtomicUsize::new(0)));
        let mut threads: Vec<Box<dyn FnOnce() + Send>> = Vec::new();
        for goal in 1..=2 {
            let shared = shared.clone();
            threads.push(Box::new(move || {
                let (event, count) = &*shared;
                block_on(event.wait_until(|| (count.load(Ordering::SeqCst) >= goal).then_some(())));
            }));
        }
        for polls in [0, 1] {
            let shared = shared.clone();
            threads.push(Box::new(move || {
                let (event, count) = &*shared;
                let _ = block_on(give_up_after(polls, event.wait()));
                count.fetch_add(1, Ordering::SeqCst);
                event.notify_all();
            }));
        }
        spawn_all(threads);
    });
}

#[test]
fn mutex_and_semaphore_hand_over_and_never_stall() {
    explore(|| {
        let shared = Arc::new((AsyncMutex::new(0_u32), Semaphore::new(2)));
        let mut threads: Vec<Box<dyn FnOnce() + Send>> = Vec::new();
        for need in 1..=3 {
            let shared = shared.clone();
            threads.push(Box::new(move || {
                let (mutex, semaphore) = &*shared;
                let _ = block_on(give_up_after(need, mutex.lock()));
                let _permit = block_on(semaphore.acquire(need as usize));
                let mut value = block_on(mutex.lock());
                *value += 1;
            }));
        }
        spawn_all(threads);
        assert_eq!(shared.1.free(), 2);
        assert_eq!(*shared.0.try_lock().expect("free"), 3);
    });
}
