//! `read`, `write`, `readv`, `writev`, `discard`, `flush`.

use super::args::{Options, letters};
use super::commands::{Call, Failed, Ran, fail, fail_aloud};
use super::device::{Device, Zeroing};
use super::numbers::{self, pattern};
use super::report::{self, Report, complain, failed};
use super::session::Session;
use bedplate_runtime::buf::IoVec;
use std::time::Instant;

/// Bytes of one request, at most.
pub const LONGEST: u64 = (i32::MAX as u64) & !511;
/// What is written when nothing else was asked for.
pub const FILLER: u8 = 0xcd;

/// What the options of a request say.
#[derive(Default)]
pub struct Flags {
    /// The pattern to write, or to compare with.
    pub pattern: Option<u8>,
    /// Print the figures for programs.
    pub terse: bool,
    /// Print no figures.
    pub quiet: bool,
    /// Print the data.
    pub verbose: bool,
    /// Durable when done.
    pub fua: bool,
    /// Write zeroes.
    pub zero: bool,
    /// The space may be given back.
    pub unmap: bool,
    /// Fail rather than write zeroes as data.
    pub fast_only: bool,
    /// Compressed clusters.
    pub compress: bool,
    /// The space for VM state.
    pub vm_state: bool,
    /// A file with data to write.
    pub source: Option<String>,
    /// Where the comparison begins.
    pub from: Option<u64>,
    /// How many bytes are compared.
    pub count: Option<u64>,
    /// The request is to be called invalid.
    pub invalid: bool,
}

impl Flags {
    /// Reads the options in `accepted` (as getopt spells them); returns them and the other words.
    pub fn parse<'a>(call: &'a Call<'_>, accepted: &str) -> Result<(Self, Vec<&'a str>), Failed> {
        let specs = letters(accepted);
        // The words live as long as the call; the letters need not.
        let mut options = Options::new(&specs, call.words);
        let mut flags = Self::default();
        let reading = call.command.name.contains("read");
        for option in options.by_ref() {
            let option = option.or_else(|e| call.bad_option(&e))?;
            match option.key {
                'P' => flags.pattern = Some(pattern(&option.value).or_else(fail)?),
                'C' => flags.terse = true,
                'q' => flags.quiet = true,
                'v' => flags.verbose = true,
                'f' => flags.fua = true,
                'z' => flags.zero = true,
                'u' => flags.unmap = true,
                'n' => flags.fast_only = true,
                'c' => flags.compress = true,
                'b' => flags.vm_state = true,
                'i' => flags.invalid = true,
                's' if reading => flags.from = Some(number(&option.value)?),
                's' => flags.source = Some(option.value),
                'l' => flags.count = Some(number(&option.value)?),
                // Kept for scripts, without effect in QEMU's program as well.
                _ => {}
            }
        }
        let rest = options.rest();
        Ok((flags, rest))
    }

    /// Prints what a request did.
    pub fn report(&self, verb: &'static str, at: u64, bytes: u64, begun: Instant) {
        if !self.quiet {
            Report { verb, at, bytes, terse: self.terse, time: begun.elapsed() }.print();
        }
    }
}

/// A number of bytes among a command's words.
pub fn number(text: &str) -> Result<u64, Failed> {
    numbers::bytes(text).or_else(|e| fail(e.sentence(text)))
}

/// A length among a command's words.
fn length(text: &str) -> Result<u64, Failed> {
    match number(text)? {
        len if len > LONGEST => fail(format!("length cannot exceed {LONGEST}, given {text}")),
        len => Ok(len),
    }
}

/// Several lengths, for several pieces of memory.
pub fn lengths(words: &[&str]) -> Result<Vec<u64>, Failed> {
    let mut total = 0;
    let mut all = Vec::with_capacity(words.len());
    for word in words {
        let len = number(word)?;
        if len > LONGEST {
            return fail(format!("Argument '{word}' exceeds maximum size {LONGEST}"));
        }
        if total > LONGEST - len {
            return fail(format!("The total number of bytes exceed the maximum size {LONGEST}"));
        }
        total += len;
        all.push(len);
    }
    Ok(all)
}

