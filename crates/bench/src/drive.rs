//! The loop of one thread: sends requests as the plan and the arrival say, takes completions, counts and checks.
//!
//! Callers: [`crate::run()`], with whatever port the target has.
//!
//! Invariants: a slot is in flight from its push to its completion, or pausing, or free; when contents are checked no two requests
//! overlap of which one changes something; when an error ends the loop early, requests in flight are still waited for.

use crate::content::{Ledger, Verified};
use crate::job::{Arrival, Extent, Job, Op, duration};
use crate::plan::{Part, Plan, Step};
use crate::port::{Done, Port, Status};
use crate::random::{Random, mix};
use crate::record::Recorder;
use bedplate_types::{Error, ErrorKind, Result};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

/// Before a request is due the loop stops sleeping and looks at the clock, since a sleep ends late.
const EARLY: Duration = Duration::from_micros(60);
/// Bytes read at a time when all is read back.
const READ_BACK: u64 = 1 << 20;

/// What the threads of a job share.
pub(crate) struct Shared {
    /// All begin at once.
    pub begin: Barrier,
    /// Somebody failed, or the caller wants an end.
    pub stop: Arc<AtomicBool>,
    /// Threads that still send.
    pub working: AtomicU32,
}

/// What one thread did.
pub(crate) struct ThreadOutcome {
    pub record: Recorder,
    pub final_flush: Option<Duration>,
    pub verified: Option<Verified>,
}

/// A request under way.
#[derive(Clone, Copy)]
struct Flying {
    step: Step,
    /// When it was sent, or should have been.
    start: Instant,
    measured: bool,
    generation: u64,
}

/// The schedule of an open loop.
struct Schedule {
    gap: f64,
    poisson: bool,
    next: Instant,
    random: Random,
}

impl Schedule {
    fn new(job: &Job, thread: u32, start: Instant) -> Option<Self> {
        let Arrival::Open { rate, poisson } = job.arrival else { return None };
        let gap = f64::from(job.threads) / rate;
        // Threads take turns.
        let first = Duration::from_secs_f64(f64::from(thread) / rate);
        let random = Random::new(mix(job.seed) ^ u64::from(thread));
        Some(Self { gap, poisson, next: start + first, random })
    }

    fn step(&mut self) {
        let gap = if self.poisson { -(1.0 - self.random.unit()).ln() * self.gap } else { self.gap };
        self.next += Duration::from_secs_f64(gap.min(1e6));
    }
}

struct Loop<'a, P> {
    port: &'a mut P,
    job: &'a Job,
    shared: &'a Shared,
    plan: Plan,
    schedule: Option<Schedule>,
    think: Duration,
    free: Vec<usize>,
    pausing: VecDeque<(Instant, usize)>,
    flying: Vec<Option<Flying>>,
    in_flight: usize,
    sent: u64,
    /// A request that must wait until one that it overlaps is complete.
    held: Option<Step>,
    ledger: Option<Ledger>,
    /// Units to be read again, and the buffer for contents.
    again: Vec<u64>,
    buffer: Vec<u8>,
    record: Recorder,
    /// A flush is under way beside which nothing is sent.
    fence: bool,
    /// No slot was free at the end of the last round, so that what is late now is the target's fault.
    starved: bool,
    /// From here on it is measured.
    from: Instant,
    more: bool,
}

