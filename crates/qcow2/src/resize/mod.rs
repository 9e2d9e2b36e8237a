//! Another size for the disk in an image, and space taken ahead of need.
//!
//! Callers: `disk` (resize) and `image` (create). The change itself is one new generation of the metadata
//! ([`crate::generation`]): the disk has the old size or the new one, never a table that is too short. What lies
//! beyond the end of the old disk in its last cluster, or under it in a backing file, never shows after growth.

mod tables;

use crate::below::Below;
use crate::format::L2Entry;
use crate::image::Qcow2;
use crate::mapping::Mapping;
use bedplate_runtime::buf::IoVec;
use bedplate_storage::Storage;
use bedplate_types::{ByteLen, Error, ErrorKind, GuestOffset, Preallocation, Result};

/// Clusters that get an entry, though nothing is written to them yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fill {
    /// First cluster of the disk, and how many.
    first: u64,
    clusters: u64,
    what: Filling,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Filling {
    /// Zeroes without space.
    Zero,
    /// Space for data, taken in this way.
    Data(Preallocation),
}

/// What a generation is to change.
pub(crate) struct Plan {
    /// The disk's size before and after.
    old: ByteLen,
    new: ByteLen,
    fills: Vec<Fill>,
}

impl<S: Storage> Qcow2<S> {
    /// Changes the disk's size. Growth reads as zeroes, and its space is taken as `fill` says; shrinking frees what lies
    /// beyond the new end. One resize at a time. Requests wait meanwhile; those beyond a new end that come later fail.
    ///
    /// # Errors
    /// `InvalidInput` for a size that is no multiple of 512 bytes or too large, or for `fill` when the disk does not
    /// grow; `Unsupported` for a version 2 image with snapshots (which don't know their size); `NoSpace`, or what else
    /// the storage reports. The disk has its old size then.
    pub async fn resize<B: Below>(
        &self,
        below: &B,
        size: ByteLen,
        fill: Preallocation,
    ) -> Result<()> {
        self.check_writable()?;
        let old = self.size();
        if size == old && fill == Preallocation::Off {
            return Ok(());
        }
        // A data file that reads as the disk is mapped as a whole.
        let fill = match fill {
            Preallocation::Off if self.raw_data && size > old => Preallocation::Metadata,
            fill => fill,
        };
        self.check_resize(old, size, fill)?;
        self.check_bitmaps_follow().await?;
        let mut plan = Plan { old, new: size, fills: Vec::new() };
        if size > old {
            self.grow_data(old, size).await?;
            self.clear_tail(below, old, size, fill != Preallocation::Off).await?;
            plan.fills = self.plan_fills(below, old, size, fill).await?;
        }
        self.rearrange(&plan).await?;
        if size < old
            && let Err(e) = match self.has_data_file() {
                true => self.shrink_data(old, size).await,
                false => self.forget_tail(below, size).await,
            }
        {
            // The disk is smaller already, and growing it here clears the tail.
            let name = self.storage.name();
            tracing::warn!("cannot clear the rest of the last cluster of '{name}': {e:#}");
        }
        Ok(())
    }

