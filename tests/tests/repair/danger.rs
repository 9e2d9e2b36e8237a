//! What in an image could do harm to data when a guest writes: found by a plain, slow walk that shares no code with the
//! check. A leak or a flag that is missing is not among it.

use crate::damage::{entry_bytes, header, word};
use bedplate_qcow2::format::{
    COMPRESSED, COPIED, EntryCodec, Header, OFFSET_MASK, RefcountFormat, parse_table,
};
use bedplate_sim::Image;
use std::collections::{BTreeMap, BTreeSet};

/// Names of all that is dangerous: counts below the references, shared clusters that may be written in place, and
/// entries that lead nowhere.
pub fn danger(image: &Image) -> BTreeSet<String> {
    let header = header(image);
    let mut walk = Walk {
        cluster: 1 << header.cluster_bits,
        entry_bytes: entry_bytes(image) as usize,
        codec: EntryCodec::new(header.geometry().expect("checked"), header.version),
        image,
        references: BTreeMap::new(),
        writable: Vec::new(),
        found: BTreeSet::new(),
    };
    walk.refer(0, walk.cluster);
    walk.l1(header.l1_offset.get(), header.l1_size, true);
    walk.snapshots(&header);
    let counts = header.refcounts().expect("checked");
    let table = header.refcount_table_offset.get();
    let len = u64::from(header.refcount_table_clusters) * walk.cluster;
    walk.refer(table, len);
    for entry in (table..table + len).step_by(8) {
        let block = word(image, entry);
        // Also behind the file's end, where the file may reach one day.
        if block != 0 && block.is_multiple_of(walk.cluster) && block < 1 << 56 {
            walk.refer(block, walk.cluster);
        }
    }
    walk.judge(table, len / 8, counts)
}

struct Walk<'a> {
    image: &'a Image,
    cluster: u64,
    entry_bytes: usize,
    codec: EntryCodec,
    references: BTreeMap<u64, u64>,
    /// Where an active entry says that a cluster may be written in place.
    writable: Vec<(u64, u64)>,
    found: BTreeSet<String>,
}

impl Walk<'_> {
    fn refer(&mut self, at: u64, len: u64) {
        if len > 0 {
            for cluster in at / self.cluster..=(at + len - 1) / self.cluster {
                *self.references.entry(cluster).or_default() += 1;
            }
        }
    }

    fn usable(&self, host: u64) -> bool {
        host.is_multiple_of(self.cluster) && host < self.image.len().next_multiple_of(self.cluster)
    }

    fn l1(&mut self, at: u64, entries: u32, active: bool) {
        self.refer(at, u64::from(entries) * 8);
        for entry in (at..at + u64::from(entries) * 8).step_by(8) {
            let raw = word(self.image, entry);
            let table = raw & OFFSET_MASK;
            if table == 0 {
                continue;
            }
            if !self.usable(table) {
                self.found.insert(format!("L1 entry at {entry:#x} leads nowhere"));
                continue;
            }
            self.refer(table, self.cluster);
            if active && raw & COPIED != 0 {
                self.writable.push((entry, table));
            }
            for entry in (table..table + self.cluster).step_by(self.entry_bytes) {
                self.l2(entry, active);
            }
        }
    }

    fn l2(&mut self, entry: u64, active: bool) {
        let raw = word(self.image, entry);
        let host = raw & OFFSET_MASK;
        if raw & COMPRESSED != 0 {
            let (host, len) = self.codec.compressed_range(raw);
            if host.get() + len.get() < self.image.len() + self.cluster {
                self.refer(host.get(), len.get());
            }
        } else if host != 0 && !self.usable(host) {
            self.found.insert(format!("L2 entry at {entry:#x} leads nowhere"));
        } else if host != 0 {
            self.refer(host, self.cluster);
            if active && raw & COPIED != 0 {
                self.writable.push((entry, host));
            }
        }
    }

    fn snapshots(&mut self, header: &Header) {
        if header.nb_snapshots == 0 {
            return;
        }
        let at = header.snapshots_offset.get();
        let mut bytes = vec![0; 4096];
        self.image.read(at, &mut bytes);
        let (list, len) = parse_table(&bytes, header.nb_snapshots).expect("a sound table");
        self.refer(at, len as u64);
        for snapshot in list {
            self.l1(snapshot.l1_offset.get(), snapshot.l1_size, false);
        }
    }

    fn judge(mut self, table: u64, entries: u64, counts: RefcountFormat) -> BTreeSet<String> {
        for (cluster, references) in &self.references {
            let (index, at) = counts.position(*cluster);
            let block = if index < entries { word(self.image, table + 8 * index) } else { 0 };
            let mut bytes = vec![0; self.cluster as usize];
            if block != 0 && self.usable(block) {
                self.image.read(block, &mut bytes);
            }
            if counts.get(&bytes, at).is_some_and(|stored| stored < *references) {
                self.found.insert(format!("cluster {cluster} is counted too low"));
            }
        }
        for (entry, host) in &self.writable {
            if self.references.get(&(host / self.cluster)).is_some_and(|n| *n > 1) {
                self.found.insert(format!("entry at {entry:#x} may write to a shared cluster"));
            }
        }
        self.found
    }
}
