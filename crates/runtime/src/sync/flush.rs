//! Many flushes at once become few.
//!
//! Callers: the engines' flush paths. Each caller brings the work (they are all the same: "make durable whatever
//! is complete now"); one of them, the leader, does it for all that were there when it began.
//!
//! Why a caller may be told "done" for work it didn't do: a flush promises that what completed *before the call*
//! is durable. Runs are numbered by their start. A call notes, under the lock, that it needs a run with a number
//! above all started ones; a leader takes its number under the same lock, before its work looks at anything. So
//! what the caller completed happened before the run that answers it. A run that was already going on when the
//! call came may have looked before, so it never counts, even if it ends later.
//!
//! Progress: with callers in the queue and no run going on, at least one of them has been woken since, and the
//! first to be polled leads. A leader that is dropped (or panics) ends its run without result: it answered
//! nobody, and the next in the queue leads a new run. A waiter that is dropped while no run goes on wakes another,
//! since the wake-up may have been meant for it.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use bedplate_types::Result;
use smallvec::SmallVec;

use super::prim::{Mutex, lock};

struct Waiting {
    id: u64,
    /// A run with this number or a higher one answers the call.
    need: u64,
    waker: Waker,
}

#[derive(Default)]
struct State {
    next: u64,
    /// Runs started so far; the number of the latest.
    started: u64,
    /// Whether the latest is still going on.
    running: bool,
    /// Calls without an answer, in the order they came.
    queue: Vec<Waiting>,
    /// Answers not fetched yet, by call.
    answers: Vec<(u64, Result<()>)>,
}

impl State {
    /// The one to lead next, when nobody leads.
    fn nudge(&self) -> Option<Waker> {
        if self.running { None } else { self.queue.first().map(|w| w.waker.clone()) }
    }
}

/// Coalesces concurrent flushes.
#[derive(Default)]
pub struct FlushSequencer {
    // Lock order: a leaf; nothing else is taken while it is held.
    state: Mutex<State>,
}

impl FlushSequencer {
    /// A sequencer without runs.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns when a run of work that started after this call has ended, with that run's result.
    ///
    /// `work` is called only if this caller leads. All calls that were waiting when a run started share its
    /// result, an error too. Whoever leads must be polled or dropped: others wait for it.
    pub async fn run<F, Fut>(&self, work: F) -> Result<()>
    where
        F: FnOnce() -> Fut,
        Fut: Future<Output = Result<()>>,
    {
        match (Turn { sequencer: self, id: None }).await {
            Role::Answered(result) => result,
            Role::Lead(lead) => {
                let result = work().await;
                lead.finish(result.clone());
                result
            }
        }
    }

    /// How many runs have started: with the number of calls, this says how well they coalesce.
    pub fn runs(&self) -> u64 {
        lock(&self.state).started
    }
}

impl fmt::Debug for FlushSequencer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = lock(&self.state);
        f.debug_struct("FlushSequencer")
            .field("started", &state.started)
            .field("running", &state.running)
            .field("waiting", &state.queue.len())
            .finish_non_exhaustive()
    }
}

/// What a call turns out to be.
enum Role<'a> {
    Lead(Lead<'a>),
    Answered(Result<()>),
}

/// Waits to be answered or to lead.
struct Turn<'a> {
    sequencer: &'a FlushSequencer,
    /// Set while the call is in the queue or its answer is not fetched.
    id: Option<u64>,
}

impl<'a> Future for Turn<'a> {
    type Output = Role<'a>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Role<'a>> {
        let sequencer = self.sequencer;
        // Declared before the lock, so dropped after it.
        let _stale: Waker;
        let _own: Waiting;
        let mut state = lock(&sequencer.state);
        if let Some(id) = self.id
            && let Some(at) = state.answers.iter().position(|(call, _)| *call == id)
        {
            self.id = None;
            return Poll::Ready(Role::Answered(state.answers.swap_remove(at).1));
        }
        let place = self.id.and_then(|id| state.queue.iter().position(|w| w.id == id));
        if !state.running {
            if let Some(at) = place {
                _own = state.queue.remove(at);
            }
            self.id = None;
            state.running = true;
            state.started += 1;
            return Poll::Ready(Role::Lead(Lead {
                sequencer,
                number: state.started,
                ended: false,
            }));
        }
        match place.and_then(|at| state.queue.get_mut(at)) {
            Some(own) if own.waker.will_wake(cx.waker()) => {}
            Some(own) => _stale = std::mem::replace(&mut own.waker, cx.waker().clone()),
            None => {
                let (id, need) = (state.next, state.started + 1);
                state.next += 1;
                state.queue.push(Waiting { id, need, waker: cx.waker().clone() });
                self.id = Some(id);
            }
        }
        Poll::Pending
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let Some(id) = self.id else { return };
        // Declared before the lock, so dropped after it.
        let _own: Waiting;
        let _answer: (u64, Result<()>);
        let next = {
            let mut state = lock(&self.sequencer.state);
            if let Some(at) = state.queue.iter().position(|w| w.id == id) {
                _own = state.queue.remove(at);
            } else if let Some(at) = state.answers.iter().position(|(call, _)| *call == id) {
                _answer = state.answers.swap_remove(at);
            }
            state.nudge()
        };
        if let Some(next) = next {
            next.wake();
        }
    }
}

/// The right to run; passes on when dropped.
struct Lead<'a> {
    sequencer: &'a FlushSequencer,
    number: u64,
    ended: bool,
}

impl Lead<'_> {
    /// Ends the run and answers those who were waiting when it began.
    fn finish(mut self, result: Result<()>) {
        self.ended = true;
        let mut woken: SmallVec<[Waker; 8]> = SmallVec::new();
        {
            let mut state = lock(&self.sequencer.state);
            state.running = false;
            let number = self.number;
            let State { queue, answers, .. } = &mut *state;
            for answered in queue.extract_if(.., |w| w.need <= number) {
                answers.push((answered.id, result.clone()));
                woken.push(answered.waker);
            }
            woken.extend(state.nudge());
        }
        for waker in woken {
            waker.wake();
        }
    }
}

impl Drop for Lead<'_> {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        let next = {
            let mut state = lock(&self.sequencer.state);
            state.running = false;
            state.nudge()
        };
        if let Some(next) = next {
            next.wake();
        }
    }
}
