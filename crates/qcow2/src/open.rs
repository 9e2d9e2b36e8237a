//! Opening an image: everything is checked before anything is changed.

use crate::bitmaps::{find_bitmaps, has_bitmaps};
use crate::cache::SliceCache;
use crate::check::recount;
use crate::crypt::{CRYPT_LUKS, Passphrase, Protection, unlock};
use crate::data_file::{check_data_file, is_external, is_raw};
use crate::format::{
    ENTRY_BYTES, EntryCodec, Geometry, Header, L1Entry, Snapshot, autoclear, check_supported,
    compat, incompat, luks_place, parse_table,
};
use crate::image::Qcow2;
use crate::journal::{JournalStart, Kept};
use crate::space::{Found, Space};
use crate::tables::Tables;
use crate::takeup::judge_journal;
use bedplate_runtime::buf::SharedBuf;
use bedplate_storage::Storage;
use bedplate_types::{ByteLen, Error, ErrorKind, HostOffset, Result, ResultExt, limits};
use std::collections::HashSet;
use std::sync::atomic::AtomicBool;

/// How to open an image.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Nothing in the file is changed.
    pub read_only: bool,
    /// Memory for L2 tables. The default covers 1 TiB of disk with 64 KiB clusters.
    pub l2_cache: ByteLen,
    /// Memory for refcount blocks.
    pub refcount_cache: ByteLen,
    /// Where changes that are only in memory are told to the next process, should this one be killed; what such a
    /// process has left there is taken up. Version 2 has no journal.
    pub journal: Option<JournalStart>,
    /// What may open an encrypted image: each is tried.
    pub passphrases: Vec<Passphrase>,
    /// Only metadata will be used: an encrypted image is opened without its key, and reading or writing data fails.
    pub metadata_only: bool,
    /// Bitmaps will be changed and no data of the guest: those that could not be kept right while it changes don't keep the
    /// image from being opened.
    pub bitmaps_only: bool,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            read_only: false,
            l2_cache: ByteLen::new(limits::DEFAULT_L2_CACHE_BYTES),
            refcount_cache: ByteLen::new(limits::DEFAULT_REFCOUNT_CACHE_BYTES),
            journal: None,
            passphrases: Vec::new(),
            metadata_only: false,
            bitmaps_only: false,
        }
    }
}

/// Reads an image's header, whatever features it asks for.
///
/// # Errors
/// `BadImage` when it is not a valid qcow2 header, or what the storage reports.
pub async fn read_header<S: Storage>(storage: &S) -> Result<Header> {
    let start = read_bytes(storage, HostOffset::ZERO, 512).await?;
    let named = || format!("'{}' can't be opened as qcow2", storage.name());
    let needed = Header::bytes_needed(&start).context(named)?;
    let bytes = read_bytes(storage, HostOffset::ZERO, needed).await?;
    Header::parse(&bytes).context(named)
}

fn is_writable<S: Storage>(storage: &S, data: Option<&S>, options: &OpenOptions) -> bool {
    !options.read_only && !storage.read_only() && !data.is_some_and(Storage::read_only)
}

fn refused<S: Storage>(storage: &S) -> String {
    format!("'{}' can't be opened", storage.name())
}

/// How the image's data is encrypted, with the key found.
async fn protection<S: Storage>(
    storage: &S,
    header: &Header,
    geo: Geometry,
    options: &OpenOptions,
) -> Result<Protection> {
    if header.crypt_method != CRYPT_LUKS {
        return Ok(Protection::None);
    }
    if options.metadata_only {
        luks_place(header, geo)?;
        return Ok(Protection::Locked);
    }
    Ok(Protection::Cipher(unlock(storage, header, geo, &options.passphrases).await?))
}

impl<S: Storage> Qcow2<S> {
    /// Opens the image in `storage`. A refused image, and one opened read-only, is not changed by one bit.
    ///
    /// # Errors
    /// `BadImage`, `Unsupported` or `Corrupt` with a sentence that says why it is refused, `Denied` without the right
    /// passphrase, or what the storage reports.
    pub async fn open(storage: S, options: &OpenOptions) -> Result<Self> {
        Self::open_with_data(storage, None, options).await
    }

