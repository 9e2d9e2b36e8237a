//! The server with real sockets and a disk in memory.

use super::*;
use crate::client::{Client, Wanted, string};
use crate::proto::{command, handshake, option, reply};
use crate::ram::Ram;
use std::sync::atomic::Ordering;

const FULL: Wanted = Wanted { structured: true, allocation: true };

struct Served {
    server: NbdServer,
    ram: Arc<Ram>,
    addr: NbdAddr,
    _dir: tempfile::TempDir,
}

fn options() -> NbdOptions {
    NbdOptions { threads: 2, ..NbdOptions::default() }
}

fn serve(tcp: bool, options: NbdOptions) -> Served {
    let dir = tempfile::tempdir().expect("a folder");
    let addr = if tcp {
        NbdAddr::Tcp { host: "127.0.0.1".into(), port: 0 }
    } else {
        NbdAddr::Unix(dir.path().join("nbd.sock"))
    };
    let ram = Arc::new(Ram::new(1 << 20));
    let export = |name: &str, read_only| NbdExport {
        name: name.into(),
        description: "a disk".into(),
        disk: ram.clone(),
        read_only,
    };
    let exports = vec![export("disk", false), export("ro", true)];
    let server = NbdServer::start(&addr, exports, options).expect("started");
    let addr = server.local_addr().clone();
    Served { server, ram, addr, _dir: dir }
}

impl Served {
    fn client(&self, name: &[u8], wanted: Wanted) -> Client {
        let mut c = Client::connect(&self.addr, 3).expect("connected");
        c.go(name, wanted).expect("negotiated").expect("the export");
        c
    }
}

#[test]
fn connections_over_unix_and_tcp_see_each_others_writes() {
    for tcp in [false, true] {
        let s = serve(tcp, options());
        let mut clients: Vec<Client> = (0..4)
            .map(|i| s.client(b"", if i % 2 == 0 { FULL } else { Wanted::default() }))
            .collect();
        for i in 0..4 {
            let data = vec![i as u8 + 1; 100_000];
            let a = clients[i].call(command::WRITE, 0, 512, 100_000, &data).expect("a reply");
            assert_eq!(a.error, 0);
            for c in &mut clients {
                let a = c.call(command::READ, 0, 512, 100_000, &[]).expect("a reply");
                assert!(a.error == 0 && a.data == data);
            }
        }
    }
}

#[test]
fn an_export_tells_what_it_can_do() {
    let s = serve(false, options());
    let mut c = Client::connect(&s.addr, 3).expect("connected");
    let rw = c.go(b"disk", FULL).expect("negotiated").expect("the export");
    assert_eq!(rw.flags, 0b1101_1110_1101);
    assert_eq!(rw.size, 1 << 20);
    let block = BlockSizes { minimum: 1, preferred: 4096, maximum: 32 << 20 };
    assert_eq!(rw.block, Some(block));
    assert!(rw.allocation.is_some());
    let mut c = Client::connect(&s.addr, 3).expect("connected");
    let ro = c.go(b"ro", Wanted::default()).expect("negotiated").expect("the export");
    assert_eq!(ro.flags, 0b101_0000_1111);
    assert_eq!(c.call(command::WRITE, 0, 0, 512, &[0; 512]).expect("a reply").error, 1);
    assert_eq!(c.call(command::READ, 0, 0, 512, &[]).expect("a reply").error, 0);
}

#[test]
fn rubbish_costs_only_the_connection_it_came_on() {
    let s = serve(false, options());
    let mut good = s.client(b"", FULL);
    let mut seed = 1u64;
    for round in 0..60 {
        let mut c = if round % 2 == 0 {
            s.client(b"", FULL)
        } else {
            Client::connect(&s.addr, 3).expect("connected")
        };
        let junk: Vec<u8> = (0..200)
            .map(|_| {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99);
                (seed >> 33) as u8
            })
            .collect();
        // The server may close before all is sent.
        let _ = c.send_raw(&junk);
        assert!(c.closed(), "round {round}");
        assert_eq!(good.call(command::READ, 0, 0, 512, &[]).expect("a reply").error, 0);
    }
    for data in [&[][..], &[0; 3], &[0; 28]] {
        let mut c = s.client(b"", FULL);
        c.send_raw(data).expect("sent");
    }
    assert_eq!(good.call(command::READ, 0, 0, 512, &[]).expect("a reply").error, 0);
}

#[test]
fn a_client_that_never_chooses_is_closed_after_the_time_limit() {
    let s = serve(false, NbdOptions { handshake: Duration::from_millis(30), ..options() });
    let mut silent = Client::connect(&s.addr, 3).expect("connected");
    assert!(silent.closed());
    let mut slow = Client::connect(&s.addr, 3).expect("connected");
    slow.send_option(option::GO, &[], 4000).expect("sent");
    assert!(slow.closed());
}

#[test]
fn clients_above_the_limit_are_closed_and_a_free_place_can_be_taken_again() {
    let s = serve(false, NbdOptions { max_clients: 2, ..options() });
    let a = s.client(b"", FULL);
    let mut b = s.client(b"", FULL);
    assert!(Client::connect(&s.addr, 3).is_err());
    assert_eq!(s.server.clients(), 2);
    drop(a);
    assert_eq!(b.call(command::READ, 0, 0, 512, &[]).expect("a reply").error, 0);
    // The server notices the free place when it sees the end of the first connection.
    let again = (0..1000).find_map(|_| {
        thread::yield_now();
        Client::connect(&s.addr, 3).ok()
    });
    assert!(again.is_some());
}

