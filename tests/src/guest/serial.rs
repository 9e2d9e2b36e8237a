//! The host's end of the guest's serial line.
//!
//! The guest's agent reads lines: `data BASE64` adds to a script, `run N` runs it and answers with its output and a last line
//! `GUEST: done N CODE`, `off` powers off. So a script of any length and content can be sent, and nothing that a program in the
//! guest reads can swallow the next one.
//!
//! Invariant: everything that came from the guest is in the log file, also what nobody waited for.

use anyhow::{Context, Result, bail};
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{ChildStdin, ChildStdout};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// The agent's shell holds lines of this many characters without trouble.
const CHUNK: usize = 1000;

/// For the guest to take one piece of a script.
const DATA_LIMIT: Duration = Duration::from_secs(60);

/// What a script in the guest did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// Its exit code.
    pub code: i32,
    /// Its standard output and error.
    pub output: String,
}

#[derive(Debug)]
pub(super) struct Serial {
    input: ChildStdin,
    lines: Receiver<String>,
    number: u32,
}

impl Serial {
    pub(super) fn new(input: ChildStdin, output: ChildStdout, log: &Path) -> Result<Serial> {
        let mut log = File::create(log).with_context(|| log.display().to_string())?;
        let (sender, lines) = channel();
        let mut output = output;
        std::thread::Builder::new().name("serial".to_owned()).spawn(move || {
            let (mut piece, mut line) = ([0; 4096], Vec::new());
            while let Ok(count @ 1..) = output.read(&mut piece) {
                // The log is for people; a full disk must not stop the guest.
                let _ = log.write_all(&piece[..count]);
                for &byte in &piece[..count] {
                    match byte {
                        b'\n' => {
                            let text =
                                String::from_utf8_lossy(&line).trim_end_matches('\r').to_owned();
                            line.clear();
                            if sender.send(text).is_err() {
                                return;
                            }
                        }
                        _ => line.push(byte),
                    }
                }
            }
        })?;
        Ok(Serial { input, lines, number: 0 })
    }

    /// Waits for a line that starts with `start`; returns what came before and the rest of that line.
    pub(super) fn wait_line(&mut self, start: &str, limit: Duration) -> Result<(String, String)> {
        let (end, mut before) = (Instant::now() + limit, String::new());
        loop {
            match self.lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(line) => match line.strip_prefix(start) {
                    Some(rest) => return Ok((before, rest.trim().to_owned())),
                    None => {
                        before.push_str(&line);
                        before.push('\n');
                    }
                },
                Err(RecvTimeoutError::Timeout) => {
                    bail!(
                        "the guest did not say {start:?} within {} s; it said:\n{}",
                        limit.as_secs(),
                        tail(&before)
                    )
                }
                Err(RecvTimeoutError::Disconnected) => {
                    bail!(
                        "QEMU ended before the guest said {start:?}; last came:\n{}",
                        tail(&before)
                    )
                }
            }
        }
    }

    /// Sends a script and lets it run.
    pub(super) fn start(&mut self, script: &str) -> Result<()> {
        self.number += 1;
        for chunk in base64(script.as_bytes()).as_bytes().chunks(CHUNK) {
            self.send(&format!("data {}", String::from_utf8_lossy(chunk)))?;
            // Waiting for each piece keeps the line's small buffer from overflowing.
            self.wait_line("GUEST: data", DATA_LIMIT)?;
        }
        self.send(&format!("run {}", self.number))
    }

    /// Waits for the end of the script started last.
    pub(super) fn finish(&mut self, limit: Duration) -> Result<Reply> {
        let (output, rest) = self.wait_line(&format!("GUEST: done {} ", self.number), limit)?;
        let code =
            rest.parse().with_context(|| format!("the guest's exit code {rest:?} is no number"))?;
        Ok(Reply { code, output: output.trim_end().to_owned() })
    }

    pub(super) fn send(&mut self, line: &str) -> Result<()> {
        writeln!(self.input, "{line}")
            .and_then(|()| self.input.flush())
            .context("the guest's serial line is closed")
    }
}

fn tail(text: &str) -> &str {
    let start = text.len().saturating_sub(2000);
    let start = (start..=text.len()).find(|&at| text.is_char_boundary(at)).unwrap_or(0);
    &text[start..]
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let word = three.iter().fold(0_u32, |word, &byte| word << 8 | u32::from(byte))
            << (8 * (3 - three.len()));
        for place in 0..4 {
            let digit = DIGITS[(word >> (18 - 6 * place)) as usize & 63];
            text.push(if place <= three.len() { char::from(digit) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_pads_every_remainder() {
        let cases = [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("\u{ff}?>", "w78/Pg=="),
        ];
        for (plain, encoded) in cases {
            assert_eq!(base64(plain.as_bytes()), encoded);
        }
    }

    #[test]
    fn the_tail_of_a_long_text_starts_at_a_character() {
        let text = "ü".repeat(1500) + "x";
        assert_eq!(tail(&text).chars().last(), Some('x'));
        assert!(tail(&text).len() <= 2000);
    }
}
