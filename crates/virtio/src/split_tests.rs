//! Tests of the device's side against the driver's side, in one process.

use super::*;
use crate::driver::{DriverQueue, SharedMemory};
use crate::inflight::InflightArea;
use crate::vanish::Alarm;
use std::sync::Arc;

fn alarm() -> Alarm {
    Alarm::new().expect("alarm")
}

struct Rig {
    memory: SharedMemory,
    driver: DriverQueue,
    queue: SplitQueue,
    segs: Vec<iovec>,
}

fn rig(size: u16, event_idx: bool) -> Rig {
    let memory = SharedMemory::new(0, 1 << 20).expect("memory");
    let driver = DriverQueue::new(&memory, 0, size, event_idx);
    let queue =
        SplitQueue::new(memory.memory(), size, driver.addrs(0), 0, event_idx).expect("queue");
    Rig { memory, driver, queue, segs: Vec::new() }
}

impl Rig {
    fn desc(&mut self, i: u16, addr: u64, len: u32, flags: u16, next: u16) {
        self.driver.set_desc(i, Desc { addr, len, flags, next });
    }

    fn pop(&mut self) -> Result<Pop, Broken> {
        self.queue.pop(self.memory.memory(), &mut self.segs)
    }

    fn malformed(&mut self, head: u16) -> &'static str {
        self.driver.add(head);
        self.driver.publish();
        match self.pop() {
            Ok(Pop::Malformed(head, why)) => {
                self.queue.push_used(head, 0);
                self.queue.publish();
                assert_eq!(self.driver.take_used().map(|u| u.len), Some(0));
                why
            }
            other => panic!("expected a malformed chain, got {other:?}"),
        }
    }
}

#[test]
fn chains_come_and_go_round_the_ring_in_both_notification_modes() {
    for event_idx in [false, true] {
        let mut r = rig(4, event_idx);
        r.desc(0, 0x8000, 16, DESC_F_NEXT, 2);
        r.desc(2, 0x9000, 512, DESC_F_NEXT | DESC_F_WRITE, 3);
        r.desc(3, 0xa000, 1, DESC_F_WRITE, 0);
        for round in 0..70_000_u32 {
            assert!(matches!(r.pop(), Ok(Pop::Empty)));
            assert!(!r.queue.enable_kicks());
            assert!(!r.driver.want_interrupts(true));
            r.driver.add(0);
            assert!(r.driver.publish(), "the device sleeps and must be kicked, round {round}");
            r.queue.disable_kicks();
            let Ok(Pop::Chain(head, readable)) = r.pop() else { panic!("no chain in {round}") };
            assert_eq!((readable, r.segs.len()), (1, 3));
            r.queue.push_used(head, 513);
            r.queue.publish();
            assert!(r.queue.wants_interrupt());
            assert!(!r.queue.wants_interrupt());
            assert_eq!(r.driver.take_used().map(|u| (u.head, u.len)), Some((0, 513)));
        }
    }
}

#[test]
fn a_driver_that_polls_gets_no_interrupts_and_a_busy_device_no_kicks() {
    for event_idx in [false, true] {
        let mut r = rig(8, event_idx);
        r.desc(0, 0x8000, 16, 0, 0);
        r.driver.want_interrupts(true);
        for round in 0..100 {
            r.queue.disable_kicks();
            r.driver.add(0);
            let kick = r.driver.publish();
            let Ok(Pop::Chain(head, _)) = r.pop() else { panic!("no chain") };
            r.queue.push_used(head, 0);
            r.queue.publish();
            let interrupt = r.queue.wants_interrupt();
            r.driver.take_used();
            r.driver.want_interrupts(false);
            assert_eq!((kick && event_idx, interrupt), (round == 0 && event_idx, round == 0));
        }
    }
}

#[test]
fn enabling_kicks_tells_of_chains_that_came_in_between() {
    for event_idx in [false, true] {
        let mut r = rig(8, event_idx);
        r.desc(0, 0x8000, 16, 0, 0);
        r.queue.disable_kicks();
        r.driver.add(0);
        r.driver.publish();
        assert!(r.queue.enable_kicks());
    }
}

