//! Guest memory as a front end shares it: regions of files, mapped into this process.
//!
//! Callers: the control side of an export makes a [`GuestMemory`] for every change of the memory table; queues
//! translate with it. Invariants: regions are sorted by guest address and never overlap; a region's mapping
//! lives as long as any `GuestMemory` that holds it. Memory whose file was made shorter can be accessed: it rings the
//! front end's [`Alarm`] then.

use crate::vanish::{Alarm, Guarded};
use bedplate_types::{Error, ErrorKind, Result};
use libc::iovec;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;
const PAGE: u64 = 4096;

/// A shared mapping of a part of a file.
struct Mapping {
    /// What mmap gave.
    base: *mut u8,
    /// How much of it.
    len: usize,
    /// Against accesses to what the front end has taken away. Set from before the first access.
    guard: Option<Guarded>,
    alarm: Alarm,
}

// SAFETY: an address range of shared memory, owned here; any thread may access and unmap it.
unsafe impl Send for Mapping {}
// SAFETY: as above; nothing in it changes.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Before something else lies at this address.
        self.guard = None;
        // SAFETY: `base` and `len` are those of the mmap call, and no region names this mapping any more.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}

/// A run of guest memory.
#[derive(Clone)]
pub struct Region {
    gpa: u64,
    uva: u64,
    len: u64,
    host: *mut u8,
    mapping: Arc<Mapping>,
}

// SAFETY: the mapping is shared memory that is only accessed by raw reads and writes; its owner is an Arc.
unsafe impl Send for Region {}
// SAFETY: as above; nothing in a region changes after its making.
unsafe impl Sync for Region {}

fn page_size(fd: BorrowedFd<'_>) -> u64 {
    // SAFETY: an all-zero statfs is a valid value to be overwritten.
    let mut fs: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: `fs` is valid for the call and the descriptor is borrowed.
    let rc = unsafe { libc::fstatfs(fd.as_raw_fd(), &raw mut fs) };
    // Mappings of huge pages must begin and end at huge pages.
    if rc == 0 && fs.f_type as i64 == HUGETLBFS_MAGIC {
        return u64::try_from(fs.f_bsize).unwrap_or(PAGE).max(PAGE);
    }
    PAGE
}

fn file_len(fd: BorrowedFd<'_>) -> Result<u64> {
    // SAFETY: an all-zero stat is a valid value to be overwritten.
    let mut st: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: `st` is valid for the call and the descriptor is borrowed.
    if unsafe { libc::fstat(fd.as_raw_fd(), &raw mut st) } != 0 {
        let e = std::io::Error::last_os_error();
        return Err(Error::io("cannot tell the size of the guest memory's file", e));
    }
    // Devices (such as /dev/dax) have no length of their own; mmap checks them.
    if st.st_mode & libc::S_IFMT != libc::S_IFREG {
        return Ok(u64::MAX);
    }
    Ok(u64::try_from(st.st_size).unwrap_or(0))
}

