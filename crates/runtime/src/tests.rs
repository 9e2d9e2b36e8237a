//! Tests of the whole runtime, run on both backends.

use crate::buf::{IoVec, SharedBuf};
use crate::{Backend, Config, DirectOp, File, Runtime, Wait, fs};
use bedplate_types::HostOffset;
use std::sync::Arc;

/// Runs `test` with the thread backend, and with io_uring where the system has it.
fn on_both(config: &Config, test: impl Fn(&Runtime)) {
    for backend in [Backend::Threads, Backend::Uring] {
        match Runtime::new(Config { backend, ..config.clone() }) {
            Ok(rt) => test(&rt),
            Err(e) => eprintln!("skipped on io_uring, which this system does not allow: {e:#}"),
        }
    }
}

fn temp_file() -> Arc<File> {
    File::new(tempfile::tempfile().expect("temporary file").into())
}

fn pattern(len: usize, seed: u8) -> SharedBuf {
    let buf = SharedBuf::zeroed(len).expect("memory");
    let bytes: Vec<u8> = (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed)).collect();
    buf.iovec().copy_from(0, &bytes);
    buf
}

fn bytes_of(v: &IoVec) -> Vec<u8> {
    let mut out = vec![0; v.len()];
    v.copy_to(0, &mut out);
    out
}

#[test]
fn what_is_written_is_read_back_and_the_end_of_file_is_a_short_read() {
    on_both(&Config::default(), |rt| {
        rt.block_on(async {
            let file = temp_file();
            let data = pattern(10_000, 1).iovec();
            fs::write_full(&file, data.clone(), HostOffset::new(4096)).await.expect("write");
            fs::fsync(&file, true).await.expect("sync");
            let back = SharedBuf::zeroed(20_000).expect("memory").iovec();
            let n = fs::read_full(&file, back.clone(), HostOffset::new(4096)).await.expect("read");
            assert_eq!(n, 10_000);
            assert_eq!(bytes_of(&back.slice(0, n)), bytes_of(&data));
            assert_eq!(fs::read(&file, back, HostOffset::new(1 << 30)).await.expect("read"), 0);
        });
    });
}

#[test]
fn direct_transfers_of_one_and_of_several_segments_return_their_tokens() {
    on_both(&Config::default(), |rt| {
        let file = temp_file();
        let mut data = pattern(512, 1).iovec();
        data.append(pattern(1024, 2).iovec());
        let back = SharedBuf::zeroed(1536).expect("memory").iovec();
        for (op, v, token) in [(DirectOp::Write, &data, u64::MAX), (DirectOp::Read, &back, 7)] {
            let (iov, n) = v.as_iovecs();
            // SAFETY: both lists live to the end of the closure, after the completions.
            assert!(unsafe {
                rt.submit_direct(op, &file, iov, n as u32, HostOffset::new(0), token)
            });
            assert_eq!(rt.in_flight(), 1);
            let mut done = Vec::new();
            while done.is_empty() {
                rt.turn(Wait::Forever);
                rt.take_direct(&mut done);
            }
            assert_eq!(done, [(token, 1536)]);
            assert_eq!(rt.in_flight(), 0);
        }
        assert_eq!(bytes_of(&back), bytes_of(&data));
    });
}