#[test]
fn malformed_chains_are_given_back_and_the_queue_goes_on() {
    let mut r = rig(8, false);
    r.desc(0, 0x8000, 16, DESC_F_NEXT, 0);
    assert_eq!(r.malformed(0), "its chain does not end");
    r.desc(0, 0x8000, 16, DESC_F_NEXT, 8);
    assert_eq!(r.malformed(0), "its next descriptor does not exist");
    r.desc(0, 0x8000, 16, DESC_F_NEXT | DESC_F_WRITE, 1);
    r.desc(1, 0x8000, 16, 0, 0);
    assert_eq!(r.malformed(0), "a readable buffer follows a writable one");
    for (addr, len) in [(1 << 20, 1), (u64::MAX, 1), (0x8000, u32::MAX), (0, (1 << 20) + 1)] {
        r.desc(0, addr, len, 0, 0);
        assert_eq!(r.malformed(0), "a buffer lies outside guest memory");
    }
    r.desc(0, 0x8000, 16, 0, 0);
    r.driver.add(0);
    r.driver.publish();
    let Ok(Pop::Chain(head, 1)) = r.pop() else { panic!("the queue stopped") };
    head.abandon();
}

#[test]
fn indirect_tables_are_one_level_of_whole_descriptors() {
    let mut r = rig(8, false);
    for len in [0, 8, 17, 24] {
        r.desc(0, 0x8000, len, DESC_F_INDIRECT, 0);
        assert!(r.malformed(0).contains("multiple of 16"));
    }
    for (addr, len) in [(1 << 20, 16), ((1 << 20) - 16, 32), (0x8000, 0xffff_fff0)] {
        r.desc(0, addr, len, DESC_F_INDIRECT, 0);
        assert!(r.malformed(0).contains("outside"));
    }
    r.desc(0, 0x8000, 16, DESC_F_INDIRECT | DESC_F_NEXT, 1);
    assert!(r.malformed(0).contains("nested or followed"));
    let put = |r: &Rig, at: u64, addr: u64, len: u32, flags: u16, next: u16| {
        let words = Desc { addr, len, flags, next }.to_words();
        r.memory.write(at, &words[0].to_ne_bytes());
        r.memory.write(at + 8, &words[1].to_ne_bytes());
    };
    r.desc(0, 0x8000, 32, DESC_F_INDIRECT, 0);
    put(&r, 0x8000, 0x8000, 16, DESC_F_INDIRECT, 0);
    assert!(r.malformed(0).contains("nested"));
    put(&r, 0x8000, 0x9000, 16, DESC_F_NEXT, 2);
    assert!(r.malformed(0).contains("does not exist"));
    put(&r, 0x8000, 0x9000, 16, DESC_F_NEXT, 0);
    assert_eq!(r.malformed(0), "its chain does not end");
    // A direct descriptor before the table, and a table at an odd address, are fine.
    r.desc(0, 0x9000, 16, DESC_F_NEXT, 1);
    r.desc(1, 0xb003, 32, DESC_F_INDIRECT, 0);
    put(&r, 0xb003, 0xa000, 512, DESC_F_NEXT | DESC_F_WRITE, 1);
    put(&r, 0xb013, 0xa200, 1, DESC_F_WRITE, 0);
    r.driver.add(0);
    r.driver.publish();
    let Ok(Pop::Chain(head, 1)) = r.pop() else { panic!("refused") };
    head.abandon();
    assert_eq!(r.segs.iter().map(|s| s.iov_len).collect::<Vec<_>>(), [16, 512, 1]);
}

#[test]
fn too_many_or_impossible_heads_break_the_queue() {
    let mut r = rig(4, false);
    r.driver.publish_index(5);
    assert!(r.pop().is_err());
    let mut r = rig(4, false);
    r.driver.add(4);
    r.driver.publish();
    assert!(r.pop().is_err());
}

