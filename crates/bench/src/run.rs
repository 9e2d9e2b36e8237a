//! Runs jobs on targets: opens, starts the threads, gathers what came out.
//!
//! Callers: the command `bedplate bench`, tables of measurements, tests.

use crate::content::Verified;
use crate::counters::{Device, cpu_of, own_cpu};
use crate::drive::{Shared, ThreadOutcome, drive};
use crate::job::{Arrival, Job, Op};
use crate::outcome::{CpuTime, Outcome, Run, Schedule};
use crate::permit::permit;
use crate::plan::Part;
use crate::port::Port;
use crate::record::Recorder;
use crate::target::{Engine, Target, file, nbd, vhost};
use bedplate_types::{Error, ErrorKind, Result};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Barrier};
use std::time::Duration;

/// What a run needs to know besides its job and target.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Names of targets that may be overwritten.
    pub destroy: Vec<String>,
    /// The process whose CPU time is counted as the server's.
    pub server_pid: Option<u32>,
    /// Files or devices whose block devices' counters are read, besides the target's own.
    pub devices: Vec<PathBuf>,
    /// Ends the run early when set; what was measured until then is given.
    pub stop: Arc<AtomicBool>,
}

/// Counters as they were before.
struct Before {
    devices: Vec<Device>,
    own: Duration,
    server: Option<Duration>,
}

/// Runs one job on one target.
///
/// # Errors
/// `InvalidInput` for a job that makes no sense or does not fit; `Denied` without permission to overwrite; those of opening the
/// target; the first failed request's, unless the job keeps going.
pub fn run(target: &Target, job: &Job, options: &Options) -> Result<Run> {
    job.validate()?;
    let permit = permit(target, job, &options.destroy)?;
    let before = Before::now(target, options)?;
    let (size, outcome) = match target {
        Target::File { path, engine, direct } => {
            let (opened, size) = file::open(path, *direct, job.changes())?;
            let outcome = match engine {
                Engine::IoUring => threads(job, size, file::rings(job, &opened)?, options),
                Engine::Psync => threads(job, size, file::positioned(job, &opened)?, options),
            };
            (size, outcome)
        }
        Target::VhostUserBlk { socket, spin_us } => {
            let (client, ports, size) = vhost::open(job, socket, *spin_us)?;
            let outcome = threads(job, size, ports, options);
            drop(client);
            (size, outcome)
        }
        Target::Nbd { address, export } => {
            let (ports, size) = nbd::open(job, address, export)?;
            (size, threads(job, size, ports, options))
        }
    };
    let mut outcome = outcome?;
    before.complete(&mut outcome, options)?;
    drop(permit);
    Ok(Run { target: target.clone(), size, job: job.clone(), outcome })
}

/// Runs several jobs at once, each on its target; as they would one by one.
///
/// # Errors
/// The first job's that failed; the others are ended early then.
pub fn run_together(jobs: &[(Target, Job)], options: &Options) -> Result<Vec<Run>> {
    std::thread::scope(|scope| {
        let started: Vec<_> = jobs
            .iter()
            .map(|(target, job)| {
                scope.spawn(move || {
                    let done = run(target, job, options);
                    if done.is_err() {
                        options.stop.store(true, std::sync::atomic::Ordering::Relaxed);
                    }
                    done
                })
            })
            .collect();
        started.into_iter().map(|thread| thread.join().map_err(|_| panicked())?).collect()
    })
}

fn panicked() -> Error {
    Error::new(ErrorKind::Cancelled, "a thread of the load has failed")
}

impl Before {
    fn now(target: &Target, options: &Options) -> Result<Self> {
        let mut devices: Vec<Device> = Vec::new();
        if let Target::File { path, .. } = target {
            devices.extend(Device::of(path)?);
        }
        for path in &options.devices {
            devices.extend(Device::of(path)?);
        }
        let server = options.server_pid.map(cpu_of).transpose()?;
        Ok(Self { devices, own: own_cpu(), server })
    }

