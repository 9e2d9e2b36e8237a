//! Compressed clusters written: several in one host cluster, one behind the other.
//!
//! Callers: `Disk::write_compressed`, for tools that fill images. Only clusters that hold nothing can be written so, as
//! in QEMU. The order is that of all new mappings: data, then refcounts, then the mapping (`docs/on-disk-order.md`,
//! "Compressed clusters"). Clusters that would not become smaller are written as they are.

use crate::below::Below;
use crate::format::{Compressor, L2Entry, incompat};
use crate::image::Qcow2;
use crate::journal::Journal;
use crate::slice::{SliceId, WordChange};
use crate::space::{FreeRun, Layout, Packing};
use bedplate_runtime::buf::{AlignedBuf, IoVec, SharedBuf};
use bedplate_runtime::yield_now;
use bedplate_storage::Storage;
use bedplate_types::{ByteLen, Error, ErrorKind, GuestOffset, HostOffset, Result};
use futures_util::future::join_all;
use std::collections::BTreeMap;

/// Bytes of the disk that are compressed and placed at once.
const BATCH_BYTES: u64 = 4 << 20;

/// A cluster of the disk, compressed.
#[derive(Clone, Debug)]
pub struct PackedCluster {
    /// Where it lies on the disk.
    pub at: GuestOffset,
    /// Its compressed content, less than a cluster.
    pub bytes: Vec<u8>,
}

impl<S: Storage> Qcow2<S> {
    /// Writes whole clusters compressed. `at` must be a cluster's begin, and the end a cluster's or the disk's.
    ///
    /// # Errors
    /// `InvalidInput` for other ranges, and where a cluster already holds something (then with EIO as its number, as QEMU
    /// answers); `Unsupported` for images that can't have compressed clusters; what writing reports.
    pub async fn write_compressed<B: Below>(
        &self,
        below: &B,
        at: GuestOffset,
        buf: IoVec,
    ) -> Result<()> {
        let _inside = self.enter().await;
        self.check_writable()?;
        self.check_compressible(at, buf.byte_len())?;
        let mut compressor = Compressor::new(self.header().compression_type)?;
        let cluster = self.tables.cluster() as usize;
        let step = (BATCH_BYTES as usize).max(cluster);
        for start in (0..buf.len()).step_by(step) {
            let part = buf.slice(start, step);
            let from = at.get() + start as u64;
            let (mut packed, mut plain) = (Vec::new(), Vec::new());
            for within in (0..part.len()).step_by(cluster) {
                let (here, data) =
                    (GuestOffset::new(from + within as u64), part.slice(within, cluster));
                // What lies behind the disk's end is zero.
                let mut bytes = vec![0; cluster];
                data.copy_to(0, &mut bytes);
                match compressor.pack(&bytes)? {
                    Some(bytes) => packed.push(PackedCluster { at: here, bytes }),
                    None => plain.push((here, data)),
                }
                yield_now().await;
            }
            self.write_packed_inside(packed).await?;
            for result in self.write_inside(below, plain).await {
                result?;
            }
        }
        Ok(())
    }

    /// Writes clusters that were compressed elsewhere, with a [`Compressor`] of the image's kind. They must be in
    /// ascending order.
    ///
    /// # Errors
    /// As [`Self::write_compressed`]; nothing was written then, unless the storage failed.
    pub async fn write_packed(&self, pieces: Vec<PackedCluster>) -> Result<()> {
        let _inside = self.enter().await;
        self.write_packed_inside(pieces).await
    }

