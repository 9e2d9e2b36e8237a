//! Drivers gone wrong: a bad request costs that request, a bad ring costs that ring, and nothing else.

use crate::rig::{Rig, SIZE, raw};
use bedplate_vhost_user::BlkOptions;
use bedplate_vhost_user::frontend::{Buffer, ClientOptions, Queue};
use bedplate_virtio::spec;
use bedplate_virtio::split::Desc;
use std::os::fd::AsRawFd;
use vhost::VhostBackend;
use vmm_sys_util::eventfd::EventFd;

const END: u64 = SIZE / 512;

fn segment(sector: u64, count: u32, flags: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &count.to_le_bytes(), &flags.to_le_bytes()].concat()
}

fn wait_readable(event: &EventFd) {
    // SAFETY: the descriptor is open as long as `event` lives.
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(event.as_raw_fd()) };
    let mut fds = [rustix::event::PollFd::from_borrowed_fd(fd, rustix::event::PollFlags::IN)];
    rustix::event::poll(&mut fds, None).expect("poll");
}

/// The queue still works.
fn works(q: &mut Queue) {
    q.write(0, b"alive").expect_err("half a sector");
    q.write(512, &[9; 512]).expect("write");
    assert_eq!(q.read(512, 512).expect("read"), [9; 512]);
}

#[test]
fn requests_past_the_end_or_of_odd_length_fail() {
    let rig = Rig::raw();
    let (_client, mut q) = rig.one();
    let before = rig.file();
    let cases =
        [(END, 512), (END - 1, 1024), (u64::MAX, 512), (1 << 55, 512), (u64::MAX, 1024), (0, 100)];
    for (sector, len) in cases {
        let a = q.request(spec::T_IN, sector, &[], len).expect("answer");
        assert_eq!(a.status, spec::S_IOERR, "read {sector} {len}");
        let a = q.request(spec::T_OUT, sector, &vec![1; len as usize], 0).expect("answer");
        assert_eq!(a.status, spec::S_IOERR, "write {sector} {len}");
    }
    assert_eq!(rig.file(), before);
    works(&mut q);
}

#[test]
fn bad_discards_and_zeroings_get_their_status() {
    let rig = Rig::raw();
    let (mut client, mut q) = rig.one();
    let config = client.config(36, 24).expect("config");
    let limit =
        |i: usize| u32::from_le_bytes([config[i], config[i + 1], config[i + 2], config[i + 3]]);
    let (sectors, segments) = (limit(0), limit(4));
    assert!((0..5).all(|i| limit(4 * i) > 0), "no limit is zero: {config:?}");
    for kind in [spec::T_DISCARD, spec::T_WRITE_ZEROES] {
        let mut status = |payload: &[u8]| {
            let a = q.request(kind, 0, payload, 0).expect("answer");
            assert_eq!(a.used, 1);
            a.status
        };
        assert_eq!(status(&segment(END, 1, 0)), spec::S_IOERR);
        assert_eq!(status(&segment(END - 1, 2, 0)), spec::S_IOERR);
        assert_eq!(status(&segment(u64::MAX, u32::MAX, 0)), spec::S_IOERR);
        assert_eq!(status(&segment(0, sectors + 1, 0)), spec::S_IOERR);
        assert_eq!(status(&segment(0, 8, 0).repeat(segments as usize + 1)), spec::S_IOERR);
        assert_eq!(status(&segment(0, 8, 0)[..12]), spec::S_IOERR);
        assert_eq!(status(&segment(0, 8, 2)), spec::S_UNSUPP);
        assert_eq!(status(&segment(0, 8, 1 << 31)), spec::S_UNSUPP);
        let most = (0..segments).flat_map(|i| segment(u64::from(i) * 16, 8, 0)).collect::<Vec<_>>();
        assert_eq!(status(&most), spec::S_OK);
    }
    let a = q.request(spec::T_DISCARD, 0, &segment(0, 8, 1), 0).expect("answer");
    assert_eq!(a.status, spec::S_UNSUPP);
    let a = q.request(spec::T_WRITE_ZEROES, 0, &segment(0, 8, 1), 0).expect("answer");
    assert_eq!(a.status, spec::S_OK);
    works(&mut q);
}

#[test]
fn unknown_types_are_unsupported_and_zeroing_is_never_pretended() {
    let rig = Rig::raw();
    let (_client, mut q) = rig.one();
    q.write(0, &[0xff; 4096]).expect("write");
    for kind in [2, 3, 5, 10, 12, 14, 77, u32::MAX] {
        let a = q.request(kind, 0, &[], 512).expect("answer");
        assert_eq!((a.status, a.used), (spec::S_UNSUPP, 513), "type {kind}");
    }
    q.write_zeroes(0, 4096, false).expect("zero");
    assert_eq!(q.read(0, 4096).expect("read"), [0; 4096]);
    works(&mut q);
}