impl Region {
    /// Maps `len` bytes of `fd` from `offset`: the guest's memory at `gpa`, which the front end has at `uva`. `alarm` rings when
    /// some of it is found to be gone.
    ///
    /// # Errors
    /// `InvalidInput` when an end leaves 64 bits or the file is too short, `Io` when it can't be mapped.
    pub fn map(
        fd: BorrowedFd<'_>,
        offset: u64,
        gpa: u64,
        uva: u64,
        len: u64,
        alarm: &Alarm,
    ) -> Result<Self> {
        let bad = |why: &str| {
            let text = format!("guest memory at {gpa:#x} of {len:#x} bytes is refused: {why}");
            Error::new(ErrorKind::InvalidInput, text)
        };
        let fits = |start: u64| start.checked_add(len).is_some();
        if len == 0 || !fits(gpa) || !fits(uva) || !fits(offset) {
            return Err(bad("it is empty or leaves 64 bits"));
        }
        if file_len(fd)? < offset + len {
            return Err(bad("its file is shorter"));
        }
        let page = page_size(fd);
        let start = offset - offset % page;
        let skip = offset - start;
        let whole = (skip.checked_add(len))
            .and_then(|n| n.checked_next_multiple_of(page))
            .and_then(|n| usize::try_from(n).ok())
            .ok_or_else(|| bad("it does not fit the address space"))?;
        let start =
            libc::off_t::try_from(start).map_err(|_| bad("its file offset is too large"))?;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                whole,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_NORESERVE,
                fd.as_raw_fd(),
                start,
            )
        };
        if base == libc::MAP_FAILED {
            let e = std::io::Error::last_os_error();
            return Err(Error::io(format!("cannot map guest memory at {gpa:#x}"), e));
        }
        // Guest memory has no place in a core dump; it is only a hint, so a failure does not matter.
        // SAFETY: the range is the mapping just made.
        unsafe { libc::madvise(base, whole, libc::MADV_DONTDUMP) };
        // The handler of bus errors names it by its number.
        base.expose_provenance();
        let base = base.cast::<u8>();
        let mut mapping = Mapping { base, len: whole, guard: None, alarm: alarm.clone() };
        mapping.guard = Some(Guarded::new(base, whole, page as usize, alarm)?);
        // SAFETY: `skip` is below `whole`: it lies inside the mapping.
        let host = unsafe { base.add(skip as usize) };
        Ok(Self { gpa, uva, len, host, mapping: Arc::new(mapping) })
    }

    /// The guest's address of the first byte.
    pub fn gpa(&self) -> u64 {
        self.gpa
    }

    /// The front end's address of the first byte.
    pub fn uva(&self) -> u64 {
        self.uva
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True when there is no byte; never the case for a mapped region.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first byte in this process.
    pub(crate) fn host(&self) -> *mut u8 {
        self.host
    }

    fn end(&self) -> u64 {
        self.gpa + self.len
    }

    /// True when the front end's memory was found to be gone. What was read before is only right when it is false.
    #[inline]
    pub(crate) fn is_gone(&self) -> bool {
        self.mapping.alarm.rang()
    }
}

/// All regions of one guest.
#[derive(Clone, Default)]
pub struct GuestMemory {
    regions: Vec<Region>,
}

impl GuestMemory {
    /// Memory made of `regions`.
    ///
    /// # Errors
    /// `InvalidInput` when two of them overlap in guest addresses.
    pub fn new(mut regions: Vec<Region>) -> Result<Self> {
        regions.sort_by_key(Region::gpa);
        for pair in regions.windows(2) {
            if pair[0].end() > pair[1].gpa {
                let text = format!("guest memory regions overlap at {:#x}", pair[1].gpa);
                return Err(Error::new(ErrorKind::InvalidInput, text));
            }
        }
        Ok(Self { regions })
    }

    /// The regions, by guest address.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// True when some of it was found to be gone. What was read before this was asked is only right when it is false.
    #[inline]
    pub fn is_gone(&self) -> bool {
        // All of a front end's memory has one alarm.
        self.regions.first().is_some_and(Region::is_gone)
    }

    #[inline]
    fn find(&self, gpa: u64) -> Option<usize> {
        let i = self.regions.partition_point(|r| r.gpa <= gpa).checked_sub(1)?;
        (gpa - self.regions[i].gpa < self.regions[i].len).then_some(i)
    }

    /// Adds the host's memory for `len` guest bytes at `gpa` to `out`: one segment, or one for each region where
    /// the range goes on in the next. False when a part of it is no memory; `out` may then hold the rest.
    #[inline]
    pub fn append(&self, gpa: u64, len: u32, out: &mut Vec<iovec>) -> bool {
        let Some(mut i) = self.find(gpa) else { return false };
        let mut at = gpa - self.regions[i].gpa;
        let mut left = u64::from(len);
        loop {
            let r = &self.regions[i];
            let n = left.min(r.len - at);
            // SAFETY: `at` is below the region's length, so the address lies in its mapping.
            let base = unsafe { r.host.add(at as usize) };
            out.push(iovec { iov_base: base.cast(), iov_len: n as usize });
            left -= n;
            if left == 0 {
                return true;
            }
            match self.regions.get(i + 1) {
                Some(next) if next.gpa == r.end() => (i, at) = (i + 1, 0),
                _ => return false,
            }
        }
    }

