//! virtio-blk requests (virtio 1.2, 5.2.6), parsed from a chain of any legal layout and checked against the disk.
//!
//! Callers: queue threads. Invariant: a request that [`parse`] lets through lies inside the disk, has whole sectors,
//! and respects every limit that the configuration announces; all others carry the status the specification asks for.

use crate::spec;
use crate::split::read_words;
use bedplate_types::{ByteLen, GuestOffset};
use libc::iovec;

/// Bytes of a sector, in which requests count whatever the block size.
pub const SECTOR: u64 = 512;
/// Bytes of the device identification string.
pub const ID_BYTES: usize = 20;
/// Segments one transfer may have (`IOV_MAX`).
const MAX_DATA_SEGMENTS: usize = 1024;
const HEADER: usize = 16;
const ZERO_SEGMENT: usize = 16;

/// What requests are checked against.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Sectors of the disk.
    pub capacity: u64,
    /// Writes, discards and zeroing are refused.
    pub read_only: bool,
    /// Discard and write-zeroes are offered at all.
    pub discard: bool,
    /// Sectors of one discard or write-zeroes segment.
    pub max_discard_sectors: u32,
    /// Segments of one discard or write-zeroes request.
    pub max_discard_segments: u32,
}

/// Where a request's status goes: the last byte the device may write.
#[derive(Clone, Copy, Debug)]
pub struct StatusByte(*mut u8);

impl StatusByte {
    /// Writes the status.
    ///
    /// # Safety
    /// The guest memory from which the request was parsed must still be mapped.
    #[inline]
    pub unsafe fn set(self, status: u8) {
        // SAFETY: the address was translated in that memory (the caller's promise).
        unsafe { self.0.write_volatile(status) };
    }
}

/// Which of the chain's segments are the request's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Data {
    /// Index of the first segment.
    pub first: usize,
    /// Number of segments.
    pub count: usize,
    /// Bytes in them.
    pub len: u64,
}

impl Data {
    fn of(segs: &[iovec], first: usize, end: usize) -> Self {
        let len = segs[first..end].iter().map(|s| s.iov_len as u64).sum();
        Self { first, count: end - first, len }
    }
}

/// A part of the disk to discard or to zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Its first byte.
    pub at: GuestOffset,
    /// Its length.
    pub len: ByteLen,
    /// Write-zeroes only: the space may be given back.
    pub unmap: bool,
}

/// What a request asks for.
#[derive(Debug, PartialEq, Eq)]
pub enum What {
    /// Read into the data segments.
    Read(GuestOffset, Data),
    /// Write the data segments.
    Write(GuestOffset, Data),
    /// Make completed writes durable.
    Flush,
    /// Write the serial number to the data segments.
    GetId(Data),
    /// Discard these parts.
    Discard(Vec<Span>),
    /// Zero these parts.
    WriteZeroes(Vec<Span>),
    /// Nothing: answer with this status.
    Refuse(u8),
}

/// A request with a place for its answer.
#[derive(Debug)]
pub struct Request {
    /// What to do.
    pub what: What,
    /// Where the status goes.
    pub status: StatusByte,
    /// The length for the used ring: all that the device may write, since the status is its last byte.
    pub written: u32,
}

/// Reads the header from the readable segments and cuts it off them. Returns (type, sector, first data segment).
#[inline]
fn header(segs: &mut [iovec], readable: usize) -> Option<(u32, u64, usize)> {
    let first = segs[..readable].first_mut()?;
    if first.iov_len >= HEADER {
        // SAFETY: a translated segment of at least 16 mapped bytes.
        let (lo, hi) = unsafe { read_words(first.iov_base.cast()) };
        // SAFETY: the segment has at least that many bytes.
        first.iov_base = unsafe { first.iov_base.add(HEADER) };
        first.iov_len -= HEADER;
        return Some((lo as u32, hi, usize::from(first.iov_len == 0)));
    }
    let mut bytes = [[0_u8; 8]; 2];
    let mut i = 0;
    for b in bytes.as_flattened_mut() {
        let s = segs[..readable].get_mut(i)?;
        // SAFETY: segments are never empty here: the next byte of one is mapped.
        unsafe {
            *b = s.iov_base.cast::<u8>().read_volatile();
            s.iov_base = s.iov_base.add(1);
        }
        s.iov_len -= 1;
        i += usize::from(s.iov_len == 0);
    }
    Some((u64::from_le_bytes(bytes[0]) as u32, u64::from_le_bytes(bytes[1]), i))
}

/// Parses the chain in `segs` (of which the first `readable` were written by the driver) and checks it.
/// Header and status are cut off the segments. None when there is no byte for a status.
///
/// The segments must be what [`crate::split::SplitQueue::pop`] found in memory that is still mapped.
#[inline]
pub fn parse(segs: &mut Vec<iovec>, readable: usize, limits: &Limits) -> Option<Request> {
    if segs.len() <= readable {
        return None;
    }
    let mut written = 0_u64;
    for s in &segs[readable..] {
        written = written.saturating_add(s.iov_len as u64);
    }
    let written = u32::try_from(written).unwrap_or(u32::MAX);
    let last = segs.last_mut()?;
    last.iov_len -= 1;
    // SAFETY: segments are never empty: the last byte of this one is mapped.
    let status = StatusByte(unsafe { last.iov_base.cast::<u8>().add(last.iov_len) });
    if last.iov_len == 0 {
        segs.pop();
    }
    let what = match header(segs, readable) {
        None => What::Refuse(spec::S_IOERR),
        Some((kind, sector, first)) => judge(segs, readable, kind, sector, first, limits),
    };
    Some(Request { what, status, written })
}

