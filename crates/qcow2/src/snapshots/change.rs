//! The three changes: making a snapshot, going back to one, deleting one.

use super::table::Raw;
use super::{NewSnapshot, SnapshotRef};
use crate::format::{COPIED, ENTRY_BYTES, Header, Snapshot};
use crate::generation::{Generation, pad_table};
use crate::image::Qcow2;
use bedplate_storage::Storage;
use bedplate_types::{ByteLen, Error, ErrorKind, HostOffset, Result};

/// Bytes of a snapshot's name (as QEMU).
const MAX_NAME: usize = 255;

/// Where a table lies and how many entries it has.
#[derive(Clone, Copy)]
struct Place {
    at: HostOffset,
    entries: u32,
}

impl Place {
    fn bytes(self) -> u64 {
        u64::from(self.entries) * ENTRY_BYTES
    }
}

impl<S: Storage> Qcow2<S> {
    /// Makes a snapshot of the disk as it is now; returns its id. Requests wait meanwhile; what they
    /// have completed before is in it.
    ///
    /// # Errors
    /// `InvalidInput` for a name that is too long, `Limit` when the image can't have more snapshots or its refcounts
    /// are too narrow, `Corrupt` when its tables can't be trusted, or what the storage reports. The image is as
    /// before then.
    pub async fn create_snapshot(&self, new: &NewSnapshot<'_>) -> Result<Vec<u8>> {
        self.refuse_data_file("internal snapshots")?;
        if new.name.len() > MAX_NAME || new.name.contains(&0) {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!(
                    "a snapshot's name has at most {MAX_NAME} bytes and no NUL, this one has {} bytes",
                    new.name.len()
                ),
            ));
        }
        let _still = self.hold_still().await;
        self.next_generation(async |generation| create(generation, new).await).await
    }

    /// Takes the disk back to what it was when the snapshot was made, its size too. Requests wait
    /// meanwhile.
    ///
    /// # Errors
    /// `NotFound` when there is no such snapshot; else as [`Self::create_snapshot`].
    pub async fn apply_snapshot(&self, which: SnapshotRef<'_>) -> Result<()> {
        let _still = self.hold_still().await;
        self.next_generation(async |generation| apply(generation, which).await).await?;
        self.track_all();
        Ok(())
    }

    /// Deletes a snapshot; what only it used becomes free. Requests wait meanwhile.
    ///
    /// # Errors
    /// As [`Self::apply_snapshot`].
    pub async fn delete_snapshot(&self, which: SnapshotRef<'_>) -> Result<()> {
        let _still = self.hold_still().await;
        self.next_generation(async |generation| delete(generation, which).await).await
    }
}

fn active(header: &Header) -> Place {
    Place { at: header.l1_offset, entries: header.l1_size }
}

/// What a snapshot is called in messages, and where its L1 table lies.
fn find<S: Storage>(
    generation: &Generation<'_, S>,
    raw: &Raw,
    which: SnapshotRef<'_>,
) -> Result<(usize, Place)> {
    let (SnapshotRef::Name(text) | SnapshotRef::IdOrName(text)) = which;
    let found = raw.find(which).and_then(|index| Some((index, &raw.entries.get(index)?.snapshot)));
    let Some((index, snapshot)) = found else {
        return Err(Error::new(
            ErrorKind::NotFound,
            format!(
                "image '{}' has no snapshot '{}'; see them with 'bedplate snapshot -l'",
                generation.image().storage.name(),
                crate::format::printable(text)
            ),
        ));
    };
    snapshot.check_l1(generation.image().tables.geo)?;
    Ok((index, Place { at: snapshot.l1_offset, entries: snapshot.l1_size }))
}

/// Puts the active L1 table in a new place, and gives up the old one.
async fn move_active<S: Storage>(
    generation: &mut Generation<'_, S>,
    old: Place,
    words: &[u64],
) -> Result<Place> {
    let new = write_l1(generation, words).await?;
    generation.release(old.at, old.bytes()).await?;
    Ok(new)
}

async fn write_l1<S: Storage>(generation: &mut Generation<'_, S>, words: &[u64]) -> Result<Place> {
    let new = Place { at: HostOffset::ZERO, entries: words.len() as u32 };
    let at = generation.reserve(new.bytes()).await?;
    if new.entries > 0 {
        let room = new.bytes().next_multiple_of(generation.image().tables.cluster());
        generation.image().write_all(vec![(at, pad_table(words, room))]).await?;
    }
    Ok(Place { at, ..new })
}

/// Writes a new snapshot table, and gives up the old one. Returns where it is; zero when it is empty.
async fn write_table<S: Storage>(
    generation: &mut Generation<'_, S>,
    header: &Header,
    raw: &Raw,
) -> Result<HostOffset> {
    let mut bytes = raw.bytes();
    let at = generation.reserve(bytes.len() as u64).await?;
    if !bytes.is_empty() {
        let room = (bytes.len() as u64).next_multiple_of(generation.image().tables.cluster());
        bytes.resize(room as usize, 0);
        generation.image().write_all(vec![(at, bytes)]).await?;
    }
    generation.release(header.snapshots_offset, raw.len).await?;
    Ok(at)
}

