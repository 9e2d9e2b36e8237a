//! Negotiation in memory: each option, its errors, and streams of rubbish.

use super::*;
use crate::stream::memory::{Memory, run};

fn exports() -> Vec<ExportInfo> {
    let block = BlockSizes { minimum: 512, preferred: 4096, maximum: 32 << 20 };
    let one = |name: &str, size| ExportInfo {
        name: name.into(),
        description: format!("disk {name}"),
        size,
        flags: export_flag::SEND_FLUSH,
        block,
        bitmaps: Vec::new(),
    };
    let bitmaps = vec!["daily".into(), "weekly".into()];
    vec![one("first", 1 << 20), ExportInfo { bitmaps, ..one("second", 2 << 20) }]
}

fn opt(option: u32, data: &[u8]) -> Vec<u8> {
    let mut v = OptionHeader { option, len: data.len() as u32 }.encode().to_vec();
    v.extend_from_slice(data);
    v
}

fn string(s: &[u8]) -> Vec<u8> {
    [&(s.len() as u32).to_be_bytes()[..], s].concat()
}

fn go(name: &[u8], infos: &[u16]) -> Vec<u8> {
    let mut d = string(name);
    d.extend_from_slice(&(infos.len() as u16).to_be_bytes());
    infos.iter().for_each(|i| d.extend_from_slice(&i.to_be_bytes()));
    d
}

fn meta(name: &[u8], queries: &[&[u8]]) -> Vec<u8> {
    let mut d = string(name);
    d.extend_from_slice(&(queries.len() as u32).to_be_bytes());
    queries.iter().for_each(|q| d.extend_from_slice(&string(q)));
    d
}

/// Runs a client that sends `options`; gives the outcome and everything behind the greeting.
fn talk(flags: u32, options: &[Vec<u8>]) -> (Outcome, Vec<u8>) {
    let sent = [flags.to_be_bytes().to_vec(), options.concat()].concat();
    let stream = Memory::new(&sent, 13);
    let outcome = run(negotiate(&mut Input::new(&stream), &exports())).expect("no stream error");
    let out = stream.output.borrow().clone();
    assert_eq!(&out[..18], b"NBDMAGICIHAVEOPT\0\x03");
    (outcome, out[18..].to_vec())
}

/// The replies as (type, data).
fn replies(mut out: &[u8]) -> Vec<(u32, Vec<u8>)> {
    let mut all = Vec::new();
    while let Some((head, rest)) = out.split_first_chunk() {
        let h = OptionReply::parse(head).expect("a reply's magic");
        let (body, rest) = rest.split_at(h.len as usize);
        all.push((h.kind, body.to_vec()));
        out = rest;
    }
    all
}

fn kinds(out: &[u8]) -> Vec<u32> {
    replies(out).into_iter().map(|r| r.0).collect()
}

#[test]
fn go_answers_with_size_names_and_block_sizes() {
    let ask = opt(option::GO, &go(b"second", &[1, 2, 3]));
    let (end, out) = talk(3, &[ask]);
    assert_eq!(
        end,
        Outcome::Ready(Agreed { export: 1, structured: false, allocation: false, bitmaps: 0 })
    );
    let r = replies(&out);
    assert_eq!(r[0].1[..10], [0, 0, 0, 0, 0, 0, 0, 0x20, 0, 0]);
    assert_eq!(r[1].1, b"\0\x01second");
    assert_eq!(r[2].1, b"\0\x02disk second");
    assert_eq!(r[3].1, [0, 3, 0, 0, 2, 0, 0, 0, 16, 0, 2, 0, 0, 0]);
    assert_eq!(r[4], (reply::ACK, vec![]));
}

#[test]
fn an_empty_name_is_the_first_export_and_info_does_not_end_the_negotiation() {
    let (end, out) =
        talk(3, &[opt(option::INFO, &go(b"", &[1])), opt(option::EXPORT_NAME, b"second")]);
    assert_eq!(replies(&out[..out.len() - 10])[1].1, b"\0\x01first");
    assert!(matches!(end, Outcome::Ready(Agreed { export: 1, .. })));
}

#[test]
fn export_name_without_no_zeroes_gets_exactly_134_bytes() {
    let (_, out) = talk(1, &[opt(option::EXPORT_NAME, b"")]);
    assert_eq!(out.len(), 8 + 2 + 124);
    assert!(out[10..].iter().all(|b| *b == 0));
    let (_, out) = talk(3, &[opt(option::EXPORT_NAME, b"")]);
    assert_eq!(out.len(), 10);
    // An old client that knows neither flag is served too.
    assert_eq!(talk(0, &[opt(option::EXPORT_NAME, b"")]).1.len(), 134);
}

