//! The system calls that no safe wrapper is at hand for. Every other module of this crate but the tests is free
//! of `unsafe`, except where it hands raw segments on.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// `BLKDISCARD` (linux/fs.h): gives the range back; the argument is `[start, length]`.
const BLKDISCARD: libc::Ioctl = 0x1277;

fn check(result: i32) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn one_byte(kind: i32, byte: i64) -> libc::flock {
    // SAFETY: `flock` is a plain C structure for which all zeroes is a valid value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    // The kinds are 0 to 2, SEEK_SET is 0: both fit the field on every platform.
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = byte;
    lock.l_len = 1;
    lock
}

/// Takes (or gives back) a shared lock on one byte, owned by the open file description. Does not wait.
pub(crate) fn set_shared_lock(fd: impl AsFd, byte: i64, locked: bool) -> io::Result<()> {
    let lock = one_byte(if locked { libc::F_RDLCK } else { libc::F_UNLCK }, byte);
    // SAFETY: the descriptor is open and the structure lives across the call, which only reads it.
    check(unsafe { libc::fcntl(fd.as_fd().as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) })
}

/// Whether somebody else has a lock on this byte.
pub(crate) fn is_locked_elsewhere(fd: impl AsFd, byte: i64) -> io::Result<bool> {
    let mut lock = one_byte(libc::F_WRLCK, byte);
    // SAFETY: the descriptor is open and the structure lives across the call, which fills it in.
    check(unsafe { libc::fcntl(fd.as_fd().as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) })?;
    Ok(i32::from(lock.l_type) != libc::F_UNLCK)
}

/// Gives a range of a block device back.
pub(crate) fn discard_device(fd: impl AsFd, at: u64, len: u64) -> io::Result<()> {
    let range = [at, len];
    // SAFETY: the descriptor is open; BLKDISCARD reads two 64-bit numbers from its argument.
    check(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), BLKDISCARD, range.as_ptr()) })
}

/// Writes dirty pages of the range out and waits until they are clean. Says nothing about durability.
pub(crate) fn clean_pages(fd: impl AsFd, at: u64, len: u64) -> io::Result<()> {
    let too_far = |_| io::Error::from_raw_os_error(libc::EFBIG);
    let (at, len) = (i64::try_from(at).map_err(too_far)?, i64::try_from(len).map_err(too_far)?);
    let flags = libc::SYNC_FILE_RANGE_WAIT_BEFORE
        | libc::SYNC_FILE_RANGE_WRITE
        | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: the call takes no pointers.
    check(unsafe { libc::sync_file_range(fd.as_fd().as_raw_fd(), at, len, flags) })
}
