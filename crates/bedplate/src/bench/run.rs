//! `bedplate bench run`: one load on one target.

use super::words;
use crate::cli::size;
use crate::failure::Failure;
use crate::output::{self, OutputArgs};
use bedplate_bench::{
    Arrival, Engine, Environment, Extent, FlushEvery, Job, Mix, Options, Pattern, Report, Run,
    Share, Sizes, Target, VERSION, Verify, permit, read_fio, run_together, text,
};
use bedplate_types::{ByteLen, Error, ErrorKind};
use clap::{Args, ValueEnum};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// How files and devices are read and written.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum EngineWord {
    /// One io_uring a thread
    #[value(name = "io_uring")]
    IoUring,
    /// pread and pwrite, one request at a time a thread
    Psync,
}

/// How threads share the region.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum ShareWord {
    /// Each has a part of its own
    Parts,
    /// All use all of it
    Whole,
}

/// What is checked.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum VerifyWord {
    /// Each read, against what was written before
    Reads,
    /// All that was written, by reading it back at the end
    After,
    /// Both
    All,
}

/// Run one load on a file, a device or an export, and print what came out
///
/// Nothing is ever overwritten that was not named with --destroy, by exactly the name of its file, device or socket.
///
/// Each thread has its own ring, queue or connection. Latencies are of all requests, from the moment when a request was sent;
/// with --rate from the moment when it should have been sent, so that a stall is charged to all who had to wait for it.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Targets:
  PATH                       a file or block device, with direct I/O unless --buffered
  vhost-user-blk:SOCKET      what 'bedplate serve --vhost-user-blk' serves, without a virtual machine
  nbd:ADDRESS, nbd://HOST:PORT/EXPORT, nbd+unix:///EXPORT?socket=PATH

Examples:
  bedplate bench run /dev/nvme0n1 --depth 32
  bedplate bench run vhost-user-blk:/run/vm.sock --mix read=70,write=30 --jobs 4 --destroy /run/vm.sock
  bedplate bench run disk.raw --mix write --pass --final-flush --destroy disk.raw
  bedplate bench run nbd:unix:/run/vm.nbd --rate 5000 --depth 128 --json
  bedplate bench run vhost-user-blk:/run/vm.sock --fio jobs.fio --destroy /run/vm.sock

