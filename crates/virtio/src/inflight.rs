//! Records of the requests under way, in memory that outlives the process: what a restarted back end must do again.
//!
//! Callers: [`crate::split::SplitQueue`], which keeps them, and the vhost-user session, which makes and maps the area.
//! The layout is that of the vhost-user specification, "Inflight I/O tracking", for split virtqueues: per queue a header
//! (`features: u64, version: u16, desc_num: u16, last_batch_head: u16, used_idx: u16`), then per descriptor
//! `inflight: u8, padding, next: u16, counter: u64`, in the host's byte order.
//!
//! Invariants: every store is a release store, so that a process killed anywhere leaves them in the order of the program
//! (a chain is recorded before it is carried out; the used index is shown before the records of its batch are cleared,
//! and those before the index is noted here). The front end shares the area: nothing read from it is used unchecked.

use crate::memory::Region;
use crate::vanish::Alarm;
use bedplate_types::limits::{MAX_QUEUE_SIZE, MAX_QUEUES};
use bedplate_types::{Error, ErrorKind, Result};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering};

const HEADER: u64 = 16;
const ENTRY: u64 = 16;
/// Queues begin at multiples of this, so that two never share a cache line.
const ALIGN: u64 = 64;
const VERSION: u16 = 1;

// Bytes from a queue's beginning.
const AT_FEATURES: usize = 0;
const AT_VERSION: usize = 8;
const AT_ENTRIES: usize = 10;
const AT_LAST_HEAD: usize = 12;
const AT_USED: usize = 14;
// Bytes from an entry's beginning.
const AT_NEXT: usize = 6;
const AT_COUNTER: usize = 8;

fn refused(why: &str) -> Error {
    Error::new(
        ErrorKind::InvalidInput,
        format!("the records of requests under way are refused: {why}"),
    )
}

/// Bytes that a queue of `entries` takes.
fn stride(entries: u16) -> u64 {
    (HEADER + ENTRY * u64::from(entries)).next_multiple_of(ALIGN)
}

fn check(queues: u16, entries: u16) -> Result<u64> {
    if queues == 0 || usize::from(queues) > MAX_QUEUES {
        return Err(refused(&format!(
            "they are for {queues} queues, and 1 to {MAX_QUEUES} are possible"
        )));
    }
    if entries == 0 || entries > MAX_QUEUE_SIZE {
        let text = format!("they are for queues of {entries}, and {MAX_QUEUE_SIZE} is the most");
        return Err(refused(&text));
    }
    Ok(stride(entries) * u64::from(queues))
}

/// The records of all queues of one front end.
pub struct InflightArea {
    region: Region,
    queues: u16,
    entries: u16,
}

impl InflightArea {
    /// Makes an empty area for `queues` queues of `entries` descriptors, to be given to the front end: a memory file
    /// that can't be made shorter, and its length in bytes.
    ///
    /// # Errors
    /// `InvalidInput` for numbers beyond the limits, `Io` when the system refuses.
    pub fn create(queues: u16, entries: u16) -> Result<(File, u64)> {
        let len = check(queues, entries)?;
        let failed = || {
            let e = std::io::Error::last_os_error();
            Error::io("cannot make memory for the records of requests under way", e)
        };
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: the name is a valid C string; the call has no other demands.
        let raw = unsafe { libc::memfd_create(c"bedplate-inflight".as_ptr(), flags) };
        if raw < 0 {
            return Err(failed());
        }
        // SAFETY: a fresh descriptor that nobody else owns.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        let size = libc::off_t::try_from(len).unwrap_or(libc::off_t::MAX);
        // SAFETY: the descriptor is open; neither call touches memory of this process.
        let made = unsafe {
            libc::ftruncate(raw, size) == 0 && libc::fcntl(raw, libc::F_ADD_SEALS, seals) == 0
        };
        if made { Ok((fd.into(), len)) } else { Err(failed()) }
    }

