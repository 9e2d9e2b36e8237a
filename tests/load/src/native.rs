//! The yardstick: io_uring on the bare file or device, one ring and one thread a queue, as fast as it can simply be driven
//! (`DEFER_TASKRUN`, a registered file, `O_DIRECT`).

use crate::job::{Job, Op, Outcome};
use anyhow::{Context, Result, anyhow, bail};
use bedplate_tests::random::Random;
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Above depth 1 the latency of each so many-th request is measured.
const SAMPLE: u64 = 16;

/// Runs a job on a file or device.
pub fn run(job: &Job, path: &Path) -> Result<Outcome> {
    let file = OpenOptions::new()
        .read(true)
        .write(job.op == Op::Write)
        .custom_flags(libc::O_DIRECT)
        .open(path)
        .with_context(|| format!("{} can't be opened for direct I/O", path.display()))?;
    let outcomes = std::thread::scope(|scope| {
        let queues: Vec<_> = (0..job.queues)
            .map(|queue| {
                scope.spawn({
                    let file = &file;
                    move || run_queue(job, queue, file)
                })
            })
            .collect();
        queues
            .into_iter()
            .map(|queue| queue.join().map_err(|_| anyhow!("a load thread panicked"))?)
            .collect::<Result<Vec<_>>>()
    })?;
    Outcome::merge(outcomes).context("the job has no queue")
}

/// Memory of all requests of a queue, aligned for direct I/O. Never freed: after an error the kernel may still be writing to it,
/// and the process ends soon anyway.
struct Buffers {
    memory: &'static mut [u8],
    start: usize,
    block: usize,
}

impl Buffers {
    fn new(job: &Job) -> Buffers {
        const ALIGN: usize = 4096;
        let memory = vec![0; job.block * job.depth + ALIGN].leak();
        Random::new(job.seed).fill(memory);
        let start = memory.as_ptr().align_offset(ALIGN);
        Buffers { memory, start, block: job.block }
    }

    fn slot(&mut self, slot: usize) -> *mut u8 {
        self.memory[self.start + slot * self.block..].as_mut_ptr()
    }
}

fn run_queue(job: &Job, queue: usize, file: &File) -> Result<Outcome> {
    let entries = u32::try_from(job.depth.next_power_of_two())?;
    let mut buffers = Buffers::new(job);
    let mut builder = IoUring::<squeue::Entry, cqueue::Entry>::builder();
    builder.setup_single_issuer().setup_defer_taskrun().setup_coop_taskrun();
    let mut ring = builder.build(entries).context("io_uring can't be set up")?;
    ring.submitter().register_files(&[file.as_raw_fd()]).context("the file can't be registered")?;
    let mut offsets = job.offsets(queue);
    let (mut started, mut free) = (vec![None; job.depth], (0..job.depth).collect::<Vec<_>>());
    let (mut latency, mut requests, mut in_flight) = (Outcome::histogram()?, 0_u64, 0_usize);
    let mut sent = 0_u64;
    let start = Instant::now();
    let limit = job.seconds.map(Duration::from_secs_f64);
    let mut more = true;
    loop {
        while more && let Some(slot) = free.pop() {
            let Some(at) = offsets.next() else {
                more = false;
                break;
            };
            let (length, memory) = (u32::try_from(job.block)?, buffers.slot(slot));
            let entry = match job.op {
                Op::Read => opcode::Read::new(types::Fixed(0), memory, length).offset(at).build(),
                Op::Write => opcode::Write::new(types::Fixed(0), memory, length).offset(at).build(),
            };
            sent += 1;
            started[slot] = (job.depth == 1 || sent.is_multiple_of(SAMPLE)).then(Instant::now);
            // SAFETY: the memory is this slot's alone and never freed, and the slot is not used again before its completion.
            unsafe { ring.submission().push(&entry.user_data(slot as u64)) }
                .context("the ring is full")?;
            in_flight += 1;
        }
        if in_flight == 0 {
            break;
        }
        ring.submit_and_wait(1).context("io_uring_enter failed")?;
        for entry in ring.completion() {
            let slot = entry.user_data() as usize;
            if entry.result() != job.block as i32 {
                bail!("a request gave {} instead of {}", entry.result(), job.block);
            }
            if let Some(begin) = started.get_mut(slot).and_then(Option::take) {
                latency.saturating_record(begin.elapsed().as_nanos() as u64);
            }
            free.push(slot);
            in_flight -= 1;
            requests += 1;
        }
        more = more && limit.is_none_or(|limit| start.elapsed() < limit);
    }
    Ok(Outcome { requests, elapsed: start.elapsed(), latency })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_pass_writes_every_block() -> Result<()> {
        let dir = std::env::temp_dir().join(format!("bedplate-load-{}", std::process::id()));
        std::fs::create_dir_all(&dir)?;
        let file = dir.join("disk");
        std::fs::write(&file, vec![0; 1 << 20])?;
        let job = Job {
            op: Op::Write,
            block: 4096,
            depth: 8,
            queues: 2,
            region: 1 << 20,
            seconds: None,
            seed: 1,
        };
        let outcome = run(&job, &file);
        let content = std::fs::read(&file)?;
        std::fs::remove_dir_all(&dir)?;
        // Temporary folders in memory may lack direct I/O; then there is nothing to test here.
        let Ok(outcome) = outcome else { return Ok(()) };
        assert_eq!(outcome.requests, 256);
        assert!(content.chunks(4096).all(|block| block.iter().any(|&byte| byte != 0)));
        Ok(())
    }
}
