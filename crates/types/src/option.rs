//! Options as users spell them: sizes, formats and cache modes (as in qemu-img).

use crate::{ByteLen, Error, ErrorKind, Result};
use std::fmt;
use std::path::Path;
use std::str::FromStr;

/// An image format that Bedplate reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// The disk's bytes as they are.
    Raw,
    /// QEMU's qcow2, versions 2 and 3.
    Qcow2,
}

impl Format {
    /// The format that a file's extension names; content is never looked at.
    ///
    /// # Errors
    /// `InvalidInput` when the extension names none; the user must state the format then.
    pub fn from_extension(path: &Path) -> Result<Self> {
        match path.extension().and_then(|e| e.to_str()) {
            Some("qcow2") => Ok(Self::Qcow2),
            Some("raw" | "img") => Ok(Self::Raw),
            _ => Err(Error::new(
                ErrorKind::InvalidInput,
                format!(
                    "the name of '{}' does not tell its format; state it with -f raw or -f qcow2",
                    path.display()
                ),
            )),
        }
    }
}

impl FromStr for Format {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        match s {
            "raw" => Ok(Self::Raw),
            "qcow2" => Ok(Self::Qcow2),
            _ => Err(Error::new(
                ErrorKind::InvalidInput,
                format!("unknown image format '{s}'; known are raw and qcow2"),
            )),
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        })
    }
}

/// How much of an image's space is taken ahead of need, named as QEMU's `preallocation=` values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Preallocation {
    /// None.
    #[default]
    Off,
    /// All metadata, but no space for data (qcow2 only).
    Metadata,
    /// Space is allocated and not written.
    Falloc,
    /// Zeroes are written.
    Full,
    /// As `Full`, fast: space is allocated in one piece, then written in large strides, several at once.
    Prepared,
}

impl Preallocation {
    const NAMES: [(&'static str, Self); 5] = [
        ("off", Self::Off),
        ("metadata", Self::Metadata),
        ("falloc", Self::Falloc),
        ("full", Self::Full),
        ("prepared", Self::Prepared),
    ];
}

impl FromStr for Preallocation {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        let known = Self::NAMES.iter().find(|(name, _)| *name == s);
        known.map(|(_, mode)| *mode).ok_or_else(|| {
            Error::new(
                ErrorKind::InvalidInput,
                format!(
                    "unknown preallocation '{s}'; known are off, metadata, falloc, full and prepared"
                ),
            )
        })
    }
}

impl fmt::Display for Preallocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = Self::NAMES.iter().find(|(_, mode)| mode == self);
        f.write_str(known.map_or("off", |(name, _)| name))
    }
}

/// How host caching and durability are used, named as QEMU's `cache=` values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum CacheMode {
    /// Direct I/O, flushed when the guest asks.
    #[default]
    None,
    /// Host page cache, flushed when the guest asks.
    Writeback,
    /// Host page cache, every write durable before it completes.
    Writethrough,
    /// Direct I/O, every write durable before it completes.
    Directsync,
    /// Host page cache, flushes ignored: a host crash loses the image.
    Unsafe,
}

impl CacheMode {
    /// True when the host page cache is bypassed.
    pub fn direct(self) -> bool {
        matches!(self, Self::None | Self::Directsync)
    }

    /// True when a write may complete before it is durable, so that guests must flush.
    pub fn write_cache(self) -> bool {
        !matches!(self, Self::Writethrough | Self::Directsync)
    }
}

impl FromStr for CacheMode {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        Ok(match s {
            "none" | "off" => Self::None,
            "writeback" => Self::Writeback,
            "writethrough" => Self::Writethrough,
            "directsync" => Self::Directsync,
            "unsafe" => Self::Unsafe,
            _ => {
                return Err(Error::new(
                    ErrorKind::InvalidInput,
                    format!(
                        "unknown cache mode '{s}'; known are none, writeback, writethrough, \
                         directsync and unsafe"
                    ),
                ));
            }
        })
    }
}

impl fmt::Display for CacheMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Writeback => "writeback",
            Self::Writethrough => "writethrough",
            Self::Directsync => "directsync",
            Self::Unsafe => "unsafe",
        })
    }
}

/// Reads a size as qemu-img does: a number, then one of `b`, `k`, `K`, `M`, `G`, `T`, `P`, `E`
/// (powers of 1024); without a suffix it is bytes. A fraction is allowed before a suffix.
///
/// # Errors
/// `InvalidInput` for anything else, and for what does not fit 63 bits.
pub fn parse_size(text: &str) -> Result<ByteLen> {
    let bad = || {
        Error::new(
            ErrorKind::InvalidInput,
            format!("'{text}' is not a size; write bytes, or a number with K, M, G, T, P or E"),
        )
    };
    let (number, shift) = match text.char_indices().next_back() {
        Some((at, c)) if c.is_ascii_alphabetic() => {
            let shift = match c.to_ascii_uppercase() {
                'B' => 0,
                'K' => 10,
                'M' => 20,
                'G' => 30,
                'T' => 40,
                'P' => 50,
                'E' => 60,
                _ => return Err(bad()),
            };
            (&text[..at], shift)
        }
        _ => (text, 0u32),
    };
    let (whole, fraction) = match number.split_once('.') {
        Some((w, f)) => (w, Some(f)),
        None => (number, None),
    };
    let digits = |s: &str| !s.is_empty() && s.len() <= 20 && s.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole) {
        return Err(bad());
    }
    let mut bytes = whole.parse::<u128>().map_err(|_| bad())? << shift;
    if let Some(f) = fraction {
        if !digits(f) || f.len() > 18 || shift == 0 {
            return Err(bad());
        }
        let scale = 10u128.pow(f.len() as u32);
        bytes += (f.parse::<u128>().map_err(|_| bad())? << shift) / scale;
    }
    match u64::try_from(bytes) {
        Ok(v) if v <= i64::MAX as u64 => Ok(ByteLen::new(v)),
        _ => Err(bad()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_qemu_img_reads_them() {
        let ok = |s: &str| parse_size(s).map(ByteLen::get).ok();
        assert_eq!(ok("512"), Some(512));
        assert_eq!(ok("64k"), Some(65536));
        assert_eq!(ok("1.5G"), Some(3 << 29));
        assert_eq!(ok("7E"), Some(7 << 60));
        for bad in ["", "-1", "1X", "8E", "0x10", "1.5", "G", "1e3", "99999999999999999999999"] {
            assert_eq!(ok(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_format_is_never_guessed_from_an_unknown_extension() {
        assert_eq!(Format::from_extension(Path::new("a.qcow2")).ok(), Some(Format::Qcow2));
        assert!(Format::from_extension(Path::new("a.bin")).is_err());
        assert!(Format::from_extension(Path::new("qcow2")).is_err());
    }
}