/// Memory for a request, filled with `byte`.
pub fn memory(device: &Device, lens: &[u64], byte: u8) -> Result<IoVec, Failed> {
    match device.memory(lens) {
        Ok(buf) => {
            buf.fill(0, buf.len(), byte);
            Ok(buf)
        }
        Err(e) => fail_aloud(format!("qemu-io: {e:#}")),
    }
}

/// Compares memory with a pattern, and tells when it differs.
pub fn verify(buf: &IoVec, at: u64, byte: u8) -> Ran {
    let mut chunk = vec![0; buf.len().min(1 << 20)];
    let mut done = 0;
    while done < buf.len() {
        let n = buf.slice(done, chunk.len()).copy_to(0, &mut chunk);
        if n == 0 || chunk.iter().take(n).any(|b| *b != byte) {
            return fail(format!(
                "Pattern verification failed at offset {at}, {} bytes",
                buf.len()
            ));
        }
        done += n;
    }
    Ok(())
}

fn sector_aligned(value: u64, name: &str) -> Ran {
    match value % 512 {
        0 => Ok(()),
        _ => fail(format!("{value} is not a sector-aligned value for '{name}'")),
    }
}

pub async fn read(session: &Session, call: &Call<'_>) -> Ran {
    let device = session.device()?;
    let (flags, rest) = Flags::parse(call, "bCl:pP:qrs:v")?;
    let &[at, len] = rest.as_slice() else { return call.usage() };
    let (at, len) = (number(at)?, length(len)?);
    if flags.pattern.is_none() && (flags.from.is_some() || flags.count.is_some()) {
        return call.usage();
    }
    let from = flags.from.unwrap_or(0);
    let count = match flags.count {
        Some(count) => Some(count),
        None => len.checked_sub(from),
    };
    let Some(count) = count.filter(|c| c.checked_add(from).is_some_and(|end| end <= len)) else {
        return fail("pattern verification range exceeds end of read data");
    };
    if flags.vm_state {
        sector_aligned(at, "offset")?;
        sector_aligned(len, "count")?;
    }
    let buf = memory(&device, &[len], 0)?;
    let begun = Instant::now();
    let done = match flags.vm_state {
        true => device.read_vm_state(at, buf.clone()).await,
        false => device.read(at, buf.clone()).await,
    };
    if let Err(e) = done {
        failed("read", &e);
        return Err(Failed);
    }
    let equal = match flags.pattern {
        Some(byte) => verify(&buf.slice(from as usize, count as usize), at + from, byte),
        None => Ok(()),
    };
    if !flags.quiet && flags.verbose {
        report::dump(at, &buf);
    }
    flags.report("read", at, len, begun);
    equal
}

pub async fn write(session: &Session, call: &Call<'_>) -> Ran {
    let device = session.device()?;
    let (flags, rest) = Flags::parse(call, "bcCfnpP:qrs:uz")?;
    let &[at, len] = rest.as_slice() else { return call.usage() };
    check_write(&flags)?;
    let (at, len) = (number(at)?, length(len)?);
    if flags.vm_state || flags.compress {
        sector_aligned(at, "offset")?;
        sector_aligned(len, "count")?;
    }
    let buf = match (flags.zero, &flags.source) {
        (true, _) => IoVec::default(),
        (_, Some(file)) => from_file(&device, file, len)?,
        (_, None) => memory(&device, &[len], flags.pattern.unwrap_or(FILLER))?,
    };
    let begun = Instant::now();
    let done = if flags.vm_state {
        device.write_vm_state(at, buf).await
    } else if flags.zero {
        let how = Zeroing { unmap: flags.unmap, fast_only: flags.fast_only, fua: flags.fua };
        device.zero(at, len, how).await
    } else if flags.compress {
        device.write_compressed(at, buf).await
    } else {
        device.write(at, buf, flags.fua).await
    };
    if let Err(e) = done {
        failed("write", &e);
        return Err(Failed);
    }
    flags.report("wrote", at, len, begun);
    Ok(())
}

