//! How often each host cluster of a window is referenced, and by what kind of thing.
//!
//! Callers: the census and those who read its counts. Two bytes a cluster, in pieces that exist only where something
//! was counted; counting is lock-free, so any number of threads may count at once.

use bedplate_types::{Error, ErrorKind, Result};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// What a cluster is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Use {
    Header = 1,
    Refcounts = 2,
    L1 = 3,
    L2 = 4,
    Snapshots = 5,
    Bitmaps = 6,
    Encryption = 7,
    Data = 8,
}

impl Use {
    const ALL: [Self; 8] = [
        Self::Header,
        Self::Refcounts,
        Self::L1,
        Self::L2,
        Self::Snapshots,
        Self::Bitmaps,
        Self::Encryption,
        Self::Data,
    ];

    /// The words for messages.
    pub(super) const fn text(self) -> &'static str {
        match self {
            Self::Header => "the header",
            Self::Refcounts => "reference counts",
            Self::L1 => "an L1 table",
            Self::L2 => "an L2 table",
            Self::Snapshots => "the snapshot table",
            Self::Bitmaps => "bitmaps",
            Self::Encryption => "the encryption header",
            Self::Data => "guest data",
        }
    }
}

/// The uses of one cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Uses(u16);

impl Uses {
    pub(super) fn has(self, kind: Use) -> bool {
        self.0 >> kind as u8 & 1 != 0
    }

    /// The words for messages.
    pub(super) fn text(self) -> String {
        let names: Vec<_> = Use::ALL.iter().filter(|u| self.has(**u)).map(|u| u.text()).collect();
        names.join(" and ")
    }
}

const PIECE: usize = 1024;
type Piece = Box<[AtomicU16; PIECE]>;
/// Bytes that a cluster costs.
pub(super) const CELL_BYTES: u64 = 2;
/// The low bits hold the count, and this value says that it is in `large`; the high bits hold the use.
const COUNT_MASK: u16 = 0xfff;
const USE_SHIFT: u32 = 12;
/// Clusters with several uses that are remembered; beyond it only the reference counts tell.
const MAX_MIXED: usize = 1 << 16;
/// Counts beyond the packed range that are kept.
const MAX_LARGE: usize = 1 << 20;

