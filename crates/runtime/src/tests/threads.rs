//! Timers, and everything that crosses threads: posts, wakes, blocking calls.

use super::*;
use crate::{Handle, Idle, Wait, fs, sleep, spawn, timeout};
use bedplate_types::HostOffset;
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::task::{Poll, Waker};
use std::thread;
use std::time::Instant;

#[test]
fn timers_fire_in_the_order_of_their_deadlines() {
    on_both(&Config::default(), |rt| {
        let order = Rc::new(RefCell::new(Vec::new()));
        for ms in [30, 2, 17, 2, 9] {
            let order = order.clone();
            rt.spawn(async move {
                sleep(Duration::from_millis(ms)).await;
                order.borrow_mut().push(ms);
            });
        }
        let begin = Instant::now();
        rt.block_on(sleep(Duration::from_millis(31)));
        assert!(begin.elapsed() >= Duration::from_millis(31));
        assert_eq!(*order.borrow(), [2, 2, 9, 17, 30]);
    });
}

#[test]
fn a_timeout_ends_a_wait_and_does_not_disturb_a_result() {
    on_both(&Config::default(), |rt| {
        rt.block_on(async {
            let never = std::future::pending::<()>();
            assert_eq!(timeout(Duration::from_millis(1), never).await, None);
            assert_eq!(timeout(Duration::MAX, async { 5 }).await, Some(5));
            assert_eq!(timeout(Duration::ZERO, sleep(Duration::MAX)).await, None);
        });
    });
}

#[test]
fn a_bounded_turn_returns_without_work() {
    on_both(&Config::default(), |rt| {
        assert!(!rt.turn(Wait::For(Duration::from_millis(1))));
        assert!(!rt.turn(Wait::No));
    });
}

#[test]
fn the_callers_own_work_is_looked_for_before_sleeping() {
    for spin in [Duration::ZERO, Duration::from_micros(50)] {
        on_both(&Config { spin, ..Config::default() }, |rt| {
            let mut asked = Vec::new();
            rt.turn_polling(Wait::Forever, &mut |idle| {
                asked.push(idle);
                idle == Idle::Sleeping
            });
            assert_eq!(asked.pop(), Some(Idle::Sleeping));
            assert!(asked.iter().all(|i| *i == Idle::Spinning));
            assert_eq!(asked.is_empty(), spin.is_zero() || !rt.is_uring());
        });
    }
}

#[test]
fn posts_of_one_sender_run_in_order_and_wake_a_sleeper() {
    on_both(&Config::default(), |rt| {
        let (handle, seen) = (rt.handle(), Arc::new(Mutex::new(Vec::new())));
        let theirs = seen.clone();
        let sender = thread::spawn(move || {
            for i in 0..10_000 {
                let seen = theirs.clone();
                handle.post(move || seen.lock().expect("lock").push(i));
            }
        });
        while seen.lock().expect("lock").len() < 10_000 {
            rt.turn(Wait::Forever);
        }
        sender.join().expect("thread");
        assert!(seen.lock().expect("lock").is_sorted());
    });
}

#[test]
fn a_post_wakes_a_thread_whose_many_transfers_do_not_end() {
    on_both(&Config::default(), |rt| {
        let (pipe, writer) = std::io::pipe().expect("pipe");
        let pipe = File::new(pipe.into());
        // Reads of an empty pipe: in flight for ever with io_uring, refused by the thread backend.
        for _ in 0..40 {
            let (pipe, buf) = (pipe.clone(), pattern(8, 0).iovec());
            rt.spawn(async move { drop(fs::read(&pipe, buf, HostOffset::new(0)).await) });
        }
        rt.turn(Wait::No);
        let (handle, hit) = (rt.handle(), Arc::new(AtomicBool::new(false)));
        let theirs = hit.clone();
        let sender =
            thread::spawn(move || handle.post(move || theirs.store(true, Ordering::Release)));
        while !hit.load(Ordering::Acquire) {
            rt.turn(Wait::Forever);
        }
        sender.join().expect("thread");
        drop(writer); // ends the reads
        while rt.in_flight() > 0 {
            rt.turn(Wait::Forever);
        }
    });
}

#[test]
fn a_runtime_that_never_sleeps_sees_what_completes_later() {
    on_both(&Config::default(), |rt| {
        let event = Arc::new(crate::EventFd::new().expect("eventfd"));
        let (done, theirs, bell) = (Rc::new(Cell::new(false)), event.clone(), event);
        let seen = done.clone();
        rt.spawn(async move {
            bell.wait().await.expect("wait");
            seen.set(true);
        });
        for _ in 0..3 {
            rt.turn(Wait::No);
        }
        let sender = thread::spawn(move || theirs.write());
        while !done.get() {
            rt.turn(Wait::No);
        }
        sender.join().expect("thread").expect("write");
    });
}

