//! What a load does: the data that describe one, and what is refused.
//!
//! Callers: everybody who wants a load run ([`crate::run()`]); the command and readers of fio's job files make these.
//!
//! Units: bytes, seconds, percent. All of it is serialisable, so that a result can say what was asked for.

use bedplate_types::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Direct I/O and the protocols of disks know no smaller piece.
pub const SECTOR: u64 = 512;
/// Largest single request.
pub const MAX_BLOCK: u64 = 32 << 20;
/// Most requests in flight of a thread.
pub const MAX_DEPTH: u32 = 10_922;
/// Most threads.
pub const MAX_THREADS: u32 = 1024;

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Gives space back (discard; `PUNCH_HOLE` on files and devices).
    Trim,
    /// Makes completed writes durable (`fdatasync` on files).
    Flush,
}

impl Op {
    /// All of them, in the order of reports.
    pub const ALL: [Op; 4] = [Op::Read, Op::Write, Op::Trim, Op::Flush];

    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Op::Read => "read",
            Op::Write => "write",
            Op::Trim => "trim",
            Op::Flush => "flush",
        }
    }
}

/// How many of 100 requests are of each kind; the sum is 100.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mix {
    /// Percent of reads.
    pub read: u8,
    /// Percent of writes.
    pub write: u8,
    /// Percent of trims.
    pub trim: u8,
    /// Percent of flushes, besides those of [`FlushEvery`].
    pub flush: u8,
}

impl Mix {
    /// Reads only.
    pub const READ: Mix = Mix { read: 100, write: 0, trim: 0, flush: 0 };
    /// Writes only.
    pub const WRITE: Mix = Mix { read: 0, write: 100, trim: 0, flush: 0 };

    /// Whether anything is changed.
    pub fn changes(self) -> bool {
        self.write > 0 || self.trim > 0
    }
}

/// Where the requests go.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum Pattern {
    /// One after the other; each kind of request has a place of its own.
    Sequential,
    /// Anywhere, all places alike.
    Random,
    /// By Zipf's law: few blocks, spread over the region, get most requests.
    Zipf {
        /// The exponent; 0 is uniform, 1.2 has 1 % of the blocks take most of the requests.
        theta: f64,
    },
    /// The first part of the region gets most requests, evenly inside.
    HotCold {
        /// Percent of the region that is hot.
        space: u8,
        /// Percent of the requests that go there.
        load: u8,
    },
}

/// One size of a split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SizeShare {
    /// Bytes a request.
    pub bytes: u64,
    /// Percent of the requests that have this size.
    pub percent: u8,
}

/// How large requests are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum Sizes {
    /// All alike.
    Fixed {
        /// Bytes a request.
        bytes: u64,
    },
    /// Multiples of the smallest, all as often.
    Range {
        /// Smallest, in bytes.
        min: u64,
        /// Largest, in bytes.
        max: u64,
    },
    /// Some sizes, each with its share.
    Split {
        /// The sizes; their percents add up to 100.
        parts: Vec<SizeShare>,
    },
}

impl Sizes {
    /// The largest size in bytes.
    pub fn largest(&self) -> u64 {
        match self {
            Self::Fixed { bytes } => *bytes,
            Self::Range { max, .. } => *max,
            Self::Split { parts } => parts.iter().map(|part| part.bytes).max().unwrap_or(0),
        }
    }

    /// The largest number of bytes that divides all sizes; requests lie at multiples of it.
    pub fn unit(&self) -> u64 {
        match self {
            Self::Fixed { bytes } => *bytes,
            Self::Range { min, .. } => *min,
            Self::Split { parts } => parts.iter().fold(0, |unit, part| common(unit, part.bytes)),
        }
    }
}

/// The greatest common divisor.
fn common(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { common(b, a % b) }
}

/// How threads share the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Share {
    /// Each has an equal part of its own.
    Parts,
    /// All use all of it.
    Whole,
}

/// How long a load goes on.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum Extent {
    /// Every block of a thread's part exactly once, in order or in random order: on fresh space, a first pass.
    Pass {
        /// Ends the pass early after so many seconds.
        limit: Option<f64>,
    },
    /// For a time.
    Time {
        /// Seconds.
        seconds: f64,
    },
    /// A number of requests.
    Requests {
        /// Requests of each thread.
        count: u64,
    },
}

/// When requests are sent.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum Arrival {
    /// A new one when an old one is complete (closed loop).
    Closed {
        /// Seconds that a slot pauses after each of its requests.
        think: f64,
    },
    /// By a schedule, whatever the target does (open loop): latency counts from the moment that the schedule says, so that a
    /// target that stalls is charged for all requests that had to wait meanwhile (no coordinated omission).
    Open {
        /// Requests a second, of all threads together.
        rate: f64,
        /// Random (exponentially distributed) gaps instead of equal ones.
        poisson: bool,
    },
}