/// Reference counts of the clusters of a window.
pub(crate) struct Cells {
    window: Range<u64>,
    pieces: Box<[OnceLock<Piece>]>,
    /// Both leaf mutexes; nothing is awaited and no other lock taken under them.
    large: Mutex<HashMap<u64, u64>>,
    /// For clusters used for different things: one bit for each use.
    mixed: Mutex<BTreeMap<u64, Uses>>,
    /// The largest count that the image can express; counting stops there.
    max: u64,
    /// The lowest cluster behind the window that was named.
    beyond: AtomicU64,
    /// More than [`MAX_LARGE`] counts are large.
    too_many: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Cells {
    pub(super) fn new(window: Range<u64>, max: u64) -> Self {
        let pieces = window.end.saturating_sub(window.start).div_ceil(PIECE as u64);
        Self {
            pieces: (0..pieces).map(|_| OnceLock::new()).collect(),
            window,
            large: Mutex::default(),
            mixed: Mutex::default(),
            max,
            beyond: AtomicU64::new(u64::MAX),
            too_many: AtomicBool::new(false),
        }
    }

    /// The clusters that are counted.
    pub(crate) fn window(&self) -> Range<u64> {
        self.window.clone()
    }

    /// The lowest cluster behind the window that is referenced; `None` when there is none.
    pub(super) fn beyond(&self) -> Option<u64> {
        Some(self.beyond.load(Ordering::Relaxed)).filter(|c| *c != u64::MAX)
    }

    fn cell(&self, cluster: u64) -> Option<&AtomicU16> {
        if cluster >= self.window.end {
            if cluster < self.beyond.load(Ordering::Relaxed) {
                self.beyond.fetch_min(cluster, Ordering::Relaxed);
            }
            return None;
        }
        let index = cluster.checked_sub(self.window.start)?;
        let piece = self.pieces.get((index / PIECE as u64) as usize)?;
        piece
            .get_or_init(|| Box::new([const { AtomicU16::new(0) }; PIECE]))
            .get(index as usize % PIECE)
    }

    /// Adds `times` references; returns how many of them the image's refcount width can't hold.
    pub(super) fn add(&self, cluster: u64, kind: Use, times: u64) -> u64 {
        let Some(cell) = self.cell(cluster) else { return 0 };
        let mut old = cell.load(Ordering::Relaxed);
        loop {
            let used = self.first_use(cluster, old, kind);
            let count = u64::from(old & COUNT_MASK);
            let new = count.saturating_add(times).min(self.max);
            let small = old & COUNT_MASK != COUNT_MASK && new < u64::from(COUNT_MASK);
            if !small {
                return self.add_large(cluster, cell, kind, times);
            }
            let packed = new as u16 | used << USE_SHIFT;
            match cell.compare_exchange_weak(old, packed, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return times - (new - count),
                Err(now) => old = now,
            }
        }
    }

    /// As [`Self::add`], for counts that don't fit in the cell.
    fn add_large(&self, cluster: u64, cell: &AtomicU16, kind: Use, times: u64) -> u64 {
        let mut large = lock(&self.large);
        let mut before = cell.load(Ordering::Relaxed);
        // Others may still count in the cell until it says that the count is here.
        loop {
            let used = if before >> USE_SHIFT == 0 { kind as u16 } else { before >> USE_SHIFT };
            let full = COUNT_MASK | used << USE_SHIFT;
            match cell.compare_exchange_weak(before, full, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => before = now,
            }
        }
        let old = match before & COUNT_MASK {
            COUNT_MASK => large.get(&cluster).copied().unwrap_or(0),
            small => u64::from(small),
        };
        let new = old.saturating_add(times).min(self.max);
        if large.len() < MAX_LARGE || large.contains_key(&cluster) {
            large.insert(cluster, new);
        } else {
            self.too_many.store(true, Ordering::Relaxed);
        }
        drop(large);
        self.first_use(cluster, before, kind);
        times - (new - old)
    }

    /// What the cluster was used for first; notes when `kind` is something else.
    fn first_use(&self, cluster: u64, cell: u16, kind: Use) -> u16 {
        let used = cell >> USE_SHIFT;
        if used == 0 {
            return kind as u16;
        }
        if used != kind as u16 {
            let mut mixed = lock(&self.mixed);
            if mixed.len() < MAX_MIXED || mixed.contains_key(&cluster) {
                let uses = mixed.entry(cluster).or_insert(Uses(0));
                uses.0 |= 1 << used | 1 << kind as u8;
            }
        }
        used
    }

    /// Marks a cluster as taken without counting a reference.
    pub(super) fn reserve(&self, cluster: u64) {
        if let Some(cell) = self.cell(cluster) {
            let mark = (Use::Refcounts as u16) << USE_SHIFT;
            let _ = cell.compare_exchange(0, mark, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// Fails when not all counts could be kept.
    ///
    /// # Errors
    /// `Limit`.
    pub(super) fn complete(&self) -> Result<()> {
        if self.too_many.load(Ordering::Relaxed) {
            return Err(Error::new(
                ErrorKind::Limit,
                format!(
                    "more than {MAX_LARGE} clusters have more than {COUNT_MASK} references each; \
                     the image is damaged or malicious"
                ),
            ));
        }
        Ok(())
    }

    fn peek(&self, cluster: u64) -> u16 {
        let piece = || {
            let index = cluster.checked_sub(self.window.start)?;
            let piece = self.pieces.get((index / PIECE as u64) as usize)?.get()?;
            piece.get(index as usize % PIECE)
        };
        piece().map_or(0, |cell| cell.load(Ordering::Relaxed))
    }

    /// The references counted for a cluster.
    pub(crate) fn get(&self, cluster: u64) -> u64 {
        match self.peek(cluster) & COUNT_MASK {
            COUNT_MASK => lock(&self.large).get(&cluster).copied().unwrap_or(0),
            small => u64::from(small),
        }
    }

    /// The first cluster from `from` on that is counted or reserved. What was never touched costs no look.
    pub(super) fn next_used(&self, from: u64) -> Option<u64> {
        let mut skip = from.saturating_sub(self.window.start);
        let first = usize::try_from(skip / PIECE as u64).ok()?;
        for (index, piece) in self.pieces.iter().enumerate().skip(first) {
            let base = index * PIECE;
            let within = (skip as usize).saturating_sub(base);
            let cells = piece.get().map_or(&[][..], |p| p.get(within..).unwrap_or(&[]));
            if let Some(at) = cells.iter().position(|c| c.load(Ordering::Relaxed) != 0) {
                return Some(self.window.start + (base + within + at) as u64);
            }
            skip = 0;
        }
        None
    }

    /// The last cluster that is counted or reserved.
    pub(super) fn last_used(&self) -> Option<u64> {
        let mut pieces = self.pieces.iter().enumerate().rev();
        pieces.find_map(|(index, piece)| {
            let at = piece.get()?.iter().rposition(|c| c.load(Ordering::Relaxed) != 0)?;
            Some(self.window.start + (index * PIECE + at) as u64)
        })
    }

    /// True when something may be counted in the range: it has memory.
    pub(super) fn touches(&self, range: Range<u64>) -> bool {
        let start = range.start.max(self.window.start);
        let end = range.end.min(self.window.end);
        if start >= end {
            return false;
        }
        let first = ((start - self.window.start) / PIECE as u64) as usize;
        let last = (end - self.window.start).div_ceil(PIECE as u64) as usize;
        let pieces = self.pieces.get(first..last.min(self.pieces.len()));
        pieces.is_some_and(|p| p.iter().any(|p| p.get().is_some()))
    }

    /// The clusters of `range` that have references, with their number.
    pub(crate) fn referenced(&self, range: Range<u64>) -> impl Iterator<Item = (u64, u64)> + '_ {
        let start = range.start.max(self.window.start);
        let end = range.end.min(self.window.end);
        let skip = start.saturating_sub(self.window.start) / PIECE as u64;
        let last = end.saturating_sub(self.window.start).div_ceil(PIECE as u64);
        (skip..last)
            .filter(|n| self.pieces.get(*n as usize).is_some_and(|p| p.get().is_some()))
            .flat_map(move |n| {
                let base = self.window.start + n * PIECE as u64;
                base.max(start)..(base + PIECE as u64).min(end)
            })
            .map(|cluster| (cluster, self.get(cluster)))
            .filter(|(_, n)| *n > 0)
    }

    /// The clusters used for different things.
    pub(super) fn mixed(&self) -> Vec<(u64, Uses)> {
        lock(&self.mixed).iter().map(|(c, u)| (*c, *u)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_grow_past_the_packed_range_and_stop_at_the_width() {
        let c = Cells::new(0..100, 10_000);
        assert_eq!(c.add(5, Use::Data, 4094), 0);
        assert_eq!(c.get(5), 4094);
        assert_eq!(c.add(5, Use::Data, 1), 0);
        assert_eq!(c.get(5), 4095);
        assert_eq!(c.add(5, Use::Data, 10_000), 4095);
        assert_eq!(c.get(5), 10_000);
        assert_eq!(c.get(6), 0);
        assert_eq!(c.referenced(0..6).collect::<Vec<_>>(), [(5, 10_000)]);
        assert_eq!(c.referenced(6..u64::MAX).count(), 0);
    }

    #[test]
    fn used_clusters_are_found_from_both_ends() {
        let c = Cells::new(5_000..50_000, 100);
        assert_eq!((c.next_used(0), c.last_used()), (None, None));
        for cluster in [5_001, 7_000, 7_001, 49_999] {
            c.add(cluster, Use::Data, 1);
        }
        c.reserve(30_000);
        let mut found = Vec::new();
        while let Some(used) = c.next_used(found.last().map_or(0, |last| last + 1)) {
            found.push(used);
        }
        assert_eq!(found, [5_001, 7_000, 7_001, 30_000, 49_999]);
        assert_eq!((c.last_used(), c.next_used(50_000)), (Some(49_999), None));
    }

    #[test]
    fn clusters_with_several_uses_are_listed() {
        let c = Cells::new(0..100, u64::MAX);
        for (cluster, kind) in [(9, Use::Data), (9, Use::Data), (7, Use::L2), (7, Use::Data)] {
            assert_eq!(c.add(cluster, kind, 1), 0);
        }
        let list: Vec<_> = c.mixed().into_iter().map(|(c, u)| (c, u.text())).collect();
        assert_eq!(list, [(7, "an L2 table and guest data".to_string())]);
    }

    #[test]
    fn what_lies_outside_the_window_is_left_to_other_windows() {
        let c = Cells::new(4096..8192, u64::MAX);
        for cluster in [0, 4095, 4096, 8191, 10_000, 8192, 9000] {
            assert_eq!(c.add(cluster, Use::Data, 1), 0);
        }
        assert_eq!(c.referenced(0..u64::MAX).collect::<Vec<_>>(), [(4096, 1), (8191, 1)]);
        assert_eq!(c.beyond(), Some(8192));
        assert!(c.touches(0..4097) && !c.touches(6000..7000) && !c.touches(9000..9999));
    }

    #[test]
    fn threads_that_count_at_once_lose_nothing() {
        let c = Cells::new(0..64, u64::MAX);
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| (0..64 * 3000).for_each(|i| assert_eq!(c.add(i % 64, Use::Data, 1), 0)));
            }
        });
        assert!(c.referenced(0..64).all(|(_, n)| n == 12_000));
        assert_eq!(c.referenced(0..64).count(), 64);
    }

    #[test]
    fn reserved_clusters_are_neither_free_nor_referenced() {
        let c = Cells::new(0..64, u64::MAX);
        c.reserve(3);
        assert_eq!((c.next_used(3), c.next_used(4)), (Some(3), None));
        assert_eq!(c.get(3), 0);
        assert_eq!(c.add(3, Use::Data, 1), 0);
        assert_eq!(c.get(3), 1);
        assert!(c.mixed()[0].1.has(Use::Refcounts));
    }
}
