//! A small blocking client, able to send what no proper client would.
//!
//! Callers: tests of the server, and tools that try it. It checks the server strictly: a reply that breaks the
//! protocol is an error.

use crate::addr::NbdAddr;
use crate::negotiate::BlockSizes;
use crate::proto::{
    self, OptionHeader, OptionReply, Reader, Request, chunk, command, info, option, reply,
};
use bedplate_types::{Error, ErrorKind, Result, ResultExt};
use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Longest reply to an option, and longest chunk besides data, that is believed.
const MAX_PAYLOAD: u32 = 1 << 20;

pub(crate) enum Socket {
    Unix(UnixStream),
    Tcp(TcpStream),
}

/// What to ask for besides the export.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wanted {
    /// Structured replies.
    pub structured: bool,
    /// `base:allocation`, which needs structured replies.
    pub allocation: bool,
}

/// What a server told about the chosen export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// Bytes.
    pub size: u64,
    /// Bits of [`proto::export_flag`].
    pub flags: u16,
    /// Block sizes, where the server named them.
    pub block: Option<BlockSizes>,
    /// The number of `base:allocation`, where it was agreed.
    pub allocation: Option<u32>,
}

/// One whole reply to a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// Which request it answers.
    pub cookie: u64,
    /// 0, or an error number as NBD defines it.
    pub error: u32,
    /// Data of a read, holes filled with zeroes.
    pub data: Vec<u8>,
    /// For each metadata context its extents as (length, flags).
    pub extents: Vec<(u32, Vec<(u32, u32)>)>,
    /// Chunks the reply consisted of; 0 for a simple reply.
    pub chunks: usize,
}

/// A connection to a server.
pub struct Client {
    socket: Socket,
    cookie: u64,
    structured: bool,
    /// Offset and length of reads not answered yet, by cookie.
    reads: HashMap<u64, (u64, u32)>,
}

pub(crate) fn broken(what: &str) -> Error {
    Error::new(ErrorKind::Protocol, format!("the NBD server broke the protocol: {what}"))
}

impl Client {
    /// Connects and exchanges greetings; `flags` are the client's handshake flags (3: as all do today).
    ///
    /// # Errors
    /// Of the connection; `Protocol` when the greeting is none.
    pub fn connect(addr: &NbdAddr, flags: u32) -> Result<Self> {
        let failed = || format!("cannot connect to {addr}");
        let limit = Some(Duration::from_secs(30));
        let socket = match addr {
            NbdAddr::Unix(path) => {
                let s = UnixStream::connect(path).context(failed)?;
                s.set_read_timeout(limit).context(failed)?;
                Socket::Unix(s)
            }
            NbdAddr::Tcp { host, port } => {
                let s = TcpStream::connect((host.as_str(), *port)).context(failed)?;
                s.set_read_timeout(limit).context(failed)?;
                s.set_nodelay(true).context(failed)?;
                Socket::Tcp(s)
            }
        };
        let mut client = Self { socket, cookie: 0, structured: false, reads: HashMap::new() };
        let hello = client.bytes(18)?;
        let mut r = Reader::new(&hello);
        if (r.u64(), r.u64()) != (Some(proto::MAGIC), Some(proto::OPTION_MAGIC)) {
            return Err(broken("a wrong greeting"));
        }
        client.send_raw(&flags.to_be_bytes())?;
        Ok(client)
    }

