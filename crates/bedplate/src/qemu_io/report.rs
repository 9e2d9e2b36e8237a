//! What is printed: to the standard output what scripts compare, to the standard error what is for people only.

use super::numbers;
use bedplate_runtime::buf::IoVec;
use bedplate_types::{Error, ErrorKind};
use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The standard output could not be written to.
static UNWRITTEN: AtomicBool = AtomicBool::new(false);

/// True when something that was to be printed got lost.
pub fn lost() -> bool {
    UNWRITTEN.load(Ordering::Relaxed)
}

/// Prints as it is, at once: the process may be killed by the next command.
pub fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    if out.write_all(text.as_bytes()).and_then(|()| out.flush()).is_err() {
        UNWRITTEN.store(true, Ordering::Relaxed);
    }
}

/// Prints a line.
pub fn say(text: &str) {
    print(&format!("{text}\n"));
}

/// Prints a line on the standard error; without control characters, since names may hold some.
pub fn complain(text: &str) {
    let mut out = std::io::stderr().lock();
    // Nobody is left to be told when this fails.
    let _ = writeln!(out, "{}", crate::harmless(text));
}

/// A failed request: one line as qemu-io prints it, and the whole story on the standard error.
pub fn failed(what: &str, e: &Error) {
    say(&format!("{what} failed: {}", system_words(e)));
    // Beyond the end is beyond the end; that line has said it all.
    if e.kind() != ErrorKind::OutOfRange {
        complain(&format!("qemu-io: {e:#}"));
    }
}

/// The operating system's words for an error, as C programs print them.
pub fn system_words(e: &Error) -> String {
    let errno = e.raw_errno().unwrap_or_else(|| {
        use rustix::io::Errno;
        match e.kind() {
            ErrorKind::InvalidInput => Errno::INVAL,
            ErrorKind::Unsupported => Errno::NOTSUP,
            ErrorKind::NoSpace => Errno::NOSPC,
            ErrorKind::ReadOnly | ErrorKind::Denied => Errno::PERM,
            ErrorKind::NotFound => Errno::NOENT,
            ErrorKind::Limit => Errno::FBIG,
            _ => Errno::IO,
        }
        .raw_os_error()
    });
    words_of(errno)
}

/// The operating system's words for an error number.
pub fn words_of(errno: i32) -> String {
    let text = std::io::Error::from_raw_os_error(errno).to_string();
    match text.rfind(" (os error") {
        Some(at) => text.get(..at).unwrap_or(&text).to_owned(),
        None => text,
    }
}

/// What a request moved, and how fast.
pub struct Report {
    /// "read", "wrote" or "discard".
    pub verb: &'static str,
    /// Where it began.
    pub at: u64,
    /// Bytes asked for; all of them were moved.
    pub bytes: u64,
    /// For programs.
    pub terse: bool,
    /// From the request to its end.
    pub time: Duration,
}

impl Report {
    /// Prints it.
    pub fn print(&self) {
        let seconds = self.time.as_secs_f64().max(1e-9);
        let (bytes, rate, ops) = (self.bytes as f64, self.bytes as f64 / seconds, 1.0 / seconds);
        if self.terse {
            let time = numbers::fixed_time(self.time);
            say(&format!("{},1,{time},{rate:.3},{ops:.3}", self.bytes));
        } else {
            say(&format!("{} {b}/{b} bytes at offset {}", self.verb, self.at, b = self.bytes));
            say(&format!(
                "{}, 1 ops; {} ({}/sec and {ops:.4} ops/sec)",
                numbers::amount(bytes),
                numbers::time(self.time),
                numbers::amount(rate)
            ));
        }
    }
}

/// Prints memory, sixteen bytes a line.
pub fn dump(at: u64, buf: &IoVec) {
    let mut line = [0; 16];
    let mut done = 0;
    let mut out = String::new();
    while done < buf.len() {
        let n = buf.slice(done, line.len()).copy_to(0, &mut line);
        let Some(bytes) = line.get(..n).filter(|b| !b.is_empty()) else { break };
        let _ = write!(out, "{:08x}:  ", at.saturating_add(done as u64));
        for byte in bytes {
            let _ = write!(out, "{byte:02x} ");
        }
        out.push(' ');
        out.extend(
            bytes.iter().map(|b| if b.is_ascii_alphanumeric() { char::from(*b) } else { '.' }),
        );
        out.push('\n');
        done += n;
        if out.len() > 1 << 16 {
            print(&std::mem::take(&mut out));
        }
    }
    print(&out);
}
