//! One queue of a front end: single requests, and raw chains of any shape.

use bedplate_types::{Error, ErrorKind, Result};
use bedplate_virtio::driver::{DriverQueue, SharedMemory, Used};
use bedplate_virtio::spec::{self, DESC_F_NEXT, DESC_F_WRITE};
use bedplate_virtio::split::Desc;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use vhost::VringConfigData;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Longest wait for an answer, after which the back end is taken for hung.
const PATIENCE: Duration = Duration::from_secs(30);

/// A buffer of a chain.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    /// Its guest address.
    pub addr: u64,
    /// Its length.
    pub len: u32,
    /// The device writes it.
    pub write: bool,
}

/// What came back for a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The status byte; 0xff when the device wrote none.
    pub status: u8,
    /// Bytes that the device says it wrote.
    pub used: u32,
    /// What it wrote before the status.
    pub data: Vec<u8>,
}

/// A queue of a front end.
pub struct Queue {
    index: usize,
    ring: DriverQueue,
    memory: Arc<SharedMemory>,
    /// Offset and length of the part of the memory behind the ring.
    room: (u64, u64),
    kick: EventFd,
    call: EventFd,
    patience: Duration,
}

impl Queue {
    /// A queue in its part (offset and length) of the memory.
    pub(crate) fn new(
        index: usize,
        memory: Arc<SharedMemory>,
        (at, len): (u64, u64),
        size: u16,
        event_idx: bool,
    ) -> Result<Self> {
        let taken = DriverQueue::bytes(size);
        if taken >= len {
            let text = format!("{len} bytes of memory are too few for a queue of {size}");
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        let event = || {
            EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)
                .map_err(|e| Error::io("cannot make an eventfd", e))
        };
        let ring = DriverQueue::new(&memory, at, size, event_idx);
        let room = (at + taken, len - taken);
        Ok(Self { index, ring, memory, room, kick: event()?, call: event()?, patience: PATIENCE })
    }

    /// Sets how long an answer may take before the back end counts as gone; for tests that kill it.
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// Its number.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Number of entries.
    pub fn size(&self) -> u16 {
        self.ring.size()
    }

    /// The descriptor that the device is kicked with.
    pub fn kick(&self) -> &EventFd {
        &self.kick
    }

    /// The descriptor that the device interrupts with.
    pub fn call(&self) -> &EventFd {
        &self.call
    }

    /// Offset (and guest address) and length of the memory that requests may use.
    pub fn room(&self) -> (u64, u64) {
        self.room
    }

    /// The shared memory.
    pub fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    /// The ring itself, for loads and for tests of bad drivers.
    pub fn ring(&mut self) -> &mut DriverQueue {
        &mut self.ring
    }

    /// Its place in memory that begins at `base`.
    pub(crate) fn config(&self, base: u64) -> VringConfigData {
        let addrs = self.ring.addrs(base);
        VringConfigData {
            queue_max_size: self.size(),
            queue_size: self.size(),
            flags: 0,
            desc_table_addr: addrs.desc,
            used_ring_addr: addrs.used,
            avail_ring_addr: addrs.avail,
            log_addr: None,
        }
    }

    /// Lays a chain out from descriptor `head` on.
    pub fn lay_out(&mut self, head: u16, chain: &[Buffer]) {
        for (i, b) in chain.iter().enumerate() {
            let index = head + i as u16;
            let last = i + 1 == chain.len();
            let flags = if last { 0 } else { DESC_F_NEXT } | if b.write { DESC_F_WRITE } else { 0 };
            let next = if last { 0 } else { index + 1 };
            self.ring.set_desc(index, Desc { addr: b.addr, len: b.len, flags, next });
        }
    }

    /// Makes a chain available, and kicks the device if it asks for it.
    pub fn submit(&mut self, head: u16) {
        self.ring.add(head);
        self.publish();
    }

    /// Shows the device all added chains, and kicks it if it asks for it.
    #[inline]
    pub fn publish(&mut self) {
        if self.ring.publish() {
            // EAGAIN: the counter is full, so that the device is being woken already.
            let _ = self.kick.write(1);
        }
    }

    /// Waits for the next chain that comes back.
    ///
    /// # Errors
    /// `Cancelled` when none comes in half a minute, or the time set with [`Self::set_patience`].
    pub fn wait(&mut self) -> Result<Used> {
        let until = Instant::now() + self.patience;
        loop {
            if let Some(used) = self.ring.take_used() {
                return Ok(used);
            }
            if !self.ring.want_interrupts(true) {
                self.sleep(until.saturating_duration_since(Instant::now()));
            }
            self.ring.want_interrupts(false);
            if Instant::now() >= until {
                let text = format!("the back end does not answer on queue {}", self.index);
                return Err(Error::new(ErrorKind::Cancelled, text));
            }
        }
    }

