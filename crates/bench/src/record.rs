//! Counting while a load runs: one recorder a thread, merged at the end.
//!
//! Callers: [`crate::drive`] records, [`crate::run()`] merges.

use crate::job::{Job, Op};
use crate::outcome::{Latency, OpOutcome, Slice, TimeLine};
use bedplate_types::{Error, ErrorKind, Result};
use hdrhistogram::Histogram;
use std::time::Duration;

/// Longest latency told apart from longer ones.
const MAX_NS: u64 = 600_000_000_000;
/// Milliseconds of a slice of the time line.
const SLICE_MS: u64 = 100;
/// Slices kept at most: an hour. What comes later is counted in the last.
const MAX_SLICES: usize = 36_000;
/// The heat map's buckets: four for each power of two from 2^8 to 2^40 nanoseconds.
const FIRST_POWER: u32 = 8;
const BUCKETS: usize = 128;

fn histogram(digits: u8) -> Result<Histogram<u64>> {
    Histogram::new_with_bounds(1, MAX_NS, digits)
        .map_err(|e| Error::new(ErrorKind::Limit, format!("cannot make a histogram: {e}")))
}

/// The heat map's bucket of a latency.
#[inline]
fn bucket(ns: u64) -> usize {
    let power = 63 - ns.max(1).leading_zeros();
    if power < FIRST_POWER {
        return 0;
    }
    let quarter = (ns >> (power - 2)) as usize & 3;
    (((power - FIRST_POWER) as usize) * 4 + quarter).min(BUCKETS - 1)
}

/// The lower end of a bucket in nanoseconds.
fn bound(index: usize) -> u64 {
    (4 + (index as u64 & 3)) << (FIRST_POWER as usize - 2 + index / 4)
}

#[derive(Clone)]
struct SliceCount {
    requests: u64,
    bytes: u64,
    latencies: [u32; BUCKETS],
}

impl SliceCount {
    const EMPTY: Self = Self { requests: 0, bytes: 0, latencies: [0; BUCKETS] };
}

struct OpCount {
    requests: u64,
    bytes: u64,
    errors: u64,
    latency: Histogram<u64>,
}

/// The counts of one thread, or of several together.
pub(crate) struct Recorder {
    ops: [OpCount; 4],
    slices: Option<Vec<SliceCount>>,
    slice: usize,
    slice_end: Duration,
    /// The first failed request, as a sentence.
    pub first_error: Option<String>,
    /// Time from the start of what is measured to the last completion.
    pub elapsed: Duration,
    /// Requests due and never sent.
    pub unsent: u64,
    /// Requests of an open loop that had a free slot: how many, the sum of their lateness, the largest.
    pub late: (u64, u64, u64),
}

impl Recorder {
    pub fn new(job: &Job) -> Result<Self> {
        let count = |_| Ok(OpCount { requests: 0, bytes: 0, errors: 0, latency: histogram(3)? });
        let [read, write, trim, flush] = Op::ALL.map(count);
        Ok(Self {
            ops: [read?, write?, trim?, flush?],
            slices: job.time_line.then(Vec::new),
            slice: 0,
            slice_end: Duration::ZERO,
            first_error: None,
            elapsed: Duration::ZERO,
            unsent: 0,
            late: (0, 0, 0),
        })
    }

    /// Sets the time of what is recorded next, counted from the start of what is measured.
    #[inline]
    pub fn at(&mut self, time: Duration) {
        self.elapsed = time;
        if time >= self.slice_end {
            self.next_slice(time);
        }
    }

    #[cold]
    fn next_slice(&mut self, time: Duration) {
        let number = u64::try_from(time.as_millis()).unwrap_or(u64::MAX) / SLICE_MS;
        self.slice_end = Duration::from_millis(number.saturating_add(1).saturating_mul(SLICE_MS));
        if let Some(slices) = &mut self.slices {
            self.slice = usize::try_from(number).unwrap_or(MAX_SLICES).min(MAX_SLICES - 1);
            if self.slice >= slices.len() {
                slices.resize(self.slice + 1, SliceCount::EMPTY);
            }
        }
    }

    /// A completed request; its latency when it was measured.
    #[inline]
    pub fn record(&mut self, op: Op, len: u32, good: bool, latency: Option<Duration>) {
        let count = &mut self.ops[op as usize];
        let bytes = if good { u64::from(len) } else { 0 };
        count.requests += 1;
        count.bytes += bytes;
        count.errors += u64::from(!good);
        let ns = latency.map(|latency| latency.as_nanos() as u64);
        if let Some(ns) = ns {
            count.latency.saturating_record(ns.max(1));
        }
        if let Some(slice) = self.slices.as_mut().and_then(|all| all.get_mut(self.slice)) {
            slice.requests += 1;
            slice.bytes += if op == Op::Trim { 0 } else { bytes };
            if let Some(ns) = ns {
                slice.latencies[bucket(ns)] += 1;
            }
        }
    }

    /// A request of an open loop left so late although it had a free slot.
    #[inline]
    pub fn late_by(&mut self, late: Duration) {
        let ns = late.as_nanos() as u64;
        self.late.0 += 1;
        self.late.1 = self.late.1.saturating_add(ns);
        self.late.2 = self.late.2.max(ns);
    }