#[inline]
fn judge(
    segs: &[iovec],
    readable: usize,
    kind: u32,
    sector: u64,
    first: usize,
    limits: &Limits,
) -> What {
    let refused = What::Refuse(spec::S_IOERR);
    match kind {
        spec::T_IN => {
            let data = Data::of(segs, readable, segs.len());
            transfer(sector, data, limits).map_or(refused, |at| What::Read(at, data))
        }
        spec::T_OUT if limits.read_only => refused,
        spec::T_OUT => {
            let data = Data::of(segs, first, readable);
            transfer(sector, data, limits).map_or(refused, |at| What::Write(at, data))
        }
        spec::T_FLUSH => What::Flush,
        spec::T_GET_ID => What::GetId(Data::of(segs, readable, segs.len())),
        spec::T_DISCARD | spec::T_WRITE_ZEROES if limits.discard || limits.read_only => {
            if limits.read_only {
                return refused;
            }
            let zero = kind == spec::T_WRITE_ZEROES;
            match spans(&segs[first..readable], zero, limits) {
                Ok(list) if zero => What::WriteZeroes(list),
                Ok(list) => What::Discard(list),
                Err(status) => What::Refuse(status),
            }
        }
        _ => What::Refuse(spec::S_UNSUPP),
    }
}

/// The disk offset of a transfer that has whole sectors and lies inside the disk.
#[inline]
fn transfer(sector: u64, data: Data, limits: &Limits) -> Option<GuestOffset> {
    let whole = data.len.is_multiple_of(SECTOR) && data.count <= MAX_DATA_SEGMENTS;
    (whole && inside(sector, data.len / SECTOR, limits)).then(|| GuestOffset::new(sector * SECTOR))
}

/// True when the sectors lie on the disk; then their byte offsets fit 64 bits.
#[inline]
fn inside(sector: u64, count: u64, limits: &Limits) -> bool {
    sector <= limits.capacity && count <= limits.capacity - sector
}

/// The segments of a discard or write-zeroes request, each read once.
fn spans(segs: &[iovec], zero: bool, limits: &Limits) -> Result<Vec<Span>, u8> {
    let len: usize = segs.iter().fold(0, |n, s| n.saturating_add(s.iov_len));
    let most = (limits.max_discard_segments as usize).saturating_mul(ZERO_SEGMENT);
    if len == 0 || !len.is_multiple_of(ZERO_SEGMENT) || len > most {
        return Err(spec::S_IOERR);
    }
    let mut bytes = vec![0_u8; len];
    copy_in(segs, &mut bytes);
    let mut out = Vec::with_capacity(len / ZERO_SEGMENT);
    let mut status = None;
    for seg in bytes.as_chunks::<ZERO_SEGMENT>().0 {
        let [a, b, c, d] =
            [0, 4, 8, 12].map(|i| u32::from_le_bytes([seg[i], seg[i + 1], seg[i + 2], seg[i + 3]]));
        let (sector, count) = (u64::from(a) | u64::from(b) << 32, c);
        let known = if zero { spec::WZ_FLAG_UNMAP } else { 0 };
        if d & !known != 0 {
            // Unsupported flags outweigh a bad range (5.2.6.2).
            return Err(spec::S_UNSUPP);
        }
        if count > limits.max_discard_sectors || !inside(sector, u64::from(count), limits) {
            status = Some(spec::S_IOERR);
            continue;
        }
        out.push(Span {
            at: GuestOffset::new(sector * SECTOR),
            len: ByteLen::new(u64::from(count) * SECTOR),
            unmap: d & spec::WZ_FLAG_UNMAP != 0,
        });
    }
    status.map_or(Ok(out), Err)
}

/// Copies from segments until `out` is full; returns how many bytes there were.
fn copy_in(segs: &[iovec], out: &mut [u8]) -> usize {
    let mut done = 0;
    for s in segs {
        let n = s.iov_len.min(out.len() - done);
        // SAFETY: `n` bytes are mapped at the segment and `out` has room for them.
        unsafe { std::ptr::copy(s.iov_base.cast::<u8>(), out.as_mut_ptr().add(done), n) };
        done += n;
    }
    done
}

/// Copies `bytes` into segments as far as they reach; returns how many fitted.
///
/// # Safety
/// The segments must name memory that is still mapped.
pub unsafe fn copy_out(segs: &[iovec], bytes: &[u8]) -> usize {
    let mut done = 0;
    for s in segs {
        let n = s.iov_len.min(bytes.len() - done);
        // SAFETY: `n` bytes are mapped at the segment (the caller's promise) and left in `bytes`.
        unsafe { std::ptr::copy(bytes.as_ptr().add(done), s.iov_base.cast::<u8>(), n) };
        done += n;
    }
    done
}

/// Sets all bytes of the segments to zero.
///
/// # Safety
/// The segments must name memory that is still mapped.
pub unsafe fn zero(segs: &[iovec]) {
    for s in segs {
        // SAFETY: the segment's bytes are mapped (the caller's promise).
        unsafe { std::ptr::write_bytes(s.iov_base.cast::<u8>(), 0, s.iov_len) };
    }
}

/// A serial number as GET_ID gives it: cut to 20 bytes, or padded with NUL.
pub fn id_bytes(serial: &str) -> [u8; ID_BYTES] {
    let mut id = [0; ID_BYTES];
    let n = serial.len().min(ID_BYTES);
    id[..n].copy_from_slice(&serial.as_bytes()[..n]);
    id
}

#[cfg(test)]
#[path = "blk_tests.rs"]
mod tests;