    async fn write_packed_inside(&self, pieces: Vec<PackedCluster>) -> Result<()> {
        self.check_writable()?;
        let cluster = self.tables.cluster();
        for piece in &pieces {
            self.check_compressible(piece.at, ByteLen::new(cluster))?;
            if piece.bytes.is_empty() || piece.bytes.len() as u64 >= cluster {
                return Err(invalid("a compressed cluster must be shorter than a cluster"));
            }
        }
        if pieces.is_empty() {
            return Ok(());
        }
        for piece in &pieces {
            self.before_change(piece.at, ByteLen::new(cluster)).await?;
        }
        let _range = self.ranges.exclusive_many(&guest_ranges(&pieces, cluster)).await;
        for piece in &pieces {
            match self.cluster(piece.at).await?.entry {
                L2Entry::Unallocated | L2Entry::Zero { host: None, .. } => {}
                _ => return Err(self.already_there(piece.at)),
            }
        }
        for piece in &pieces {
            self.ensure_table(self.tables.locate(piece.at).0.l1).await?;
        }
        self.prepare_counts().await?;
        let places = {
            let _one = self.packer.lock().await;
            self.place_and_write(&pieces).await?
        };
        self.map_packed(&pieces, &places).await?;
        let filling = self.journal.as_ref().is_some_and(Journal::wants_write_back);
        if (filling || self.dirty().slices.len() * 2 > self.cache.capacity())
            && let Err(e) = self.write_back().await
        {
            tracing::debug!("write-back under pressure failed: {e:#}");
        }
        Ok(())
    }

    fn check_compressible(&self, at: GuestOffset, len: ByteLen) -> Result<()> {
        let unsupported = |what: &str| {
            let text =
                format!("image '{}' can't have compressed clusters: {what}", self.storage.name());
            Err(Error::new(ErrorKind::Unsupported, text))
        };
        let header = self.header();
        if header.incompatible & incompat::EXTERNAL_DATA != 0 {
            return unsupported("its data lies in a file of its own");
        }
        if header.crypt_method != 0 {
            return unsupported("it is encrypted");
        }
        let cluster = self.tables.cluster();
        let end = at.get().saturating_add(len.get());
        if !at.get().is_multiple_of(cluster)
            || !(end.is_multiple_of(cluster) || end >= self.size().get())
        {
            return Err(invalid(&format!(
                "compressed writes cover whole clusters of {cluster} bytes, or the end of the disk"
            )));
        }
        Ok(())
    }

    /// As QEMU, so that scripts meet the same number.
    fn already_there(&self, at: GuestOffset) -> Error {
        const EIO: i32 = 5;
        let text = format!(
            "the cluster at {at} of image '{}' already holds something; only clusters that hold nothing can be written \
             compressed",
            self.storage.name()
        );
        Error::errno(text, EIO).with_kind(ErrorKind::InvalidInput)
    }

    /// Writes the pieces to the file and counts them; returns where they lie. The caller holds `packer`.
    async fn place_and_write(&self, pieces: &[PackedCluster]) -> Result<Vec<HostOffset>> {
        let held = self.hold_packing().await?;
        let mut layout = Layout::new(self.tables.cluster(), self.space.counts.max(), held);
        let mut fresh = Vec::new();
        let written = match self.place(pieces, &mut layout, &mut fresh).await {
            Ok(places) => self.write_pieces(pieces, &places).await.map(|()| places),
            Err(e) => Err(e),
        };
        match written {
            Ok(places) => {
                // Half counted would be wrong counts.
                self.count_packed(&layout, held, &fresh).await.map_err(|e| self.poison(e))?;
                Ok(places)
            }
            Err(e) => {
                self.take_back(held, fresh).await;
                Err(e)
            }
        }
    }

    /// Places for all pieces, with as many clusters as that takes.
    async fn place(
        &self,
        pieces: &[PackedCluster],
        layout: &mut Layout,
        fresh: &mut Vec<FreeRun>,
    ) -> Result<Vec<HostOffset>> {
        let mut left: u64 = pieces.iter().map(|p| p.bytes.len() as u64).sum();
        let mut places = Vec::with_capacity(pieces.len());
        for (index, piece) in pieces.iter().enumerate() {
            let len = piece.bytes.len() as u64;
            let place = loop {
                if let Some(place) = layout.place(len) {
                    break place;
                }
                let want = layout.clusters_for(left, (pieces.len() - index) as u64);
                for run in self.take_clusters(want).await? {
                    layout.add(run);
                    fresh.push(run);
                }
            };
            // Large clusters leave few bits for the place.
            self.packed_entry(place, len)?;
            left -= len;
            places.push(place);
        }
        Ok(places)
    }