    /// As [`Self::open`], for an image that may keep its guest data in an external data file, which is `data` then.
    ///
    /// # Errors
    /// Also `Denied` when the image needs a data file that is not there, `InvalidInput` when it needs none, `BadImage`
    /// when the file is shorter than the disk.
    pub async fn open_with_data(
        storage: S,
        data: Option<S>,
        options: &OpenOptions,
    ) -> Result<Self> {
        let mut header = read_header(&storage).await?;
        let writable = is_writable(&storage, data.as_ref(), options);
        check_supported(&header, writable).context(|| refused(&storage))?;
        check_data_file(&header, data.as_ref()).context(|| refused(&storage))?;
        let geo = header.geometry().context(|| refused(&storage))?;
        let protection = protection(&storage, &header, geo, options).await;
        let protection = protection.context(|| refused(&storage))?;
        if !writable {
            let mut image = Self::load(storage, data, header, options).await?;
            image.protection = protection;
            image.open_gate();
            return Ok(image);
        }
        let bitmaps = match options.bitmaps_only {
            true => Vec::new(),
            false => find_bitmaps(&storage, &header, geo).await.context(|| refused(&storage))?,
        };
        let journal = options.journal.as_ref().filter(|_| header.version >= 3);
        let judged = journal.map(|start| judge_journal(start, &header, &storage.name()));
        let mut kept = judged.transpose()?.flatten();
        let (mut storage, mut data) = (storage, data);
        if header.incompatible & incompat::DIRTY != 0 {
            tracing::info!(
                image = storage.name(),
                "was not closed cleanly; its refcounts are rebuilt"
            );
            if let Some(kept) = &mut kept {
                // The counts lag behind as it is: the mappings first, then all counts from them.
                let mut image = Self::load(storage, data, header, options).await?;
                image.lazy = AtomicBool::new(true);
                image.take_up(&std::mem::take(&mut kept.changes)).await?;
                (storage, data) = (image.storage, image.data);
            }
            recount(&storage).await.context(|| refused(&storage))?;
            header = read_header(&storage).await?;
        }
        let mut image = Self::load(storage, data, header, options).await?;
        image.protection = protection;
        if let Some(kept) = &kept {
            image.take_up(&kept.changes).await?;
        }
        if options.bitmaps_only {
            image.bitmaps.ignore();
        } else {
            image.bitmaps.install(bitmaps);
        }
        image.prepare_for_writing(kept.as_ref()).await?;
        if let Some(start) = journal {
            image.start_journal(start, kept.as_ref()).await?;
        }
        image.open_gate();
        Ok(image)
    }

    /// An image with nothing of it in memory but what is always there.
    async fn load(
        storage: S,
        data: Option<S>,
        header: Header,
        options: &OpenOptions,
    ) -> Result<Self> {
        let writable = is_writable(&storage, data.as_ref(), options);
        let refused = || refused(&storage);
        let geo = header.geometry().context(refused)?;
        let l1_bytes = u64::from(header.l1_size) * ENTRY_BYTES;
        let l1 = words(&read_bytes(&storage, header.l1_offset, l1_bytes as usize).await?);
        let codec = EntryCodec::new(geo, header.version).with_data_file(is_external(&header));
        let found = if writable {
            find_space(&storage, &header, geo, codec, &l1, options).await.context(refused)?
        } else {
            Found {
                table: Vec::new(),
                table_at: header.refcount_table_offset,
                table_clusters: 0,
                file_len: storage.len(),
                metadata: HashSet::new(),
                contested: HashSet::new(),
                cache_bytes: ByteLen::ZERO,
            }
        };
        let space = Space::new(geo, header.refcounts().context(refused)?, found);
        let slices = (options.l2_cache.get() / geo.slice_bytes() as u64) as usize;
        let tables = Tables::new(geo, codec, &l1);
        let cache = SliceCache::new(slices);
        Ok(Self::assemble((storage, data), header, !writable, tables, cache, space, l1))
    }

    /// Brings the header and refcounts into the state that writing starts from.
    async fn prepare_for_writing(&self, kept: Option<&Kept>) -> Result<()> {
        let header = self.header();
        // What other bits vouch for is not kept up to date here (specification, "Autoclear features").
        let bitmaps = if has_bitmaps(&header) { autoclear::BITMAPS } else { 0 };
        let raw = if is_raw(&header) { autoclear::RAW_EXTERNAL_DATA } else { 0 };
        let autoclear = kept.map_or(0, |k| k.token) | bitmaps | raw;
        if header.autoclear != autoclear {
            self.change_header(|h| h.autoclear = autoclear).await?;
        }
        Ok(())
    }

