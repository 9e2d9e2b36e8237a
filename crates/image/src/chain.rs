//! Opening a disk: an image and, when the operator allows it, the images under it.
//!
//! Callers: the daemon and `map`. The top image is opened for writing unless asked otherwise; backing images are
//! opened read-only and locked against writers. Nothing is opened before it is allowed, and no image twice.

use crate::data_file::{DataFile, open_data_file};
use crate::name::{format_of, resolve_backing};
use crate::state::{StateDir, left_behind, open_state, refuse_left_behind};
use bedplate_disk::{Disk, Layer};
use bedplate_qcow2::format::{Header, check_supported, printable};
use bedplate_qcow2::{OpenOptions as Qcow2Options, Passphrase, Qcow2, holds_changes, read_header};
use bedplate_storage::{FileStorage, LockMode, OpenOptions, StateFile, Storage};
use bedplate_types::{ByteLen, CacheMode, Error, ErrorKind, Format, Result, ResultExt, limits};
use std::collections::HashSet;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How a disk is opened.
#[derive(Clone, Debug, Default)]
pub struct ChainOptions {
    /// The format of the image; `None`: the one that its extension tells.
    pub format: Option<Format>,
    /// Refuse all changes.
    pub read_only: bool,
    /// How the host's page cache is used.
    pub cache: CacheMode,
    /// Backing files may be opened.
    pub allow_backing: bool,
    /// The format of backing files whose overlay does not state it.
    pub backing_format: Option<Format>,
    /// External data files that headers name may be opened.
    pub allow_data_file: bool,
    /// The external data file of the image on top, whatever its header says.
    pub data_file: Option<PathBuf>,
    /// Read although another program may be writing. Only with `read_only`.
    pub force_share: bool,
    /// Memory for L2 tables of the top image; `None`: the default.
    pub l2_cache: Option<ByteLen>,
    /// Where changes that are only in memory outlive a killed process.
    pub state: StateDir,
    /// Lose what a killed process left there, instead of taking it up.
    pub discard_state: bool,
    /// What may open encrypted images: each is tried on each.
    pub passphrases: Vec<Passphrase>,
    /// Only metadata will be used: encrypted images are opened without their keys.
    pub metadata_only: bool,
}

/// One image of an open chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenLayer {
    /// Where it is.
    pub path: PathBuf,
    /// Its format.
    pub format: Format,
    /// The file that holds its guest data, where that is another one.
    pub data_file: Option<PathBuf>,
}

/// An open disk and the images it is made of, top first.
pub struct OpenedDisk {
    /// The disk.
    pub disk: Arc<Disk<FileStorage>>,
    /// Its images.
    pub layers: Vec<OpenLayer>,
    /// What is only in memory lies here, for the next process if this one is killed. To be removed once the disk is
    /// closed.
    pub state: Option<Arc<StateFile>>,
}

/// What makes a file the same file under another name.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Identity {
    File { device: u64, inode: u64 },
    Device(u64),
}

pub(crate) fn cannot_find(path: &Path, e: std::io::Error) -> Error {
    Error::io(format!("cannot open '{}'", path.display()), e)
}

fn identity(path: &Path) -> Result<Identity> {
    let m = std::fs::metadata(path).map_err(|e| cannot_find(path, e))?;
    Ok(if m.file_type().is_block_device() {
        Identity::Device(m.rdev())
    } else {
        Identity::File { device: m.dev(), inode: m.ino() }
    })
}

/// Notes the images of a chain; refuses loops and chains without end.
#[derive(Default)]
pub(crate) struct Seen(HashSet<Identity>);

impl Seen {
    /// Notes another file of a chain; false when it is in it already.
    pub(crate) fn is_new(&mut self, path: &Path) -> Result<bool> {
        Ok(self.0.insert(identity(path)?))
    }

    /// Notes the image at `path`.
    pub(crate) fn add(&mut self, path: &Path) -> Result<()> {
        if self.0.len() >= limits::MAX_CHAIN_DEPTH {
            return Err(Error::new(
                ErrorKind::Limit,
                format!(
                    "the backing chain is longer than {} images at '{}'; shorten it with 'qemu-img commit' or \
                     'qemu-img rebase'",
                    limits::MAX_CHAIN_DEPTH,
                    path.display()
                ),
            ));
        }
        if !self.0.insert(identity(path)?) {
            return Err(Error::new(
                ErrorKind::BadImage,
                format!(
                    "the backing chain is a loop: '{}' is in it twice; one of the images names a wrong backing file",
                    path.display()
                ),
            ));
        }
        Ok(())
    }
}

