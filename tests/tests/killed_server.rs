//! The server is killed without warning, again and again, under writers on several queues. Each time the next one must have
//! everything that was completed, flushed or not (I11), and no checker may find corruption.
//!
//! A block carries its own number and the number of the write, so what is read back tells which write it is.

use anyhow::{Context, Result, ensure};
use bedplate_tests::fixture::Fixture;
use bedplate_tests::has_or_skip;
use bedplate_tests::random::Random;
use bedplate_vhost_user::frontend::{Client, ClientOptions, Queue};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const QUEUES: usize = 3;
const BLOCK: usize = 4096;
/// Blocks of one queue; they lie apart, so that most first writes need a cluster.
const BLOCKS: usize = 1200;
const KILLS: usize = 50;
/// A server that has not answered for this long is taken for dead.
const GONE: Duration = Duration::from_millis(700);

/// What one queue knows about one of its blocks.
#[derive(Clone, Copy, Default)]
struct Known {
    /// The last write sent.
    sent: u64,
    /// The last write that was completed.
    completed: u64,
}

/// Queues take turns, so that they share clusters and tables; the step is no multiple of a cluster.
fn place(queue: usize, block: usize) -> u64 {
    ((block * QUEUES + queue) * 5 * BLOCK) as u64
}

fn content(place: u64, write: u64) -> Vec<u8> {
    let words = [place, write].map(u64::to_le_bytes).concat();
    words.iter().copied().cycle().take(BLOCK).collect()
}

/// Writes and flushes until the server is gone.
fn load(
    queue: &mut Queue,
    number: usize,
    known: &mut [Known],
    random: &mut Random,
    stop: &AtomicBool,
) {
    let mut since_flush = 0;
    while !stop.load(Ordering::Relaxed) {
        if since_flush > random.below(400) {
            if queue.flush().is_err() {
                return;
            }
            since_flush = 0;
            continue;
        }
        let block = random.below(BLOCKS as u64) as usize;
        known[block].sent += 1;
        let write = known[block].sent;
        let at = place(number, block);
        if queue.write(at, &content(at, write)).is_err() {
            return;
        }
        known[block].completed = write;
        since_flush += 1;
    }
}

fn verify(queue: &mut Queue, number: usize, known: &mut [Known]) -> Result<()> {
    for (block, known) in known.iter_mut().enumerate() {
        let at = place(number, block);
        let read = queue.read(at, u32::try_from(BLOCK)?)?;
        let write =
            read.get(8..16).and_then(|word| word.try_into().ok()).map_or(0, u64::from_le_bytes);
        let whole = if write == 0 { vec![0; BLOCK] } else { content(at, write) };
        ensure!(read == whole, "the block at {at} is a mixture");
        let Known { sent, completed } = *known;
        ensure!(
            (completed..=sent).contains(&write),
            "the block at {at} holds write {write}; {completed} was completed, {sent} was the last"
        );
        *known = Known { sent, completed: write };
    }
    Ok(())
}

fn kill_again_and_again(format: &str) -> Result<()> {
    let fixture = Fixture::new(format, "128M")?.queues(u16::try_from(QUEUES)?);
    let options = ClientOptions { queues: QUEUES, ..ClientOptions::default() };
    let mut known = vec![vec![Known::default(); BLOCKS]; QUEUES];
    let mut random = Random::new(0x5eed);
    for kill in 0..KILLS {
        let server = fixture.serve()?;
        let mut client = Client::connect(fixture.socket(), &options)?;
        let mut queues = client.take_queues();
        for (number, queue) in queues.iter_mut().enumerate() {
            verify(queue, number, &mut known[number])
                .with_context(|| format!("after kill {kill}"))?;
        }
        let (stop, pause) = (AtomicBool::new(false), Duration::from_millis(10 + random.below(250)));
        std::thread::scope(|scope| -> Result<()> {
            for (number, (queue, known)) in queues.iter_mut().zip(&mut known).enumerate() {
                // A killed server does not answer; it is no use to wait for long.
                queue.set_patience(GONE);
                let (mut random, stop) = (Random::new(random.bits()), &stop);
                scope.spawn(move || load(queue, number, known, &mut random, stop));
            }
            // Not to wait for anything, but to kill at a random moment.
            std::thread::sleep(pause);
            let killed = server.kill();
            stop.store(true, Ordering::Relaxed);
            killed
        })?;
        fixture.assert_not_corrupt().with_context(|| format!("after kill {kill}"))?;
    }
    // A last server takes the image over, ends well, and leaves it without fault.
    let server = fixture.serve()?;
    let mut client = Client::connect(fixture.socket(), &options)?;
    for (number, queue) in client.take_queues().iter_mut().enumerate() {
        verify(queue, number, &mut known[number]).context("after the last kill")?;
    }
    drop(client);
    server.stop()?;
    fixture.assert_clean()?;
    ensure!(fixture.state_files()?.is_empty(), "a clean end leaves state behind");
    ensure!(known.iter().flatten().any(|known| known.completed > 0), "nothing was ever written");
    Ok(())
}

#[test]
fn no_completed_write_to_qcow2_is_lost_by_fifty_kills() -> Result<()> {
    if !has_or_skip("no_completed_write_to_qcow2_is_lost_by_fifty_kills", "qemu-img") {
        return Ok(());
    }
    kill_again_and_again("qcow2")
}

#[test]
fn no_completed_write_to_raw_is_lost_by_fifty_kills() -> Result<()> {
    kill_again_and_again("raw")
}
