//! `aio_read`, `aio_write` and `aio_flush`: requests that run while further commands are taken.

use super::commands::{Call, Ran, fail};
use super::device::Zeroing;
use super::report::{self, failed, say};
use super::rw::{FILLER, Flags, lengths, memory, number, verify};
use super::session::Session;
use bedplate_runtime::{spawn, yield_now};
use std::time::Instant;

pub async fn read(session: &Session, call: &Call<'_>) -> Ran {
    let device = session.device()?;
    let (flags, rest) = Flags::parse(call, "CP:iqrv")?;
    if flags.invalid {
        say("injecting invalid read request");
        return Ok(());
    }
    let [at, lens @ ..] = rest.as_slice() else { return call.usage() };
    if lens.is_empty() {
        return call.usage();
    }
    let (at, lens) = (number(at)?, lengths(lens)?);
    let buf = memory(&device, &lens, 0)?;
    spawn(async move {
        let _running = device.begin();
        let begun = Instant::now();
        if let Err(e) = device.read(at, buf.clone()).await {
            failed("readv", &e);
            return;
        }
        if let Some(byte) = flags.pattern {
            // It is printed, and that is all: the command has succeeded long since.
            let _ = verify(&buf, at, byte);
        }
        if !flags.quiet && flags.verbose {
            report::dump(at, &buf);
        }
        flags.report("read", at, buf.len() as u64, begun);
    });
    yield_now().await;
    Ok(())
}

pub async fn write(session: &Session, call: &Call<'_>) -> Ran {
    let device = session.device()?;
    let (flags, rest) = Flags::parse(call, "CfiP:qruz")?;
    if flags.invalid {
        say("injecting invalid write request");
        return Ok(());
    }
    let [at, lens @ ..] = rest.as_slice() else { return call.usage() };
    if lens.is_empty() {
        return call.usage();
    }
    if flags.zero && lens.len() > 1 {
        return fail("-z supports only a single length parameter");
    }
    if flags.unmap && !flags.zero {
        return fail("-u requires -z to be specified");
    }
    let (at, lens) = (number(at)?, lengths(lens)?);
    let buf = match flags.zero {
        true => None,
        false => Some(memory(&device, &lens, flags.pattern.unwrap_or(FILLER))?),
    };
    let len = lens.iter().sum();
    spawn(async move {
        let _running = device.begin();
        let begun = Instant::now();
        let how = Zeroing { unmap: flags.unmap, fua: flags.fua, ..Zeroing::default() };
        let done = match buf {
            Some(buf) => device.write(at, buf, flags.fua).await,
            None => device.zero(at, len, how).await,
        };
        match done {
            Ok(()) => flags.report("wrote", at, len, begun),
            Err(e) => failed("aio_write", &e),
        }
    });
    yield_now().await;
    Ok(())
}

pub async fn flush(session: &Session) -> Ran {
    session.device()?.settle().await;
    Ok(())
}
