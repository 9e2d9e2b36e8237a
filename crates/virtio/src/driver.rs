//! The driver's side of a split virtqueue, and memory to share: for tests, load generators and benchmarks.
//!
//! Callers: the user-space front end of `bedplate-vhost-user` and the tests here. Chains are laid out once in the
//! descriptor table by the caller, so that a load generator only moves indices. Nothing here is used to serve a guest.

use crate::memory::{GuestMemory, Region};
use crate::spec::{AVAIL_F_NO_INTERRUPT, USED_F_NO_NOTIFY};
use crate::split::{Desc, RingAddrs, need_event};
use crate::vanish::Alarm;
use bedplate_types::{Error, Result};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU16, Ordering, fence};

/// Memory in a memfd, mapped here, that can be shared with a device. Guest address 0 is its first byte.
pub struct SharedMemory {
    fd: OwnedFd,
    len: u64,
    memory: GuestMemory,
    base: *mut u8,
}

// SAFETY: shared memory that is only accessed by raw reads and writes of its users.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// `len` zero bytes at guest address `gpa`.
    ///
    /// # Errors
    /// `Io` when the system refuses.
    pub fn new(gpa: u64, len: u64) -> Result<Self> {
        let failed = || Error::io("cannot make shared memory", std::io::Error::last_os_error());
        // SAFETY: the name is a valid C string; the call has no other demands.
        let raw = unsafe { libc::memfd_create(c"bedplate-guest".as_ptr(), libc::MFD_CLOEXEC) };
        if raw < 0 {
            return Err(failed());
        }
        // SAFETY: a fresh descriptor that nobody else owns.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        // SAFETY: the descriptor is open.
        if unsafe { libc::ftruncate(raw, libc::off_t::try_from(len).unwrap_or(-1)) } != 0 {
            return Err(failed());
        }
        let region = Region::map(fd.as_fd(), 0, gpa, 0, len, &Alarm::new()?)?;
        let memory = GuestMemory::new(vec![region])?;
        let base = memory.contiguous(gpa, len).unwrap_or(std::ptr::null_mut());
        Ok(Self { fd, len, memory, base })
    }

    /// The file that holds the memory.
    pub fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True when there is no memory.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The memory as a device would see it, where this process plays both.
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// The address in this process of byte `offset`.
    ///
    /// # Panics
    /// When `len` bytes from there leave the memory: a mistake of the caller, not of a peer.
    pub fn at(&self, offset: u64, len: u64) -> *mut u8 {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "outside the memory");
        // SAFETY: inside the mapping, as just checked.
        unsafe { self.base.add(offset as usize) }
    }

    /// Copies `bytes` to `offset`.
    pub fn write(&self, offset: u64, bytes: &[u8]) {
        let to = self.at(offset, bytes.len() as u64);
        // SAFETY: `at` checked the range; the source is an ordinary slice.
        unsafe { std::ptr::copy(bytes.as_ptr(), to, bytes.len()) };
    }

    /// Copies `len` bytes from `offset`.
    pub fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let from = self.at(offset, len as u64);
        let mut out = vec![0; len];
        // SAFETY: `at` checked the range; `out` has room.
        unsafe { std::ptr::copy(from, out.as_mut_ptr(), len) };
        out
    }

    /// Sets `len` bytes from `offset` to `byte`.
    pub fn fill(&self, offset: u64, len: usize, byte: u8) {
        // SAFETY: `at` checked the range.
        unsafe { std::ptr::write_bytes(self.at(offset, len as u64), byte, len) };
    }
}

/// A chain that came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// Index of the chain's first descriptor.
    pub head: u32,
    /// Bytes the device says it wrote.
    pub len: u32,
}

/// The driver's side of a split virtqueue in shared memory.
pub struct DriverQueue {
    size: u16,
    event_idx: bool,
    desc: *mut u64,
    avail: *mut u16,
    used: *mut u16,
    offset: u64,
    next_avail: u16,
    kicked: u16,
    next_used: u16,
}

// SAFETY: the queue's pointers lie in shared memory that its user keeps; it may move between threads.
unsafe impl Send for DriverQueue {}

impl DriverQueue {
    /// Bytes that a queue of `size` entries takes.
    pub const fn bytes(size: u16) -> u64 {
        let n = size as u64;
        (Self::used_offset(size) + 6 + 8 * n).next_multiple_of(4096)
    }

    const fn used_offset(size: u16) -> u64 {
        // The used ring gets its own cache lines, since the other side writes it.
        (size as u64 * 16 + 6 + 2 * size as u64).next_multiple_of(128)
    }

