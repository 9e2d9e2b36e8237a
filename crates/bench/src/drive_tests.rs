//! The loop over a disk in memory: what is sent, what is counted, and lies that must be found.

use crate::content::{Fault, Verified};
use crate::job::{Arrival, Extent, FlushEvery, Job, Mix, Op, Sizes, Verify};
use crate::outcome::Outcome;
use crate::run::{Options, threads};
use crate::target::memory::{Lie, Memory};
use bedplate_types::Result;

const SIZE: usize = 1 << 20;

fn load(job: &Job, lie: Lie) -> (Result<Outcome>, Memory) {
    let mut memory = Memory::new(SIZE, job.depth as usize, job.sizes.largest() as usize, lie);
    job.validate().expect("a good job");
    let outcome = threads(job, SIZE as u64, vec![&mut memory], &Options::default());
    (outcome, memory)
}

fn mixed(verify: Verify) -> Job {
    Job {
        mix: Mix { read: 50, write: 44, trim: 3, flush: 3 },
        sizes: Sizes::Range { min: 4096, max: 16384 },
        depth: 8,
        extent: Extent::Requests { count: 20_000 },
        verify,
        ..Job::default()
    }
}

const INLINE: Verify = Verify { reads: true, afterwards: false };
const AFTER: Verify = Verify { reads: false, afterwards: true };
const BOTH: Verify = Verify { reads: true, afterwards: true };

#[test]
fn a_pass_writes_every_block_and_flushes_at_the_end() {
    let job = Job {
        mix: Mix::WRITE,
        extent: Extent::Pass { limit: None },
        final_flush: true,
        ..Job::default()
    };
    let (outcome, memory) = load(&job, Lie::Nothing);
    let outcome = outcome.expect("done");
    assert_eq!((outcome.requests, outcome.bytes, outcome.errors), (256, SIZE as u64, 0));
    assert!(memory.now.chunks(4096).all(|block| block.iter().any(|byte| *byte != 0)));
    assert_eq!(memory.log.last().map(|step| step.op), Some(Op::Flush));
    assert!(outcome.final_flush_s.is_some() && outcome.op(Op::Flush).is_none());
    assert_eq!(outcome.latency.samples, 256);
}

#[test]
fn a_true_disk_passes_every_check() {
    let (outcome, memory) = load(&mixed(BOTH), Lie::Nothing);
    let outcome = outcome.expect("done");
    let found = outcome.verified.as_ref().expect("checked");
    assert_eq!((found.faults(), outcome.requests), (0, 20_000));
    assert!(found.units > 10_000, "{found:?}");
    // No two overlapping requests of which one changes something may be under way at once: all that ran together were
    // performed in turned order, so a mistake would have shown. All kinds were there.
    for op in Op::ALL {
        assert!(memory.log.iter().any(|step| step.op == op));
    }
}

fn found(job: &Job, lie: Lie) -> Verified {
    load(job, lie).0.expect("the load itself is well").verified.expect("checked")
}

/// Writes everything once, so that all of it is read back.
fn pass(verify: Verify) -> Job {
    Job { mix: Mix::WRITE, extent: Extent::Pass { limit: None }, verify, ..Job::default() }
}

#[test]
fn a_corrupted_block_is_found() {
    let found = found(&pass(AFTER), Lie::Flip(77));
    assert_eq!((found.corrupt, found.faults(), found.units), (1, 1, 256), "{found:?}");
    assert_eq!(found.findings[0].fault, Fault::Corrupt);
}

#[test]
fn a_lost_write_is_found() {
    let one = found(&pass(AFTER), Lie::Lose(100));
    assert_eq!((one.lost, one.faults()), (1, 1), "{one:?}");
    // Also where the block held an older write.
    let many = Job { extent: Extent::Requests { count: 1000 }, ..pass(AFTER) };
    let again = found(&many, Lie::Lose(999));
    assert_eq!((again.lost, again.faults()), (1, 1), "{again:?}");
}

#[test]
fn a_misplaced_write_is_found_where_it_went_and_where_it_is_missing() {
    let found = found(&pass(AFTER), Lie::Misplace(50));
    assert_eq!((found.misplaced, found.lost, found.faults()), (1, 1, 2), "{found:?}");
}

#[test]
fn a_stale_read_is_found_while_the_load_runs() {
    let found = found(&mixed(INLINE), Lie::Stale(500));
    assert!(found.stale >= 1 && found.stale == found.faults(), "{found:?}");
    assert!(found.findings[0].text.contains("older"));
}

