//! File names: whose format they tell, and what a backing file's name means.
//!
//! Callers: everything in this crate that opens a file.

use bedplate_types::{Error, ErrorKind, Format, Result, limits};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The format that was stated, else the one that the extension tells.
///
/// # Errors
/// `InvalidInput` when neither names one.
pub fn format_of(path: &Path, stated: Option<Format>) -> Result<Format> {
    stated.map_or_else(|| Format::from_extension(path), Ok)
}

/// True when QEMU takes the name for a protocol or a description instead of a path: it has a colon before the
/// first slash.
fn has_protocol(name: &[u8]) -> bool {
    name.iter().find(|b| matches!(b, b':' | b'/')) == Some(&b':')
}

/// The path of the backing file that an image at `image` calls `name`: relative names are relative to the
/// image's folder.
///
/// # Errors
/// `InvalidInput` for an empty or over-long name, `Unsupported` for one that is not a path.
pub(crate) fn resolve_backing(image: &Path, name: &[u8]) -> Result<PathBuf> {
    let path = plain_path("backing file", image, name)?;
    Ok(match image.parent() {
        Some(folder) => folder.join(path),
        None => path,
    })
}

/// The path that the image at `image` calls `name`, as what it is (`what`).
///
/// # Errors
/// `InvalidInput` for an empty or over-long name, `Unsupported` for one that is not a path.
pub(crate) fn plain_path(what: &str, image: &Path, name: &[u8]) -> Result<PathBuf> {
    let shown = String::from_utf8_lossy(name);
    if name.is_empty() || name.len() > limits::MAX_BACKING_NAME as usize || name.contains(&0) {
        return Err(Error::new(
            ErrorKind::InvalidInput,
            format!(
                "the {what}'s name is {} bytes long; names of 1 to {} bytes without NUL are allowed",
                name.len(),
                limits::MAX_BACKING_NAME
            ),
        ));
    }
    if has_protocol(name) {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "the {what} '{shown}' of '{}' is not a plain path (a word before a colon names a protocol); \
                 only files and block devices can be used; write './' before a path that has a colon",
                image.display()
            ),
        ));
    }
    Ok(PathBuf::from(OsStr::from_bytes(name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backing_names_are_relative_to_the_image_that_names_them() {
        let at = |image: &str, name: &str| {
            resolve_backing(Path::new(image), name.as_bytes()).map(|p| p.display().to_string()).ok()
        };
        assert_eq!(at("/a/b.qcow2", "base.raw").as_deref(), Some("/a/base.raw"));
        assert_eq!(at("b.qcow2", "base.raw").as_deref(), Some("base.raw"));
        assert_eq!(at("a/b.qcow2", "../c").as_deref(), Some("a/../c"));
        assert_eq!(at("a/b.qcow2", "/c").as_deref(), Some("/c"));
        assert_eq!(at("a/b.qcow2", "./x:y").as_deref(), Some("a/./x:y"));
    }

    #[test]
    fn descriptions_protocols_and_impossible_names_are_refused() {
        let long = "x".repeat(1024);
        for name in ["json:{}", "nbd://h/x", "file:/etc/passwd", "a:b", "", long.as_str(), "a\0b"] {
            assert!(resolve_backing(Path::new("/i"), name.as_bytes()).is_err(), "{name}");
        }
    }
}