#[test]
fn names_with_nul_and_names_that_are_too_long_are_refused_with_a_short_text() {
    for (name, kind) in [
        (&b"\0x"[..], reply::ERR_INVALID),
        (&b"first\0"[..], reply::ERR_INVALID),
        (&[b'a'; 3000][..], reply::ERR_UNKNOWN),
        (&[b'a'; 4096][..], reply::ERR_UNKNOWN),
        (&[0xff; 4096][..], reply::ERR_UNKNOWN),
        (&[b'a'; 4097][..], reply::ERR_INVALID),
    ] {
        let (end, out) = talk(3, &[opt(option::GO, &go(name, &[])), opt(option::ABORT, b"")]);
        let r = replies(&out);
        assert_eq!(r[0].0, kind);
        assert!(r[0].1.len() < 1000, "a bounded echo");
        assert_eq!(r[1].0, reply::ACK);
        assert!(matches!(end, Outcome::Close(_)));
        let (end, out) = talk(3, &[opt(option::EXPORT_NAME, name)]);
        assert!(matches!(end, Outcome::Close(_)) && out.is_empty());
    }
}

#[test]
fn list_names_every_export() {
    let (_, out) = talk(3, &[opt(option::LIST, b""), opt(option::LIST, b"x")]);
    let r = replies(&out);
    assert_eq!(r[0].1, b"\0\0\0\x05firstdisk first");
    assert_eq!(r[1].1, b"\0\0\0\x06seconddisk second");
    assert_eq!((r[2].0, r[3].0), (reply::ACK, reply::ERR_INVALID));
}

#[test]
fn options_with_wrong_lengths_are_invalid_and_the_stream_stays_in_step() {
    let mut bad = Vec::new();
    for data in [&b""[..], b"\0\0\0", b"\xff\xff\xff\xff", b"\0\0\0\x01a", b"\0\0\0\0\0\x01"] {
        for o in [option::GO, option::INFO] {
            bad.push(opt(o, data));
        }
    }
    bad.push(opt(option::GO, &[go(b"", &[]), vec![0]].concat()));
    let n = bad.len();
    bad.push(opt(option::GO, &go(b"", &[])));
    let (end, out) = talk(3, &bad);
    assert_eq!(kinds(&out)[..n], vec![reply::ERR_INVALID; n]);
    assert!(matches!(end, Outcome::Ready(_)));
}

#[test]
fn an_option_over_the_limit_is_skipped_and_answered() {
    let big = vec![7; MAX_NBD_OPTION as usize + 1];
    let (end, out) =
        talk(3, &[opt(option::GO, &big), opt(77, &big), opt(option::GO, &go(b"", &[]))]);
    assert_eq!(kinds(&out)[..2], [reply::ERR_TOO_BIG; 2]);
    assert!(matches!(end, Outcome::Ready(_)));
    assert!(matches!(talk(3, &[opt(option::EXPORT_NAME, &big)]).0, Outcome::Close(_)));
}

#[test]
fn unknown_options_and_tls_are_refused_and_negotiation_goes_on() {
    let (end, out) = talk(
        3,
        &[
            opt(option::STARTTLS, b""),
            opt(option::STARTTLS, b"x"),
            opt(option::EXTENDED_HEADERS, b""),
            opt(4, b"abc"),
            opt(u32::MAX, b""),
            opt(option::GO, &go(b"", &[])),
        ],
    );
    let unsup = reply::ERR_UNSUP;
    assert_eq!(kinds(&out)[..5], [reply::ERR_POLICY, reply::ERR_INVALID, unsup, unsup, unsup]);
    assert!(matches!(end, Outcome::Ready(_)));
}

#[test]
fn contexts_need_structured_replies_and_hold_for_the_export_they_were_chosen_for() {
    let sr = opt(option::STRUCTURED_REPLY, b"");
    let set = |name: &[u8], q: &[&[u8]]| opt(option::SET_META_CONTEXT, &meta(name, q));
    let end = |options: &[Vec<u8>]| match talk(3, options).0 {
        Outcome::Ready(a) => a.allocation,
        Outcome::Close(why) => panic!("{why}"),
    };
    let ba: &[u8] = b"base:allocation";
    let gof = opt(option::GO, &go(b"first", &[]));
    assert!(end(&[sr.clone(), set(b"", &[b"qemu:x", ba]), gof.clone()]));
    assert!(!end(&[set(b"", &[ba]), sr.clone(), gof.clone()]), "before structured replies");
    assert!(!end(&[sr.clone(), set(b"second", &[ba]), gof.clone()]), "another export");
    assert!(!end(&[sr.clone(), set(b"", &[b"base:"]), gof.clone()]), "no wildcard in SET");
    assert!(!end(&[sr.clone(), set(b"", &[ba]), set(b"", &[]), gof.clone()]), "replaced");
    assert!(!end(&[sr.clone(), set(b"", &[ba]), set(b"none", &[ba]), gof]), "replaced by failure");
}

