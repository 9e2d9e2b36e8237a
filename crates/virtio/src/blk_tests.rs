//! Tests of request parsing on ordinary memory.

use super::*;

const LIMITS: Limits = Limits {
    capacity: 100,
    read_only: false,
    discard: true,
    max_discard_sectors: 50,
    max_discard_segments: 4,
};

/// Memory of the driver, cut into segments of the given lengths; the first `readable` are the driver's.
struct Chain {
    memory: Vec<u8>,
    segs: Vec<iovec>,
    readable: usize,
}

fn chain(driver: &[u8], readable: &[usize], writable: &[usize]) -> Chain {
    let mut memory = driver.to_vec();
    assert_eq!(readable.iter().sum::<usize>(), driver.len());
    memory.resize(driver.len() + writable.iter().sum::<usize>(), 0xee);
    let mut at = memory.as_mut_ptr();
    let segs = (readable.iter().chain(writable))
        .map(|&len| {
            let s = iovec { iov_base: at.cast(), iov_len: len };
            at = at.wrapping_add(len);
            s
        })
        .collect();
    Chain { memory, segs, readable: readable.len() }
}

fn head(kind: u32, sector: u64, data: &[u8]) -> Vec<u8> {
    let mut b = kind.to_le_bytes().to_vec();
    b.extend([0; 4]);
    b.extend(sector.to_le_bytes());
    b.extend(data);
    b
}

fn zero_seg(sector: u64, count: u32, flags: u32) -> Vec<u8> {
    let mut b = sector.to_le_bytes().to_vec();
    b.extend(count.to_le_bytes());
    b.extend(flags.to_le_bytes());
    b
}

fn run(c: &mut Chain, limits: &Limits) -> Option<Request> {
    parse(&mut c.segs, c.readable, limits)
}

fn what(driver: &[u8], readable: &[usize], writable: &[usize]) -> What {
    run(&mut chain(driver, readable, writable), &LIMITS).expect("has a status byte").what
}

#[test]
fn every_layout_of_a_read_is_the_same_request() {
    for readable in [&[16][..], &[8, 8], &[1; 16], &[15, 1]] {
        for writable in [&[1024, 1][..], &[1025], &[1000, 25], &[1; 1025]] {
            let mut c = chain(&head(spec::T_IN, 7, &[]), readable, writable);
            let r = run(&mut c, &LIMITS).expect("parsed");
            let What::Read(at, data) = r.what else { panic!("not a read: {:?}", r.what) };
            assert_eq!((at.get(), data.len, r.written), (7 * 512, 1024, 1025));
            // SAFETY: the chain's memory is alive.
            unsafe {
                zero(&c.segs[data.first..data.first + data.count]);
                r.status.set(spec::S_OK);
            }
            assert!(c.memory[16..].iter().all(|&b| b == 0));
        }
    }
}

#[test]
fn every_layout_of_a_write_finds_its_data_and_reports_one_byte() {
    let driver = head(spec::T_OUT, 1, &[5; 512]);
    for readable in [&[16, 512][..], &[528], &[8, 8, 512], &[20, 508], &[15, 513]] {
        let mut c = chain(&driver, readable, &[1]);
        let r = run(&mut c, &LIMITS).expect("parsed");
        let What::Write(_, data) = r.what else { panic!("not a write: {:?}", r.what) };
        assert_eq!((data.len, r.written), (512, 1));
        let mut out = [0; 512];
        assert_eq!(copy_in(&c.segs[data.first..data.first + data.count], &mut out), 512);
        assert_eq!(out, [5; 512]);
    }
}

#[test]
fn chains_without_status_or_header() {
    let driver = head(spec::T_IN, 0, &[]);
    assert!(run(&mut chain(&driver, &[16], &[]), &LIMITS).is_none());
    assert_eq!(what(&driver[..15], &[15], &[513]), What::Refuse(spec::S_IOERR));
    assert_eq!(what(&[], &[], &[513]), What::Refuse(spec::S_IOERR));
}