#[test]
fn rings_outside_memory_or_of_odd_size_are_refused() {
    let m = SharedMemory::new(0, 1 << 16).expect("memory");
    let new = |size, desc, avail, used| {
        SplitQueue::new(m.memory(), size, RingAddrs { desc, avail, used }, 0, false).is_ok()
    };
    assert!(new(256, 0, 0x2000, 0x3000));
    assert!(!new(0, 0, 0x2000, 0x3000));
    assert!(!new(255, 0, 0x2000, 0x3000));
    assert!(!new(2048, 0, 0x8000, 0x9000));
    assert!(!new(256, 0xf010, 0x2000, 0x3000));
    assert!(!new(256, 0, 0x1_0000, 0x3000));
    assert!(!new(256, 0, 0x2000, 0xfffc));
    assert!(!new(256, 8, 0x2000, 0x3000));
}

#[test]
fn a_queue_goes_on_where_the_last_device_stopped() {
    let mut r = rig(4, false);
    r.desc(0, 0x8000, 16, 0, 0);
    for _ in 0..3 {
        r.driver.add(0);
        r.driver.publish();
        let Ok(Pop::Chain(head, _)) = r.pop() else { panic!("no chain") };
        r.queue.push_used(head, 0);
        r.queue.publish();
        assert!(r.driver.take_used().is_some());
    }
    let base = r.queue.next_avail();
    r.queue = SplitQueue::new(r.memory.memory(), 4, r.driver.addrs(0), base, false).expect("queue");
    r.driver.add(0);
    r.driver.publish();
    let Ok(Pop::Chain(head, _)) = r.pop() else { panic!("no chain") };
    r.queue.push_used(head, 9);
    r.queue.publish();
    assert_eq!(r.driver.take_used().map(|u| u.len), Some(9));
}

/// Bits that are the same in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Mostly sensible, sometimes anything.
    fn of(&mut self, sensible: u64) -> u64 {
        let bits = self.next();
        if bits.is_multiple_of(8) { self.next() >> (bits >> 3 & 63) } else { bits >> 8 & sensible }
    }
}

#[test]
fn random_rings_never_leave_guest_memory_and_every_chain_ends() {
    let limits = crate::blk::Limits {
        capacity: 1 << 20,
        read_only: false,
        discard: true,
        max_discard_sectors: 1 << 12,
        max_discard_segments: 16,
    };
    let mut random = Random(0x1234_5678_9abc_def1);
    let (mut chains, mut malformed, mut broken) = (0, 0, 0);
    let mut r = rig(16, false);
    for _ in 0..20_000 {
        for i in 0..16 {
            let (addr, len) = (random.of(0xf_fff0), random.of(0xff0) as u32);
            r.desc(i, addr, len, random.of(7) as u16, random.of(15) as u16);
        }
        // Indirect tables are wherever descriptors point; give them something to find.
        let at = random.next() & 0xf_ff00;
        let words = [random.of(0xf_fff0), random.of(0x0003_0007_0000_0fff)];
        r.memory.write(at, &words.map(u64::to_le_bytes).concat());
        r.driver.add(random.of(15) as u16);
        r.driver.publish();
        match r.pop() {
            Ok(Pop::Empty) => panic!("a chain was made available"),
            Ok(Pop::Chain(head, readable)) => {
                chains += 1;
                let all = r.memory.at(0, 0).addr();
                assert!(readable <= r.segs.len() && r.segs.len() <= MAX_CHAIN);
                for s in &r.segs {
                    let start = s.iov_base.addr();
                    assert!(start >= all && s.iov_len <= (1 << 20) - (start - all));
                }
                let _ = crate::blk::parse(&mut r.segs, readable, &limits);
                r.queue.push_used(head, 0);
            }
            Ok(Pop::Malformed(head, _)) => {
                malformed += 1;
                r.queue.push_used(head, 0);
            }
            Err(_) => {
                broken += 1;
                r = rig(16, false);
            }
        }
        r.queue.publish();
    }
    assert!(chains > 1000 && malformed > 1000 && broken > 100, "{chains} {malformed} {broken}");
}

