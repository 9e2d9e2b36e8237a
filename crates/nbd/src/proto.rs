//! The numbers of the NBD protocol, and its headers parsed and encoded.
//!
//! Callers: negotiation, transmission and the client. Pure: no I/O and no allocation whose size a peer decides.
//! Every multi-byte number on the wire is big-endian.

/// First eight bytes a server sends: "NBDMAGIC".
pub const MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Second eight bytes of a newstyle server, and the start of every option: "IHAVEOPT".
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Start of every reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Start of every request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Start of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Start of a chunk of a structured reply.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// Bytes of an option's header: magic, option, length.
pub const OPTION_HEADER: usize = 16;
/// Bytes of an option reply's header: magic, option, type, length.
pub const OPTION_REPLY_HEADER: usize = 20;
/// Bytes of a request's header.
pub const REQUEST_HEADER: usize = 28;
/// Bytes of a simple reply's header.
pub const SIMPLE_HEADER: usize = 16;
/// Bytes of a structured reply chunk's header.
pub const CHUNK_HEADER: usize = 20;

/// Handshake flags, from the server (16 bits) and from the client (32 bits); the two have the same meaning.
pub mod handshake {
    /// Fixed newstyle: options get replies.
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    /// The 124 zero bytes after EXPORT_NAME are left out.
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// Options of the negotiation.
pub mod option {
    /// Choose an export and go on to transmission; no error reply is possible.
    pub const EXPORT_NAME: u32 = 1;
    /// End the session.
    pub const ABORT: u32 = 2;
    /// List the exports.
    pub const LIST: u32 = 3;
    /// Change to TLS.
    pub const STARTTLS: u32 = 5;
    /// Ask about an export.
    pub const INFO: u32 = 6;
    /// Choose an export and go on to transmission.
    pub const GO: u32 = 7;
    /// Use structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// List metadata contexts.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Choose metadata contexts.
    pub const SET_META_CONTEXT: u32 = 10;
    /// Use 64-bit headers.
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Types of replies to options.
pub mod reply {
    /// Done.
    pub const ACK: u32 = 1;
    /// One export of a list.
    pub const SERVER: u32 = 2;
    /// One piece of information on an export.
    pub const INFO: u32 = 3;
    /// One metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// Set in the type of every error.
    pub const ERROR: u32 = 1 << 31;
    /// The option is not known.
    pub const ERR_UNSUP: u32 = ERROR | 1;
    /// Refused by the operator's policy.
    pub const ERR_POLICY: u32 = ERROR | 2;
    /// The option's data is wrong.
    pub const ERR_INVALID: u32 = ERROR | 3;
    /// There is no such export.
    pub const ERR_UNKNOWN: u32 = ERROR | 6;
    /// The server is stopping.
    pub const ERR_SHUTDOWN: u32 = ERROR | 7;
    /// The option's data is too long.
    pub const ERR_TOO_BIG: u32 = ERROR | 9;
}

/// Pieces of information in replies to INFO and GO.
pub mod info {
    /// Size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// The canonical name.
    pub const NAME: u16 = 1;
    /// A description for people.
    pub const DESCRIPTION: u16 = 2;
    /// Minimum, preferred and maximum block size.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags: what an export can do.
pub mod export_flag {
    /// The flags are valid.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// Writes are refused.
    pub const READ_ONLY: u16 = 1 << 1;
    /// FLUSH is understood.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// The FUA flag is understood.
    pub const SEND_FUA: u16 = 1 << 3;
    /// TRIM is understood.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// WRITE_ZEROES is understood.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// The DF flag is understood.
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush on one connection covers what was written on all.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// CACHE is understood.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// The FAST_ZERO flag is understood.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Requests of the transmission.
pub mod command {
    /// Read bytes.
    pub const READ: u16 = 0;
    /// Write bytes; the payload follows the header.
    pub const WRITE: u16 = 1;
    /// End the session.
    pub const DISC: u16 = 2;
    /// Make everything completed before durable.
    pub const FLUSH: u16 = 3;
    /// Give space back.
    pub const TRIM: u16 = 4;
    /// Read ahead.
    pub const CACHE: u16 = 5;
    /// Make a range read as zeroes.
    pub const WRITE_ZEROES: u16 = 6;
    /// Ask what a range is made of.
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of requests.
pub mod command_flag {
    /// Durable before the reply.
    pub const FUA: u16 = 1 << 0;
    /// Zeroes keep their space allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// Data of a read comes in one piece.
    pub const DF: u16 = 1 << 2;
    /// One extent is enough.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Fail rather than write zeroes slowly.
    pub const FAST_ZERO: u16 = 1 << 4;
}

/// Types of structured reply chunks.
pub mod chunk {
    /// Set in the flags of a reply's last chunk.
    pub const DONE: u16 = 1 << 0;
    /// No payload.
    pub const NONE: u16 = 0;
    /// Bytes at an offset.
    pub const OFFSET_DATA: u16 = 1;
    /// Zeroes at an offset.
    pub const OFFSET_HOLE: u16 = 2;
    /// Extents of one metadata context.
    pub const BLOCK_STATUS: u16 = 5;
    /// An error.
    pub const ERROR: u16 = 1 << 15 | 1;
}

/// The name of the metadata context that tells holes from data.
pub const BASE_ALLOCATION: &[u8] = b"base:allocation";
/// Flags of an extent in `base:allocation`.
pub mod allocation {
    /// The extent takes no space.
    pub const HOLE: u32 = 1 << 0;
    /// The extent reads as zeroes.
    pub const ZERO: u32 = 1 << 1;
}

/// An error number in the meaning NBD gives it, which does not depend on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Errno {
    /// Not permitted: a write to a read-only export.
    Perm = 1,
    /// An I/O error.
    Io = 5,
    /// No memory.
    NoMem = 12,
    /// The request can't be right.
    Inval = 22,
    /// No space, or a write past the end.
    NoSpc = 28,
    /// The data does not fit into one piece.
    Overflow = 75,
    /// A fast zeroing is not possible.
    NotSup = 95,
    /// The server is stopping.
    Shutdown = 108,
}

/// The header of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionHeader {
    /// Which option, one of [`option`] or unknown.
    pub option: u32,
    /// Bytes of data that follow.
    pub len: u32,
}

impl OptionHeader {
    /// Reads a header; `None` when the magic is wrong.
    pub fn parse(raw: &[u8; OPTION_HEADER]) -> Option<Self> {
        let mut r = Reader::new(raw);
        let magic = r.u64()?;
        let header = Self { option: r.u32()?, len: r.u32()? };
        (magic == OPTION_MAGIC).then_some(header)
    }

