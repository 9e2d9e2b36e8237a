//! The requests of one thread, one after the other.
//!
//! Callers: the loop that drives a port ([`crate::drive`]).
//!
//! Invariants: every target is asked for the same requests in the same order by the same job and seed (but for those that depend on
//! time); all of them lie inside of the thread's part of the disk.

use crate::job::{Extent, FlushEvery, Job, Mix, Op, Pattern, Share, SizeShare, Sizes, duration};
use crate::random::{Permutation, Random, Zipf};
use bedplate_types::{Error, ErrorKind, Result};
use std::time::{Duration, Instant};

/// One request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// What is done.
    pub op: Op,
    /// First byte on the disk; 0 for flushes.
    pub at: u64,
    /// Bytes; 0 for flushes.
    pub len: u32,
}

const FLUSH: Step = Step { op: Op::Flush, at: 0, len: 0 };

enum Places {
    Sequential {
        next: [u64; 3],
    },
    Random,
    Zipf {
        ranks: Zipf,
        order: Permutation,
    },
    HotCold {
        hot: u64,
        load: u64,
    },
    /// Every unit once; `None`: in order.
    Pass {
        next: u64,
        order: Option<Permutation>,
    },
}

/// The part of a disk that one thread uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// First byte.
    pub first: u64,
    /// Bytes, a multiple of the job's unit.
    pub len: u64,
}

impl Part {
    /// The part of thread `thread` on a disk of `size` bytes.
    ///
    /// # Errors
    /// `InvalidInput` when the region leaves the disk or has no room for a request of each thread.
    pub fn of(job: &Job, thread: u32, size: u64) -> Result<Part> {
        let bad = |text: String| Error::new(ErrorKind::InvalidInput, text);
        let region = job.region.unwrap_or_else(|| size.saturating_sub(job.offset));
        if job.offset.checked_add(region).is_none_or(|end| end > size) {
            return Err(bad(format!(
                "the target has {size} bytes, fewer than the region of {region} from byte {} needs",
                job.offset
            )));
        }
        let unit = job.sizes.unit().max(1);
        let parts = match job.share {
            Share::Parts => u64::from(job.threads.max(1)),
            Share::Whole => 1,
        };
        let units = region / unit / parts;
        let index = if job.share == Share::Parts { u64::from(thread) } else { 0 };
        if units * unit < job.sizes.largest() {
            return Err(bad(format!(
                "a region of {region} bytes for {parts} threads has no room for requests of {} bytes",
                job.sizes.largest()
            )));
        }
        Ok(Part { first: job.offset + index * units * unit, len: units * unit })
    }
}

/// What is left to do.
pub struct Plan {
    random: Random,
    part: Part,
    unit: u64,
    mix: Mix,
    sizes: Sizes,
    places: Places,
    left: Option<u64>,
    flush: FlushPolicy,
    /// The last request given is a flush of [`FlushEvery`], which no schedule counts.
    pub between: bool,
}

impl Plan {
    /// The requests of thread `thread` in its `part`.
    ///
    /// # Errors
    /// `InvalidInput` for a time that can't be.
    pub fn new(job: &Job, thread: u32, part: Part) -> Result<Self> {
        let mut random =
            Random::new(job.seed.wrapping_mul(1 << 20).wrapping_add(u64::from(thread)));
        let unit = job.sizes.unit().max(1);
        let units = part.len / unit;
        let pass = matches!(job.extent, Extent::Pass { .. });
        let places = match job.pattern {
            Pattern::Sequential if pass => Places::Pass { next: 0, order: None },
            Pattern::Random if pass => {
                Places::Pass { next: 0, order: Some(Permutation::new(units, &mut random)) }
            }
            Pattern::Sequential => Places::Sequential { next: [0; 3] },
            Pattern::Random => Places::Random,
            Pattern::Zipf { theta } => Places::Zipf {
                ranks: Zipf::new(units, theta),
                order: Permutation::new(units, &mut random),
            },
            Pattern::HotCold { space, load } => {
                let hot = (units * u64::from(space) / 100).max(1);
                Places::HotCold { hot, load: u64::from(load) }
            }
        };
        let left = match job.extent {
            Extent::Requests { count } => Some(count),
            _ => None,
        };
        let flush = FlushPolicy::new(&job.flush)?;
        let sizes = job.sizes.clone();
        Ok(Self { random, part, unit, mix: job.mix, sizes, places, left, flush, between: false })
    }

