//! Which requests fail, and how many there were.

use std::ops::Range;

/// A kind of storage request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum OpKind {
    /// `Storage::read`.
    Read,
    /// `Storage::write`.
    Write,
    /// `Storage::sync`.
    Sync,
    /// `Storage::discard`.
    Discard,
    /// `Storage::write_zeroes`.
    WriteZeroes,
    /// `Storage::allocate`.
    Allocate,
    /// `Storage::set_len`.
    SetLen,
    /// `Storage::extent`.
    Extent,
}

impl OpKind {
    /// All kinds.
    pub const ALL: [Self; 8] = [
        Self::Read,
        Self::Write,
        Self::Sync,
        Self::Discard,
        Self::WriteZeroes,
        Self::Allocate,
        Self::SetLen,
        Self::Extent,
    ];

    /// True when requests of this kind change what the medium holds or promises.
    pub fn mutates(self) -> bool {
        !matches!(self, Self::Read | Self::Extent)
    }
}

/// A rule by which requests fail. Counting begins when the rule is installed.
#[derive(Clone, Debug)]
pub struct Fault {
    pub(crate) kind: Option<OpKind>,
    pub(crate) range: Option<Range<u64>>,
    pub(crate) skip: u64,
    pub(crate) forever: bool,
    pub(crate) errno: i32,
    pub(crate) torn: bool,
    spent: bool,
}

impl Fault {
    /// The `n`-th request of any kind, counted from 0, fails with `errno`.
    pub fn nth(n: u64, errno: i32) -> Self {
        Self { kind: None, range: None, skip: n, forever: false, errno, torn: false, spent: false }
    }

    /// The `n`-th request of `kind`, counted from 0, fails with `errno`.
    pub fn nth_of(kind: OpKind, n: u64, errno: i32) -> Self {
        Self { kind: Some(kind), ..Self::nth(n, errno) }
    }

    /// All matching requests after that one fail too.
    #[must_use]
    pub fn forever(mut self) -> Self {
        self.forever = true;
        self
    }

    /// A write that fails leaves a random part of its beginning behind.
    #[must_use]
    pub fn torn(mut self) -> Self {
        self.torn = true;
        self
    }

    /// Only requests that touch these bytes count; a sync touches all.
    #[must_use]
    pub fn within(mut self, range: Range<u64>) -> Self {
        self.range = Some(range);
        self
    }

    /// Counts a request; true when it must fail.
    pub(crate) fn hits(&mut self, kind: OpKind, touched: &Range<u64>) -> bool {
        let elsewhere =
            self.range.as_ref().is_some_and(|r| touched.start >= r.end || r.start >= touched.end);
        if self.spent || self.kind.is_some_and(|k| k != kind) || elsewhere {
            return false;
        }
        if self.skip > 0 {
            self.skip -= 1;
            return false;
        }
        self.spent = !self.forever;
        true
    }
}

/// How many requests of each kind were started, and what they asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    by_kind: [u64; OpKind::ALL.len()],
    /// Bytes asked for by reads.
    pub read_bytes: u64,
    /// Bytes given by writes.
    pub written_bytes: u64,
    /// Reads and writes whose offset or length was not a multiple of the storage's `align`.
    pub unaligned: u64,
    /// Requests that a [`Fault`] made fail.
    pub failed: u64,
}

impl Counts {
    /// Requests of `kind`.
    pub fn of(&self, kind: OpKind) -> u64 {
        self.by_kind[kind as usize]
    }

    /// Requests of all kinds.
    pub fn total(&self) -> u64 {
        self.by_kind.iter().sum()
    }

    pub(crate) fn add(&mut self, kind: OpKind) {
        self.by_kind[kind as usize] += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_counts_only_what_it_matches_and_strikes_once() {
        let mut f = Fault::nth_of(OpKind::Write, 1, libc_eio()).within(100..200);
        assert!(!f.hits(OpKind::Read, &(100..200)));
        assert!(!f.hits(OpKind::Write, &(0..100)));
        assert!(!f.hits(OpKind::Write, &(150..160)));
        assert!(f.hits(OpKind::Write, &(0..1000)));
        assert!(!f.hits(OpKind::Write, &(0..1000)));
    }

    #[test]
    fn a_lasting_fault_strikes_from_its_first_hit_on() {
        let mut f = Fault::nth(2, libc_eio()).forever();
        let hits: Vec<bool> = (0..5).map(|_| f.hits(OpKind::Sync, &(0..u64::MAX))).collect();
        assert_eq!(hits, [false, false, true, true, true]);
    }

    fn libc_eio() -> i32 {
        5
    }
}
