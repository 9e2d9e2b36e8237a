//! The device's side of a split virtqueue (virtio 1.2, 2.7), on host pointers that were translated once.
//!
//! Callers: queue threads. Invariants: every word of guest memory is read once, into a local, before use; a chain
//! is walked for at most [`MAX_CHAIN`] descriptors; a driver that breaks the ring itself (more heads than
//! entries, a head out of range) breaks this queue and nothing else.

use crate::inflight::InflightQueue;
use crate::memory::GuestMemory;
use crate::spec::{
    AVAIL_F_NO_INTERRUPT, DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, USED_F_NO_NOTIFY,
};
use bedplate_types::limits::MAX_QUEUE_SIZE;
use libc::iovec;
use std::sync::atomic::{AtomicU16, Ordering, fence};

/// Descriptors of one chain, and host segments they may come to. IOV_MAX data segments, header and status.
pub const MAX_CHAIN: usize = 1026;

const DESC_LEN: u64 = 16;

/// A descriptor, as copied from guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Desc {
    /// Guest address of the buffer.
    pub addr: u64,
    /// Its length.
    pub len: u32,
    /// `DESC_F_*`.
    pub flags: u16,
    /// The next descriptor's index.
    pub next: u16,
}

impl Desc {
    fn from_words((addr, hi): (u64, u64)) -> Self {
        Self { addr, len: hi as u32, flags: (hi >> 32) as u16, next: (hi >> 48) as u16 }
    }

    /// The descriptor as the two words it takes in memory.
    pub fn to_words(self) -> [u64; 2] {
        let hi = u64::from(self.len) | u64::from(self.flags) << 32 | u64::from(self.next) << 48;
        [self.addr.to_le(), hi.to_le()]
    }
}

/// Reads two little-endian words, each byte once.
///
/// # Safety
/// `ptr` must be valid for reads of 16 bytes.
#[inline]
pub(crate) unsafe fn read_words(ptr: *const u8) -> (u64, u64) {
    if ptr.addr().is_multiple_of(8) {
        let words = ptr.cast::<u64>();
        // SAFETY: 16 readable, aligned bytes (the caller's promise and the check above).
        let (lo, hi) = unsafe { (words.read_volatile(), words.add(1).read_volatile()) };
        return (u64::from_le(lo), u64::from_le(hi));
    }
    // Nothing makes a driver align its indirect tables and headers.
    let mut b = [[0_u8; 8]; 2];
    for (i, x) in b.as_flattened_mut().iter_mut().enumerate() {
        // SAFETY: 16 readable bytes (the caller's promise).
        *x = unsafe { ptr.add(i).read_volatile() };
    }
    (u64::from_le_bytes(b[0]), u64::from_le_bytes(b[1]))
}

/// The duty to give a taken chain back to the driver, with [`SplitQueue::push_used`].
#[must_use]
#[derive(Debug)]
pub struct Head(u16);

impl Head {
    /// The index of the chain's first descriptor.
    pub fn index(&self) -> u16 {
        self.0
    }

    /// Gives the duty up: only right when the queue itself is given up, so that the driver resets it.
    pub fn abandon(self) {
        std::mem::forget(self);
    }
}

impl Drop for Head {
    fn drop(&mut self) {
        debug_assert!(std::thread::panicking(), "the chain at {} was never given back", self.0);
    }
}

/// What [`SplitQueue::pop`] found.
#[derive(Debug)]
pub enum Pop {
    /// Nothing new.
    Empty,
    /// A chain whose segments are in the caller's list: first `readable` of them, then those the device writes.
    Chain(Head, usize),
    /// A chain that breaks the rules; it is to be given back with length 0.
    Malformed(Head, &'static str),
}

/// A driver has broken the ring itself: nothing on it can be believed any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Broken(pub &'static str);

/// Where a ring is, and from where it goes on.
#[derive(Clone, Copy, Debug)]
pub struct RingAddrs {
    /// The front end's address of the descriptor table.
    pub desc: u64,
    /// Of the available ring.
    pub avail: u64,
    /// Of the used ring.
    pub used: u64,
}

/// The device's side of a split virtqueue.
pub struct SplitQueue {
    size: u16,
    mask: u16,
    event_idx: bool,
    desc: *const u8,
    avail: *mut u16,
    used: *mut u16,
    /// The available index as last read.
    seen_avail: u16,
    next_avail: u16,
    next_used: u16,
    /// `next_used` when the driver was last considered for an interrupt; None before the first time.
    signalled: Option<u16>,
    /// Chains that an earlier process had taken and not given back, the next one last.
    again: Vec<u16>,
    records: Option<InflightQueue>,
}

/// Index of `used_event` in the available ring's 16-bit words, and of the first entry.
const AVAIL_RING: usize = 2;
/// 16-bit words before the used ring's first entry, and words an entry.
const USED_RING: usize = 2;
const USED_ENTRY: usize = 4;

impl SplitQueue {
    /// A queue of `size` entries at `addrs`, that goes on at `next_avail` and at the used ring's own index.
    ///
    /// # Errors
    /// `Broken` when the size is no power of two up to [`MAX_QUEUE_SIZE`], or a part lies outside the memory or
    /// is not aligned.
    ///
    /// The queue holds plain addresses: it must not be used after `memory` (and all that shares its regions) is gone.
    pub fn new(
        memory: &GuestMemory,
        size: u16,
        addrs: RingAddrs,
        next_avail: u16,
        event_idx: bool,
    ) -> Result<Self, Broken> {
        if !size.is_power_of_two() || size > MAX_QUEUE_SIZE {
            return Err(Broken("its size is no power of two within the limit"));
        }
        let n = u64::from(size);
        let part = |uva: u64, len: u64, align: usize| {
            let ptr =
                memory.from_uva(uva, len).ok_or(Broken("a part lies outside guest memory"))?;
            let aligned = ptr.addr().is_multiple_of(align);
            aligned.then_some(ptr).ok_or(Broken("a part is not aligned"))
        };
        let desc = part(addrs.desc, n * DESC_LEN, 16)?;
        let avail = part(addrs.avail, 6 + 2 * n, 2)?.cast::<u16>();
        let used = part(addrs.used, 6 + 8 * n, 4)?.cast::<u16>();
        let mut q = Self {
            size,
            mask: size - 1,
            event_idx,
            desc,
            avail,
            used,
            seen_avail: next_avail,
            next_avail,
            next_used: 0,
            signalled: None,
            again: Vec::new(),
            records: None,
        };
        q.next_used = q.used_word(1).load(Ordering::Acquire).to_le();
        Ok(q)
    }

