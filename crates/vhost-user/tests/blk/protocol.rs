//! The protocol: message orders of different front ends, refusals, memory, reconnecting.

use crate::rig::{Raw, Rig, SIZE, fd, memfd, null, raw, state, words};
use bedplate_types::ErrorKind;
use bedplate_vhost_user::BlkOptions;
use bedplate_vhost_user::VhostUserBlk;
use bedplate_vhost_user::frontend::{Client, ClientOptions, Queue};
use bedplate_virtio::spec;
use std::sync::Arc;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserProtocolFeatures};
use vhost::{VhostBackend, VringConfigData};

const SET_VRING_BASE: u32 = 10;
const SET_VRING_KICK: u32 = 12;
const GET_CONFIG: u32 = 24;
const ADD_MEM_REG: u32 = 37;
const REM_MEM_REG: u32 = 38;

fn works(q: &mut Queue) {
    q.write(4096, &[3; 512]).expect("write");
    assert_eq!(q.read(4096, 512).expect("read"), [3; 512]);
}

#[test]
fn the_configuration_can_be_read_at_any_place() {
    let rig = Rig::raw();
    let (mut client, _q) = rig.one();
    assert_eq!(client.capacity().expect("capacity"), SIZE);
    let whole = client.config(0, 60).expect("config");
    assert_eq!(client.config(20, 4).expect("config"), 512_u32.to_le_bytes());
    let long = client.config(0, 256).expect("config");
    assert_eq!(long[..60], whole);
    assert_eq!(long[60..], [0; 196]);
    assert_eq!(client.config(200, 56).expect("config"), [0; 56]);
    let mut raw = {
        drop(client);
        Raw::connect(&rig)
    };
    let body = |offset: u32, size: u32| {
        let words = [offset, size, 0].into_iter().flat_map(|w| w.to_ne_bytes());
        words.chain(vec![0; size as usize]).collect::<Vec<_>>()
    };
    for (offset, size) in [(250, 60), (0, 300), (u32::MAX, 8), (0, 0)] {
        raw.send(GET_CONFIG, 0, &body(offset, size), &[]);
        let reply = raw.reply(GET_CONFIG).expect("a reply");
        assert_eq!(reply.len(), 12, "only the refusal");
        assert_eq!(reply[4..8], [0; 4], "length zero");
    }
    raw.send(GET_CONFIG, 0, &body(0, 8), &[]);
    assert_eq!(raw.reply(GET_CONFIG).expect("a reply")[12..], (SIZE / 512).to_le_bytes());
}

#[test]
fn bad_messages_are_refused_and_the_session_goes_on() {
    let rig = Rig::raw();
    let mut raw = Raw::connect(&rig);
    assert_eq!(raw.ack(SET_VRING_BASE, &state(0, 0), &[]), Some(0));
    for (index, num) in [(1, 0), (64, 0), (u32::MAX, 0), (0, 65536)] {
        assert_eq!(raw.ack(SET_VRING_BASE, &state(index, num), &[]), Some(1));
    }
    for size in [0, 3, 2048, u32::MAX] {
        assert_eq!(raw.ack(8, &state(0, size), &[]), Some(1), "queue size {size}");
    }
    let m = memfd(8192);
    let region = |gpa: u64, len: u64, offset: u64| words(&[0, gpa, len, gpa + (1 << 30), offset]);
    assert_eq!(raw.ack(ADD_MEM_REG, &region(0, 4096, 0), &[fd(&m)]), Some(0));
    assert_eq!(raw.ack(ADD_MEM_REG, &region(4096, 4096, 4096), &[fd(&m), fd(&m)]), Some(1));
    assert_eq!(raw.ack(ADD_MEM_REG, &region(4096, 4096, 4096)[..16], &[fd(&m)]), Some(1));
    assert_eq!(raw.ack(ADD_MEM_REG, &region(4096, 4096, 4096), &[]), Some(1));
    assert_eq!(raw.ack(ADD_MEM_REG, &region(0, 4096, 0), &[fd(&m)]), Some(1), "overlap");
    assert_eq!(raw.ack(ADD_MEM_REG, &region(4096, 8192, 4096), &[fd(&m)]), Some(1), "short file");
    assert_eq!(raw.ack(ADD_MEM_REG, &region(4096, 0, 0), &[fd(&m)]), Some(1), "empty");
    assert_eq!(raw.ack(REM_MEM_REG, &region(4096, 4096, 0), &[]), Some(1), "unknown");
    assert_eq!(raw.ack(REM_MEM_REG, &region(0, 4096, 0), &[fd(&m)]), Some(0), "with a descriptor");
    assert_eq!(
        raw.ack(SET_VRING_KICK, &words(&[0]), &[fd(&m)]),
        Some(0),
        "a file: not started yet"
    );
}

