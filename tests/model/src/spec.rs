//! What an image is like: geometry, first content, what lies below, how much memory its caches have.

use bedplate_qcow2::format::SUBCLUSTERS;
use bedplate_sim::{Rng, SimStorage};

/// What lies below an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BelowKind {
    /// Plain bytes.
    Raw,
    /// Another qcow2 image.
    Qcow2,
}

/// The backing image.
#[derive(Clone, Copy, Debug)]
pub struct BelowSpec {
    /// Its format.
    pub kind: BelowKind,
    /// Its size in bytes.
    pub size: u64,
}

/// How an external data file is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataFile {
    /// It means nothing without the image's tables.
    Mapped,
    /// It reads as the disk.
    Raw,
}

/// The first content of an image.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seeds {
    /// Clusters that are not unallocated, in percent.
    pub filled: u64,
    /// Of those, compressed ones in percent.
    pub compressed: u64,
    /// Of the others, zero clusters (with and without space) in percent.
    pub zero: u64,
    /// Internal snapshots, all of the first content.
    pub snapshots: u64,
}

/// An image to be made.
#[derive(Clone, Debug)]
pub struct Spec {
    /// Cluster size as a power of two.
    pub cluster_bits: u32,
    /// Bits of a refcount.
    pub refcount_bits: u32,
    /// 2 or 3.
    pub version: u32,
    /// L2 entries describe subclusters.
    pub extended: bool,
    /// Refcounts may be written late.
    pub lazy: bool,
    /// Compressed clusters are packed by zstd, not by deflate.
    pub zstd: bool,
    /// No cluster is ever written compressed.
    pub unpacked: bool,
    /// The data is encrypted; no cluster holds uncompressed data at first.
    pub luks: bool,
    /// The disk's size in bytes.
    pub size: u64,
    /// The first content.
    pub seeds: Seeds,
    /// What lies below.
    pub below: Option<BelowSpec>,
    /// Guest data lies in a file of its own.
    pub data_file: Option<DataFile>,
    /// Memory for L2 slices.
    pub l2_cache: u64,
    /// Memory for refcount blocks.
    pub refcount_cache: u64,
}

/// One of several choices with weights.
pub(crate) fn weighted<T: Copy>(rng: &mut Rng, choices: &[(u64, T)]) -> T {
    let mut left = rng.below(choices.iter().map(|c| c.0).sum());
    for (weight, value) in choices {
        match left.checked_sub(*weight) {
            Some(rest) => left = rest,
            None => return *value,
        }
    }
    choices[0].1
}

impl Spec {
    /// Any image, mostly a small one.
    pub fn random(rng: &mut Rng) -> Self {
        if rng.chance(6) {
            return Self::wide(rng);
        }
        if rng.chance(15) {
            return Self { unpacked: rng.chance(60), ..Self::subclusters(rng) };
        }
        if rng.chance(12) {
            return Self::external(rng);
        }
        let bits = weighted(rng, &[(40, 9), (12, 10), (26, 12), (5, 14), (15, 16), (2, 21)]);
        Self::with_cluster(rng, bits, 2)
    }

    /// A very small image, so that many of its crash states can be looked at.
    pub fn tiny(rng: &mut Rng) -> Self {
        let bits = weighted(rng, &[(60, 9), (20, 10), (20, 12)]);
        Self { l2_cache: 0, ..Self::with_cluster(rng, bits, 1) }
    }

    /// An image with subclusters, mostly of one sector each.
    pub fn subclusters(rng: &mut Rng) -> Self {
        let bits = weighted(rng, &[(80, 14), (15, 15), (5, 17)]);
        let spec = Self::with_cluster(rng, bits, 1);
        let size = (4 + rng.below(8)) << bits;
        let size = size - if rng.chance(30) { rng.below(1 << (bits - 9)) * 512 } else { 0 };
        let refcount_bits = if spec.version == 2 { 16 } else { spec.refcount_bits };
        let below = spec.below.map(|_| BelowSpec::random(rng, size));
        // A discard leaves parts of compressed clusters as they are, so less would be known of it.
        let seeds = Seeds { compressed: 0, ..spec.seeds };
        let unpacked = true;
        Self { extended: true, version: 3, refcount_bits, size, seeds, below, unpacked, ..spec }
    }

