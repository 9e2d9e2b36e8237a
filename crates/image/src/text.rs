//! Numbers for people.

/// A size as qemu-img writes it: three significant digits and a unit of a power of 1024.
pub fn human_size(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut unit = 0;
    // One step earlier than 1024, where three digits would round up to it.
    let mut value = bytes as f64;
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = if value >= 99.95 {
        0
    } else if value >= 9.995 {
        1
    } else {
        2
    };
    let text = format!("{value:.digits$}");
    let text = match text.split_once('.') {
        Some(_) => text.trim_end_matches('0').trim_end_matches('.'),
        None => &text,
    };
    format!("{text} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_as_qemu_img_writes_them() {
        for (bytes, text) in [
            (0, "0 B"),
            (512, "512 B"),
            (1_000_448, "977 KiB"),
            (1 << 20, "1 MiB"),
            (331_776, "324 KiB"),
            (1023, "1 KiB"),
            (3 << 29, "1.5 GiB"),
            (10 << 30, "10 GiB"),
            (u64::MAX, "16 EiB"),
        ] {
            assert_eq!(human_size(bytes), text, "{bytes}");
        }
    }
}
