//! Addresses and lengths in bytes, one type for each address space.
//!
//! Arithmetic is checked: a value that came from an image or a guest can never wrap.

use std::fmt;

macro_rules! newtype {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[repr(transparent)]
        pub struct $name(u64);

        impl $name {
            /// Zero bytes.
            pub const ZERO: Self = Self(0);

            /// Wraps a number of bytes.
            pub const fn new(bytes: u64) -> Self {
                Self(bytes)
            }

            /// The number of bytes.
            pub const fn get(self) -> u64 {
                self.0
            }

            /// True when the value is a multiple of `unit` bytes. `unit` must not be zero.
            pub const fn is_aligned(self, unit: u64) -> bool {
                self.0 % unit == 0
            }

            /// The largest multiple of `unit` that is not above this value.
            pub const fn align_down(self, unit: u64) -> Self {
                Self(self.0 - self.0 % unit)
            }

            /// The smallest multiple of `unit` that is not below this value, if it fits.
            pub const fn align_up(self, unit: u64) -> Option<Self> {
                match self.0.checked_next_multiple_of(unit) {
                    Some(v) => Some(Self(v)),
                    None => None,
                }
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:#x})"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    };
}

newtype! {
    /// A byte offset on the disk that the guest sees.
    GuestOffset
}
newtype! {
    /// A byte offset in a file or device of the host.
    HostOffset
}
newtype! {
    /// A length in bytes.
    ByteLen
}

macro_rules! offset_ops {
    ($name:ident, $range:ident, $doc:literal) => {
        impl $name {
            /// This offset moved up by `len`, or `None` when it leaves 64 bits.
            pub const fn checked_add(self, len: ByteLen) -> Option<Self> {
                match self.0.checked_add(len.0) {
                    Some(v) => Some(Self(v)),
                    None => None,
                }
            }

            /// The distance from `start` up to this offset, or `None` when `start` lies above it.
            pub const fn checked_sub(self, start: Self) -> Option<ByteLen> {
                match self.0.checked_sub(start.0) {
                    Some(v) => Some(ByteLen(v)),
                    None => None,
                }
            }
        }

        #[doc = $doc]
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub struct $range {
            start: $name,
            len: ByteLen,
        }

        impl $range {
            /// The range of `len` bytes from `start`, or `None` when its end leaves 64 bits.
            pub const fn new(start: $name, len: ByteLen) -> Option<Self> {
                match start.checked_add(len) {
                    Some(_) => Some(Self { start, len }),
                    None => None,
                }
            }

            /// The first byte's offset.
            pub const fn start(self) -> $name {
                self.start
            }

            /// The length in bytes.
            pub const fn len(self) -> ByteLen {
                self.len
            }

            /// True when the range holds no byte.
            pub const fn is_empty(self) -> bool {
                self.len.0 == 0
            }

            /// The offset just past the last byte.
            pub const fn end(self) -> $name {
                $name(self.start.0 + self.len.0)
            }

            /// True when the two ranges share at least one byte.
            pub const fn overlaps(self, other: Self) -> bool {
                self.start.0 < other.end().0 && other.start.0 < self.end().0
            }
        }
    };
}

offset_ops!(GuestOffset, GuestRange, "A range of bytes on the disk that the guest sees.");
offset_ops!(HostOffset, HostRange, "A range of bytes in a file or device of the host.");

impl ByteLen {
    /// The sum, or `None` when it leaves 64 bits.
    pub const fn checked_add(self, other: Self) -> Option<Self> {
        match self.0.checked_add(other.0) {
            Some(v) => Some(Self(v)),
            None => None,
        }
    }

    /// The difference, or `None` when `other` is larger.
    pub const fn checked_sub(self, other: Self) -> Option<Self> {
        match self.0.checked_sub(other.0) {
            Some(v) => Some(Self(v)),
            None => None,
        }
    }

    /// The length as an index type, or `None` where memory can't hold it.
    pub fn to_usize(self) -> Option<usize> {
        usize::try_from(self.0).ok()
    }
}

impl From<usize> for ByteLen {
    fn from(len: usize) -> Self {
        // usize is at most 64 bits on every platform that has io_uring.
        Self(len as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn additions_that_leave_64_bits_are_refused() {
        assert!(GuestOffset::new(u64::MAX).checked_add(ByteLen::new(1)).is_none());
        assert!(GuestRange::new(GuestOffset::new(u64::MAX), ByteLen::new(1)).is_none());
        assert!(HostOffset::new(u64::MAX - 1).align_up(4096).is_none());
    }

    #[test]
    fn ranges_that_only_touch_do_not_overlap() {
        let r = |s, l| GuestRange::new(GuestOffset::new(s), ByteLen::new(l)).expect("small");
        assert!(!r(0, 512).overlaps(r(512, 512)));
        assert!(r(0, 513).overlaps(r(512, 512)));
        assert!(!r(5, 0).overlaps(r(5, 0)));
    }
}