    /// The host's address of `len` guest bytes at `gpa`, when they lie in one region.
    #[inline]
    pub fn contiguous(&self, gpa: u64, len: u64) -> Option<*mut u8> {
        let r = &self.regions[self.find(gpa)?];
        let at = gpa - r.gpa;
        // SAFETY: `at` is below the region's length, so the address lies in its mapping.
        (len <= r.len - at).then(|| unsafe { r.host.add(at as usize) })
    }

    /// The host's address of `len` bytes that the front end has at `uva`, when they lie in one region.
    pub fn from_uva(&self, uva: u64, len: u64) -> Option<*mut u8> {
        let inside = |r: &&Region| uva >= r.uva && uva - r.uva < r.len;
        let r = self.regions.iter().find(inside)?;
        let at = uva - r.uva;
        // SAFETY: `at` is below the region's length, so the address lies in its mapping.
        (len <= r.len - at).then(|| unsafe { r.host.add(at as usize) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::{AsFd, FromRawFd, OwnedFd};

    fn memfd(len: i64) -> OwnedFd {
        // SAFETY: plain system calls; the descriptor is fresh and owned by nobody else.
        unsafe {
            let fd = libc::memfd_create(c"t".as_ptr(), libc::MFD_CLOEXEC);
            assert!(fd >= 0 && libc::ftruncate(fd, len) == 0);
            OwnedFd::from_raw_fd(fd)
        }
    }

    fn alarm() -> Alarm {
        Alarm::new().expect("alarm")
    }

    #[test]
    fn ranges_go_on_in_the_next_region_and_stop_at_gaps() {
        let fd = memfd(0x4000);
        let r = |off, gpa, len| {
            Region::map(fd.as_fd(), off, gpa, gpa + 0x10_0000, len, &alarm()).expect("map")
        };
        let m =
            GuestMemory::new(vec![r(0x1000, 0x9000, 0x1000), r(0, 0x8000, 0x1000)]).expect("ok");
        let mut out = Vec::new();
        assert!(m.append(0x8ff0, 0x20, &mut out));
        assert_eq!(out.iter().map(|s| s.iov_len).collect::<Vec<_>>(), [0x10, 0x10]);
        assert!(!m.append(0x9ff0, 0x11, &mut out));
        assert!(!m.append(0x7fff, 1, &mut out));
        assert!(!m.append(u64::MAX, 1, &mut out));
        assert!(m.contiguous(0x8ff0, 0x20).is_none());
        assert!(m.contiguous(0x9000, 0x1000).is_some());
        assert!(m.from_uva(0x10_8000, 0x1000).is_some());
        assert!(m.from_uva(0x10_8001, 0x1000).is_none());
        assert!(m.from_uva(0x8000, 1).is_none());
    }

    #[test]
    fn overlaps_short_files_and_wrapping_ends_are_refused() {
        let fd = memfd(0x2000);
        let map = |off, gpa, len| Region::map(fd.as_fd(), off, gpa, 0, len, &alarm());
        let (a, b) = (map(0, 0, 0x2000).expect("map"), map(0, 0x1000, 0x1000).expect("map"));
        assert!(GuestMemory::new(vec![a, b]).is_err());
        assert!(map(0x1000, 0, 0x1001).is_err());
        assert!(map(0, u64::MAX, 2).is_err());
        assert!(map(u64::MAX, 0, 2).is_err());
        assert!(map(0, 0, 0).is_err());
    }

    #[test]
    fn unaligned_file_offsets_reach_the_right_bytes() {
        let fd = memfd(0x2000);
        let whole = Region::map(fd.as_fd(), 0, 0, 0, 0x2000, &alarm()).expect("map");
        let part = Region::map(fd.as_fd(), 0x1234, 0, 0, 0x100, &alarm()).expect("map");
        // SAFETY: both addresses lie inside their mappings.
        unsafe {
            whole.host.add(0x1234).write(7);
            assert_eq!(part.host.read(), 7);
        }
    }
}
