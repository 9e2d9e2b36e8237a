//! Makes qcow2 images that hold things the engine itself does not write: snapshots, compressed clusters, and
//! refcount structures that are as small as can be, so that they must grow.

use crate::spec::{BelowKind, DataFile, Spec};
use bedplate_qcow2::format::{
    CompressionType, Compressor, EXT_ENCRYPTION, EXT_FEATURE_NAMES, EntryCodec, Extension,
    Geometry, Header, L1Entry, L2Entry, LuksArea, LuksCipher, LuksHash, LuksSuite, NewImage,
    RefcountFormat, Snapshot, SubMap,
};
use bedplate_qcow2::{Passphrase, new_luks_area};
use bedplate_sim::{Image, SimStorage};
use bedplate_types::{ByteLen, HostOffset};
use std::sync::LazyLock;
use std::time::Duration;

/// What a guest cluster is at first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cell {
    Unallocated,
    Zero,
    /// Zero, with space that holds something else.
    ZeroKept,
    Data,
    Compressed,
}

struct Builder {
    image: Image,
    refs: Vec<u64>,
    cluster: u64,
    /// Where the next compressed cluster may go, and the end of that space.
    packed: (u64, u64),
    most: u64,
    /// The external data file.
    data: Option<Vec<u8>>,
}

impl Builder {
    fn take(&mut self, clusters: u64, references: u64) -> u64 {
        let first = self.refs.len() as u64;
        self.refs.resize((first + clusters) as usize, references);
        first * self.cluster
    }

    fn write_words(&mut self, at: u64, words: &[u64]) {
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_be_bytes()).collect();
        self.image.write(at, &bytes);
    }

    /// Puts a cluster's bytes somewhere: in the image, or at the guest's own offset `start` in the data file.
    fn place(&mut self, start: usize, bytes: &[u8], references: u64) -> u64 {
        if let Some(data) = &mut self.data {
            let end = data.len().min(start + bytes.len());
            data[start..end].copy_from_slice(&bytes[..end - start]);
            return start as u64;
        }
        let at = self.take(1, references);
        self.image.write(at, bytes);
        at
    }

    /// Puts compressed bytes somewhere: they may share clusters with others, and lie across a border.
    fn pack(&mut self, bytes: &[u8], references: u64) -> u64 {
        let len = bytes.len() as u64;
        let shared = self.packed.0 / self.cluster;
        let full = self.refs.get(shared as usize).is_none_or(|r| r + references > self.most);
        let last = self.packed.1 == self.refs.len() as u64 * self.cluster;
        if full || (self.packed.0 + len > self.packed.1 && !last) {
            let at = self.take(1, 0);
            self.packed = (at, at + self.cluster);
        } else if self.packed.0 + len > self.packed.1 {
            self.take(1, 0);
            self.packed.1 += self.cluster;
        }
        let at = self.packed.0;
        self.packed.0 += len;
        for cluster in at / self.cluster..=(at + len - 1) / self.cluster {
            self.refs[cluster as usize] += references;
        }
        self.image.write(at, bytes);
        at
    }
}

fn pack(spec: &Spec, bytes: &[u8]) -> Vec<u8> {
    if spec.zstd {
        let mut zstd = Compressor::new(CompressionType::Zstd).expect("memory");
        let packed = zstd.pack(bytes).expect("memory to memory");
        return packed.unwrap_or_else(|| bytes.to_vec());
    }
    let mut stream = flate2::Compress::new(flate2::Compression::fast(), false);
    let mut out = Vec::with_capacity(bytes.len() + 64);
    stream.compress_vec(bytes, &mut out, flate2::FlushCompress::Finish).expect("memory to memory");
    out
}

