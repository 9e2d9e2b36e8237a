//! Loads: many requests at once, on all queues, with nothing lost.

use crate::rig::{Rig, SIZE, null, raw};
use bedplate_vhost_user::BlkOptions;
use bedplate_vhost_user::frontend::load::{LoadSpec, Step, run, run_steps};
use bedplate_vhost_user::frontend::{Client, ClientOptions};
use bedplate_virtio::spec;
use std::time::Duration;

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
        let load = LoadSpec {
            read_percent: 50,
            depth,
            region: SIZE,
            spin: Some(Duration::from_micros(20)),
            ..LoadSpec::default()
        };
        let steps = |q: usize| load.steps(q, queues).take(2000);
        let (result, given_back) = run_steps(client.take_queues(), &load, steps).expect("load");
        assert_eq!((result.requests, result.errors), (2000 * queues as u64, 0));
        assert_eq!(given_back.len(), queues);
        let stats = rig.export.as_ref().expect("runs").stats();
        let total: u64 = stats.iter().map(|s| s.requests()).sum();
        assert_eq!(total, result.requests);
        assert!(stats.iter().all(|s| s.read_bytes == s.reads * 4096 && s.errors == 0));
    }
}

#[test]
fn a_load_runs_for_its_time_and_reads_in_order_when_told() {
    let rig = Rig::with(BlkOptions::default(), |_| null(1 << 40));
    let mut client = rig.client(&ClientOptions::default());
    let load = LoadSpec { duration: Duration::from_millis(50), ..LoadSpec::default() };
    let (result, _) = run(client.take_queues(), &load).expect("load");
    assert!(result.requests > 64 && result.errors == 0 && result.elapsed >= load.duration);
    assert_eq!(result.bytes, result.requests * 4096);
    let spec = LoadSpec { random: false, region: 16384, start: 4096, ..LoadSpec::default() };
    let steps: Vec<_> = spec.steps(1, 2).take(3).collect();
    assert_eq!(steps.iter().map(|s| s.at).collect::<Vec<_>>(), [12288, 16384, 12288]);
    assert!(steps.iter().all(|s: &Step| !s.write));
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