#[test]
fn a_front_end_that_cannot_be_told_is_disconnected_and_the_next_is_served() {
    let rig = Rig::raw();
    let mut raw = Raw::connect(&rig);
    raw.send(SET_VRING_BASE, 0, &state(7, 0), &[]);
    assert_eq!(raw.reply(SET_VRING_BASE), None);
    for garbage in [&[0xff_u8; 64][..], &[0; 12], b"GET / HTTP/1.1\r\n\r\n"] {
        use std::io::Write;
        let mut raw = Raw::connect(&rig);
        raw.0.write_all(garbage).expect("send");
        raw.0.shutdown(std::net::Shutdown::Write).expect("shutdown");
        assert_eq!(raw.reply(0), None);
    }
    let (_client, mut q) = rig.one();
    works(&mut q);
}

/// The messages that set a ring up.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Step {
    Memory,
    Num,
    Addr,
    Call,
    Kick,
    Enable,
}

fn say(step: Step, client: &mut Client, q: &Queue, addr: &VringConfigData) {
    let region = client.region();
    let v = client.vhost();
    let done = match step {
        Step::Memory => v.add_mem_region(&region).map(drop),
        Step::Num => v.set_vring_num(0, q.size()),
        Step::Addr => v.set_vring_addr(0, addr),
        Step::Call => v.set_vring_call(0, q.call()),
        // The index must be told before the ring can start, so it comes with the kick.
        Step::Kick => v.set_vring_base(0, 0).and_then(|()| v.set_vring_kick(0, q.kick())),
        Step::Enable => v.set_vring_enable(0, true),
    };
    done.unwrap_or_else(|e| panic!("{step:?}: {e}"));
}

#[test]
fn rings_start_whatever_the_order_of_messages_and_kicks() {
    let all = [Step::Memory, Step::Num, Step::Addr, Step::Call, Step::Kick, Step::Enable];
    let rig = Rig::raw();
    // Every rotation, forward and backward, with the kick sent before each of the messages.
    for start in 0..all.len() {
        for forward in [true, false] {
            let mut order = all;
            order.rotate_left(start);
            if !forward {
                order.reverse();
            }
            for kick_at in 0..=order.len() {
                let options = ClientOptions::default();
                let mut client = Client::negotiate(&rig.socket(), &options).expect("connect");
                let mut q = client.make_queue(0, &options).expect("queue");
                let base = client.memory().at(0, 0) as u64;
                let addrs = q.ring().addrs(base);
                let addr = VringConfigData {
                    queue_max_size: q.size(),
                    queue_size: q.size(),
                    flags: 0,
                    desc_table_addr: addrs.desc,
                    used_ring_addr: addrs.used,
                    avail_ring_addr: addrs.avail,
                    log_addr: None,
                };
                for (i, step) in order.into_iter().enumerate() {
                    if i == kick_at {
                        let at = q.room().0;
                        q.memory().write(at, &spec::T_FLUSH.to_le_bytes());
                        let b = |addr, len, write| bedplate_vhost_user::frontend::Buffer {
                            addr,
                            len,
                            write,
                        };
                        q.lay_out(0, &[b(at, 16, false), b(at + 64, 1, true)]);
                        q.submit(0);
                    }
                    say(step, &mut client, &q, &addr);
                }
                if kick_at < order.len() {
                    q.wait().unwrap_or_else(|e| panic!("{order:?}, kick before {kick_at}: {e}"));
                }
                works(&mut q);
            }
        }
    }
}

#[test]
fn without_protocol_features_rings_are_enabled_from_the_start() {
    let rig = Rig::raw();
    let options =
        ClientOptions { protocol: VhostUserProtocolFeatures::empty(), ..ClientOptions::default() };
    let mut client = rig.client(&options);
    works(&mut client.take_queues()[0]);
}

#[test]
fn front_ends_that_know_little_are_served() {
    let rig = Rig::raw();
    for features in [
        spec::F_VERSION_1 | spec::F_EVENT_IDX | spec::VHOST_USER_F_PROTOCOL_FEATURES,
        spec::F_VERSION_1 | spec::BLK_F_FLUSH | spec::VHOST_USER_F_PROTOCOL_FEATURES,
        0,
    ] {
        let protocol = VhostUserProtocolFeatures::CONFIG;
        let options = ClientOptions { features, protocol, ..ClientOptions::default() };
        let mut client = rig.client(&options);
        works(&mut client.take_queues()[0]);
    }
}

