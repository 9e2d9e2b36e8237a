//! Numbers as qemu-io reads and writes them.

use std::time::Duration;

/// Why a number can't be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NumberError {
    /// It is none.
    NotANumber,
    /// It does not fit.
    TooLarge,
}

impl NumberError {
    /// The sentence for `text`, which was to be a number.
    pub fn sentence(self, text: &str) -> String {
        match self {
            Self::NotANumber => format!(
                "Parsing error: non-numeric argument, or extraneous/unrecognized suffix -- {text}"
            ),
            Self::TooLarge => format!("Parsing error: argument too large -- {text}"),
        }
    }
}

/// Reads a number of bytes below 2^63: decimal with an optional fraction and a suffix (`b`, or a power of 1024), or
/// hexadecimal without one.
pub fn bytes(text: &str) -> Result<u64, NumberError> {
    let text = text.strip_prefix('+').unwrap_or(text);
    if let Some(rest) = text.strip_prefix('-') {
        // A number, but one that can't be meant.
        return Err(bytes(rest).err().unwrap_or(NumberError::TooLarge));
    }
    let value = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(hex) => hexadecimal(hex)?,
        None => decimal(text)?,
    };
    match u64::try_from(value) {
        Ok(value) if value <= i64::MAX as u64 => Ok(value),
        _ => Err(NumberError::TooLarge),
    }
}

fn hexadecimal(digits: &str) -> Result<u128, NumberError> {
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Err(NumberError::NotANumber);
    }
    u64::from_str_radix(digits, 16).map(u128::from).map_err(|_| NumberError::TooLarge)
}

fn decimal(text: &str) -> Result<u128, NumberError> {
    let (number, shift) = match text.chars().next_back() {
        Some(c) if c.is_ascii_alphabetic() => {
            let at = "BKMGTPE".find(c.to_ascii_uppercase()).ok_or(NumberError::NotANumber)?;
            (&text[..text.len() - 1], at as u32 * 10)
        }
        _ => (text, 0),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
    if (whole.is_empty() && fraction.is_empty()) || !digits(whole) || !digits(fraction) {
        return Err(NumberError::NotANumber);
    }
    let fraction = fraction.trim_end_matches('0');
    if shift == 0 && !fraction.is_empty() {
        return Err(NumberError::NotANumber);
    }
    let whole = if whole.is_empty() {
        0
    } else {
        whole.parse::<u64>().map_err(|_| NumberError::TooLarge)?
    };
    let mut value = u128::from(whole) << shift;
    // More digits say nothing about whole bytes.
    let fraction = &fraction[..fraction.len().min(18)];
    if let Ok(part) = fraction.parse::<u128>() {
        value += (part << shift) / 10_u128.pow(fraction.len() as u32);
    }
    Ok(value)
}

/// Reads a whole number as C does: decimal, octal behind `0`, hexadecimal behind `0x`.
pub fn integer(text: &str) -> Option<i64> {
    let (negative, digits) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let value = match digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X")) {
        Some(hex) if hex.bytes().all(|b| b.is_ascii_hexdigit()) => i64::from_str_radix(hex, 16),
        None if digits.starts_with('0') && digits.bytes().all(|b| b.is_ascii_digit()) => {
            i64::from_str_radix(digits, 8)
        }
        None if digits.bytes().all(|b| b.is_ascii_digit()) => digits.parse(),
        _ => return None,
    }
    .ok()?;
    Some(if negative { -value } else { value })
}

/// Reads a byte to fill memory with.
pub fn pattern(text: &str) -> Result<u8, String> {
    integer(text)
        .and_then(|n| u8::try_from(n).ok())
        .ok_or_else(|| format!("{text} is not a valid pattern byte"))
}

/// An amount of bytes with its unit.
pub fn amount(value: f64) -> String {
    const UNITS: [(u32, &str); 6] =
        [(60, "EiB"), (50, "PiB"), (40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    let unit = UNITS.iter().find(|(bits, _)| value >= 2_f64.powi(*bits as i32));
    let (text, name) = match unit {
        Some((bits, name)) => (format!("{:.3}", value / 2_f64.powi(*bits as i32)), *name),
        None => (format!("{value:.6}"), "bytes"),
    };
    // What is all zeroes for three digits is shown as a whole number.
    let text = text.find(".000").and_then(|at| text.get(..at)).unwrap_or(&text);
    format!("{text} {name}")
}

/// A length of time for people.
pub fn time(time: Duration) -> String {
    let (h, m, s, hundredths) = parts(time);
    match (h, m) {
        (0, 0) => format!("{s:02}.{hundredths:02} sec"),
        (0, _) => format!("{m:02}:{s:02}.{hundredths:02}"),
        _ => format!("{h}:{m:02}:{s:02}.{hundredths:02}"),
    }
}

/// A length of time for programs, always of the same form.
pub fn fixed_time(time: Duration) -> String {
    let (h, m, s, hundredths) = parts(time);
    format!("{h}:{m:02}:{s:02}.{hundredths:02}")
}

fn parts(time: Duration) -> (u64, u64, u64, u32) {
    let s = time.as_secs();
    (s / 3600, s / 60 % 60, s % 60, time.subsec_millis() / 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_read_as_qemu_io_reads_them() {
        for (text, value) in [
            ("512", 512),
            ("64k", 65536),
            ("1.5K", 1536),
            (".5k", 512),
            ("1.", 1),
            ("1.k", 1024),
            ("1.b", 1),
            ("0.0", 0),
            ("010", 10),
            ("+5", 5),
            ("0.0001k", 0),
            ("0x1B", 27),
            ("1e", 1 << 60),
            ("0x7fffffffffffffff", i64::MAX as u64),
        ] {
            assert_eq!(bytes(text), Ok(value), "{text}");
        }
        for text in [
            "", ".", "k", "x", "0x", "0x10k", "1.5", "1.9b", "5kB", "1e3", "1..k", "1_0", "inf",
            "-x",
        ] {
            assert_eq!(bytes(text), Err(NumberError::NotANumber), "{text}");
        }
        for text in ["8E", "16E", "99999999999999999999", "0x8000000000000000", "-5"] {
            assert_eq!(bytes(text), Err(NumberError::TooLarge), "{text}");
        }
    }

    #[test]
    fn patterns_are_bytes() {
        assert_eq!(pattern("0xcd"), Ok(0xcd));
        assert_eq!(pattern("010"), Ok(8));
        assert_eq!(pattern("+255"), Ok(255));
        for text in ["256", "-1", "x", "", "08", "1k", "0x", "-"] {
            assert!(pattern(text).is_err(), "{text}");
        }
    }

    #[test]
    fn amounts_have_three_digits_or_none() {
        for (value, text) in [
            (0.0, "0 bytes"),
            (512.0, "512 bytes"),
            (4.956917, "4.956917 bytes"),
            (65536.0, "64 KiB"),
            (100_001.0, "97.657 KiB"),
            (3_997_696.0, "3.812 MiB"),
            (1.5 * 2_f64.powi(60), "1.500 EiB"),
        ] {
            assert_eq!(amount(value), text);
        }
    }

    #[test]
    fn times_show_what_is_not_zero() {
        assert_eq!(time(Duration::from_millis(1239)), "01.23 sec");
        assert_eq!(time(Duration::from_secs(61)), "01:01.00");
        assert_eq!(time(Duration::from_secs(3661)), "1:01:01.00");
        assert_eq!(fixed_time(Duration::from_millis(10)), "0:00:00.01");
    }
}
