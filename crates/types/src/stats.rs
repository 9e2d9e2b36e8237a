//! What was asked of a disk, for those who serve it.

use std::ops::AddAssign;

/// Requests that came, by their kinds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestStats {
    /// Read requests.
    pub reads: u64,
    /// Bytes they asked for.
    pub read_bytes: u64,
    /// Write requests.
    pub writes: u64,
    /// Bytes they brought.
    pub write_bytes: u64,
    /// Flush requests.
    pub flushes: u64,
    /// Discard and write-zeroes requests.
    pub discards: u64,
    /// All other requests.
    pub other: u64,
    /// Requests that failed or were refused.
    pub errors: u64,
}

impl RequestStats {
    /// All requests.
    pub fn requests(&self) -> u64 {
        self.reads + self.writes + self.flushes + self.discards + self.other
    }
}

impl AddAssign for RequestStats {
    fn add_assign(&mut self, more: Self) {
        self.reads += more.reads;
        self.read_bytes += more.read_bytes;
        self.writes += more.writes;
        self.write_bytes += more.write_bytes;
        self.flushes += more.flushes;
        self.discards += more.discards;
        self.other += more.other;
        self.errors += more.errors;
    }
}
