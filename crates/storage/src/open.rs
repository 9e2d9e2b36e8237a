//! Opening and creating: flags, kinds of file, locks, and sentences for all that can go wrong.

use crate::file::{FileStorage, Parts};
use crate::lock::{ImageLock, IoMark, LATE_IO, LockMode};
use crate::probe::{Blocks, DirectAlign};
use bedplate_runtime::File;
use bedplate_types::{ByteLen, CacheMode, Error, ErrorKind, Result};
use rustix::fs::{FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;

/// How a file or device is opened.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Where it is.
    pub path: PathBuf,
    /// Refuse all changes.
    pub read_only: bool,
    /// How the host's page cache is used, and what writes promise.
    pub cache: CacheMode,
    /// How other programs are kept off it.
    pub lock: LockMode,
    /// For [`FileStorage::create`]: a file that exists is an error, not emptied.
    pub exclusive: bool,
}

impl OpenOptions {
    /// For writing, with direct I/O and locked.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            read_only: false,
            cache: CacheMode::default(),
            lock: LockMode::default(),
            exclusive: false,
        }
    }

    /// For reading only.
    #[must_use]
    pub fn read_only(mut self, yes: bool) -> Self {
        self.read_only = yes;
        self
    }

    /// With this use of the page cache.
    #[must_use]
    pub fn cache(mut self, mode: CacheMode) -> Self {
        self.cache = mode;
        self
    }

    /// With this protection against other programs.
    #[must_use]
    pub fn lock(mut self, mode: LockMode) -> Self {
        self.lock = mode;
        self
    }

    /// Whether creating fails when the file exists.
    #[must_use]
    pub fn exclusive(mut self, yes: bool) -> Self {
        self.exclusive = yes;
        self
    }

    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn flags(&self) -> OFlags {
        let mut flags = OFlags::CLOEXEC | OFlags::NOCTTY;
        flags |= if self.read_only { OFlags::RDONLY } else { OFlags::RDWR };
        if self.cache.direct() {
            flags |= OFlags::DIRECT;
        }
        if !self.cache.write_cache() {
            flags |= OFlags::DSYNC;
        }
        flags
    }

    fn open(&self, flags: OFlags) -> Result<OwnedFd> {
        rustix::fs::open(&self.path, flags, Mode::from_raw_mode(0o644))
            .map_err(|e| self.cannot_open(e, flags))
    }

    fn cannot_open(&self, e: Errno, flags: OFlags) -> Error {
        let name = self.name();
        if e == Errno::INVAL && flags.contains(OFlags::DIRECT) {
            return Error::new(
                ErrorKind::Unsupported,
                format!(
                    "cannot open '{name}' for direct I/O: its file system has none; use --cache writeback"
                ),
            );
        }
        if e == Errno::BUSY && flags.contains(OFlags::EXCL) {
            return Error::new(
                ErrorKind::Locked,
                format!(
                    "cannot open '{name}' for writing: the host itself uses this device (it is mounted, or \
                     part of another device); unmount it first"
                ),
            );
        }
        let purpose = if self.read_only { "reading" } else { "writing" };
        Error::io(format!("cannot open '{name}' for {purpose}"), e.into())
    }
}

/// What kinds of file can hold a disk.
fn is_device(kind: FileType, name: &str) -> Result<bool> {
    let what = match kind {
        FileType::RegularFile => return Ok(false),
        FileType::BlockDevice => return Ok(true),
        FileType::Directory => "a directory",
        FileType::Fifo => "a pipe",
        FileType::Socket => "a socket",
        FileType::CharacterDevice => "a character device",
        _ => "something else",
    };
    Err(Error::new(
        ErrorKind::InvalidInput,
        format!("'{name}' is {what}; a disk must be a regular file or a block device"),
    ))
}

/// Another open file description of the same inode, whatever its name is now.
fn reopen(fd: &impl AsFd, flags: OFlags, name: &str) -> Result<OwnedFd> {
    let link = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
    rustix::fs::open(link, flags | OFlags::CLOEXEC, Mode::empty())
        .map_err(|e| Error::io(format!("cannot open '{name}' a second time"), e.into()))
}

fn stat(fd: &impl AsFd, name: &str) -> Result<Stat> {
    rustix::fs::fstat(fd.as_fd())
        .map_err(|e| Error::io(format!("cannot look at '{name}'"), e.into()))
}

/// The length of a file or device.
pub(crate) fn length(fd: impl AsFd, name: &str) -> Result<u64> {
    rustix::fs::seek(fd, rustix::fs::SeekFrom::End(0))
        .map_err(|e| Error::io(format!("cannot find the length of '{name}'"), e.into()))
}