/// Runs one thread of a job to its end.
pub(crate) fn drive<P: Port>(
    port: &mut P,
    job: &Job,
    thread: u32,
    part: Part,
    shared: &Shared,
) -> Result<ThreadOutcome> {
    let prepared = prepare(port, job, thread, part);
    // Whoever fails must not leave the others waiting.
    shared.begin.wait();
    let (plan, ledger, record, buffer) =
        prepared.inspect_err(|_| shared.stop.store(true, Ordering::Relaxed))?;
    let start = Instant::now();
    let depth = job.depth as usize;
    let think = match job.arrival {
        Arrival::Closed { think } => duration(think, "the think time")?,
        Arrival::Open { .. } => Duration::ZERO,
    };
    let mut state = Loop {
        port,
        job,
        shared,
        plan,
        schedule: Schedule::new(job, thread, start),
        think,
        free: (0..depth).rev().collect(),
        pausing: VecDeque::new(),
        flying: vec![None; depth],
        in_flight: 0,
        sent: 0,
        held: None,
        ledger,
        again: Vec::new(),
        buffer,
        record,
        fence: false,
        starved: false,
        from: start + duration(job.warm_up, "the warm-up")?,
        more: true,
    };
    let ran = state.run(start);
    if ran.is_err() {
        shared.stop.store(true, Ordering::Relaxed);
    }
    let last = shared.working.fetch_sub(1, Ordering::AcqRel) == 1;
    ran?;
    let mut final_flush = None;
    if last && job.final_flush && job.changes() {
        let begin = Instant::now();
        state.alone(Step { op: Op::Flush, at: 0, len: 0 })?;
        final_flush = Some(begin.elapsed());
        state.record.elapsed = state.from.elapsed();
    }
    if job.verify.afterwards {
        state.read_back()?;
    }
    let verified = state.ledger.map(Ledger::into_found);
    Ok(ThreadOutcome { record: state.record, final_flush, verified })
}

type Prepared = (Plan, Option<Ledger>, Recorder, Vec<u8>);

fn prepare<P: Port>(port: &mut P, job: &Job, thread: u32, part: Part) -> Result<Prepared> {
    port.start()?;
    let plan = Plan::new(job, thread, part)?;
    // Ledgers of several runs must not take each other's blocks for their own.
    let run = mix(job.seed ^ std::process::id() as u64)
        ^ std::time::UNIX_EPOCH.elapsed().map_or(0, |t| t.as_nanos() as u64);
    let unit = job.sizes.unit().max(1);
    let ledger = job.verify.any().then(|| Ledger::new(run, part.first, part.len, unit));
    let bytes = usize::try_from(job.sizes.largest()).unwrap_or(0);
    let mut buffer = vec![0; bytes];
    let mut random = Random::new(mix(job.seed) ^ u64::from(thread) << 32);
    for slot in 0..job.depth as usize {
        // Bytes that do not compress, so that a compressing device underneath flatters nobody.
        random.fill(&mut buffer);
        port.put(slot, &buffer)?;
    }
    Ok((plan, ledger, Recorder::new(job)?, buffer))
}