    /// Adds what happened since to the outcome.
    fn complete(self, outcome: &mut Outcome, options: &Options) -> Result<()> {
        let client_s = own_cpu().saturating_sub(self.own).as_secs_f64();
        let now = options.server_pid.map(cpu_of).transpose()?;
        let server = now.zip(self.server).map(|(now, before)| now.saturating_sub(before));
        let server_s = server.map(|server| server.as_secs_f64());
        let server_us_per_request = server_s.map(|s| s * 1e6 / outcome.requests.max(1) as f64);
        outcome.cpu = CpuTime { client_s, server_s, server_us_per_request };
        let bytes = |op| outcome.op(op).map_or(0, |one| one.bytes);
        let (read, written) = (bytes(Op::Read), bytes(Op::Write));
        let since = self.devices.iter().map(|device| device.since(read, written));
        outcome.devices = since.collect::<Result<_>>()?;
        Ok(())
    }
}

/// Runs a job on ports that are open, one thread each.
pub(crate) fn threads<P: Port>(
    job: &Job,
    size: u64,
    mut ports: Vec<P>,
    options: &Options,
) -> Result<Outcome> {
    let shared = Shared {
        begin: Barrier::new(ports.len()),
        stop: options.stop.clone(),
        working: AtomicU32::new(ports.len() as u32),
    };
    let parts = (0..job.threads).map(|thread| Part::of(job, thread, size));
    let parts = parts.collect::<Result<Vec<_>>>()?;
    let outcomes = std::thread::scope(|scope| {
        let started: Vec<_> = ports
            .iter_mut()
            .zip(parts)
            .zip(0..)
            .map(|((port, part), thread)| {
                let shared = &shared;
                scope.spawn(move || drive(port, job, thread, part, shared))
            })
            .collect();
        let joined = started.into_iter().map(|thread| thread.join().map_err(|_| panicked()));
        joined.collect::<Vec<_>>()
    });
    let mut all = Vec::new();
    for outcome in outcomes {
        all.push(outcome??);
    }
    gather(job, all)
}

/// Several threads' outcomes as one.
fn gather(job: &Job, threads: Vec<ThreadOutcome>) -> Result<Outcome> {
    let mut record = Recorder::new(job)?;
    let mut verified: Option<Verified> = None;
    let mut final_flush = None;
    for thread in threads {
        record.add(thread.record);
        final_flush = final_flush.max(thread.final_flush);
        if let Some(found) = thread.verified {
            verified.get_or_insert_default().add(found);
        }
    }
    let ops = record.ops()?;
    let elapsed_s = record.elapsed.as_secs_f64();
    let requests: u64 = ops.iter().map(|op| op.requests).sum();
    let moved = ops.iter().filter(|one| one.op != Op::Trim).map(|one| one.bytes);
    let bytes: u64 = moved.sum();
    let rate = |count: u64| if elapsed_s > 0.0 { count as f64 / elapsed_s } else { 0.0 };
    let schedule = match job.arrival {
        Arrival::Closed { .. } => None,
        Arrival::Open { rate, .. } => Some(Schedule {
            rate,
            unsent: record.unsent,
            late_mean_ns: record.late.1 as f64 / record.late.0.max(1) as f64,
            late_max_ns: record.late.2,
        }),
    };
    Ok(Outcome {
        elapsed_s,
        requests,
        bytes,
        iops: rate(requests),
        bytes_per_s: rate(bytes),
        errors: ops.iter().map(|op| op.errors).sum(),
        first_error: record.first_error.clone(),
        latency: record.latency()?,
        ops,
        final_flush_s: final_flush.map(|time| time.as_secs_f64()),
        schedule,
        cpu: CpuTime::default(),
        devices: Vec::new(),
        time_line: record.time_line(),
        verified,
    })
}