impl FileStorage {
    /// Opens a file or device that exists, and locks it. Blocks.
    ///
    /// # Errors
    /// `Locked` with the holder's name; `NotFound`, `Denied`, `Unsupported` and others as the system says.
    pub fn open(options: &OpenOptions) -> Result<Self> {
        let name = options.name();
        if options.lock == LockMode::ForceShare && !options.read_only {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!("'{name}' can be shared by force for reading only; add --read-only"),
            ));
        }
        // Looked at before it is opened, since opening a pipe waits and opening a tape moves it.
        let st =
            rustix::fs::stat(&options.path).map_err(|e| options.cannot_open(e, OFlags::empty()))?;
        let mut flags = options.flags();
        let device = is_device(FileType::from_raw_mode(st.st_mode), &name)?;
        if device && !options.read_only && options.lock != LockMode::Off {
            // On devices this means: not while the host has it mounted.
            flags |= OFlags::EXCL;
        }
        let fd = options.open(flags)?;
        Self::from_fd(fd, options)
    }

    /// Makes a file of `len` bytes that is all hole, and locks it; an old file is emptied once it is known that
    /// nobody uses it. A device is taken as it is, if it is large enough. Blocks.
    ///
    /// # Errors
    /// As [`Self::open`]; `InvalidInput` when the file exists and `exclusive` is set.
    pub fn create(options: &OpenOptions, len: ByteLen) -> Result<Self> {
        let name = options.name();
        if options.read_only || options.lock == LockMode::ForceShare {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!("'{name}' cannot be created for reading only"),
            ));
        }
        let kind =
            rustix::fs::stat(&options.path).map(|st| FileType::from_raw_mode(st.st_mode)).ok();
        if let Some(kind) = kind {
            if options.exclusive {
                return Err(Error::new(
                    ErrorKind::InvalidInput,
                    format!("'{name}' exists already; choose another name or remove it first"),
                ));
            }
            if is_device(kind, &name)? {
                return Self::open(options)?.at_least(len);
            }
        }
        let mut flags = options.flags() | OFlags::CREATE;
        if options.exclusive {
            flags |= OFlags::EXCL;
        }
        let fd = options.open(flags)?;
        let lock = take_lock(&fd, options, &name)?;
        for size in [0, len.get()] {
            rustix::fs::ftruncate(&fd, size).map_err(|e| {
                Error::io(format!("cannot set the length of '{name}' to {size}"), e.into())
            })?;
        }
        Self::with_lock(fd, lock, options)
    }

    fn at_least(self, len: ByteLen) -> Result<Self> {
        use crate::Storage;
        if self.len() < len {
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!(
                    "the device '{}' has {} bytes, {} are needed",
                    self.name(),
                    self.len().get(),
                    len.get()
                ),
            ));
        }
        Ok(self)
    }

    fn from_fd(fd: OwnedFd, options: &OpenOptions) -> Result<Self> {
        let lock = take_lock(&fd, options, &options.name())?;
        Self::with_lock(fd, lock, options)
    }

    fn with_lock(fd: OwnedFd, lock: Option<ImageLock>, options: &OpenOptions) -> Result<Self> {
        let name = options.name();
        // Length and kind are taken after the lock: nobody changes them from here on.
        let st = stat(&fd, &name)?;
        let device = is_device(FileType::from_raw_mode(st.st_mode), &name)?;
        let direct = options.cache.direct();
        let align =
            if direct { DirectAlign::of(fd.as_fd(), device, &name)? } else { DirectAlign::CACHED };
        let tail = if direct && !device && !options.read_only {
            let sync = options.flags() & OFlags::DSYNC;
            Some(File::new(reopen(&fd, OFlags::RDWR | sync, &name)?))
        } else {
            None
        };
        let len = length(&fd, &name)?;
        let blocks = Blocks::of(&fd, &st, device);
        let file = File::new(fd);
        let written = lock.is_some() && !options.read_only;
        let mark = written.then(|| IoMark::set(tail.iter().chain([&file]).cloned()));
        Ok(Self::from_parts(Parts {
            file,
            mark,
            tail,
            lock,
            name,
            len,
            read_only: options.read_only,
            ignore_sync: options.cache == CacheMode::Unsafe,
            write_through: !options.cache.write_cache(),
            device,
            align,
            blocks,
        }))
    }
}

fn take_lock(fd: &OwnedFd, options: &OpenOptions, name: &str) -> Result<Option<ImageLock>> {
    if options.lock == LockMode::Off {
        return Ok(None);
    }
    // A description of its own: rings keep the main one open for a while after it was closed here.
    let own = reopen(fd, OFlags::RDONLY, name)?;
    let lock = ImageLock::take(own, &options.path, !options.read_only, options.lock)?;
    if let (Some(lock), LockMode::Auto) = (&lock, options.lock) {
        lock.wait_for_late_io(&options.path, LATE_IO)?;
    }
    Ok(lock)
}