    /// Keeps records of the chains under way from now on. Those that an earlier process left are taken again, in
    /// their old order, before any other; the available ring then goes on behind them.
    ///
    /// # Errors
    /// `Broken` when the records are for a smaller queue.
    pub fn keep_records(&mut self, mut records: InflightQueue) -> Result<(), Broken> {
        if records.entries() < self.size {
            return Err(Broken("the records of its requests are for a smaller queue"));
        }
        self.again = records.recover(self.size, self.next_used);
        if !self.again.is_empty() {
            // All chains before these were given back, so the used index counts them. There are `size` at most.
            self.next_avail = self.next_used.wrapping_add(self.again.len() as u16);
            self.seen_avail = self.next_avail;
        }
        self.records = Some(records);
        Ok(())
    }

    /// True when chains of an earlier process are still to be taken.
    #[inline]
    pub fn has_again(&self) -> bool {
        !self.again.is_empty()
    }

    /// Number of entries.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// The index of the next chain to take.
    pub fn next_avail(&self) -> u16 {
        self.next_avail
    }

    #[inline]
    fn avail_word(&self, i: usize) -> &AtomicU16 {
        // SAFETY: callers pass word indices of the available ring, 0 to size + 2, which `new` found mapped and
        // aligned; shared memory is only touched through atomics and volatile accesses.
        unsafe { AtomicU16::from_ptr(self.avail.add(i)) }
    }

    #[inline]
    fn used_word(&self, i: usize) -> &AtomicU16 {
        // SAFETY: as `avail_word`: words of the used ring, 0 to 4 * size + 2.
        unsafe { AtomicU16::from_ptr(self.used.add(i)) }
    }

    /// True when the driver has made chains available that were not taken yet (or has broken the ring).
    #[inline]
    pub fn has_avail(&self) -> bool {
        self.seen_avail != self.next_avail
            || self.has_again()
            || self.avail_word(1).load(Ordering::Acquire).to_le() != self.next_avail
    }

    /// Takes the next chain; its segments replace what is in `segs`.
    ///
    /// # Errors
    /// [`Broken`]: nothing more may be taken from this queue.
    #[inline]
    pub fn pop(&mut self, memory: &GuestMemory, segs: &mut Vec<iovec>) -> Result<Pop, Broken> {
        if let Some(head) = self.again.pop() {
            return Ok(self.take(memory, head, segs));
        }
        if self.seen_avail == self.next_avail {
            let idx = self.avail_word(1).load(Ordering::Acquire).to_le();
            if idx == self.next_avail {
                return Ok(Pop::Empty);
            }
            if idx.wrapping_sub(self.next_avail) > self.size {
                return Err(Broken("the driver made more chains available than the queue holds"));
            }
            self.seen_avail = idx;
        }
        let at = AVAIL_RING + usize::from(self.next_avail & self.mask);
        let head = self.avail_word(at).load(Ordering::Relaxed).to_le();
        if head >= self.size {
            return Err(Broken("the driver made a descriptor available that does not exist"));
        }
        self.next_avail = self.next_avail.wrapping_add(1);
        Ok(self.take(memory, head, segs))
    }

    /// Takes the chain at `head`, which is below the size.
    #[inline]
    fn take(&mut self, memory: &GuestMemory, head: u16, segs: &mut Vec<iovec>) -> Pop {
        if let Some(records) = &mut self.records {
            records.taken(head);
        }
        segs.clear();
        match self.walk(memory, head, segs) {
            Ok(readable) => Pop::Chain(Head(head), readable),
            Err(why) => Pop::Malformed(Head(head), why),
        }
    }