#[test]
fn a_ring_without_a_kick_is_polled() {
    let rig = Rig::raw();
    let options = ClientOptions::default();
    let mut client = Client::negotiate(&rig.socket(), &options).expect("connect");
    client.share_memory().expect("memory");
    let mut q = client.make_queue(0, &options).expect("queue");
    client.start_queue(&q, 0).expect("start");
    // The codec has no way to say "no kick", so the message is made here, on a connection of its own.
    drop(client);
    let mut raw = Raw::connect(&rig);
    let addrs = q.ring().addrs(1 << 40);
    let region = words(&[0, 0, q.memory().len(), 1 << 40, 0]);
    assert_eq!(raw.ack(ADD_MEM_REG, &region, &[fd(q.memory().fd())]), Some(0));
    assert_eq!(raw.ack(8, &state(0, u32::from(q.size())), &[]), Some(0));
    let body = [state(0, 0), words(&[addrs.desc, addrs.used, addrs.avail, 0])].concat();
    assert_eq!(raw.ack(9, &body, &[]), Some(0));
    assert_eq!(raw.ack(SET_VRING_KICK, &words(&[0x100]), &[]), Some(0));
    assert_eq!(raw.ack(13, &words(&[0]), &[fd(q.call())]), Some(0));
    assert_eq!(raw.ack(18, &state(0, 1), &[]), Some(0));
    works(&mut q);
}

#[test]
fn stopping_a_ring_tells_where_it_goes_on() {
    let rig = Rig::raw();
    let (mut client, mut q) = rig.one();
    for round in 1..=5_u16 {
        works(&mut q);
        assert_eq!(client.vhost().get_vring_base(0).expect("base"), u32::from(round) * 2);
        client.start_queue(&q, round * 2).expect("start");
    }
    client.vhost().set_vring_enable(0, false).expect("disable");
    client.vhost().set_vring_enable(0, true).expect("enable");
    works(&mut q);
    client.vhost().reset_device().expect("RESET_DEVICE");
    let mut q = client.make_queue(0, &ClientOptions::default()).expect("queue");
    client.vhost().set_features(client_features(&rig)).expect("SET_FEATURES");
    client.start_queue(&q, 0).expect("start");
    works(&mut q);
}

fn client_features(rig: &Rig) -> u64 {
    let _ = rig;
    spec::F_VERSION_1 | spec::F_EVENT_IDX | spec::BLK_F_FLUSH | spec::VHOST_USER_F_PROTOCOL_FEATURES
}

#[test]
fn memory_comes_and_goes_while_the_ring_runs() {
    let rig = Rig::raw();
    let (mut client, mut q) = rig.one();
    let m = memfd(1 << 20);
    let extra = vhost::VhostUserMemoryRegionInfo {
        guest_phys_addr: 1 << 40,
        memory_size: 1 << 20,
        userspace_addr: 1 << 50,
        mmap_offset: 0,
        mmap_handle: fd(&m),
    };
    for _ in 0..20 {
        client.vhost().add_mem_region(&extra).expect("ADD_MEM_REG");
        works(&mut q);
        client.vhost().remove_mem_region(&extra).expect("REM_MEM_REG");
        works(&mut q);
    }
}

#[test]
fn front_ends_come_one_after_the_other() {
    let rig = Rig::raw();
    for _ in 0..50 {
        let (_client, mut q) = rig.one();
        works(&mut q);
    }
    // One that waits is served as soon as the first has gone.
    let (client, mut q) = rig.one();
    let second = {
        let socket = rig.socket();
        std::thread::spawn(move || {
            let mut client = Client::connect(&socket, &ClientOptions::default()).expect("connect");
            works(&mut client.take_queues()[0]);
        })
    };
    works(&mut q);
    drop(client);
    second.join().expect("second");
}

#[test]
fn a_new_session_on_the_same_connection_begins_from_nothing() {
    // QEMU keeps the connection when a disk is unplugged, and sends all memory again for the next one.
    let rig = Rig::raw();
    let (mut client, mut q) = rig.one();
    works(&mut q);
    client.vhost().get_vring_base(0).expect("GET_VRING_BASE");
    client.vhost().set_owner().expect("SET_OWNER");
    client.vhost().set_features(client_features(&rig)).expect("SET_FEATURES");
    let region = client.region();
    client.vhost().add_mem_region(&region).expect("ADD_MEM_REG");
    let mut q = client.make_queue(0, &ClientOptions::default()).expect("queue");
    client.start_queue(&q, 0).expect("start");
    works(&mut q);
}

