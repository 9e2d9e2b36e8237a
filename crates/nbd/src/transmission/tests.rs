//! Transmission in memory: a client's bytes go in, the replies come out, and the disk is a vector.

use super::*;
use crate::device::Run;
use crate::proto::{Reader, command_flag};
use crate::ram::Ram;
use crate::stream::memory::{Memory, run};
use bedplate_types::ErrorKind;
use std::future::{pending, ready};
use std::io::IoSlice;
use std::sync::atomic::Ordering::SeqCst;
use std::task::{Context, Waker};

const SIMPLE: Agreed = Agreed { export: 0, structured: false, allocation: false, bitmaps: 0 };
const FULL: Agreed = Agreed { export: 0, structured: true, allocation: true, bitmaps: 0 };

fn ask(command: u16, flags: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    Request { flags, command, cookie, offset, len }.encode().to_vec()
}

fn write(cookie: u64, offset: u64, data: &[u8]) -> Vec<u8> {
    let mut v = ask(command::WRITE, 0, cookie, offset, data.len() as u32);
    v.extend_from_slice(data);
    v
}

/// Runs a whole session; gives its end and what the client got.
fn talk(ram: &Ram, agreed: Agreed, sent: &[Vec<u8>]) -> (io::Result<End>, Vec<u8>) {
    let stream = Memory::new(&sent.concat(), 1000);
    let mut input = Input::new(&stream);
    let end = run(transmit(&mut input, ram, agreed, false, pending(), pending()));
    (end, stream.output.take())
}

/// One whole reply: cookie, error, data with holes filled in, extents.
#[derive(Debug, Default, PartialEq)]
struct Got {
    cookie: u64,
    error: u32,
    data: Vec<u8>,
    extents: Vec<(u32, u32)>,
    chunks: usize,
}

/// Reads replies; `lens` tells the lengths of the data of simple replies by cookie.
fn replies(raw: &[u8], lens: &[(u64, usize)]) -> Vec<Got> {
    let mut r = Reader::new(raw);
    let mut all: Vec<Got> = Vec::new();
    let mut open: Option<Got> = None;
    while !r.is_empty() {
        let magic = r.u32().expect("magic");
        if magic == proto::SIMPLE_REPLY_MAGIC {
            let mut g = Got { error: r.u32().expect("error"), ..Got::default() };
            g.cookie = r.u64().expect("cookie");
            let len = lens.iter().find(|(c, _)| *c == g.cookie).map_or(0, |(_, n)| *n);
            if g.error == 0 {
                g.data = r.bytes(len).expect("data").to_vec();
            }
            all.push(g);
            continue;
        }
        assert_eq!(magic, proto::STRUCTURED_REPLY_MAGIC);
        let (flags, kind) = (r.u16().expect("flags"), r.u16().expect("type"));
        let cookie = r.u64().expect("cookie");
        let len = r.u32().expect("length") as usize;
        let mut p = Reader::new(r.bytes(len).expect("payload"));
        let g = open.get_or_insert(Got { cookie, ..Got::default() });
        assert_eq!(g.cookie, cookie, "chunks of a reply are sent together");
        g.chunks += 1;
        match kind {
            proto::chunk::NONE => {}
            proto::chunk::OFFSET_DATA => {
                p.u64().expect("offset");
                g.data.extend_from_slice(p.rest());
            }
            proto::chunk::OFFSET_HOLE => {
                p.u64().expect("offset");
                g.data.resize(g.data.len() + p.u32().expect("length") as usize, 0);
            }
            proto::chunk::BLOCK_STATUS => {
                p.u32().expect("context");
                while let (Some(len), Some(flags)) = (p.u32(), p.u32()) {
                    g.extents.push((len, flags));
                }
            }
            proto::chunk::ERROR => g.error = p.u32().expect("error"),
            other => panic!("chunk type {other}"),
        }
        if flags & proto::chunk::DONE != 0 {
            all.extend(open.take());
        }
    }
    assert!(open.is_none(), "a reply without its last chunk");
    all
}

