//! Closed loops of reads and writes at full speed, one thread a queue, for benchmarks and stress tests.
//!
//! Chains are laid out once; a request then costs its header, an index and a look at its status.

use super::queue::header;
use super::{Buffer, Queue};
use bedplate_types::{Error, ErrorKind, Result};
use bedplate_virtio::spec;
use hdrhistogram::Histogram;
use std::time::{Duration, Instant};

/// Requests between two whose latency is measured, where many are in flight.
const SAMPLE: u64 = 16;
const MAX_LATENCY_NS: u64 = 60_000_000_000;

/// How a queue is loaded.
#[derive(Clone, Debug)]
pub struct LoadSpec {
    /// Percent of reads; the others are writes.
    pub read_percent: u8,
    /// Random places; else one after the other.
    pub random: bool,
    /// Bytes a request.
    pub block: u32,
    /// Requests in flight on each queue.
    pub depth: u16,
    /// How long.
    pub duration: Duration,
    /// Seed of places and data.
    pub seed: u64,
    /// First byte of the disk that is used.
    pub start: u64,
    /// Bytes of the disk that are used; each queue has its own part of them.
    pub region: u64,
    /// How long to look at the ring before sleeping until an interrupt; None: never sleep.
    pub spin: Option<Duration>,
}

impl Default for LoadSpec {
    fn default() -> Self {
        Self {
            read_percent: 100,
            random: true,
            block: 4096,
            depth: 64,
            duration: Duration::from_secs(1),
            seed: 1,
            start: 0,
            region: 1 << 30,
            spin: None,
        }
    }
}

/// One request of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Place on the disk in bytes.
    pub at: u64,
    /// A write; else a read.
    pub write: bool,
}

/// What came out.
#[derive(Clone, Debug)]
pub struct LoadResult {
    /// Requests completed.
    pub requests: u64,
    /// Bytes they moved.
    pub bytes: u64,
    /// Requests that failed.
    pub errors: u64,
    /// From the first request to the last completion.
    pub elapsed: Duration,
    /// Latencies in nanoseconds (of every request at depth 1, else of each 16th).
    pub latency: Histogram<u64>,
}

impl LoadResult {
    fn empty() -> Result<Self> {
        let bounds = |e| Error::new(ErrorKind::Limit, format!("cannot make a histogram: {e}"));
        let latency = Histogram::new_with_bounds(1, MAX_LATENCY_NS, 3).map_err(bounds)?;
        Ok(Self { requests: 0, bytes: 0, errors: 0, elapsed: Duration::ZERO, latency })
    }

    /// Requests a second.
    pub fn iops(&self) -> f64 {
        self.requests as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }

    fn merge(mut self, other: &Self) -> Self {
        self.requests += other.requests;
        self.bytes += other.bytes;
        self.errors += other.errors;
        self.elapsed = self.elapsed.max(other.elapsed);
        // Both have the same bounds, so this can't fail.
        let _ = self.latency.add(&other.latency);
        self
    }
}

/// A small, fast generator (xorshift64*).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let bits = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d);
        ((u128::from(bits) * u128::from(limit)) >> 64) as u64
    }
}

impl LoadSpec {
    /// The requests of queue `queue` of `queues`, without an end.
    pub fn steps(&self, queue: usize, queues: usize) -> impl Iterator<Item = Step> + Send + use<> {
        let block = u64::from(self.block.max(512));
        let blocks = (self.region / block / queues.max(1) as u64).max(1);
        let first = self.start + blocks * block * queue as u64;
        let seed = self.seed.wrapping_add(queue as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut random = Random(seed);
        let (percent, is_random, mut next) =
            (u64::from(self.read_percent), self.random, blocks - 1);
        std::iter::from_fn(move || {
            let place = if is_random {
                random.below(blocks)
            } else {
                next = (next + 1) % blocks;
                next
            };
            let write = percent < 100 && random.below(100) >= percent;
            Some(Step { at: first + place * block, write })
        })
    }
}

/// Runs the load on all queues, each in a thread of its own. The queues are given back.
///
/// # Errors
/// `InvalidInput` when the queues' memory or size is too small for the depth; `Cancelled` when the back end hangs.
pub fn run(queues: Vec<Queue>, spec: &LoadSpec) -> Result<(LoadResult, Vec<Queue>)> {
    let n = queues.len();
    run_steps(queues, spec, |queue| spec.steps(queue, n))
}

/// As [`run`], with requests that the caller makes up; a queue ends early when its requests do.
///
/// # Errors
/// As [`run`].
pub fn run_steps<I>(
    queues: Vec<Queue>,
    spec: &LoadSpec,
    steps: impl Fn(usize) -> I,
) -> Result<(LoadResult, Vec<Queue>)>
where
    I: Iterator<Item = Step> + Send,
{
    let outcomes = std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for mut queue in queues {
            let steps = steps(queue.index());
            threads.push(scope.spawn(move || drive(&mut queue, spec, steps).map(|r| (r, queue))));
        }
        let failed = || Error::new(ErrorKind::Cancelled, "a load thread has failed");
        let join = |t: std::thread::ScopedJoinHandle<'_, _>| t.join().map_err(|_| failed());
        threads.into_iter().map(join).collect::<Result<Vec<_>>>()
    })?;
    let mut total = LoadResult::empty()?;
    let mut queues = Vec::new();
    for outcome in outcomes {
        let (result, queue) = outcome?;
        total = total.merge(&result);
        queues.push(queue);
    }
    Ok((total, queues))
}

/// Descriptors of a request: header, data, status.
const CHAIN: u16 = 3;

/// Where the parts of each request lie in a queue's memory.
struct Layout {
    headers: u64,
    status: u64,
    data: u64,
    block: u32,
}