/// After what a flush is sent; several may be set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FlushEvery {
    /// So many writes and trims of a thread.
    pub requests: Option<u64>,
    /// So many bytes written by a thread.
    pub bytes: Option<u64>,
    /// So many seconds, when a thread wrote since.
    pub seconds: Option<f64>,
    /// A flush (also one of the mix) waits until all before it of its thread is complete, and nothing is sent beside it: as a
    /// program does that has written a group and calls `fsync`.
    pub alone: bool,
}

/// What is checked of the content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verify {
    /// Blocks written carry their place, a generation and a checksum, and each read is checked against what was written.
    pub reads: bool,
    /// All that was written is read back and checked at the end, outside of the time measured.
    pub afterwards: bool,
}

impl Verify {
    /// Whether anything is checked.
    pub fn any(self) -> bool {
        self.reads || self.afterwards
    }
}

/// One load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// For reports.
    pub name: String,
    /// Kinds of requests.
    pub mix: Mix,
    /// Where they go.
    pub pattern: Pattern,
    /// How large they are.
    pub sizes: Sizes,
    /// Requests in flight, of each thread.
    pub depth: u32,
    /// Threads, each with a connection, queue or ring of its own.
    pub threads: u32,
    /// How they share the region.
    pub share: Share,
    /// First byte of the disk that is used.
    pub offset: u64,
    /// Bytes that are used; up to the end of the disk when not set.
    pub region: Option<u64>,
    /// How long.
    pub extent: Extent,
    /// When requests are sent.
    pub arrival: Arrival,
    /// Flushes in between.
    pub flush: FlushEvery,
    /// A flush at the end, inside of the time measured, when anything was written.
    pub final_flush: bool,
    /// Seconds at the start that are not measured.
    pub warm_up: f64,
    /// Seed of places, sizes, kinds and contents.
    pub seed: u64,
    /// What is checked of the content.
    pub verify: Verify,
    /// The latency of every so many-th request is kept (1: of all).
    pub sample: u32,
    /// Most requests that go to the system at once; 0: as many as there are.
    pub batch: u32,
    /// Most completions that are taken at once, before new requests are sent; 0: as many as there are.
    pub reap: u32,
    /// Goes on after requests that failed, and counts them.
    pub keep_going: bool,
    /// Keeps a time line: requests and latencies of each tenth of a second.
    pub time_line: bool,
}

impl Default for Job {
    /// Random reads of 4 KiB, 64 in flight on one thread, for ten seconds.
    fn default() -> Self {
        Self {
            name: "load".to_owned(),
            mix: Mix::READ,
            pattern: Pattern::Random,
            sizes: Sizes::Fixed { bytes: 4096 },
            depth: 64,
            threads: 1,
            share: Share::Parts,
            offset: 0,
            region: None,
            extent: Extent::Time { seconds: 10.0 },
            arrival: Arrival::Closed { think: 0.0 },
            flush: FlushEvery::default(),
            final_flush: false,
            warm_up: 0.0,
            seed: 1,
            verify: Verify::default(),
            sample: 1,
            batch: 0,
            reap: 0,
            keep_going: false,
            time_line: true,
        }
    }
}

/// A time in seconds that a person wrote; `what` is its name.
pub(crate) fn duration(seconds: f64, what: &str) -> Result<Duration> {
    Duration::try_from_secs_f64(seconds).map_err(|_| bad(format!("{what} cannot be {seconds} s")))
}

fn bad(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidInput, text)
}

fn demand(holds: bool, text: impl FnOnce() -> String) -> Result<()> {
    if holds { Ok(()) } else { Err(bad(text())) }
}

impl Job {
    /// Whether it may change what lies on the target.
    pub fn changes(&self) -> bool {
        self.mix.changes()
    }

    /// Checks everything that does not depend on the target.
    ///
    /// # Errors
    /// `InvalidInput` with what is wrong.
    pub fn validate(&self) -> Result<()> {
        let Mix { read, write, trim, flush } = self.mix;
        let sum: u32 = [read, write, trim, flush].into_iter().map(u32::from).sum();
        demand(sum == 100, || format!("the percents of the mix add up to {sum}, not to 100"))?;
        demand(flush < 100 || !matches!(self.extent, Extent::Pass { .. }), || {
            "a pass of nothing but flushes never ends".to_owned()
        })?;
        self.validate_sizes()?;
        demand((1..=MAX_DEPTH).contains(&self.depth), || {
            format!("the depth {} is not between 1 and {MAX_DEPTH}", self.depth)
        })?;
        demand((1..=MAX_THREADS).contains(&self.threads), || {
            format!("{} threads are not between 1 and {MAX_THREADS}", self.threads)
        })?;
        demand(self.sample > 0, || "a sample is of every request (1) or fewer".to_owned())?;
        demand(self.offset.is_multiple_of(SECTOR), || {
            format!("the offset {} is not a multiple of {SECTOR}", self.offset)
        })?;
        self.validate_times()?;
        self.validate_pattern()?;
        let whole = self.verify.any() && self.threads > 1 && self.share == Share::Whole;
        demand(!whole, || {
            "contents are checked only where each thread has a part of its own, or where there is one thread".to_owned()
        })
    }

