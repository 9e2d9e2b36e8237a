//! Every kind of image that the format knows, as the combinations of what an image is like.
//!
//! Callers: `tests/tests/matrix.rs`. [`all`] are the legal combinations; [`RULES`] says why the others are none;
//! [`covering`] are some of them in which every three properties meet that can.

use crate::spec::{BelowKind, BelowSpec, DataFile, Seeds, Spec};
use bedplate_qcow2::format::{CompressionType, NewImage};
use bedplate_sim::{Rng, SECTOR};
use bedplate_types::ByteLen;
use std::sync::LazyLock;

/// How many properties a kind has.
const PROPERTIES: usize = 9;
/// No property has more values.
const VALUES: usize = 16;

/// How clusters are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// None is.
    None,
    /// By deflate.
    Zlib,
    /// By zstd.
    Zstd,
}

/// One combination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// Cluster size as a power of two.
    pub cluster_bits: u32,
    /// Refcount width as a power of two.
    pub refcount_order: u32,
    /// 2 or 3.
    pub version: u32,
    /// L2 entries describe subclusters.
    pub extended: bool,
    /// How clusters are compressed, if some are.
    pub packing: Packing,
    /// Guest data lies in a file of its own.
    pub data_file: Option<DataFile>,
    /// What lies below.
    pub below: Option<BelowKind>,
    /// There are internal snapshots.
    pub snapshots: bool,
    /// The data is encrypted.
    pub luks: bool,
}

/// Properties that don't go together.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// Why they don't.
    pub why: &'static str,
    /// Those combinations.
    pub forbids: fn(&Kind) -> bool,
    /// QEMU's tools refuse them too.
    pub qemu: bool,
}

/// All combinations that are none, and why.
pub const RULES: [Rule; 10] = [
    Rule {
        why: "version 2 counts references in 16 bits",
        forbids: |k| k.version == 2 && k.refcount_order != 4,
        qemu: true,
    },
    Rule {
        why: "version 2 has no feature bit for subclusters",
        forbids: |k| k.version == 2 && k.extended,
        qemu: true,
    },
    Rule {
        why: "version 2 has no feature bit for zstd",
        forbids: |k| k.version == 2 && k.packing == Packing::Zstd,
        qemu: true,
    },
    Rule {
        why: "version 2 has no feature bit for external data files",
        forbids: |k| k.version == 2 && k.data_file.is_some(),
        qemu: true,
    },
    Rule {
        why: "a subcluster, a 32nd of a cluster, has 512 bytes at least",
        forbids: |k| k.extended && k.cluster_bits < 14,
        qemu: true,
    },
    Rule {
        why: "counts of one bit can't say that a snapshot shares a cluster",
        forbids: |k| k.refcount_order == 0 && k.snapshots,
        qemu: true,
    },
    Rule {
        why: "data in an external data file has one place only, so no snapshot can keep it",
        forbids: |k| k.data_file.is_some() && k.snapshots,
        qemu: true,
    },
    Rule {
        why: "data in an external data file lies at its guest's own offset, in the guest's own length",
        forbids: |k| k.data_file.is_some() && k.packing != Packing::None,
        qemu: true,
    },
    Rule {
        why: "a raw data file reads as the disk, so nothing can show from below it",
        forbids: |k| k.data_file == Some(DataFile::Raw) && k.below.is_some(),
        qemu: true,
    },
    Rule {
        why: "Bedplate does not encrypt external data files",
        forbids: |k| k.data_file.is_some() && k.luks,
        qemu: false,
    },
];

impl Kind {
    /// The combination of the values with these numbers, one of each property.
    fn of(v: [usize; PROPERTIES]) -> Self {
        Self {
            cluster_bits: 9 + v[0] as u32,
            refcount_order: v[1] as u32,
            version: 3 - v[2] as u32,
            extended: v[3] == 1,
            packing: [Packing::None, Packing::Zlib, Packing::Zstd][v[4]],
            data_file: [None, Some(DataFile::Mapped), Some(DataFile::Raw)][v[5]],
            below: [None, Some(BelowKind::Raw), Some(BelowKind::Qcow2)][v[6]],
            snapshots: v[7] == 1,
            luks: v[8] == 1,
        }
    }

    /// An image of this kind.
    pub fn spec(&self, rng: &mut Rng) -> Spec {
        let base = Spec::with_cluster(rng, self.cluster_bits, 1);
        let below = self.below.map(|kind| {
            let size = BelowSpec::random(rng, base.size).size;
            let odd = if kind == BelowKind::Raw { 0 } else { size % SECTOR };
            BelowSpec { kind, size: size - odd }
        });
        Spec {
            refcount_bits: 1 << self.refcount_order,
            version: self.version,
            extended: self.extended,
            lazy: base.lazy && self.version == 3,
            zstd: self.packing == Packing::Zstd,
            unpacked: self.packing == Packing::None,
            luks: self.luks,
            seeds: Seeds {
                filled: [20, 60, 95][rng.below(3) as usize],
                compressed: if self.packing == Packing::None { 0 } else { 40 },
                zero: if self.version == 3 { 25 } else { 0 },
                snapshots: u64::from(self.snapshots),
            },
            below,
            data_file: self.data_file,
            ..base
        }
    }

