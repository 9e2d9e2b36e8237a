//! Many requests in flight on one queue, each in a slot of its own: for load generators and stress tests.
//!
//! Callers: the load engine (`bedplate-bench`), tests. A slot's chain is laid out anew only when its kind or length changes; else a
//! request costs its header, an index and a look at its status.

use super::queue::{header, range};
use super::{Buffer, Queue};
use bedplate_types::{Error, ErrorKind, Result};
use bedplate_virtio::spec;
use std::time::{Duration, Instant};

/// A back end that completes nothing for so long hangs.
const PATIENCE: Duration = Duration::from_secs(60);
/// Looks at the ring between two looks at the clock.
const LOOKS: u32 = 64;

/// Descriptors of a slot: header, data, status.
const CHAIN: u16 = 3;
/// Each slot's status has a cache line, so that the two sides don't meet on one.
const STATUS_STRIDE: u64 = 64;
/// Bytes of a segment of a discard.
const SEGMENT: u32 = 16;

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotOp {
    /// Reads into the slot's memory.
    Read,
    /// Writes from the slot's memory.
    Write,
    /// Makes completed writes durable.
    Flush,
    /// Gives space back.
    Discard,
}

/// A queue with the memory of its slots.
pub struct Slots {
    queue: Queue,
    depth: u16,
    headers: u64,
    status: u64,
    data: u64,
    stride: u64,
    laid: Vec<Option<(SlotOp, u32)>>,
    spin: Option<Duration>,
}

impl Slots {
    /// Entries that a queue needs for `depth` slots.
    pub fn queue_size(depth: u16) -> u16 {
        depth.max(1).saturating_mul(CHAIN).checked_next_power_of_two().unwrap_or(1 << 15)
    }

    /// Bytes of memory that `depth` slots of `bytes` data each need, besides the ring's.
    pub fn room(depth: u16, bytes: u32) -> u64 {
        let stride = u64::from(bytes.max(SEGMENT)).next_multiple_of(4096);
        (u64::from(depth) * (16 + STATUS_STRIDE)).next_multiple_of(4096) + u64::from(depth) * stride
    }

