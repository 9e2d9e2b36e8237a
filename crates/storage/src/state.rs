//! Memory that outlives the process: words that a later process finds again.
//!
//! Callers: the qcow2 engine keeps its journal in it, through [`SharedWords`]; tests use plain memory instead. The real
//! thing is [`StateFile`], a file on a memory file system, mapped: a store into it is a store into memory, and is there
//! for whoever maps the file next, however this process ends. It is gone when the host goes down.

use crate::state_folder::{Made, check_owner, failed, open_folder};
use bedplate_types::{Error, ErrorKind, Result};
use rustix::fs::{AtFlags, FallocateFlags, Mode, OFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;

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
    name: String,
    folder: OwnedFd,
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

/// Opens a file in a folder, and tells whether it was made for that. None when it is missing and `create` is false.
fn open_file(
    folder: &OwnedFd,
    name: &str,
    create: bool,
) -> rustix::io::Result<Option<(OwnedFd, Option<Made>)>> {
    use rustix::io::Errno;
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mode = Mode::from_raw_mode(0o600);
    match rustix::fs::openat(folder, name, flags, mode) {
        Err(Errno::NOENT) if create => {
            // The image's lock is held, so nobody else makes this very file.
            let flags = flags | OFlags::CREATE | OFlags::EXCL;
            let fd = rustix::fs::openat(folder, name, flags, mode)?;
            Ok(Some((fd, Made::file(folder, name))))
        }
        Err(Errno::NOENT) => Ok(None),
        other => Ok(Some((other?, None))),
    }
}

impl StateFile {
    /// Opens the file `name` in the folder `dir`, with room for `words` words; what it holds stays. Folder and file are made
    /// when they are missing and `create` is set; otherwise there is None then. Blocks.
    ///
    /// # Errors
    /// `InvalidInput` when the folder is not on a memory file system, `Denied` when others could write there, `NoSpace`
    /// when there is no memory for it, or what the system reports. Nothing that was not there before is left then.
    pub fn open(dir: &Path, name: &str, words: usize, create: bool) -> Result<Option<Self>> {
        let path = dir.join(name);
        let bytes = words.saturating_mul(size_of::<AtomicU64>());
        let wrong = || {
            let text = format!("'{}' is no state file of this version", path.display());
            Error::new(ErrorKind::InvalidInput, text)
        };
        let Some(folder) = open_folder(dir, create)? else { return Ok(None) };
        let Some((fd, made)) =
            open_file(&folder.fd, name, create).map_err(failed("open", &path))?
        else {
            return Ok(None);
        };
        let st = check_owner(&fd, &path)?;
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
        [made, folder.made].into_iter().flatten().for_each(Made::keep);
        let (name, folder) = (name.to_owned(), folder.fd);
        Ok(Some(Self { path, base, words, fd, name, folder }))
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
        match rustix::fs::statat(&self.folder, &self.name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(st) if (st.st_dev, st.st_ino) == (mine.st_dev, mine.st_ino) => {
                rustix::fs::unlinkat(&self.folder, &self.name, AtFlags::empty())
                    .map_err(failed("remove", &self.path))
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
    use crate::SharedPlace;
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
    fn folders_on_disks_and_those_of_others_are_refused_and_nothing_is_left_in_them() {
        use std::os::unix::fs::PermissionsExt;
        let dir = folder();
        let refused = |dir: &Path, words| {
            StateFile::open(dir, "a", words, true).map(drop).expect_err("refused").kind()
        };
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o777)).expect("chmod");
        assert_eq!(refused(dir.path(), 8), ErrorKind::Denied, "anybody could write there");
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o700)).expect("chmod");
        std::os::unix::fs::symlink(dir.path(), dir.path().join("link")).expect("link");
        assert_eq!(refused(&dir.path().join("link"), 8), ErrorKind::InvalidInput, "a link");
        std::fs::remove_file(dir.path().join("link")).expect("remove");
        // More than there can be: the file is there already when that shows.
        for dir in [dir.path(), &dir.path().join("new")] {
            assert!(StateFile::open(dir, "a", usize::MAX / 16, true).is_err());
        }
        assert_eq!(refused(Path::new("/proc/self"), 8), ErrorKind::InvalidInput, "no tmpfs");
        assert_eq!(std::fs::read_dir(dir.path()).expect("list").count(), 0);
        let disk = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder on a disk");
        assert_eq!(refused(&disk.path().join("new"), 8), ErrorKind::InvalidInput, "on a disk");
        assert_eq!(std::fs::read_dir(disk.path()).expect("list").count(), 0);
    }

    #[test]
    fn folders_in_a_shared_place_are_found_by_their_owner_whoever_else_is_there() {
        use std::os::unix::fs::PermissionsExt;
        let dir = folder();
        let open_to_all = |path: &Path, mode| {
            std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).expect("chmod");
        };
        let place = SharedPlace { place: dir.path(), prefix: "bedplate-7-" };
        open_to_all(dir.path(), 0o777);
        assert!(place.new_folder(1).is_err(), "others could exchange it");
        open_to_all(dir.path(), 0o1777);
        let mine = place.new_folder(0xb).expect("path");
        assert!(!mine.exists() && place.folders().is_empty());
        StateFile::open(&mine, "a", 8, true).expect("open").expect("made");
        let squatted = [place.new_folder(0xa).expect("path"), place.new_folder(0xc).expect("path")];
        std::fs::create_dir(&squatted[0]).expect("folder");
        open_to_all(&squatted[0], 0o777);
        std::os::unix::fs::symlink(&mine, &squatted[1]).expect("link");
        std::fs::create_dir(dir.path().join("bedplate-8-a")).expect("folder");
        assert_eq!(place.folders(), [mine]);
    }
}
