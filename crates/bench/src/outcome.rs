//! What came out of a load: the data of results.
//!
//! Callers: [`crate::run()`] makes them; the command prints them; whoever compares runs reads them back from JSON.
//!
//! Units are in the names: `_ns` nanoseconds, `_s` seconds, `bytes`. Invariant: [`VERSION`] changes when a field's meaning does.

use crate::content::Verified;
use crate::counters::DeviceUse;
use crate::environment::Environment;
use crate::job::{Job, Op};
use crate::target::Target;
use serde::{Deserialize, Serialize};

/// The version of [`Report`]'s form.
pub const VERSION: u32 = 1;

/// Latencies of one kind of request.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// Requests measured.
    pub samples: u64,
    /// The smallest.
    pub min_ns: u64,
    /// The mean.
    pub mean_ns: f64,
    /// Half were faster.
    pub p50_ns: u64,
    /// 90 % were faster.
    pub p90_ns: u64,
    /// 99 % were faster.
    pub p99_ns: u64,
    /// 99.9 % were faster.
    pub p999_ns: u64,
    /// The largest.
    pub max_ns: u64,
    /// All of them: upper end of a bucket (at most 1 % wide) in nanoseconds, and how many lie in it.
    pub buckets: Vec<(u64, u64)>,
}

/// One kind of request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OpOutcome {
    /// The kind.
    pub op: Op,
    /// Requests completed, failed ones included.
    pub requests: u64,
    /// Bytes of those that were well (trims: bytes trimmed).
    pub bytes: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Their latencies.
    pub latency: Latency,
}

/// One tenth of a second.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slice {
    /// Requests completed.
    pub requests: u64,
    /// Bytes read and written.
    pub bytes: u64,
    /// Index into [`TimeLine::bounds_ns`], and how many requests had such a latency.
    pub latencies: Vec<(u16, u32)>,
}

/// The run in slices, for a heat map.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimeLine {
    /// Milliseconds of a slice.
    pub slice_ms: u64,
    /// Lower ends of the latency buckets; all that is smaller is in the first.
    pub bounds_ns: Vec<u64>,
    /// The slices, from the start of what was measured.
    pub slices: Vec<Slice>,
}

/// How an open loop kept its schedule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Schedule {
    /// Requests a second that were wanted.
    pub rate: f64,
    /// Requests that were due and never sent, because the depth was used up when the time was over: the target did not keep up.
    pub unsent: u64,
    /// Mean time by which requests left late although there was a free slot: the generator's own fault.
    pub late_mean_ns: f64,
    /// The largest of these.
    pub late_max_ns: u64,
}

/// CPU time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CpuTime {
    /// Of this process, with its kernel threads, for all jobs that ran at once.
    pub client_s: f64,
    /// Of the server's process, when it was named.
    pub server_s: Option<f64>,
    /// The server's, a request, in microseconds.
    pub server_us_per_request: Option<f64>,
}

/// The outcome of one job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Time measured: to the last completion, or the end of the last flush.
    pub elapsed_s: f64,
    /// Requests completed.
    pub requests: u64,
    /// Bytes read and written.
    pub bytes: u64,
    /// Requests a second; flushes and trims count.
    pub iops: f64,
    /// Bytes read and written a second.
    pub bytes_per_s: f64,
    /// Requests that failed.
    pub errors: u64,
    /// What the first of them said.
    pub first_error: Option<String>,
    /// Latencies of all reads, writes and trims together.
    pub latency: Latency,
    /// Each kind of request.
    pub ops: Vec<OpOutcome>,
    /// The flush at the end, in seconds, when there was one.
    pub final_flush_s: Option<f64>,
    /// Of an open loop.
    pub schedule: Option<Schedule>,
    /// CPU time.
    pub cpu: CpuTime,
    /// What the devices underneath did meanwhile.
    pub devices: Vec<DeviceUse>,
    /// The run in slices.
    pub time_line: Option<TimeLine>,
    /// What checks of the content found.
    pub verified: Option<Verified>,
}

impl Outcome {
    /// A kind of request, when there was one.
    pub fn op(&self, op: Op) -> Option<&OpOutcome> {
        self.ops.iter().find(|one| one.op == op)
    }

    /// Whether nothing failed and all content was right.
    pub fn is_good(&self) -> bool {
        self.errors == 0 && self.verified.as_ref().is_none_or(|verified| verified.faults() == 0)
    }
}

/// One job on one target.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// What was loaded.
    pub target: Target,
    /// Bytes of it.
    pub size: u64,
    /// With what.
    pub job: Job,
    /// What came out.
    pub outcome: Outcome,
}

/// All runs of one call, and where they were made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`VERSION`].
    pub version: u32,
    /// Where.
    pub environment: Environment,
    /// The runs in their order.
    pub runs: Vec<Run>,
}