    /// What says so when one is made; snapshots and compressed clusters come later.
    pub fn new_image(&self) -> NewImage {
        let format = |kind| if kind == BelowKind::Raw { "raw" } else { "qcow2" };
        NewImage {
            size: ByteLen::new(1 << 22),
            version: self.version,
            cluster_size: 1 << self.cluster_bits,
            refcount_bits: 1 << self.refcount_order,
            extended_l2: self.extended,
            compression_type: match self.packing {
                Packing::Zstd => CompressionType::Zstd,
                _ => CompressionType::Zlib,
            },
            backing: self.below.map(|kind| (b"base".to_vec(), Some(format(kind).to_owned()))),
            data_file: self.data_file.map(|_| b"data".to_vec()),
            data_file_raw: self.data_file == Some(DataFile::Raw),
            luks: self.luks.then(|| crate::maker::luks_area().clone()),
            ..NewImage::default()
        }
    }

    /// The rules that it breaks.
    pub fn broken(&self) -> impl Iterator<Item = &'static Rule> {
        RULES.iter().filter(|rule| (rule.forbids)(self))
    }
}

fn combinations() -> Vec<[usize; PROPERTIES]> {
    let sizes = [13, 7, 2, 2, 3, 3, 3, 2, 2];
    let count = sizes.iter().product();
    let one = |mut number: usize| {
        sizes.map(|size| {
            let value = number % size;
            number /= size;
            value
        })
    };
    (0..count).map(one).collect()
}

fn legal() -> Vec<[usize; PROPERTIES]> {
    let mut all = combinations();
    all.retain(|v| Kind::of(*v).broken().next().is_none());
    all
}

/// All legal combinations.
pub fn all() -> Vec<Kind> {
    legal().into_iter().map(Kind::of).collect()
}

/// Combinations that break one rule each, one for every rule.
pub fn refused() -> Vec<(Kind, &'static Rule)> {
    let kinds: Vec<Kind> = combinations().into_iter().map(Kind::of).collect();
    let alone = |rule: &'static Rule| {
        let breaks = |k: &&Kind| (rule.forbids)(k) && k.broken().count() == 1;
        kinds.iter().find(breaks).map(|kind| (*kind, rule))
    };
    RULES.iter().filter_map(alone).collect()
}

/// Names of every three values of three properties that meet in a combination.
fn triples(v: [usize; PROPERTIES]) -> impl Iterator<Item = usize> {
    let name = move |at: usize| at * VALUES + v[at];
    let most = PROPERTIES * VALUES;
    (0..PROPERTIES).flat_map(move |a| {
        (0..a).flat_map(move |b| (0..b).map(move |c| (name(a) * most + name(b)) * most + name(c)))
    })
}

/// Some legal combinations in which any three values of properties meet that meet in a legal one at all.
pub fn covering() -> Vec<Kind> {
    let mut all = legal();
    // Else the first values would always be together.
    Rng::new(1).shuffle(&mut all);
    let mut seen = vec![false; (PROPERTIES * VALUES).pow(3)];
    let mut chosen = Vec::new();
    // Those that bring most come first.
    for least in [60, 40, 25, 15, 10, 7, 5, 4, 3, 2, 1] {
        for v in &all {
            if triples(*v).filter(|t| !seen[*t]).count() >= least {
                triples(*v).for_each(|t| seen[t] = true);
                chosen.push(Kind::of(*v));
            }
        }
    }
    chosen
}

/// An image of any kind, for profiles.
pub fn any(rng: &mut Rng) -> Spec {
    static KINDS: LazyLock<Vec<Kind>> = LazyLock::new(all);
    // Half of them are encrypted, and opening those takes long.
    loop {
        let Some(kind) = KINDS.get(rng.below(KINDS.len() as u64) as usize) else { continue };
        if !kind.luks || rng.chance(10) {
            return kind.spec(rng);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rule_forbids_something_that_no_other_forbids() {
        assert_eq!(refused().len(), RULES.len());
    }

    #[test]
    fn any_three_properties_that_can_meet_do_so_in_the_chosen_combinations() {
        let (all, some) = (all(), covering());
        assert!(some.len() * 8 < all.len(), "{} of {}", some.len(), all.len());
        let narrow = |k: &Kind| k.extended && k.refcount_order == 0 && k.luks;
        let old = |k: &Kind| k.version == 2 && k.snapshots && k.cluster_bits == 21;
        assert!(some.iter().any(narrow) && some.iter().any(old));
        assert!(all.iter().any(|k| k.packing == Packing::Zstd && k.luks && k.extended));
    }
}