/// The backing file that a header names: its path, and its format where the header states it.
///
/// # Errors
/// When the name or the format can't be one.
pub(crate) fn backing_of(
    path: &Path,
    header: &Header,
) -> Result<Option<(PathBuf, Option<Format>)>> {
    let Some(backing) = &header.backing_file else { return Ok(None) };
    let below = resolve_backing(path, &backing.name)?;
    let format = match header.backing_format() {
        None => None,
        Some(name) => Some(printable(name).parse::<Format>().map_err(|e| {
            e.with_kind(ErrorKind::Unsupported).context(format!(
                "the backing file '{}' of '{}' can't be used",
                below.display(),
                path.display()
            ))
        })?),
    };
    Ok(Some((below, format)))
}

/// Opens the disk whose top image is `path`.
///
/// # Errors
/// `InvalidInput` when a format is not stated, `Denied` when the image has a backing file and the operator did not
/// allow it, `Locked` with the holder's name, or what opening an image gives. Nothing was changed then.
pub async fn open_chain(path: &Path, options: &ChainOptions) -> Result<OpenedDisk> {
    let format = format_of(path, options.format)?;
    let mut seen = Seen::default();
    seen.add(path)?;
    let storage = open_storage(path, options, true)?;
    // The images below are opened first: opening the top for writing may change it, and what is refused must not
    // be changed.
    let mut below = Vec::new();
    let mut data: Option<DataFile> = None;
    let mut layers = vec![OpenLayer { path: path.to_path_buf(), format, data_file: None }];
    if format == Format::Qcow2 {
        let header = read_header(&storage).await?;
        let writable = !options.read_only;
        check_supported(&header, writable)
            .context(|| format!("'{}' can't be opened", path.display()))?;
        let mut next = allowed_backing(path, &header, options)?;
        data = open_data_file(path, &header, options, true, &mut seen)?;
        while let Some(mut layer) = next.take() {
            seen.add(&layer.path).context(|| backing_context(&layers))?;
            let (opened, header) = open_below(&mut layer, options, &mut seen)
                .await
                .context(|| backing_context(&layers))?;
            if let Some(header) = header {
                next = allowed_backing(&layer.path, &header, options)?;
            }
            below.push(opened);
            layers.push(layer);
        }
    }
    let (top, state) = match format {
        Format::Raw => {
            if options.data_file.is_some() {
                let text = format!(
                    "'{}' is raw and has no data file; leave --data-file out",
                    path.display()
                );
                return Err(Error::new(ErrorKind::InvalidInput, text));
            }
            warn_about_content(&storage, path).await;
            (Layer::Raw(Arc::new(storage)), None)
        }
        Format::Qcow2 => {
            let (file, data) = data.unzip();
            layers.iter_mut().take(1).for_each(|top| top.data_file.clone_from(&file));
            let (image, state) = open_top(path, (storage, data), options).await?;
            (Layer::Qcow2(Arc::new(image)), state)
        }
    };
    let all = std::iter::once(top).chain(below).collect();
    let name = path.display().to_string();
    let disk = Disk::new(name, all, options.read_only, options.cache)?;
    Ok(OpenedDisk { disk: Arc::new(disk), layers, state })
}

fn qcow2_options(options: &ChainOptions, read_only: bool) -> Qcow2Options {
    Qcow2Options {
        read_only,
        passphrases: options.passphrases.clone(),
        metadata_only: options.metadata_only,
        ..Qcow2Options::default()
    }
}

