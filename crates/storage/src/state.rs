//! Memory that outlives the process: words that a later process finds again.
//!
//! Callers: the qcow2 engine keeps its journal in it, through [`SharedWords`]; tests use plain memory instead. The real
//! thing is [`StateFile`], a file on a memory file system, mapped: a store into it is a store into memory, and is there
//! for whoever maps the file next, however this process ends. It is gone when the host goes down.

use bedplate_types::{Error, ErrorKind, Result};
use rustix::fs::{AtFlags, FallocateFlags, Mode, OFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;

const TMPFS_MAGIC: i64 = 0x0102_1994;
const RAMFS_MAGIC: i64 = 0x8584_58f6;

/// Words that another process may find after the end of this one.
pub trait SharedWords: Send + Sync {
    /// The words. Their number never changes.
    fn words(&self) -> &[AtomicU64];
}

impl SharedWords for Box<[AtomicU64]> {
    fn words(&self) -> &[AtomicU64] {
        self
    }
}

/// A file on a memory file system, mapped into this process.
pub struct StateFile {
    path: PathBuf,
    base: *const AtomicU64,
    words: usize,
    /// Keeps the file in being for [`Self::remove`], which must not remove another one.
    fd: OwnedFd,
}

// SAFETY: the mapping is only accessed as atomics, and lives as long as this value.
unsafe impl Send for StateFile {}
// SAFETY: as above.
unsafe impl Sync for StateFile {}

impl fmt::Debug for StateFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StateFile('{}')", self.path.display())
    }
}

fn failed(doing: &str, path: &Path) -> impl Fn(rustix::io::Errno) -> Error {
    move |e| Error::io(format!("cannot {doing} '{}'", path.display()), e.into())
}

/// Refuses folders and files that others could have written: what is found there is believed.
fn check_owner(fd: &OwnedFd, path: &Path) -> Result<rustix::fs::Stat> {
    let st = rustix::fs::fstat(fd).map_err(failed("look at", path))?;
    if st.st_uid != rustix::process::geteuid().as_raw() || st.st_mode & 0o022 != 0 {
        return Err(Error::new(
            ErrorKind::Denied,
            format!(
                "'{}' can't keep a server's state, since other users could change it; it must belong to this user and \
                 be writable by nobody else",
                path.display()
            ),
        ));
    }
    Ok(st)
}

/// Opens the folder for state files, made when it is missing.
fn open_folder(dir: &Path) -> Result<OwnedFd> {
    match rustix::fs::mkdir(dir, Mode::from_raw_mode(0o700)) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => {}
        Err(e) => return Err(failed("make the folder", dir)(e)),
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = rustix::fs::open(dir, flags, Mode::empty()).map_err(failed("open the folder", dir))?;
    let kind = rustix::fs::fstatfs(&fd).map_err(failed("look at", dir))?.f_type as i64;
    if !matches!(kind, TMPFS_MAGIC | RAMFS_MAGIC) {
        return Err(Error::new(
            ErrorKind::InvalidInput,
            format!(
                "'{}' is not on a memory file system (tmpfs), where a server's state must lie to cost no I/O; choose \
                 another folder with --state-dir, such as one in /run, or do without with --state-dir none",
                dir.display()
            ),
        ));
    }
    check_owner(&fd, dir)?;
    Ok(fd)
}

