//! Aligned buffers that are used again, so that a request costs no fresh, zeroed memory.
//!
//! Caller: transmission, one pool for each connection. What a buffer held before may still be in it: whoever takes
//! one fills all of the bytes that leave it.

use bedplate_runtime::buf::{AlignedBuf, BUF_ALIGN};
use bedplate_types::Result;
use std::cell::{Cell, RefCell};

/// Bytes of unused buffers that a connection keeps.
const KEEP: usize = 4 << 20;

/// Buffers waiting to be used again.
#[derive(Default)]
pub(crate) struct Pool {
    free: RefCell<Vec<AlignedBuf>>,
    bytes: Cell<usize>,
}

impl Pool {
    /// A buffer of at least `len` bytes.
    pub fn take(&self, len: usize) -> Result<AlignedBuf> {
        let size = len.max(BUF_ALIGN).next_power_of_two();
        let mut free = self.free.borrow_mut();
        if let Some(at) = free.iter().rposition(|b| b.len() == size) {
            self.bytes.set(self.bytes.get() - size);
            return Ok(free.swap_remove(at));
        }
        AlignedBuf::zeroed(size)
    }

    /// Gives a buffer back.
    pub fn give(&self, buf: AlignedBuf) {
        let after = self.bytes.get() + buf.len();
        if after <= KEEP && buf.len().is_power_of_two() && buf.len() >= BUF_ALIGN {
            self.bytes.set(after);
            self.free.borrow_mut().push(buf);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_come_back_and_the_pool_stays_bounded() {
        let pool = Pool::default();
        let a = pool.take(5000).expect("memory");
        assert_eq!(a.len(), 8192);
        let address = a.as_ptr();
        pool.give(a);
        assert!(pool.take(100).expect("memory").as_ptr() != address, "another size class");
        assert_eq!(pool.take(8192).expect("memory").as_ptr(), address);
        for _ in 0..20 {
            pool.give(AlignedBuf::zeroed(1 << 20).expect("memory"));
        }
        assert_eq!(pool.free.borrow().len() << 20, KEEP);
    }
}
