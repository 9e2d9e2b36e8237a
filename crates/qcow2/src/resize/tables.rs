//! The tables of a disk of another size: what lies beyond its end is dropped, and clusters get entries ahead of need.

use super::{Fill, Filling, Plan};
use crate::format::{COPIED, ENTRY_BYTES, Header, OFFSET_MASK, ZERO};
use crate::generation::{Generation, pad_table};
use crate::image::Qcow2;
use bedplate_storage::{Storage, ZeroMode, take_space};
use bedplate_types::{ByteLen, Error, ErrorKind, HostOffset, Preallocation, Result};
use std::collections::BTreeSet;

/// Counts changed before the blocks among them get their places.
const SETTLE_AFTER: u64 = 1 << 16;
/// Bytes of L2 tables that are collected before they are written.
const WRITE_BYTES: usize = 4 << 20;

/// A fill whose data has a place: that of its first cluster.
struct Placed {
    fill: Fill,
    host: Option<HostOffset>,
    /// Zeroes in the file are not zeroes of the disk, so that its entries must say that they are.
    encrypted: bool,
}

/// Makes the tables; returns how the header changes.
pub(super) async fn rearrange<S: Storage>(
    generation: &mut Generation<'_, S>,
    plan: &Plan,
) -> Result<((), impl FnOnce(&mut Header) + use<S>)> {
    let image = generation.image();
    let (header, geo) = (image.header(), image.tables.geo);
    let mut l1 = generation.read_l1(header.l1_offset, header.l1_size).await?;
    let needed = geo.l1_entries(plan.new) as usize;
    // Tables beyond the end hold what was cut off, or the VM state of a snapshot that was gone back to.
    let keep = geo.clusters(plan.old.min(plan.new));
    drop_tables(generation, &mut l1, keep).await?;
    l1.resize(needed, 0);
    let per_table = geo.l2_entries() as u64;
    let mut touched = BTreeSet::new();
    if !keep.is_multiple_of(per_table) {
        touched.insert((keep / per_table) as usize);
    }
    let mut placed = Vec::new();
    for fill in &plan.fills {
        let host = match fill.what {
            Filling::Zero => None,
            Filling::Data(_) => Some(place_data(generation, fill, plan.new).await?),
        };
        placed.push(Placed { fill: *fill, host, encrypted: image.is_encrypted() });
        let last = (fill.first + fill.clusters - 1) / per_table;
        touched.extend((fill.first / per_table) as usize..=last as usize);
    }
    let mut writes: Vec<(HostOffset, Vec<u8>)> = Vec::new();
    for index in touched {
        let Some(word) = l1.get_mut(index) else { continue };
        if let Some((new, write)) = edit_table(generation, index, *word, keep, &placed).await? {
            *word = new;
            writes.push(write);
        }
        if writes.iter().map(|w| w.1.len()).sum::<usize>() >= WRITE_BYTES {
            image.write_all(std::mem::take(&mut writes)).await?;
        }
    }
    image.write_all(writes).await?;
    let bytes = l1.len() as u64 * ENTRY_BYTES;
    let at = generation.reserve(bytes).await?;
    if bytes > 0 {
        let room = bytes.next_multiple_of(geo.cluster_size());
        image.write_all(vec![(at, pad_table(&l1, room))]).await?;
    }
    generation.release(header.l1_offset, u64::from(header.l1_size) * ENTRY_BYTES).await?;
    let (entries, size) = (l1.len() as u32, plan.new);
    let change = move |h: &mut Header| {
        h.l1_offset = at;
        h.l1_size = entries;
        h.size = size;
    };
    Ok(((), change))
}

/// Drops the tables that map nothing below cluster `keep`.
async fn drop_tables<S: Storage>(
    generation: &mut Generation<'_, S>,
    l1: &mut [u64],
    keep: u64,
) -> Result<()> {
    let first = keep.div_ceil(generation.image().tables.geo.l2_entries() as u64) as usize;
    let mut gone = vec![0; first.min(l1.len())];
    if let Some(rest) = l1.get_mut(first..) {
        gone.extend_from_slice(rest);
        rest.fill(0);
    }
    generation.change_all(&gone, -1).await
}

/// Takes space for a fill, in one run, and counts it.
async fn place_data<S: Storage>(
    generation: &mut Generation<'_, S>,
    fill: &Fill,
    new: ByteLen,
) -> Result<HostOffset> {
    let Filling::Data(how) = fill.what else { return Ok(HostOffset::ZERO) };
    let image = generation.image();
    if image.has_data_file() {
        return place_in_data_file(image, fill, new, how).await;
    }
    let len = fill
        .clusters
        .checked_mul(image.tables.cluster())
        .map(ByteLen::new)
        .ok_or_else(|| Error::new(ErrorKind::Limit, "the disk's space can't be counted"))?;
    let (first, zeroed) = generation.fresh_run(fill.clusters).await?;
    let at = image.space.offset_of(first);
    for cluster in first..first + fill.clusters {
        generation.change(cluster, 1).await?;
        if cluster % SETTLE_AFTER == 0 {
            generation.settle().await?;
        }
    }
    generation.settle().await?;
    if !zeroed {
        let mode = ZeroMode { unmap: false, fast_only: false };
        image.storage.write_zeroes(at, len, mode).await?;
    }
    take_space(&image.storage, at, len, how).await?;
    Ok(at)
}