fn errors(got: &[Got]) -> Vec<(u64, u32)> {
    got.iter().map(|g| (g.cookie, g.error)).collect()
}

#[test]
fn what_was_written_is_read_back_in_both_forms() {
    let data: Vec<u8> = (0..200_000u32).map(|i| (i % 251) as u8).collect();
    for agreed in [SIMPLE, FULL] {
        let ram = Ram { hold_reads_at: Some(100), ..Ram::new(1 << 20) };
        let n = data.len();
        let sent = [
            write(1, 100, &data),
            ask(command::READ, 0, 2, 100, n as u32),
            ask(command::DISC, 0, 3, 0, 0),
        ];
        let (end, out) = talk(&ram, agreed, &sent);
        assert_eq!(end.expect("no error"), End::Disconnected);
        let got = replies(&out, &[(2, n)]);
        assert_eq!(errors(&got), [(1, 0), (2, 0)]);
        assert!(got[1].data == data);
    }
}

#[test]
fn replies_come_in_the_order_of_completion() {
    let ram = Ram { hold_reads_at: Some(512), ..Ram::new(4096) };
    let sent = [
        ask(command::READ, 0, 1, 512, 512),
        ask(command::READ, 0, 2, 1024, 512),
        write(3, 512, &[7; 512]),
    ];
    let (end, out) = talk(&ram, SIMPLE, &sent);
    assert_eq!(end.expect("no error"), End::Closed);
    let got = replies(&out, &[(1, 512), (2, 512)]);
    assert_eq!(errors(&got), [(2, 0), (3, 0), (1, 0)]);
    assert_eq!(got[2].data, [7; 512]);
}

#[test]
fn zeroes_are_sent_as_holes_unless_the_client_wants_one_piece() {
    let ram = Ram::new(1 << 20);
    ram.data.lock().expect("data")[300_000] = 5;
    let sent = [
        ask(command::READ, 0, 1, 0, 1 << 20),
        ask(command::READ, command_flag::DF, 2, 0, 1 << 20),
        ask(command::READ, 0, 3, 0, 0),
    ];
    let (_, out) = talk(&ram, FULL, &sent);
    let got = replies(&out, &[]);
    assert_eq!(got.iter().map(|g| g.chunks).collect::<Vec<_>>(), [3, 1, 1]);
    assert!(got[0].data == got[1].data && got[0].data.len() == 1 << 20);
    assert_eq!(got[0].data[300_000], 5);
    assert!(out.len() < (1 << 20) + 10_000);
}

#[test]
fn a_failure_of_the_disk_gets_its_number_and_the_session_goes_on() {
    for (kind, errno) in [
        (ErrorKind::Io, 5),
        (ErrorKind::Poisoned, 5),
        (ErrorKind::Corrupt, 5),
        (ErrorKind::NoSpace, 28),
        (ErrorKind::ReadOnly, 1),
        (ErrorKind::InvalidInput, 22),
        (ErrorKind::Unsupported, 22),
        (ErrorKind::Limit, 12),
        (ErrorKind::Cancelled, 108),
    ] {
        for agreed in [SIMPLE, FULL] {
            let ram = Ram::new(4096);
            *ram.fail.lock().expect("fail") = Some(kind);
            let sent = [ask(command::READ, 0, 1, 0, 512), write(2, 0, &[1; 512])];
            let (end, out) = talk(&ram, agreed, &sent);
            assert_eq!(end.expect("no error"), End::Closed);
            assert_eq!(errors(&replies(&out, &[])), [(1, errno), (2, errno)]);
        }
    }
}