/// Passes a token between threads: each hop sleeps and is woken, so a lost wake-up hangs.
#[test]
fn no_wake_up_is_lost_between_two_runtimes() {
    on_both(&tiny(), |rt| {
        let (tx, rx) = mpsc::channel::<Handle>();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let backend = if rt.is_uring() { Backend::Uring } else { Backend::Threads };
        let other = thread::spawn(move || {
            let rt = Runtime::new(Config { backend, ..tiny() }).expect("runtime");
            tx.send(rt.handle()).expect("send");
            while !stopped.load(Ordering::Acquire) {
                rt.turn(Wait::Forever);
            }
        });
        let (there, here) = (rx.recv().expect("handle"), rt.handle());
        let count = Arc::new(AtomicU64::new(0));
        for i in 0..3000 {
            let (back, hit) = (here.clone(), count.clone());
            there.post(move || {
                back.post(move || {
                    hit.fetch_add(1, Ordering::AcqRel);
                });
            });
            while count.load(Ordering::Acquire) <= i {
                rt.turn(Wait::Forever);
            }
        }
        there.post(move || stop.store(true, Ordering::Release));
        other.join().expect("thread");
        assert!(there.is_closed());
        there.post(|| unreachable!("the runtime has ended"));
    });
}

#[test]
fn wakers_work_from_any_thread() {
    const TASKS: usize = 8;
    const ROUNDS: usize = 500;
    on_both(&Config::default(), |rt| {
        let (tx, rx) = mpsc::channel::<(Waker, Arc<AtomicBool>)>();
        let wakers: Vec<_> = {
            let rx = Arc::new(Mutex::new(rx));
            let start = |_| {
                let rx = rx.clone();
                thread::spawn(move || {
                    loop {
                        let next = rx.lock().expect("lock").recv();
                        let Ok((waker, flag)) = next else { return };
                        flag.store(true, Ordering::Release);
                        waker.wake_by_ref();
                        waker.wake(); // one more than needed
                    }
                })
            };
            (0..3).map(start).collect()
        };
        let left = Rc::new(Cell::new(TASKS));
        for _ in 0..TASKS {
            let (tx, left) = (tx.clone(), left.clone());
            rt.spawn(async move {
                for _ in 0..ROUNDS {
                    let flag = Arc::new(AtomicBool::new(false));
                    let mut sent = false;
                    poll_fn(|cx| {
                        if flag.load(Ordering::Acquire) {
                            return Poll::Ready(());
                        }
                        if !sent {
                            sent = true;
                            tx.send((cx.waker().clone(), flag.clone())).expect("send");
                        }
                        Poll::Pending
                    })
                    .await;
                }
                left.set(left.get() - 1);
            });
        }
        drop(tx);
        while left.get() > 0 {
            rt.turn(Wait::Forever);
        }
        wakers.into_iter().for_each(|w| w.join().expect("thread"));
    });
}

#[test]
fn futures_can_be_made_on_another_threads_runtime() {
    on_both(&Config::default(), |rt| {
        let (handle, event) = (rt.handle(), Arc::new(crate::EventFd::new().expect("eventfd")));
        let theirs = event.clone();
        let sender = thread::spawn(move || {
            handle.spawn(move || {
                let local = Rc::new(theirs); // stays on the runtime's thread
                async move { local.write().expect("write") }
            });
        });
        rt.block_on(event.wait()).expect("wait");
        sender.join().expect("thread");
    });
}

#[test]
fn blocking_calls_return_their_results_and_their_panics() {
    on_both(&tiny(), |rt| {
        let calls = (0..100).map(|i| fs::blocking(move || i * 2));
        let sum: i32 = rt.block_on(futures_util::future::join_all(calls)).into_iter().sum();
        assert_eq!(sum, 9900);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            rt.block_on(fs::blocking(|| panic!("expected by the test")));
        }));
        assert!(panicked.is_err());
        assert_eq!(rt.block_on(fs::blocking(|| 7)), 7);
    });
}

#[test]
fn a_task_that_wakes_itself_does_not_starve_io() {
    on_both(&Config::default(), |rt| {
        let stop = Rc::new(Cell::new(false));
        let stopped = stop.clone();
        rt.spawn(async move {
            while !stopped.get() {
                crate::yield_now().await;
            }
        });
        let event = Rc::new(crate::EventFd::new().expect("eventfd"));
        rt.block_on(async {
            let theirs = event.clone();
            spawn(async move { theirs.write().expect("write") });
            event.wait().await.expect("wait");
            sleep(Duration::from_millis(1)).await;
        });
        stop.set(true);
        rt.turn(Wait::No);
    });
}
