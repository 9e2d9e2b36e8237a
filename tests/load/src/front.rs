//! The load over vhost-user-blk, without a virtual machine: the front end of the crate `bedplate-vhost-user`, one thread a queue.

use crate::job::{Job, Op, Outcome};
use anyhow::{Context, Result, ensure};
use bedplate_vhost_user::frontend::load::{LoadSpec, Step, run_steps};
use bedplate_vhost_user::frontend::{Client, ClientOptions};
use std::path::Path;
use std::time::{Duration, Instant};

/// Descriptors that one request takes.
const CHAIN: usize = 3;

/// A first pass has no time limit but this.
const FOR_EVER: Duration = Duration::from_secs(3600);
/// How long a client looks for completions before it sleeps. One that never sleeps would take the core that the server
/// needs, as soon as there are more busy threads than cores.
const SPIN: Duration = Duration::from_micros(10);

/// Runs a job against the back end that listens on `socket`. After a first pass the disk is flushed, and that counts.
pub fn run(job: &Job, socket: &Path) -> Result<Outcome> {
    let queue_size = u16::try_from((job.depth * CHAIN).next_power_of_two().max(128))?;
    let room = (job.block * job.depth + (1 << 20)).next_power_of_two();
    let options = ClientOptions {
        queues: job.queues,
        queue_size,
        memory_per_queue: room as u64,
        ..ClientOptions::default()
    };
    let mut client = Client::connect(socket, &options)?;
    let size = client.capacity()?;
    ensure!(
        size >= job.region,
        "the disk has {size} bytes, fewer than the region of {}",
        job.region
    );
    let spec = LoadSpec {
        block: u32::try_from(job.block)?,
        depth: u16::try_from(job.depth)?,
        duration: job.seconds.map_or(FOR_EVER, Duration::from_secs_f64),
        seed: job.seed,
        spin: Some(SPIN),
        ..LoadSpec::default()
    };
    let write = job.op == Op::Write;
    let steps = |queue| job.offsets(queue).map(move |at| Step { at, write });
    let (result, mut queues) = run_steps(client.take_queues(), &spec, steps)?;
    ensure!(result.errors == 0, "{} of {} requests failed", result.errors, result.requests);
    let mut elapsed = result.elapsed;
    if job.seconds.is_none() && write {
        let start = Instant::now();
        queues.first_mut().context("no queue")?.flush()?;
        elapsed += start.elapsed();
    }
    Ok(Outcome { requests: result.requests, elapsed, latency: result.latency })
}