Exit codes: 0 done, 1 failed, also when content was wrong, 2 wrong usage.")]
pub struct RunArgs {
    /// What is loaded
    #[arg(value_name = "TARGET", required_unless_present = "fio")]
    target: Option<String>,
    /// Run the jobs of this job file of fio's, on TARGET if it is given, instead of a load told by options
    #[arg(long, value_name = "FILE", conflicts_with_all = LOAD)]
    fio: Option<PathBuf>,
    /// Leave out what is lacking for a job file, and say so
    #[arg(long, requires = "fio")]
    ignore_unknown: bool,
    /// Kinds of requests: read, write, trim, flush, or shares as in read=70,write=30
    #[arg(long, value_name = "MIX", default_value = "read", value_parser = words::mix)]
    mix: Mix,
    /// Where they go: random, sequential, zipf:THETA, or hot-cold:SPACE/LOAD in percent
    #[arg(long, value_name = "PATTERN", default_value = "random", value_parser = words::pattern)]
    pattern: Pattern,
    /// Bytes a request: a size, a range as 4K-64K, or sizes with shares as 4K:70,64K:30
    #[arg(long, value_name = "SIZES", default_value = "4K", value_parser = words::sizes)]
    block: Sizes,
    /// Requests in flight, of each thread [default: 64, psync: 1]
    #[arg(long, value_name = "N")]
    depth: Option<u32>,
    /// Threads
    #[arg(long, value_name = "N", default_value_t = 1)]
    jobs: u32,
    /// How the threads share the region
    #[arg(long, value_name = "HOW", default_value = "parts")]
    share: ShareWord,
    /// First byte that is used
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = size)]
    offset: ByteLen,
    /// Bytes that are used [default: up to the end]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    region: Option<ByteLen>,
    /// How long
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0)]
    seconds: f64,
    /// Use every block exactly once instead, in the pattern's order (random or sequential): on fresh space a first pass
    #[arg(long, conflicts_with = "seconds")]
    pass: bool,
    /// Send so many requests of each thread instead
    #[arg(long, value_name = "N", conflicts_with_all = ["seconds", "pass"])]
    requests: Option<u64>,
    /// Send so many requests a second by a schedule, whatever the target does
    #[arg(long, value_name = "N")]
    rate: Option<f64>,
    /// With --rate: random gaps instead of equal ones
    #[arg(long, requires = "rate")]
    poisson: bool,
    /// Microseconds that each of the requests in flight pauses before the next
    #[arg(long, value_name = "US", conflicts_with = "rate", default_value_t = 0.0)]
    think: f64,
    /// A flush after so many writes of a thread
    #[arg(long, value_name = "N")]
    flush_requests: Option<u64>,
    /// A flush after so many bytes written by a thread
    #[arg(long, value_name = "SIZE", value_parser = size)]
    flush_bytes: Option<ByteLen>,
    /// A flush after so many seconds
    #[arg(long, value_name = "SECONDS")]
    flush_seconds: Option<f64>,
    /// A flush waits for all before it of its thread, and nothing is sent beside it
    #[arg(long)]
    flush_alone: bool,
    /// A flush at the end, which counts, when anything was written
    #[arg(long)]
    final_flush: bool,
    /// Seconds at the start that do not count
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0)]
    warm_up: f64,
    /// Seed of places, kinds and contents
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Check contents: blocks carry their place, a generation and a checksum
    #[arg(long, value_name = "WHAT")]
    verify: Option<VerifyWord>,
    /// Keep the latency of every so many-th request only
    #[arg(long, value_name = "N", default_value_t = 1)]
    sample: u32,
    /// Most requests that are sent at once [default: as many as there are]
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    batch: u32,
    /// Most completions that are taken at once [default: as many as there are]
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    reap: u32,
    /// Count failed requests and go on
    #[arg(long)]
    keep_going: bool,
    /// How a file or device is read and written [default: io_uring]
    #[arg(long, value_name = "ENGINE", requires = "target")]
    engine: Option<EngineWord>,
    /// Go through the page cache
    #[arg(long, requires = "target")]
    buffered: bool,
    /// Microseconds that a vhost-user queue is looked at before sleeping [default: 10]; 'never' sleeps never
    #[arg(long, value_name = "US", requires = "target", value_parser = spin)]
    spin: Option<Spin>,
    /// This file, device or socket may be overwritten
    #[arg(long, value_name = "NAME")]
    destroy: Vec<String>,
    /// Count the CPU time of this process as the server's
    #[arg(long, value_name = "PID")]
    server_pid: Option<u32>,
    /// Count what this device, or the one under this file, does meanwhile
    #[arg(long, value_name = "PATH")]
    device: Vec<PathBuf>,
    #[command(flatten)]
    output: OutputArgs,
}

/// The options that tell a load, which a job file does instead.
const LOAD: [&str; 26] = [
    "mix",
    "pattern",
    "block",
    "depth",
    "jobs",
    "share",
    "offset",
    "region",
    "seconds",
    "pass",
    "requests",
    "rate",
    "poisson",
    "think",
    "flush_requests",
    "flush_bytes",
    "flush_seconds",
    "flush_alone",
    "final_flush",
    "warm_up",
    "seed",
    "verify",
    "sample",
    "batch",
    "reap",
    "keep_going",
];

const DEFAULT_SPIN_US: u64 = 10;

/// How long a queue is looked at.
#[derive(Clone, Copy, Debug)]
struct Spin(Option<u64>);

fn spin(text: &str) -> Result<Spin, std::num::ParseIntError> {
    Ok(Spin(if text == "never" { None } else { Some(text.parse()?) }))
}

impl RunArgs {
    /// The groups of jobs to run one after the other.
    fn groups(&self) -> Result<Vec<Vec<(Target, Job)>>, Error> {
        let target = self.target.as_deref().map(|text| self.target(text)).transpose()?;
        let Some(path) = &self.fio else {
            let target = target.into_iter();
            return Ok(target.map(|target| vec![(target.clone(), self.job(&target))]).collect());
        };
        let text = std::fs::read_to_string(path)
            .map_err(|e| Error::io(format!("cannot read '{}'", path.display()), e))?;
        let jobs = read_fio(&text, target.as_ref(), self.ignore_unknown)
            .map_err(|e| Error::new(e.kind(), format!("{}: {e}", path.display())))?;
        for sentence in &jobs.ignored {
            tracing::warn!("{}: left out: {sentence}", path.display());
        }
        Ok(jobs.groups)
    }