/// Options that exclude each other.
fn check_write(flags: &Flags) -> Ran {
    if flags.vm_state && flags.zero {
        return fail("-b and -z cannot be specified at the same time");
    }
    if flags.fua && (flags.vm_state || flags.compress) {
        return fail("-f and -b or -c cannot be specified at the same time");
    }
    if flags.fast_only && !flags.zero {
        return fail("-n requires -z to be specified");
    }
    if flags.unmap && !flags.zero {
        return fail("-u requires -z to be specified");
    }
    let sources = [flags.zero, flags.pattern.is_some(), flags.source.is_some()];
    if sources.iter().filter(|given| **given).count() > 1 {
        return fail("Only one of -z, -P, and -s can be specified at the same time");
    }
    Ok(())
}

/// Memory that holds what a file holds, again and again.
fn from_file(device: &Device, name: &str, len: u64) -> Result<IoVec, Failed> {
    use std::io::Read;
    let mut bytes = Vec::new();
    let read = std::fs::File::open(name).and_then(|f| f.take(len).read_to_end(&mut bytes));
    if let Err(e) = read {
        let words = e.raw_os_error().map_or_else(|| e.to_string(), report::words_of);
        return fail_aloud(format!("{name}: {words}"));
    }
    if bytes.is_empty() && len > 0 {
        return fail_aloud(format!("{name}: file is empty"));
    }
    let buf = memory(device, &[len], 0)?;
    let mut at = 0;
    while at < buf.len() {
        at += buf.copy_from(at, &bytes);
    }
    Ok(buf)
}

pub async fn readv(session: &Session, call: &Call<'_>) -> Ran {
    let device = session.device()?;
    let (flags, rest) = Flags::parse(call, "CP:qrv")?;
    let [at, lens @ ..] = rest.as_slice() else { return call.usage() };
    if lens.is_empty() {
        return call.usage();
    }
    let (at, lens) = (number(at)?, lengths(lens)?);
    let buf = memory(&device, &lens, 0)?;
    let begun = Instant::now();
    if let Err(e) = device.read(at, buf.clone()).await {
        failed("readv", &e);
        return Err(Failed);
    }
    let equal = flags.pattern.map_or(Ok(()), |byte| verify(&buf, at, byte));
    if !flags.quiet && flags.verbose {
        report::dump(at, &buf);
    }
    flags.report("read", at, buf.len() as u64, begun);
    equal
}

pub async fn writev(session: &Session, call: &Call<'_>) -> Ran {
    let device = session.device()?;
    let (flags, rest) = Flags::parse(call, "CfqP:r")?;
    let [at, lens @ ..] = rest.as_slice() else { return call.usage() };
    if lens.is_empty() {
        return call.usage();
    }
    let (at, lens) = (number(at)?, lengths(lens)?);
    let buf = memory(&device, &lens, flags.pattern.unwrap_or(FILLER))?;
    let len = buf.len() as u64;
    let begun = Instant::now();
    if let Err(e) = device.write(at, buf, flags.fua).await {
        failed("writev", &e);
        return Err(Failed);
    }
    flags.report("wrote", at, len, begun);
    Ok(())
}

pub async fn discard(session: &Session, call: &Call<'_>) -> Ran {
    let device = session.device()?;
    let (flags, rest) = Flags::parse(call, "Cq")?;
    let &[at, len] = rest.as_slice() else { return call.usage() };
    let (at, len) = (number(at)?, length(len)?);
    let begun = Instant::now();
    if let Err(e) = device.discard(at, len).await {
        failed("discard", &e);
        return Err(Failed);
    }
    flags.report("discard", at, len, begun);
    Ok(())
}

pub async fn flush(session: &Session) -> Ran {
    session.device()?.flush().await.map_err(|e| {
        complain(&format!("qemu-io: {e:#}"));
        Failed
    })
}
