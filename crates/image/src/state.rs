//! Where changes of a qcow2 image that are only in memory outlive a killed server: a file on a memory file system, found
//! again by the image's own identity.
//!
//! Callers: opening a disk for writing. The journal in the file is the qcow2 engine's.

use crate::chain::cannot_find;
use bedplate_qcow2::{JOURNAL_WORDS, JournalOwner, JournalStart, holds_changes};
use bedplate_storage::StateFile;
use bedplate_types::{Error, ErrorKind, Result};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::UNIX_EPOCH;

/// The folder of servers that run as root.
const SYSTEM_FOLDER: &str = "/run/bedplate";
/// The folder of others is in this variable's.
const USER_VARIABLE: &str = "XDG_RUNTIME_DIR";
const USER_FOLDER: &str = "bedplate";

/// Where a server's state is kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum StateDir {
    /// Nowhere: a killed server loses what was not flushed.
    #[default]
    None,
    /// In `/run/bedplate` for root, in `$XDG_RUNTIME_DIR/bedplate` for others; nowhere, with a warning, where that can't be.
    Usual,
    /// In this folder, which must be on a memory file system.
    At(PathBuf),
}

impl StateDir {
    fn path(&self) -> Option<PathBuf> {
        match self {
            Self::None => None,
            Self::At(dir) => Some(dir.clone()),
            Self::Usual if rustix::process::geteuid().is_root() => Some(SYSTEM_FOLDER.into()),
            Self::Usual => {
                let dir = std::env::var_os(USER_VARIABLE).filter(|dir| !dir.is_empty())?;
                Some(Path::new(&dir).join(USER_FOLDER))
            }
        }
    }
}

/// The name of an image's state file, and who it is for the journal.
fn identify(image: &Path) -> Result<(String, [u64; 4])> {
    let m = std::fs::metadata(image).map_err(|e| cannot_find(image, e))?;
    if m.file_type().is_block_device() {
        return Ok((format!("device-{:x}.state", m.rdev()), [m.rdev(), 0, 0, 0]));
    }
    let made = m.created().ok().and_then(|t| t.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
    let made = (made.as_secs(), u64::from(made.subsec_nanos()));
    let name = format!("file-{:x}-{}.state", m.dev(), m.ino());
    Ok((name, [m.dev(), m.ino(), made.0, made.1]))
}

/// The host's boot, as two words.
fn boot() -> Result<[u64; 2]> {
    const PLACE: &str = "/proc/sys/kernel/random/boot_id";
    let text = std::fs::read_to_string(PLACE)
        .map_err(|e| Error::io(format!("cannot read '{PLACE}'"), e))?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let id = u128::from_str_radix(&digits, 16)
        .map_err(|_| Error::new(ErrorKind::InvalidInput, format!("'{PLACE}' holds no boot id")))?;
    Ok([(id >> 64) as u64, id as u64])
}

/// Opens the state file of an image that is open for writing, and locked. None where there is to be none.
///
/// # Errors
/// When the folder was named and can't be used, or there is a file that can't be used.
pub(crate) fn open_state(
    image: &Path,
    dir: &StateDir,
    discard: bool,
) -> Result<Option<(Arc<StateFile>, JournalStart)>> {
    let without = |why: &str| {
        tracing::warn!(
            "writes to '{}' that are completed and not flushed are lost when this server is killed: {why}",
            image.display()
        );
        Ok(None)
    };
    let Some(folder) = dir.path() else {
        if *dir == StateDir::None {
            return Ok(None);
        }
        return without(
            "$XDG_RUNTIME_DIR is not set; name a folder on a memory file system with --state-dir",
        );
    };
    let (name, file) = identify(image)?;
    let owner = JournalOwner { boot: boot()?, file };
    match StateFile::open(&folder, &name, JOURNAL_WORDS, true) {
        Ok(Some(state)) => {
            let nonce = getrandom::u64().map_err(|e| {
                Error::new(ErrorKind::Io, format!("the system gives no random numbers: {e}"))
            })?;
            let state = Arc::new(state);
            let start = JournalStart { memory: state.clone(), owner, nonce, discard };
            Ok(Some((state, start)))
        }
        // What lies there may be needed, so it is not passed over.
        Err(e) if *dir == StateDir::Usual && !folder.join(&name).exists() => {
            without(&format!("{e:#}"))
        }
        Err(e) => Err(e),
        Ok(None) => without("the state file has vanished"),
    }
}

/// The state file of an image, if a killed server has left changes in the usual folder or in `dir`.
pub(crate) fn left_behind(image: &Path, dir: &StateDir) -> Option<PathBuf> {
    let dir = if *dir == StateDir::None { &StateDir::Usual } else { dir };
    let (name, file) = identify(image).ok()?;
    let state = StateFile::open(&dir.path()?, &name, JOURNAL_WORDS, false).ok()??;
    let owner = JournalOwner { boot: boot().ok()?, file };
    holds_changes(&state, owner).then(|| state.path().to_owned())
}

/// Refuses to change an image by other means while changes of a killed server wait for the next one.
///
/// # Errors
/// `Stale` when there are such changes.
pub(crate) fn refuse_left_behind(image: &Path) -> Result<()> {
    let Some(state) = left_behind(image, &StateDir::None) else { return Ok(()) };
    Err(Error::new(
        ErrorKind::Stale,
        format!(
            "a server of '{}' was killed, and its guest's last writes wait in '{}' for the next one; start 'bedplate serve' \
             and stop it again first, or remove that file to lose them",
            image.display(),
            state.display()
        ),
    ))
}