    fn target(&self, text: &str) -> Result<Target, Error> {
        let mut target = Target::parse(text)?;
        let refuse = |text: &str| Err(Error::new(ErrorKind::InvalidInput, text));
        match &mut target {
            Target::File { engine, direct, .. } => {
                *engine = match self.engine {
                    Some(EngineWord::Psync) => Engine::Psync,
                    Some(EngineWord::IoUring) | None => Engine::IoUring,
                };
                *direct = !self.buffered;
            }
            _ if self.buffered || self.engine.is_some() => {
                return refuse(
                    "--buffered and --engine are for files and devices; a server has its own options",
                );
            }
            Target::VhostUserBlk { spin_us, .. } => {
                *spin_us = self.spin.map_or(Some(DEFAULT_SPIN_US), |spin| spin.0);
                return Ok(target);
            }
            Target::Nbd { .. } => {}
        }
        if self.spin.is_some() {
            return refuse("--spin is for vhost-user-blk, whose queues can be looked at in a loop");
        }
        Ok(target)
    }

    fn job(&self, target: &Target) -> Job {
        let single = matches!(target, Target::File { engine: Engine::Psync, .. });
        let extent = match self.requests {
            Some(count) => Extent::Requests { count },
            None if self.pass => Extent::Pass { limit: None },
            None => Extent::Time { seconds: self.seconds },
        };
        let arrival = match self.rate {
            Some(rate) => Arrival::Open { rate, poisson: self.poisson },
            None => Arrival::Closed { think: self.think / 1e6 },
        };
        Job {
            mix: self.mix,
            pattern: self.pattern,
            sizes: self.block.clone(),
            depth: self.depth.unwrap_or(if single { 1 } else { 64 }),
            threads: self.jobs,
            share: match self.share {
                ShareWord::Parts => Share::Parts,
                ShareWord::Whole => Share::Whole,
            },
            offset: self.offset.get(),
            region: self.region.map(ByteLen::get),
            extent,
            arrival,
            flush: FlushEvery {
                requests: self.flush_requests,
                bytes: self.flush_bytes.map(ByteLen::get),
                seconds: self.flush_seconds,
                alone: self.flush_alone,
            },
            final_flush: self.final_flush,
            warm_up: self.warm_up,
            seed: self.seed,
            verify: Verify {
                reads: matches!(self.verify, Some(VerifyWord::Reads | VerifyWord::All)),
                afterwards: matches!(self.verify, Some(VerifyWord::After | VerifyWord::All)),
            },
            sample: self.sample,
            batch: self.batch,
            reap: self.reap,
            keep_going: self.keep_going,
            ..Job::default()
        }
    }
}

pub fn run(args: &RunArgs) -> Result<ExitCode, Failure> {
    let groups = args.groups()?;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        let heed = |e| Error::io("cannot heed signals", e);
        // The second one ends the program at once.
        flag::register_conditional_shutdown(signal, 1, stop.clone()).map_err(heed)?;
        flag::register(signal, stop.clone()).map_err(heed)?;
    }
    let options = Options {
        destroy: args.destroy.clone(),
        server_pid: args.server_pid,
        devices: args.device.clone(),
        stop,
    };
    for (target, job) in groups.iter().flatten() {
        // Before anything runs, so that nothing is overwritten when a later job is refused.
        job.validate()?;
        permit(target, job, &options.destroy)?;
    }
    let mut runs = Vec::new();
    for group in &groups {
        if !options.stop.load(Ordering::Relaxed) {
            runs.extend(run_together(group, &options)?);
        }
    }
    let stopped = options.stop.load(Ordering::Relaxed);
    let good = runs.iter().all(|run| run.outcome.is_good());
    print(args, runs)?;
    if stopped {
        let text = "interrupted: what was measured until then is above";
        return Err(Error::new(ErrorKind::Cancelled, text).into());
    }
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn print(args: &RunArgs, runs: Vec<Run>) -> Result<(), Failure> {
    if !args.output.is_json() {
        let all: Vec<String> = runs.iter().map(text).collect();
        return output::text(&all.join("\n"));
    }
    let mut paths: Vec<&Path> = args.device.iter().map(PathBuf::as_path).collect();
    paths.extend(runs.iter().filter_map(|run| match &run.target {
        Target::File { path, .. } => Some(path.as_path()),
        _ => None,
    }));
    let environment = Environment::here(paths);
    output::json_line(&Report { version: VERSION, environment, runs })
}
