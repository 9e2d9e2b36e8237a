//! Discard and write-zeroes: whole clusters change their mapping, the edges are written.
//!
//! Work goes slice by slice, each under its own range lock, so that discarding a whole disk neither blocks other
//! requests for long nor takes memory in proportion to the disk.

use crate::below::Below;
use crate::format::{Cluster, L2Entry, SubMap};
use crate::image::Qcow2;
use crate::mapping::Mapping;
use crate::slice::WordChange;
use crate::space::Freed;
use bedplate_runtime::buf::IoVec;
use bedplate_storage::{Storage, ZeroMode};
use bedplate_types::{ByteLen, Error, ErrorKind, GuestOffset, HostOffset, Result};

/// What clusters are to become.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wish {
    /// Not needed any more.
    Discarded,
    /// Zeroes, with their space given back.
    ZeroUnmapped,
    /// Zeroes, with their space kept.
    ZeroKept,
}

impl<S: Storage> Qcow2<S> {
    /// Gives back the space of all clusters that lie wholly in the range; the rest stays as it is.
    ///
    /// # Errors
    /// What the storage reports.
    pub async fn discard<B: Below>(&self, below: &B, at: GuestOffset, len: ByteLen) -> Result<()> {
        let _inside = self.enter_for(at, len).await?;
        self.check_writable()?;
        self.before_change(at, len).await?;
        if self.raw_data {
            return self.clear_raw(at, len, None).await;
        }
        let (start, end) = self.whole_clusters(at, len);
        if !self.tables.codec.has_zeroes() && !below.is_empty() {
            return Ok(()); // version 2 can't hide what lies below
        }
        for (from, to) in self.edges(at, len, (start, end)) {
            self.zero_subclusters(below, from, to).await?;
        }
        self.change_clusters(below, start, end, Wish::Discarded).await
    }

    /// Makes the range read as zeroes.
    ///
    /// # Errors
    /// `Unsupported` when `mode.fast_only` is set and zeroes would have to be written as data; what the storage
    /// reports.
    pub async fn write_zeroes<B: Below>(
        &self,
        below: &B,
        at: GuestOffset,
        len: ByteLen,
        mode: ZeroMode,
    ) -> Result<()> {
        let _inside = self.enter_for(at, len).await?;
        self.check_writable()?;
        self.before_change(at, len).await?;
        if self.raw_data {
            return self.clear_raw(at, len, Some(mode)).await;
        }
        let by_mapping = self.tables.codec.has_zeroes() || (below.is_empty() && mode.unmap);
        let (mut start, mut end) = self.whole_clusters(at, len);
        if !by_mapping {
            (start, end) = (at.get().saturating_add(len.get()), at.get().saturating_add(len.get()));
        }
        let edges = self.edges(at, len, (start, end));
        // What may be impossible first: a request that is refused must not have changed anything.
        for (from, to) in edges {
            let (inner, inner_end) = self.whole_subclusters(from, to).await?;
            self.zero_by_data(below, from, inner, mode.fast_only).await?;
            self.zero_by_data(below, inner_end, to, mode.fast_only).await?;
        }
        for (from, to) in edges {
            self.zero_subclusters(below, from, to).await?;
        }
        let wish = if mode.unmap { Wish::ZeroUnmapped } else { Wish::ZeroKept };
        if start < end { self.change_clusters(below, start, end, wish).await } else { Ok(()) }
    }

    /// The clusters that lie wholly in a range. The disk's last cluster counts as whole where the disk ends in it.
    fn whole_clusters(&self, at: GuestOffset, len: ByteLen) -> (u64, u64) {
        let cluster = self.tables.cluster();
        let start = at.get().next_multiple_of(cluster);
        let end = at.get().saturating_add(len.get());
        let end = if end >= self.size().get() {
            end.next_multiple_of(cluster)
        } else {
            end - end % cluster
        };
        (start, end.max(start))
    }

    /// What of a range lies before and behind the clusters that are changed as a whole.
    fn edges(&self, at: GuestOffset, len: ByteLen, whole: (u64, u64)) -> [(u64, u64); 2] {
        let end = at.get().saturating_add(len.get());
        if whole.0 >= whole.1 {
            // Inside one cluster, or on both sides of a border between two.
            let border = whole.0.clamp(at.get(), end);
            return [(at.get(), border), (border, end)];
        }
        [(at.get(), whole.0), (whole.1.min(end), end)]
    }