impl StateFile {
    /// Opens the file `name` in the folder `dir`, which is made when missing, with room for `words` words; what it
    /// holds stays. None when there is no such file and `create` is false. Blocks.
    ///
    /// # Errors
    /// `InvalidInput` when the folder is not on a memory file system, `Denied` when others could write there, `NoSpace`
    /// when there is no memory for it, or what the system reports.
    pub fn open(dir: &Path, name: &str, words: usize, create: bool) -> Result<Option<Self>> {
        if !create && !dir.exists() {
            return Ok(None);
        }
        let folder = open_folder(dir)?;
        let path = dir.join(name);
        let mut flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        if create {
            flags |= OFlags::CREATE;
        }
        let fd = match rustix::fs::openat(&folder, name, flags, Mode::from_raw_mode(0o600)) {
            Err(rustix::io::Errno::NOENT) if !create => return Ok(None),
            other => other.map_err(failed("open", &path))?,
        };
        let st = check_owner(&fd, &path)?;
        let bytes = words.saturating_mul(size_of::<AtomicU64>());
        let wrong = || {
            let text = format!("'{}' is no state file of this version", path.display());
            Error::new(ErrorKind::InvalidInput, text)
        };
        let len = u64::try_from(st.st_size).map_err(|_| wrong())?;
        if bytes == 0 || (len != 0 && len != bytes as u64) {
            return Err(wrong());
        }
        // All of it now: a store into memory that can't be had would kill the process.
        rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, bytes as u64)
            .map_err(failed("get memory for", &path))?;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), bytes, prot, MapFlags::SHARED, &fd, 0)
        };
        let base = base.map_err(failed("map", &path))?.cast_const().cast::<AtomicU64>();
        Ok(Some(Self { path, base, words, fd }))
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the file, unless another one has taken its place. The memory stays until this value goes.
    ///
    /// # Errors
    /// What the system reports.
    pub fn remove(&self) -> Result<()> {
        let mine = rustix::fs::fstat(&self.fd).map_err(failed("look at", &self.path))?;
        match rustix::fs::statat(rustix::fs::CWD, &self.path, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(st) if (st.st_dev, st.st_ino) == (mine.st_dev, mine.st_ino) => {
                rustix::fs::unlink(&self.path).map_err(failed("remove", &self.path))
            }
            _ => Ok(()),
        }
    }
}

impl SharedWords for StateFile {
    fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping holds this many words, page-aligned, and lives as long as `self`; all access to it, of
        // other processes too, is meant to be atomic, and any bits are a valid word.
        unsafe { std::slice::from_raw_parts(self.base, self.words) }
    }
}

impl Drop for StateFile {
    fn drop(&mut self) {
        let bytes = self.words * size_of::<AtomicU64>();
        // SAFETY: the range is that of the mapping made in `open`, and nothing borrows from it any more.
        if let Err(e) = unsafe { rustix::mm::munmap(self.base.cast_mut().cast(), bytes) } {
            tracing::debug!("cannot unmap '{}': {e}", self.path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir_in("/dev/shm").expect("a memory file system")
    }

    #[test]
    fn what_was_stored_is_found_by_the_next_one_until_it_is_removed() {
        let dir = folder();
        let dir = dir.path().join("state");
        assert!(StateFile::open(&dir, "a", 1024, false).expect("look").is_none());
        assert!(!dir.exists(), "looking makes nothing");
        let open = |create| StateFile::open(&dir, "a", 1024, create).expect("open");
        let first = open(true).expect("made");
        first.words()[1023].store(7, Ordering::Relaxed);
        drop(first);
        let second = open(false).expect("there");
        assert_eq!(second.words()[1023].load(Ordering::Relaxed), 7);
        assert!(StateFile::open(&dir, "a", 512, true).is_err(), "another size");
        second.remove().expect("remove");
        assert!(open(false).is_none());
        let third = open(true).expect("made");
        assert_eq!(third.words()[1023].load(Ordering::Relaxed), 0);
        second.remove().expect("another file's name is left alone");
        assert!(open(false).is_some());
    }

    #[test]
    fn folders_on_disks_and_those_of_others_are_refused() {
        use std::os::unix::fs::PermissionsExt;
        let dir = folder();
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o777)).expect("chmod");
        let e = StateFile::open(dir.path(), "a", 8, true).expect_err("anybody could write there");
        assert_eq!(e.kind(), ErrorKind::Denied);
        let e = StateFile::open(Path::new("/proc/self"), "a", 8, true).expect_err("no tmpfs");
        assert_eq!(e.kind(), ErrorKind::InvalidInput);
    }
}