#[test]
fn the_data_of_a_refused_write_is_taken_off_the_stream() {
    let ram = Ram::new(4096);
    let rubbish = vec![0x25; 300_000];
    let mut bad_flag = write(2, 0, &rubbish[..512]);
    bad_flag[5] = 0x80;
    let sent = [write(1, 4096, &rubbish), bad_flag, write(3, 4095, &[1]), ask(77, 0, 4, 0, 512)];
    let (end, out) = talk(&ram, SIMPLE, &sent);
    assert_eq!(end.expect("no error"), End::Closed);
    assert_eq!(errors(&replies(&out, &[])), [(1, 28), (2, 22), (4, 22), (3, 0)]);
    assert_eq!(ram.log(), ["write 4095 1 false"]);
}

#[test]
fn a_wrong_magic_ends_the_session_after_what_came_before_is_answered() {
    let ram = Ram::new(4096);
    let sent = [write(1, 0, &[1; 512]), vec![0; 28], write(2, 512, &[1; 512])];
    let (end, out) = talk(&ram, SIMPLE, &sent);
    assert_eq!(end.expect("no error"), End::BadMagic);
    assert_eq!(errors(&replies(&out, &[])), [(1, 0)]);
}

#[test]
fn a_client_that_leaves_in_the_middle_of_its_data_changes_nothing_with_it() {
    let ram = Ram::new(4096);
    let mut cut = write(2, 512, &[1; 512]);
    cut.pop();
    let (end, out) = talk(&ram, SIMPLE, &[write(1, 0, &[1; 512]), cut]);
    assert_eq!(end.expect_err("an early end").kind(), io::ErrorKind::UnexpectedEof);
    assert_eq!(errors(&replies(&out, &[])), [(1, 0)]);
    assert_eq!(ram.log(), ["write 0 512 false"]);
}

#[test]
fn flags_reach_the_disk() {
    let ram = Ram::new(4096);
    let mut fua = write(1, 0, &[1; 512]);
    fua[5] = command_flag::FUA as u8;
    let sent = [
        fua,
        ask(command::TRIM, 0, 2, 0, 512),
        ask(command::TRIM, command_flag::FUA, 3, 0, 1024),
        ask(command::WRITE_ZEROES, command_flag::NO_HOLE, 4, 0, 512),
        ask(command::WRITE_ZEROES, command_flag::FAST_ZERO | command_flag::FUA, 5, 0, 512),
        ask(command::FLUSH, 0, 6, 0, 0),
        ask(command::CACHE, 0, 7, 0, 4096),
    ];
    let (_, out) = talk(&ram, FULL, &sent);
    assert!(replies(&out, &[]).iter().all(|g| g.error == 0));
    let expected = [
        "write 0 512 true",
        "discard 0 512",
        "discard 0 1024",
        "flush",
        "zero 0 512 false false",
        "zero 0 512 true true",
        "flush",
        "flush",
        "read 0 4096",
    ];
    assert_eq!(ram.log(), expected);
}

#[test]
fn small_writes_that_arrive_together_reach_the_disk_together() {
    let ram = Ram::new(1 << 20);
    let mut fua = write(3, 1024, &[1; 512]);
    fua[5] = command_flag::FUA as u8;
    let sent = [
        write(1, 0, &[1; 512]),
        write(2, 512, &[1; 512]),
        fua,
        write(4, 4096, &[1; 100_000]),
        write(5, 1536, &[1; 512]),
    ];
    let stream = Memory::new(&sent.concat(), usize::MAX);
    let mut input = Input::new(&stream);
    run(transmit(&mut input, &ram, FULL, false, pending(), pending())).expect("no error");
    let mut got = errors(&replies(&stream.output.take(), &[]));
    got.sort_unstable();
    assert_eq!(got, [(1, 0), (2, 0), (3, 0), (4, 0), (5, 0)]);
    let log = ram.log();
    assert!(
        log.contains(&"batch 3".into()) && log.contains(&"write 1024 512 true".into()),
        "{log:?}"
    );
    assert_eq!(ram.data.lock().expect("data")[..2048], [1; 2048]);

    *ram.fail.lock().expect("fail") = Some(ErrorKind::NoSpace);
    let stream = Memory::new(&sent[..2].concat(), usize::MAX);
    let mut input = Input::new(&stream);
    run(transmit(&mut input, &ram, FULL, false, pending(), pending())).expect("no error");
    assert_eq!(errors(&replies(&stream.output.take(), &[])), [(1, 28), (2, 28)]);
}