    /// The L2 entry of a piece.
    fn packed_entry(&self, host: HostOffset, len: u64) -> Result<u64> {
        let entry = L2Entry::Compressed { host, len: ByteLen::new(len) };
        self.tables.codec.encode_l2(entry).ok_or_else(|| self.unencodable(host))
    }

    /// Writes pieces that follow each other in the file at once.
    async fn write_pieces(&self, pieces: &[PackedCluster], places: &[HostOffset]) -> Result<()> {
        let mut runs: Vec<(u64, Vec<u8>)> = Vec::new();
        for (piece, place) in pieces.iter().zip(places) {
            match runs.last_mut() {
                Some((start, bytes)) if *start + bytes.len() as u64 == place.get() => {
                    bytes.extend_from_slice(&piece.bytes);
                }
                _ => runs.push((place.get(), piece.bytes.clone())),
            }
        }
        let align = u64::from(self.storage.limits().align.max(1));
        let cluster = self.tables.cluster();
        let writes = runs.into_iter().map(|(start, mut bytes)| async move {
            // The rest of the last block is unused so far, so it need not be read; it ends with its cluster at the latest.
            let end = start + bytes.len() as u64;
            let padded = end.next_multiple_of(align).min(end.next_multiple_of(cluster));
            bytes.resize((padded - start) as usize, 0);
            let buf = SharedBuf::new(AlignedBuf::from_slice(&bytes)?).iovec();
            self.storage.write(HostOffset::new(start), buf).await
        });
        join_all(writes).await.into_iter().collect()
    }

    /// After a failure: what was taken goes back.
    async fn take_back(&self, held: Option<(Packing, u64)>, fresh: Vec<FreeRun>) {
        for run in fresh.into_iter().rev() {
            self.give_back(FreeRun { zeroed: false, ..run });
        }
        if let Some((open, _)) = held
            && let Err(e) = self.release_packing(open).await
        {
            // A reference too many is a leak, no more.
            tracing::debug!(image = self.storage.name(), "a cluster leaks: {e:#}");
        }
    }

    /// Makes the mappings of pieces that were written.
    async fn map_packed(&self, pieces: &[PackedCluster], places: &[HostOffset]) -> Result<()> {
        self.unpacked.forget(places);
        let words = self.tables.geo.entry_words();
        let mut slices: BTreeMap<SliceId, Vec<WordChange>> = BTreeMap::new();
        for (piece, place) in pieces.iter().zip(places) {
            let (id, index) = self.tables.locate(piece.at);
            let entry = L2Entry::Compressed { host: *place, len: ByteLen::from(piece.bytes.len()) };
            let word =
                self.tables.codec.encode_l2(entry).ok_or_else(|| self.unencodable(*place))?;
            let index = index * words;
            let changes = slices.entry(id).or_default();
            // Where entries have a bitmap, that of a compressed cluster is zero (specification, "Extended L2 Entries").
            if words > 1 {
                changes.push(WordChange::whole(index + 1, 0));
            }
            changes.push(WordChange::whole(index, word));
        }
        for (id, changes) in slices {
            self.change_words(id, &changes).await?;
        }
        Ok(())
    }
}

/// The guest's bytes that pieces stand for, neighbours joined.
fn guest_ranges(pieces: &[PackedCluster], cluster: u64) -> Vec<(u64, u64)> {
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for piece in pieces {
        match ranges.last_mut() {
            Some((start, len)) if *start + *len == piece.at.get() => *len += cluster,
            _ => ranges.push((piece.at.get(), cluster)),
        }
    }
    ranges
}