impl<P: Port> Loop<'_, P> {
    fn run(&mut self, start: Instant) -> Result<()> {
        let limit = match self.job.extent {
            Extent::Time { seconds } => Some(seconds),
            Extent::Pass { limit } => limit,
            Extent::Requests { .. } => None,
        };
        let end = limit.map(|s| duration(s, "the duration")).transpose()?.map(|d| start + d);
        let sample = u64::from(self.job.sample);
        let most = if self.job.reap == 0 { usize::MAX } else { self.job.reap as usize };
        let mut done = Vec::with_capacity(self.flying.len());
        let mut now = start;
        let mut failed = Ok(());
        loop {
            let over = end.is_some_and(|end| now >= end);
            if over || self.shared.stop.load(Ordering::Relaxed) {
                self.more = false;
            }
            let mut limit = None;
            if self.more {
                limit = self.fill(now, sample)?;
            }
            if self.in_flight == 0 {
                match limit {
                    // Asleep until something is due, but not beyond the end.
                    Some(due) if self.more => nap(now, end.map_or(due, |end| due.min(end))),
                    _ if !self.more => break,
                    _ => {}
                }
                now = Instant::now();
                continue;
            }
            let wait = limit.map(|due| due.saturating_duration_since(now).saturating_sub(EARLY));
            self.port.exchange(wait, most, &mut done)?;
            now = Instant::now();
            if let Err(e) = self.complete(&mut done, now) {
                // Requests in flight are waited for.
                self.more = false;
                failed = Err(e);
            }
            if !self.again.is_empty() && failed.is_ok() {
                failed = self.settle_again();
                now = Instant::now();
            }
        }
        if let (Some(schedule), Some(end)) = (&mut self.schedule, end) {
            while schedule.next < end.min(now) {
                schedule.step();
                self.record.unsent += 1;
            }
        }
        failed
    }

    /// Sends what can be sent now; gives when the next request is due, if that is a matter of time.
    #[inline]
    fn fill(&mut self, now: Instant, sample: u64) -> Result<Option<Instant>> {
        while let Some(&(ready, slot)) = self.pausing.front() {
            if ready > now {
                break;
            }
            self.pausing.pop_front();
            self.free.push(slot);
        }
        let batch = match self.job.batch {
            0 => usize::MAX,
            most => most as usize,
        };
        if self.fence {
            if self.in_flight > 0 {
                return Ok(None);
            }
            self.fence = false;
        }
        let mut pushed = 0;
        while let Some(&slot) = self.free.last() {
            let due = self.schedule.as_ref().map_or(now, |schedule| schedule.next);
            if due > now {
                self.starved = false;
                return Ok(Some(due));
            }
            let Some(step) = self.held.take().or_else(|| self.plan.next(now)) else {
                self.more = false;
                return Ok(None);
            };
            if self.job.flush.alone && step.op == Op::Flush {
                if self.in_flight > 0 {
                    self.held = Some(step);
                    return Ok(None);
                }
                self.fence = true;
            }
            let mut generation = 0;
            if let Some(ledger) = &mut self.ledger {
                if overlaps(&self.flying, step) {
                    self.held = Some(step);
                    return Ok(None);
                }
                if step.op == Op::Write {
                    let data = self.buffer.get_mut(..step.len as usize).unwrap_or_default();
                    generation = ledger.stamp(step.at, data);
                    self.port.put(slot, data)?;
                }
            }
            if let Some(schedule) = self.schedule.as_mut().filter(|_| !self.plan.between) {
                schedule.step();
                if !self.starved {
                    self.record.late_by(now - due);
                }
            }
            self.free.pop();
            self.sent += 1;
            let measured = self.sent.is_multiple_of(sample);
            self.flying[slot] = Some(Flying { step, start: due, measured, generation });
            self.port.push(slot, step)?;
            self.in_flight += 1;
            pushed += 1;
            if self.fence {
                return Ok(None);
            }
            if pushed >= batch && !self.free.is_empty() {
                self.port.send()?;
                pushed = 0;
            }
        }
        self.starved = self.free.is_empty();
        Ok(self.pausing.front().map(|pause| pause.0))
    }

    #[inline]
    fn complete(&mut self, done: &mut Vec<Done>, now: Instant) -> Result<()> {
        let measure = now >= self.from;
        if measure && !done.is_empty() {
            self.record.at(now - self.from);
        }
        let mut failed = Ok(());
        for Done { slot, status } in done.drain(..) {
            let Some(flying) = self.flying.get_mut(slot).and_then(Option::take) else {
                let text = "the target completed a request that was not under way";
                return Err(Error::new(ErrorKind::Protocol, text));
            };
            self.in_flight -= 1;
            let good = status == Status::Good;
            if measure {
                let latency = flying.measured.then(|| now.saturating_duration_since(flying.start));
                self.record.record(flying.step.op, flying.step.len, good, latency);
            }
            if self.think.is_zero() {
                self.free.push(slot);
            } else {
                self.pausing.push_back((now + self.think, slot));
            }
            if self.ledger.is_some() {
                self.check(slot, flying, good)?;
            }
            if !good {
                let e = describe(flying.step, status);
                self.record.first_error.get_or_insert_with(|| e.to_string());
                if !self.job.keep_going {
                    failed = Err(e);
                }
            }
        }
        failed
    }

    /// Compares or notes the content of a completed request.
    fn check(&mut self, slot: usize, flying: Flying, good: bool) -> Result<()> {
        let Some(ledger) = &mut self.ledger else { return Ok(()) };
        let (at, len) = (flying.step.at, flying.step.len as usize);
        match flying.step.op {
            Op::Write => ledger.wrote(at, len, good.then_some(flying.generation)),
            Op::Trim => ledger.trimmed(at, len),
            Op::Read if good && self.job.verify.reads => {
                let data = self.buffer.get_mut(..len).unwrap_or_default();
                self.port.get(slot, data)?;
                self.again.extend(ledger.compare(at, data));
            }
            Op::Read | Op::Flush => {}
        }
        Ok(())
    }

    /// Waits for all that is in flight, then reads units again that held older content.
    fn settle_again(&mut self) -> Result<()> {
        let mut done = Vec::new();
        while self.in_flight > 0 {
            self.port.exchange(None, usize::MAX, &mut done)?;
            self.complete(&mut done, Instant::now())?;
        }
        let unit = self.ledger.as_ref().map_or(0, Ledger::unit);
        for at in std::mem::take(&mut self.again) {
            self.alone(Step { op: Op::Read, at, len: unit as u32 })?;
            let data = self.buffer.get_mut(..unit as usize).unwrap_or_default();
            self.port.get(0, data)?;
            if let Some(ledger) = &mut self.ledger {
                ledger.compare_again(at, data);
            }
        }
        Ok(())
    }

    /// One request while nothing else is in flight, in slot 0.
    fn alone(&mut self, step: Step) -> Result<()> {
        let mut done = Vec::new();
        self.port.push(0, step)?;
        while done.is_empty() {
            self.port.exchange(None, usize::MAX, &mut done)?;
        }
        match done.first() {
            Some(Done { status: Status::Good, .. }) => Ok(()),
            Some(Done { status, .. }) => Err(describe(step, *status)),
            None => Ok(()),
        }
    }

    /// Reads back all that was written.
    fn read_back(&mut self) -> Result<()> {
        let Some(ledger) = &self.ledger else { return Ok(()) };
        let most = READ_BACK.min(self.buffer.len() as u64);
        for (at, len) in ledger.written(most) {
            self.alone(Step { op: Op::Read, at, len: len as u32 })?;
            let data = self.buffer.get_mut(..len as usize).unwrap_or_default();
            self.port.get(0, data)?;
            if let Some(ledger) = &mut self.ledger {
                self.again = ledger.compare(at, data);
            }
            self.settle_again()?;
        }
        Ok(())
    }
}

