//! How often each host cluster is referenced, and by what kind of thing.
//!
//! Callers: the checker. One byte a cluster, in pieces that exist only where something was counted. Memory is
//! bounded by a budget, so that a hostile image can't take it all.

use bedplate_types::{Error, ErrorKind, Result};
use std::collections::{BTreeMap, HashMap};

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
    Data = 7,
}

impl Use {
    const ALL: [Self; 7] = [
        Self::Header,
        Self::Refcounts,
        Self::L1,
        Self::L2,
        Self::Snapshots,
        Self::Bitmaps,
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
            Self::Data => "guest data",
        }
    }
}

const PIECE_BITS: u32 = 10;
const PIECE: usize = 1 << PIECE_BITS;
/// The low bits hold the count, and this value says that it is in `large`; the high bits hold the use.
const COUNT_MASK: u8 = 0x1f;
const USE_SHIFT: u32 = 5;
/// Clusters with several uses that are remembered; beyond it only the reference counts tell.
const MAX_MIXED: usize = 1 << 16;
/// What an entry of a map costs, about.
const ENTRY_COST: u64 = 48;

/// Memory that may still be taken.
pub(super) struct Budget {
    left: u64,
    limit: u64,
}

impl Budget {
    pub(super) const fn new(limit: u64) -> Self {
        Self { left: limit, limit }
    }

    /// Takes `bytes`.
    ///
    /// # Errors
    /// `Limit` when the budget is used up.
    pub(super) fn take(&mut self, bytes: u64) -> Result<()> {
        match self.left.checked_sub(bytes) {
            Some(left) => {
                self.left = left;
                Ok(())
            }
            None => Err(Error::new(
                ErrorKind::Limit,
                format!(
                    "the check needs more than the {} bytes of memory it may use; the image is very large or malicious",
                    self.limit
                ),
            )),
        }
    }
}

/// Reference counts of all clusters.
pub(crate) struct Counts {
    pieces: BTreeMap<u64, Box<[u8; PIECE]>>,
    large: HashMap<u64, u64>,
    /// For clusters used for different things: one bit for each use.
    mixed: BTreeMap<u64, u8>,
    /// The largest count that the image can express; counting stops there.
    max: u64,
    /// Just past the last cluster that was counted.
    end: u64,
    pub(super) budget: Budget,
}

impl Counts {
    pub(super) fn new(max: u64, budget: Budget) -> Self {
        Self {
            pieces: BTreeMap::new(),
            large: HashMap::new(),
            mixed: BTreeMap::new(),
            max,
            end: 0,
            budget,
        }
    }

    /// Adds `times` references; returns how many of them the image's refcount width can't hold.
    ///
    /// # Errors
    /// `Limit` when the memory budget is used up.
    pub(super) fn add(&mut self, cluster: u64, kind: Use, times: u64) -> Result<u64> {
        let piece = match self.pieces.entry(cluster >> PIECE_BITS) {
            std::collections::btree_map::Entry::Occupied(e) => e.into_mut(),
            std::collections::btree_map::Entry::Vacant(e) => {
                self.budget.take(PIECE as u64 + ENTRY_COST)?;
                e.insert(Box::new([0; PIECE]))
            }
        };
        self.end = self.end.max(cluster.saturating_add(1));
        let index = (cluster & (PIECE as u64 - 1)) as usize;
        let Some(cell) = piece.get_mut(index) else { return Ok(0) };
        let (packed, used) = (*cell & COUNT_MASK, *cell >> USE_SHIFT);
        let old = if packed == COUNT_MASK {
            self.large.get(&cluster).copied().unwrap_or(0)
        } else {
            u64::from(packed)
        };
        let new = old.saturating_add(times).min(self.max);
        let packed = match u8::try_from(new) {
            Ok(small) if small < COUNT_MASK => small,
            _ => {
                if self.large.insert(cluster, new).is_none() {
                    self.budget.take(ENTRY_COST)?;
                }
                COUNT_MASK
            }
        };
        let first = if used == 0 { kind as u8 } else { used };
        *cell = packed | first << USE_SHIFT;
        if first != kind as u8 {
            let known = self.mixed.len();
            match self.mixed.entry(cluster) {
                std::collections::btree_map::Entry::Occupied(mut e) => {
                    *e.get_mut() |= 1 << kind as u8;
                }
                std::collections::btree_map::Entry::Vacant(e) if known < MAX_MIXED => {
                    self.budget.take(ENTRY_COST)?;
                    e.insert(1 << first | 1 << kind as u8);
                }
                std::collections::btree_map::Entry::Vacant(_) => {}
            }
        }
        Ok(times - (new - old))
    }

