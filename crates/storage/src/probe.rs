//! What a file or device asks of direct I/O: alignment of offsets and memory, block sizes.
//!
//! The kernel tells it for files and devices since 6.1 (`STATX_DIOALIGN`); before that devices are asked by ioctl
//! and files by trying.

use bedplate_runtime::buf::AlignedBuf;
use bedplate_types::{Error, Result};
use rustix::fs::{AtFlags, Stat, StatxFlags};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

/// `STATX_DIOALIGN` (linux/stat.h).
const DIOALIGN: StatxFlags = StatxFlags::from_bits_retain(0x2000);

/// Offsets and memory alignment of direct I/O, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DirectAlign {
    pub(crate) offset: u32,
    pub(crate) memory: u32,
}

impl DirectAlign {
    /// Page-cached I/O takes everything.
    pub(crate) const CACHED: Self = Self { offset: 1, memory: 1 };

    /// Finds out about an open file or device. `readable` tells whether trying is possible.
    pub(crate) fn of(fd: BorrowedFd<'_>, is_device: bool, name: &str) -> Result<Self> {
        if let Some(told) = told(fd) {
            return Ok(told);
        }
        if is_device && let Ok(block) = rustix::fs::ioctl_blksszget(fd) {
            return Ok(Self { offset: block.max(512), memory: block.max(512) });
        }
        tried(fd, name)
    }
}

/// What the kernel tells; `None` when it does not know.
fn told(fd: BorrowedFd<'_>) -> Option<DirectAlign> {
    let st = rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, DIOALIGN).ok()?;
    let (offset, memory) = (st.stx_dio_offset_align, st.stx_dio_mem_align);
    let told = st.stx_mask & DIOALIGN.bits() != 0;
    let sane = offset.is_power_of_two() && memory.is_power_of_two() && offset <= 1 << 16;
    // Below 512 only page-cached files go; a smaller unit would gain nothing but odd requests.
    (told && sane && memory <= 4096)
        .then(|| DirectAlign { offset: offset.max(512), memory: memory.max(4) })
}

/// The smallest block that a read accepts.
fn tried(fd: BorrowedFd<'_>, name: &str) -> Result<DirectAlign> {
    let safe = DirectAlign { offset: 4096, memory: 4096 };
    let empty = rustix::fs::fstat(fd).map_or(true, |st| st.st_size < 4096);
    if empty {
        // Reads at the end succeed whatever their size, so they tell nothing.
        return Ok(safe);
    }
    let mut buf = AlignedBuf::zeroed(4096)?;
    for offset in [512u32, 1024, 2048] {
        match rustix::io::pread(fd, &mut buf[..offset as usize], u64::from(offset)) {
            Ok(_) => return Ok(DirectAlign { offset, memory: offset }),
            Err(rustix::io::Errno::INVAL) => {}
            Err(e) => {
                return Err(Error::io(format!("cannot read from '{name}'"), e.into()));
            }
        }
    }
    Ok(safe)
}

/// The device's or file system's own units.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Blocks {
    /// The unit in which space is given back.
    pub(crate) discard: u32,
    /// The unit that is best not split.
    pub(crate) physical: u32,
    /// Ranges given to the device's own discard and zeroing are made of these; files take any.
    pub(crate) logical: u32,
    /// A device can write zeroes without being sent them.
    pub(crate) fast_zeroes: bool,
}

impl Blocks {
    pub(crate) fn of(fd: impl AsFd, st: &Stat, is_device: bool) -> Self {
        let fd = fd.as_fd();
        let power = |n: u64| u32::try_from(n).ok().filter(|n| n.is_power_of_two());
        if !is_device {
            let unit = u64::try_from(st.st_blksize).ok().and_then(power).unwrap_or(4096);
            let unit = unit.clamp(512, 1 << 20);
            return Self { discard: unit, physical: unit.min(4096), logical: 1, fast_zeroes: true };
        }
        let queue = queue_dir(st);
        let number = |file: &str| read_number(queue.as_deref()?.join(file).as_path());
        let physical = rustix::fs::ioctl_blkpbszget(fd).unwrap_or(512);
        Self {
            discard: number("discard_granularity").and_then(power).unwrap_or(physical).max(512),
            physical: power(u64::from(physical)).unwrap_or(4096).max(512),
            logical: rustix::fs::ioctl_blksszget(fd).unwrap_or(physical).max(512),
            fast_zeroes: number("write_zeroes_max_bytes").is_some_and(|n| n > 0),
        }
    }
}

/// The folder of the device's queue in sysfs; a partition's is that of its disk.
fn queue_dir(st: &Stat) -> Option<PathBuf> {
    let (major, minor) = (rustix::fs::major(st.st_rdev), rustix::fs::minor(st.st_rdev));
    let device = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    ["queue", "../queue"].iter().map(|q| device.join(q)).find(|p| p.is_dir())
}

fn read_number(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}
