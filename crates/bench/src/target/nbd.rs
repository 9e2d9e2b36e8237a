//! Exports over NBD: one connection a thread.

use super::Target;
use crate::job::{Job, Op};
use crate::plan::Step;
use crate::port::{Done, Port, Status};
use bedplate_nbd::NbdAddr;
use bedplate_nbd::client::{Client, Wanted};
use bedplate_nbd::pipe::{Pipe, PipeOp};
use bedplate_nbd::proto::export_flag;
use bedplate_types::{Error, ErrorKind, Result};
use std::time::Duration;

/// Flags of a client's handshake: fixed newstyle, no padding.
const HANDSHAKE: u32 = 3;

/// Reads an address or a URI.
pub(super) fn parse(text: &str) -> Result<Target> {
    let (address, export) = if let Some(rest) = text.strip_prefix("nbd+unix:///") {
        let (export, query) = rest.split_once('?').unwrap_or((rest, ""));
        let socket = query.split('&').find_map(|part| part.strip_prefix("socket="));
        (format!("unix:{}", decode(socket.unwrap_or_default())), decode(export))
    } else if let Some(rest) = text.strip_prefix("nbd://") {
        let (host, export) = rest.split_once('/').unwrap_or((rest, ""));
        (format!("nbd://{host}"), decode(export))
    } else {
        (text.strip_prefix("nbd:").unwrap_or(text).to_owned(), String::new())
    };
    let address = match address.parse()? {
        NbdAddr::Unix(path) => format!("unix:{}", path.display()),
        NbdAddr::Tcp { host, port } if host.contains(':') => format!("tcp:[{host}]:{port}"),
        NbdAddr::Tcp { host, port } => format!("tcp:{host}:{port}"),
    };
    Ok(Target::Nbd { address, export })
}

/// Undoes the percent-encoding of a URI.
fn decode(text: &str) -> String {
    let mut out = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let hex = after.get(..2).and_then(|two| std::str::from_utf8(two).ok());
        let byte = hex.and_then(|hex| u8::from_str_radix(hex, 16).ok());
        rest = after;
        match byte.filter(|_| first == b'%') {
            Some(byte) => {
                out.push(byte);
                rest = after.get(2..).unwrap_or_default();
            }
            None => out.push(first),
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// Connects every thread of a job; gives the disk's size too.
pub(crate) fn open(job: &Job, address: &str, export: &str) -> Result<(Vec<NbdPort>, u64)> {
    let addr: NbdAddr = address.parse()?;
    let (mut ports, mut size) = (Vec::new(), u64::MAX);
    for _ in 0..job.threads {
        let mut client = Client::connect(&addr, HANDSHAKE)?;
        let chosen = client.go(export.as_bytes(), Wanted::default())?.map_err(|_| {
            let text = format!("the NBD server at {addr} has no export named '{export}'");
            Error::new(ErrorKind::NotFound, text)
        })?;
        let lacks = |flag, what: &str| {
            if chosen.flags & flag != 0 {
                return Ok(());
            }
            let text = format!("the NBD server at {addr} offers no {what} for this export");
            Err(Error::new(ErrorKind::Unsupported, text))
        };
        if job.changes() && chosen.flags & export_flag::READ_ONLY != 0 {
            let text = format!("the NBD export at {addr} is read-only");
            return Err(Error::new(ErrorKind::ReadOnly, text));
        }
        if job.mix.trim > 0 {
            lacks(export_flag::SEND_TRIM, "trim")?;
        }
        size = size.min(chosen.size);
        let bytes = usize::try_from(job.sizes.largest()).unwrap_or(usize::MAX);
        let flush = chosen.flags & export_flag::SEND_FLUSH != 0;
        let pipe = Pipe::new(client, job.depth as usize, bytes)?;
        ports.push(NbdPort { pipe, flush, skipped: Vec::new(), in_flight: 0 });
    }
    Ok((ports, size))
}

/// One connection.
pub(crate) struct NbdPort {
    pipe: Pipe,
    /// The server has flushes; without, it has no cache to flush.
    flush: bool,
    skipped: Vec<usize>,
    in_flight: usize,
}

impl Port for NbdPort {
    fn put(&mut self, slot: usize, data: &[u8]) -> Result<()> {
        self.pipe.put(slot, data)
    }

    fn get(&mut self, slot: usize, data: &mut [u8]) -> Result<()> {
        self.pipe.get(slot, data)
    }

    fn push(&mut self, slot: usize, step: Step) -> Result<()> {
        let op = match step.op {
            Op::Read => PipeOp::Read,
            Op::Write => PipeOp::Write,
            Op::Trim => PipeOp::Trim,
            Op::Flush if !self.flush => {
                self.skipped.push(slot);
                return Ok(());
            }
            Op::Flush => PipeOp::Flush,
        };
        self.in_flight += 1;
        self.pipe.push(slot, op, step.at, step.len)
    }

    fn exchange(
        &mut self,
        limit: Option<Duration>,
        most: usize,
        done: &mut Vec<Done>,
    ) -> Result<()> {
        done.extend(self.skipped.drain(..).map(|slot| Done { slot, status: Status::Good }));
        if self.in_flight == 0 {
            return Ok(());
        }
        self.pipe.exchange(if done.is_empty() { limit } else { Some(Duration::ZERO) })?;
        while done.len() < most
            && let Some((slot, error)) = self.pipe.take()
        {
            self.in_flight = self.in_flight.saturating_sub(1);
            let status = if error == 0 { Status::Good } else { Status::Errno(error as i32) };
            done.push(Done { slot, status });
        }
        Ok(())
    }
}