    /// Sleeps until an interrupt comes, at most `limit`.
    pub fn sleep(&self, limit: Duration) {
        let limit = Timespec {
            tv_sec: limit.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: i64::from(limit.subsec_nanos()) as _,
        };
        // SAFETY: the descriptor is open as long as `self.call` lives.
        let call = unsafe { BorrowedFd::borrow_raw(self.call.as_raw_fd()) };
        let mut fds = [PollFd::from_borrowed_fd(call, PollFlags::IN)];
        // A failed wait is like one that ended early: the caller looks at the ring again.
        let _ = poll(&mut fds, Some(&limit));
        let _ = self.call.read();
    }

    /// Sends one chain: the driver's bytes in pieces of `readable` lengths, room for the device in pieces of
    /// `writable` lengths, whose last byte is the status. None of both may be longer than the queue's memory.
    ///
    /// # Errors
    /// `Cancelled` when the back end does not answer.
    pub fn chain(&mut self, driver: &[u8], readable: &[u32], writable: &[u32]) -> Result<Answer> {
        let (at, _) = self.room;
        self.memory.write(at, driver);
        let out_at = (at + driver.len() as u64).next_multiple_of(4096);
        let out_len: u32 = writable.iter().sum();
        self.memory.fill(out_at, out_len as usize, 0xff);
        let mut place = at;
        let mut buffers = Vec::new();
        for (&len, write) in
            readable.iter().map(|l| (l, false)).chain(writable.iter().map(|l| (l, true)))
        {
            if write && buffers.iter().all(|b: &Buffer| !b.write) {
                place = out_at;
            }
            buffers.push(Buffer { addr: place, len, write });
            place += u64::from(len);
        }
        self.lay_out(0, &buffers);
        self.submit(0);
        let used = self.wait()?;
        let mut data = self.memory.read(out_at, out_len as usize);
        let status = data.pop().unwrap_or(0xff);
        Ok(Answer { status, used: used.len, data })
    }

    /// Sends a request in the usual layout: header, data of the driver, `room` bytes for the device, status.
    ///
    /// # Errors
    /// As [`Self::chain`].
    pub fn request(&mut self, kind: u32, sector: u64, data: &[u8], room: u32) -> Result<Answer> {
        let driver = [&header(kind, sector)[..], data].concat();
        let readable = [16, data.len() as u32];
        let readable = if data.is_empty() { &readable[..1] } else { &readable[..] };
        let writable = [room, 1];
        let writable = if room == 0 { &writable[1..] } else { &writable[..] };
        self.chain(&driver, readable, writable)
    }

    /// Reads `len` bytes from byte `at` of the disk.
    ///
    /// # Errors
    /// `Io` when the device reports one.
    pub fn read(&mut self, at: u64, len: u32) -> Result<Vec<u8>> {
        Ok(ok(self.request(spec::T_IN, at / 512, &[], len)?)?.data)
    }

    /// Writes `data` at byte `at` of the disk.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn write(&mut self, at: u64, data: &[u8]) -> Result<()> {
        ok(self.request(spec::T_OUT, at / 512, data, 0)?).map(drop)
    }

    /// Makes writes durable.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn flush(&mut self) -> Result<()> {
        ok(self.request(spec::T_FLUSH, 0, &[], 0)?).map(drop)
    }

    /// Discards a range.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn discard(&mut self, at: u64, len: u64) -> Result<()> {
        let segment = range(at / 512, (len / 512) as u32, 0);
        ok(self.request(spec::T_DISCARD, 0, &segment, 0)?).map(drop)
    }

    /// Zeroes a range; its space may be given back when `unmap` is set.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn write_zeroes(&mut self, at: u64, len: u64, unmap: bool) -> Result<()> {
        let segment = range(at / 512, (len / 512) as u32, u32::from(unmap));
        ok(self.request(spec::T_WRITE_ZEROES, 0, &segment, 0)?).map(drop)
    }
}

fn ok(answer: Answer) -> Result<Answer> {
    match answer.status {
        spec::S_OK => Ok(answer),
        status => {
            let text = format!("the device answers with status {status}");
            Err(Error::new(ErrorKind::Io, text))
        }
    }
}

/// The header of a request.
pub(crate) fn header(kind: u32, sector: u64) -> [u8; 16] {
    let mut b = [0; 16];
    b[..4].copy_from_slice(&kind.to_le_bytes());
    b[8..].copy_from_slice(&sector.to_le_bytes());
    b
}

/// A segment of a discard or write-zeroes request.
pub(crate) fn range(sector: u64, count: u32, flags: u32) -> [u8; 16] {
    let mut b = [0; 16];
    b[..8].copy_from_slice(&sector.to_le_bytes());
    b[8..12].copy_from_slice(&count.to_le_bytes());
    b[12..].copy_from_slice(&flags.to_le_bytes());
    b
}
