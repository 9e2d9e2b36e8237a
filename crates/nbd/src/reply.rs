//! Replies of the transmission phase, built so that data is sent from where it was read.
//!
//! Callers: requests build them, the writing half of a session sends them.

use crate::device::Run;
use crate::proto::{self, Errno, allocation, chunk};
use bedplate_runtime::buf::AlignedBuf;
use std::io::IoSlice;
use std::ops::Range;

/// Zeroes are looked for in blocks of this size.
const BLOCK: usize = 4096;
/// A run of zeroes shorter than this inside a read is sent as data: a chunk of its own would cost more.
const MIN_HOLE: usize = 64 << 10;

/// A reply ready to be sent.
pub(crate) struct Reply {
    head: Vec<u8>,
    data: Option<AlignedBuf>,
    /// Pieces in the order they are sent; empty: all of `head`.
    parts: Vec<Part>,
}

enum Part {
    Head(Range<usize>),
    Data(Range<usize>),
}

/// Whom a reply is for, and how.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Form {
    pub cookie: u64,
    pub structured: bool,
}

impl Reply {
    fn of_head(head: Vec<u8>) -> Self {
        Self { head, data: None, parts: Vec::new() }
    }

    /// Done, with nothing to say.
    pub fn done(form: Form) -> Self {
        let mut head = Vec::with_capacity(proto::CHUNK_HEADER);
        // A simple reply is right in both modes for requests that return no data.
        proto::put_simple(&mut head, 0, form.cookie);
        Self::of_head(head)
    }

    /// Failed; `text` reaches clients with structured replies.
    pub fn error(form: Form, errno: Errno, text: &str) -> Self {
        let mut head = Vec::with_capacity(proto::CHUNK_HEADER + 6 + text.len());
        if form.structured {
            let text = &text.as_bytes()[..text.len().min(256)];
            let len = 6 + text.len() as u32;
            proto::put_chunk(&mut head, chunk::DONE, chunk::ERROR, form.cookie, len);
            head.extend_from_slice(&(errno as u32).to_be_bytes());
            head.extend_from_slice(&(text.len() as u16).to_be_bytes());
            head.extend_from_slice(text);
        } else {
            proto::put_simple(&mut head, errno as u32, form.cookie);
        }
        Self::of_head(head)
    }

    /// The `len` bytes read from `offset`, at the start of `data`. With `holes`, long runs of zeroes are sent
    /// as such.
    pub fn read(form: Form, offset: u64, data: AlignedBuf, len: usize, holes: bool) -> Self {
        let mut reply =
            Self { head: Vec::with_capacity(32), data: None, parts: Vec::with_capacity(2) };
        if !form.structured {
            proto::put_simple(&mut reply.head, 0, form.cookie);
            reply.parts.push(Part::Head(0..proto::SIMPLE_HEADER));
            reply.parts.push(Part::Data(0..len));
        } else if len == 0 {
            proto::put_chunk(&mut reply.head, chunk::DONE, chunk::NONE, form.cookie, 0);
        } else if holes {
            for (zero, range) in runs(&data[..len]) {
                reply.chunk(form, offset, zero, range, len);
            }
        } else {
            reply.chunk(form, offset, false, 0..len, len);
        }
        reply.data = Some(data);
        reply
    }

    fn chunk(&mut self, form: Form, offset: u64, zero: bool, range: Range<usize>, total: usize) {
        let flags = if range.end == total { chunk::DONE } else { 0 };
        let start = self.head.len();
        // A read is at most 32 MiB, so lengths fit 32 bits; its end was checked against the size.
        let len = range.len() as u32;
        let (kind, payload) =
            if zero { (chunk::OFFSET_HOLE, 12) } else { (chunk::OFFSET_DATA, 8 + len) };
        proto::put_chunk(&mut self.head, flags, kind, form.cookie, payload);
        self.head.extend_from_slice(&(offset + range.start as u64).to_be_bytes());
        if zero {
            self.head.extend_from_slice(&len.to_be_bytes());
        }
        self.parts.push(Part::Head(start..self.head.len()));
        if !zero {
            self.parts.push(Part::Data(range));
        }
    }

    /// Extents of each metadata context, by its number.
    pub fn block_status(form: Form, contexts: &[(u32, Vec<(u32, u32)>)]) -> Self {
        let runs: usize = contexts.iter().map(|(_, runs)| runs.len()).sum();
        let mut head = Vec::with_capacity(contexts.len() * (proto::CHUNK_HEADER + 4) + runs * 8);
        for (n, (id, runs)) in contexts.iter().enumerate() {
            let flags = if n + 1 == contexts.len() { chunk::DONE } else { 0 };
            let len = 4 + 8 * runs.len() as u32;
            proto::put_chunk(&mut head, flags, chunk::BLOCK_STATUS, form.cookie, len);
            head.extend_from_slice(&id.to_be_bytes());
            for (len, flags) in runs {
                head.extend_from_slice(&len.to_be_bytes());
                head.extend_from_slice(&flags.to_be_bytes());
            }
        }
        Self::of_head(head)
    }

