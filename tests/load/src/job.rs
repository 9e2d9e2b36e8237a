//! What a load does, the blocks it picks, and what came out.

use bedplate_tests::random::Random;
use hdrhistogram::Histogram;
use serde_json::{Value, json};
use std::time::Duration;

/// The kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Random reads.
    Read,
    /// Random writes.
    Write,
}

/// One load.
#[derive(Clone, Debug)]
pub struct Job {
    /// The kind of request.
    pub op: Op,
    /// Bytes a request.
    pub block: usize,
    /// Requests in flight, per queue.
    pub depth: usize,
    /// Queues, each with a thread of its own and its own part of the blocks.
    pub queues: usize,
    /// Bytes of the disk that are used, from its start.
    pub region: u64,
    /// How long; without it every block is written exactly once, in random order (a first pass).
    pub seconds: Option<f64>,
    /// Seed of the pattern.
    pub seed: u64,
}

impl Job {
    /// Blocks of one queue's part.
    pub fn blocks_per_queue(&self) -> u64 {
        self.region / self.block as u64 / self.queues as u64
    }

    /// The offsets that queue number `queue` asks for.
    pub fn offsets(&self, queue: usize) -> Offsets {
        let blocks = self.blocks_per_queue();
        let mut random = Random::new(self.seed.wrapping_mul(64).wrapping_add(queue as u64));
        let order = self.seconds.is_none().then(|| {
            let mut order: Vec<u32> = (0..u32::try_from(blocks).unwrap_or(u32::MAX)).collect();
            for last in (1..order.len()).rev() {
                let other = random.below(last as u64 + 1) as usize;
                order.swap(last, other);
            }
            order.into_iter()
        });
        Offsets { order, random, blocks, first: blocks * queue as u64, block: self.block as u64 }
    }
}

/// The offsets of one queue; ends after one pass, or never when the job runs for a time.
#[derive(Debug)]
pub struct Offsets {
    order: Option<std::vec::IntoIter<u32>>,
    random: Random,
    blocks: u64,
    first: u64,
    block: u64,
}

impl Iterator for Offsets {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        let block = match &mut self.order {
            Some(order) => u64::from(order.next()?),
            None => self.random.below(self.blocks),
        };
        Some((self.first + block) * self.block)
    }
}

/// What a queue, or all of them together, did.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Requests completed.
    pub requests: u64,
    /// Time from the first submission to the last completion.
    pub elapsed: Duration,
    /// Latencies in nanoseconds (of every request at depth 1, of each 16th else).
    pub latency: Histogram<u64>,
}

impl Outcome {
    /// Several queues' outcomes as one: requests are summed, the longest time counts.
    pub fn merge(outcomes: Vec<Outcome>) -> Option<Outcome> {
        outcomes.into_iter().reduce(|mut all, one| {
            all.requests += one.requests;
            all.elapsed = all.elapsed.max(one.elapsed);
            // Both have the same bounds, so adding can't fail.
            let _ = all.latency.add(&one.latency);
            all
        })
    }

    /// An empty histogram of the bounds used here.
    pub fn histogram() -> anyhow::Result<Histogram<u64>> {
        Ok(Histogram::new_with_bounds(1, 60_000_000_000, 3)?)
    }

    /// Requests a second.
    pub fn iops(&self) -> f64 {
        self.requests as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }

    /// For the caller in the other process.
    pub fn to_json(&self) -> Value {
        json!({
            "requests": self.requests, "seconds": self.elapsed.as_secs_f64(), "iops": self.iops(),
            "mean_us": self.latency.mean() / 1000.0,
            "p50_us": self.latency.value_at_quantile(0.5) as f64 / 1000.0,
            "p99_us": self.latency.value_at_quantile(0.99) as f64 / 1000.0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(seconds: Option<f64>) -> Job {
        Job { op: Op::Write, block: 4096, depth: 4, queues: 2, region: 1 << 20, seconds, seed: 7 }
    }

    #[test]
    fn one_pass_asks_for_every_block_once_over_all_queues() {
        let job = job(None);
        let mut all: Vec<u64> = (0..2).flat_map(|queue| job.offsets(queue)).collect();
        assert!(!all.is_sorted());
        all.sort_unstable();
        assert_eq!(all, (0..256).map(|block| block * 4096).collect::<Vec<_>>());
    }

    #[test]
    fn a_timed_job_stays_inside_its_queues_part() {
        let job = job(Some(1.0));
        let half = 1 << 19;
        assert!(job.offsets(0).take(10_000).all(|at| at < half && at % 4096 == 0));
        assert!(job.offsets(1).take(10_000).all(|at| (half..2 * half).contains(&at)));
    }

    #[test]
    fn the_same_seed_gives_the_same_offsets() {
        let offsets =
            |seed| Job { seed, ..job(Some(1.0)) }.offsets(0).take(100).collect::<Vec<_>>();
        assert_eq!(offsets(3), offsets(3));
        assert_ne!(offsets(3), offsets(4));
    }
}
