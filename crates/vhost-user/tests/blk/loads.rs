//! Loads: many requests at once, on all queues, with nothing lost.

use crate::rig::{Rig, SIZE, raw};
use bedplate_types::RequestStats;
use bedplate_vhost_user::BlkOptions;
use bedplate_vhost_user::frontend::{Client, ClientOptions, Queue, SlotOp, Slots};
use bedplate_virtio::spec;
use std::time::Duration;

/// Sends `count` requests, `depth` at a time: every third a write, every 50th a flush. Gives how many were well.
fn closed_loop(queue: Queue, depth: u16, count: u32) -> u32 {
    let (number, spin) = (queue.index() as u64, Some(Duration::from_micros(20)));
    let mut slots = Slots::new(queue, depth, 4096, spin).expect("slots");
    let part = SIZE / 4 / 4096;
    let (mut sent, mut done, mut well) = (0, 0, 0);
    let mut free: Vec<u16> = (0..depth).collect();
    while done < count {
        while let Some(slot) = free.pop_if(|_| sent < count) {
            let at = (number * part + u64::from(sent) * 7919 % part) * 4096;
            match sent {
                n if n % 50 == 49 => slots.push(slot, SlotOp::Flush, 0, 0),
                n if n % 3 == 0 => slots.push(slot, SlotOp::Write, at, 4096),
                _ => slots.push(slot, SlotOp::Read, at, 4096),
            }
            .expect("push");
            sent += 1;
        }
        slots.publish();
        assert!(slots.wait(None).expect("answers"));
        while let Some((slot, ok)) = slots.take() {
            assert!(!free.contains(&slot), "completed twice");
            free.push(slot);
            well += u32::from(ok);
            done += 1;
        }
    }
    well
}

#[test]
fn every_request_of_a_load_completes_once() {
    for (queues, threads, depth, features) in
        [(1, 1, 64, u64::MAX), (2, 2, 32, u64::MAX), (4, 2, 1, !spec::F_EVENT_IDX)]
    {
        let options = BlkOptions { queues, threads, ..BlkOptions::default() };
        let rig = Rig::with(options, |d| raw(d, false));
        let queues = usize::from(queues);
        let mut client =
            rig.client(&ClientOptions { queues, features, ..ClientOptions::default() });
        let well: u32 = std::thread::scope(|scope| {
            let run = |queue| scope.spawn(move || closed_loop(queue, depth, 2000));
            let threads: Vec<_> = client.take_queues().into_iter().map(run).collect();
            threads.into_iter().map(|thread| thread.join().expect("a load")).sum()
        });
        assert_eq!(well, 2000 * queues as u32);
        let stats = rig.export.as_ref().expect("runs").stats();
        let total: u64 = stats.iter().map(|s| s.asked.requests()).sum();
        assert_eq!(total, u64::from(well));
        let whole = |s: RequestStats| (s.read_bytes, s.errors) == (s.reads * 4096, 0);
        assert!(stats.iter().all(|s| whole(s.asked)));
    }
}

#[test]
fn slots_carry_data_report_errors_and_keep_a_time_limit() {
    let rig = Rig::with(BlkOptions::default(), |d| raw(d, false));
    let mut client = rig.client(&ClientOptions::default());
    let mut slots = Slots::new(client.take_queues().remove(0), 2, 8192, None).expect("slots");
    assert!(!slots.wait(Some(Duration::from_micros(100))).expect("nothing is in flight"));
    assert!(slots.push(2, SlotOp::Read, 0, 512).is_err());
    assert!(slots.put(0, &[0; 8193]).is_err());
    slots.put(0, &[9; 8192]).expect("put");
    let go = |slots: &mut Slots, op, at, len| {
        slots.push(0, op, at, len).expect("push");
        slots.publish();
        slots.wait(None).expect("an answer");
        slots.take().expect("complete").1
    };
    assert!(go(&mut slots, SlotOp::Write, 4096, 8192));
    slots.put(0, &[0; 8192]).expect("put");
    assert!(go(&mut slots, SlotOp::Read, 8192, 4096));
    let mut back = [0; 4097];
    slots.get(0, &mut back).expect("get");
    assert_eq!((&back[..4096], back[4096]), (&[9; 4096][..], 0));
    assert!(go(&mut slots, SlotOp::Discard, 0, 65536));
    assert!(!go(&mut slots, SlotOp::Read, SIZE, 4096));
}

#[test]
fn front_ends_that_vanish_under_load_leave_the_next_one_a_good_disk() {
    let options = BlkOptions { queues: 2, threads: 2, ..BlkOptions::default() };
    let rig = Rig::with(options, |d| raw(d, false));
    let options = ClientOptions { queues: 2, ..ClientOptions::default() };
    for round in 0..10_u8 {
        let mut client: Client = rig.client(&options);
        for mut q in client.take_queues() {
            let (at, _) = q.room();
            // 50 writes are under way when the connection ends.
            for i in 0..50_u16 {
                let place = at + u64::from(i) * 8192;
                let mut header = [0; 16];
                header[0] = 1;
                header[8..10].copy_from_slice(&(i * 8).to_le_bytes());
                q.memory().write(place, &header);
                q.memory().fill(place + 4096, 4096, round);
                let b =
                    |addr, len, write| bedplate_vhost_user::frontend::Buffer { addr, len, write };
                q.lay_out(
                    i * 3,
                    &[b(place, 16, false), b(place + 4096, 4096, false), b(place + 64, 1, true)],
                );
                q.ring().add(i * 3);
            }
            q.publish();
        }
        drop(client);
    }
    let mut client = rig.client(&options);
    let mut q = client.take_queues().remove(0);
    q.write(0, &[77; 4096]).expect("write");
    assert_eq!(q.read(0, 4096).expect("read"), [77; 4096]);
}
