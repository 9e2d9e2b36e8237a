//! Many requests in flight on one connection: the client for load generators.
//!
//! Callers: the load engine (`bedplate-bench`). Made from a [`Client`] that has chosen an export with simple replies. The socket
//! does not block: sending and receiving go on together, so that neither side waits for the other with full buffers.
//!
//! Invariant: a request's cookie is its slot, and a reply to a slot that is not in flight is an error.

use crate::client::{Client, Socket, broken};
use crate::proto::{self, Reader, Request, command};
use bedplate_types::{Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

/// Bytes received at a time.
const CHUNK: usize = 256 << 10;
/// Bytes of a simple reply before its data.
const REPLY: usize = 16;
/// A server that answers nothing for so long hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PipeOp {
    /// Reads into the slot's memory.
    Read,
    /// Writes from the slot's memory.
    Write,
    /// Makes completed writes durable.
    Flush,
    /// Gives space back.
    Trim,
}

/// A reply's data that is still coming.
#[derive(Clone, Copy, Debug)]
struct Coming {
    slot: usize,
    got: usize,
    len: usize,
}

/// A connection with slots.
pub struct Pipe {
    socket: Socket,
    out: Vec<u8>,
    sent: usize,
    input: Vec<u8>,
    /// The part of `input` that is not parsed yet.
    fresh: (usize, usize),
    memory: Vec<Vec<u8>>,
    flying: Vec<Option<(PipeOp, u32)>>,
    in_flight: usize,
    coming: Option<Coming>,
    done: VecDeque<(usize, u32)>,
}

impl Pipe {
    /// Takes a connection on which an export was chosen, for `slots` requests of at most `bytes` bytes each.
    ///
    /// # Errors
    /// `InvalidInput` when structured replies were agreed on; those of the socket.
    pub fn new(client: Client, slots: usize, bytes: usize) -> Result<Self> {
        let socket = client.into_socket()?;
        let switched = match &socket {
            Socket::Unix(s) => s.set_nonblocking(true),
            Socket::Tcp(s) => s.set_nonblocking(true),
        };
        switched.map_err(|e| Error::io("cannot switch the NBD connection over", e))?;
        Ok(Self {
            socket,
            out: Vec::new(),
            sent: 0,
            input: vec![0; CHUNK],
            fresh: (0, 0),
            memory: vec![vec![0; bytes]; slots],
            flying: vec![None; slots],
            in_flight: 0,
            coming: None,
            done: VecDeque::new(),
        })
    }

    fn free(&mut self, slot: usize, len: usize) -> Result<&mut [u8]> {
        let busy = self.flying.get(slot).is_none_or(Option::is_some);
        let place = self.memory.get_mut(slot).and_then(|memory| memory.get_mut(..len));
        place.filter(|_| !busy).ok_or_else(|| {
            let text = format!("slot {slot} is in use, or too small for {len} bytes");
            Error::new(ErrorKind::InvalidInput, text)
        })
    }

    /// Fills the start of a slot's memory.
    ///
    /// # Errors
    /// `InvalidInput` when the slot is in flight or too small.
    pub fn put(&mut self, slot: usize, data: &[u8]) -> Result<()> {
        self.free(slot, data.len())?.copy_from_slice(data);
        Ok(())
    }

    /// Copies the start of a slot's memory.
    ///
    /// # Errors
    /// As [`Self::put`].
    pub fn get(&mut self, slot: usize, data: &mut [u8]) -> Result<()> {
        data.copy_from_slice(self.free(slot, data.len())?);
        Ok(())
    }

    /// Prepares a request; [`Self::exchange`] sends it.
    ///
    /// # Errors
    /// As [`Self::put`].
    pub fn push(&mut self, slot: usize, op: PipeOp, at: u64, len: u32) -> Result<()> {
        let room = if matches!(op, PipeOp::Read | PipeOp::Write) { len as usize } else { 0 };
        self.free(slot, room)?;
        let command = match op {
            PipeOp::Read => command::READ,
            PipeOp::Write => command::WRITE,
            PipeOp::Flush => command::FLUSH,
            PipeOp::Trim => command::TRIM,
        };
        let (offset, len_sent) = if op == PipeOp::Flush { (0, 0) } else { (at, len) };
        let request = Request { flags: 0, command, cookie: slot as u64, offset, len: len_sent };
        self.out.extend_from_slice(&request.encode());
        if let (PipeOp::Write, Some(memory)) = (op, self.memory.get(slot)) {
            self.out.extend_from_slice(memory.get(..room).unwrap_or_default());
        }
        if let Some(flying) = self.flying.get_mut(slot) {
            *flying = Some((op, len));
        }
        self.in_flight += 1;
        Ok(())
    }

