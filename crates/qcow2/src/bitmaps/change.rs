//! Adding, removing, clearing, starting and stopping bitmaps.
//!
//! A new directory is written to a new place and counted durably; then the header names it; then the old place, and
//! what the change has dropped, is freed. A crash in between leaks clusters. The header's words for the directory may lie
//! across two sectors, or come and go as a whole: then the bit that vouches for them is cleared first and set last, so
//! a crash in between loses the bitmaps, never the truth.

use super::directory::{Directory, Entry};
use super::{find_bitmaps, recording, table_entries};
use crate::format::{
    Bitmap, BitmapExtension, ENTRY_BYTES, EXT_BITMAPS, EXT_FEATURE_NAMES, Extension, Header,
    MAX_BITMAP_NAME, MAX_BITMAP_TABLE, MIN_CLUSTER_BITS, autoclear,
};
use crate::image::Qcow2;
use crate::space::Freed;
use bedplate_storage::Storage;
use bedplate_types::{Error, ErrorKind, HostOffset, Result};

/// The bitmap records changes whenever the image is written.
const AUTO: u32 = 2;

/// An extension that says nothing, in the place of one that is gone ("unused", in letters).
const EXT_UNUSED: u32 = 0x756e_7573;

/// What is to be done with a bitmap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BitmapChange {
    /// Make it: empty, and recording.
    Add {
        /// Bytes that a bit stands for, a power of two from 512 to 2 GiB; `None`: the cluster size, but 4 to 64 KiB.
        granularity: Option<u64>,
    },
    /// Remove it.
    Remove,
    /// Make all its bits zero.
    Clear,
    /// Record changes from now on.
    Enable,
    /// Record no more changes, and keep what was recorded.
    Disable,
}