    /// The bare connection, for [`crate::pipe::Pipe`].
    pub(crate) fn into_socket(self) -> Result<Socket> {
        if self.structured || !self.reads.is_empty() {
            let text = "a pipe needs an NBD connection with simple replies and nothing in flight";
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        Ok(self.socket)
    }

    /// Sends bytes as they are.
    ///
    /// # Errors
    /// Of the connection.
    pub fn send_raw(&mut self, bytes: &[u8]) -> Result<()> {
        let done = match &mut self.socket {
            Socket::Unix(s) => s.write_all(bytes),
            Socket::Tcp(s) => s.write_all(bytes),
        };
        done.context(|| "cannot send to the NBD server".into())
    }

    /// Receives exactly `n` bytes.
    ///
    /// # Errors
    /// Of the connection, also when the server closes it.
    pub fn bytes(&mut self, n: usize) -> Result<Vec<u8>> {
        let mut out = vec![0; n];
        let done = match &mut self.socket {
            Socket::Unix(s) => s.read_exact(&mut out),
            Socket::Tcp(s) => s.read_exact(&mut out),
        };
        done.context(|| "cannot receive from the NBD server".into())?;
        Ok(out)
    }

    /// Waits until the server closes the connection; false when it sends something instead.
    pub fn closed(&mut self) -> bool {
        // A server that closes with unread data resets the connection.
        let mut one = [0];
        let got = match &mut self.socket {
            Socket::Unix(s) => s.read(&mut one),
            Socket::Tcp(s) => s.read(&mut one),
        };
        match got {
            Ok(n) => n == 0,
            Err(e) => e.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }

    /// Sends an option whose header says `len` bytes, whatever `data` has.
    ///
    /// # Errors
    /// Of the connection.
    pub fn send_option(&mut self, option: u32, data: &[u8], len: u32) -> Result<()> {
        let header = OptionHeader { option, len }.encode();
        self.send_raw(&[&header[..], data].concat())
    }

    /// Sends an option and receives all of its replies as (type, data).
    ///
    /// # Errors
    /// Of the connection; `Protocol`.
    pub fn option(&mut self, option: u32, data: &[u8]) -> Result<Vec<(u32, Vec<u8>)>> {
        self.send_option(option, data, data.len() as u32)?;
        let mut all = Vec::new();
        loop {
            let raw = self.bytes(proto::OPTION_REPLY_HEADER)?;
            let head = raw.first_chunk().and_then(OptionReply::parse);
            let head = head.ok_or_else(|| broken("an option reply without its magic"))?;
            if head.option != option || head.len > MAX_PAYLOAD {
                return Err(broken("an option reply that fits nothing"));
            }
            let data = self.bytes(head.len as usize)?;
            all.push((head.kind, data));
            if head.kind == reply::ACK || head.kind & reply::ERROR != 0 {
                return Ok(all);
            }
        }
    }

    /// Chooses the export `name`; `Err` holds the type of the server's error reply in the inner result.
    ///
    /// # Errors
    /// Of the connection; `Protocol`.
    pub fn go(&mut self, name: &[u8], wanted: Wanted) -> Result<Result<Chosen, u32>> {
        if wanted.structured {
            let replies = self.option(option::STRUCTURED_REPLY, &[])?;
            self.structured = replies.iter().any(|r| r.0 == reply::ACK);
        }
        let mut allocation = None;
        if wanted.allocation {
            let query = [&1u32.to_be_bytes()[..], &string(proto::BASE_ALLOCATION)].concat();
            for (kind, data) in
                self.option(option::SET_META_CONTEXT, &[string(name), query].concat())?
            {
                let mut r = Reader::new(&data);
                if kind == reply::META_CONTEXT {
                    allocation = r.u32().filter(|_| r.rest() == proto::BASE_ALLOCATION);
                }
            }
        }
        let mut ask = string(name);
        ask.extend_from_slice(&[0, 1, 0, info::BLOCK_SIZE as u8]);
        let mut chosen = Chosen { size: 0, flags: 0, block: None, allocation };
        for (kind, data) in self.option(option::GO, &ask)? {
            match kind {
                reply::INFO => {
                    chosen.note(&data).ok_or_else(|| broken("short information"))?;
                }
                reply::ACK => {}
                error => return Ok(Err(error)),
            }
        }
        Ok(Ok(chosen))
    }

    /// Sends a request; gives its cookie.
    ///
    /// # Errors
    /// Of the connection.
    pub fn send(
        &mut self,
        command: u16,
        flags: u16,
        offset: u64,
        len: u32,
        payload: &[u8],
    ) -> Result<u64> {
        self.cookie += 1;
        let cookie = self.cookie;
        if command == command::READ {
            self.reads.insert(cookie, (offset, len));
        }
        let header = Request { flags, command, cookie, offset, len }.encode();
        self.send_raw(&[&header[..], payload].concat())?;
        Ok(cookie)
    }

    /// Receives one whole reply, of whatever request.
    ///
    /// # Errors
    /// Of the connection; `Protocol`.
    pub fn receive(&mut self) -> Result<Answer> {
        let mut answer = Answer::default();
        loop {
            let magic = self.u32()?;
            if magic == proto::SIMPLE_REPLY_MAGIC && answer.chunks == 0 {
                answer.error = self.u32()?;
                answer.cookie = self.u64()?;
                if let Some((_, len)) = self.reads.remove(&answer.cookie) {
                    if self.structured && answer.error == 0 {
                        return Err(broken("a simple reply with data"));
                    }
                    if answer.error == 0 {
                        answer.data = self.bytes(len as usize)?;
                    }
                }
                return Ok(answer);
            }
            if magic != proto::STRUCTURED_REPLY_MAGIC || !self.structured {
                return Err(broken("a reply with a wrong magic"));
            }
            if self.chunk(&mut answer)? {
                self.reads.remove(&answer.cookie);
                if answer.error != 0 {
                    answer.data.clear();
                }
                return Ok(answer);
            }
        }
    }

    /// Takes up one chunk; true for the last.
    fn chunk(&mut self, answer: &mut Answer) -> Result<bool> {
        let head = self.bytes(proto::CHUNK_HEADER - 4)?;
        let mut h = Reader::new(&head);
        let short = || broken("a short chunk");
        let (flags, kind) = (h.u16().ok_or_else(short)?, h.u16().ok_or_else(short)?);
        let (cookie, len) = (h.u64().ok_or_else(short)?, h.u32().ok_or_else(short)?);
        if answer.chunks != 0 && answer.cookie != cookie {
            return Err(broken("chunks of two replies mixed"));
        }
        answer.cookie = cookie;
        answer.chunks += 1;
        let read = self.reads.get(&cookie).copied();
        if len > read.map_or(MAX_PAYLOAD, |(_, n)| n.saturating_add(MAX_PAYLOAD)) {
            return Err(broken("a chunk that is too long"));
        }
        let payload = self.bytes(len as usize)?;
        let mut p = Reader::new(&payload);
        match kind {
            chunk::NONE if len == 0 => {}
            chunk::OFFSET_DATA | chunk::OFFSET_HOLE => {
                let (start, total) = read.ok_or_else(|| broken("data for no read"))?;
                let at = p.u64().ok_or_else(short)?.checked_sub(start);
                let hole;
                let bytes = if kind == chunk::OFFSET_HOLE {
                    hole = vec![0; p.u32().ok_or_else(short)?.min(total) as usize];
                    &hole[..]
                } else {
                    p.rest()
                };
                answer.data.resize(total as usize, 0);
                let to =
                    at.and_then(|at| answer.data.get_mut(at as usize..)?.get_mut(..bytes.len()));
                match to {
                    Some(to) if !bytes.is_empty() => to.copy_from_slice(bytes),
                    _ => return Err(broken("data outside of its read")),
                }
            }
            chunk::BLOCK_STATUS => {
                let context = p.u32().ok_or_else(short)?;
                let mut extents = Vec::new();
                while let (Some(len), Some(flags)) = (p.u32(), p.u32()) {
                    extents.push((len, flags));
                }
                answer.extents.push((context, extents));
            }
            kind if kind & 1 << 15 != 0 => answer.error = p.u32().ok_or_else(short)?,
            _ => return Err(broken("a chunk of an unknown type")),
        }
        Ok(flags & chunk::DONE != 0)
    }

    /// Sends a request and receives a reply.
    ///
    /// # Errors
    /// Of the connection; `Protocol`, also when the reply is to another request.
    pub fn call(
        &mut self,
        command: u16,
        flags: u16,
        offset: u64,
        len: u32,
        payload: &[u8],
    ) -> Result<Answer> {
        let cookie = self.send(command, flags, offset, len, payload)?;
        let answer = self.receive()?;
        if answer.cookie == cookie { Ok(answer) } else { Err(broken("a reply to another request")) }
    }

    fn u32(&mut self) -> Result<u32> {
        let raw = self.bytes(4)?;
        Reader::new(&raw).u32().ok_or_else(|| broken("a short number"))
    }

    fn u64(&mut self) -> Result<u64> {
        let raw = self.bytes(8)?;
        Reader::new(&raw).u64().ok_or_else(|| broken("a short number"))
    }
}

impl Chosen {
    /// Takes up one piece of information; `None` when it is too short.
    fn note(&mut self, data: &[u8]) -> Option<()> {
        let mut r = Reader::new(data);
        match r.u16()? {
            info::EXPORT => (self.size, self.flags) = (r.u64()?, r.u16()?),
            info::BLOCK_SIZE => {
                let (minimum, preferred, maximum) = (r.u32()?, r.u32()?, r.u32()?);
                self.block = Some(BlockSizes { minimum, preferred, maximum });
            }
            _ => {}
        }
        Some(())
    }
}

/// A string behind its length, as options hold it.
pub fn string(s: &[u8]) -> Vec<u8> {
    [&(s.len() as u32).to_be_bytes()[..], s].concat()
}