#[test]
fn a_zeroing_that_is_not_fast_is_not_supported() {
    let ram = Ram::new(4096);
    *ram.fail.lock().expect("fail") = Some(ErrorKind::Unsupported);
    let sent = [ask(command::WRITE_ZEROES, command_flag::FAST_ZERO, 1, 0, 512)];
    assert_eq!(errors(&replies(&talk(&ram, FULL, &sent).1, &[])), [(1, 95)]);
}

#[test]
fn extents_are_merged_clipped_and_bounded() {
    let ram = Ram::new(1 << 20);
    let one = |len, hole, zero| Run { len, hole, zero };
    *ram.runs.lock().expect("runs") = vec![
        one(512, true, true),
        one(512, true, true),
        one(512, false, false),
        one(9 << 20, false, true),
    ];
    let sent = [
        ask(command::BLOCK_STATUS, 0, 1, 0, 4096),
        ask(command::BLOCK_STATUS, command_flag::REQ_ONE, 2, 0, 4096),
    ];
    let got = replies(&talk(&ram, FULL, &sent).1, &[]);
    assert_eq!(got[0].extents, [(1024, 3), (512, 0), (2560, 2)]);
    assert_eq!(got[1].extents, [(1024, 3)]);

    let many = (0..MAX_EXTENTS as u64 * 2).map(|i| one(1, i % 2 == 0, false)).collect();
    *ram.runs.lock().expect("runs") = many;
    let got = replies(&talk(&ram, FULL, &[ask(7, 0, 1, 0, 1 << 20)]).1, &[]);
    assert_eq!(got[0].extents.len(), MAX_EXTENTS);
    ram.runs.lock().expect("runs").clear();
    let got = replies(&talk(&ram, FULL, &[ask(7, 0, 1, 0, 1 << 20)]).1, &[]);
    assert_eq!(got[0].error, 5);
}

#[test]
fn requests_and_memory_under_way_are_bounded() {
    for (len, most) in [(512, MAX_NBD_IN_FLIGHT), (MAX_NBD_REQUEST, 2), (20 << 20, 3)] {
        let ram = Ram::new(MAX_NBD_REQUEST as usize);
        ram.hold.store(true, SeqCst);
        let sent = vec![ask(command::READ, 0, 1, 0, len); 300.min(most * 3)];
        let stream = Memory::new(&sent.concat(), 4096);
        let mut input = Input::new(&stream);
        let session = transmit(&mut input, &ram, FULL, false, pending(), pending());
        let mut session = pin!(session);
        let mut cx = Context::from_waker(Waker::noop());
        for _ in 0..100 {
            assert!(session.as_mut().poll(&mut cx).is_pending());
        }
        assert_eq!(ram.held.load(SeqCst), most);
        ram.release();
        while session.as_mut().poll(&mut cx).is_pending() {}
        assert_eq!(replies(&stream.output.take(), &[]).len(), sent.len());
    }
}

/// A client that sends and never reads.
struct Deaf(Memory);

