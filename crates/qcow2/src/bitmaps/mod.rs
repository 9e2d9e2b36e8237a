//! Persistent dirty bitmaps: which parts of the disk were changed since a point that a backup program set.
//!
//! Callers: opening, every change of guest data, closing; the command for adding and removing. A bitmap that is
//! recording is marked in-use in the file, durably, before the first change of guest data, and tracked in memory from
//! then on; closing stores it and takes the mark away. A crash in between leaves the mark, which says that the bitmap
//! can't be trusted (specification, "Bitmaps"). Bitmaps that are not recording, or carry the mark already, stay as they
//! are.
//!
//! Invariant: no change of guest data is under way while [`State::QUIET`], and a bit is set before the change it stands
//! for is submitted.

mod change;
mod directory;
mod header;
mod merge;
mod resize;
mod store;
mod view;

pub use change::BitmapChange;
pub use view::BitmapView;

use crate::format::{Bitmap, EXT_BITMAPS, Geometry, Header};
use crate::image::Qcow2;
use arc_swap::ArcSwap;
use bedplate_runtime::sync::AsyncMutex;
use bedplate_storage::Storage;
use bedplate_types::{ByteLen, Error, ErrorKind, GuestOffset, Result, limits};
use directory::Directory;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Values of [`Bitmaps::state`].
struct State;

impl State {
    /// No bitmap is recording.
    const NONE: u8 = 0;
    /// Some are, and the file has them as they are.
    const QUIET: u8 = 1;
    /// They are marked in-use and tracked in memory.
    const TRACKING: u8 = 2;
    /// No guest data will change, so nobody asks.
    const IGNORED: u8 = 3;
}

/// The recording bitmaps of an open image.
pub(crate) struct Bitmaps {
    /// See [`State`]; read at every write.
    state: AtomicU8,
    list: ArcSwap<Vec<Tracked>>,
    /// One marking at a time; held across I/O by design.
    gate: AsyncMutex<()>,
}

/// A bitmap that is recording.
pub(crate) struct Tracked {
    bitmap: Bitmap,
    /// Its place in the directory.
    index: usize,
    /// Bits of the disk: as many as it has grains.
    count: u64,
    /// Loaded before the first change.
    bits: OnceLock<Arc<[AtomicU64]>>,
}

impl Default for Bitmaps {
    fn default() -> Self {
        Self {
            state: AtomicU8::new(State::NONE),
            list: ArcSwap::default(),
            gate: AsyncMutex::new(()),
        }
    }
}

impl Bitmaps {
    /// No guest data will be changed: bitmaps that could not be kept right stand in nobody's way.
    pub(crate) fn ignore(&self) {
        self.state.store(State::IGNORED, Ordering::Release);
    }

    fn is_ignored(&self) -> bool {
        self.state.load(Ordering::Acquire) == State::IGNORED
    }

    pub(crate) fn install(&self, list: Vec<Tracked>) {
        let state = if list.is_empty() { State::NONE } else { State::QUIET };
        self.list.store(Arc::new(list));
        self.state.store(state, Ordering::Release);
    }

    fn is_tracking(&self) -> bool {
        self.state.load(Ordering::Acquire) == State::TRACKING
    }
}

/// The number of bits that a disk has, and the bytes they take.
pub(crate) fn bits_of(size: ByteLen, granularity_bits: u8) -> (u64, u64) {
    let bits = size.get().div_ceil(1 << granularity_bits.min(63));
    (bits, bits.div_ceil(8))
}

/// Clusters of bits that a disk has, which are the entries of the bitmap's table.
pub(crate) fn table_entries(size: ByteLen, granularity_bits: u8, geo: Geometry) -> u64 {
    bits_of(size, granularity_bits).1.div_ceil(geo.cluster_size())
}

impl Tracked {
    /// A recording bitmap of a disk of this size.
    fn new(bitmap: &Bitmap, index: usize, size: ByteLen, geo: Geometry) -> Result<Self> {
        // Made only when it is told: there may be 65535 long ones.
        let name = || crate::format::printable(&bitmap.name);
        let (count, bytes) = bits_of(size, bitmap.granularity_bits);
        if bytes > limits::MAX_BITMAP_BYTES {
            return Err(too_large(&format!("bitmap '{}' needs", name()), bytes));
        }
        let entries = table_entries(size, bitmap.granularity_bits, geo);
        if u64::from(bitmap.table_size) != entries {
            return Err(Error::new(
                ErrorKind::BadImage,
                format!(
                    "the table of bitmap '{}' has {} entries, but a disk of this size needs {entries}; remove the \
                     bitmap",
                    name(),
                    bitmap.table_size
                ),
            ));
        }
        Ok(Self { bitmap: bitmap.clone(), index, count, bits: OnceLock::new() })
    }

    /// False for one with data that nobody here knows, so that it can't be kept right.
    fn is_known(&self) -> bool {
        self.bitmap.extra.is_empty() || self.bitmap.extra_compatible()
    }

    /// Sets the bits of all grains that the range touches.
    fn set(&self, at: u64, len: u64) {
        let Some(bits) = self.bits.get() else { return };
        let shift = self.bitmap.granularity_bits;
        if len == 0 {
            return;
        }
        let first = at >> shift;
        let last = (at.saturating_add(len - 1) >> shift).min(self.count.saturating_sub(1));
        for word in first / 64..=last / 64 {
            let from = if word == first / 64 { first % 64 } else { 0 };
            let to = if word == last / 64 { last % 64 } else { 63 };
            if from > to {
                continue;
            }
            let mask = (u64::MAX >> (63 - to)) & (u64::MAX << from);
            // Looked at first: most writes find their bits set, and so don't touch a shared cache line.
            if let Some(cell) = bits.get(word as usize)
                && cell.load(Ordering::Relaxed) & mask != mask
            {
                cell.fetch_or(mask, Ordering::Relaxed);
            }
        }
    }
}

