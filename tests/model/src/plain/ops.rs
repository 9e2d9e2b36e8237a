//! One operation on a disk: chosen, carried out, and what it may have done to the bytes.

use crate::bed::Open;
use crate::pattern::{random, squeezable};
use crate::{DataFile, Spec};
use bedplate_runtime::buf::{AlignedBuf, IoVec, SharedBuf};
use bedplate_sim::Rng;
use bedplate_storage::ZeroMode;
use bedplate_types::{ByteLen, Error, ErrorKind, GuestOffset};

/// What a request does to the bytes.
pub(super) struct Effect {
    pub(super) at: usize,
    pub(super) bytes: Vec<u8>,
    /// False when they may also stay as they are.
    pub(super) sure: bool,
}

impl Effect {
    pub(super) fn end(&self) -> usize {
        self.at + self.bytes.len()
    }

    pub(super) fn at(&self, byte: usize) -> Option<u8> {
        self.bytes.get(byte.checked_sub(self.at)?).copied()
    }
}

/// One operation.
#[derive(Debug)]
pub(super) enum Op {
    Write { at: u64, bytes: Vec<u8>, fua: bool },
    Batch(Vec<(u64, Vec<u8>)>),
    Compressed { at: u64, bytes: Vec<u8> },
    Zero { at: u64, len: u64, mode: ZeroMode },
    Discard { at: u64, len: u64 },
    Read { at: u64, len: u64 },
    Status { at: u64, len: u64 },
    Flush,
    Maintain,
}

/// What became of one operation.
#[derive(Default)]
pub(super) struct Done {
    pub(super) read: Option<(usize, Vec<u8>)>,
    pub(super) effects: Vec<Effect>,
    pub(super) flushed: bool,
    pub(super) failures: Vec<Error>,
}

pub(super) fn brief(plans: &[Vec<Op>]) -> String {
    let op = |op: &Op| match op {
        Op::Write { at, bytes, fua } => format!("write {at:#x}+{:#x} fua {fua}", bytes.len()),
        Op::Batch(all) => {
            let parts: Vec<String> =
                all.iter().map(|(at, bytes)| format!("{at:#x}+{:#x}", bytes.len())).collect();
            format!("batch [{}]", parts.join(", "))
        }
        Op::Compressed { at, bytes } => format!("compressed {at:#x}+{:#x}", bytes.len()),
        other => format!("{other:x?}"),
    };
    let tasks: Vec<String> =
        plans.iter().map(|ops| ops.iter().map(op).collect::<Vec<_>>().join("; ")).collect();
    tasks.join(" | ")
}

/// A range: unaligned, of sectors, or of clusters; short or long.
fn random_range(spec: &Spec, rng: &mut Rng) -> (u64, u64) {
    let cluster = spec.cluster();
    let unit = match rng.below(10) {
        0 | 1 => 1,
        2..=6 => 512,
        _ => cluster,
    };
    let most = match rng.below(10) {
        0..=5 => cluster.min(65536),
        6..=8 => (4 * cluster).min(1 << 20),
        _ => spec.size,
    };
    let units = (most / unit).max(1);
    let len = (1 + rng.below(units)) * unit;
    let at = rng.below(spec.size / unit + 1) * unit;
    let at = at.min(spec.size - 1);
    (at, len.min(spec.size - at))
}

pub(super) fn random_op(spec: &Spec, rng: &mut Rng) -> Op {
    let (at, len) = random_range(spec, rng);
    match rng.below(100) {
        0..=37 => {
            let bytes = random(rng, len as usize);
            Op::Write { at, bytes, fua: rng.chance(8) }
        }
        38..=52 => {
            let mut writes = Vec::new();
            let mut next = at;
            for _ in 0..1 + rng.below(8) {
                let (at, len) = random_range(spec, rng);
                // Half of them follow the one before, as the requests of a queue do.
                let at = if rng.chance(50) && next < spec.size { next } else { at };
                let len = len.min(spec.size - at).min(65536);
                next = at + len;
                writes.push((at, random(rng, len as usize)));
            }
            Op::Batch(writes)
        }
        53..=57 if !spec.luks && !spec.unpacked => {
            let cluster = spec.cluster();
            let at = at - at % cluster;
            let len = len.next_multiple_of(cluster).min(spec.size - at);
            Op::Compressed { at, bytes: squeezable(rng, len as usize) }
        }
        53..=66 => Op::Zero {
            at,
            len,
            mode: ZeroMode { unmap: rng.chance(50), fast_only: rng.chance(20) },
        },
        67..=78 => Op::Discard { at, len },
        79..=87 => Op::Read { at, len },
        88..=90 => Op::Status { at, len },
        91..=97 => Op::Flush,
        _ => Op::Maintain,
    }
}

/// Memory with this content, in one to three segments.
fn iovec(bytes: &[u8]) -> Result<IoVec, Error> {
    let part = |bytes: &[u8]| -> Result<IoVec, Error> {
        Ok(SharedBuf::new(AlignedBuf::from_slice(bytes)?).iovec())
    };
    let cut = bytes.len() / 3 + 1;
    if !bytes.len().is_multiple_of(3) || bytes.len() < 6 {
        return part(bytes);
    }
    let mut all = part(&bytes[..cut])?;
    all.append(part(&bytes[cut..])?);
    Ok(all)
}

