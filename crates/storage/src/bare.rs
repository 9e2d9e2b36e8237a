//! One io_uring on one file, as fast as it can simply be driven: the yardstick that measurements compare with.
//!
//! Callers: the load engine (`bedplate-bench`). Written apart from this crate's runtime on purpose, so that a yardstick does not
//! share what it measures: no executor, no futures, no splitting or retrying, one registered file, memory in equal slots.
//!
//! Invariants: a slot's memory is touched by the kernel alone from [`BareRing::push`] until its completion is given out; memory is
//! only freed when nothing is in flight.

use bedplate_runtime::buf::AlignedBuf;
use bedplate_types::{Error, ErrorKind, Result};
use io_uring::types::{FsyncFlags, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::time::Duration;

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BareOp {
    /// Reads into the slot's memory.
    Read,
    /// Writes from the slot's memory.
    Write,
    /// Makes completed writes durable, as `fdatasync` does.
    Sync,
    /// Gives space back (`fallocate` with `PUNCH_HOLE`); it reads as zeroes then.
    Punch,
}

/// A ring, its file, and memory for the requests.
pub struct BareRing {
    ring: IoUring,
    memory: ManuallyDrop<AlignedBuf>,
    base: *mut u8,
    slot_bytes: usize,
    busy: Vec<bool>,
    in_flight: usize,
}

// SAFETY: `base` points into `memory`, which is owned and moves along.
unsafe impl Send for BareRing {}

impl BareRing {
    /// A ring for `slots` requests of at most `slot_bytes` bytes each on `file`. It is bound to the thread that
    /// pushes first.
    ///
    /// # Errors
    /// `Limit` for too many slots or bytes; those of setting io_uring up.
    pub fn new(file: &File, slots: usize, slot_bytes: usize) -> Result<Self> {
        let limit = || {
            let text = format!("{slots} requests in flight of {slot_bytes} bytes are too many");
            Error::new(ErrorKind::Limit, text)
        };
        let stride = slot_bytes.checked_next_multiple_of(4096).ok_or_else(limit)?;
        let bytes = stride.checked_mul(slots).ok_or_else(limit)?;
        let entries = u32::try_from(slots.max(1).next_power_of_two()).map_err(|_| limit())?;
        if slots == 0 || entries > 32768 {
            return Err(limit());
        }
        let mut memory = ManuallyDrop::new(AlignedBuf::zeroed(bytes)?);
        let base = memory.as_mut_ptr();
        let mut builder = IoUring::<squeue::Entry, cqueue::Entry>::builder();
        builder.setup_single_issuer().setup_defer_taskrun().setup_coop_taskrun();
        // Enabled by the thread that pushes first: a single issuer must be that one.
        builder.setup_r_disabled();
        let ring = builder
            .build(entries)
            .or_else(|e| match e.raw_os_error() {
                // Before 6.1 the best flags are not known.
                Some(libc::EINVAL) => IoUring::builder().setup_r_disabled().build(entries),
                _ => Err(e),
            })
            .map_err(|e| {
                Error::io(
                    "cannot set io_uring up (too old a kernel, or forbidden? psync works anywhere)",
                    e,
                )
            })?;
        ring.submitter()
            .register_files(&[file.as_raw_fd()])
            .map_err(|e| Error::io("cannot register a file with io_uring", e))?;
        let busy = vec![false; slots];
        Ok(Self { ring, memory, base, slot_bytes: stride, busy, in_flight: 0 })
    }

    /// Binds the ring to this thread, which is the only one that may use it from now on.
    ///
    /// # Errors
    /// Of the system.
    pub fn start(&mut self) -> Result<()> {
        let enabled = self.ring.submitter().register_enable_rings();
        enabled.map_err(|e| Error::io("cannot start a ring", e))
    }

    /// The place of the first `len` bytes of a slot's memory, when the slot is not in flight.
    fn place(&self, slot: usize, len: usize) -> Result<*mut u8> {
        if self.busy.get(slot) != Some(&false) || len > self.slot_bytes {
            let text = format!("slot {slot} is in use, or too small for {len} bytes");
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        // SAFETY: `slot` is one of the slots that the memory was made for.
        Ok(unsafe { self.base.add(slot * self.slot_bytes) })
    }

    /// Fills the start of a slot's memory.
    ///
    /// # Errors
    /// `InvalidInput` when the slot is in flight or too small.
    pub fn put(&mut self, slot: usize, data: &[u8]) -> Result<()> {
        let to = self.place(slot, data.len())?;
        // SAFETY: `place` checked the length, and that the kernel does not use the slot.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()) };
        Ok(())
    }

    /// Copies the start of a slot's memory.
    ///
    /// # Errors
    /// As [`Self::put`].
    pub fn get(&self, slot: usize, data: &mut [u8]) -> Result<()> {
        let from = self.place(slot, data.len())?;
        // SAFETY: as in `put`.
        unsafe { std::ptr::copy_nonoverlapping(from, data.as_mut_ptr(), data.len()) };
        Ok(())
    }

    /// Prepares a request; [`Self::enter`] sends it.
    ///
    /// # Errors
    /// As [`Self::put`].
    #[inline]
    pub fn push(&mut self, slot: usize, op: BareOp, at: u64, len: u32) -> Result<()> {
        let bytes = if matches!(op, BareOp::Read | BareOp::Write) { len as usize } else { 0 };
        let memory = self.place(slot, bytes)?;
        let file = types::Fixed(0);
        let entry = match op {
            BareOp::Read => opcode::Read::new(file, memory, len).offset(at).build(),
            BareOp::Write => opcode::Write::new(file, memory, len).offset(at).build(),
            BareOp::Sync => opcode::Fsync::new(file).flags(FsyncFlags::DATASYNC).build(),
            BareOp::Punch => {
                let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                opcode::Fallocate::new(file, u64::from(len)).offset(at).mode(mode).build()
            }
        };
        // SAFETY: the memory is this slot's alone, not freed while anything is in flight, and not used again before its completion.
        unsafe { self.ring.submission().push(&entry.user_data(slot as u64)) }
            .map_err(|_| Error::new(ErrorKind::Limit, "the submission ring is full"))?;
        self.busy[slot] = true;
        self.in_flight += 1;
        Ok(())
    }

    /// Sends what was pushed and waits until `want` requests are complete, at most `limit` (`None`: for ever).
    ///
    /// # Errors
    /// Of the system.
    #[inline]
    pub fn enter(&mut self, want: usize, limit: Option<Duration>) -> Result<()> {
        let submitter = self.ring.submitter();
        let entered = match limit {
            None => self.ring.submit_and_wait(want),
            Some(limit) => {
                let time = Timespec::from(limit);
                submitter.submit_with_args(want, &SubmitArgs::new().timespec(&time))
            }
        };
        match entered {
            Ok(_) => Ok(()),
            // The limit has passed, a signal came, or completions must be taken out first.
            Err(e)
                if matches!(
                    e.raw_os_error(),
                    Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN)
                ) =>
            {
                Ok(())
            }
            Err(e) => Err(Error::io("io_uring_enter failed", e)),
        }
    }

    /// Gives out completed requests, `most` of them: the slot, and what the system call of that kind would have returned (bytes, 0, or a negative
    /// error number).
    #[inline]
    pub fn drain(&mut self, most: usize, mut each: impl FnMut(usize, i32)) {
        for entry in self.ring.completion().take(most) {
            let slot = entry.user_data() as usize;
            if let Some(busy) = self.busy.get_mut(slot) {
                *busy = false;
            }
            self.in_flight = self.in_flight.saturating_sub(1);
            each(slot, entry.result());
        }
    }

    /// Requests pushed and not given out yet.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }
}

impl Drop for BareRing {
    fn drop(&mut self) {
        if self.in_flight == 0 {
            // SAFETY: dropped once, here; the kernel uses none of it any more.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        }
        // Else the kernel may still read or write it, so it is never freed.
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read_and_a_slot_in_flight_is_not_touched() -> Result<()> {
        let file = tempfile::tempfile().map_err(|e| Error::io("a file", e))?;
        let Ok(mut ring) = BareRing::new(&file, 2, 5000) else { return Ok(()) };
        ring.start()?;
        ring.put(0, &[7; 5000])?;
        ring.push(0, BareOp::Write, 8192, 5000)?;
        assert!(ring.put(0, &[1]).is_err() && ring.get(0, &mut [0]).is_err());
        assert!(ring.push(0, BareOp::Read, 0, 1).is_err());
        assert!(
            ring.push(1, BareOp::Read, 0, 8193).is_err()
                && ring.push(2, BareOp::Sync, 0, 0).is_err()
        );
        let mut done = Vec::new();
        ring.enter(1, None)?;
        ring.drain(8, |slot, result| done.push((slot, result)));
        ring.push(1, BareOp::Read, 8192, 5000)?;
        ring.enter(1, Some(Duration::from_secs(30)))?;
        ring.drain(8, |slot, result| done.push((slot, result)));
        assert_eq!(done, [(0, 5000), (1, 5000)]);
        let mut back = [0; 5000];
        ring.get(1, &mut back)?;
        assert_eq!(back, [7; 5000]);
        assert_eq!(ring.in_flight(), 0);
        Ok(())
    }
}