#[test]
fn transfers_must_be_whole_sectors_inside_the_disk() {
    let read = |sector, len: usize| what(&head(spec::T_IN, sector, &[]), &[16], &[len + 1]);
    for (sector, len) in
        [(100, 512), (99, 1024), (u64::MAX, 512), (1 << 55, 512), (u64::MAX, 1024), (0, 100)]
    {
        assert_eq!(read(sector, len), What::Refuse(spec::S_IOERR), "sector {sector}, {len} bytes");
    }
    assert!(matches!(read(99, 512), What::Read(..)));
    let write = |sector, len| what(&head(spec::T_OUT, sector, &vec![0; len]), &[16 + len], &[1]);
    assert_eq!(write(99, 1024), What::Refuse(spec::S_IOERR));
    assert_eq!(write(0, 511), What::Refuse(spec::S_IOERR));
    assert!(matches!(write(0, 512), What::Write(..)));
}

#[test]
fn a_read_only_disk_refuses_changes_and_still_tells_its_name() {
    let limits = Limits { read_only: true, ..LIMITS };
    let seg = zero_seg(0, 1, 0);
    for (kind, data) in
        [(spec::T_OUT, &[0; 512][..]), (spec::T_DISCARD, &seg), (spec::T_WRITE_ZEROES, &seg)]
    {
        let mut c = chain(&head(kind, 0, data), &[16 + data.len()], &[1]);
        let r = run(&mut c, &limits).expect("parsed");
        assert_eq!(r.what, What::Refuse(spec::S_IOERR));
    }
    for len in [8, 20, 64] {
        let mut c = chain(&head(spec::T_GET_ID, 0, &[]), &[16], &[len, 1]);
        let r = run(&mut c, &limits).expect("parsed");
        let What::GetId(data) = r.what else { panic!("refused") };
        // SAFETY: the chain's memory is alive.
        let n =
            unsafe { copy_out(&c.segs[data.first..data.first + data.count], &id_bytes("disk")) };
        assert_eq!((n, r.written as usize), (len.min(20), len + 1));
        assert_eq!(&c.memory[16..24], b"disk\0\0\0\0");
        assert!(c.memory[16 + n..].iter().all(|&b| b == 0xee));
    }
    assert_eq!(id_bytes("0123456789abcdefghijKLM"), *b"0123456789abcdefghij");
}

#[test]
fn bad_discards_and_zeroings_get_the_status_of_the_specification() {
    let try_it = |kind, payload: &[u8]| what(&head(kind, 0, payload), &[16 + payload.len()], &[1]);
    for kind in [spec::T_DISCARD, spec::T_WRITE_ZEROES] {
        let bad = |p: &[u8], status| assert_eq!(try_it(kind, p), What::Refuse(status));
        bad(&zero_seg(90, 11, 0), spec::S_IOERR);
        bad(&zero_seg(u64::MAX, 2, 0), spec::S_IOERR);
        bad(&zero_seg(u64::MAX, u32::MAX, 0), spec::S_IOERR);
        bad(&zero_seg(0, 51, 0), spec::S_IOERR);
        bad(&zero_seg(0, 1, 2), spec::S_UNSUPP);
        bad(&zero_seg(0, 1, 0x8000_0001), spec::S_UNSUPP);
        bad(&zero_seg(0, 1, 0)[..15], spec::S_IOERR);
        bad(&[], spec::S_IOERR);
        bad(&zero_seg(0, 1, 0).repeat(5), spec::S_IOERR);
        bad(&[zero_seg(0, 51, 0), zero_seg(0, 1, 2)].concat(), spec::S_UNSUPP);
    }
    assert_eq!(try_it(spec::T_DISCARD, &zero_seg(0, 1, 1)), What::Refuse(spec::S_UNSUPP));
    let two = [zero_seg(0, 1, 1), zero_seg(98, 2, 0)].concat();
    let What::WriteZeroes(list) = try_it(spec::T_WRITE_ZEROES, &two) else { panic!("refused") };
    assert_eq!(
        list.iter().map(|s| (s.at.get(), s.len.get(), s.unmap)).collect::<Vec<_>>(),
        [(0, 512, true), (98 * 512, 1024, false)]
    );
}

#[test]
fn unknown_types_are_unsupported() {
    for kind in [2, 3, 5, 9, 10, 12, 14, 77, u32::MAX] {
        assert_eq!(what(&head(kind, 0, &[]), &[16], &[513]), What::Refuse(spec::S_UNSUPP));
    }
}
