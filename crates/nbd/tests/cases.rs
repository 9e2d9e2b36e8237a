//! Failures that NBD servers have had, each with its story in one line, played against this one.

mod common;

use bedplate_nbd::client::{Client, Wanted, string};
use bedplate_nbd::proto::{command, option, reply};
use common::{How, Served, pattern, serve};

const MIB: usize = 1 << 20;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const EPERM: u32 = 1;

fn small() -> Served {
    serve(&pattern(MIB), How::default())
}

/// The data of GO or INFO for a name.
fn go(name: &[u8]) -> Vec<u8> {
    [string(name), vec![0, 0]].concat()
}

fn read_works(c: &mut Client) -> bool {
    let a = c.call(command::READ, 0, 0, 512, &[]).expect("a reply");
    a.error == 0 && a.data == pattern(512)
}

/// QEMU's server left the DONE flag off the last chunk when two contexts were asked for, and the client hung.
#[test]
fn status_ends_when_two_contexts_were_asked_for() {
    let s = small();
    let mut c = s.connect();
    assert_eq!(c.option(option::STRUCTURED_REPLY, &[]).expect("replies")[0].0, reply::ACK);
    let ask = [
        string(b""),
        2u32.to_be_bytes().to_vec(),
        string(b"base:allocation"),
        string(b"qemu:dirty-bitmap:b0"),
    ];
    let replies = c.option(option::SET_META_CONTEXT, &ask.concat()).expect("replies");
    let contexts = replies.iter().filter(|r| r.0 == reply::META_CONTEXT).count();
    c.go(b"", Wanted { structured: true, allocation: false }).expect("talk").expect("export");
    let a = c.call(command::BLOCK_STATUS, 0, 0, MIB as u32, &[]).expect("a whole reply");
    assert_eq!((a.error, a.extents.len()), (0, contexts));
    assert!(read_works(&mut c));
}

/// A server acted on the part of an export's name before an embedded NUL.
#[test]
fn a_name_with_nul_is_invalid() {
    let s = small();
    let mut c = s.connect();
    for name in [&b"\0x"[..], b"disk\0", b"disk\0x"] {
        for opt in [option::GO, option::INFO] {
            let r = c.option(opt, &go(name)).expect("replies");
            assert_eq!(r.last().map(|r| r.0), Some(reply::ERR_INVALID));
        }
    }
    c.send_option(option::EXPORT_NAME, b"\0x", 2).expect("sent");
    assert!(c.closed());
    assert!(read_works(&mut s.client()));
}

/// A name of 3000 bytes overran a buffer on the stack (CVE-2017-15118).
#[test]
fn a_name_of_3000_bytes_is_refused_and_the_server_lives() {
    let s = small();
    let name = [b'a'; 3000];
    let mut c = s.connect();
    assert_eq!(c.go(&name, Wanted::default()).expect("replies"), Err(reply::ERR_UNKNOWN));
    c.send_option(option::EXPORT_NAME, &name, 3000).expect("sent");
    assert!(c.closed());
    assert!(read_works(&mut s.client()));
}

/// Echoing an unknown name of 4096 bytes made an error text above the protocol's bound (CVE-2020-10761).
#[test]
fn the_echo_of_an_unknown_name_is_bounded() {
    let s = small();
    for byte in [b'a', 0xff, b'\n'] {
        let mut c = s.connect();
        for opt in [option::GO, option::INFO] {
            let r = c.option(opt, &go(&[byte; 4096])).expect("replies");
            assert!(r.iter().all(|(kind, data)| *kind == reply::ERR_UNKNOWN && data.len() <= 4096));
        }
        c.go(b"", Wanted::default()).expect("replies").expect("the export");
        assert!(read_works(&mut c));
    }
}

/// An option that claimed 4 GiB of data kept a server reading, or made it get the memory (CVE-2017-15119).
#[test]
fn an_option_that_claims_four_gib_costs_no_memory() {
    let s = small();
    for opt in [option::GO, option::LIST, 77, option::EXPORT_NAME] {
        let mut c = s.connect();
        c.send_option(opt, &[0; 100_000], u32::MAX).unwrap_or_default();
        drop(c);
    }
    assert!(read_works(&mut s.client()));
}

/// Disks that are no multiple of 512 bytes lost their tail, or told of extents that ended inside a block.
#[test]
fn an_odd_size_is_consistent_and_its_last_byte_readable() {
    for len in [100_001, 1, 511, 513] {
        let data = pattern(len);
        let s = serve(&data, How::default());
        let mut c = s.connect();
        let full = Wanted { structured: true, allocation: true };
        let chosen = c.go(b"", full).expect("replies").expect("the export");
        let min = chosen.block.expect("block sizes").minimum;
        assert!(chosen.size.is_multiple_of(min.into()) && chosen.size >= len as u64);
        let all = c.call(command::READ, 0, 0, chosen.size as u32, &[]).expect("a reply");
        assert!(all.error == 0 && all.data[..len] == data);
        assert!(all.data[len..].iter().all(|b| *b == 0));
        let last = c.call(command::READ, 0, len as u64 - 1, 1, &[]).expect("a reply");
        assert_eq!(last.data, data[len - 1..]);
        let st = c.call(command::BLOCK_STATUS, 0, 0, chosen.size as u32, &[]).expect("a reply");
        assert!(st.error == 0 && st.extents[0].1.iter().all(|(n, _)| n % min == 0));
        let covered: u64 = st.extents[0].1.iter().map(|(n, _)| u64::from(*n)).sum();
        assert_eq!(covered, chosen.size);
    }
}