    /// A fresh queue of `size` (a power of two) entries at byte `offset` of `memory`, which must outlive it.
    pub fn new(memory: &SharedMemory, offset: u64, size: u16, event_idx: bool) -> Self {
        memory.fill(offset, Self::bytes(size) as usize, 0);
        let base = memory.at(offset, Self::bytes(size));
        let avail = usize::from(size) * 16;
        // SAFETY: both offsets lie in the range that `at` has just checked.
        let (avail, used) =
            unsafe { (base.add(avail), base.add(Self::used_offset(size) as usize)) };
        Self {
            size,
            event_idx,
            desc: base.cast(),
            avail: avail.cast(),
            used: used.cast(),
            offset,
            next_avail: 0,
            kicked: 0,
            next_used: 0,
        }
    }

    /// Where its parts are, for a memory whose first byte has the address `base`.
    pub fn addrs(&self, base: u64) -> RingAddrs {
        let desc = base + self.offset;
        let avail = desc + u64::from(self.size) * 16;
        RingAddrs { desc, avail, used: desc + Self::used_offset(self.size) }
    }

    /// Number of entries.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Writes descriptor `index`.
    pub fn set_desc(&mut self, index: u16, desc: Desc) {
        let at = usize::from(index & (self.size - 1)) * 2;
        let [lo, hi] = desc.to_words();
        // SAFETY: `at` is below twice the size: inside the table.
        unsafe {
            self.desc.add(at).write_volatile(lo);
            self.desc.add(at + 1).write_volatile(hi);
        }
    }

    fn word(ring: *mut u16, i: usize) -> &'static AtomicU16 {
        // SAFETY: callers pass words of the ring; the memory outlives the queue and is accessed atomically.
        unsafe { AtomicU16::from_ptr(ring.add(i)) }
    }

    /// Puts `head` into the available ring; the device sees it after [`Self::publish`].
    #[inline]
    pub fn add(&mut self, head: u16) {
        let at = 2 + usize::from(self.next_avail & (self.size - 1));
        Self::word(self.avail, at).store(head.to_le(), Ordering::Relaxed);
        self.next_avail = self.next_avail.wrapping_add(1);
    }

    /// Shows the device what was added. True when it must be kicked.
    #[inline]
    pub fn publish(&mut self) -> bool {
        self.publish_index(self.next_avail);
        fence(Ordering::SeqCst);
        let (old, new) = (std::mem::replace(&mut self.kicked, self.next_avail), self.next_avail);
        if self.event_idx {
            let event = Self::word(self.used, 2 + 4 * usize::from(self.size));
            return need_event(event.load(Ordering::Relaxed).to_le(), new, old);
        }
        old != new
            && Self::word(self.used, 0).load(Ordering::Relaxed).to_le() & USED_F_NO_NOTIFY == 0
    }

    /// Sets the available index to anything: for tests of drivers gone wrong.
    pub fn publish_index(&mut self, index: u16) {
        Self::word(self.avail, 1).store(index.to_le(), Ordering::Release);
    }

    /// True when a chain has come back.
    #[inline]
    pub fn has_used(&self) -> bool {
        Self::word(self.used, 1).load(Ordering::Acquire).to_le() != self.next_used
    }

    /// Takes one chain that came back.
    #[inline]
    pub fn take_used(&mut self) -> Option<Used> {
        if !self.has_used() {
            return None;
        }
        let at = 2 + usize::from(self.next_used & (self.size - 1)) * 4;
        // SAFETY: `at` is the first word of an entry of the used ring, 4-aligned.
        let used = unsafe {
            let entry = self.used.add(at).cast::<u32>();
            Used {
                head: u32::from_le(entry.read_volatile()),
                len: u32::from_le(entry.add(1).read_volatile()),
            }
        };
        self.next_used = self.next_used.wrapping_add(1);
        Some(used)
    }

    /// Asks the device for an interrupt at the next chain that comes back, or for none.
    /// True when a chain has come back already, for which no interrupt may come.
    #[inline]
    pub fn want_interrupts(&mut self, on: bool) -> bool {
        if self.event_idx {
            // A value just behind is passed only after the indices have gone round once.
            let event = if on { self.next_used } else { self.next_used.wrapping_sub(1) };
            Self::word(self.avail, 2 + usize::from(self.size))
                .store(event.to_le(), Ordering::Relaxed);
        } else {
            let flags = if on { 0 } else { AVAIL_F_NO_INTERRUPT };
            Self::word(self.avail, 0).store(flags.to_le(), Ordering::Relaxed);
        }
        if on {
            fence(Ordering::SeqCst);
        }
        self.has_used()
    }
}