    /// The next request; `None` when all is done. `now` decides about flushes by time.
    #[inline]
    pub fn next(&mut self, now: Instant) -> Option<Step> {
        self.between = self.flush.due(now);
        if self.between {
            return Some(FLUSH);
        }
        if let Some(left) = &mut self.left {
            *left = left.checked_sub(1)?;
        }
        let op = self.op();
        if op == Op::Flush {
            return Some(FLUSH);
        }
        let len = self.size();
        let at = self.place(op, len)?;
        let step = Step { op, at: self.part.first + at, len: len as u32 };
        if op != Op::Read {
            self.flush.changed(len);
        }
        Some(step)
    }

    #[inline]
    fn op(&mut self) -> Op {
        match self.mix {
            Mix { read: 100, .. } => Op::Read,
            Mix { write: 100, .. } => Op::Write,
            Mix { read, write, trim, .. } => {
                let mut point = self.random.below(100) as u8;
                for (op, percent) in [(Op::Read, read), (Op::Write, write), (Op::Trim, trim)] {
                    if point < percent {
                        return op;
                    }
                    point -= percent;
                }
                Op::Flush
            }
        }
    }

    #[inline]
    fn size(&mut self) -> u64 {
        match &self.sizes {
            Sizes::Fixed { bytes } => *bytes,
            Sizes::Range { min, max } => min * (1 + self.random.below(max / min)),
            Sizes::Split { parts } => {
                let mut point = self.random.below(100) as u8;
                for SizeShare { bytes, percent } in parts {
                    if point < *percent {
                        return *bytes;
                    }
                    point -= percent;
                }
                self.unit
            }
        }
    }

    /// A place in the part for `len` bytes.
    #[inline]
    fn place(&mut self, op: Op, len: u64) -> Option<u64> {
        let units = self.part.len / self.unit;
        // Places from which `len` bytes fit.
        let places = units - (len / self.unit - 1).min(units - 1);
        let unit = match &mut self.places {
            Places::Random => self.random.below(places),
            Places::Sequential { next } => {
                let next = &mut next[op as usize % 3];
                if *next >= places {
                    *next = 0;
                }
                let unit = *next;
                *next += len / self.unit;
                unit
            }
            Places::Zipf { ranks, order } => {
                order.at(ranks.draw(&mut self.random).min(units - 1)).min(places - 1)
            }
            Places::HotCold { hot, load } => {
                let hot = (*hot).min(places);
                let unit = if self.random.below(100) < *load || hot == places {
                    self.random.below(hot)
                } else {
                    hot + self.random.below(places - hot)
                };
                unit.min(places - 1)
            }
            Places::Pass { next, order } => {
                if *next >= units {
                    return None;
                }
                let unit = order.as_ref().map_or(*next, |order| order.at(*next));
                *next += 1;
                unit
            }
        };
        Some(unit * self.unit)
    }
}

/// When flushes are due.
struct FlushPolicy {
    requests: Option<u64>,
    bytes: Option<u64>,
    time: Option<Duration>,
    seen: (u64, u64),
    last: Option<Instant>,
}

impl FlushPolicy {
    fn new(every: &FlushEvery) -> Result<Self> {
        let time = every.seconds.map(|s| duration(s, "the time between flushes")).transpose()?;
        let (requests, bytes) = (every.requests, every.bytes);
        Ok(Self { requests, bytes, time, seen: (0, 0), last: None })
    }

    #[inline]
    fn changed(&mut self, len: u64) {
        self.seen.0 += 1;
        self.seen.1 += len;
    }