fn too_large(what: &str, bytes: u64) -> Error {
    Error::new(
        ErrorKind::Limit,
        format!(
            "{what} {bytes} bytes of memory and space, more than the {} that are allowed; open the image read-only, or use \
             'bedplate bitmap' to disable or remove bitmaps, or to add one with a coarser granularity",
            limits::MAX_BITMAP_BYTES
        ),
    )
}

/// Finds the bitmaps that are recording; nothing is changed in the file, and no bits are read yet.
///
/// # Errors
/// `BadImage` or `Limit` when there is one that could not be kept right.
pub(crate) async fn find_bitmaps<S: Storage>(
    storage: &S,
    header: &Header,
    geo: Geometry,
) -> Result<Vec<Tracked>> {
    match Directory::read(storage, header).await? {
        Some(directory) => recording(&directory, header, geo),
        None => Ok(Vec::new()),
    }
}

/// The bitmaps of a directory that are recording.
///
/// # Errors
/// As [`find_bitmaps`].
fn recording(directory: &Directory, header: &Header, geo: Geometry) -> Result<Vec<Tracked>> {
    let (mut list, mut bytes) = (Vec::new(), 0);
    for (index, bitmap) in directory.bitmaps().enumerate() {
        if bitmap.auto() && !bitmap.in_use() {
            let tracked = Tracked::new(bitmap, index, header.disk_size(), geo)?;
            // Each is stored in a cluster at least.
            bytes += tracked.count.div_ceil(8).max(geo.cluster_size());
            if bytes > limits::MAX_BITMAP_BYTES {
                return Err(too_large("all bitmaps that are recording need at least", bytes));
            }
            list.push(tracked);
        }
    }
    Ok(list)
}

impl<S: Storage> Qcow2<S> {
    /// Notes a change of guest data that is about to be submitted. False when [`Self::before_change`] must be called
    /// first. Never waits.
    pub(crate) fn track(&self, at: GuestOffset, len: ByteLen) -> bool {
        match self.bitmaps.state.load(Ordering::Acquire) {
            State::NONE | State::IGNORED => true,
            State::QUIET => false,
            _ => {
                for bitmap in self.bitmaps.list.load().iter() {
                    bitmap.set(at.get(), len.get());
                }
                true
            }
        }
    }

    /// Notes a change of guest data that is about to be submitted; the first one marks the bitmaps in-use.
    ///
    /// # Errors
    /// When that can't be made durable, or a bitmap can't be read; the change must not be made then.
    pub(crate) async fn before_change(&self, at: GuestOffset, len: ByteLen) -> Result<()> {
        if self.track(at, len) {
            return Ok(());
        }
        self.mark_bitmaps().await?;
        self.track(at, len);
        Ok(())
    }

    /// Sets all bits: the disk holds something else now.
    pub(crate) fn track_all(&self) {
        self.track(GuestOffset::ZERO, ByteLen::new(u64::MAX));
    }

    /// True when the image has bitmaps that it vouches for, recording or not.
    pub(crate) fn has_bitmaps(&self) -> bool {
        has_bitmaps(&self.header())
    }
}

/// True when the header names bitmaps and vouches for them.
pub(crate) fn has_bitmaps(header: &Header) -> bool {
    header.bitmaps_valid() && header.extension(EXT_BITMAPS).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use bedplate_types::HostOffset;

    fn tracked(size: u64, granularity_bits: u8) -> Tracked {
        let geo = Geometry::new(16).expect("allowed");
        let bitmap = Bitmap {
            name: b"b".to_vec(),
            table_offset: HostOffset::new(0x50000),
            table_size: table_entries(ByteLen::new(size), granularity_bits, geo) as u32,
            flags: 2,
            kind: 1,
            granularity_bits,
            extra: Vec::new(),
        };
        let t = Tracked::new(&bitmap, 0, ByteLen::new(size), geo).expect("fits");
        let words = t.count.div_ceil(64);
        t.bits.set((0..words).map(|_| AtomicU64::new(0)).collect()).expect("first");
        t
    }

    fn set_bits(t: &Tracked) -> Vec<u64> {
        let bits = t.bits.get().expect("set");
        (0..t.count + 64 - t.count % 64)
            .filter(|b| bits[(b / 64) as usize].load(Ordering::Relaxed) >> (b % 64) & 1 != 0)
            .collect()
    }

    #[test]
    fn every_grain_that_a_change_touches_is_set_and_no_other() {
        let size = 1000 << 9;
        for (at, len, bits) in [
            (0, 1, 0..1),
            (511, 2, 0..2),
            (512, 512, 1..2),
            (63 << 9, 1024, 63..65),
            (64 << 9, 64 << 9, 64..128),
            (10 << 9, 500 << 9, 10..510),
            (size - 1, 1, 999..1000),
            (size - 512, 1 << 40, 999..1000),
            (0, u64::MAX, 0..1000),
            (5, 0, 0..0),
        ] {
            let t = tracked(size, 9);
            t.set(at, len);
            assert_eq!(set_bits(&t), bits.collect::<Vec<_>>(), "{at} {len}");
        }
    }

    #[test]
    fn a_table_of_the_wrong_length_is_refused() {
        let geo = Geometry::new(16).expect("allowed");
        let t = tracked(1 << 30, 16);
        let larger = ByteLen::new(1 << 44);
        assert!(Tracked::new(&t.bitmap, 0, larger, geo).is_err());
    }
}