#[test]
fn the_write_cache_is_announced_and_can_be_switched_off() {
    let rig = Rig::raw();
    let (mut client, mut q) = rig.one();
    assert_ne!(client.features() & spec::BLK_F_FLUSH, 0);
    assert_eq!(client.config(32, 1).expect("config"), [1]);
    let flags = VhostUserConfigFlags::WRITABLE;
    client.vhost().set_config(32, flags, &[0]).expect("SET_CONFIG");
    assert_eq!(client.config(32, 1).expect("config"), [0]);
    works(&mut q);
    assert_eq!(rig.export.as_ref().expect("runs").stats()[0].direct, 1, "the write is not direct");
    client.vhost().set_config(32, flags, &[1]).expect("SET_CONFIG");
    assert_eq!(client.config(32, 1).expect("config"), [1]);
    for (offset, bytes) in [(0, &[1_u8][..]), (32, &[2]), (32, &[0, 0]), (255, &[0])] {
        assert!(client.vhost().set_config(offset, flags, bytes).is_err());
    }
    drop(client);
    // A driver that can't flush finds its writes durable.
    let features = !(spec::BLK_F_FLUSH | spec::BLK_F_CONFIG_WCE);
    let mut client = rig.client(&ClientOptions { features, ..ClientOptions::default() });
    assert_eq!(client.config(32, 1).expect("config"), [0]);
    works(&mut client.take_queues()[0]);
}

#[test]
fn stopping_an_export_removes_its_socket_with_or_without_a_front_end() {
    let mut rig = Rig::raw();
    let (_client, mut q) = rig.one();
    works(&mut q);
    rig.export.take().expect("runs").stop();
    assert!(!rig.socket().exists());
    let disk = Arc::new(null(SIZE));
    let export =
        VhostUserBlk::start(&rig.socket(), disk.clone(), BlkOptions::default()).expect("export");
    let again = VhostUserBlk::start(&rig.socket(), disk, BlkOptions::default());
    assert_eq!(again.map(drop).unwrap_err().kind(), ErrorKind::Locked);
    export.stop();
    assert!(!rig.socket().exists());
}

#[test]
fn options_that_cannot_be_are_refused() {
    let dir = tempfile::tempdir().expect("directory");
    let disk = Arc::new(raw(&dir, false));
    let start = |o| VhostUserBlk::start(&dir.path().join("s"), disk.clone(), o).map(drop);
    let default = BlkOptions::default;
    for bad in [
        BlkOptions { queues: 0, ..default() },
        BlkOptions { queues: 65, ..default() },
        BlkOptions { threads: 0, ..default() },
        BlkOptions { queue_size: 100, ..default() },
        BlkOptions { block_size: 1024, ..default() },
    ] {
        assert_eq!(start(bad).unwrap_err().kind(), ErrorKind::InvalidInput);
    }
}

/// Bits that are the same in every run.
fn next(random: &mut u64) -> u64 {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    *random
}

#[test]
fn random_messages_never_stop_the_server() {
    let options = BlkOptions { queues: 4, threads: 2, ..BlkOptions::default() };
    let rig = Rig::with(options, |d| raw(d, false));
    let file = memfd(1 << 20);
    let event = vmm_sys_util::eventfd::EventFd::new(0).expect("eventfd");
    let mut random = 0x9e37_79b9_7f4a_7c15;
    for round in 0..300 {
        let mut raw = Raw::connect(&rig);
        let patience = std::time::Duration::from_millis(200);
        raw.0.set_read_timeout(Some(patience)).expect("timeout");
        for _ in 0..20 {
            let code = (next(&mut random) % 44) as u32;
            // Small numbers and half-sensible addresses get further than plain noise.
            let word = |r: &mut u64| match next(r) % 4 {
                0 => next(r) % 5,
                1 => next(r) & 0xf_f000,
                2 => 1 << (next(r) % 64),
                _ => next(r),
            };
            let len = [0, 8, 8, 12, 40, 40, 16, 20][(next(&mut random) % 8) as usize];
            let body = (0..5).map(|_| word(&mut random)).collect::<Vec<_>>();
            let fds = [fd(&file), fd(&event)];
            let fds = match next(&mut random) % 4 {
                0 => &fds[..1],
                1 => &fds[1..],
                _ => &fds[..0],
            };
            let mut message =
                [code, 1 | (next(&mut random) as u32 & 8), len].map(u32::to_ne_bytes).concat();
            message.extend(&words(&body)[..len as usize]);
            if raw.try_send(&message, fds).is_err() {
                break;
            }
        }
        if round % 20 == 0 {
            drop(raw);
            let (_client, mut q) = rig.one();
            works(&mut q);
        }
    }
}