    /// Sends what was pushed and waits until a reply is there for [`Self::take`], at most `limit` (`None`: for ever).
    ///
    /// # Errors
    /// Of the connection; `Protocol`; `Cancelled` when the server hangs.
    pub fn exchange(&mut self, limit: Option<Duration>) -> Result<()> {
        let mut begin = None;
        // One alone is never answered yet when it has just been sent.
        let mut look = self.in_flight > 1;
        loop {
            self.send()?;
            if look {
                self.receive()?;
            }
            if !self.done.is_empty() {
                return Ok(());
            }
            let waited = begin.get_or_insert_with(Instant::now).elapsed();
            let left = limit.unwrap_or(PATIENCE).saturating_sub(waited);
            if left.is_zero() && look {
                return match limit {
                    Some(_) => Ok(()),
                    None => Err(Error::new(ErrorKind::Cancelled, "the NBD server hangs")),
                };
            }
            self.sleep(left)?;
            look = true;
        }
    }

    /// Takes a completed request: its slot, and 0 or the error number that NBD defines.
    pub fn take(&mut self) -> Option<(usize, u32)> {
        self.done.pop_front()
    }

    fn sleep(&self, limit: Duration) -> Result<()> {
        let limit = Timespec {
            tv_sec: limit.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: i64::from(limit.subsec_nanos()) as _,
        };
        let mut flags = PollFlags::IN;
        flags.set(PollFlags::OUT, self.sent < self.out.len());
        match poll(&mut [PollFd::from_borrowed_fd(self.fd(), flags)], Some(&limit)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(e) => Err(Error::io("cannot wait for the NBD server", e.into())),
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        match &self.socket {
            Socket::Unix(s) => s.as_fd(),
            Socket::Tcp(s) => s.as_fd(),
        }
    }

    /// Sends as much as the socket takes.
    fn send(&mut self) -> Result<()> {
        while self.sent < self.out.len() {
            let rest = self.out.get(self.sent..).unwrap_or_default();
            let wrote = match &mut self.socket {
                Socket::Unix(s) => s.write(rest),
                Socket::Tcp(s) => s.write(rest),
            };
            match wrote {
                Ok(n) => self.sent += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(Error::io("cannot send to the NBD server", e)),
            }
        }
        self.out.clear();
        self.sent = 0;
        Ok(())
    }

    /// Receives and parses what is there.
    fn receive(&mut self) -> Result<()> {
        loop {
            let (start, end) = self.fresh;
            self.input.copy_within(start..end, 0);
            let kept = end - start;
            let room = self.input.get_mut(kept..).unwrap_or_default();
            let full = room.len();
            let read = match &mut self.socket {
                Socket::Unix(s) => s.read(room),
                Socket::Tcp(s) => s.read(room),
            };
            let n = match read {
                Ok(0) => return Err(broken("it closed the connection")),
                Ok(n) => n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => 0,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(Error::io("cannot receive from the NBD server", e)),
            };
            self.fresh = (0, kept + n);
            self.parse()?;
            if n < full {
                return Ok(());
            }
        }
    }

    fn parse(&mut self) -> Result<()> {
        loop {
            let (start, end) = self.fresh;
            if let Some(coming) = &mut self.coming {
                let n = (coming.len - coming.got).min(end - start);
                let to = self.memory.get_mut(coming.slot);
                let to = to.and_then(|memory| memory.get_mut(coming.got..coming.got + n));
                if let (Some(to), Some(from)) = (to, self.input.get(start..start + n)) {
                    to.copy_from_slice(from);
                }
                coming.got += n;
                self.fresh.0 = start + n;
                if coming.got < coming.len {
                    return Ok(());
                }
                let slot = coming.slot;
                self.coming = None;
                self.finish(slot, 0);
                continue;
            }
            if end - start < REPLY {
                return Ok(());
            }
            let mut r = Reader::new(self.input.get(start..start + REPLY).unwrap_or_default());
            let (Some(magic), Some(error), Some(cookie)) = (r.u32(), r.u32(), r.u64()) else {
                return Err(broken("a short reply"));
            };
            if magic != proto::SIMPLE_REPLY_MAGIC {
                return Err(broken("a reply with a wrong magic"));
            }
            let slot = usize::try_from(cookie).unwrap_or(usize::MAX);
            let Some(&Some((op, len))) = self.flying.get(slot) else {
                return Err(broken("a reply to no request"));
            };
            self.fresh.0 = start + REPLY;
            if op == PipeOp::Read && error == 0 {
                self.coming = Some(Coming { slot, got: 0, len: len as usize });
            } else {
                self.finish(slot, error);
            }
        }
    }

    fn finish(&mut self, slot: usize, error: u32) {
        if let Some(flying) = self.flying.get_mut(slot) {
            *flying = None;
        }
        self.in_flight = self.in_flight.saturating_sub(1);
        self.done.push_back((slot, error));
    }
}