pub(super) async fn read(open: &Open, at: u64, len: usize, direct: bool) -> Result<Vec<u8>, Error> {
    let buf = SharedBuf::zeroed(len)?.iovec();
    let direct = if direct { open.read_direct(at, &buf).await } else { None };
    match direct {
        Some(result) => result?,
        None => open.disk.read(GuestOffset::new(at), buf.clone()).await?,
    }
    let mut out = vec![0; len];
    buf.copy_to(0, &mut out);
    Ok(out)
}

async fn write(open: &Open, at: u64, buf: IoVec, fua: bool) -> Result<(), Error> {
    let direct = if fua { None } else { open.write_direct(at, &buf).await };
    match direct {
        Some(result) => result,
        None => open.disk.write(GuestOffset::new(at), buf, fua).await,
    }
}

pub(super) async fn perform(open: &Open, spec: &Spec, op: &Op) -> Done {
    let disk = &open.disk;
    let mut done = Done::default();
    let effect = |at: u64, bytes: Vec<u8>, sure| Effect { at: at as usize, bytes, sure };
    let zeroes = |at: u64, len: u64, sure| effect(at, vec![0; len as usize], sure);
    let result = match op {
        Op::Write { at, bytes, fua } => {
            let result = match iovec(bytes) {
                Ok(buf) => write(open, *at, buf, *fua).await,
                Err(e) => Err(e),
            };
            done.effects.push(effect(*at, bytes.clone(), result.is_ok()));
            result
        }
        Op::Batch(writes) => {
            let all: Result<Vec<_>, Error> =
                writes.iter().map(|(at, b)| Ok((GuestOffset::new(*at), iovec(b)?))).collect();
            let results = match all {
                Ok(all) => disk.write_batch(all).await,
                Err(e) => vec![Err(e)],
            };
            for ((at, bytes), result) in writes.iter().zip(results) {
                done.effects.push(effect(*at, bytes.clone(), result.is_ok()));
                done.failures.extend(result.err());
            }
            Ok(())
        }
        Op::Compressed { at, bytes } => {
            let result = match iovec(bytes) {
                Ok(buf) => disk.write_compressed(GuestOffset::new(*at), buf).await,
                Err(e) => Err(e),
            };
            let none = spec.data_file.map(|_| ErrorKind::Unsupported);
            if result.as_ref().err().map(Error::kind).is_some_and(|kind| Some(kind) == none) {
                return done; // nothing is compressed in a data file
            }
            done.effects.push(effect(*at, bytes.clone(), result.is_ok()));
            match result {
                // Refused, since a cluster holds something; clusters that can't be packed may be written.
                Err(e) if e.kind() == ErrorKind::InvalidInput => Ok(()),
                result => result,
            }
        }
        Op::Zero { at, len, mode } => {
            let range = (GuestOffset::new(*at), ByteLen::new(*len));
            match disk.write_zeroes(range.0, range.1, *mode).await {
                // Refused before anything was done.
                Err(e) if e.kind() == ErrorKind::Unsupported && mode.fast_only => Ok(()),
                result => {
                    done.effects.push(zeroes(*at, *len, result.is_ok()));
                    result
                }
            }
        }
        Op::Discard { at, len } => {
            let result = disk.discard(GuestOffset::new(*at), ByteLen::new(*len)).await;
            let (start, end) = discarded(spec, *at, *len);
            let sure = result.is_ok() && empties(spec);
            done.effects.push(zeroes(start, end - start, sure));
            result
        }
        Op::Read { at, len } => match read(open, *at, *len as usize, at % 3 != 0).await {
            Ok(bytes) => {
                done.read = Some((*at as usize, bytes));
                Ok(())
            }
            Err(e) => Err(e),
        },
        Op::Status { at, len } => {
            let runs = disk.block_status(GuestOffset::new(*at), ByteLen::new(*len), 1000).await;
            runs.map(|runs| assert!(runs.iter().all(|r| r.len.get() > 0)))
        }
        Op::Flush => {
            let result = disk.flush().await;
            done.flushed = result.is_ok();
            result
        }
        Op::Maintain => disk.maintain().await,
    };
    done.failures.extend(result.err());
    done
}

/// What a discard may change.
pub(crate) fn discarded(spec: &Spec, at: u64, len: u64) -> (u64, u64) {
    match spec.data_file {
        Some(DataFile::Raw) => (at, at + len),
        _ => whole_clusters(spec, at, len),
    }
}

/// True when a discard surely changes it. Where something lies below, clusters of no layer of ours may stay as they are, so do
/// parts of a compressed cluster, and not every storage can empty a raw data file.
pub(crate) fn empties(spec: &Spec) -> bool {
    let parts = spec.extended && !spec.unpacked;
    spec.below.is_none() && spec.data_file != Some(DataFile::Raw) && !parts
}

/// The clusters, or subclusters, that a discard empties: those that lie wholly in it, as far as the disk goes.
pub(crate) fn whole_clusters(spec: &Spec, at: u64, len: u64) -> (u64, u64) {
    let cluster = spec.part();
    let end = at + len;
    let end = if end >= spec.size { spec.size } else { end - end % cluster };
    let start = at.next_multiple_of(cluster).min(spec.size);
    (start, end.max(start))
}
