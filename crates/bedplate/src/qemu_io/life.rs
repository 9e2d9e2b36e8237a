//! `open`, `reopen`, `sleep`, the ends of the process, and requests that are held.

use super::args::{Found, Options, letters};
use super::commands::{Call, Ran, fail, fail_aloud};
use super::hold::Point;
use super::numbers;
use super::options::backend;
use super::report::complain;
use super::rw::number;
use super::session::Session;
use super::target::{Request, cache_mode, discard_mode};
use std::time::Duration;

/// An error in the words of the program.
fn refuse(text: String) -> Ran {
    fail_aloud(format!("qemu-io: {text}"))
}

pub async fn open(session: &mut Session, call: &Call<'_>) -> Ran {
    let specs = letters("snCro:ki:t:d:U");
    let mut options = Options::new(&specs, call.words);
    let secrets = session.request.secrets.clone();
    let mut request = Request { secrets, ..Request::default() };
    for option in options.by_ref() {
        let Found { key, value } = option.or_else(|e| call.bad_option(&e))?;
        if let Err(e) = set(session, &mut request, key, &value) {
            return refuse(e);
        }
    }
    match options.rest().as_slice() {
        [] => {}
        [name] => request.name = Some((*name).to_owned()),
        _ => return call.usage(),
    }
    session.open(request).await
}

/// Notes one option of 'open'.
fn set(session: &Session, request: &mut Request, key: char, value: &str) -> Result<(), String> {
    match key {
        's' => request.snapshot = true,
        'C' => request.copy_on_read = true,
        'r' => request.read_only = true,
        'U' => request.force_share = true,
        'n' => request.cache = Some(cache_mode("none")?),
        't' => request.cache = Some(cache_mode(value)?),
        'd' => request.unmap = Some(discard_mode(value)?),
        'o' => request.apply(value)?,
        'k' => aio(session, request, "native")?,
        _ => aio(session, request, value)?,
    }
    Ok(())
}

/// The thread does all I/O in one way, from its start.
fn aio(session: &Session, request: &mut Request, mode: &str) -> Result<(), String> {
    let wanted = backend(mode)?;
    request.native_aio = mode == "native";
    if session.does(wanted) {
        return Ok(());
    }
    Err(format!("how I/O is done is chosen when the program starts; start it with --aio={mode}"))
}

pub async fn reopen(session: &mut Session, call: &Call<'_>) -> Ran {
    let specs = letters("c:o:rw");
    let mut options = Options::new(&specs, call.words);
    let mut request = session.request.clone();
    let mut access = None;
    for option in options.by_ref() {
        let Found { key, value } = option.or_else(|e| call.bad_option(&e))?;
        match key {
            'c' => match cache_mode(&value) {
                Ok(mode) => request.cache = Some(mode),
                Err(e) => return refuse(e),
            },
            'o' => {
                let mut changed = Request::default();
                if let Err(e) = changed.apply(&value) {
                    return refuse(e);
                }
                const FIXED: [&str; 5] =
                    ["driver", "filename", "file.driver", "file.filename", "file.image.filename"];
                if let Some(key) = changed.options.keys().find(|key| FIXED.contains(&key.as_str()))
                {
                    return refuse(format!("Cannot change the option '{key}'"));
                }
                request.options.extend(changed.options);
            }
            _ if access.is_some() => return refuse("Only one -r/-w option may be given".into()),
            _ => access = Some(key == 'r'),
        }
    }
    if !options.rest().is_empty() {
        return call.usage();
    }
    if let Some(read_only) = access {
        request.read_only = read_only;
        request.options.remove("read-only");
    }
    session.reopen(request).await
}

pub async fn sleep(call: &Call<'_>) -> Ran {
    let Some(ms) = numbers::integer(call.word()).and_then(|n| u64::try_from(n).ok()) else {
        return fail(format!("{} is not a valid number", call.word()));
    };
    bedplate_runtime::sleep(Duration::from_millis(ms)).await;
    Ok(())
}

/// Ends the process as a crash does: nothing is flushed or closed.
pub fn abort() -> Ran {
    std::process::abort()
}

pub fn sigraise(call: &Call<'_>) -> Ran {
    let number = i32::try_from(number(call.word())?).unwrap_or(i32::MAX);
    let me = rustix::process::getpid();
    let sent = match rustix::process::Signal::from_named_raw(number) {
        Some(signal) => rustix::process::kill_process(me, signal),
        // Signal 0 only asks whether the process is there; others than the named ones are refused.
        None if number == 0 => Ok(()),
        None => Err(rustix::io::Errno::INVAL),
    };
    match sent {
        Ok(()) => Ok(()),
        Err(e) => refuse(format!("signal {number} can't be raised: {e}")),
    }
}

/// Says why a 'break' and its companions can't be.
fn not_held<T>(what: &str, tag: &str) -> Result<T, super::commands::Failed> {
    complain(&format!(
        "qemu-io: requests can only be held in a file that was opened as blkdebug::FILE ({tag})"
    ));
    fail(format!("{what}: Operation not supported"))
}

pub fn set_break(session: &Session, call: &Call<'_>) -> Ran {
    let device = session.device()?;
    let [event, tag] = call.words else { return call.usage() };
    if !device.target.holds {
        return not_held("Could not set breakpoint", tag);
    }
    let Some(point) = Point::named(event) else {
        complain(&format!(
            "qemu-io: requests can't be held at '{event}'; known are read_aio, write_aio and flush_to_disk"
        ));
        return fail("Could not set breakpoint: Operation not supported");
    };
    device.holds.set(point, tag);
    Ok(())
}

pub fn resume(session: &Session, call: &Call<'_>) -> Ran {
    let device = session.device()?;
    let tag = call.word();
    if !device.target.holds {
        return not_held("Could not resume request", tag);
    }
    if device.holds.resume(tag) {
        return Ok(());
    }
    fail("Could not resume request: No such file or directory")
}

pub fn remove_break(session: &Session, call: &Call<'_>) -> Ran {
    let device = session.device()?;
    let tag = call.word();
    if !device.target.holds {
        return not_held(&format!("Could not remove breakpoint {tag}"), tag);
    }
    if device.holds.remove(tag) {
        return Ok(());
    }
    fail(format!("Could not remove breakpoint {tag}: No such file or directory"))
}

pub async fn wait_break(session: &Session, call: &Call<'_>) -> Ran {
    let device = session.device()?;
    let tag = call.word();
    if !device.target.holds {
        return not_held("Could not wait for a request", tag);
    }
    device.holds.wait(tag).await;
    Ok(())
}
