//! Tests of the whole runtime, run on both backends.

mod files;
mod sockets;
mod threads;

use crate::buf::{IoVec, SharedBuf};
use crate::{Backend, Config, File, Runtime};
use std::sync::Arc;
use std::time::Duration;

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

/// A ring so small that everything has to wait for room.
fn tiny() -> Config {
    Config { entries: 2, spin: Duration::ZERO, ..Config::default() }
}