impl<S: Storage> Qcow2<S> {
    /// Changes a persistent bitmap. Requests wait meanwhile.
    ///
    /// # Errors
    /// `NotFound` when there is no such bitmap; `InvalidInput` when one to be added is there, or its name or granularity
    /// can't be; `Unsupported` for a version 2 image, and for changes other than removal of a bitmap that can't be
    /// trusted; `NoSpace`, or what else the storage reports.
    pub async fn change_bitmap(&self, name: &[u8], change: BitmapChange) -> Result<()> {
        self.check_writable()?;
        let _still = self.hold_still().await;
        self.write_everything().await?;
        let header = self.header();
        if header.version < 3 {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "image '{}' has version 2 of the format (compat=0.10), which has no bitmaps",
                    self.storage.name()
                ),
            ));
        }
        let mut directory =
            Directory::read(&self.storage, &header).await?.unwrap_or(Directory::empty());
        let found = directory.find(name);
        // What this change lets go of, and the table it makes.
        let (mut dropped, mut made) = (Vec::new(), None);
        match (change, found) {
            (BitmapChange::Add { granularity }, None) => {
                let bitmap = self.new_bitmap(&header, name, granularity)?;
                directory.entries.push(Entry::new(bitmap)?);
                // Whether there is room for one more shows before anything is written.
                self.probe_directory(&directory)?;
                made = directory.entries.len().checked_sub(1);
            }
            (BitmapChange::Add { .. }, Some(_)) => return Err(self.bitmap_exists(name)),
            (_, None) => return Err(self.no_such_bitmap(name)),
            (BitmapChange::Remove, Some(index)) => {
                let entry = directory.entries.remove(index);
                dropped = self.clusters_of_bitmap(&entry.bitmap).await?;
            }
            (other, Some(index)) => {
                let Some(entry) = directory.entries.get_mut(index) else { return Ok(()) };
                self.change_entry(entry, other)?;
                if other == BitmapChange::Clear {
                    dropped = self.clusters_of_bitmap(&entry.bitmap).await?;
                    made = Some(index);
                }
            }
        }
        // What could not be recorded would keep the image from being opened for writing.
        if matches!(change, BitmapChange::Add { .. } | BitmapChange::Enable) {
            recording(&directory, &header, self.tables.geo)?;
        }
        let mut unused = Vec::new();
        if let Some(entry) = made.and_then(|index| directory.entries.get_mut(index)) {
            let entries = entry.bitmap.table_size;
            entry.set_table(self.empty_table(entries).await?, entries);
            unused = self.table_of_bitmap(&entry.bitmap);
        }
        let taken = self.take_over(&directory, dropped).await;
        if taken.is_err() {
            self.space.note_freed(unused);
        }
        taken
    }

    /// Takes a new directory over, and frees what it has dropped.
    pub(super) async fn take_over(&self, new: &Directory, dropped: Vec<Freed>) -> Result<()> {
        self.replace_directory(new).await?;
        self.space.note_freed(dropped);
        // What is recorded where is another thing now; with the old list, bits would be stored in the wrong place.
        if !self.bitmaps.is_ignored() {
            let list = find_bitmaps(&self.storage, &self.header(), self.tables.geo).await;
            self.bitmaps.install(list.map_err(|e| self.poison(e))?);
        }
        self.free_dropped().await;
        Ok(())
    }

    /// Frees what a change that is made has dropped. It only helps: what can't be done now is done at the close.
    pub(crate) async fn free_dropped(&self) {
        if let Err(e) = self.write_everything().await {
            let name = self.storage.name();
            tracing::warn!("cannot free what is not needed any more in '{name}': {e:#}");
        }
    }

    pub(super) fn no_such_bitmap(&self, name: &[u8]) -> Error {
        Error::new(
            ErrorKind::NotFound,
            format!(
                "image '{}' has no bitmap '{}'; see them with 'bedplate info'",
                self.storage.name(),
                crate::format::printable(name)
            ),
        )
    }

    fn bitmap_exists(&self, name: &[u8]) -> Error {
        Error::new(
            ErrorKind::InvalidInput,
            format!(
                "image '{}' has a bitmap '{}' already",
                self.storage.name(),
                crate::format::printable(name)
            ),
        )
    }

    /// Whether and how an entry may be changed; what it names stays.
    fn change_entry(&self, entry: &mut Entry, change: BitmapChange) -> Result<()> {
        self.check_trusted(&entry.bitmap)?;
        let flags = entry.bitmap.flags;
        match change {
            BitmapChange::Enable => entry.set_flags(flags | AUTO),
            BitmapChange::Disable => entry.set_flags(flags & !AUTO),
            _ => {}
        }
        Ok(())
    }

    /// Refuses a bitmap that a program was recording in when it ended badly.
    pub(super) fn check_trusted(&self, bitmap: &Bitmap) -> Result<()> {
        if !bitmap.in_use() {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "bitmap '{}' of '{}' can't be trusted, because a program that recorded changes in it did not end well; \
                 it can only be removed",
                crate::format::printable(&bitmap.name),
                self.storage.name()
            ),
        ))
    }

    fn new_bitmap(&self, header: &Header, name: &[u8], granularity: Option<u64>) -> Result<Bitmap> {
        let invalid = |text: String| Err(Error::new(ErrorKind::InvalidInput, text));
        if name.is_empty() || name.len() > usize::from(MAX_BITMAP_NAME) || name.contains(&0) {
            return invalid(format!(
                "a bitmap's name has 1 to {MAX_BITMAP_NAME} bytes and no NUL, this one has {} bytes",
                name.len()
            ));
        }
        let granularity = granularity.unwrap_or_else(|| self.tables.cluster().clamp(4096, 65536));
        let bits = granularity.trailing_zeros() as u8;
        if !granularity.is_power_of_two() || !(9..=31).contains(&bits) {
            return invalid(format!(
                "a granularity of {granularity} bytes is not a power of two from 512 bytes to 2 GiB"
            ));
        }
        let entries = table_entries(header.disk_size(), bits, self.tables.geo).max(1);
        let entries = u32::try_from(entries).ok().filter(|n| *n <= MAX_BITMAP_TABLE);
        let Some(entries) = entries else {
            return invalid(format!(
                "a granularity of {granularity} bytes is too fine for a disk of {} bytes",
                header.size.get()
            ));
        };
        Ok(Bitmap {
            name: name.to_vec(),
            table_offset: HostOffset::ZERO,
            table_size: entries,
            flags: AUTO,
            kind: 1,
            granularity_bits: bits,
            extra: Vec::new(),
        })
    }

    /// Writes a table without any bits; it is counted, though not durably yet.
    async fn empty_table(&self, entries: u32) -> Result<HostOffset> {
        self.write_run(vec![0; (u64::from(entries) * ENTRY_BYTES) as usize]).await
    }

    /// Writes bytes to new clusters that follow each other, and counts them.
    pub(super) async fn write_run(&self, mut bytes: Vec<u8>) -> Result<HostOffset> {
        let cluster = self.tables.cluster();
        let clusters = (bytes.len() as u64).div_ceil(cluster);
        bytes.resize((clusters * cluster) as usize, 0);
        let first = self.take_run(clusters).await?;
        let at = self.space.offset_of(first);
        let write = async {
            self.write_all(vec![(at, bytes)]).await?;
            self.space.count_leased(first..first + clusters)
        };
        write.await.map_err(|e| self.poison(e))?;
        Ok(at)
    }

    /// All clusters that a bitmap takes, those of its table too.
    pub(super) async fn clusters_of_bitmap(&self, bitmap: &Bitmap) -> Result<Vec<Freed>> {
        let mut clusters = self.table_of_bitmap(bitmap);
        for raw in self.read_bitmap_table(bitmap).await? {
            if let Some(host) = self.bitmap_entry(bitmap, raw)? {
                clusters.push(Freed { cluster: self.space.cluster_of(host), table: false });
            }
        }
        Ok(clusters)
    }

    fn table_of_bitmap(&self, bitmap: &Bitmap) -> Vec<Freed> {
        let first = self.space.cluster_of(bitmap.table_offset);
        let bytes = u64::from(bitmap.table_size) * ENTRY_BYTES;
        let all = first..first + bytes.div_ceil(self.tables.cluster());
        all.map(|cluster| Freed { cluster, table: false }).collect()
    }

    /// Whether the header has room for a directory.
    fn probe_directory(&self, new: &Directory) -> Result<()> {
        let probe = new.extension(HostOffset::ZERO)?;
        self.changed_header(|h| set_extension(h, probe)).map(drop)
    }

    /// Writes a directory to a new place and makes the header name it.
    pub(super) async fn replace_directory(&self, new: &Directory) -> Result<()> {
        self.probe_directory(new)?;
        let bytes = new.bytes();
        let at = if bytes.is_empty() { HostOffset::ZERO } else { self.write_run(bytes).await? };
        let extension = new.extension(at)?;
        // All that is new is counted and written before the header names it.
        let counted = async {
            self.write_blocks().await?;
            self.storage.sync().await
        };
        counted.await.map_err(|e| self.poison(e))?;
        self.name_directory(extension).await.map_err(|e| self.poison(e))?;
        // The place that it was read from; a new one had none.
        let first = self.space.cluster_of(new.at);
        let clusters = first..first + new.len.div_ceil(self.tables.cluster());
        self.space.note_freed(clusters.map(|cluster| Freed { cluster, table: false }));
        Ok(())
    }

    /// Makes the header's extension say where the directory lies.
    async fn name_directory(&self, extension: Option<BitmapExtension>) -> Result<()> {
        let vouched = self.header().autoclear & autoclear::BITMAPS != 0;
        let named = self.changed_header(|h| set_extension(h, extension))?;
        let at_once = vouched && differ_in_one_sector(&self.header().encode()?, &named.encode()?);
        if vouched && !at_once {
            self.change_header(|h| h.autoclear &= !autoclear::BITMAPS).await?;
        }
        let named = self.changed_header(|h| set_extension(h, extension))?;
        self.rewrite_header(named).await?;
        if extension.is_some() && !at_once {
            self.change_header(|h| h.autoclear |= autoclear::BITMAPS).await?;
        }
        Ok(())
    }
}