    /// Adds another thread's counts.
    pub fn add(&mut self, other: Recorder) {
        for (all, one) in self.ops.iter_mut().zip(other.ops) {
            all.requests += one.requests;
            all.bytes += one.bytes;
            all.errors += one.errors;
            // Both have the same bounds, so this can't fail.
            let _ = all.latency.add(&one.latency);
        }
        if let (Some(all), Some(one)) = (&mut self.slices, other.slices) {
            if all.len() < one.len() {
                all.resize(one.len(), SliceCount::EMPTY);
            }
            for (all, one) in all.iter_mut().zip(one) {
                all.requests += one.requests;
                all.bytes += one.bytes;
                for (all, one) in all.latencies.iter_mut().zip(one.latencies) {
                    *all = all.saturating_add(one);
                }
            }
        }
        self.first_error = self.first_error.take().or(other.first_error);
        self.elapsed = self.elapsed.max(other.elapsed);
        self.unsent += other.unsent;
        self.late.0 += other.late.0;
        self.late.1 = self.late.1.saturating_add(other.late.1);
        self.late.2 = self.late.2.max(other.late.2);
    }

    /// Each kind of request that there was.
    pub fn ops(&self) -> Result<Vec<OpOutcome>> {
        let seen = Op::ALL.iter().zip(&self.ops).filter(|(_, count)| count.requests > 0);
        seen.map(|(op, count)| {
            Ok(OpOutcome {
                op: *op,
                requests: count.requests,
                bytes: count.bytes,
                errors: count.errors,
                latency: latency(&count.latency)?,
            })
        })
        .collect()
    }

    /// Latencies of all but flushes.
    pub fn latency(&self) -> Result<Latency> {
        let mut all = histogram(3)?;
        for op in [Op::Read, Op::Write, Op::Trim] {
            let _ = all.add(&self.ops[op as usize].latency);
        }
        latency(&all)
    }

    /// The time line.
    pub fn time_line(&self) -> Option<TimeLine> {
        let slices = self.slices.as_ref()?.iter().map(|slice| {
            let pairs = (0_u16..).zip(slice.latencies).filter(|(_, count)| *count > 0);
            Slice { requests: slice.requests, bytes: slice.bytes, latencies: pairs.collect() }
        });
        Some(TimeLine {
            slice_ms: SLICE_MS,
            bounds_ns: (0..BUCKETS).map(bound).collect(),
            slices: slices.collect(),
        })
    }
}

/// A histogram in numbers.
fn latency(all: &Histogram<u64>) -> Result<Latency> {
    // Coarser, so that the buckets in a report are few.
    let mut coarse = histogram(2)?;
    let _ = coarse.add(all);
    let buckets = coarse.iter_recorded().map(|v| (v.value_iterated_to(), v.count_at_value()));
    Ok(Latency {
        samples: all.len(),
        min_ns: if all.is_empty() { 0 } else { all.min() },
        mean_ns: all.mean(),
        p50_ns: all.value_at_quantile(0.5),
        p90_ns: all.value_at_quantile(0.9),
        p99_ns: all.value_at_quantile(0.99),
        p999_ns: all.value_at_quantile(0.999),
        max_ns: all.max(),
        buckets: buckets.collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_of_the_heat_map_begin_at_their_bounds() {
        for index in 1..BUCKETS {
            let start = bound(index);
            assert_eq!((bucket(start), bucket(start - 1)), (index, index - 1), "{index}");
        }
        assert_eq!((bucket(0), bucket(u64::MAX)), (0, BUCKETS - 1));
    }

    #[test]
    fn counts_of_threads_are_added_up() {
        let mut all = Recorder::new(&Job::default()).expect("made");
        for (thread, at) in [(1, 50), (2, 250)] {
            let mut one = Recorder::new(&Job::default()).expect("made");
            one.at(Duration::from_millis(at));
            for ns in 1..=100 {
                let latency = Some(Duration::from_nanos(ns * 1000 * thread));
                one.record(Op::Read, 4096, true, latency);
            }
            one.record(Op::Write, 512, false, None);
            all.add(one);
        }
        let ops = all.ops().expect("ops");
        assert_eq!((ops[0].requests, ops[0].bytes, ops[0].errors), (200, 200 * 4096, 0));
        assert_eq!((ops[1].requests, ops[1].bytes, ops[1].errors), (2, 0, 2));
        let latency = all.latency().expect("latency");
        assert_eq!((latency.samples, latency.buckets.iter().map(|b| b.1).sum()), (200, 200));
        assert!(latency.max_ns.abs_diff(200_000) < 200 && latency.p50_ns.abs_diff(67_000) < 1000);
        let line = all.time_line().expect("a time line");
        let requests: Vec<u64> = line.slices.iter().map(|slice| slice.requests).collect();
        assert_eq!(requests, [101, 0, 101]);
        assert_eq!(line.slices[2].latencies.iter().map(|l| l.1).sum::<u32>(), 100);
        assert_eq!(all.elapsed, Duration::from_millis(250));
    }
}
