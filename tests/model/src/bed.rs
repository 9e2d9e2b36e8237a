//! An image made by a [`Spec`], with what lies below it and what the guest sees; opening, checking and reading it.

use crate::dirty::check_bitmap;
use crate::maker::{Cell, make, passphrase};
use crate::pattern::tagged;
use crate::spec::{BelowKind, BelowSpec, DataFile, Seeds, Spec};
use bedplate_disk::{Disk, Layer};
use bedplate_qcow2::check::{CheckOptions, check};
use bedplate_qcow2::{
    BitmapChange, JournalStart, OpenOptions, Qcow2, Run, read_header, read_snapshots,
};
use bedplate_runtime::buf::{IoVec, SharedBuf};
use bedplate_sim::exec::block_on;
use bedplate_sim::{Image, Rng, SECTOR, SimOptions, SimStorage};
use bedplate_storage::Storage;
use bedplate_types::{ByteLen, CacheMode, Error, GuestOffset};
use std::sync::Arc;

/// Writes of the first content have numbers from here on, in what [`crate::pattern`] calls tags.
const FIRST: u64 = 1 << 20;

/// An image, what lies below it, and what the guest sees at first.
#[derive(Clone)]
pub struct Bed {
    /// How it was made.
    pub spec: Spec,
    /// The image. An external data file and the image lie on one medium, so that a power cut meets both: the data first, in the
    /// room that [`Spec::room`] says, then the image ([`Self::metadata`]).
    pub image: Image,
    /// What lies below.
    pub below: Option<Image>,
    /// What the guest sees.
    pub content: Vec<u8>,
    /// Snapshots made since, by name, and what they hold; those that were there at first hold the first content.
    pub kept: Vec<(String, Vec<u8>)>,
    /// What the disk held when a bitmap was made that records every change since, if there is one.
    pub bitmap: Option<Vec<u8>>,
}

/// An open disk, with handles on what it is made of.
pub struct Open {
    /// The disk.
    pub disk: Disk<SimStorage>,
    /// Its top layer.
    pub qcow2: Arc<Qcow2<SimStorage>>,
    /// Where that lies, with its data file if it has one.
    pub storage: SimStorage,
}

impl Open {
    /// Writes as a queue thread does on its hot path: straight to the place that a look-up names. `None` where it
    /// would take the slow road.
    pub async fn write_direct(&self, at: u64, buf: &IoVec) -> Option<Result<(), Error>> {
        if !self.disk.write_cache() || self.qcow2.is_poisoned() {
            return None;
        }
        let _pin = self.qcow2.epochs().guard();
        match self.qcow2.lookup_run(true, GuestOffset::new(at), buf.byte_len()) {
            Run::At(host) => Some(self.qcow2.data_storage().write(host, buf.clone()).await),
            _ => None,
        }
    }

    /// Reads as a queue thread does on its hot path; `None` as above.
    pub async fn read_direct(&self, at: u64, buf: &IoVec) -> Option<Result<(), Error>> {
        let _pin = self.qcow2.epochs().guard();
        match self.qcow2.lookup_run(false, GuestOffset::new(at), buf.byte_len()) {
            Run::At(host) => return Some(self.qcow2.data_storage().read(host, buf.clone()).await),
            Run::Zero => {}
            Run::Unallocated if self.disk.depth() == 1 => {}
            _ => return None,
        }
        buf.fill(0, buf.len(), 0);
        Some(Ok(()))
    }
}

fn random_cells(spec: &Spec, rng: &mut Rng) -> Vec<Cell> {
    let seeds = spec.seeds;
    (0..spec.size.div_ceil(spec.cluster()))
        .map(|_| match () {
            // Where the data file reads as the disk, everything is mapped from the start.
            () if spec.data_file == Some(DataFile::Raw) => Cell::Data,
            () if !rng.chance(seeds.filled) => Cell::Unallocated,
            () if rng.chance(seeds.compressed) => Cell::Compressed,
            () if rng.chance(seeds.zero) && rng.chance(50) => Cell::ZeroKept,
            () if rng.chance(seeds.zero) => Cell::Zero,
            // Data would have to be encrypted.
            () if spec.luks => Cell::Unallocated,
            () => Cell::Data,
        })
        .collect()
}