/// A driver with `size` chains of one buffer, a queue that keeps records, and their area.
fn recorded(size: u16) -> (Rig, Arc<InflightArea>) {
    let mut r = rig(size, false);
    (0..size).for_each(|i| r.desc(i, 0x8000, 16, 0, 0));
    let (file, len) = InflightArea::create(1, size).expect("area");
    let area = Arc::new(InflightArea::map(&file, (0, len), 1, size, &alarm()).expect("map"));
    r.queue.keep_records(area.queue(0).expect("records")).expect("kept");
    (r, area)
}

impl Rig {
    fn take(&mut self) -> Head {
        match self.pop() {
            Ok(Pop::Chain(head, _)) => head,
            other => panic!("expected a chain, got {other:?}"),
        }
    }

    /// The process is killed and another goes on; QEMU tells it the used index as the base. Returns what it takes.
    fn killed(&mut self, area: &Arc<InflightArea>) -> Vec<u16> {
        let addrs = self.driver.addrs(0);
        let used = self.queue.used_word(1).load(Ordering::Relaxed);
        let size = self.queue.size();
        self.queue =
            SplitQueue::new(self.memory.memory(), size, addrs, used, false).expect("queue");
        self.queue.keep_records(area.queue(0).expect("records")).expect("kept");
        assert_eq!(self.queue.has_again(), self.queue.next_avail() != used);
        let mut taken = Vec::new();
        while let Ok(Pop::Chain(head, _)) = self.pop() {
            taken.push(head.index());
            head.abandon();
        }
        assert!(!self.queue.has_again());
        taken
    }
}

#[test]
fn requests_under_way_are_taken_again_in_their_order_and_those_given_back_are_not() {
    let (mut r, area) = recorded(8);
    for head in [5, 2, 7, 0, 3] {
        r.driver.add(head);
    }
    r.driver.publish();
    let heads = [r.take(), r.take(), r.take(), r.take()];
    let [first, second, third, fourth] = heads;
    // Given back out of order; the last one is not shown.
    r.queue.push_used(third, 0);
    r.queue.publish();
    r.queue.push_used(first, 0);
    second.abandon();
    fourth.abandon();
    assert_eq!(r.killed(&area), [5, 2, 0, 3], "again 5, 2 and 0, then 3 for the first time");
    assert_eq!(r.killed(&area), [5, 2, 0, 3], "killed again");
    r.driver.add(7);
    r.driver.publish();
    assert_eq!(r.killed(&area), [5, 2, 0, 3, 7]);
}

#[test]
fn a_batch_that_was_shown_is_not_taken_again_wherever_the_clearing_of_its_records_stopped() {
    let (mut r, area) = recorded(8);
    (0..5).for_each(|head| r.driver.add(head));
    r.driver.publish();
    let heads = (0..5).map(|_| r.take()).collect::<Vec<_>>();
    let mut last = None;
    for head in heads {
        // The last one stays under way.
        if head.index() == 4 {
            last = Some(head);
        } else {
            r.queue.push_used(head, 0);
        }
    }
    // Killed after the index was shown, before any record was cleared: `publish` without what follows.
    let used = r.queue.next_used;
    r.queue.used_word(1).store(used.to_le(), Ordering::Release);
    assert_eq!(r.killed(&area), [4]);
    last.into_iter().for_each(Head::abandon);
}

#[test]
fn records_of_a_smaller_queue_are_refused() {
    let mut r = rig(16, false);
    let (file, len) = InflightArea::create(1, 8).expect("area");
    let area = Arc::new(InflightArea::map(&file, (0, len), 1, 8, &alarm()).expect("map"));
    assert!(r.queue.keep_records(area.queue(0).expect("records")).is_err());
}
