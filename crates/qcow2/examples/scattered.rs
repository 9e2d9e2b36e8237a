//! Makes a large qcow2 image of which only the tables are written, as random writes of a guest would leave it: for
//! measuring the check. `cargo run --release -p bedplate-qcow2 --example scattered -- FILE GIB PERCENT [CLUSTER_BITS]`

use bedplate_qcow2::format::{COPIED, Geometry, NewImage, RefcountFormat};
use bedplate_types::ByteLen;
use std::collections::BTreeMap;
use std::error::Error;
use std::fs::File;
use std::os::unix::fs::FileExt;

struct Maker {
    file: File,
    counts: RefcountFormat,
    next: u64,
    /// Refcount blocks by index: place.
    blocks: Vec<u64>,
}

impl Maker {
    /// The next free cluster; blocks for counting come when they are first needed.
    fn take(&mut self) -> u64 {
        let (block, _) = self.counts.position(self.next);
        if block >= self.blocks.len() as u64 {
            self.blocks.push(self.next);
            self.next += 1;
        }
        self.next += 1;
        self.next - 1
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [path, gib, percent, rest @ ..] = &args[..] else {
        return Err("usage: scattered FILE GIB PERCENT [CLUSTER_BITS]".into());
    };
    let bits: u32 = rest.first().map_or(Ok(16), |b| b.parse())?;
    let size = ByteLen::new(gib.parse::<u64>()? << 30);
    let percent: u64 = percent.parse()?;
    let new = NewImage { size, cluster_size: 1 << bits, ..NewImage::default() };
    let layout = new.layout()?;
    let geometry = Geometry::new(bits)?;
    let counts = layout.header.refcounts()?;
    let file = File::options().write(true).create(true).truncate(true).open(path)?;
    for (at, bytes) in &layout.writes {
        file.write_all_at(bytes, at.get())?;
    }
    let cluster = geometry.cluster_size();
    let first_block = layout.header.refcount_table_offset.get() / cluster
        + u64::from(layout.header.refcount_table_clusters);
    let used = layout.file_len.get() / cluster;
    let own = counts.blocks_for(used);
    let blocks = (first_block..first_block + own).collect();
    let mut maker = Maker { file, counts, next: used, blocks };

    let total = geometry.clusters(size);
    let mut order: Vec<u32> = (0..u32::try_from(total)?).collect();
    let wanted = (total * percent / 100) as usize;
    let mut seed = 0x9e37_79b9_7f4a_7c15u64;
    let mut tables: BTreeMap<u64, (u64, Vec<u64>)> = BTreeMap::new();
    for i in 0..wanted {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        order.swap(i, i + (seed % (total - i as u64)) as usize);
        let guest = u64::from(order[i]);
        let (l1, l2) = (guest / geometry.l2_entries() as u64, guest % geometry.l2_entries() as u64);
        let (_, table) =
            tables.entry(l1).or_insert_with(|| (maker.take(), vec![0; geometry.l2_entries()]));
        table[l2 as usize] = (maker.take() * cluster) | COPIED;
    }
    let words = |list: &[u64]| list.iter().flat_map(|w| w.to_be_bytes()).collect::<Vec<u8>>();
    for (l1, (at, table)) in &tables {
        maker.file.write_all_at(&words(table), at * cluster)?;
        let entry = layout.header.l1_offset.get() + l1 * 8;
        maker.file.write_all_at(&words(&[(at * cluster) | COPIED]), entry)?;
    }
    for (index, at) in maker.blocks.iter().enumerate() {
        let range = counts.entries_per_block();
        let in_use = maker.next.saturating_sub(index as u64 * range).min(range);
        let mut block = vec![0; cluster as usize];
        counts.fill(&mut block, 0..in_use as usize, 1).map_err(|e| e.to_string())?;
        maker.file.write_all_at(&block, at * cluster)?;
        let entry = layout.header.refcount_table_offset.get() + index as u64 * 8;
        maker.file.write_all_at(&words(&[at * cluster]), entry)?;
    }
    maker.file.set_len(maker.next * cluster)?;
    Ok(())
}