/// Makes the image. `content` is what clusters with data hold.
pub(crate) fn make(spec: &Spec, cells: &[Cell], content: &[u8]) -> Image {
    let geo = if spec.extended { Geometry::extended } else { Geometry::new };
    let geo = geo(spec.cluster_bits).expect("cluster size");
    let codec = EntryCodec::new(geo, spec.version).with_data_file(spec.data_file.is_some());
    let counts =
        RefcountFormat::new(spec.refcount_bits.trailing_zeros(), geo).expect("refcount width");
    let references = 1 + spec.seeds.snapshots;
    let cluster = spec.cluster();
    let mut b = Builder {
        image: Image::new(cluster),
        refs: vec![1],
        cluster,
        packed: (0, 0),
        most: counts.max(),
        data: spec.data_file.map(|kind| {
            // Space that nothing maps holds anything, unless the file is the disk.
            let byte = if kind == DataFile::Raw { 0 } else { 0x5a };
            vec![byte; spec.size as usize]
        }),
    };
    let entries = geo.l1_entries(ByteLen::new(spec.size)) as usize;
    let l1_clusters = (entries as u64 * 8).div_ceil(cluster).max(1);
    let l1_at = b.take(l1_clusters, 1);
    let l1 = tables(&mut b, spec, (&geo, codec), cells, content, references, entries);
    b.write_words(l1_at, &l1);
    let mut header = first_header(spec);
    header.l1_offset = HostOffset::new(l1_at);
    header.l1_size = entries as u32;
    if spec.seeds.snapshots > 0 {
        header.nb_snapshots = spec.seeds.snapshots as u32;
        header.snapshots_offset = snapshots(&mut b, spec, &l1, l1_clusters);
    }
    if spec.luks {
        encrypt(&mut b, &mut header);
    }
    finish(&mut b, header, counts);
    let Some(data) = b.data else { return b.image };
    // One medium for both, see [`crate::Bed::image`].
    let mut whole = Image::from_bytes(&data);
    whole.write(spec.room(), &(data.len() as u64).to_be_bytes());
    whole.write(spec.room() + SimStorage::BETWEEN, &b.image.to_vec());
    whole
}

/// The clusters' data and L2 tables; returns the L1 table.
fn tables(
    b: &mut Builder,
    spec: &Spec,
    (geo, codec): (&Geometry, EntryCodec),
    cells: &[Cell],
    content: &[u8],
    references: u64,
    entries: usize,
) -> Vec<u64> {
    let copied = references == 1;
    let cluster = b.cluster as usize;
    let mut l1 = vec![0; entries];
    for (index, part) in cells.chunks(geo.l2_entries()).enumerate() {
        if part.iter().all(|c| *c == Cell::Unallocated) {
            continue;
        }
        let stride = geo.entry_words();
        let mut words = vec![0; geo.l2_entries() * stride];
        for (i, cell) in part.iter().enumerate() {
            let start = (index * geo.l2_entries() + i) * cluster;
            let mut bytes =
                content.get(start..content.len().min(start + cluster)).unwrap_or(&[]).to_vec();
            bytes.resize(cluster, 0);
            let packed = if *cell == Cell::Compressed { pack(spec, &bytes) } else { Vec::new() };
            let entry = match cell {
                Cell::Unallocated => L2Entry::Unallocated,
                Cell::Zero => L2Entry::Zero { host: None, copied: false },
                Cell::Compressed if packed.len() < cluster => {
                    let host = HostOffset::new(b.pack(&packed, references));
                    L2Entry::Compressed { host, len: ByteLen::from(packed.len()) }
                }
                Cell::ZeroKept => {
                    let at = b.place(start, &vec![0x5a; cluster], references);
                    L2Entry::Zero { host: Some(HostOffset::new(at)), copied }
                }
                Cell::Data | Cell::Compressed => {
                    let at = b.place(start, &bytes, references);
                    L2Entry::Data { host: HostOffset::new(at), copied }
                }
            };
            let (entry, map) = match entry {
                _ if stride == 1 => (entry, SubMap::default()),
                L2Entry::Zero { host: None, .. } => (L2Entry::Unallocated, SubMap::ZEROES),
                L2Entry::Zero { host: Some(host), copied } => {
                    (L2Entry::Data { host, copied }, SubMap::ZEROES)
                }
                L2Entry::Data { .. } => (entry, SubMap::new(u32::MAX, 0)),
                _ => (entry, SubMap::default()),
            };
            words[i * stride] = codec.encode_l2(entry).expect("an entry that can be expressed");
            if stride == 2 {
                words[i * 2 + 1] = map.raw();
            }
        }
        let at = b.take(1, references);
        b.write_words(at, &words);
        l1[index] = codec.encode_l1(L1Entry::Table { host: HostOffset::new(at), copied });
    }
    l1
}

/// The passphrase of encrypted images.
pub(crate) fn passphrase() -> Passphrase {
    Passphrase::new(b"passphrase".to_vec()).expect("a passphrase")
}