    #[inline]
    fn due(&mut self, now: Instant) -> bool {
        if self.seen.0 == 0 {
            return false;
        }
        let reached = |limit: Option<u64>, seen| limit.is_some_and(|limit| seen >= limit);
        let late = match self.time {
            None => false,
            Some(time) => now.duration_since(*self.last.get_or_insert(now)) >= time,
        };
        let due = late || reached(self.requests, self.seen.0) || reached(self.bytes, self.seen.1);
        if due {
            self.seen = (0, 0);
            self.last = Some(now);
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(job: &Job, thread: u32, size: u64, count: usize) -> Vec<Step> {
        let part = Part::of(job, thread, size).expect("a part");
        let mut plan = Plan::new(job, thread, part).expect("a plan");
        let now = Instant::now();
        std::iter::from_fn(|| plan.next(now)).take(count).collect()
    }

    fn places(job: &Job, thread: u32, size: u64, count: usize) -> Vec<u64> {
        steps(job, thread, size, count).into_iter().map(|step| step.at).collect()
    }

    #[test]
    fn a_pass_asks_for_every_block_once_over_all_threads() {
        for pattern in [Pattern::Random, Pattern::Sequential] {
            let job = Job {
                pattern,
                threads: 2,
                extent: Extent::Pass { limit: None },
                offset: 4096,
                region: Some(1 << 20),
                ..Job::default()
            };
            let mut all: Vec<u64> =
                (0..2).flat_map(|thread| places(&job, thread, 1 << 30, usize::MAX)).collect();
            assert_eq!(all.is_sorted(), pattern == Pattern::Sequential);
            all.sort_unstable();
            assert_eq!(all, (0..256).map(|block| 4096 + block * 4096).collect::<Vec<_>>());
        }
    }

    #[test]
    fn requests_stay_inside_of_their_thread_s_part() {
        let split =
            vec![SizeShare { bytes: 4096, percent: 50 }, SizeShare { bytes: 12288, percent: 50 }];
        let sizes = [
            Sizes::Fixed { bytes: 4096 },
            Sizes::Range { min: 4096, max: 20480 },
            Sizes::Split { parts: split },
        ];
        let patterns = [
            Pattern::Random,
            Pattern::Sequential,
            Pattern::Zipf { theta: 1.1 },
            Pattern::HotCold { space: 10, load: 90 },
        ];
        for (sizes, pattern) in
            sizes.iter().flat_map(|s| patterns.iter().map(move |p| (s.clone(), *p)))
        {
            let job = Job { sizes, pattern, threads: 3, ..Job::default() };
            let part = Part::of(&job, 1, 1 << 20).expect("a part");
            for step in steps(&job, 1, 1 << 20, 5000) {
                let end = step.at + u64::from(step.len);
                assert!(step.at >= part.first && end <= part.first + part.len, "{job:?} {step:?}");
                assert!(step.at.is_multiple_of(4096) && step.len.is_multiple_of(4096));
            }
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_requests() {
        let job = |seed| Job { seed, ..Job::default() };
        assert_eq!(steps(&job(3), 0, 1 << 30, 100), steps(&job(3), 0, 1 << 30, 100));
        assert_ne!(steps(&job(3), 0, 1 << 30, 100), steps(&job(4), 0, 1 << 30, 100));
        assert_ne!(
            places(&Job { share: Share::Whole, ..job(3) }, 0, 1 << 30, 100),
            places(&Job { share: Share::Whole, ..job(3) }, 1, 1 << 30, 100)
        );
    }

    #[test]
    fn kinds_sizes_and_hot_places_come_by_their_shares() {
        let job = Job {
            mix: Mix { read: 50, write: 30, trim: 15, flush: 5 },
            pattern: Pattern::HotCold { space: 10, load: 90 },
            ..Job::default()
        };
        let all = steps(&job, 0, 1 << 30, 20_000);
        for (op, percent) in [(Op::Read, 50), (Op::Write, 30), (Op::Trim, 15), (Op::Flush, 5)] {
            let count = all.iter().filter(|step| step.op == op).count();
            assert!(count.abs_diff(percent * 200) < 300, "{op:?}: {count}");
        }
        let hot = all.iter().filter(|s| s.op == Op::Read && s.at < (1 << 30) / 10).count();
        let reads = all.iter().filter(|s| s.op == Op::Read).count();
        assert!((hot * 100 / reads).abs_diff(90) <= 2, "{hot} of {reads}");
    }

    #[test]
    fn flushes_come_after_requests_and_bytes() {
        let job = |flush| Job { mix: Mix::WRITE, flush, ..Job::default() };
        let after = |flush| {
            let all = steps(&job(flush), 0, 1 << 30, 12);
            all.iter().map(|step| step.op == Op::Flush).collect::<Vec<_>>()
        };
        let third: Vec<bool> = (1..=12).map(|i| i % 4 == 0).collect();
        assert_eq!(after(FlushEvery { requests: Some(3), ..Default::default() }), third);
        assert_eq!(after(FlushEvery { bytes: Some(3 * 4096), ..Default::default() }), third);
        let part = Part { first: 0, len: 1 << 20 };
        let timed = FlushEvery { seconds: Some(1.0), ..Default::default() };
        let mut plan = Plan::new(&job(timed), 0, part).expect("a plan");
        let start = Instant::now();
        let mut ops = Vec::new();
        for half in 0..6 {
            ops.push(plan.next(start + Duration::from_millis(half * 500)).expect("endless").op);
        }
        use Op::{Flush as F, Write as W};
        assert_eq!(ops, [W, W, W, F, W, F]);
    }

    #[test]
    fn regions_outside_of_the_disk_or_too_small_are_refused() {
        let job = Job { offset: 4096, region: Some(1 << 20), ..Job::default() };
        assert!(Part::of(&job, 0, 1 << 20).is_err());
        let job = Job { threads: 4, ..Job::default() };
        assert!(Part::of(&job, 0, 3 * 4096).is_err());
        assert!(Part::of(&job, 0, 4 * 4096).is_ok());
    }
}
