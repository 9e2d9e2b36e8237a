//! Folders for state files: on a memory file system, this user's, and nobody else's to change.
//!
//! Callers: [`crate::StateFile`], and whoever chooses the folder. Invariants: a folder is looked at through the descriptor
//! through which it is used, so it can't be exchanged in between; symbolic links are not followed to it; what was made for
//! something that then failed is removed again.

use bedplate_types::{Error, ErrorKind, Result};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

const TMPFS_MAGIC: i64 = 0x0102_1994;
const RAMFS_MAGIC: i64 = 0x8584_58f6;
/// Folders in which others may make files, but not rename or remove those of this user.
const STICKY: u32 = 0o1000;
const WRITABLE_BY_OTHERS: u32 = 0o022;

pub(crate) fn failed(doing: &str, path: &Path) -> impl Fn(rustix::io::Errno) -> Error {
    move |e| Error::io(format!("cannot {doing} '{}'", path.display()), e.into())
}

fn is_ours(st: &Stat) -> bool {
    st.st_uid == rustix::process::geteuid().as_raw() && st.st_mode & WRITABLE_BY_OTHERS == 0
}

/// Refuses folders and files that others could have written: what is found there is believed.
pub(crate) fn check_owner(fd: &OwnedFd, path: &Path) -> Result<Stat> {
    let st = rustix::fs::fstat(fd).map_err(failed("look at", path))?;
    if !is_ours(&st) {
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

/// Refuses a folder whose files cost I/O. `dir`: the one that state is to be in, which may be missing in `fd`.
fn check_memory(fd: &OwnedFd, dir: &Path) -> Result<()> {
    let kind = rustix::fs::fstatfs(fd).map_err(failed("look at", dir))?.f_type as i64;
    if matches!(kind, TMPFS_MAGIC | RAMFS_MAGIC) {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::InvalidInput,
        format!(
            "'{}' is not on a memory file system (tmpfs), where a server's state must lie to cost no I/O; choose another \
             folder with --state-dir, such as one in /dev/shm, or do without with --state-dir none",
            dir.display()
        ),
    ))
}

fn open_dir(at: BorrowedFd<'_>, name: &Path) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(at, name, flags, Mode::empty())
}

/// A name that was made in a folder, and is removed again unless it is kept.
pub(crate) struct Made {
    at: OwnedFd,
    name: PathBuf,
    flags: AtFlags,
    keeps: bool,
}

impl Made {
    pub(crate) fn file(at: &OwnedFd, name: &str) -> Option<Self> {
        Self::new(at, Path::new(name), AtFlags::empty())
    }

    fn new(at: &OwnedFd, name: &Path, flags: AtFlags) -> Option<Self> {
        // Without a descriptor to spare nothing more will be made, and what was made stays, empty.
        Some(Self { at: at.try_clone().ok()?, name: name.to_path_buf(), flags, keeps: false })
    }

    /// Leaves it where it is.
    pub(crate) fn keep(mut self) {
        self.keeps = true;
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        if !self.keeps {
            // A folder in which another process has put something meanwhile stays.
            let _ = rustix::fs::unlinkat(&self.at, &self.name, self.flags);
        }
    }
}

/// A folder for state files that is open.
pub(crate) struct Folder {
    pub(crate) fd: OwnedFd,
    /// Set when it was made just now.
    pub(crate) made: Option<Made>,
}

/// Opens the folder `dir`, or makes it when it is missing and `create` is set. None when it is missing otherwise.
///
/// # Errors
/// `InvalidInput` when it is not on a memory file system or a symbolic link, `Denied` when others could write there, or
/// what the system reports. Nothing was made then.
pub(crate) fn open_folder(dir: &Path, create: bool) -> Result<Option<Folder>> {
    use rustix::io::Errno;
    let cannot = || failed("open the folder", dir);
    let made = match open_dir(rustix::fs::CWD, dir) {
        Ok(fd) => {
            check_memory(&fd, dir)?;
            check_owner(&fd, dir)?;
            return Ok(Some(Folder { fd, made: None }));
        }
        Err(Errno::NOENT) if !create => return Ok(None),
        Err(Errno::NOENT) => make_folder(dir)?,
        Err(Errno::NOTDIR | Errno::LOOP) if dir.is_symlink() => {
            let dir = dir.display();
            let text = format!("'{dir}' is a symbolic link; name the folder that it leads to");
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        Err(e) => return Err(cannot()(e)),
    };
    let fd = open_dir(rustix::fs::CWD, dir).map_err(cannot())?;
    check_memory(&fd, dir)?;
    check_owner(&fd, dir)?;
    Ok(Some(Folder { fd, made }))
}

/// Makes the folder, where it will be in memory.
fn make_folder(dir: &Path) -> Result<Option<Made>> {
    let parent = dir.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = dir.file_name().map(Path::new).unwrap_or(dir);
    // This one is where the operator or the system has it, also by way of a link.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let parent =
        rustix::fs::open(parent, flags, Mode::empty()).map_err(failed("make the folder", dir))?;
    check_memory(&parent, dir)?;
    match rustix::fs::mkdirat(&parent, name, Mode::from_raw_mode(0o700)) {
        Ok(()) => Ok(Made::new(&parent, name, AtFlags::REMOVEDIR)),
        Err(rustix::io::Errno::EXIST) => Ok(None),
        Err(e) => Err(failed("make the folder", dir)(e)),
    }
}

/// Folders for state in places where every user may make files (`/dev/shm`).
///
/// Their names can't be known before: whoever could take the name of another user's folder could keep that one from having
/// any. So they end in random digits, and are found again by who owns them.
#[derive(Clone, Copy, Debug)]
pub struct SharedPlace<'a> {
    /// The place.
    pub place: &'a Path,
    /// What the names of the folders begin with.
    pub prefix: &'a str,
}

impl SharedPlace<'_> {
    /// The folders of this user that are there, by name. None that others could change, and no symbolic links. Blocks.
    pub fn folders(&self) -> Vec<PathBuf> {
        let mine = |entry: std::io::Result<std::fs::DirEntry>| {
            let path = entry.ok()?.path();
            let named = |n: &OsStr| n.as_encoded_bytes().starts_with(self.prefix.as_bytes());
            if !path.file_name().is_some_and(named) {
                return None;
            }
            let st = rustix::fs::lstat(&path).ok()?;
            let is_folder = FileType::from_raw_mode(st.st_mode) == FileType::Directory;
            (is_folder && is_ours(&st)).then_some(path)
        };
        let mut all: Vec<PathBuf> =
            std::fs::read_dir(self.place).into_iter().flatten().filter_map(mine).collect();
        all.sort();
        all
    }

    /// The path of a folder that may be made there. `random`: a number that nobody can guess. Blocks.
    ///
    /// # Errors
    /// `Denied` when others could exchange folders of this user there, or what the system reports.
    pub fn new_folder(&self, random: u64) -> Result<PathBuf> {
        let place = self.place;
        let fd = open_dir(rustix::fs::CWD, place).map_err(failed("open the folder", place))?;
        let st = rustix::fs::fstat(fd.as_fd()).map_err(failed("look at", place))?;
        let trusted = st.st_uid == 0 || st.st_uid == rustix::process::geteuid().as_raw();
        let kept = st.st_mode & WRITABLE_BY_OTHERS == 0 || st.st_mode & STICKY != 0;
        if !(trusted && kept) {
            return Err(Error::new(
                ErrorKind::Denied,
                format!(
                    "'{}' can't have a folder for a server's state, since other users could put another in its place",
                    place.display()
                ),
            ));
        }
        Ok(place.join(format!("{}{random:016x}", self.prefix)))
    }
}
