//! Discard and write-zeroes: whole clusters change their mapping, the edges are written.
//!
//! Work goes slice by slice, each under its own range lock, so that discarding a whole disk neither blocks other
//! requests for long nor takes memory in proportion to the disk.

use crate::below::Below;
use crate::format::L2Entry;
use crate::image::Qcow2;
use crate::mapping::Mapping;
use crate::space::Freed;
use bedplate_runtime::buf::IoVec;
use bedplate_storage::{Storage, ZeroMode};
use bedplate_types::{ByteLen, Error, ErrorKind, GuestOffset, Result};

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
        self.check_writable()?;
        self.before_change(at, len).await?;
        let (start, end) = self.whole_clusters(at, len);
        if self.tables.codec.encode_l2(L2Entry::Zero { host: None, copied: false }).is_none()
            && !below.is_empty()
        {
            return Ok(()); // version 2 can't hide what lies below
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
        self.check_writable()?;
        self.before_change(at, len).await?;
        let has_flag =
            self.tables.codec.encode_l2(L2Entry::Zero { host: None, copied: false }).is_some();
        let by_mapping = has_flag || (below.is_empty() && mode.unmap);
        let (mut start, mut end) = self.whole_clusters(at, len);
        if !by_mapping || start >= end {
            (start, end) = (at.get().saturating_add(len.get()), at.get().saturating_add(len.get()));
        }
        let edges = [(at.get(), start.min(at.get() + len.get())), (end, at.get() + len.get())];
        for (from, to) in edges {
            self.zero_by_data(below, from, to, mode.fast_only).await?;
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

    /// Writes zeroes as data, where the range does not read as zeroes already.
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
                self.write_batch(below, vec![(here, buf)]).await.pop().unwrap_or(Ok(()))?;
            }
            at += len;
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
        let mut changes = Vec::new();
        let mut freed: Vec<Freed> = Vec::new();
        for start in (at..end).step_by(cluster as usize) {
            let guest = GuestOffset::new(start);
            let old = self.entry(guest).await?;
            let Some(new) = wanted(old, wish, below.is_empty()) else { continue };
            let Some(word) = self.tables.codec.encode_l2(new) else { continue };
            let (_, index) = self.tables.locate(guest);
            changes.push((index, word));
            if !matches!(new, L2Entry::Zero { host: Some(_), .. }) {
                freed.extend(self.references(old));
            }
        }
        if changes.is_empty() {
            return Ok(());
        }
        self.ensure_table(id.l1).await?;
        self.set_entries(id, &changes).await?;
        self.space.note_freed(freed);
        Ok(())
    }
}

/// The entry that a cluster is to have, or `None` to leave it.
fn wanted(old: L2Entry, wish: Wish, nothing_below: bool) -> Option<L2Entry> {
    let zero = L2Entry::Zero { host: None, copied: false };
    let gone = if nothing_below { L2Entry::Unallocated } else { zero };
    let new = match (wish, old) {
        (Wish::Discarded, L2Entry::Unallocated) => old,
        (_, L2Entry::Unallocated) if nothing_below => old,
        (Wish::Discarded | Wish::ZeroUnmapped, _) => gone,
        (Wish::ZeroKept, L2Entry::Data { host, copied: true }) => {
            L2Entry::Zero { host: Some(host), copied: true }
        }
        (Wish::ZeroKept, L2Entry::Zero { .. }) => old,
        (Wish::ZeroKept, _) => zero,
    };
    (new != old).then_some(new)
}

#[cfg(test)]
mod tests {
    use super::*;
    use bedplate_types::HostOffset;

    #[test]
    fn zeroing_never_lets_the_layer_below_show() {
        let zero = L2Entry::Zero { host: None, copied: false };
        let data = L2Entry::Data { host: HostOffset::new(0x50000), copied: true };
        let kept = L2Entry::Zero { host: Some(HostOffset::new(0x50000)), copied: true };
        assert_eq!(wanted(data, Wish::Discarded, false), Some(zero));
        assert_eq!(wanted(data, Wish::Discarded, true), Some(L2Entry::Unallocated));
        assert_eq!(wanted(L2Entry::Unallocated, Wish::ZeroUnmapped, false), Some(zero));
        assert_eq!(wanted(L2Entry::Unallocated, Wish::ZeroUnmapped, true), None);
        assert_eq!(wanted(L2Entry::Unallocated, Wish::Discarded, false), None);
        assert_eq!(wanted(data, Wish::ZeroKept, false), Some(kept));
        assert_eq!(wanted(kept, Wish::ZeroUnmapped, true), Some(L2Entry::Unallocated));
    }
}