#[test]
fn stopping_answers_what_is_under_way_and_removes_the_socket() {
    let mut s = serve(false, options());
    let mut c = s.client(b"", Wanted::default());
    let mut idle = s.client(b"", FULL);
    let mut asking = Client::connect(&s.addr, 3).expect("connected");
    s.ram.hold.store(true, Ordering::SeqCst);
    for _ in 0..3 {
        c.send(command::READ, 0, 0, 512, &[]).expect("sent");
    }
    while s.ram.held.load(Ordering::SeqCst) < 3 {
        thread::yield_now();
    }
    let ram = s.ram.clone();
    let stopping = thread::spawn(move || s.server.stop());
    // Those without requests are closed at once.
    assert!(idle.closed() && asking.closed());
    ram.release();
    for _ in 0..3 {
        assert_eq!(c.receive().expect("a reply").data, [0; 512]);
    }
    assert!(c.closed());
    stopping.join().expect("stopped");
}

#[test]
fn a_client_that_does_not_read_its_replies_does_not_keep_the_server_from_stopping() {
    let mut s = serve(false, NbdOptions { drain: Duration::from_millis(20), ..options() });
    *s.ram.data.lock().expect("data") = vec![1; 1 << 20];
    let mut c = s.client(b"", FULL);
    for _ in 0..20 {
        c.send(command::READ, 0, 0, 1 << 20, &[]).expect("sent");
    }
    // All have been carried out, and the socket can't take 20 MiB.
    while s.ram.log().len() < 20 {
        thread::yield_now();
    }
    s.server.stop();
    assert_eq!(s.server.clients(), 0);
}

#[test]
fn exports_that_can_not_be_are_refused() {
    let export = |name: &str| NbdExport {
        name: name.into(),
        description: String::new(),
        disk: Arc::new(Ram::new(512)),
        read_only: false,
    };
    let dir = tempfile::tempdir().expect("a folder");
    let addr = NbdAddr::Unix(dir.path().join("s"));
    let long = "x".repeat(5000);
    for exports in
        [vec![], vec![export("a"), export("a")], vec![export(&long)], vec![export("a\0b")]]
    {
        assert!(NbdServer::start(&addr, exports, options()).is_err());
    }
    let none = NbdOptions { threads: 0, ..options() };
    assert!(NbdServer::start(&addr, vec![export("a")], none).is_err());
    NbdServer::start(&addr, vec![export("a")], options()).expect("a good one starts");
}

#[test]
fn a_list_and_an_unknown_export_are_answered_and_the_next_option_is_heard() {
    let s = serve(true, options());
    let flags = u32::from(handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
    let mut c = Client::connect(&s.addr, flags).expect("connected");
    let list = c.option(option::LIST, &[]).expect("replies");
    assert_eq!(list[0].1, [string(b"disk"), b"a disk".to_vec()].concat());
    assert_eq!(list[1].1, [string(b"ro"), b"a disk".to_vec()].concat());
    assert_eq!(c.go(b"none", FULL).expect("replies"), Err(reply::ERR_UNKNOWN));
    assert!(c.go(b"ro", FULL).expect("replies").is_ok());
}

#[test]
fn a_pipe_keeps_many_requests_in_flight_and_none_is_lost() {
    use crate::pipe::{Pipe, PipeOp};
    let s = serve(false, options());
    let mut pipe = Pipe::new(s.client(b"disk", Wanted::default()), 8, 100_000).expect("a pipe");
    let finish = |pipe: &mut Pipe, mut left: usize| {
        let mut done = Vec::new();
        while left > 0 {
            pipe.exchange(None).expect("replies");
            while let Some(one) = pipe.take() {
                done.push(one);
                left -= 1;
            }
        }
        done.sort_unstable();
        done
    };
    let all: Vec<(usize, u32)> = (0..8).map(|slot| (slot, 0)).collect();
    for slot in 0..8 {
        pipe.put(slot, &vec![slot as u8 + 1; 100_000]).expect("room");
        pipe.push(slot, PipeOp::Write, slot as u64 * 100_000, 100_000).expect("pushed");
    }
    assert!(pipe.put(0, &[1]).is_err(), "in flight");
    assert_eq!(finish(&mut pipe, 8), all);
    // Each slot reads what its neighbour wrote.
    for slot in 0..8 {
        pipe.push(slot, PipeOp::Read, (slot as u64 + 1) % 8 * 100_000, 100_000).expect("pushed");
    }
    assert_eq!(finish(&mut pipe, 8), all);
    let mut back = vec![0; 100_000];
    for slot in 0..8 {
        pipe.get(slot, &mut back).expect("free");
        assert!(back.iter().all(|&b| usize::from(b) == (slot + 1) % 8 + 1));
    }
    pipe.push(0, PipeOp::Flush, 0, 0).expect("pushed");
    pipe.push(1, PipeOp::Trim, 0, 4096).expect("pushed");
    pipe.push(2, PipeOp::Read, 1 << 20, 512).expect("pushed");
    let done = finish(&mut pipe, 3);
    assert_eq!((done[0], done[1].0), ((0, 0), 1));
    assert_ne!(done[2].1, 0, "a read beyond the end");
    pipe.exchange(Some(std::time::Duration::ZERO)).expect("nothing in flight");
    let structured = Wanted { structured: true, allocation: false };
    assert!(Pipe::new(s.client(b"disk", structured), 1, 512).is_err());
}
