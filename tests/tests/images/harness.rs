//! Opening images through Bedplate, random requests, and the plain bytes that say what a disk must hold.

use anyhow::{Context, Result, bail, ensure};
use bedplate_disk::{Disk, Layer};
use bedplate_qcow2::format::EXT_DATA_FILE;
use bedplate_qcow2::{OpenOptions, Qcow2, read_header};
use bedplate_runtime::buf::{AlignedBuf, IoVec, SharedBuf};
use bedplate_runtime::{Config, Runtime};
use bedplate_storage::{FileStorage, OpenOptions as FileOptions, ZeroMode};
use bedplate_tests::random::Random;
use bedplate_tests::{host, paths};
use bedplate_types::{ByteLen, CacheMode, Format, GuestOffset};
use futures_util::future::{LocalBoxFuture, join_all};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Once};
use tempfile::TempDir;

/// Address space of this process: an image that makes Bedplate allocate what it claims to hold ends the test run.
const ADDRESS_SPACE: u64 = 3 << 29;

/// A disk over files.
pub type FileDisk = Disk<FileStorage>;

/// Random bytes, of which no two sectors are alike.
pub fn noise(random: &mut Random, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    random.fill(&mut bytes);
    bytes
}

/// A folder for the images of one test, on a file system with direct I/O.
pub struct Folder(TempDir);