fn invalid(text: &str) -> Error {
    Error::new(ErrorKind::InvalidInput, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{CheckOptions, check};
    use crate::format::NewImage;
    use crate::{Mapping, Nothing, OpenOptions};
    use bedplate_sim::exec::block_on;
    use bedplate_sim::{Image, Rng, SimOptions, SimStorage};

    const CLUSTER: u64 = 2 << 20;
    /// Descriptors of clusters of 2 MiB have 49 bits for the place.
    const PLACES: u64 = (1 << 49) / CLUSTER;

    /// What takes a little more than half a cluster when it is compressed.
    fn content(seed: u64) -> Vec<u8> {
        let mut rng = Rng::new(seed);
        let mut bytes = vec![0; CLUSTER as usize];
        for word in bytes[..CLUSTER as usize * 5 / 9].chunks_exact_mut(8) {
            word.copy_from_slice(&rng.next_u64().to_be_bytes());
        }
        bytes
    }

    fn write(q: &Qcow2<SimStorage>, index: u64, packed: bool) -> Result<()> {
        let at = GuestOffset::new(index * CLUSTER);
        let buf = SharedBuf::new(AlignedBuf::from_slice(&content(index))?).iovec();
        match packed {
            true => block_on(q.write_compressed(&Nothing, at, buf)),
            false => block_on(q.write_batch(&Nothing, vec![(at, buf)])).into_iter().collect(),
        }
    }

    fn open(image: Image) -> (SimStorage, Qcow2<SimStorage>) {
        let storage = SimStorage::from_image(image, SimOptions::default());
        let q = block_on(Qcow2::open(storage.clone(), &OpenOptions::default())).expect("opens");
        (storage, q)
    }

    /// Elsewhere the place was cut to its bits, and what lay there was read instead.
    #[test]
    fn clusters_beyond_the_last_place_that_a_descriptor_holds_are_not_written_compressed() {
        let new = NewImage {
            size: ByteLen::new(64 * CLUSTER),
            cluster_size: CLUSTER,
            ..NewImage::default()
        };
        let layout = new.layout().expect("valid");
        let mut image = Image::new(layout.file_len.get());
        layout.writes.iter().for_each(|(at, bytes)| image.write(at.get(), bytes));
        let (storage, q) = open(image);
        // As if the file had been filled up to here.
        let end = PLACES - 6;
        {
            let mut state = q.space.state();
            (state.scan, state.scan_end, state.end, state.prepared) = (end, end, end, end);
        }
        let results: Vec<_> = (0..12).map(|index| write(&q, index, true)).collect();
        let fitted = results.iter().take_while(|result| result.is_ok()).count() as u64;
        assert!((1..9).contains(&fitted), "{results:?}");
        for result in &results[fitted as usize..] {
            let refused = result.as_ref().expect_err("refused");
            assert_eq!(refused.kind(), ErrorKind::Limit, "{refused}");
        }
        // Entries of plain clusters have room for more.
        (20..24).for_each(|index| write(&q, index, false).expect("fits"));
        block_on(q.close()).expect("closes");
        let image = storage.image();
        assert!(image.len() > PLACES * CLUSTER, "all lies below");
        let report = block_on(check(&storage, CheckOptions::default())).expect("opens");
        assert!(report.is_clean(), "{:#?}", report.findings);
        let (_, q) = open(image);
        for index in 0..24 {
            let (at, len) = (GuestOffset::new(index * CLUSTER), ByteLen::new(CLUSTER));
            let buf = SharedBuf::zeroed(CLUSTER as usize).expect("memory").iovec();
            match block_on(q.map(at, len)).expect("maps") {
                Mapping::Compressed { cluster, within, .. } => {
                    block_on(q.read_compressed(&cluster, within, &buf)).expect("reads");
                }
                Mapping::Data { host, .. } => {
                    block_on(storage.read(host, buf.clone())).expect("reads");
                }
                Mapping::Zero { .. } | Mapping::Unallocated { .. } => {}
            }
            let mut got = vec![0; CLUSTER as usize];
            buf.copy_to(0, &mut got);
            let written = index < fitted || (20..24).contains(&index);
            let wanted = if written { content(index) } else { vec![0; CLUSTER as usize] };
            assert!(got == wanted, "cluster {index} has changed");
        }
    }
}
