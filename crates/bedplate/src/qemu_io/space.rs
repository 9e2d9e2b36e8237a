//! What the image holds, and how large it is: `alloc`, `map`, `length`, `info`, `truncate`.

use super::args::{Options, letters};
use super::commands::{Call, Ran, fail, fail_aloud};
use super::device::Device;
use super::numbers::amount;
use super::report::{say, system_words};
use super::rw::number;
use super::session::Session;
use bedplate_image::specific_text;
use bedplate_types::{ByteLen, GuestOffset, Preallocation, Result};

/// Whether the image itself (not one under it) holds what is at `at`, and for how many bytes, at most `len`.
async fn held(device: &Device, at: u64, len: u64) -> Result<(bool, u64)> {
    let mut done = 0;
    let mut kind = false;
    while done < len {
        let here = GuestOffset::new(at + done);
        let run = device.disk.map_run(here, ByteLen::new(len - done)).await?;
        let own = run.present && run.depth == 0;
        if done > 0 && own != kind {
            break;
        }
        kind = own;
        done += run.len.get().max(1);
    }
    Ok((kind, done.min(len)))
}

pub async fn alloc(session: &Session, call: &Call<'_>) -> Ran {
    let device = session.device()?;
    let mut words = call.words.iter();
    let start = number(words.next().map_or("", String::as_str))?;
    let asked = words.next().map_or(Ok(512), |text| number(text))?;
    let count = device.size().saturating_sub(start).min(asked);
    let (mut at, mut sum) = (start, 0);
    while at < start + count {
        match held(&device, at, start + count - at).await {
            Ok((own, len)) => {
                at += len;
                sum += if own { len } else { 0 };
            }
            Err(e) => return fail(format!("is_allocated failed: {}", system_words(&e))),
        }
    }
    say(&format!("{sum}/{count} bytes allocated at offset {}", amount(start as f64)));
    Ok(())
}

pub async fn map(session: &Session) -> Ran {
    let device = session.device()?;
    let end = device.size();
    if let Err(e) = device.disk.refuse_shared_tables() {
        return fail(format!("Failed to get allocation status: {}", system_words(&e)));
    }
    let mut at = 0;
    while at < end {
        let (own, len) = match held(&device, at, end - at).await {
            Ok(run) => run,
            Err(e) => {
                return fail(format!("Failed to get allocation status: {}", system_words(&e)));
            }
        };
        let word = if own { "    allocated" } else { "not allocated" };
        let (length, offset) = (amount(len as f64), amount(at as f64));
        say(&format!("{length} ({len:#x}) bytes {word} at offset {offset} ({at:#x})"));
        at += len;
    }
    Ok(())
}

pub fn length(session: &Session) -> Ran {
    say(&amount(session.device()?.size() as f64));
    Ok(())
}

pub async fn info(session: &Session) -> Ran {
    let device = session.device()?;
    let Some(image) = device.disk.qcow2() else {
        say("format name: raw\ncluster size: 0 bytes\nvm state offset: 0 bytes");
        return Ok(());
    };
    let header = image.header();
    let cluster = amount(image.cluster_size().get() as f64);
    let state = amount(image.vm_state_offset().get() as f64);
    say(&format!("format name: qcow2\ncluster size: {cluster}\nvm state offset: {state}"));
    say(&format!("Format specific information:\n{}", specific_text(&header).trim_end()));
    Ok(())
}

pub async fn truncate(session: &Session, call: &Call<'_>) -> Ran {
    let device = session.device()?;
    let specs = letters("m:");
    let mut options = Options::new(&specs, call.words);
    let mut fill = Preallocation::Off;
    for option in options.by_ref() {
        let option = option.or_else(|e| call.bad_option::<super::args::Found>(&e))?;
        fill = option.value.parse().or_else(|_| {
            fail_aloud(format!("qemu-io: Invalid preallocation mode '{}'", option.value))
        })?;
    }
    let &[size] = options.rest().as_slice() else { return call.usage() };
    let size = number(size)?;
    device.truncate(size, fill).await.or_else(|e| fail_aloud(format!("qemu-io: {e:#}")))
}