/// Makes one layer over what shows from below; returns it and what is seen.
fn layer(spec: &Spec, rng: &mut Rng, number: u64, below: &[u8]) -> (Image, Vec<u8>) {
    let cells = random_cells(spec, rng);
    let cluster = spec.cluster() as usize;
    let own = tagged(FIRST + number, 0, spec.size / SECTOR);
    let mut seen = below.to_vec();
    seen.resize(own.len(), 0);
    for (i, cell) in cells.iter().enumerate() {
        let range = i * cluster..seen.len().min((i + 1) * cluster);
        match cell {
            Cell::Unallocated => {}
            Cell::Zero | Cell::ZeroKept => seen[range].fill(0),
            Cell::Data | Cell::Compressed => seen[range.clone()].copy_from_slice(&own[range]),
        }
    }
    (make(spec, &cells, &own), seen)
}

fn below_layer(below: BelowSpec, rng: &mut Rng) -> (Image, Vec<u8>) {
    match below.kind {
        BelowKind::Raw => {
            let sectors = below.size.div_ceil(SECTOR);
            let mut bytes = tagged(FIRST, 0, sectors);
            bytes.truncate(below.size as usize);
            for part in bytes.chunks_mut(8192) {
                if rng.chance(30) {
                    part.fill(0);
                }
            }
            let image = Image::from_bytes(&bytes);
            bytes.resize((sectors * SECTOR) as usize, 0);
            (image, bytes)
        }
        BelowKind::Qcow2 => {
            let spec = Spec {
                cluster_bits: [9, 12, 16][rng.below(3) as usize],
                refcount_bits: 16,
                version: 3,
                extended: false,
                lazy: false,
                zstd: false,
                unpacked: false,
                luks: false,
                size: below.size,
                seeds: Seeds { filled: 60, compressed: 20, zero: 20, snapshots: 0 },
                below: None,
                data_file: None,
                l2_cache: 0,
                refcount_cache: 0,
            };
            layer(&spec, rng, 0, &[])
        }
    }
}

impl Bed {
    /// Makes the image.
    pub fn new(spec: Spec, rng: &mut Rng) -> Self {
        let below = spec.below.map(|b| below_layer(b, rng));
        let (below, seen) = match below {
            Some((image, seen)) => (Some(image), seen),
            None => (None, Vec::new()),
        };
        let mut shows = seen;
        shows.truncate(spec.size as usize);
        let (image, content) = layer(&spec, rng, 1, &shows);
        Self { spec, image, below, content, kept: Vec::new(), bitmap: None }
    }

    /// A bed around an image that something else has made.
    pub fn around(spec: Spec, image: Image, content: Vec<u8>) -> Self {
        Self { spec, image, below: None, content, kept: Vec::new(), bitmap: None }
    }

    /// Adds a persistent bitmap; version 2 has none.
    ///
    /// # Errors
    /// What making it reports.
    pub fn with_bitmap(mut self, granularity: u64) -> Result<Self, Error> {
        let storage = SimStorage::from_image(self.image.clone(), SimOptions::default());
        let open = self.open(storage.clone(), CacheMode::None)?;
        let add = BitmapChange::Add { granularity: Some(granularity) };
        block_on(open.qcow2.change_bitmap(b"changes", add))?;
        block_on(open.disk.close())?;
        self.image = storage.image();
        self.bitmap = Some(self.content.clone());
        Ok(self)
    }