impl ByteStream for Deaf {
    async fn read(&self, buf: &mut [u8]) -> io::Result<usize> {
        self.0.read(buf).await
    }
    async fn write_all(&self, _: &mut [IoSlice<'_>]) -> io::Result<()> {
        pending().await
    }
}

#[test]
fn a_client_that_does_not_read_is_not_read_from_and_can_be_dropped() {
    let ram = Ram::new(4096);
    let sent = vec![ask(command::READ, 0, 1, 0, 512); 1000];
    let stream = Deaf(Memory::new(&sent.concat(), 280));
    let mut input = Input::new(&stream);
    let kill = Cell::new(false);
    let killed = poll_fn(|_| if kill.get() { Poll::Ready(()) } else { Poll::Pending });
    let mut session = pin!(transmit(&mut input, &ram, FULL, false, pending(), killed));
    let mut cx = Context::from_waker(Waker::noop());
    for _ in 0..100 {
        assert!(session.as_mut().poll(&mut cx).is_pending());
    }
    assert_eq!(ram.log().len(), MAX_NBD_IN_FLIGHT);
    kill.set(true);
    assert!(session.as_mut().poll(&mut cx).is_ready());
}

#[test]
fn a_stop_takes_no_new_request_and_answers_those_under_way() {
    let ram = Ram::new(4096);
    ram.hold.store(true, SeqCst);
    let sent = vec![ask(command::READ, 0, 1, 0, 512); MAX_NBD_IN_FLIGHT + 5];
    let stream = Memory::new(&sent.concat(), 4096);
    let mut input = Input::new(&stream);
    let stop = Cell::new(false);
    let stopped = poll_fn(|_| if stop.get() { Poll::Ready(()) } else { Poll::Pending });
    let mut session = pin!(transmit(&mut input, &ram, SIMPLE, false, stopped, pending()));
    let mut cx = Context::from_waker(Waker::noop());
    for _ in 0..50 {
        assert!(session.as_mut().poll(&mut cx).is_pending());
    }
    stop.set(true);
    assert!(session.as_mut().poll(&mut cx).is_pending());
    ram.release();
    let end = loop {
        if let Poll::Ready(end) = session.as_mut().poll(&mut cx) {
            break end;
        }
    };
    assert_eq!(end.expect("no error"), End::Stopped);
    assert_eq!(replies(&stream.output.take(), &[(1, 512)]).len(), MAX_NBD_IN_FLIGHT);
}

#[test]
fn a_stop_before_the_first_request_ends_at_once() {
    let ram = Ram::new(4096);
    let stream = Memory::new(&ask(command::READ, 0, 1, 0, 512), 4096);
    let mut input = Input::new(&stream);
    let end = run(transmit(&mut input, &ram, SIMPLE, false, ready(()), pending()));
    assert_eq!(end.expect("no error"), End::Stopped);
    assert!(ram.log().is_empty());
}

#[test]
fn rubbish_never_panics_and_every_accepted_request_gets_one_reply() {
    let mut seed = 0xd1b5_4a32_d192_ed03_u64;
    let mut next = move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    for _ in 0..1500 {
        let ram = Ram::new(64 << 10);
        *ram.runs.lock().expect("runs") = vec![Run { len: 77, hole: true, zero: true }];
        let mut sent = Vec::new();
        let mut asked = 0;
        for cookie in 0..next() % 20 {
            let command = (next() % 10) as u16;
            let flags = if next() % 3 == 0 { next() as u16 } else { 0 };
            let offset = if next() % 8 == 0 { next() } else { next() % (64 << 10) };
            let len = if next() % 16 == 0 { next() as u32 } else { (next() % 9000) as u32 };
            if command == command::DISC {
                continue;
            }
            asked += 1;
            sent.push(ask(command, flags, cookie, offset, len));
            if command == command::WRITE {
                // A length that is a lie is followed by too little: the session ends there.
                sent.push(vec![next() as u8; len.min(9000) as usize]);
            }
        }
        let cut = next() % 3 == 0;
        if cut {
            let junk = (0..next() % 100).map(|_| next() as u8).collect();
            sent.push(junk);
        }
        let (end, out) = talk(&ram, FULL, &sent);
        let got = replies(&out, &[]).len();
        let whole = end.is_ok_and(|e| e == End::Closed) && !cut;
        assert!(if whole { got == asked } else { got <= asked + 3 });
    }
}