#[test]
fn lies_are_found_by_reads_of_a_mixed_load() {
    let corrupt = found(&mixed(INLINE), Lie::Flip(1000));
    let lost = found(&mixed(INLINE), Lie::Lose(1000));
    assert!(corrupt.corrupt >= 1 && corrupt.lost == 0, "{corrupt:?}");
    assert!(lost.lost >= 1 && lost.corrupt == 0, "{lost:?}");
}

#[test]
fn a_failed_request_ends_the_load_unless_it_keeps_going() {
    let job = Job { extent: Extent::Requests { count: 1000 }, ..Job::default() };
    let error = load(&job, Lie::Fail(10)).0.expect_err("ended").to_string();
    assert!(error.contains("read of 4096 bytes"), "{error}");
    let (outcome, _) = load(&Job { keep_going: true, ..job }, Lie::Fail(10));
    let outcome = outcome.expect("goes on");
    assert_eq!((outcome.requests, outcome.errors), (1000, 1));
    assert!(outcome.first_error.expect("a sentence").contains("read of 4096 bytes"));
}

#[test]
fn flushes_come_after_every_so_many_writes() {
    let job = Job {
        mix: Mix::WRITE,
        flush: FlushEvery { requests: Some(10), ..FlushEvery::default() },
        extent: Extent::Requests { count: 100 },
        ..Job::default()
    };
    let outcome = load(&job, Lie::Nothing).0.expect("done");
    let flushes = outcome.op(Op::Flush).map(|op| op.requests);
    assert_eq!((outcome.op(Op::Write).map(|op| op.requests), flushes), (Some(100), Some(10)));
}

#[test]
fn a_flush_alone_waits_for_what_is_before_it() {
    let flush = FlushEvery { requests: Some(10), alone: true, ..FlushEvery::default() };
    let extent = Extent::Requests { count: 100 };
    let job = Job { mix: Mix::WRITE, flush, extent, ..Job::default() };
    let order = |job: &Job| {
        let (outcome, memory) = load(job, Lie::Nothing);
        assert_eq!(outcome.expect("done").requests, 110);
        memory.log.iter().map(|step| step.op == Op::Flush).collect::<Vec<_>>()
    };
    let eleventh: Vec<bool> = (1..=110).map(|i| i % 11 == 0).collect();
    assert_eq!(order(&job), eleventh);
    // This disk completes the newest first: a flush that does not wait comes earlier.
    let beside = FlushEvery { alone: false, ..flush };
    assert_ne!(order(&Job { flush: beside, ..job }), eleventh);
}

#[test]
fn an_open_loop_sends_what_its_schedule_says_and_charges_the_wait() {
    for poisson in [false, true] {
        let job = Job {
            arrival: Arrival::Open { rate: 20_000.0, poisson },
            extent: Extent::Requests { count: 200 },
            ..Job::default()
        };
        let outcome = load(&job, Lie::Nothing).0.expect("done");
        assert_eq!(outcome.requests, 200);
        // Faster than its schedule it can't be: 199 gaps of 50 us, less by chance when they are random.
        assert!(
            outcome.elapsed_s >= if poisson { 0.005 } else { 0.00994 },
            "{}",
            outcome.elapsed_s
        );
        assert!(outcome.schedule.is_some_and(|schedule| schedule.unsent == 0));
    }
}

#[test]
fn what_was_due_and_not_sent_is_told() {
    // A million a second with a depth of one that sends each only after the last: some stay unsent at the end.
    let job = Job {
        arrival: Arrival::Open { rate: 1e9, poisson: false },
        depth: 1,
        extent: Extent::Time { seconds: 0.02 },
        ..Job::default()
    };
    let outcome = load(&job, Lie::Nothing).0.expect("done");
    assert!(outcome.schedule.is_some_and(|schedule| schedule.unsent > 0));
    assert!(outcome.latency.max_ns > outcome.latency.min_ns);
}

#[test]
fn a_pause_lies_between_the_requests_of_a_slot() {
    let job = Job {
        arrival: Arrival::Closed { think: 0.001 },
        depth: 2,
        extent: Extent::Requests { count: 20 },
        ..Job::default()
    };
    let outcome = load(&job, Lie::Nothing).0.expect("done");
    // Ten requests of each slot, nine pauses between them.
    assert!(outcome.requests == 20 && outcome.elapsed_s >= 0.009, "{}", outcome.elapsed_s);
}