    /// A small image whose data is encrypted. Opening one takes long, since its key must be found.
    pub fn encrypted(rng: &mut Rng) -> Self {
        let spec = if rng.chance(30) { Self::subclusters(rng) } else { Self::tiny(rng) };
        let below = spec.below.filter(|below| below.kind == BelowKind::Raw);
        Self { luks: true, below, ..spec }
    }

    /// A small image whose data lies in a file of its own.
    pub fn external(rng: &mut Rng) -> Self {
        let spec = if rng.chance(25) { Self::subclusters(rng) } else { Self::tiny(rng) };
        let raw = rng.chance(35);
        let data_file = Some(if raw { DataFile::Raw } else { DataFile::Mapped });
        let seeds = Seeds { compressed: 0, snapshots: 0, ..spec.seeds };
        let below = spec.below.filter(|_| !raw);
        Self { version: 3, data_file, seeds, below, ..spec }
    }

    /// Small clusters on a larger disk: more L2 slices than the smallest cache holds.
    pub fn wide(rng: &mut Rng) -> Self {
        let bits = 9 + rng.below(2) as u32;
        let size = (768 << 10) + rng.below(1024) * 1024;
        let filled = [0, 5, 60][rng.below(3) as usize];
        let spec = Self::with_cluster(rng, bits, 1);
        let seeds = Seeds { filled, ..spec.seeds };
        Self { size, seeds, below: None, l2_cache: 0, ..spec }
    }

    /// A small image with clusters of this size.
    pub(crate) fn with_cluster(rng: &mut Rng, cluster_bits: u32, scale: u64) -> Self {
        // Large clusters get few of them, small ones enough for several L2 tables.
        let clusters = match cluster_bits {
            9..=11 => 40 + rng.below(100),
            12..=14 => 20 + rng.below(40),
            15 | 16 => 4 + rng.below(20),
            _ => 2 + rng.below(2),
        };
        let size = (clusters * scale) << cluster_bits;
        // The disk's end need not be a cluster's.
        let cut = if rng.chance(30) { rng.below(1 << (cluster_bits - 9)) * 512 } else { 0 };
        let size = size - cut;
        let version = if rng.chance(15) { 2 } else { 3 };
        let refcount_bits =
            if version == 2 { 16 } else { [1, 2, 4, 8, 16, 16, 32, 64][rng.below(8) as usize] };
        let most = if refcount_bits == 1 { 0 } else { 2 };
        let seeds = Seeds {
            filled: [0, 20, 60, 95][rng.below(4) as usize],
            compressed: if rng.chance(30) { 40 } else { 0 },
            zero: if rng.chance(50) && version == 3 { 30 } else { 0 },
            snapshots: if rng.chance(35) { 1 + rng.below(2) } else { 0 }.min(most),
        };
        Self {
            cluster_bits,
            refcount_bits,
            version,
            extended: false,
            lazy: version == 3 && rng.chance(20),
            zstd: version == 3 && rng.chance(25),
            unpacked: false,
            luks: false,
            size,
            seeds,
            below: if rng.chance(40) { Some(BelowSpec::random(rng, size)) } else { None },
            data_file: None,
            l2_cache: if rng.chance(50) { 0 } else { 1 << 20 },
            refcount_cache: if rng.chance(50) { 0 } else { 1 << 20 },
        }
    }

    /// Bytes of the smallest part with a mapping of its own.
    pub fn part(&self) -> u64 {
        self.cluster() / if self.extended { u64::from(SUBCLUSTERS) } else { 1 }
    }

    /// Bytes that a data file can have at most, also when the disk grows.
    pub fn room(&self) -> u64 {
        self.size.next_multiple_of(SimStorage::BETWEEN).max(9 << 20)
    }

    /// Bytes of a cluster.
    pub fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }
}

impl BelowSpec {
    /// Any, shorter or longer than `top`.
    pub fn random(rng: &mut Rng, top: u64) -> Self {
        let kind = if rng.chance(50) { BelowKind::Raw } else { BelowKind::Qcow2 };
        let size = match rng.below(3) {
            0 => top,
            1 => (rng.below(top / 512) + 1) * 512,
            _ => top + rng.below(64) * 512,
        };
        // A raw file may end anywhere.
        let odd = if kind == BelowKind::Raw && rng.chance(30) { rng.below(511) } else { 0 };
        Self { kind, size: size - odd }
    }
}