    /// Collects a chain's segments; returns how many of them the driver wrote.
    #[inline]
    fn walk(
        &self,
        memory: &GuestMemory,
        head: u16,
        segs: &mut Vec<iovec>,
    ) -> Result<usize, &'static str> {
        let mut table = self.desc;
        let mut entries = u32::from(self.size);
        let mut index = u32::from(head);
        let mut left = usize::from(self.size);
        let (mut indirect, mut writable, mut readable) = (false, false, 0);
        loop {
            if left == 0 {
                return Err("its chain does not end");
            }
            left -= 1;
            // SAFETY: `index` is below `entries`, the number of descriptors in the mapped table.
            let d = unsafe { read_words(table.add(index as usize * DESC_LEN as usize)) };
            let d = Desc::from_words(d);
            if d.flags & DESC_F_INDIRECT != 0 {
                if indirect || d.flags & DESC_F_NEXT != 0 {
                    return Err("an indirect table is nested or followed by something");
                }
                if d.len == 0 || !d.len.is_multiple_of(DESC_LEN as u32) {
                    return Err("an indirect table's length is no multiple of 16");
                }
                let found = memory.contiguous(d.addr, u64::from(d.len));
                table = found.ok_or("an indirect table lies outside guest memory")?;
                entries = d.len / DESC_LEN as u32;
                (indirect, index, left) = (true, 0, MAX_CHAIN);
                continue;
            }
            if d.flags & DESC_F_WRITE != 0 {
                writable = true;
            } else if writable {
                return Err("a readable buffer follows a writable one");
            }
            if d.len != 0 && !memory.append(d.addr, d.len, segs) {
                return Err("a buffer lies outside guest memory");
            }
            if segs.len() > MAX_CHAIN {
                return Err("it has too many segments");
            }
            if !writable {
                readable = segs.len();
            }
            if d.flags & DESC_F_NEXT == 0 {
                return Ok(readable);
            }
            index = u32::from(d.next);
            if index >= entries {
                return Err("its next descriptor does not exist");
            }
        }
    }

    /// Gives a chain back with `written` bytes written; the driver sees it after [`Self::publish`].
    #[inline]
    pub fn push_used(&mut self, head: Head, written: u32) {
        let at = USED_RING + usize::from(self.next_used & self.mask) * USED_ENTRY;
        // SAFETY: `at` is the first word of an entry of the used ring, which is 4-aligned and mapped.
        unsafe {
            let entry = self.used.add(at).cast::<u32>();
            entry.write_volatile(u32::from(head.0).to_le());
            entry.add(1).write_volatile(written.to_le());
        }
        self.next_used = self.next_used.wrapping_add(1);
        if let Some(records) = &mut self.records {
            records.given_back(head.0);
        }
        std::mem::forget(head);
    }

    /// Shows the driver what was given back.
    #[inline]
    pub fn publish(&mut self) {
        self.used_word(1).store(self.next_used.to_le(), Ordering::Release);
        if let Some(records) = &mut self.records {
            records.shown(self.next_used);
        }
    }

    /// True when the driver wants an interrupt for what was published since the last call.
    #[inline]
    pub fn wants_interrupt(&mut self) -> bool {
        let new = self.next_used;
        let old = self.signalled.replace(new);
        if old == Some(new) {
            return false;
        }
        // The published index must be visible before the driver's wish is read, or both sides may wait.
        fence(Ordering::SeqCst);
        if !self.event_idx {
            let flags = self.avail_word(0).load(Ordering::Relaxed).to_le();
            return flags & AVAIL_F_NO_INTERRUPT == 0;
        }
        let event =
            self.avail_word(AVAIL_RING + usize::from(self.size)).load(Ordering::Relaxed).to_le();
        old.is_none_or(|old| need_event(event, new, old))
    }

    /// Asks the driver not to kick.
    #[inline]
    pub fn disable_kicks(&mut self) {
        // With EVENT_IDX the driver kicks only when it passes avail_event, which stays behind.
        if !self.event_idx {
            self.used_word(0).store(USED_F_NO_NOTIFY.to_le(), Ordering::Relaxed);
        }
    }

    /// Asks the driver to kick for the next chain. True when there is one already, for which no kick may come.
    #[inline]
    pub fn enable_kicks(&mut self) -> bool {
        if self.event_idx {
            let at = USED_RING + usize::from(self.size) * USED_ENTRY;
            self.used_word(at).store(self.next_avail.to_le(), Ordering::Relaxed);
        } else {
            self.used_word(0).store(0, Ordering::Relaxed);
        }
        // The wish must be visible before the available index is read again, or both sides may wait.
        fence(Ordering::SeqCst);
        self.has_avail()
    }
}

/// Virtio 1.2, 2.7.7.2: true when moving an index from `old` to `new` passes `event`.
#[inline]
pub fn need_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
#[path = "split_tests.rs"]
mod tests;