/// Opens the qcow2 image on top, with its state where there is to be one.
async fn open_top(
    path: &Path,
    (storage, data): (FileStorage, Option<FileStorage>),
    options: &ChainOptions,
) -> Result<(Qcow2<FileStorage>, Option<Arc<StateFile>>)> {
    let mut how = qcow2_options(options, options.read_only);
    if let Some(bytes) = options.l2_cache {
        how.l2_cache = bytes;
    }
    if options.read_only {
        // Shared by force, it may be the state of a server that is well.
        let state = if options.force_share { None } else { left_behind(path, &options.state) };
        if let Some(state) = state {
            tracing::warn!(
                "a server of '{}' was killed, and its guest's last writes wait in '{}'; they don't show here",
                path.display(),
                state.display()
            );
        }
        return Ok((Qcow2::open_with_data(storage, data, &how).await?, None));
    }
    if options.state == StateDir::None && !options.discard_state {
        refuse_left_behind(path)?;
    }
    let Some((state, start)) = open_state(path, &options.state, options.discard_state)? else {
        return Ok((Qcow2::open_with_data(storage, data, &how).await?, None));
    };
    how.journal = Some(start.clone());
    let opened = Qcow2::open_with_data(storage, data, &how).await;
    let image = match opened {
        Ok(image) if image.has_journal() => return Ok((image, Some(state))),
        Ok(image) => {
            tracing::warn!(
                "writes to '{}' that are completed and not flushed are lost when this server is killed, since the image \
                 is of version 2; 'qemu-img amend -f qcow2 -o compat=1.1' makes it version 3",
                path.display()
            );
            Ok(image)
        }
        Err(e) if holds_changes(&*start.memory, start.owner) || e.kind() == ErrorKind::Stale => {
            return Err(e.context(format!("the state in '{}' stays", state.path().display())));
        }
        Err(e) => Err(e),
    };
    if let Err(e) = state.remove() {
        tracing::warn!("{e:#}");
    }
    Ok((image?, None))
}

/// A disk of `size` bytes that costs nothing and keeps nothing, for measuring.
///
/// # Errors
/// Never in practice.
pub fn open_null(size: ByteLen, read_only: bool, cache: CacheMode) -> Result<OpenedDisk> {
    let name = format!("null:{}", size.get());
    let disk = Disk::new(name, vec![Layer::Null(size)], read_only, cache)?;
    Ok(OpenedDisk { disk: Arc::new(disk), layers: Vec::new(), state: None })
}

fn backing_context(layers: &[OpenLayer]) -> String {
    let of = layers.last().map(|l| l.path.display().to_string()).unwrap_or_default();
    format!("cannot use the backing file of '{of}'")
}

fn open_storage(path: &Path, options: &ChainOptions, top: bool) -> Result<FileStorage> {
    let lock = if options.force_share { LockMode::ForceShare } else { LockMode::Auto };
    let how = OpenOptions::new(path)
        .read_only(options.read_only || !top)
        .cache(options.cache)
        .lock(if top || options.read_only { lock } else { LockMode::Auto });
    FileStorage::open(&how)
}

/// The image under `path`, when the header names one and the operator allows it.
fn allowed_backing(
    path: &Path,
    header: &Header,
    options: &ChainOptions,
) -> Result<Option<OpenLayer>> {
    let Some(backing) = &header.backing_file else { return Ok(None) };
    let (image, shown) = (path.display(), printable(&backing.name));
    if !options.allow_backing {
        return Err(Error::new(
            ErrorKind::Denied,
            format!(
                "'{image}' has the backing file '{shown}', and reading it was not allowed; if you trust the image, \
                 allow it with --allow-backing"
            ),
        ));
    }
    let Some((below, format)) = backing_of(path, header)? else { return Ok(None) };
    let Some(format) = format.or(options.backing_format) else {
        return Err(Error::new(
            ErrorKind::InvalidInput,
            format!(
                "'{image}' does not state the format of its backing file '{shown}'; state it with \
                 --backing-format raw or --backing-format qcow2"
            ),
        ));
    };
    Ok(Some(OpenLayer { path: below, format, data_file: None }))
}

async fn open_below(
    layer: &mut OpenLayer,
    options: &ChainOptions,
    seen: &mut Seen,
) -> Result<(Layer<FileStorage>, Option<Header>)> {
    let storage = open_storage(&layer.path, options, false)?;
    if layer.format == Format::Raw {
        return Ok((Layer::Raw(Arc::new(storage)), None));
    }
    let how = qcow2_options(options, true);
    let header = read_header(&storage).await?;
    let data = open_data_file(&layer.path, &header, options, false, seen)?;
    let (file, data) = data.unzip();
    layer.data_file = file;
    let image = Qcow2::open_with_data(storage, data, &how).await?;
    let header = image.header();
    Ok((Layer::Qcow2(Arc::new(image)), Some(header)))
}

/// A raw image that starts like a qcow2 image is most often one that was given the wrong format. A guest can also
/// have written it, so it stays raw.
async fn warn_about_content(storage: &FileStorage, path: &Path) {
    if looks_like_qcow2(storage).await {
        tracing::warn!(
            "'{}' is used as raw, but its content looks like a qcow2 image; if it is one, state -f qcow2",
            path.display()
        );
    }
}

pub(crate) async fn looks_like_qcow2<S: Storage>(storage: &S) -> bool {
    storage.len().get() >= 512 && read_header(storage).await.is_ok()
}
