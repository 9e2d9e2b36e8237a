//! One request: checked against what was agreed and what the export is, then carried out on the disk.
//!
//! Caller: transmission. [`check`] is pure, and every request passes it before it costs memory or touches the disk.

use crate::bitmap::{self, MAX_BITMAPS};
use crate::device::{Device, Run};
use crate::negotiate::{ALLOCATION_ID, FIRST_BITMAP_ID};
use crate::pool::Pool;
use crate::proto::{Errno, Request, command, command_flag};
use crate::reply::{self, Form, Reply};
use bedplate_runtime::buf::{AlignedBuf, SharedBuf};
use bedplate_storage::ZeroMode;
use bedplate_types::limits::MAX_NBD_REQUEST;
use bedplate_types::{ByteLen, Error, ErrorKind, GuestOffset};

/// Extents in one answer to BLOCK_STATUS.
pub(crate) const MAX_EXTENTS: usize = 8192;
/// CACHE reads through a buffer of this size.
const CACHE_PIECE: u64 = 1 << 20;

/// What a session may do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rights {
    pub size: u64,
    pub read_only: bool,
    pub structured: bool,
    pub allocation: bool,
    /// Bitmaps that were chosen, a bit each.
    pub bitmaps: u32,
}

/// Why a request is refused.
pub(crate) type Refusal = (Errno, &'static str);

const BAD_FLAG: Refusal = (Errno::Inval, "the request has a flag that does not go with it");
const PAST_END: Refusal = (Errno::Inval, "the range ends past the end of the disk");
const NO_ROOM: Refusal = (Errno::NoSpc, "the range ends past the end of the disk");
const TOO_LONG: Refusal = (Errno::Inval, "the request is longer than the maximum block size");

/// Checks everything about a request that can be known without the disk.
pub(crate) fn check(r: &Request, rights: &Rights) -> Result<(), Refusal> {
    use command_flag::{DF, FAST_ZERO, FUA, NO_HOLE, REQ_ONE};
    // FUA goes with every request, though it means something for three only.
    let flags = match r.command {
        command::READ if rights.structured => FUA | DF,
        command::WRITE_ZEROES => FUA | NO_HOLE | FAST_ZERO,
        command::BLOCK_STATUS => FUA | REQ_ONE,
        command::READ | command::WRITE | command::FLUSH | command::TRIM | command::CACHE => FUA,
        _ => return Err((Errno::Inval, "the request is of an unknown kind")),
    };
    let changes = matches!(r.command, command::WRITE | command::TRIM | command::WRITE_ZEROES);
    if changes && rights.read_only {
        return Err((Errno::Perm, "the export is read-only"));
    }
    if r.flags & !flags != 0 {
        return Err(BAD_FLAG);
    }
    if r.command == command::FLUSH && (r.offset != 0 || r.len != 0) {
        return Err((Errno::Inval, "FLUSH takes no range"));
    }
    if r.command == command::BLOCK_STATUS {
        if !rights.allocation && rights.bitmaps == 0 {
            return Err((Errno::Inval, "no metadata context was chosen for this export"));
        }
        if r.len == 0 {
            return Err((Errno::Inval, "BLOCK_STATUS needs a length"));
        }
    }
    let payload = matches!(r.command, command::READ | command::WRITE);
    if payload && r.len > MAX_NBD_REQUEST {
        return Err(if r.has(DF) { (Errno::Overflow, TOO_LONG.1) } else { TOO_LONG });
    }
    match r.offset.checked_add(u64::from(r.len)) {
        Some(end) if end <= rights.size => Ok(()),
        _ if matches!(r.command, command::WRITE | command::WRITE_ZEROES) => Err(NO_ROOM),
        _ => Err(PAST_END),
    }
}

/// The error number for a failure of the disk, and a text that gives away nothing of the host.
fn errno_of(e: &Error, r: &Request) -> Refusal {
    let fast = r.command == command::WRITE_ZEROES && r.has(command_flag::FAST_ZERO);
    match e.kind() {
        ErrorKind::InvalidInput => (Errno::Inval, "the disk refuses such a request"),
        ErrorKind::OutOfRange if r.command == command::WRITE => NO_ROOM,
        ErrorKind::OutOfRange => PAST_END,
        // ENOTSUP has a meaning for fast zeroing only.
        ErrorKind::Unsupported if fast => (Errno::NotSup, "zeroing would not be fast"),
        ErrorKind::Unsupported => (Errno::Inval, "the disk can't do this"),
        ErrorKind::NoSpace => (Errno::NoSpc, "no space left on the host"),
        ErrorKind::ReadOnly | ErrorKind::Denied => (Errno::Perm, "not permitted"),
        ErrorKind::Limit => (Errno::NoMem, "not enough memory"),
        ErrorKind::Cancelled => (Errno::Shutdown, "the server is stopping"),
        _ => (Errno::Io, "an I/O error of the disk"),
    }
}

/// Carries out a request that passed [`check`]. `payload` holds the data of a WRITE.
pub(crate) async fn execute<D: Device>(
    device: &D,
    r: Request,
    payload: Option<AlignedBuf>,
    rights: &Rights,
    pool: &Pool,
) -> Reply {
    let form = Form { cookie: r.cookie, structured: rights.structured };
    let done = match r.command {
        command::BLOCK_STATUS => all_status(device, r, form, rights).await,
        _ => attempt(device, r, payload, form, pool).await,
    };
    done.unwrap_or_else(|e| failed(&e, &r, form))
}

/// Writes several payloads at once; the replies are in the order of the requests.
pub(crate) async fn execute_writes<D: Device>(
    device: &D,
    writes: Vec<(Request, AlignedBuf)>,
    structured: bool,
    pool: &Pool,
) -> Vec<Reply> {
    let shared: Vec<(Request, SharedBuf)> =
        writes.into_iter().map(|(r, buf)| (r, SharedBuf::new(buf))).collect();
    let iovs = shared
        .iter()
        .map(|(r, buf)| (GuestOffset::new(r.offset), buf.iovec().slice(0, r.len as usize)))
        .collect();
    let mut results = device.write_batch(iovs).await.into_iter();
    let mut replies = Vec::with_capacity(shared.len());
    for (r, buf) in shared {
        let form = Form { cookie: r.cookie, structured };
        // A request the disk did not answer for has not been written.
        let done = results
            .next()
            .unwrap_or_else(|| Err(Error::new(ErrorKind::Io, "the disk did not answer a write")));
        if let Ok(buf) = buf.into_buf() {
            pool.give(buf);
        }
        replies.push(done.map_or_else(|e| failed(&e, &r, form), |()| Reply::done(form)));
    }
    replies
}

/// The reply to a request that the disk failed; the log gets the whole story.
fn failed(e: &Error, r: &Request, form: Form) -> Reply {
    let (errno, text) = errno_of(e, r);
    if errno == Errno::Io {
        tracing::warn!(command = r.command, offset = r.offset, len = r.len, "{e:#}");
    } else {
        tracing::debug!(command = r.command, offset = r.offset, len = r.len, "{e:#}");
    }
    Reply::error(form, errno, text)
}

async fn attempt<D: Device>(
    device: &D,
    r: Request,
    payload: Option<AlignedBuf>,
    form: Form,
    pool: &Pool,
) -> Result<Reply, Error> {
    let at = GuestOffset::new(r.offset);
    let len = ByteLen::new(u64::from(r.len));
    let fua = r.has(command_flag::FUA);
    match r.command {
        command::READ => return read(device, r, form, pool).await,
        command::WRITE => {
            // An empty write has no buffer and nothing to do, but FUA.
            if let Some(buf) = payload.filter(|_| r.len != 0) {
                let shared = SharedBuf::new(buf);
                let iov = shared.iovec().slice(0, r.len as usize);
                let done = device.write(at, iov, fua).await;
                pool.give(shared.into_buf()?);
                done?;
            }
        }
        command::FLUSH => device.flush().await?,
        command::TRIM => {
            device.discard(at, len).await?;
            if fua {
                device.flush().await?;
            }
        }
        command::WRITE_ZEROES => {
            let mode = ZeroMode {
                unmap: !r.has(command_flag::NO_HOLE),
                fast_only: r.has(command_flag::FAST_ZERO),
            };
            device.write_zeroes(at, len, mode).await?;
            if fua {
                device.flush().await?;
            }
        }
        command::CACHE => cache(device, r, pool).await?,
        // `check` let no other through.
        _ => return Err(Error::new(ErrorKind::InvalidInput, "an unknown request")),
    }
    Ok(Reply::done(form))
}

async fn read<D: Device>(device: &D, r: Request, form: Form, pool: &Pool) -> Result<Reply, Error> {
    let len = r.len as usize;
    let shared = SharedBuf::new(pool.take(len)?);
    if len != 0 {
        device.read(GuestOffset::new(r.offset), shared.iovec().slice(0, len)).await?;
    }
    let holes = form.structured && !r.has(command_flag::DF);
    Ok(Reply::read(form, r.offset, shared.into_buf()?, len, holes))
}

/// Where the host caches pages, the range is read so that it is there; else only what maps it is loaded.
async fn cache<D: Device>(device: &D, r: Request, pool: &Pool) -> Result<(), Error> {
    let end = r.offset + u64::from(r.len);
    let mut at = r.offset;
    let paged = device.align() == 1;
    let buf = SharedBuf::new(pool.take(if paged { CACHE_PIECE as usize } else { 0 })?);
    while at < end {
        let left = end - at;
        if paged {
            let n = left.min(CACHE_PIECE);
            device.read(GuestOffset::new(at), buf.iovec().slice(0, n as usize)).await?;
            at += n;
        } else {
            let runs =
                device.block_status(GuestOffset::new(at), ByteLen::new(left), MAX_EXTENTS).await?;
            match runs.iter().map(|r| r.len).fold(0, u64::saturating_add) {
                0 => break,
                n => at = at.saturating_add(n),
            }
        }
    }
    pool.give(buf.into_buf()?);
    Ok(())
}

/// What each metadata context that was chosen says of the range.
async fn all_status<D: Device>(
    device: &D,
    r: Request,
    form: Form,
    rights: &Rights,
) -> Result<Reply, Error> {
    let mut contexts: Vec<(u32, Vec<(u32, u32)>)> = Vec::new();
    if rights.allocation {
        let runs = block_status(device, r).await?;
        contexts.push((ALLOCATION_ID, runs.iter().map(reply::extent).collect()));
    }
    let limit = if r.has(command_flag::REQ_ONE) { 1 } else { MAX_EXTENTS };
    for (n, bitmap) in (0u32..).zip(device.bitmaps()).take(MAX_BITMAPS) {
        if rights.bitmaps >> n & 1 != 0 {
            let runs = bitmap::status(&*bitmap.map, r.offset, u64::from(r.len), limit);
            contexts.push((FIRST_BITMAP_ID + n, runs));
        }
    }
    Ok(Reply::block_status(form, &contexts))
}

/// Extents from the start of the range, neighbours in the same state merged; as many as fit one answer.
async fn block_status<D: Device>(device: &D, r: Request) -> Result<Vec<Run>, Error> {
    let limit = if r.has(command_flag::REQ_ONE) { 1 } else { MAX_EXTENTS };
    let mut left = u64::from(r.len);
    let found = device.block_status(GuestOffset::new(r.offset), ByteLen::new(left), limit).await?;
    let mut out: Vec<Run> = Vec::with_capacity(found.len().min(limit));
    for run in found {
        // Never past what was asked for, whatever the disk says.
        let len = run.len.min(left);
        if len == 0 {
            continue;
        }
        let full = out.len() == limit;
        match out.last_mut() {
            Some(last) if (last.hole, last.zero) == (run.hole, run.zero) => last.len += len,
            _ if full => break,
            _ => out.push(Run { len, ..run }),
        }
        left -= len;
    }
    if out.is_empty() {
        return Err(Error::new(ErrorKind::Io, "the disk told nothing about a range"));
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RW: Rights =
        Rights { size: 1 << 20, read_only: false, structured: true, allocation: true, bitmaps: 0 };

    fn request(command: u16, flags: u16, offset: u64, len: u32) -> Request {
        Request { flags, command, cookie: 1, offset, len }
    }

    fn verdict(r: Request, rights: Rights) -> u32 {
        check(&r, &rights).map_or_else(|(e, _)| e as u32, |()| 0)
    }

    #[test]
    fn ranges_past_the_end_get_the_error_the_protocol_names() {
        for (command, errno) in [(0, 22), (1, 28), (4, 22), (5, 22), (6, 28), (7, 22)] {
            assert_eq!(verdict(request(command, 0, 1 << 20, 1), RW), errno);
            assert_eq!(verdict(request(command, 0, u64::MAX, 2), RW), errno);
            assert_eq!(verdict(request(command, 0, (1 << 20) - 1, 1), RW), 0);
        }
    }

    #[test]
    fn a_read_only_export_refuses_every_change_as_not_permitted() {
        let ro = Rights { read_only: true, ..RW };
        for command in [1, 4, 6] {
            assert_eq!(verdict(request(command, 0, 1 << 30, 512), ro), 1);
        }
        for command in [0, 5, 7] {
            assert_eq!(verdict(request(command, 0, 0, 512), ro), 0);
        }
        assert_eq!(verdict(request(3, 0, 0, 0), ro), 0);
    }

    #[test]
    fn flags_that_do_not_go_with_a_request_are_refused() {
        use command_flag::*;
        for (command, good) in
            [(0, DF), (1, 0), (3, 0), (4, 0), (5, 0), (6, NO_HOLE | FAST_ZERO), (7, REQ_ONE)]
        {
            let len = if command == 3 { 0 } else { 512 };
            for bit in 0..16 {
                let expected = if (1 << bit) & (good | FUA) != 0 { 0 } else { 22 };
                assert_eq!(verdict(request(command, 1 << bit, 0, len), RW), expected);
            }
        }
        let simple = Rights { structured: false, ..RW };
        assert_eq!(verdict(request(0, DF, 0, 512), simple), 22);
    }

    #[test]
    fn what_was_not_agreed_is_refused() {
        let plain = Rights { allocation: false, ..RW };
        assert_eq!(verdict(request(7, 0, 0, 512), plain), 22);
        assert_eq!(verdict(request(7, 0, 0, 0), RW), 22);
        assert_eq!(verdict(request(3, 0, 0, 512), RW), 22);
        for command in [2, 8, 9, 77, u16::MAX] {
            assert_eq!(verdict(request(command, 0, 0, 0), RW), 22);
        }
        let big = Rights { size: 1 << 40, ..RW };
        assert_eq!(verdict(request(0, 0, 0, MAX_NBD_REQUEST + 1), big), 22);
        assert_eq!(verdict(request(0, command_flag::DF, 0, MAX_NBD_REQUEST + 1), big), 75);
        assert_eq!(verdict(request(1, 0, 0, u32::MAX), big), 22);
        assert_eq!(verdict(request(6, 0, 0, u32::MAX), big), 0);
    }
}