fn set_extension(header: &mut Header, extension: Option<BitmapExtension>) {
    let found = header.extensions.iter().rposition(|e| e.id == EXT_BITMAPS);
    let old = found.and_then(|i| header.extensions.get_mut(i));
    match (extension.map(|e| e.encode()), old) {
        (Some(data), Some(old)) => old.data = data,
        (Some(data), None) => header.extensions.push(Extension { id: EXT_BITMAPS, data }),
        (None, None) => {}
        (None, Some(old)) => {
            // Others behind it stay where they are, or a crash could tear them apart.
            (old.id, old.data) = (EXT_UNUSED, vec![0; old.data.len()]);
            if found == header.extensions.len().checked_sub(1) {
                header.extensions.pop();
            }
        }
    }
    // The smallest clusters may have no room for both; names of features are a help for people only.
    if header.cluster_bits == MIN_CLUSTER_BITS && header.encode().is_err() {
        header.extensions.retain(|e| e.id != EXT_FEATURE_NAMES);
    }
}

/// True when a crash can only leave the one or the other.
fn differ_in_one_sector(a: &[u8], b: &[u8]) -> bool {
    let sectors = a.chunks(512).zip(b.chunks(512)).filter(|(a, b)| a != b).count();
    a.len() == b.len() && sectors <= 1
}