    /// Writes zeroes as data, where the range does not read as zeroes already. The caller is inside.
    pub(crate) async fn zero_by_data<B: Below>(
        &self,
        below: &B,
        from: u64,
        to: u64,
        fast_only: bool,
    ) -> Result<()> {
        let mut at = from;
        while at < to {
            let here = GuestOffset::new(at);
            let (zero, len) = match self.map(here, ByteLen::new(to - at)).await? {
                Mapping::Zero { len, .. } => (true, len),
                Mapping::Unallocated { len } => below.zero_run(here, len).await?,
                Mapping::Data { len, .. } | Mapping::Compressed { len, .. } => (false, len),
            };
            let len = len.get().clamp(1, to - at).min(4 << 20);
            if !zero {
                if fast_only {
                    return Err(Error::new(
                        ErrorKind::Unsupported,
                        "zeroes for a part of a cluster would have to be written as data",
                    ));
                }
                let buf = IoVec::zeroes(len as usize)?;
                self.write_inside(below, vec![(here, buf)]).await.pop().unwrap_or(Ok(()))?;
            }
            at += len;
        }
        Ok(())
    }

    /// The subclusters that lie wholly in a range inside one cluster: none without subclusters, or in a compressed cluster.
    async fn whole_subclusters(&self, from: u64, to: u64) -> Result<(u64, u64)> {
        let geo = self.tables.geo;
        let start = from.next_multiple_of(geo.part_size());
        // The disk's last subcluster counts as whole where the disk ends in it.
        let end = if to >= self.size().get() { to.next_multiple_of(geo.part_size()) } else { to };
        let end = end - end % geo.part_size();
        if !geo.is_extended() || start >= end {
            return Ok((to, to));
        }
        match self.cluster(GuestOffset::new(start)).await?.entry {
            L2Entry::Compressed { .. } => Ok((to, to)),
            _ => Ok((start, end)),
        }
    }

    /// Makes the subclusters that lie wholly in a range inside one cluster read as zeroes, by the bitmap alone.
    async fn zero_subclusters<B: Below>(&self, below: &B, from: u64, to: u64) -> Result<()> {
        let geo = self.tables.geo;
        let (start, end) = self.whole_subclusters(from, to).await?;
        if start >= end {
            return Ok(());
        }
        let at = geo.cluster_start(GuestOffset::new(start));
        let _range = self.ranges.exclusive(at.get(), geo.cluster_size()).await;
        let old = self.cluster(at).await?;
        let parts = geo.parts_touched(start - at.get(), end - start);
        let Some(map) = old.map else { return Ok(()) };
        if matches!(old.entry, L2Entry::Compressed { .. }) {
            // It was compressed since: that is newer than this request.
            return Ok(());
        }
        if map.zero() & parts == parts || (below.is_empty() && map.allocated() & parts == 0) {
            return Ok(());
        }
        let (id, index) = self.tables.locate(at);
        let index = index * geo.entry_words();
        let new = SubMap::new(map.allocated() & !parts, map.zero() | parts);
        let mut changes = vec![WordChange::whole(index + 1, new.raw())];
        let emptied = new.allocated() == 0 && old.entry != L2Entry::Unallocated;
        changes.extend(emptied.then(|| WordChange::whole(index, 0)));
        self.ensure_table(id.l1).await?;
        self.change_words(id, &changes).await?;
        if emptied {
            self.space.note_freed(self.references(old.entry));
        }
        Ok(())
    }

    async fn change_clusters<B: Below>(
        &self,
        below: &B,
        start: u64,
        end: u64,
        wish: Wish,
    ) -> Result<()> {
        let mut at = start;
        while at < end {
            let here = GuestOffset::new(at);
            let (id, _) = self.tables.locate(here);
            let empty_table = self.tables.l1(id.l1) == 0;
            // Nothing mapped, and nothing below that would have to be hidden.
            let skip = empty_table && (below.is_empty() || wish == Wish::Discarded);
            let step = if skip {
                self.tables.to_table_end(here).get()
            } else {
                let span = self.tables.geo.slice_coverage();
                span - at % span
            };
            let next = end.min(at.saturating_add(step));
            if !skip {
                self.change_slice(below, at, next, wish).await?;
            }
            at = next;
        }
        Ok(())
    }

