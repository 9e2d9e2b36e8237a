//! The one error type: a stable kind, a sentence for a person, and the cause.
//!
//! Errors are cheap to clone, because a poisoned image answers every later request with its first cause.

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::sync::Arc;

/// What sort of failure an [`Error`] is; decides exit codes, NBD errno values and guest status bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A request or an option that can't be right (bad value, unaligned, out of range).
    InvalidInput,
    /// A range beyond the end of the disk.
    OutOfRange,
    /// An image that breaks its format's rules, so that it is refused.
    BadImage,
    /// Metadata found to be wrong while the image was in use.
    Corrupt,
    /// A valid image or request that needs something this version does not have.
    Unsupported,
    /// The operating system reported an I/O error.
    Io,
    /// The file system or device has no space left.
    NoSpace,
    /// What an earlier process left does not fit what is there now.
    Stale,
    /// Another process uses the image.
    Locked,
    /// A write to something that is read-only.
    ReadOnly,
    /// A file that does not exist.
    NotFound,
    /// Refused by the operator's settings or by the system's permissions.
    Denied,
    /// An earlier failure of a sync or metadata write has stopped all writes.
    Poisoned,
    /// A peer broke its protocol.
    Protocol,
    /// The work was abandoned because its owner is shutting down.
    Cancelled,
    /// A limit of this program was reached.
    Limit,
}

struct Inner {
    kind: ErrorKind,
    message: String,
    errno: Option<i32>,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

/// An error with its kind, a sentence and its cause.
#[derive(Clone)]
pub struct Error(Arc<Inner>);

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error of `kind` that reads as `message`.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Arc::new(Inner { kind, message: message.into(), errno: None, source: None }))
    }

    /// An error of the operating system, with what was being done.
    pub fn io(doing: impl Into<String>, source: io::Error) -> Self {
        let errno = source.raw_os_error();
        let kind = match source.kind() {
            io::ErrorKind::NotFound => ErrorKind::NotFound,
            io::ErrorKind::PermissionDenied => ErrorKind::Denied,
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorKind::NoSpace,
            io::ErrorKind::ReadOnlyFilesystem => ErrorKind::ReadOnly,
            io::ErrorKind::Unsupported => ErrorKind::Unsupported,
            _ => ErrorKind::Io,
        };
        let inner = Inner { kind, message: doing.into(), errno, source: Some(Box::new(source)) };
        Self(Arc::new(inner))
    }

    /// An error of the operating system given by its positive number.
    pub fn errno(doing: impl Into<String>, errno: i32) -> Self {
        Self::io(doing, io::Error::from_raw_os_error(errno))
    }

    /// The same failure one level up: `message` says what it stopped. Kind and errno stay.
    pub fn context(self, message: impl Into<String>) -> Self {
        let (kind, errno) = (self.0.kind, self.0.errno);
        let inner = Inner { kind, message: message.into(), errno, source: Some(Box::new(self)) };
        Self(Arc::new(inner))
    }

    /// The same failure under another kind.
    pub fn with_kind(self, kind: ErrorKind) -> Self {
        let errno = self.0.errno;
        let message = self.0.message.clone();
        Self(Arc::new(Inner { kind, message, errno, source: Some(Box::new(self)) }))
    }

    /// What sort of failure this is.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The operating system's positive error number, where it had one.
    pub fn raw_errno(&self) -> Option<i32> {
        self.0.errno
    }

    /// The sentence without its causes.
    pub fn message(&self) -> &str {
        &self.0.message
    }
}

impl fmt::Display for Error {
    /// The sentence; with `{:#}` its causes follow, each after a colon.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)?;
        if f.alternate() {
            let mut last = self.0.message.clone();
            let mut cause = self.source();
            while let Some(c) = cause {
                let text = c.to_string();
                if text != last {
                    write!(f, ": {text}")?;
                }
                last = text;
                cause = c.source();
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}({:#})", self.0.kind, self)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|s| s as &(dyn StdError + 'static))
    }
}

/// Adds what was being done to a result's error.
pub trait ResultExt<T> {
    /// Wraps the error with a sentence that is only built on failure.
    fn context(self, message: impl FnOnce() -> String) -> Result<T>;
}

impl<T> ResultExt<T> for Result<T> {
    fn context(self, message: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|e| e.context(message()))
    }
}

impl<T> ResultExt<T> for io::Result<T> {
    fn context(self, message: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|e| Error::io(message(), e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_shown_in_order_and_kind_and_errno_survive_context() {
        let e = Error::errno("cannot write to 'a'", 28).context("cannot flush 'a'");
        assert_eq!(e.kind(), ErrorKind::NoSpace);
        assert_eq!(e.raw_errno(), Some(28));
        assert!(format!("{e:#}").starts_with("cannot flush 'a': cannot write to 'a': No space"));
    }
}