    /// The header as bytes.
    pub fn encode(self) -> [u8; OPTION_HEADER] {
        let mut out = [0; OPTION_HEADER];
        out[..8].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
        out[8..12].copy_from_slice(&self.option.to_be_bytes());
        out[12..].copy_from_slice(&self.len.to_be_bytes());
        out
    }
}

/// The header of a reply to an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionReply {
    /// The option that is answered.
    pub option: u32,
    /// One of [`reply`].
    pub kind: u32,
    /// Bytes of data that follow.
    pub len: u32,
}

impl OptionReply {
    /// Reads a header; `None` when the magic is wrong.
    pub fn parse(raw: &[u8; OPTION_REPLY_HEADER]) -> Option<Self> {
        let mut r = Reader::new(raw);
        let magic = r.u64()?;
        let header = Self { option: r.u32()?, kind: r.u32()?, len: r.u32()? };
        (magic == OPTION_REPLY_MAGIC).then_some(header)
    }

    /// The header as bytes.
    pub fn encode(self) -> [u8; OPTION_REPLY_HEADER] {
        let mut out = [0; OPTION_REPLY_HEADER];
        out[..8].copy_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
        out[8..12].copy_from_slice(&self.option.to_be_bytes());
        out[12..16].copy_from_slice(&self.kind.to_be_bytes());
        out[16..].copy_from_slice(&self.len.to_be_bytes());
        out
    }
}

/// The header of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Request {
    /// Bits of [`command_flag`], or unknown ones.
    pub flags: u16,
    /// One of [`command`], or unknown.
    pub command: u16,
    /// What the client knows the request by.
    pub cookie: u64,
    /// First byte concerned.
    pub offset: u64,
    /// Bytes concerned.
    pub len: u32,
}

impl Request {
    /// Reads a header; `None` when the magic is wrong.
    pub fn parse(raw: &[u8; REQUEST_HEADER]) -> Option<Self> {
        let mut r = Reader::new(raw);
        let magic = r.u32()?;
        let request = Self {
            flags: r.u16()?,
            command: r.u16()?,
            cookie: r.u64()?,
            offset: r.u64()?,
            len: r.u32()?,
        };
        (magic == REQUEST_MAGIC).then_some(request)
    }