    fn validate_sizes(&self) -> Result<()> {
        let all: Vec<u64> = match &self.sizes {
            Sizes::Fixed { bytes } => vec![*bytes],
            Sizes::Range { min, max } => {
                demand(min <= max, || format!("block sizes from {min} to {max} are none"))?;
                vec![*min, *max]
            }
            Sizes::Split { parts } => {
                let sum: u32 = parts.iter().map(|part| u32::from(part.percent)).sum();
                demand(sum == 100, || {
                    format!("the percents of the block sizes add up to {sum}, not to 100")
                })?;
                parts.iter().map(|part| part.bytes).collect()
            }
        };
        for bytes in all {
            demand(bytes.is_multiple_of(SECTOR) && (SECTOR..=MAX_BLOCK).contains(&bytes), || {
                format!("a block of {bytes} bytes is not a multiple of {SECTOR} up to {MAX_BLOCK}")
            })?;
        }
        Ok(())
    }

    fn validate_times(&self) -> Result<()> {
        let time = |seconds: f64, what: &str| duration(seconds, what).map(drop);
        time(self.warm_up, "the warm-up")?;
        match self.extent {
            Extent::Pass { limit } => time(limit.unwrap_or(0.0), "the limit")?,
            Extent::Time { seconds } => {
                time(seconds, "the duration")?;
                demand(seconds > self.warm_up, || {
                    "nothing is left to measure after the warm-up".to_owned()
                })?;
            }
            Extent::Requests { .. } => {}
        }
        match self.arrival {
            Arrival::Closed { think } => time(think, "the think time")?,
            Arrival::Open { rate, .. } => {
                demand(rate.is_finite() && (1e-3..=1e9).contains(&rate), || {
                    format!("a rate of {rate} requests a second can't be kept")
                })?;
            }
        }
        if let Some(seconds) = self.flush.seconds {
            time(seconds, "the time between flushes")?;
        }
        demand(self.flush.requests != Some(0) && self.flush.bytes != Some(0), || {
            "a flush after nothing would be sent for ever".to_owned()
        })
    }

    fn validate_pattern(&self) -> Result<()> {
        let pass = matches!(self.extent, Extent::Pass { .. });
        match self.pattern {
            Pattern::Zipf { theta } => {
                demand((0.0..=10.0).contains(&theta), || {
                    format!("Zipf's exponent {theta} is not between 0 and 10")
                })?;
            }
            Pattern::HotCold { space, load } => {
                demand((1..100).contains(&space) && load <= 100, || {
                    format!("{space} % of the space can't take {load} % of the requests")
                })?;
            }
            Pattern::Sequential | Pattern::Random => {
                demand(!pass || matches!(self.sizes, Sizes::Fixed { .. }), || {
                    "a pass uses every block once, so that all blocks must have one size".to_owned()
                })?;
                return Ok(());
            }
        }
        demand(!pass, || "a pass uses every block once: sequentially or at random".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(change: impl FnOnce(&mut Job)) -> String {
        let mut job = Job::default();
        change(&mut job);
        job.validate().expect_err("refused").to_string()
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_its_reason() {
        assert!(Job::default().validate().is_ok());
        assert!(refused(|j| j.mix.write = 1).contains("add up to 101"));
        assert!(refused(|j| j.sizes = Sizes::Fixed { bytes: 1000 }).contains("multiple of 512"));
        assert!(refused(|j| j.depth = 0).contains("depth"));
        assert!(refused(|j| j.pattern = Pattern::Zipf { theta: f64::NAN }).contains("Zipf"));
        assert!(refused(|j| j.extent = Extent::Time { seconds: -1.0 }).contains("-1"));
        assert!(refused(|j| j.warm_up = 20.0).contains("warm-up"));
        assert!(
            refused(|j| j.arrival = Arrival::Open { rate: 0.0, poisson: false }).contains("rate")
        );
        let parts = vec![SizeShare { bytes: 4096, percent: 99 }];
        assert!(refused(|j| j.sizes = Sizes::Split { parts }).contains("99"));
        assert!(
            refused(|j| {
                j.extent = Extent::Pass { limit: None };
                j.pattern = Pattern::HotCold { space: 10, load: 90 };
            })
            .contains("every block once")
        );
    }

    #[test]
    fn the_unit_divides_every_size() {
        let part = |bytes| SizeShare { bytes, percent: 50 };
        let split = Sizes::Split { parts: vec![part(12288), part(8192)] };
        assert_eq!((split.unit(), split.largest()), (4096, 12288));
    }
}