    pub(crate) fn wants_lazy_refcounts(header: &Header) -> bool {
        header.version >= 3 && header.compatible & compat::LAZY_REFCOUNTS != 0
    }
}

/// Where metadata lies, and the refcount table.
pub(crate) async fn find_space<S: Storage>(
    storage: &S,
    header: &Header,
    geo: Geometry,
    codec: EntryCodec,
    l1: &[u64],
    options: &OpenOptions,
) -> Result<Found> {
    let table_clusters = u64::from(header.refcount_table_clusters);
    let table_bytes = table_clusters.saturating_mul(geo.cluster_size());
    let table =
        words(&read_bytes(storage, header.refcount_table_offset, table_bytes as usize).await?);
    let counts = header.refcounts()?;
    let mut claims = Claims { geo, metadata: HashSet::from([0]), contested: HashSet::new() };
    claims.add(header.l1_offset, l1.len() as u64 * ENTRY_BYTES);
    claims.add(header.refcount_table_offset, table_bytes);
    if !claims.contested.is_empty() {
        let text =
            "its L1 table and its refcount table overlap; repair it with 'bedplate check -r all'";
        return Err(Error::new(ErrorKind::Corrupt, text));
    }
    for word in &table {
        if let Ok(Some(at)) = counts.table_entry(*word) {
            claims.add(at, 1);
        }
    }
    for word in l1 {
        if let Ok(L1Entry::Table { host, .. }) = codec.l1(*word) {
            claims.add(host, 1);
        }
    }
    if header.crypt_method == CRYPT_LUKS {
        let (at, len) = luks_place(header, geo)?;
        claims.add(at, len.get());
    }
    if header.nb_snapshots > 0 {
        let (snapshots, len) = read_snapshots(storage, header).await?;
        claims.add(header.snapshots_offset, len as u64);
        for snapshot in &snapshots {
            if snapshot.check_l1(geo).is_ok() {
                claims.add(snapshot.l1_offset, u64::from(snapshot.l1_size) * ENTRY_BYTES);
            }
        }
    }
    Ok(Found {
        table,
        table_at: header.refcount_table_offset,
        table_clusters,
        file_len: storage.len(),
        metadata: claims.metadata,
        contested: claims.contested,
        cache_bytes: options.refcount_cache,
    })
}

/// Who lies where, as the tables say.
struct Claims {
    geo: Geometry,
    metadata: HashSet<u64>,
    contested: HashSet<u64>,
}

impl Claims {
    fn add(&mut self, at: HostOffset, len: u64) {
        let first = self.geo.host_cluster(at);
        for cluster in first..first.saturating_add(len.div_ceil(self.geo.cluster_size())) {
            if !self.metadata.insert(cluster) {
                self.contested.insert(cluster);
            }
        }
    }
}

/// The image's internal snapshots, and the length of their table in bytes.
///
/// # Errors
/// `BadImage` when the table breaks its rules, or what the storage reports.
pub async fn read_snapshots<S: Storage>(
    storage: &S,
    header: &Header,
) -> Result<(Vec<Snapshot>, usize)> {
    // Entries are of variable length: read more until all are there. What lies past the end reads as zeroes, so
    // the amount is bounded by the file.
    let room = storage.len().get().saturating_sub(header.snapshots_offset.get());
    let most = room.min(limits::MAX_SNAPSHOT_TABLE_BYTES) as usize;
    let mut want = (header.nb_snapshots as usize).saturating_mul(256).min(most);
    loop {
        let bytes = read_bytes(storage, header.snapshots_offset, want).await?;
        match parse_table(&bytes, header.nb_snapshots) {
            Ok(parsed) => return Ok(parsed),
            Err(e) if want >= most => return Err(e),
            Err(_) => want = want.saturating_mul(4).max(4096).min(most),
        }
    }
}

pub(crate) async fn read_bytes<S: Storage>(
    storage: &S,
    at: HostOffset,
    len: usize,
) -> Result<Vec<u8>> {
    let buf = SharedBuf::zeroed(len)?;
    storage
        .read(at, buf.iovec())
        .await
        .context(|| format!("cannot read the metadata of '{}'", storage.name()))?;
    Ok(buf.into_buf()?.to_vec())
}

pub(crate) fn words(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks::<8>().0.iter().map(|b| u64::from_be_bytes(*b)).collect()
}