    /// Takes space for a disk that nothing was written to.
    ///
    /// # Errors
    /// `InvalidInput` when something was, or when the image has a backing file; `NoSpace`, or what else the storage
    /// reports.
    pub async fn preallocate(&self, how: Preallocation) -> Result<()> {
        self.check_writable()?;
        let header = self.header();
        let used = (0..header.l1_size).any(|index| self.tables.l1(index) != 0);
        if used || header.backing_file.is_some() {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "only a new image without a backing file can be preallocated as a whole",
            ));
        }
        let size = header.size;
        let clusters = self.tables.geo.clusters(size);
        if clusters == 0 || how == Preallocation::Off {
            return Ok(());
        }
        self.check_fill()?;
        let fills = vec![Fill { first: 0, clusters, what: Filling::Data(how) }];
        self.rearrange(&Plan { old: size, new: size, fills }).await
    }

    /// Refuses entries for clusters that nobody has written, where they would not read as zeroes.
    fn check_fill(&self) -> Result<()> {
        if !self.is_encrypted() || self.tables.codec.has_zeroes() {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "space for '{}' can't be taken ahead: it is encrypted, and version 2 of the format (compat=0.10) can't \
                 say that a cluster reads as zeroes",
                self.storage.name()
            ),
        ))
    }

    async fn rearrange(&self, plan: &Plan) -> Result<()> {
        let _still = self.hold_still().await;
        let mut suspended = None;
        let made = self
            .next_generation(async |generation| {
                if plan.old != plan.new && self.has_bitmaps() {
                    suspended = Some(self.suspend_bitmaps().await?);
                }
                tables::rearrange(generation, plan).await
            })
            .await;
        if suspended.is_some()
            && !self.is_poisoned()
            && let Err(e) = self.resume_bitmaps(plan.old).await
        {
            // The size is what it is; they stay marked, so nobody trusts them.
            let name = self.storage.name();
            tracing::warn!("the persistent bitmaps of '{name}' could not follow its size: {e:#}");
        }
        let suspended = suspended.take().is_some();
        made?;
        if suspended {
            self.free_dropped().await;
        }
        Ok(())
    }

    fn check_resize(&self, old: ByteLen, new: ByteLen, fill: Preallocation) -> Result<()> {
        let invalid = |text: String| Err(Error::new(ErrorKind::InvalidInput, text));
        let name = self.storage.name();
        if !new.get().is_multiple_of(512) {
            return invalid(format!("the size of '{name}' must be a multiple of 512 bytes"));
        }
        let most = self.tables.geo.max_disk_size();
        if new > most {
            return invalid(format!(
                "a disk of {} bytes is too large for '{name}', whose clusters have {} bytes: the most is {}",
                new.get(),
                self.tables.cluster(),
                most.get()
            ));
        }
        if new <= old && fill != Preallocation::Off {
            return invalid("space can only be taken ahead for what a disk grows by".into());
        }
        let header = self.header();
        if header.version == 2 && header.nb_snapshots > 0 {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "the size of '{name}' can't be changed: it has snapshots, and in version 2 of the format \
                     (compat=0.10) they don't say how large the disk was; delete them first"
                ),
            ));
        }
        Ok(())
    }

    /// Makes the rest of the old disk's last cluster read as zeroes; with `take` it gets space for itself too.
    async fn clear_tail<B: Below>(
        &self,
        below: &B,
        old: ByteLen,
        new: ByteLen,
        take: bool,
    ) -> Result<()> {
        let mut end = old.get().next_multiple_of(self.tables.cluster());
        if self.has_data_file() {
            end = end.min(new.get()); // it ends where the disk does
        }
        if end == old.get() {
            return Ok(());
        }
        let _inside = self.enter().await;
        if !take {
            return self.zero_by_data(below, old.get(), end, false).await;
        }
        let zeroes = IoVec::zeroes((end - old.get()) as usize)?;
        let writes = vec![(GuestOffset::new(old.get()), zeroes)];
        self.write_inside(below, writes).await.pop().unwrap_or(Ok(()))
    }

    /// After shrinking: the rest of the last cluster is nobody's any more, and other programs may not clear it when
    /// they grow the disk again.
    async fn forget_tail<B: Below>(&self, below: &B, size: ByteLen) -> Result<()> {
        let end = size.get().next_multiple_of(self.tables.cluster());
        let at = GuestOffset::new(size.get());
        let len = ByteLen::new(end - size.get());
        if len == ByteLen::ZERO {
            return Ok(());
        }
        let _inside = self.enter().await;
        match self.map(at, len).await? {
            Mapping::Data { .. } | Mapping::Compressed { .. } => {
                self.zero_by_data(below, at.get(), end, false).await
            }
            Mapping::Unallocated { .. } | Mapping::Zero { .. } => Ok(()),
        }
    }

    /// Which clusters of the growth need an entry: all when space is taken, else those under which a backing file
    /// holds something that must not show.
    async fn plan_fills<B: Below>(
        &self,
        below: &B,
        old: ByteLen,
        new: ByteLen,
        fill: Preallocation,
    ) -> Result<Vec<Fill>> {
        let cluster = self.tables.cluster();
        let (first, end) = (self.tables.geo.clusters(old), self.tables.geo.clusters(new));
        if fill != Preallocation::Off {
            self.check_fill()?;
            let what = Filling::Data(fill);
            return Ok(vec![Fill { first, clusters: end - first, what }]);
        }
        let mut fills: Vec<Fill> = Vec::new();
        if below.is_empty() {
            return Ok(fills);
        }
        if !self.tables.codec.has_zeroes() {
            self.check_fill()?;
        }
        let zero = self.tables.codec.encode_l2(L2Entry::Zero { host: None, copied: false });
        // Version 2 has no zero flag: zeroes are written there.
        let what = zero.map_or(Filling::Data(Preallocation::Full), |_| Filling::Zero);
        let mut at = first * cluster;
        while at < end * cluster {
            let left = ByteLen::new(end * cluster - at);
            let (zero, len) = below.zero_run(GuestOffset::new(at), left).await?;
            let next = at + len.get().clamp(1, left.get());
            if !zero {
                let (from, to) = (at / cluster, next.div_ceil(cluster));
                match fills.last_mut() {
                    Some(last) if last.first + last.clusters >= from => {
                        last.clusters = to - last.first;
                    }
                    _ => fills.push(Fill { first: from, clusters: to - from, what }),
                }
            }
            at = next;
        }
        Ok(fills)
    }
}