impl Layout {
    fn new(queue: &Queue, spec: &LoadSpec) -> Result<Self> {
        let depth = u64::from(spec.depth);
        let (at, len) = queue.room();
        let status = at + depth * 16;
        let data = (status + depth * 64).next_multiple_of(4096);
        let end = data + depth * u64::from(spec.block);
        let fits = depth != 0 && u64::from(queue.size()) >= depth * u64::from(CHAIN);
        if !fits || end > at + len {
            let text = format!(
                "depth {depth} with {} bytes a request needs a queue of {} and {} bytes of memory",
                spec.block,
                (depth * u64::from(CHAIN)).next_power_of_two(),
                end - at
            );
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        Ok(Self { headers: at, status, data, block: spec.block })
    }

    fn chain(&self, slot: u16, write: bool) -> [Buffer; 3] {
        let i = u64::from(slot);
        [
            Buffer { addr: self.headers + 16 * i, len: 16, write: false },
            Buffer { addr: self.data + u64::from(self.block) * i, len: self.block, write: !write },
            // A cache line each, so that the two sides don't meet on one.
            Buffer { addr: self.status + 64 * i, len: 1, write: true },
        ]
    }
}

/// The state of one queue's loop.
struct Driver<'a, I> {
    queue: &'a mut Queue,
    steps: I,
    layout: Layout,
    /// The direction each slot's chain is laid out for.
    writes: Vec<bool>,
    started: Vec<Option<Instant>>,
    sent: u64,
    sample: u64,
}

impl<I: Iterator<Item = Step>> Driver<'_, I> {
    /// Sends the next request in `slot`; false when there is none.
    #[inline]
    fn send(&mut self, slot: u16, now: Instant) -> bool {
        let Some(step) = self.steps.next() else { return false };
        let i = usize::from(slot);
        if self.writes[i] != step.write {
            self.writes[i] = step.write;
            let chain = self.layout.chain(slot, step.write);
            self.queue.lay_out(slot * CHAIN, &chain);
        }
        let kind = if step.write { spec::T_OUT } else { spec::T_IN };
        let at = self.layout.headers + 16 * u64::from(slot);
        self.queue.memory().write(at, &header(kind, step.at / 512));
        self.started[i] = self.sent.is_multiple_of(self.sample).then_some(now);
        self.sent += 1;
        self.queue.ring().add(slot * CHAIN);
        true
    }

    /// Waits until a chain may have come back. False when the back end hangs.
    fn wait(&mut self, spin: Option<Duration>) -> bool {
        let begin = Instant::now();
        loop {
            for _ in 0..64 {
                if self.queue.ring().has_used() {
                    return true;
                }
                std::hint::spin_loop();
            }
            // The back end may need this core to go on.
            std::thread::yield_now();
            let waited = begin.elapsed();
            if spin.is_some_and(|s| waited >= s) {
                if !self.queue.ring().want_interrupts(true) {
                    self.queue.sleep(Duration::from_secs(1));
                }
                self.queue.ring().want_interrupts(false);
            }
            if waited > Duration::from_secs(60) {
                return false;
            }
        }
    }
}

fn drive(
    queue: &mut Queue,
    spec: &LoadSpec,
    steps: impl Iterator<Item = Step>,
) -> Result<LoadResult> {
    let layout = Layout::new(queue, spec)?;
    let mut result = LoadResult::empty()?;
    let mut random = Random(spec.seed | 1);
    let bytes: Vec<u8> = (0..spec.block).map(|_| random.below(256) as u8).collect();
    for slot in 0..spec.depth {
        let chain = layout.chain(slot, false);
        // Data that does not compress, different in every slot.
        queue.memory().write(chain[1].addr, &bytes);
        queue.memory().write(chain[1].addr, &[slot as u8, (slot >> 8) as u8]);
        queue.lay_out(slot * CHAIN, &chain);
    }
    queue.ring().want_interrupts(false);
    let depth = usize::from(spec.depth);
    let sample = if depth == 1 { 1 } else { SAMPLE };
    let (writes, started) = (vec![false; depth], vec![None; depth]);
    let mut d = Driver { queue, steps, layout, writes, started, sent: 0, sample };
    let begin = Instant::now();
    let end = begin.checked_add(spec.duration).unwrap_or(begin + Duration::from_secs(1 << 20));
    let mut in_flight = (0..spec.depth).filter(|&slot| d.send(slot, begin)).count();
    d.queue.publish();
    let mut now = begin;
    while in_flight > 0 {
        if !d.wait(spec.spin) {
            let text = format!("the back end hangs on queue {}", d.queue.index());
            return Err(Error::new(ErrorKind::Cancelled, text));
        }
        now = Instant::now();
        let go_on = now < end;
        // Bounded: with a fast back end new completions come while these are handled.
        for _ in 0..depth {
            let Some(used) = d.queue.ring().take_used() else { break };
            let slot = (used.head as u16) / CHAIN;
            let i = usize::from(slot).min(depth - 1);
            let status = d.layout.status + 64 * i as u64;
            // SAFETY: `at` gives a mapped byte of the shared memory.
            let ok = unsafe { d.queue.memory().at(status, 1).read_volatile() } == spec::S_OK;
            result.requests += 1;
            result.errors += u64::from(!ok);
            if let Some(start) = d.started[i].take() {
                let ns = now.duration_since(start).as_nanos() as u64;
                result.latency.saturating_record(ns.max(1));
            }
            if !(go_on && d.send(slot, now)) {
                in_flight -= 1;
            }
        }
        d.queue.publish();
    }
    result.elapsed = now - begin;
    result.bytes = result.requests * u64::from(spec.block);
    Ok(result)
}