    /// Changes clusters of one slice.
    async fn change_slice<B: Below>(&self, below: &B, at: u64, end: u64, wish: Wish) -> Result<()> {
        let cluster = self.tables.cluster();
        let _range = self.ranges.exclusive(at, end - at).await;
        let (id, _) = self.tables.locate(GuestOffset::new(at));
        let geo = self.tables.geo;
        let mut changes = Vec::new();
        let mut freed: Vec<Freed> = Vec::new();
        let mut emptied = Vec::new();
        for start in (at..end).step_by(cluster as usize) {
            let guest = GuestOffset::new(start);
            let old = self.cluster(guest).await?;
            let Some(new) = wanted(old, wish, below.is_empty()) else { continue };
            let Some(word) = self.tables.codec.encode_l2(new.entry) else { continue };
            let index = self.tables.locate(guest).1 * geo.entry_words();
            changes.push(WordChange::whole(index, word));
            changes.extend(new.map.map(|map| WordChange::whole(index + 1, map.raw())));
            if host_of(new.entry).is_none() {
                freed.extend(self.references(old.entry));
                emptied.extend(host_of(old.entry).map(|_| start));
            }
        }
        if changes.is_empty() {
            return Ok(());
        }
        self.ensure_table(id.l1).await?;
        self.change_words(id, &changes).await?;
        self.space.note_freed(freed);
        self.give_back_data(&emptied).await;
        Ok(())
    }
}

/// The space that an entry keeps, but for compressed ones.
fn host_of(entry: L2Entry) -> Option<HostOffset> {
    match entry {
        L2Entry::Data { host, .. } => Some(host),
        L2Entry::Zero { host, .. } => host,
        L2Entry::Unallocated | L2Entry::Compressed { .. } => None,
    }
}

/// What a cluster is to become, or `None` to leave it.
fn wanted(old: Cluster, wish: Wish, nothing_below: bool) -> Option<Cluster> {
    let extended = old.map.is_some();
    let nothing = Cluster { entry: L2Entry::Unallocated, map: old.map.map(|_| SubMap::default()) };
    let zeroes = |host: Option<HostOffset>| {
        let copied = host.is_some();
        let entry = match host {
            Some(host) if extended => L2Entry::Data { host, copied },
            None if extended => L2Entry::Unallocated,
            host => L2Entry::Zero { host, copied },
        };
        Cluster { entry, map: old.map.map(|_| SubMap::ZEROES) }
    };
    let gone = if nothing_below { nothing } else { zeroes(None) };
    let new = match (wish, old.entry) {
        (Wish::Discarded, L2Entry::Unallocated) => old,
        (_, L2Entry::Unallocated) if nothing_below => old,
        (Wish::Discarded | Wish::ZeroUnmapped, _) => gone,
        (Wish::ZeroKept, L2Entry::Data { host, copied: true }) => zeroes(Some(host)),
        (Wish::ZeroKept, L2Entry::Zero { .. }) => old,
        (Wish::ZeroKept, _) => zeroes(None),
    };
    (new != old).then_some(new)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroing_never_lets_the_layer_below_show() {
        let none = Cluster::standard(L2Entry::Unallocated);
        let zero = Cluster::standard(L2Entry::Zero { host: None, copied: false });
        let data = L2Entry::Data { host: HostOffset::new(0x50000), copied: true };
        let data = Cluster::standard(data);
        let kept = L2Entry::Zero { host: Some(HostOffset::new(0x50000)), copied: true };
        let kept = Cluster::standard(kept);
        assert_eq!(wanted(data, Wish::Discarded, false), Some(zero));
        assert_eq!(wanted(data, Wish::Discarded, true), Some(none));
        assert_eq!(wanted(none, Wish::ZeroUnmapped, false), Some(zero));
        assert_eq!(wanted(none, Wish::ZeroUnmapped, true), None);
        assert_eq!(wanted(none, Wish::Discarded, false), None);
        assert_eq!(wanted(data, Wish::ZeroKept, false), Some(kept));
        assert_eq!(wanted(kept, Wish::ZeroUnmapped, true), Some(none));
    }

    #[test]
    fn clusters_of_subclusters_become_zero_by_their_bitmap() {
        let entry = L2Entry::Data { host: HostOffset::new(0x50000), copied: true };
        let cluster = |entry, map| Cluster { entry, map: Some(map) };
        let old = cluster(entry, SubMap::new(0xff, 0xff00));
        let hidden = cluster(L2Entry::Unallocated, SubMap::ZEROES);
        let gone = cluster(L2Entry::Unallocated, SubMap::default());
        assert_eq!(wanted(old, Wish::Discarded, false), Some(hidden));
        assert_eq!(wanted(old, Wish::Discarded, true), Some(gone));
        assert_eq!(wanted(old, Wish::ZeroKept, false), Some(cluster(entry, SubMap::ZEROES)));
        let shown = cluster(L2Entry::Unallocated, SubMap::new(0, 1));
        assert_eq!(wanted(shown, Wish::ZeroUnmapped, false), Some(hidden));
        assert_eq!(wanted(hidden, Wish::ZeroUnmapped, false), None);
    }
}
