//! Random damage to an image's metadata.

use bedplate_model::Bed;
use bedplate_qcow2::format::{COPIED, Header, OFFSET_MASK, incompat};
use bedplate_sim::{Image, Rng};

/// A damaged image.
pub struct Damaged {
    pub image: Image,
    /// Some guest data can't be read any more, or the damage shows other data.
    pub lossy: bool,
    pub story: Vec<String>,
    /// The first refcount block, where it was before anything was damaged.
    block: u64,
}

pub fn word(image: &Image, at: u64) -> u64 {
    let mut bytes = [0; 8];
    image.read(at, &mut bytes);
    u64::from_be_bytes(bytes)
}

pub fn header(image: &Image) -> Header {
    let mut start = vec![0; 512];
    image.read(0, &mut start);
    let mut first = vec![0; Header::bytes_needed(&start).expect("a header")];
    image.read(0, &mut first);
    Header::parse(&first).expect("a header")
}

/// Bytes of an L2 entry.
pub fn entry_bytes(image: &Image) -> u64 {
    if header(image).incompatible & incompat::EXTENDED_L2 != 0 { 16 } else { 8 }
}

impl Damaged {
    fn untouched(bed: &Bed) -> Self {
        let image = bed.image.clone();
        let table = header(&image).refcount_table_offset.get();
        let block = word(&image, table) & !0x1ff;
        Self { image, lossy: false, story: Vec::new(), block }
    }

    pub fn new(bed: &Bed, rng: &mut Rng) -> Self {
        let mut d = Self::untouched(bed);
        let only_counts = rng.chance(40);
        for _ in 0..=rng.below(4) {
            match rng.below(if only_counts { 4 } else { 8 }) {
                0 | 1 => d.counts(rng),
                2 => d.flags(rng),
                3 => d.refcount_table(rng),
                4 => d.l1(rng),
                _ => d.l2(rng),
            }
        }
        if bed.spec.version == 3 && rng.chance(30) {
            d.set("marks", 72, word(&d.image, 72) | (1 + rng.below(3)));
        }
        d
    }

    /// Only counts that are too high, some with the flag that belongs to them.
    pub fn leaks(bed: &Bed, rng: &mut Rng) -> Self {
        let mut d = Self::untouched(bed);
        let h = header(&d.image);
        let counts = h.refcounts().expect("checked");
        let table = h.refcount_table_offset.get();
        for _ in 0..=rng.below(20) {
            let entry = d.l2_entry(rng);
            let host = entry.map_or(0, |at| word(&d.image, at));
            let plain = host & OFFSET_MASK != 0 && host >> 62 & 1 == 0;
            let cluster = if plain && rng.chance(50) {
                (host & OFFSET_MASK) >> h.cluster_bits
            } else {
                1 + rng.below(d.image.len() >> h.cluster_bits)
            };
            let (index, at) = counts.position(cluster);
            let block = word(&d.image, table + 8 * index);
            let mut bytes = vec![0; 1 << h.cluster_bits];
            d.image.read(block, &mut bytes);
            let old = counts.get(&bytes, at).expect("in the block");
            if block == 0 || old == counts.max() {
                continue;
            }
            counts.set(&mut bytes, at, old + 1).expect("fits");
            d.image.write(block, &bytes);
            d.story.push(format!("cluster {cluster} is counted {} times", old + 1));
            if let Some(at) = entry
                && plain
                && cluster == (host & OFFSET_MASK) >> h.cluster_bits
            {
                d.set("flag", at, host & !COPIED);
            }
        }
        d
    }

    fn set(&mut self, what: &str, at: u64, value: u64) {
        self.story
            .push(format!("{what}: {:#x} at {at:#x} becomes {value:#x}", word(&self.image, at)));
        self.image.write(at, &value.to_be_bytes());
    }

    /// Eight bytes of counts get other values.
    fn counts(&mut self, rng: &mut Rng) {
        let at = self.block + 8 * rng.below(16);
        let old = word(&self.image, at);
        let value = match rng.below(3) {
            0 => 0,
            1 => old & rng.next_u64(),
            _ => old ^ (rng.next_u64() & 0x0101_0101_0101_0101),
        };
        self.set("counts", at, value);
    }

    fn l1_entry(&self, rng: &mut Rng) -> Option<u64> {
        let h = header(&self.image);
        let at = h.l1_offset.get() + 8 * rng.below(u64::from(h.l1_size).max(1));
        (word(&self.image, at) & OFFSET_MASK != 0).then_some(at)
    }

    fn l2_entry(&self, rng: &mut Rng) -> Option<u64> {
        let table = word(&self.image, self.l1_entry(rng)?) & OFFSET_MASK;
        let (cluster, size) = (1 << header(&self.image).cluster_bits, entry_bytes(&self.image));
        let inside = table.is_multiple_of(cluster) && table + cluster <= self.image.len();
        inside.then(|| table + size * rng.below((cluster / size).min(100)))
    }

    fn flags(&mut self, rng: &mut Rng) {
        let at = if rng.chance(30) { self.l1_entry(rng) } else { self.l2_entry(rng) };
        let Some(at) = at else { return };
        let old = word(&self.image, at);
        if old & OFFSET_MASK != 0 && old >> 62 & 1 == 0 {
            self.set("flag", at, old ^ COPIED);
        }
    }

    /// Something that may stand in an entry.
    fn anything(&self, rng: &mut Rng, old: u64) -> u64 {
        let cluster = 1u64 << header(&self.image).cluster_bits;
        let any = rng.below(self.image.len() / cluster + 3) * cluster;
        match rng.below(6) {
            0 => old | 1 << rng.below(9),
            1 => old ^ 1 << (56 + rng.below(6)),
            2 => old ^ 1 << rng.below(56),
            3 => 1 << 62 | rng.below(self.image.len() + cluster),
            _ => any | if rng.chance(50) { COPIED } else { 0 },
        }
    }

    fn l1(&mut self, rng: &mut Rng) {
        let Some(at) = self.l1_entry(rng) else { return };
        let value = self.anything(rng, word(&self.image, at));
        // An entry of nothing but flags is judged as none, by QEMU as one of the header.
        if value & OFFSET_MASK != 0 {
            self.lossy = true;
            self.set("L1", at, value);
        }
    }

    fn l2(&mut self, rng: &mut Rng) {
        let Some(at) = self.l2_entry(rng) else { return };
        let value = self.anything(rng, word(&self.image, at));
        self.lossy = true;
        self.set("L2", at, value);
        if entry_bytes(&self.image) == 16 && rng.chance(60) {
            let old = word(&self.image, at + 8);
            self.set("subclusters", at + 8, old ^ 1 << rng.below(64));
        }
    }

    fn refcount_table(&mut self, rng: &mut Rng) {
        let h = header(&self.image);
        let entries = u64::from(h.refcount_table_clusters) * (1 << h.cluster_bits) / 8;
        let at = h.refcount_table_offset.get() + 8 * rng.below(entries.min(4));
        let old = word(&self.image, at);
        let value = if rng.chance(40) { 0 } else { self.anything(rng, old) & !COPIED };
        self.set("refcount table", at, value);
    }
}