impl Folder {
    pub fn new() -> Result<Folder> {
        static LIMITED: Once = Once::new();
        LIMITED.call_once(|| {
            let limit = getrlimit(Resource::As);
            let wanted = Rlimit { current: Some(ADDRESS_SPACE), maximum: limit.maximum };
            setrlimit(Resource::As, wanted).expect("a limit can be lowered");
        });
        Ok(Folder(tempfile::Builder::new().prefix("test-image-").tempdir_in(paths::target())?))
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

/// Runs asynchronous work to its end on a runtime of its own.
pub fn run<T>(work: impl AsyncFnOnce() -> Result<T>) -> Result<T> {
    let result = Runtime::new(Config::default())?.block_on(work());
    host::files_are_closed();
    result
}

async fn layer(path: &Path, format: Format, read_only: bool) -> Result<Layer<FileStorage>> {
    let storage = FileStorage::open(&FileOptions::new(path).read_only(read_only))?;
    Ok(match format {
        Format::Raw => Layer::Raw(Arc::new(storage)),
        Format::Qcow2 => {
            let options = OpenOptions { read_only, ..OpenOptions::default() };
            let data = data_file(&storage, read_only).await?;
            Layer::Qcow2(Arc::new(Qcow2::open_with_data(storage, data, &options).await?))
        }
    })
}

/// The external data file that an image names.
async fn data_file(image: &FileStorage, read_only: bool) -> Result<Option<FileStorage>> {
    // What can't be read is left to the opening to tell of.
    let Ok(header) = read_header(image).await else { return Ok(None) };
    let name = header.extension(EXT_DATA_FILE).filter(|_| header.incompatible & 4 != 0);
    let Some(name) = name else { return Ok(None) };
    let path = Path::new(OsStr::from_bytes(name));
    Ok(Some(FileStorage::open(&FileOptions::new(path).read_only(read_only))?))
}

/// A disk of these images, top first; only the top may be written.
pub async fn open_chain(chain: &[(&Path, Format)], read_only: bool) -> Result<FileDisk> {
    let mut layers = Vec::new();
    for (depth, (path, format)) in chain.iter().enumerate() {
        layers.push(layer(path, *format, read_only || depth > 0).await?);
    }
    Ok(Disk::new("disk", layers, read_only, CacheMode::None)?)
}

/// A disk of one qcow2 image, for writing.
pub async fn open(path: &Path) -> Result<FileDisk> {
    open_chain(&[(path, Format::Qcow2)], false).await
}

/// A disk of one qcow2 image, for reading.
pub async fn open_read_only(path: &Path) -> Result<FileDisk> {
    open_chain(&[(path, Format::Qcow2)], true).await
}

pub fn memory(bytes: &[u8]) -> Result<IoVec> {
    Ok(SharedBuf::new(AlignedBuf::from_slice(bytes)?).iovec())
}

pub async fn read(disk: &FileDisk, at: u64, len: usize) -> Result<Vec<u8>> {
    let buf = SharedBuf::zeroed(len)?.iovec();
    disk.read(GuestOffset::new(at), buf.clone()).await?;
    let mut out = vec![0; len];
    buf.copy_to(0, &mut out);
    Ok(out)
}

pub async fn write(disk: &FileDisk, at: u64, bytes: &[u8]) -> Result<()> {
    Ok(disk.write(GuestOffset::new(at), memory(bytes)?, false).await?)
}

/// An error that names the first byte that differs.
pub fn same(expected: &[u8], got: &[u8]) -> Result<()> {
    ensure!(
        got.len() >= expected.len() && got.iter().skip(expected.len()).all(|byte| *byte == 0),
        "{} bytes were expected, {} were read",
        expected.len(),
        got.len()
    );
    match expected.iter().zip(got).position(|(a, b)| a != b) {
        None => Ok(()),
        Some(at) => bail!("byte {at} is {:#x} and should be {:#x}", got[at], expected[at]),
    }
}

/// The whole disk reads as the model, several reads at once.
pub async fn verify(disk: &FileDisk, model: &[u8]) -> Result<()> {
    ensure!(disk.size() == ByteLen::from(model.len()), "the disk's size is {:?}", disk.size());
    const PIECE: usize = 400_000;
    let pieces = model.chunks(PIECE).enumerate().map(|(index, expected)| async move {
        let at = index * PIECE;
        let got = read(disk, at as u64, expected.len()).await?;
        same(expected, &got).with_context(|| format!("in the {PIECE} bytes from {at}"))
    });
    join_all(pieces).await.into_iter().collect()
}

enum Request {
    Write(Vec<u8>),
    Zero { unmap: bool },
    Discard,
    Read,
}

/// Random requests, up to a dozen at once on ranges that don't overlap but do share clusters, sectors and blocks; each range is
/// compared with the model afterwards.
pub async fn churn(
    disk: &FileDisk,
    model: &mut [u8],
    random: &mut Random,
    rounds: usize,
) -> Result<()> {
    for round in 0..rounds {
        let mut batch: Vec<(u64, u64, Request)> = Vec::new();
        for _ in 0..12 {
            let (at, len) = range(random, model.len() as u64);
            if len > 0 && batch.iter().all(|(a, l, _)| at + len <= *a || a + l <= at) {
                let request = match random.below(10) {
                    0 => Request::Zero { unmap: false },
                    1 => Request::Zero { unmap: true },
                    2 => Request::Discard,
                    3 | 4 => Request::Read,
                    _ => Request::Write(noise(random, len as usize)),
                };
                batch.push((at, len, request));
            }
        }
        let mut all: Vec<LocalBoxFuture<'_, Result<()>>> = Vec::new();
        for (at, len, request) in &batch {
            all.push(Box::pin(carry_out(disk, *at, *len, request, model)));
        }
        if random.below(3) == 0 {
            all.push(Box::pin(async { Ok(disk.flush().await?) }));
        }
        if random.below(3) == 0 {
            all.push(Box::pin(async { Ok(disk.maintain().await?) }));
        }
        join_all(all).await.into_iter().collect::<Result<()>>()?;
        for (at, len, request) in &batch {
            settle(disk, *at, *len, request, model).await.with_context(|| {
                format!("round {round}: {} at {at}, {len} bytes", request.name())
            })?;
        }
    }
    Ok(())
}

impl Request {
    fn name(&self) -> &'static str {
        match self {
            Request::Write(_) => "a write",
            Request::Zero { .. } => "a write of zeroes",
            Request::Discard => "a discard",
            Request::Read => "a read",
        }
    }
}

/// A range of whole blocks, whole sectors or odd bytes.
fn range(random: &mut Random, size: u64) -> (u64, u64) {
    let unit = match random.below(8) {
        0 => 1,
        1..=4 => 512,
        5 | 6 => 4096,
        _ => 65536,
    };
    let longest = if random.below(6) == 0 { 300_000 } else { 20_000 };
    let len = (random.below(longest) / unit + 1) * unit;
    let Some(room) = size.checked_sub(len) else { return (0, size) };
    // A corner of the disk is used again and again.
    let room = if random.below(2) == 0 { room.min(600_000) } else { room };
    (random.below(room / unit + 1) * unit, len)
}

async fn carry_out(
    disk: &FileDisk,
    at: u64,
    len: u64,
    request: &Request,
    model: &[u8],
) -> Result<()> {
    let (start, length) = (GuestOffset::new(at), ByteLen::new(len));
    match request {
        Request::Write(bytes) => write(disk, at, bytes).await,
        Request::Zero { unmap } => {
            let mode = ZeroMode { unmap: *unmap, fast_only: false };
            Ok(disk.write_zeroes(start, length, mode).await?)
        }
        Request::Discard => Ok(disk.discard(start, length).await?),
        Request::Read => {
            let got = read(disk, at, len as usize).await?;
            same(&model[at as usize..(at + len) as usize], &got).context("beside other requests")
        }
    }
}

/// Brings the model up to date and compares. What was discarded may read as before or as zeroes.
async fn settle(
    disk: &FileDisk,
    at: u64,
    len: u64,
    request: &Request,
    model: &mut [u8],
) -> Result<()> {
    let expected = &mut model[at as usize..(at + len) as usize];
    let got = read(disk, at, len as usize).await?;
    match request {
        Request::Write(bytes) => expected.copy_from_slice(bytes),
        Request::Zero { .. } => expected.fill(0),
        Request::Read => {}
        Request::Discard => {
            let odd = expected.iter().zip(&got).position(|(old, new)| old != new && *new != 0);
            ensure!(odd.is_none(), "discarded byte {odd:?} is neither as it was nor zero");
            expected.copy_from_slice(&got);
        }
    }
    same(expected, &got)
}