    /// Takes a queue for `depth` requests of at most `bytes` bytes each. `spin` is how long to look at the ring before sleeping
    /// until an interrupt; `None`: never sleep.
    ///
    /// # Errors
    /// `InvalidInput` when the queue's memory or size is too small.
    pub fn new(mut queue: Queue, depth: u16, bytes: u32, spin: Option<Duration>) -> Result<Self> {
        let (at, len) = queue.room();
        let needed = Self::room(depth, bytes);
        if depth == 0 || queue.size() / CHAIN < depth || needed > len {
            let text = format!(
                "{depth} requests of {bytes} bytes in flight need a queue of {} entries and {needed} bytes of memory",
                Self::queue_size(depth)
            );
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        queue.ring().want_interrupts(false);
        let status = at + u64::from(depth) * 16;
        let data = (status + u64::from(depth) * STATUS_STRIDE).next_multiple_of(4096);
        let stride = u64::from(bytes.max(SEGMENT)).next_multiple_of(4096);
        let laid = vec![None; usize::from(depth)];
        Ok(Self { queue, depth, headers: at, status, data, stride, laid, spin })
    }

    /// The queue, with nothing in flight when all was taken.
    pub fn into_queue(self) -> Queue {
        self.queue
    }

    fn place(&self, slot: u16, len: usize) -> Result<u64> {
        if slot >= self.depth || len as u64 > self.stride {
            let text = format!("there is no slot {slot} of {len} bytes");
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        Ok(self.data + self.stride * u64::from(slot))
    }

    /// Fills the start of a slot's memory.
    ///
    /// # Errors
    /// `InvalidInput` for a slot that does not exist, or too much data.
    pub fn put(&mut self, slot: u16, data: &[u8]) -> Result<()> {
        let at = self.place(slot, data.len())?;
        self.queue.memory().write(at, data);
        Ok(())
    }

    /// Copies the start of a slot's memory.
    ///
    /// # Errors
    /// As [`Self::put`].
    pub fn get(&self, slot: u16, data: &mut [u8]) -> Result<()> {
        let at = self.place(slot, data.len())?;
        data.copy_from_slice(&self.queue.memory().read(at, data.len()));
        Ok(())
    }

    /// Adds a request for `len` bytes at byte `at` of the disk; [`Self::publish`] shows it to the device. The slot
    /// must not be in flight.
    ///
    /// # Errors
    /// As [`Self::put`].
    #[inline]
    pub fn push(&mut self, slot: u16, op: SlotOp, at: u64, len: u32) -> Result<()> {
        let room = if matches!(op, SlotOp::Read | SlotOp::Write) { len } else { 0 };
        let place = self.place(slot, room as usize)?;
        let laid = self.laid.get_mut(usize::from(slot));
        if let Some(laid) = laid.filter(|laid| **laid != Some((op, len))) {
            *laid = Some((op, len));
            self.lay_out(slot, op, place, len);
        }
        let (kind, sector) = match op {
            SlotOp::Read => (spec::T_IN, at / 512),
            SlotOp::Write => (spec::T_OUT, at / 512),
            SlotOp::Flush => (spec::T_FLUSH, 0),
            SlotOp::Discard => {
                self.queue.memory().write(place, &range(at / 512, len / 512, 0));
                (spec::T_DISCARD, 0)
            }
        };
        let head = self.headers + 16 * u64::from(slot);
        self.queue.memory().write(head, &header(kind, sector));
        self.queue.ring().add(slot * CHAIN);
        Ok(())
    }

    fn lay_out(&mut self, slot: u16, op: SlotOp, place: u64, len: u32) {
        let head = Buffer { addr: self.headers + 16 * u64::from(slot), len: 16, write: false };
        let addr = self.status + STATUS_STRIDE * u64::from(slot);
        let status = Buffer { addr, len: 1, write: true };
        let data = |len, write| Buffer { addr: place, len, write };
        let first = slot * CHAIN;
        match op {
            SlotOp::Flush => self.queue.lay_out(first, &[head, status]),
            SlotOp::Discard => self.queue.lay_out(first, &[head, data(SEGMENT, false), status]),
            SlotOp::Read => self.queue.lay_out(first, &[head, data(len, true), status]),
            SlotOp::Write => self.queue.lay_out(first, &[head, data(len, false), status]),
        }
    }

    /// Shows the device all requests added.
    #[inline]
    pub fn publish(&mut self) {
        self.queue.publish();
    }

    /// Takes a completed request: its slot, and whether the device says it is well.
    #[inline]
    pub fn take(&mut self) -> Option<(u16, bool)> {
        let used = self.queue.ring().take_used()?;
        // A back end that names a chain nobody sent is broken; the last slot takes the blame.
        let slot = ((used.head / u32::from(CHAIN)) as u16).min(self.depth - 1);
        let at = self.queue.memory().at(self.status + STATUS_STRIDE * u64::from(slot), 1);
        // SAFETY: `at` gives a mapped byte of the shared memory.
        Some((slot, unsafe { at.read_volatile() } == spec::S_OK))
    }

    /// Waits until a request may have been completed, at most `limit` (`None`: for ever); false when the time is up.
    ///
    /// # Errors
    /// `Cancelled` when the back end hangs.
    #[inline]
    pub fn wait(&mut self, limit: Option<Duration>) -> Result<bool> {
        let mut begin = None;
        loop {
            for _ in 0..LOOKS {
                if self.queue.ring().has_used() {
                    return Ok(true);
                }
                std::hint::spin_loop();
            }
            // The back end may need this core to go on.
            std::thread::yield_now();
            let waited = begin.get_or_insert_with(Instant::now).elapsed();
            let left = limit.map(|limit| limit.saturating_sub(waited));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(false);
            }
            if self.spin.is_some_and(|spin| waited >= spin) {
                if !self.queue.ring().want_interrupts(true) {
                    let second = Duration::from_secs(1);
                    self.queue.sleep(left.map_or(second, |left| left.min(second)));
                }
                self.queue.ring().want_interrupts(false);
            }
            if waited > PATIENCE && limit.is_none() {
                let text = format!("the back end hangs on queue {}", self.queue.index());
                return Err(Error::new(ErrorKind::Cancelled, text));
            }
        }
    }
}