    /// The references counted for a cluster.
    pub(crate) fn get(&self, cluster: u64) -> u64 {
        match self.pieces.get(&(cluster >> PIECE_BITS)) {
            Some(piece) => self.value(piece, cluster),
            None => 0,
        }
    }

    fn value(&self, piece: &[u8; PIECE], cluster: u64) -> u64 {
        let cell = piece.get((cluster & (PIECE as u64 - 1)) as usize).copied().unwrap_or(0);
        match cell & COUNT_MASK {
            COUNT_MASK => self.large.get(&cluster).copied().unwrap_or(0),
            small => u64::from(small),
        }
    }

    /// The clusters from `start` up to `end` (not included) that have references, with their number.
    pub(crate) fn referenced(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
        let (first, last) = (start >> PIECE_BITS, end.div_ceil(PIECE as u64));
        self.pieces
            .range(first..last.max(first))
            .flat_map(move |(n, piece)| {
                let base = n << PIECE_BITS;
                (base..base + PIECE as u64).map(move |c| (c, self.value(piece, c)))
            })
            .filter(move |(c, n)| *n > 0 && *c >= start && *c < end)
    }

    /// Just past the last cluster that was counted.
    pub(super) const fn end(&self) -> u64 {
        self.end
    }

    /// The clusters used for different things, with the words for them.
    pub(super) fn mixed(&self) -> impl Iterator<Item = (u64, String)> + '_ {
        self.mixed.iter().map(|(cluster, uses)| {
            let names: Vec<_> =
                Use::ALL.iter().filter(|u| uses >> **u as u8 & 1 != 0).map(|u| u.text()).collect();
            (*cluster, names.join(" and "))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_grow_past_the_packed_range_and_stop_at_the_width() {
        let mut c = Counts::new(1000, Budget::new(1 << 20));
        assert_eq!(c.add(5, Use::Data, 30).ok(), Some(0));
        assert_eq!(c.get(5), 30);
        assert_eq!(c.add(5, Use::Data, 1).ok(), Some(0));
        assert_eq!(c.get(5), 31);
        assert_eq!(c.add(5, Use::Data, 1000).ok(), Some(31));
        assert_eq!(c.get(5), 1000);
        assert_eq!(c.get(6), 0);
        assert_eq!(c.referenced(0, 6).collect::<Vec<_>>(), [(5, 1000)]);
        assert_eq!(c.referenced(6, u64::MAX).count(), 0);
    }

    #[test]
    fn clusters_with_several_uses_are_listed() {
        let mut c = Counts::new(u64::MAX, Budget::new(1 << 20));
        for (cluster, kind) in [(9, Use::Data), (9, Use::Data), (7, Use::L2), (7, Use::Data)] {
            assert_eq!(c.add(cluster, kind, 1).ok(), Some(0));
        }
        let list: Vec<_> = c.mixed().collect();
        assert_eq!(list, [(7, "an L2 table and guest data".to_string())]);
    }

    #[test]
    fn memory_stays_within_the_budget() {
        let mut c = Counts::new(u64::MAX, Budget::new(4096));
        let failed = (0..10).find_map(|i| c.add(i << 40, Use::Data, 1).err());
        assert_eq!(failed.map(|e| e.kind()), Some(ErrorKind::Limit));
    }
}