/// A server sent two bytes too many to a client without NO_ZEROES, and the stream lost its step.
#[test]
fn an_old_client_gets_exactly_134_bytes() {
    let s = small();
    for flags in [1, 0] {
        let mut c = Client::connect(&s.addr, flags).expect("connected");
        c.send_option(option::EXPORT_NAME, b"", 0).expect("sent");
        let hello = c.bytes(134).expect("134 bytes");
        assert_eq!(hello[..8], (MIB as u64).to_be_bytes());
        assert_eq!(hello[10..], [0; 124]);
        assert!(read_works(&mut c));
    }
}

/// Requests out of range, to a read-only export, or unknown got wrong errors or ended the connection.
#[test]
fn bad_requests_get_the_right_errors_and_the_connection_goes_on() {
    let end = MIB as u64;
    let ro = serve(&pattern(MIB), How { read_only: true, ..How::default() });
    let mut c = ro.client();
    let mut error = |cmd, flags, at, len, data: &[u8]| {
        let a = c.call(cmd, flags, at, len, data).expect("a reply");
        assert!(read_works(&mut c));
        a.error
    };
    assert_eq!(error(command::READ, 0, end, 512, &[]), EINVAL);
    assert_eq!(error(command::READ, 0, u64::MAX - 10, 512, &[]), EINVAL);
    assert_eq!(error(command::WRITE, 0, 0, 512, &[0; 512]), EPERM);
    assert_eq!(error(command::TRIM, 0, 0, 512, &[]), EPERM);
    assert_eq!(error(command::WRITE_ZEROES, 0, 0, 512, &[]), EPERM);
    assert_eq!(error(77, 0, 0, 0, &[]), EINVAL);
    assert_eq!(error(command::READ, 1 << 15, 0, 512, &[]), EINVAL);

    let rw = small();
    let mut c = rw.client();
    let mut error = |cmd, flags, at, len, data: &[u8]| {
        let a = c.call(cmd, flags, at, len, data).expect("a reply");
        assert!(read_works(&mut c));
        a.error
    };
    assert_eq!(error(command::WRITE, 0, end, 512, &[0; 512]), ENOSPC);
    assert_eq!(error(command::WRITE, 0, end - 511, 512, &[0; 512]), ENOSPC);
    assert_eq!(error(command::WRITE_ZEROES, 0, end, 1, &[]), ENOSPC);
    assert_eq!(error(command::TRIM, 0, end, 1, &[]), EINVAL);
    assert_eq!(error(command::BLOCK_STATUS, 0, end, 1, &[]), EINVAL);
    assert_eq!(error(command::CACHE, 0, end, 1, &[]), EINVAL);
    assert_eq!(error(command::WRITE, 1 << 15, 0, 512, &[0; 512]), EINVAL);
    let long = vec![0; 33 << 20];
    assert_eq!(error(command::WRITE, 0, 0, 33 << 20, &long), EINVAL);
}

/// What was negotiated in the clear was carried over into TLS (CVE-2021-3716): without TLS, STARTTLS is refused, and
/// what is sent right behind it is taken as what it is.
#[test]
fn starttls_is_refused_and_what_follows_in_the_same_packet_is_answered_in_order() {
    let s = small();
    let mut c = s.connect();
    let header =
        |opt: u32, len: u32| [&b"IHAVEOPT"[..], &opt.to_be_bytes(), &len.to_be_bytes()].concat();
    let packet =
        [header(option::STRUCTURED_REPLY, 0), header(option::STARTTLS, 0), header(option::LIST, 0)];
    c.send_raw(&packet.concat()).expect("sent");
    let mut kinds = Vec::new();
    for _ in 0..5 {
        let head = c.bytes(20).expect("a reply");
        kinds.push(u32::from_be_bytes([head[12], head[13], head[14], head[15]]));
        c.bytes(usize::from(head[19])).expect("its data");
    }
    let server = reply::SERVER;
    assert_eq!(kinds, [reply::ACK, reply::ERR_POLICY, server, server, reply::ACK]);
}

/// A client that closes during negotiation killed the whole server (CVE-2013-7441).
#[test]
fn clients_that_leave_at_any_byte_of_the_negotiation_harm_nobody() {
    let s = small();
    let whole = [&b"IHAVEOPT\0\0\0\x07\0\0\0\x06"[..], &[0; 6]].concat();
    for n in 0..=whole.len() {
        let mut c = s.connect();
        c.send_raw(&whole[..n]).expect("sent");
    }
    assert!(read_works(&mut s.client()));
}
