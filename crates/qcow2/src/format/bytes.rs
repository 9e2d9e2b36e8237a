//! Big-endian reads that can't leave their slice.
//!
//! Callers: the parsers of this module. An out-of-range position gives `None`, never a panic.

/// The 16-bit number at byte `at`.
pub(super) fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// The 32-bit number at byte `at`.
pub(super) fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// The 64-bit number at byte `at`.
pub(super) fn be64(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// `len` rounded up to a multiple of 8, if it fits.
pub(super) fn pad8(len: usize) -> Option<usize> {
    len.checked_next_multiple_of(8)
}

/// Untrusted bytes as one line of text for a message: control characters are escaped, the rest is kept.
pub fn printable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
    }
    out
}
