//! A second pair of hands for a queue thread whose device is the processor itself.
//!
//! Caller: [`crate::io`]. On devices that do their work in the submitting call (compressed memory, RAM disks, page cache), large
//! writes of the slow road are the thread's own work (see [`crate::inline`]), one after the other. Where the machine has another
//! processor, one of them is handed to the pool, while the thread does the next. Invariant: at most one is out, so that a queue never
//! occupies more than two processors, and none where nothing was done beside it.

use crate::inline::Inline;
use crate::remote::Shared;
use crate::threads::Threads;
use std::sync::Arc;

/// Smaller writes cost less than handing them over.
const SMALLEST: usize = 32 << 10;

/// See the module.
pub(crate) struct Helper {
    /// Where a write that is handed over runs.
    pub(crate) pool: Threads,
    /// False on a machine with one processor.
    able: bool,
    /// The next operation is for the helper.
    wanted: Option<u64>,
    /// What is out: the operation, and its file.
    out: Option<(u32, u64)>,
    /// The thread has done something beside it.
    company: bool,
    gain: Inline,
}

impl Helper {
    pub(crate) fn new(shared: &Arc<Shared>) -> Self {
        let able = std::thread::available_parallelism().is_ok_and(|n| n.get() > 1);
        let pool = Threads::new(shared);
        Self { pool, able, wanted: None, out: None, company: false, gain: Inline::new() }
    }

    /// True when a write of `len` bytes should be handed over; then [`Self::takes`] is asked next.
    pub(crate) fn wants(&mut self, file: u64, len: usize) -> bool {
        let wanted = self.able && self.out.is_none() && len >= SMALLEST && self.gain.worth(file);
        self.wanted = wanted.then_some(file);
        wanted
    }

    /// True when operation `i` is the one to be handed over.
    pub(crate) fn takes(&mut self, i: u32) -> bool {
        let Some(file) = self.wanted.take() else { return false };
        self.out = Some((i, file));
        self.company = false;
        true
    }

    /// The thread does such a write itself.
    pub(crate) fn company(&mut self) {
        self.company = true;
    }

    /// Operation `i` is complete.
    pub(crate) fn done(&mut self, i: u32) {
        if let Some((_, file)) = self.out.take_if(|out| out.0 == i) {
            self.gain.learn(file, self.company);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Result;

    fn helper() -> Result<Helper> {
        Ok(Helper { able: true, ..Helper::new(&Shared::new()?) })
    }

    #[test]
    fn one_large_write_at_a_time_is_handed_over() -> Result<()> {
        let mut helper = helper()?;
        assert!(!helper.wants(1, SMALLEST - 1));
        assert!(!helper.takes(7));
        assert!(helper.wants(1, SMALLEST));
        assert!(helper.takes(8));
        assert!(!helper.wants(1, SMALLEST));
        assert!(!helper.takes(9));
        helper.company();
        helper.done(9);
        assert!(!helper.wants(1, SMALLEST));
        helper.done(8);
        assert!(helper.wants(1, SMALLEST));
        Ok(())
    }

    #[test]
    fn nothing_is_handed_over_where_nothing_is_done_beside_it() -> Result<()> {
        let mut helper = helper()?;
        let mut handed = 0;
        for i in 0..1000 {
            if helper.wants(1, SMALLEST) {
                assert!(helper.takes(i));
                helper.done(i);
                handed += 1;
            }
        }
        assert!(handed < 10, "{handed}");
        Ok(())
    }
}