    /// Adds what is to be sent to `out`.
    pub fn slices<'a>(&'a self, out: &mut Vec<IoSlice<'a>>) {
        if self.parts.is_empty() {
            out.push(IoSlice::new(&self.head));
        }
        for part in &self.parts {
            match part {
                Part::Head(r) => out.push(IoSlice::new(&self.head[r.clone()])),
                Part::Data(r) => {
                    out.extend(self.data.as_ref().map(|d| IoSlice::new(&d[r.clone()])));
                }
            }
        }
    }

    /// The buffer the data was in.
    pub fn into_buf(self) -> Option<AlignedBuf> {
        self.data
    }
}

/// A run as an extent of `base:allocation`.
pub(crate) fn extent(run: &Run) -> (u32, u32) {
    let hole = if run.hole { allocation::HOLE } else { 0 };
    let zero = if run.zero { allocation::ZERO } else { 0 };
    (run.len as u32, hole | zero)
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.chunks(128).all(|c| c.iter().fold(0, |a, b| a | b) == 0)
}

/// Cuts `data` into runs of zeroes that are long enough, and the rest.
fn runs(data: &[u8]) -> Vec<(bool, Range<usize>)> {
    let mut out: Vec<(bool, Range<usize>)> = Vec::new();
    let mut at = 0;
    while at < data.len() {
        let mut end = at;
        while end < data.len() && is_zero(&data[end..data.len().min(end + BLOCK)]) {
            end = data.len().min(end + BLOCK);
        }
        let zero = end - at >= MIN_HOLE || (at == 0 && end == data.len());
        if end == at {
            end = data.len().min(at + BLOCK);
        }
        match out.last_mut() {
            Some((false, range)) if !zero => range.end = end,
            _ => out.push((zero, at..end)),
        }
        at = end;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(reply: &Reply) -> Vec<u8> {
        let mut s = Vec::new();
        reply.slices(&mut s);
        s.iter().flat_map(|s| s.to_vec()).collect()
    }

    #[test]
    fn runs_of_zeroes_are_found_when_they_are_long_or_all_there_is() {
        let mut d = vec![0; 300 << 10];
        assert_eq!(runs(&d), [(true, 0..300 << 10)]);
        assert_eq!(runs(&d[..100]), [(true, 0..100)]);
        d[0] = 1;
        assert_eq!(runs(&d), [(false, 0..4096), (true, 4096..300 << 10)]);
        d[100 << 10] = 1;
        let (a, b) = (100 << 10, 104 << 10);
        let all = 300 << 10;
        assert_eq!(runs(&d), [(false, 0..4096), (true, 4096..a), (false, a..b), (true, b..all)]);
        d.truncate(150 << 10);
        assert_eq!(runs(&d)[2..], [(false, a..150 << 10)], "a short run at the end is data");
    }

    #[test]
    fn a_structured_read_says_done_once_and_sends_no_empty_chunk() {
        let form = Form { cookie: 7, structured: true };
        let mut buf = AlignedBuf::zeroed(128 << 10).expect("memory");
        buf[0] = 9;
        let raw = bytes(&Reply::read(form, 512, buf, 128 << 10, true));
        assert_eq!(raw.len(), 20 + 8 + 4096 + 20 + 12);
        assert_eq!(raw[4..8], [0, 0, 0, 1]);
        assert_eq!(raw[4124 + 4..4124 + 8], [0, 1, 0, 2]);
        assert_eq!(raw[4124 + 20..], [0, 0, 0, 0, 0, 0, 0x12, 0, 0, 1, 0xf0, 0]);
        let none = bytes(&Reply::read(form, 0, AlignedBuf::zeroed(1).expect("memory"), 0, true));
        assert_eq!(none[4..8], [0, 1, 0, 0]);
        assert_eq!(none.len(), 20);
    }

    #[test]
    fn errors_take_the_form_of_the_session() {
        let simple = bytes(&Reply::error(Form { cookie: 1, structured: false }, Errno::Inval, "x"));
        assert_eq!(simple, [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 22, 0, 0, 0, 0, 0, 0, 0, 1]);
        let long = "y".repeat(9000);
        let raw = bytes(&Reply::error(Form { cookie: 1, structured: true }, Errno::Io, &long));
        assert_eq!(raw.len(), 20 + 6 + 256);
    }
}