/// Sleeps until shortly before `due`, then gives the core away until it is there.
fn nap(now: Instant, due: Instant) {
    let left = due.saturating_duration_since(now);
    if left > EARLY {
        std::thread::sleep(left - EARLY);
    } else {
        std::thread::yield_now();
    }
}

/// Whether `step` and a request under way touch one byte, and one of them changes it.
fn overlaps(flying: &[Option<Flying>], step: Step) -> bool {
    let end = step.at + u64::from(step.len);
    flying.iter().flatten().any(|other| {
        let touches = other.step.at < end && step.at < other.step.at + u64::from(other.step.len);
        touches && (step.op != Op::Read || other.step.op != Op::Read)
    })
}

fn describe(step: Step, status: Status) -> Error {
    let Step { op, at, len } = step;
    let doing = match op {
        Op::Flush => "a flush failed".to_owned(),
        _ => format!("a {} of {len} bytes at byte {at} failed", op.name()),
    };
    match status {
        Status::Errno(errno) => {
            let cause = std::io::Error::from_raw_os_error(errno);
            Error::new(ErrorKind::Io, format!("{doing}: {cause}"))
        }
        Status::Short => Error::new(ErrorKind::Io, format!("{doing}: the target ended it early")),
        Status::Failed | Status::Good => {
            Error::new(ErrorKind::Io, format!("{doing}: the target reports an error"))
        }
    }
}