#[test]
fn bitmaps_are_contexts_of_their_own_export() {
    let sr = opt(option::STRUCTURED_REPLY, b"");
    let list = |name: &[u8], q: &[&[u8]]| opt(option::LIST_META_CONTEXT, &meta(name, q));
    let named = |name: &[u8], q: &[&[u8]]| -> Vec<String> {
        let (_, out) = talk(3, &[sr.clone(), list(name, q)]);
        let of = replies(&out).into_iter().filter(|r| r.0 == reply::META_CONTEXT);
        of.map(|r| String::from_utf8_lossy(&r.1[4..]).into_owned()).collect()
    };
    let (daily, weekly) = ("qemu:dirty-bitmap:daily", "qemu:dirty-bitmap:weekly");
    assert_eq!(named(b"second", &[]), ["base:allocation", daily, weekly]);
    assert_eq!(named(b"second", &[b"qemu:"]), [daily, weekly]);
    assert_eq!(named(b"second", &[b"qemu:dirty-bitmap:", b"base:"]).len(), 3);
    assert_eq!(named(b"second", &[b"qemu:dirty-bitmap:week"]), [""; 0]);
    assert_eq!(named(b"first", &[b"qemu:"]), [""; 0]);
    let set = |q: &[&[u8]]| opt(option::SET_META_CONTEXT, &meta(b"second", q));
    let chosen = |q: &[&[u8]]| {
        let options = [sr.clone(), set(q), opt(option::GO, &go(b"second", &[]))];
        match talk(3, &options) {
            (Outcome::Ready(a), out) => {
                let ids = replies(&out).into_iter().filter(|r| r.0 == reply::META_CONTEXT);
                (a.allocation, a.bitmaps, ids.map(|r| r.1[3]).collect::<Vec<_>>())
            }
            (Outcome::Close(why), _) => panic!("{why}"),
        }
    };
    assert_eq!(chosen(&[weekly.as_bytes()]), (false, 2, vec![3]));
    assert_eq!(
        chosen(&[weekly.as_bytes(), b"base:allocation", daily.as_bytes()]),
        (true, 3, vec![1, 2, 3])
    );
    assert_eq!(chosen(&[b"qemu:", b"qemu:dirty-bitmap:"]), (false, 0, vec![]));
}

#[test]
fn listing_contexts_knows_the_wildcard() {
    let list = |q: &[&[u8]]| opt(option::LIST_META_CONTEXT, &meta(b"", q));
    let ask = [
        opt(option::STRUCTURED_REPLY, b""),
        list(&[]),
        list(&[b"base:"]),
        list(&[b"base:allocation", b"base:allocation"]),
        list(&[b"base:other", b"nothing", b""]),
        opt(option::LIST_META_CONTEXT, &[0; 7]),
        opt(option::LIST_META_CONTEXT, &meta(b"", &[&b"q"[..]; 300])),
    ];
    let (_, out) = talk(3, &ask);
    let (a, m) = (reply::ACK, reply::META_CONTEXT);
    assert_eq!(kinds(&out), [a, m, a, m, a, m, a, a, reply::ERR_INVALID, reply::ERR_INVALID]);
}

#[test]
fn unknown_handshake_flags_and_wrong_magic_close_the_connection() {
    assert!(matches!(talk(4, &[]).0, Outcome::Close(_)));
    assert!(matches!(talk(3, &[vec![b'x'; 16]]).0, Outcome::Close(_)));
    assert!(matches!(talk(0, &[opt(option::LIST, b"")]).0, Outcome::Close(_)));
}

#[test]
fn rubbish_never_panics_and_never_gets_a_long_answer() {
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    for _ in 0..3000 {
        let mut sent = 3u32.to_be_bytes().to_vec();
        for _ in 0..next() % 6 {
            let mut data: Vec<u8> = match next() % 3 {
                0 => go(b"first", &[1, 2, 3]),
                1 => meta(b"first", &[b"base:", b"base:allocation"]),
                _ => (0..next() % 90).map(|_| next() as u8).collect(),
            };
            for _ in 0..next() % 3 {
                if !data.is_empty() {
                    let at = next() as usize % data.len();
                    data[at] = next() as u8;
                }
            }
            sent.extend_from_slice(&opt((next() % 13) as u32, &data));
        }
        if next() % 4 == 0 && sent.len() > 4 {
            let at = 4 + next() as usize % (sent.len() - 4);
            sent[at] ^= 1 << (next() % 8);
        }
        let stream = Memory::new(&sent, 1 + next() as usize % 64);
        // The end of the input may come in the middle: an error of the stream, or an outcome.
        let _ = run(negotiate(&mut Input::new(&stream), &exports()));
        assert!(stream.output.borrow().len() < 4096);
    }
}