#[test]
fn chains_without_room_for_a_status_come_back_empty() {
    let rig = Rig::raw();
    let (_client, mut q) = rig.one();
    let (at, _) = q.room();
    for (readable, writable) in [(&[16][..], &[][..]), (&[16, 512], &[]), (&[3], &[])] {
        let driver = vec![0; readable.iter().sum::<u32>() as usize];
        let a = q.chain(&driver, readable, writable).expect("answer");
        assert_eq!(a.used, 0);
        works(&mut q);
    }
    // A status, but no whole header.
    let a = q.chain(&[0; 15], &[15], &[1]).expect("answer");
    assert_eq!((a.status, a.used), (spec::S_IOERR, 1));
    // Nothing but a status.
    q.lay_out(0, &[Buffer { addr: at, len: 1, write: true }]);
    q.submit(0);
    assert_eq!(q.wait().expect("answer").len, 1);
    works(&mut q);
}

#[test]
fn malformed_chains_come_back_and_the_queue_goes_on() {
    const NEXT: u16 = spec::DESC_F_NEXT;
    const WRITE: u16 = spec::DESC_F_WRITE;
    const INDIRECT: u16 = spec::DESC_F_INDIRECT;
    let rig = Rig::raw();
    let (client, mut q) = rig.one();
    let (at, _) = q.room();
    let end = client.memory().len();
    let d = |addr, len, flags, next| Desc { addr, len, flags, next };
    // An indirect table that holds an indirect descriptor.
    let nested = d(at, 16, INDIRECT, 0).to_words();
    q.memory().write(at + 256, &[nested[0].to_ne_bytes(), nested[1].to_ne_bytes()].concat());
    let size = q.size();
    let cases: &[&[Desc]] = &[
        &[d(at, 16, NEXT, 0)],
        &[d(at, 16, NEXT, 1), d(at, 16, NEXT, 0)],
        &[d(at, 16, NEXT, size)],
        &[d(at, 16, NEXT, u16::MAX)],
        &[d(at, 16, NEXT, 1), d(at + 64, 1, WRITE | NEXT, 2), d(at, 512, 0, 0)],
        &[d(at, u32::MAX, 0, 0)],
        &[d(end, 1, 0, 0)],
        &[d(end - 8, 16, 0, 0)],
        &[d(u64::MAX - 4, 16, 0, 0)],
        &[d(at + 256, 16, INDIRECT, 0)],
        &[d(at + 256, 15, INDIRECT, 0)],
        &[d(at + 256, 0, INDIRECT, 0)],
        &[d(at + 256, u32::MAX - 15, INDIRECT, 0)],
        &[d(end, 16, INDIRECT, 0)],
        &[d(at + 256, 16, INDIRECT | NEXT, 1)],
    ];
    for (i, chain) in cases.iter().enumerate() {
        for (n, desc) in chain.iter().enumerate() {
            q.ring().set_desc(n as u16, *desc);
        }
        q.submit(0);
        let used = q.wait().expect("answer");
        assert_eq!((used.head, used.len), (0, 0), "case {i}");
        works(&mut q);
    }
    let stats = rig.export.as_ref().expect("runs").stats();
    assert_eq!(stats[0].malformed, cases.len() as u64);
}

#[test]
fn a_broken_ring_is_reported_and_others_go_on_until_it_is_set_up_again() {
    let options = BlkOptions { queues: 2, ..BlkOptions::default() };
    let rig = Rig::with(options, |d| raw(d, false));
    let mut client = rig.client(&ClientOptions { queues: 2, ..ClientOptions::default() });
    let mut queues = client.take_queues();
    for bad in [true, false] {
        let err = EventFd::new(0).expect("eventfd");
        client.vhost().set_vring_err(0, &err).expect("SET_VRING_ERR");
        if bad {
            // More heads than entries.
            queues[0].ring().publish_index(10_000);
        } else {
            queues[0].ring().add(u16::MAX);
            queues[0].ring().publish();
        }
        queues[0].kick().write(1).expect("kick");
        wait_readable(&err);
        assert_eq!(err.read().expect("signal"), 1);
        works(&mut queues[1]);
        client.vhost().get_vring_base(0).expect("GET_VRING_BASE");
        queues[0] = client
            .make_queue(0, &ClientOptions { queues: 2, ..ClientOptions::default() })
            .expect("queue");
        client.start_queue(&queues[0], 0).expect("start");
        works(&mut queues[0]);
    }
}