    /// The bitmap, if there is one, must know of every change of a disk that holds `content`, or say that it can't be trusted;
    /// with `trusted` it may not say so.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check_bitmap(
        &self,
        medium: &Image,
        content: &[u8],
        trusted: bool,
    ) -> Result<(), String> {
        let Some(base) = &self.bitmap else { return Ok(()) };
        check_bitmap(&self.metadata(medium), content, Some(base), trusted)
    }

    /// The image's own part of `storage`, and its data file.
    pub(crate) fn parts(&self, storage: &SimStorage) -> (SimStorage, Option<SimStorage>) {
        if self.spec.data_file.is_none() {
            return (storage.clone(), None);
        }
        let (data, image) = storage.split(self.spec.room());
        (image, Some(data))
    }

    /// The image in what a medium holds, without its data file.
    pub fn metadata(&self, medium: &Image) -> Image {
        if self.spec.data_file.is_none() {
            return medium.clone();
        }
        let start = self.spec.room() + SimStorage::BETWEEN;
        let mut image = Image::new(medium.len().saturating_sub(start));
        for (at, page) in medium.pages() {
            let cut = start.saturating_sub(at).min(page.len() as u64);
            image.write((at + cut).saturating_sub(start), &page[cut as usize..]);
        }
        image.set_len(medium.len().saturating_sub(start));
        image
    }

    /// The data file in what a medium holds, if the image has one.
    pub fn data(&self, medium: &Image) -> Option<Vec<u8>> {
        self.spec.data_file?;
        let mut len = [0; 8];
        medium.read(self.spec.room(), &mut len);
        let mut bytes = vec![0; u64::from_be_bytes(len).min(self.spec.room()) as usize];
        medium.read(0, &mut bytes);
        Some(bytes)
    }

    /// What a snapshot of this name holds.
    pub fn snapshot(&self, name: &[u8]) -> &[u8] {
        let made = self.kept.iter().find(|kept| kept.0.as_bytes() == name);
        made.map_or(&self.content, |kept| &kept.1)
    }

    /// Opens a disk over `storage`, which holds this image or what became of it.
    ///
    /// # Errors
    /// What opening reports.
    pub fn open(&self, storage: SimStorage, cache: CacheMode) -> Result<Open, Error> {
        self.open_with(storage, cache, None)
    }

    /// Opens a disk whose changes in memory outlive it in a journal.
    ///
    /// # Errors
    /// What opening reports.
    pub fn open_with(
        &self,
        storage: SimStorage,
        cache: CacheMode,
        journal: Option<JournalStart>,
    ) -> Result<Open, Error> {
        let (image, data) = self.parts(&storage);
        let options = self.options(journal);
        let qcow2 = Arc::new(block_on(Qcow2::open_with_data(image, data, &options))?);
        let mut layers = vec![Layer::Qcow2(qcow2.clone())];
        if let (Some(image), Some(below)) = (&self.below, self.spec.below) {
            let options =
                SimOptions { read_only: true, name: "below".to_owned(), ..SimOptions::default() };
            let storage = SimStorage::from_image(image.clone(), options);
            layers.push(match below.kind {
                BelowKind::Raw => Layer::Raw(Arc::new(storage)),
                BelowKind::Qcow2 => {
                    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
                    Layer::Qcow2(Arc::new(block_on(Qcow2::open(storage, &options))?))
                }
            });
        }
        let disk = Disk::new("disk", layers, false, cache)?;
        Ok(Open { disk, qcow2, storage })
    }

    /// How the image is opened.
    pub(crate) fn options(&self, journal: Option<JournalStart>) -> OpenOptions {
        OpenOptions {
            journal,
            read_only: false,
            l2_cache: ByteLen::new(self.spec.l2_cache),
            refcount_cache: ByteLen::new(self.spec.refcount_cache),
            passphrases: if self.spec.luks { vec![passphrase()] } else { Vec::new() },
            ..OpenOptions::default()
        }
    }

    /// Says how each snapshot of `image` differs from what it was when it was made, if it does.
    ///
    /// # Errors
    /// The difference, or why a snapshot can't be read.
    pub fn check_snapshots(&self, image: &Image) -> Result<(), String> {
        if self.spec.seeds.snapshots == 0 && self.kept.is_empty() {
            return Ok(());
        }
        let storage = SimStorage::from_image(image.clone(), SimOptions::default());
        let header = block_on(read_header(&storage)).map_err(|e| format!("{e:#}"))?;
        let (snapshots, _) =
            block_on(read_snapshots(&storage, &header)).map_err(|e| format!("{e:#}"))?;
        for snapshot in snapshots {
            // The image as it would be after going back to the snapshot.
            let mut view = image.clone();
            view.write(36, &snapshot.l1_size.to_be_bytes());
            view.write(40, &snapshot.l1_offset.get().to_be_bytes());
            let options = SimOptions { read_only: true, ..SimOptions::default() };
            let open = self
                .open(SimStorage::from_image(view, options), CacheMode::None)
                .map_err(|e| format!("a snapshot can't be opened: {e:#}"))?;
            let seen =
                read_all(&open.disk).map_err(|e| format!("a snapshot can't be read: {e:#}"))?;
            let right = self.snapshot(&snapshot.name);
            if let Some(at) = seen.iter().zip(right).position(|(a, b)| a != b) {
                return Err(format!(
                    "snapshot '{}' has changed at {at:#x}",
                    printable(&snapshot.name)
                ));
            }
        }
        Ok(())
    }
}

