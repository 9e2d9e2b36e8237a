//! A small pool of helper threads for calls that block.
//!
//! Callers: [`crate::fs::blocking`] and the backend without io_uring. Threads are started when needed, and end
//! when they have been idle for a while.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// Work for the pool.
pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// A pool; made to be a `static`.
pub(crate) struct Pool {
    name: &'static str,
    max_threads: usize,
    /// Taken alone; never held while a job runs.
    state: Mutex<State>,
    work: Condvar,
}

struct State {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
}

/// How long a thread without work stays.
const LINGER: Duration = Duration::from_secs(10);

impl Pool {
    pub(crate) const fn new(name: &'static str, max_threads: usize) -> Self {
        let state = State { jobs: VecDeque::new(), threads: 0, idle: 0 };
        Self { name, max_threads, state: Mutex::new(state), work: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `job` on one of the threads; on this one when none can be started.
    pub(crate) fn run(&'static self, job: Job) {
        let mut state = self.lock();
        state.jobs.push_back(job);
        if state.idle >= state.jobs.len() {
            drop(state);
            self.work.notify_one();
            return;
        }
        if state.threads >= self.max_threads {
            return; // A busy thread takes it when it is done.
        }
        state.threads += 1;
        drop(state);
        let started =
            thread::Builder::new().name(self.name.to_owned()).spawn(move || self.work_loop());
        if started.is_err() {
            self.could_not_start();
        }
    }

    /// Without any thread the queue would never be served: serve it here.
    fn could_not_start(&self) {
        loop {
            let mut state = self.lock();
            if state.threads > 1 {
                state.threads -= 1;
                return;
            }
            let Some(job) = state.jobs.pop_front() else {
                state.threads -= 1;
                return;
            };
            drop(state);
            job();
        }
    }

    fn work_loop(&self) {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                job();
                state = self.lock();
                continue;
            }
            state.idle += 1;
            let (s, timed_out) =
                self.work.wait_timeout(state, LINGER).unwrap_or_else(PoisonError::into_inner);
            state = s;
            state.idle -= 1;
            if timed_out.timed_out() && state.jobs.is_empty() {
                state.threads -= 1;
                return;
            }
        }
    }
}
