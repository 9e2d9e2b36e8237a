//! Any sequence of operations against a plain byte array.

use super::bed::{Mount, Random, at, file_in, len, on, skipped};
use crate::{FileStorage, OpenOptions, Storage, ZeroMode};
use bedplate_runtime::Backend;
use bedplate_runtime::buf::{IoVec, SharedBuf};
use bedplate_types::CacheMode;

/// Offsets stay below this, so that requests meet.
const SPAN: u64 = 300_000;

/// A range: mostly of whole sectors or pages, sometimes of any bytes.
fn range(r: &mut Random, limit: u64) -> (u64, usize) {
    let unit = [1, 512, 4096, 4096][r.below(4) as usize];
    let start = r.below(SPAN / unit) * unit;
    let most = [3, 20, 200_000 / unit + 1][r.below(3) as usize];
    let n = (1 + r.below(most)) * unit;
    let start = start.min(limit.saturating_sub(1));
    (start, n.min(limit - start) as usize)
}

/// Memory in several segments, at times at odd addresses.
fn memory(r: &mut Random, n: usize) -> IoVec {
    let odd = [0, 0, 1, 512][r.below(4) as usize];
    let whole = SharedBuf::zeroed(n + odd).expect("memory").iovec().slice(odd, n);
    let cut = if r.below(3) == 0 { r.below(n as u64 + 1) as usize } else { 0 };
    let mut buf = whole.slice(0, cut);
    buf.append(whole.slice(cut, n - cut));
    buf
}

/// `growing` files change their length; devices have the model's from the beginning.
pub(super) async fn random_operations(
    s: &FileStorage,
    mut model: Vec<u8>,
    growing: bool,
    seed: u64,
    rounds: u32,
) {
    let mut r = Random(seed);
    for round in 0..rounds {
        let limit = if growing { u64::MAX / 4 } else { model.len() as u64 };
        let (start, n) = range(&mut r, limit);
        let (first, end) = (start as usize, start as usize + n);
        let what = r.below(10);
        match what {
            0..=3 => {
                let buf = memory(&mut r, n);
                buf.fill(0, n, round as u8 | 1);
                s.write(at(start), buf).await.expect("write");
                model.resize(model.len().max(end), 0);
                model[first..end].fill(round as u8 | 1);
            }
            4 => {
                let mode = ZeroMode { unmap: r.below(2) == 0, fast_only: false };
                s.write_zeroes(at(start), len(n as u64), mode).await.expect("zero");
                model.resize(model.len().max(end), 0);
                model[first..end].fill(0);
            }
            5 if growing => {
                s.discard(at(start), len(n as u64)).await.expect("discard");
                let end = end.min(model.len());
                if first < end {
                    model[first..end].fill(0);
                }
            }
            6 if growing && r.below(3) == 0 => {
                s.set_len(len(start)).await.expect("set_len");
                model.resize(first, 0);
            }
            7 if growing && r.below(3) == 0 => {
                s.allocate(at(start), len(n as u64)).await.expect("allocate");
                model.resize(model.len().max(end), 0);
            }
            8 => {
                let e = s.extent(at(start), len(n as u64)).await.expect("extent");
                assert!(e.len.get() >= 1 && e.len.get() <= n as u64, "round {round}");
                let told = first..(first + e.len.get() as usize).min(model.len());
                let zero = model.get(told).is_none_or(|bytes| bytes.iter().all(|b| *b == 0));
                assert!(e.data || zero, "round {round}: data at {start:#x} was told as a hole");
            }
            _ => {
                let buf = memory(&mut r, n);
                buf.fill(0, n, 0xee);
                s.read(at(start), buf.clone()).await.expect("read");
                let (mut out, mut want) = (vec![0; n], vec![0; n]);
                buf.copy_to(0, &mut out);
                let stop = end.min(model.len());
                if first < stop {
                    want[..stop - first].copy_from_slice(&model[first..stop]);
                }
                let wrong = out.iter().zip(&want).position(|(a, b)| a != b);
                assert_eq!(wrong, None, "round {round}: read of {n} bytes at {start:#x}");
            }
        }
        assert_eq!(Storage::len(s).get(), model.len() as u64, "round {round}, operation {what}");
    }
    s.sync().await.expect("sync");
}

fn file_against_model(options: &OpenOptions, backend: Backend, seed: u64) {
    on(backend, async {
        let s = FileStorage::create(options, len(10_001)).expect("create");
        random_operations(&s, vec![0; 10_001], true, seed, 400).await;
        let on_disk = std::fs::read(&options.path).expect("read");
        let mut seen = vec![0; on_disk.len()];
        let buf = SharedBuf::zeroed(seen.len()).expect("memory").iovec();
        s.read(at(0), buf.clone()).await.expect("read");
        buf.copy_to(0, &mut seen);
        assert!(seen == on_disk, "another reader sees something else");
    });
}

#[test]
fn files_hold_what_was_written_in_every_cache_mode_on_both_backends() {
    let dir = tempfile::tempdir().expect("tempdir");
    for mode in [CacheMode::None, CacheMode::Writeback, CacheMode::Directsync, CacheMode::Unsafe] {
        for (seed, backend) in [(1, Backend::Uring), (2, Backend::Threads), (3, Backend::Uring)] {
            let options = OpenOptions::new(file_in(dir.path())).cache(mode);
            file_against_model(&options, backend, seed);
        }
    }
}

#[test]
fn files_on_ext4_and_xfs_with_either_sector_size_hold_what_was_written() {
    for (kind, sector) in [("ext4", 512), ("ext4", 4096), ("xfs", 512), ("xfs", 4096)] {
        let mount = match Mount::new(kind, sector) {
            Ok(m) => m,
            Err(why) => {
                skipped(&format!("files on {kind} with sectors of {sector}"), &why);
                continue;
            }
        };
        for seed in [11, 12, 13] {
            let options = OpenOptions::new(file_in(mount.dir.path()));
            file_against_model(&options, Backend::Uring, seed);
        }
        let s = FileStorage::open(&OpenOptions::new(file_in(mount.dir.path()))).expect("open");
        assert_eq!(s.limits().align, sector, "{kind}");
    }
}