fn printable(name: &[u8]) -> String {
    String::from_utf8_lossy(name).into_owned()
}

/// All bytes of a disk.
///
/// # Errors
/// What reading reports.
pub fn read_all(disk: &Disk<SimStorage>) -> Result<Vec<u8>, Error> {
    let len = disk.size().get().next_multiple_of(SECTOR) as usize;
    let buf = SharedBuf::zeroed(len)?;
    block_on(disk.read(GuestOffset::ZERO, buf.iovec()))?;
    let mut out = vec![0; len];
    buf.iovec().copy_to(0, &mut out);
    Ok(out)
}

/// True when the image says that its refcounts can't be trusted.
pub fn is_dirty(image: &Image) -> bool {
    let mut bytes = [0; 80];
    image.read(0, &mut bytes);
    bytes[7] >= 3 && bytes[79] & 1 != 0
}

/// Runs the engine's own check over an image; with `leaks` they are allowed.
///
/// # Errors
/// The first findings.
pub fn check_image(image: &Image, leaks: bool) -> Result<(), String> {
    let options = SimOptions { read_only: true, ..SimOptions::default() };
    let storage = SimStorage::from_image(image.clone(), options);
    let report =
        block_on(check(&storage, CheckOptions::default())).map_err(|e| format!("check: {e:#}"))?;
    if report.corruptions == 0 && report.check_errors == 0 && (leaks || report.leaks == 0) {
        return Ok(());
    }
    let texts: Vec<&str> = report.findings.iter().take(4).map(|f| f.text.as_str()).collect();
    Err(format!(
        "check finds {} corruption(s), {} leak(s), {} error(s): {}",
        report.corruptions,
        report.leaks,
        report.check_errors,
        texts.join("; ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn made_images_are_clean_and_read_as_they_should() {
        for seed in 0..300 {
            let mut rng = Rng::new(seed);
            let bed = Bed::new(Spec::random(&mut rng), &mut rng);
            check_image(&bed.metadata(&bed.image), false)
                .unwrap_or_else(|e| panic!("seed {seed}: {e}"));
            let storage = SimStorage::from_image(bed.image.clone(), SimOptions::default());
            let open = bed.open(storage, CacheMode::None).expect("opens");
            assert!(read_all(&open.disk).expect("reads") == bed.content, "seed {seed}");
            bed.check_snapshots(&bed.image).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        }
    }
}
