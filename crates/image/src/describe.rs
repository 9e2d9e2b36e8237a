//! An image's description as text, laid out like that of `qemu-img info`.

use crate::info::{ImageInfo, Qcow2Info, SnapshotInfo, qcow2_info};
use crate::text::human_size;
use bedplate_qcow2::format::{Header, printable};
use std::fmt::{self, Write};

/// The description for people, several lines.
pub fn describe(info: &ImageInfo) -> String {
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = write_all(&mut out, info);
    out
}

/// What only qcow2 images have, for people: several lines, indented by four.
pub fn specific_text(header: &Header) -> String {
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = write_qcow2(&mut out, &qcow2_info(header));
    out
}

fn write_all(out: &mut String, info: &ImageInfo) -> fmt::Result {
    writeln!(out, "image: {}", printable(info.filename.as_bytes()))?;
    writeln!(out, "file format: {}", info.format)?;
    let size = info.virtual_size;
    writeln!(out, "virtual size: {} ({size} bytes)", human_size(size))?;
    writeln!(out, "disk size: {}", human_size(info.actual_size))?;
    if info.encrypted {
        writeln!(out, "encrypted: yes")?;
    }
    if let Some(bytes) = info.cluster_size {
        writeln!(out, "cluster_size: {bytes}")?;
    }
    if info.dirty_flag {
        writeln!(out, "cleanly shut down: no")?;
    }
    if let Some(name) = &info.backing_filename {
        write!(out, "backing file: {name}")?;
        match &info.full_backing_filename {
            Some(full) if full != name => writeln!(out, " (actual path: {full})")?,
            _ => writeln!(out)?,
        }
    }
    if let Some(format) = &info.backing_filename_format {
        writeln!(out, "backing file format: {format}")?;
    }
    snapshot_list(out, &info.snapshots)?;
    if let Some(specific) = &info.format_specific {
        writeln!(out, "Format specific information:")?;
        write_qcow2(out, &specific.data)?;
    }
    if let Some(why) = &info.unsupported {
        writeln!(out, "note: this version can't open it: {why}")?;
    }
    if info.looks_like_qcow2 {
        writeln!(out, "note: its content looks like a qcow2 image; if it is one, state -f qcow2")?;
    }
    Ok(())
}

/// The snapshots, a line each under a headline; nothing when there are none.
pub(crate) fn snapshot_list(out: &mut String, snapshots: &[SnapshotInfo]) -> fmt::Result {
    if snapshots.is_empty() {
        return Ok(());
    }
    writeln!(out, "Snapshot list:")?;
    writeln!(
        out,
        "{:<7} {:<16} {:>8} {:>20} {:>13} {:>10}",
        "ID", "TAG", "VM_SIZE", "DATE (UTC)", "VM_CLOCK", "ICOUNT"
    )?;
    snapshots.iter().try_for_each(|s| write_snapshot(out, s))
}

fn write_qcow2(out: &mut String, data: &Qcow2Info) -> fmt::Result {
    writeln!(out, "    compat: {}", data.compat)?;
    writeln!(out, "    compression type: {}", data.compression_type)?;
    if let Some(on) = data.lazy_refcounts {
        writeln!(out, "    lazy refcounts: {on}")?;
    }
    for (i, bitmap) in data.bitmaps.iter().enumerate() {
        if i == 0 {
            writeln!(out, "    bitmaps:")?;
        }
        let (name, size) = (&bitmap.name, bitmap.granularity);
        writeln!(out, "        {name}: granularity {size}, {}", bitmap.flags.join(" "))?;
    }
    writeln!(out, "    refcount bits: {}", data.refcount_bits)?;
    if let Some(file) = &data.data_file {
        writeln!(out, "    data file: {file}")?;
    }
    if let Some(raw) = data.data_file_raw {
        writeln!(out, "    data file raw: {raw}")?;
    }
    if let Some(encrypt) = &data.encrypt {
        encrypt.describe(out)?;
    }
    if let Some(on) = data.corrupt {
        writeln!(out, "    corrupt: {on}")?;
    }
    if let Some(on) = data.extended_l2 {
        writeln!(out, "    extended l2: {on}")?;
    }
    Ok(())
}

fn write_snapshot(out: &mut String, s: &SnapshotInfo) -> fmt::Result {
    let clock = format!(
        "{:04}:{:02}:{:02}.{:03}",
        s.vm_clock_sec / 3600,
        s.vm_clock_sec / 60 % 60,
        s.vm_clock_sec % 60,
        s.vm_clock_nsec / 1_000_000
    );
    let icount = s.icount.map(|n| n.to_string()).unwrap_or_default();
    let (size, date) = (human_size(s.vm_state_size), date(s.date_sec));
    writeln!(out, "{:<7} {:<16} {size:>8} {date:>20} {clock:>13} {icount:>10}", s.id, s.name)
}

/// Seconds since 1970 as a date and time of day in UTC.
fn date(seconds: u32) -> String {
    let seconds = u64::from(seconds);
    let mut days = seconds / 86400;
    let mut year = 1970_u64;
    let leap = |y: u64| y.is_multiple_of(4) && (!y.is_multiple_of(100) || y.is_multiple_of(400));
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let february = 28 + u64::from(leap(year));
    let mut month = 1;
    for len in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < len {
            break;
        }
        days -= len;
        month += 1;
    }
    let time = seconds % 86400;
    let (day, h, m, s) = (days + 1, time / 3600, time / 60 % 60, time % 60);
    format!("{year}-{month:02}-{day:02} {h:02}:{m:02}:{s:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_right_in_leap_years_and_at_the_ends_of_months() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00:00"),
            (951_782_399, "2000-02-28 23:59:59"),
            (951_782_400, "2000-02-29 00:00:00"),
            (1_709_251_199, "2024-02-29 23:59:59"),
            (1_735_689_599, "2024-12-31 23:59:59"),
            (u32::MAX, "2106-02-07 06:28:15"),
        ] {
            assert_eq!(date(seconds), text);
        }
    }
}