    /// The header as bytes.
    pub fn encode(self) -> [u8; REQUEST_HEADER] {
        let mut out = [0; REQUEST_HEADER];
        out[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        out[4..6].copy_from_slice(&self.flags.to_be_bytes());
        out[6..8].copy_from_slice(&self.command.to_be_bytes());
        out[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        out[16..24].copy_from_slice(&self.offset.to_be_bytes());
        out[24..].copy_from_slice(&self.len.to_be_bytes());
        out
    }

    /// True when all bits of `flag` are set.
    pub fn has(self, flag: u16) -> bool {
        self.flags & flag == flag
    }
}

/// Appends the header of a simple reply.
pub fn put_simple(out: &mut Vec<u8>, error: u32, cookie: u64) {
    out.extend_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&error.to_be_bytes());
    out.extend_from_slice(&cookie.to_be_bytes());
}

/// Appends the header of a structured reply chunk whose payload has `len` bytes.
pub fn put_chunk(out: &mut Vec<u8>, flags: u16, kind: u16, cookie: u64, len: u32) {
    out.extend_from_slice(&STRUCTURED_REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&flags.to_be_bytes());
    out.extend_from_slice(&kind.to_be_bytes());
    out.extend_from_slice(&cookie.to_be_bytes());
    out.extend_from_slice(&len.to_be_bytes());
}

/// Reads numbers and strings from bytes a peer sent; every call is `None` past the end.
#[derive(Clone, Copy, Debug)]
pub struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Reads from `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// The next `n` bytes.
    pub fn bytes(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(n)?;
        self.0 = tail;
        Some(head)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    /// The next 16 bits.
    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    /// The next 32 bits.
    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    /// The next 64 bits.
    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// A string behind its 32-bit length.
    pub fn string(&mut self) -> Option<&'a [u8]> {
        let len = self.u32()?;
        self.bytes(usize::try_from(len).ok()?)
    }

    /// True when everything was read.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The bytes not read yet.
    pub fn rest(&self) -> &'a [u8] {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_read_back_as_they_were_written_and_a_wrong_magic_is_refused() {
        let q = Request { flags: 5, command: 7, cookie: 9, offset: u64::MAX, len: 3 };
        let mut raw = q.encode();
        assert_eq!(Request::parse(&raw), Some(q));
        raw[0] ^= 1;
        assert_eq!(Request::parse(&raw), None);

        let o = OptionHeader { option: option::GO, len: 77 };
        let mut raw = o.encode();
        assert_eq!(&raw[..8], b"IHAVEOPT");
        assert_eq!(OptionHeader::parse(&raw), Some(o));
        raw[7] ^= 1;
        assert_eq!(OptionHeader::parse(&raw), None);

        let r = OptionReply { option: 1, kind: reply::ERR_UNSUP, len: 4 };
        assert_eq!(OptionReply::parse(&r.encode()), Some(r));
    }

    #[test]
    fn a_reader_never_goes_past_the_end_and_takes_nothing_when_short() {
        let mut r = Reader::new(&[0, 0, 0, 9, 1]);
        let before = r;
        assert_eq!(r.u64(), None);
        assert_eq!(r.rest(), before.rest());
        assert_eq!(r.string(), None);
        assert_eq!(Reader::new(&[0, 0, 0, 1, 7, 8]).string(), Some(&[7][..]));
    }
}