/// How the header changes.
struct Change {
    active: Place,
    size: ByteLen,
    snapshots: (HostOffset, u32),
}

impl Change {
    fn apply(self, header: &mut Header) {
        header.l1_offset = self.active.at;
        header.l1_size = self.active.entries;
        header.size = self.size;
        (header.snapshots_offset, header.nb_snapshots) = self.snapshots;
    }
}

async fn create<S: Storage>(
    generation: &mut Generation<'_, S>,
    new: &NewSnapshot<'_>,
) -> Result<(Vec<u8>, impl FnOnce(&mut Header) + use<S>)> {
    let header = generation.image().header();
    let mut raw = Raw::read(&generation.image().storage, &header).await?;
    let old = active(&header);
    let l1 = generation.read_l1(old.at, old.entries).await?;
    generation.change_all(&l1, 1).await?;
    let words = generation.rebuild_active(&l1, 2).await?;
    let own = move_active(generation, old, &words).await?;
    // Everything under the snapshot's table is shared, so none of its flags is set.
    let shared: Vec<u64> = words.iter().map(|word| word & !COPIED).collect();
    let kept = write_l1(generation, &shared).await?;
    let id = raw.next_id();
    raw.push(Snapshot {
        l1_offset: kept.at,
        l1_size: kept.entries,
        id: id.clone(),
        name: new.name.to_vec(),
        date_sec: u32::try_from(new.date.as_secs()).unwrap_or(u32::MAX),
        date_nsec: new.date.subsec_nanos(),
        disk_size: Some(header.size),
        icount: Some(0),
        ..Snapshot::default()
    })?;
    let snapshots = (write_table(generation, &header, &raw).await?, raw.entries.len() as u32);
    let change = Change { active: own, size: header.size, snapshots };
    Ok((id, move |h: &mut Header| change.apply(h)))
}

async fn apply<S: Storage>(
    generation: &mut Generation<'_, S>,
    which: SnapshotRef<'_>,
) -> Result<((), impl FnOnce(&mut Header) + use<S>)> {
    let header = generation.image().header();
    let raw = Raw::read(&generation.image().storage, &header).await?;
    let (index, kept) = find(generation, &raw, which)?;
    let old = active(&header);
    let own = generation.read_l1(old.at, old.entries).await?;
    let mut l1 = generation.read_l1(kept.at, kept.entries).await?;
    let size = raw.entries.get(index).and_then(|e| e.snapshot.disk_size).unwrap_or(header.size);
    let needed = check_size(generation, size)?;
    let image = generation.image();
    if size != header.size && image.has_bitmaps() {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "the disk of '{}' had another size then, and its persistent bitmaps can't follow; remove them first \
                 with 'bedplate bitmap --remove'",
                image.storage.name()
            ),
        ));
    }
    // All that the disk holds may change with the header: no bitmap may vouch for what it recorded before.
    image.mark_bitmaps().await?;
    l1.resize(l1.len().max(needed), 0);
    // First down, then up: what both refer to must not count too often in between.
    generation.change_all(&own, -1).await?;
    generation.change_all(&l1, 1).await?;
    let words = generation.rebuild_active(&l1, 1).await?;
    let active = move_active(generation, old, &words).await?;
    let snapshots = (header.snapshots_offset, header.nb_snapshots);
    let change = Change { active, size, snapshots };
    Ok(((), move |h: &mut Header| change.apply(h)))
}

/// L1 entries that a disk of this size needs, if it can be.
fn check_size<S: Storage>(generation: &Generation<'_, S>, size: ByteLen) -> Result<usize> {
    let geo = generation.image().tables.geo;
    if size > geo.max_disk_size() {
        let text = format!("a snapshot's disk size of {} bytes is not allowed", size.get());
        return Err(generation.corrupt(text));
    }
    Ok(geo.l1_entries(size) as usize)
}

async fn delete<S: Storage>(
    generation: &mut Generation<'_, S>,
    which: SnapshotRef<'_>,
) -> Result<((), impl FnOnce(&mut Header) + use<S>)> {
    let header = generation.image().header();
    let mut raw = Raw::read(&generation.image().storage, &header).await?;
    let (index, gone) = find(generation, &raw, which)?;
    raw.entries.remove(index);
    let l1 = generation.read_l1(gone.at, gone.entries).await?;
    generation.change_all(&l1, -1).await?;
    generation.release(gone.at, gone.bytes()).await?;
    let old = active(&header);
    let own = generation.read_l1(old.at, old.entries).await?;
    let words = generation.rebuild_active(&own, 1).await?;
    let active = move_active(generation, old, &words).await?;
    let snapshots = (write_table(generation, &header, &raw).await?, raw.entries.len() as u32);
    let change = Change { active, size: header.size, snapshots };
    Ok(((), move |h: &mut Header| change.apply(h)))
}
