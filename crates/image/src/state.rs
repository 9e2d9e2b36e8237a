//! Where changes of a qcow2 image that are only in memory outlive a killed server: a file on a memory file system, found
//! again by the image's own identity.
//!
//! Callers: opening a disk for writing. The journal in the file is the qcow2 engine's.

use crate::chain::cannot_find;
use bedplate_qcow2::{JOURNAL_WORDS, JournalOwner, JournalStart, holds_changes};
use bedplate_storage::{SharedPlace, StateFile};
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
/// Where that is not in memory (`/run` of a container), or there is none: in a folder in here.
const SHARED_PLACE: &str = "/dev/shm";

/// Where a server's state is kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum StateDir {
    /// Nowhere: a killed server loses what was not flushed.
    #[default]
    None,
    /// In `/run/bedplate` for root, in `$XDG_RUNTIME_DIR/bedplate` for others; in a folder of this user in `/dev/shm` where
    /// that is not possible; nowhere, with a warning, where that is neither.
    Usual,
    /// In this folder, which must be on a memory file system.
    At(PathBuf),
}

/// Folders in which state may be, in the order in which they are tried.
struct Places<'a> {
    folders: Vec<PathBuf>,
    /// Where another one may be made when none of them can be used.
    shared: Option<SharedPlace<'a>>,
}

/// What became of opening a state file in one of the usual folders.
enum Tried {
    Open(StateFile),
    /// None can be used, for these reasons.
    Nowhere(String),
}

impl<'a> Places<'a> {
    fn usual(first: Option<PathBuf>, shared: SharedPlace<'a>) -> Self {
        let folders = first.into_iter().chain(shared.folders()).collect();
        Self { folders, shared: Some(shared) }
    }

    /// The state file of this name, wherever it is.
    ///
    /// # Errors
    /// When there is one that can't be used.
    fn find(&self, name: &str) -> Result<Option<StateFile>> {
        for folder in &self.folders {
            match StateFile::open(folder, name, JOURNAL_WORDS, false) {
                Ok(Some(state)) => return Ok(Some(state)),
                // What lies there may be needed, so it is not passed over.
                Err(e) if folder.join(name).exists() => return Err(e),
                Ok(None) | Err(_) => {}
            }
        }
        Ok(None)
    }

    /// The state file of this name, made where it is missing.
    ///
    /// # Errors
    /// When there is one that can't be used.
    fn open(&self, name: &str, random: u64) -> Result<Tried> {
        if let Some(state) = self.find(name)? {
            return Ok(Tried::Open(state));
        }
        let another = self.shared.map(|shared| shared.new_folder(random));
        let mut why = Vec::new();
        for folder in self.folders.iter().cloned().map(Ok).chain(another) {
            let opened =
                folder.and_then(|folder| StateFile::open(&folder, name, JOURNAL_WORDS, true));
            match opened {
                Ok(Some(state)) => return Ok(Tried::Open(state)),
                Ok(None) => {}
                Err(e) => why.push(format!("{e:#}")),
            }
        }
        Ok(Tried::Nowhere(why.join("; and ")))
    }
}

/// Calls `f` with the usual folders of this user.
fn with_usual<T>(f: impl FnOnce(Places<'_>) -> T) -> T {
    let user = rustix::process::geteuid();
    let first = if user.is_root() {
        Some(PathBuf::from(SYSTEM_FOLDER))
    } else {
        let dir = std::env::var_os(USER_VARIABLE).filter(|dir| !dir.is_empty());
        dir.map(|dir| Path::new(&dir).join(USER_FOLDER))
    };
    let prefix = format!("bedplate-{}-", user.as_raw());
    f(Places::usual(first, SharedPlace { place: Path::new(SHARED_PLACE), prefix: &prefix }))
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
    if *dir == StateDir::None {
        return Ok(None);
    }
    let random = || {
        getrandom::u64().map_err(|e| {
            Error::new(ErrorKind::Io, format!("the system gives no random numbers: {e}"))
        })
    };
    let (name, file) = identify(image)?;
    let owner = JournalOwner { boot: boot()?, file };
    let tried = match dir {
        StateDir::At(folder) => StateFile::open(folder, &name, JOURNAL_WORDS, true)?
            .map_or_else(|| Tried::Nowhere("the state file has vanished".into()), Tried::Open),
        _ => {
            let random = random()?;
            with_usual(|places| places.open(&name, random))?
        }
    };
    match tried {
        Tried::Open(state) => {
            let state = Arc::new(state);
            let start = JournalStart { memory: state.clone(), owner, nonce: random()?, discard };
            Ok(Some((state, start)))
        }
        Tried::Nowhere(why) => {
            tracing::warn!(
                "writes to '{}' that are completed and not flushed are lost when this server is killed: {why}",
                image.display()
            );
            Ok(None)
        }
    }
}

/// The state file of an image, if a killed server has left changes in the usual folders or in `dir`.
pub(crate) fn left_behind(image: &Path, dir: &StateDir) -> Option<PathBuf> {
    let (name, file) = identify(image).ok()?;
    let state = match dir {
        StateDir::At(folder) => StateFile::open(folder, &name, JOURNAL_WORDS, false).ok()?,
        _ => with_usual(|places| places.find(&name)).ok()?,
    }?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_is_kept_in_a_shared_place_where_the_usual_folder_is_on_a_disk_and_found_again_there() {
        let shm = tempfile::tempdir_in(SHARED_PLACE).expect("a memory file system");
        let disk = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder on a disk");
        let shared = SharedPlace { place: shm.path(), prefix: "bedplate-" };
        let usual = || Places::usual(Some(disk.path().join("bedplate")), shared);
        let open = |random| match usual().open("a.state", random).expect("opened") {
            Tried::Open(state) => state.path().to_owned(),
            Tried::Nowhere(why) => panic!("{why}"),
        };
        assert!(usual().find("a.state").expect("looked").is_none());
        let first = open(5);
        assert!(first.starts_with(shm.path()), "{first:?}");
        assert_eq!(std::fs::read_dir(disk.path()).expect("list").count(), 0);
        assert_eq!(open(6), first, "found again");
        assert!(usual().find("a.state").expect("looked").is_some());
        // Also by a server that has a usual folder, which another one did not have.
        let (a, b) = (shm.path().join("run"), shm.path().join("other"));
        let both = Places::usual(Some(a.clone()), shared);
        let Ok(Tried::Open(state)) = both.open("a.state", 7) else { panic!("not opened") };
        assert_eq!(state.path(), first);
        let Ok(Tried::Open(state)) = both.open("b.state", 7) else { panic!("not opened") };
        assert_eq!(state.path(), a.join("b.state"));
        let nowhere = SharedPlace { place: disk.path(), prefix: "bedplate-" };
        let nowhere = Places::usual(Some(b.join("missing")), nowhere);
        let Ok(Tried::Nowhere(why)) = nowhere.open("c.state", 7) else { panic!("opened") };
        for word in ["other/missing", "; and ", "not on a memory file system"] {
            assert!(why.contains(word), "{why}");
        }
        assert_eq!(std::fs::read_dir(disk.path()).expect("list").count(), 0);
    }
}