/// One encryption serves all images: it takes long to make, and as long to find its key as may be.
static LUKS: LazyLock<LuksArea> = LazyLock::new(|| {
    let suite =
        LuksSuite { cipher: LuksCipher::Aes128, hash: LuksHash::Sha1, ..LuksSuite::default() };
    new_luks_area(suite, Duration::from_millis(1), &passphrase()).expect("random numbers")
});

/// The encryption of encrypted images.
pub(crate) fn luks_area() -> &'static LuksArea {
    &LUKS
}

/// Adds an encryption that no data is under yet.
fn encrypt(b: &mut Builder, header: &mut Header) {
    let len = LUKS.len.get();
    let at = b.take(len.div_ceil(b.cluster), 1);
    b.image.write(at, &LUKS.bytes);
    header.crypt_method = 2;
    // In small clusters there is no room for these as well.
    header.extensions.retain(|e| e.id != EXT_FEATURE_NAMES);
    let data = [at.to_be_bytes(), len.to_be_bytes()].concat();
    header.extensions.push(Extension { id: EXT_ENCRYPTION, data });
}

/// Header fields that the options decide.
fn first_header(spec: &Spec) -> Header {
    let backing = spec.below.map(|below| {
        let format = if below.kind == BelowKind::Raw { "raw" } else { "qcow2" };
        (b"base".to_vec(), Some(format.to_owned()))
    });
    let new = NewImage {
        size: ByteLen::new(spec.size),
        version: spec.version,
        cluster_size: spec.cluster(),
        refcount_bits: spec.refcount_bits,
        extended_l2: spec.extended,
        lazy_refcounts: spec.lazy,
        compression_type: if spec.zstd { CompressionType::Zstd } else { CompressionType::Zlib },
        backing,
        luks: None,
        data_file: spec.data_file.map(|_| b"data".to_vec()),
        data_file_raw: spec.data_file == Some(DataFile::Raw),
    };
    new.layout().expect("options that go together").header
}

/// Snapshots of the present tables, each with an L1 table of its own; returns the place of their table.
fn snapshots(b: &mut Builder, spec: &Spec, l1: &[u64], l1_clusters: u64) -> HostOffset {
    let mut table = Vec::new();
    for n in 0..spec.seeds.snapshots {
        let at = b.take(l1_clusters, 1);
        b.write_words(at, l1);
        let snapshot = Snapshot {
            l1_offset: HostOffset::new(at),
            l1_size: l1.len() as u32,
            id: (n + 1).to_string().into_bytes(),
            name: format!("s{n}").into_bytes(),
            disk_size: Some(ByteLen::new(spec.size)),
            ..Snapshot::default()
        };
        table.extend(snapshot.encode().expect("a short name"));
    }
    let at = b.take((table.len() as u64).div_ceil(b.cluster), 1);
    b.image.write(at, &table);
    HostOffset::new(at)
}

/// Refcount blocks and table behind everything else, and the header.
fn finish(b: &mut Builder, mut header: Header, counts: RefcountFormat) {
    let cluster = b.cluster;
    let used = b.refs.len() as u64;
    let (mut blocks, mut table) = (1, 1);
    loop {
        let (need, room) = (counts.blocks_for(used + blocks + table), cluster / 8);
        let clusters = need.div_ceil(room);
        if need <= blocks && clusters <= table {
            break;
        }
        (blocks, table) = (blocks.max(need), table.max(clusters));
    }
    let table_at = b.take(table, 1);
    let blocks_at = b.take(blocks, 1);
    let places: Vec<u64> = (0..blocks).map(|i| blocks_at + i * cluster).collect();
    b.write_words(table_at, &places);
    for (i, refs) in b.refs.clone().chunks(counts.entries_per_block() as usize).enumerate() {
        let mut block = vec![0; cluster as usize];
        for (entry, count) in refs.iter().enumerate() {
            counts.set(&mut block, entry, *count).expect("a count that fits");
        }
        b.image.write(blocks_at + i as u64 * cluster, &block);
    }
    header.refcount_table_offset = HostOffset::new(table_at);
    header.refcount_table_clusters = table as u32;
    b.image.write(0, &header.encode().expect("a header that fits"));
    b.image.set_len(b.refs.len() as u64 * cluster);
}