    /// Maps `len` bytes of `file` from `offset`: the records of `queues` queues of `entries` descriptors. `alarm` rings when
    /// the system has no memory for them.
    ///
    /// # Errors
    /// `InvalidInput` when the area is too small, not aligned, or could be made shorter while it is in use; `Io` when it
    /// can't be mapped.
    pub fn map(
        file: &File,
        (offset, len): (u64, u64),
        queues: u16,
        entries: u16,
        alarm: &Alarm,
    ) -> Result<Self> {
        let need = check(queues, entries)?;
        if len < need {
            return Err(refused(&format!("{len} bytes are too few, {need} are needed")));
        }
        if !offset.is_multiple_of(ALIGN) {
            return Err(refused("they begin at no multiple of 64"));
        }
        // SAFETY: the descriptor is open; the call touches no memory of this process.
        let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
        if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 {
            return Err(refused("their file is not sealed against being made shorter"));
        }
        let region = Region::map(file.as_fd(), offset, 0, 0, len, alarm)?;
        Ok(Self { region, queues, entries })
    }

    /// The records of queue `index`, made ready if they are new.
    ///
    /// # Errors
    /// `InvalidInput` when there are none for this queue, or they have another layout.
    pub fn queue(self: &Arc<Self>, index: usize) -> Result<InflightQueue> {
        let index = u16::try_from(index).ok().filter(|i| *i < self.queues);
        let index = index.ok_or_else(|| refused("there are none for this queue"))?;
        let at = stride(self.entries) * u64::from(index);
        // SAFETY: `map` found room for the strides of all queues, so this one lies in the mapping.
        let base = unsafe { self.region.host().add(at as usize) };
        let area = self.clone();
        let mut queue = InflightQueue {
            base,
            entries: self.entries,
            counter: 0,
            last: 0,
            batch: Vec::new(),
            _area: area,
        };
        queue.batch.reserve(usize::from(self.entries));
        let version = queue.word(AT_VERSION).load(Ordering::Acquire);
        if version == 0 {
            queue.word(AT_ENTRIES).store(self.entries, Ordering::Release);
            queue.word(AT_VERSION).store(VERSION, Ordering::Release);
        } else if version != VERSION
            || queue.word(AT_ENTRIES).load(Ordering::Relaxed) != self.entries
            || queue.long(AT_FEATURES).load(Ordering::Relaxed) != 0
        {
            return Err(refused("they have another layout"));
        }
        Ok(queue)
    }
}

/// The records of one queue.
pub struct InflightQueue {
    base: *mut u8,
    entries: u16,
    /// What the next chain is numbered with.
    counter: u64,
    /// The chain given back last.
    last: u16,
    /// Chains given back that the driver was not shown yet.
    batch: Vec<u16>,
    _area: Arc<InflightArea>,
}

impl InflightQueue {
    /// Number of descriptors there are records for.
    pub fn entries(&self) -> u16 {
        self.entries
    }

    #[inline]
    fn word(&self, at: usize) -> &AtomicU16 {
        // SAFETY: callers pass even places within this queue's header and entries, which `InflightArea::map` found
        // mapped; the area is 64-aligned, and only touched through atomics.
        unsafe { AtomicU16::from_ptr(self.base.add(at).cast()) }
    }

    #[inline]
    fn long(&self, at: usize) -> &AtomicU64 {
        // SAFETY: as `word`, with places that are multiples of 8.
        unsafe { AtomicU64::from_ptr(self.base.add(at).cast()) }
    }

    /// The mark of chain `head`.
    #[inline]
    fn mark(&self, head: u16) -> &AtomicU8 {
        // SAFETY: as `word`; callers pass heads below `entries`.
        unsafe { AtomicU8::from_ptr(self.base.add(entry(head))) }
    }

    /// Records that a chain was taken. `head` is below [`Self::entries`].
    #[inline]
    pub(crate) fn taken(&mut self, head: u16) {
        debug_assert!(head < self.entries);
        self.long(entry(head) + AT_COUNTER).store(self.counter, Ordering::Release);
        self.mark(head).store(1, Ordering::Release);
        self.counter = self.counter.wrapping_add(1);
    }

    /// Records that a chain is given back with the next used index that is shown.
    #[inline]
    pub(crate) fn given_back(&mut self, head: u16) {
        self.word(entry(head) + AT_NEXT).store(self.last, Ordering::Release);
        self.word(AT_LAST_HEAD).store(head, Ordering::Release);
        self.last = head;
        self.batch.push(head);
    }

    /// The driver has been shown the used index `used`, and with it all that was given back.
    #[inline]
    pub(crate) fn shown(&mut self, used: u16) {
        for &head in &self.batch {
            self.mark(head).store(0, Ordering::Release);
        }
        self.batch.clear();
        self.word(AT_USED).store(used, Ordering::Release);
    }