/// Takes space for a fill in the data file, at the guest's own offset, up to the disk's new end.
async fn place_in_data_file<S: Storage>(
    image: &Qcow2<S>,
    fill: &Fill,
    new: ByteLen,
    how: Preallocation,
) -> Result<HostOffset> {
    let cluster = image.tables.cluster();
    let start = fill.first.saturating_mul(cluster);
    let end = start.saturating_add(fill.clusters.saturating_mul(cluster)).min(new.get());
    let (at, len) = (HostOffset::new(start), ByteLen::new(end.saturating_sub(start)));
    if len == ByteLen::ZERO {
        return Ok(at);
    }
    let data = image.data_storage();
    if !image.raw_data {
        // Anything may lie there that nothing mapped. A raw file reads as zeroes there already.
        let mode = ZeroMode { unmap: true, fast_only: false };
        data.write_zeroes(at, len, mode).await?;
    }
    take_space(data, at, len, how).await?;
    Ok(at)
}

/// A table without entries from cluster `keep` on but those of the fills. `None` when it stays as it is.
async fn edit_table<S: Storage>(
    generation: &mut Generation<'_, S>,
    index: usize,
    word: u64,
    keep: u64,
    placed: &[Placed],
) -> Result<Option<(u64, (HostOffset, Vec<u8>))>> {
    let geo = generation.image().tables.geo;
    let (stride, per_table) = (geo.entry_words(), geo.l2_entries() as u64);
    let base = index as u64 * per_table;
    let mut old = match word & OFFSET_MASK {
        0 => None,
        _ => generation.read_tables(&[(index, word)]).await?.pop(),
    };
    let empty = vec![0; geo.l2_entries() * stride];
    if let Some(old) = &mut old {
        old.words.resize(empty.len(), 0);
    }
    let mut words = old.as_ref().map_or_else(|| empty.clone(), |t| t.words.clone());
    for (entry, cluster) in words.chunks_mut(stride).zip(base..) {
        let fill = fill_at(placed, cluster);
        if fill.is_none() && cluster < keep {
            continue;
        }
        generation.change_entry(entry.first().copied().unwrap_or(0), -1).await?;
        entry.fill(0);
        if let Some(fill) = fill {
            set_entry(entry, fill, cluster, geo.cluster_size());
        }
    }
    generation.settle().await?;
    match old {
        Some(old) if old.words == words => Ok(None),
        Some(old) => {
            let moved = generation.move_table(old.at, &words, 1).await?;
            generation.settle().await?;
            Ok(Some(moved))
        }
        None if words == empty => Ok(None),
        None => {
            let at = generation.reserve(geo.cluster_size()).await?;
            Ok(Some((at.get() | COPIED, (at, pad_table(&words, geo.cluster_size())))))
        }
    }
}

/// The fill that covers a cluster; they are in order.
fn fill_at(placed: &[Placed], cluster: u64) -> Option<&Placed> {
    let after = placed.partition_point(|p| p.fill.first <= cluster);
    let found = placed.get(after.checked_sub(1)?)?;
    (cluster < found.fill.first + found.fill.clusters).then_some(found)
}

/// Writes the entry of a cluster that a fill covers; the second word of a long entry speaks of subclusters.
fn set_entry(entry: &mut [u64], placed: &Placed, cluster: u64, size: u64) {
    let long = entry.len() > 1;
    let (first, second) = match placed.host {
        Some(host) => {
            let at = host.get() + (cluster - placed.fill.first) * size;
            match (placed.encrypted, long) {
                (false, _) => (at | COPIED, u64::from(u32::MAX)),
                (true, false) => (at | COPIED | ZERO, 0),
                (true, true) => (at | COPIED, u64::from(u32::MAX) << 32),
            }
        }
        None if long => (0, u64::from(u32::MAX) << 32),
        None => (ZERO, 0),
    };
    for (word, value) in entry.iter_mut().zip([first, second]) {
        *word = value;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_name_the_fills_clusters_one_after_the_other() {
        let fill = |what| Fill { first: 10, clusters: 4, what };
        let data = Placed {
            fill: fill(Filling::Data(Preallocation::Full)),
            host: Some(HostOffset::new(0x50000)),
            encrypted: false,
        };
        let zero = Placed { fill: fill(Filling::Zero), host: None, encrypted: false };
        let mut entry = [7];
        set_entry(&mut entry, &data, 12, 0x10000);
        assert_eq!(entry, [0x70000 | COPIED]);
        set_entry(&mut entry, &zero, 12, 0x10000);
        assert_eq!(entry, [ZERO]);
        let mut entry = [7, 7];
        set_entry(&mut entry, &data, 10, 0x10000);
        assert_eq!(entry, [0x50000 | COPIED, 0xffff_ffff]);
        set_entry(&mut entry, &zero, 10, 0x10000);
        assert_eq!(entry, [0, 0xffff_ffff_0000_0000]);
        let hidden = Placed { encrypted: true, ..data };
        set_entry(&mut entry, &hidden, 10, 0x10000);
        assert_eq!(entry, [0x50000 | COPIED, 0xffff_ffff_0000_0000]);
        let mut entry = [7];
        set_entry(&mut entry, &hidden, 11, 0x10000);
        assert_eq!(entry, [0x60000 | COPIED | ZERO]);
    }
}
