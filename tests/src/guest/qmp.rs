//! A small client of QEMU's machine protocol: commands, their answers, and waiting for events.

use crate::host;
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long a command may take.
const LIMIT: Duration = Duration::from_secs(30);

/// A connection to QEMU's monitor (or to that of `qemu-storage-daemon`).
#[derive(Debug)]
pub struct Qmp {
    reader: BufReader<UnixStream>,
    writer: UnixStream,
    events: VecDeque<Value>,
}

impl Qmp {
    /// Connects, once the socket is there, and enters command mode.
    pub fn connect(socket: &Path) -> Result<Qmp> {
        let what = format!("the monitor at {}", socket.display());
        let writer = host::wait_for(&what, LIMIT, || Ok(UnixStream::connect(socket).ok()))?;
        let reader = BufReader::new(writer.try_clone()?);
        let mut qmp = Qmp { reader, writer, events: VecDeque::new() };
        qmp.receive(Instant::now() + LIMIT)?;
        qmp.command("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Runs a command; an error when QEMU refuses it.
    pub fn command(&mut self, name: &str, arguments: Value) -> Result<Value> {
        let request = json!({ "execute": name, "arguments": arguments });
        writeln!(self.writer, "{request}")
            .with_context(|| format!("sending {name} to the monitor"))?;
        let end = Instant::now() + LIMIT;
        loop {
            let mut answer =
                self.receive(end).with_context(|| format!("waiting for the answer to {name}"))?;
            if answer.get("event").is_some() {
                self.events.push_back(answer);
            } else if let Some(error) = answer.get("error") {
                bail!("QEMU refused {request}: {error}");
            } else {
                return Ok(answer["return"].take());
            }
        }
    }

    /// Waits for an event of this name, also one that came during earlier commands.
    pub fn wait_event(&mut self, name: &str, limit: Duration) -> Result<Value> {
        let end = Instant::now() + limit;
        loop {
            if let Some(at) = self.events.iter().position(|event| event["event"] == name) {
                return self.events.remove(at).context("the event is gone");
            }
            let message =
                self.receive(end).with_context(|| format!("waiting for the event {name}"))?;
            self.events.push_back(message);
        }
    }

    fn receive(&mut self, end: Instant) -> Result<Value> {
        let left = end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        self.reader.get_ref().set_read_timeout(Some(left))?;
        let mut line = String::new();
        if self.reader.read_line(&mut line).context("the monitor did not answer in time")? == 0 {
            bail!("QEMU closed its monitor");
        }
        serde_json::from_str(&line).with_context(|| format!("the monitor sent {line:?}"))
    }
}