    /// The chains below `size` that were under way when an earlier process ended, the one taken last first. `used` is
    /// the index in the used ring.
    pub(crate) fn recover(&mut self, size: u16, used: u16) -> Vec<u16> {
        let entries = self.entries;
        let known = self.word(AT_USED).load(Ordering::Relaxed);
        let mut head = self.word(AT_LAST_HEAD).load(Ordering::Relaxed);
        // The last batch was shown to the driver, but its records were not all cleared.
        for _ in 0..used.wrapping_sub(known).min(entries) {
            if head >= entries {
                break;
            }
            self.mark(head).store(0, Ordering::Release);
            head = self.word(entry(head) + AT_NEXT).load(Ordering::Relaxed);
        }
        self.word(AT_USED).store(used, Ordering::Release);
        let marked = (0..entries.min(size)).filter(|&h| self.mark(h).load(Ordering::Relaxed) != 0);
        let number = |h: u16| self.long(entry(h) + AT_COUNTER).load(Ordering::Relaxed);
        let mut list = marked.map(|h| (number(h), h)).collect::<Vec<_>>();
        list.sort_unstable_by(|a, b| b.cmp(a));
        self.counter = list.first().map_or(0, |(n, _)| n.wrapping_add(1));
        list.into_iter().map(|(_, h)| h).collect()
    }
}

/// Where the entry of chain `head` begins.
#[inline]
fn entry(head: u16) -> usize {
    HEADER as usize + ENTRY as usize * usize::from(head)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn alarm() -> Alarm {
        Alarm::new().expect("alarm")
    }

    #[test]
    fn areas_that_do_not_fit_are_refused() {
        assert!(InflightArea::create(0, 128).is_err());
        assert!(InflightArea::create(1, 0).is_err());
        assert!(InflightArea::create(65, 128).is_err());
        assert!(InflightArea::create(1, MAX_QUEUE_SIZE + 1).is_err());
        let (file, len) = InflightArea::create(2, 128).expect("area");
        assert!(InflightArea::map(&file, (0, len), 2, 128, &alarm()).is_ok());
        assert!(InflightArea::map(&file, (0, len), 3, 128, &alarm()).is_err(), "too small");
        assert!(InflightArea::map(&file, (0, len), 2, 256, &alarm()).is_err(), "too small");
        assert!(InflightArea::map(&file, (8, len - 64), 1, 128, &alarm()).is_err(), "not aligned");
        assert!(
            InflightArea::map(&file, (0, len + 4096), 2, 128, &alarm()).is_err(),
            "the file is shorter"
        );
        assert!(InflightArea::map(&file, (u64::MAX - 63, len), 2, 128, &alarm()).is_err());
        let short = std::fs::File::open("/proc/self/exe").expect("a file");
        assert!(InflightArea::map(&short, (0, len), 2, 128, &alarm()).is_err(), "no seal");
    }

    #[test]
    fn records_of_another_layout_are_refused() {
        let (file, len) = InflightArea::create(2, 128).expect("area");
        let area = Arc::new(InflightArea::map(&file, (0, len), 2, 128, &alarm()).expect("map"));
        assert_eq!(area.queue(1).expect("records").entries(), 128);
        assert!(area.queue(2).is_err());
        let other = Arc::new(InflightArea::map(&file, (0, len), 2, 64, &alarm()).expect("map"));
        assert!(other.queue(0).is_ok(), "not used before");
        assert!(area.queue(0).is_err(), "made for 64");
    }

    #[test]
    fn what_a_hostile_front_end_writes_leads_to_chains_of_the_queue_only() {
        let (file, len) = InflightArea::create(1, 8).expect("area");
        let area = Arc::new(InflightArea::map(&file, (0, len), 1, 8, &alarm()).expect("map"));
        let mut queue = area.queue(0).expect("records");
        queue.word(AT_LAST_HEAD).store(0xffff, Ordering::Relaxed);
        (0..8).for_each(|h| queue.mark(h).store(0xff, Ordering::Relaxed));
        (0..8).for_each(|h| queue.word(entry(h) + AT_NEXT).store(9, Ordering::Relaxed));
        assert_eq!(queue.recover(4, 0x8000), [3, 2, 1, 0]);
        queue.word(AT_LAST_HEAD).store(1, Ordering::Relaxed);
        queue.long(entry(7) + AT_COUNTER).store(u64::MAX, Ordering::Relaxed);
        assert_eq!(queue.recover(8, 0), [7, 6, 5, 4, 3, 2, 0]);
    }
}
