//! Copy-on-write: what a cluster that gets a new mapping must hold besides what is written to it.
//!
//! Only what the batch does not cover is read, and nothing where the old content is known to be zero.

use crate::below::Below;
use crate::format::{Cluster, Geometry, L2Entry, SubMap};
use crate::image::Qcow2;
use crate::mapping::CompressedCluster;
use bedplate_runtime::buf::{IoVec, SharedBuf};
use bedplate_storage::Storage;
use bedplate_types::{ByteLen, Error, GuestOffset, HostOffset, Result};
use smallvec::SmallVec;

/// A part of one write, inside one cluster.
pub(crate) struct Part {
    /// Which write of the batch.
    pub(crate) write: usize,
    /// Offset in the cluster.
    pub(crate) within: u64,
    pub(crate) buf: IoVec,
}

/// Bytes to write at an offset in a cluster.
pub(crate) struct Segment {
    pub(crate) within: u64,
    pub(crate) buf: IoVec,
}

/// One cluster that gets a new mapping.
pub(crate) struct Job {
    pub(crate) at: GuestOffset,
    /// What the tables said before.
    pub(crate) old: Cluster,
    pub(crate) parts: SmallVec<[Part; 1]>,
    /// Where the cluster will be.
    pub(crate) host: HostOffset,
    /// That space reads as zeroes, and may stay unwritten.
    pub(crate) zeroed: bool,
    pub(crate) failed: Option<Error>,
}

/// Bytes of a cluster that no part covers and that must be filled with what was there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Gap {
    start: u64,
    end: u64,
    /// What was there.
    old: L2Entry,
}

type Gaps = SmallVec<[Gap; 2]>;

impl Job {
    /// A job for parts that are sorted by place, then by write.
    pub(crate) fn new(at: GuestOffset, old: Cluster, parts: SmallVec<[Part; 1]>) -> Self {
        Self { at, old, parts, host: HostOffset::ZERO, zeroed: false, failed: None }
    }

    /// True unless the cluster keeps its place: it became writable in place meanwhile, or holds space of its own
    /// behind a zero flag or for other subclusters.
    pub(crate) fn needs_cluster(&self) -> bool {
        needs_cluster(self.old)
    }

    /// The subclusters that the parts touch.
    pub(crate) fn touched(&self, geo: Geometry) -> u32 {
        let touched = |p: &Part| geo.parts_touched(p.within, p.buf.len() as u64);
        self.parts.iter().fold(0, |all, p| all | touched(p))
    }

    /// True when the mapping is already as it must be.
    pub(crate) fn is_mapped(&self, geo: Geometry) -> bool {
        let touched = || self.touched(geo);
        matches!(self.old.entry, L2Entry::Data { copied: true, .. })
            && self.old.map.is_none_or(|map| touched() & !map.allocated() == 0)
    }

    /// The subclusters that must be in the cluster's space when this is done, besides those that are there and stay.
    fn to_fill(&self, geo: Geometry, map: SubMap) -> u32 {
        let touched = self.touched(geo);
        match self.old.entry {
            L2Entry::Data { copied: true, .. } => touched & !map.allocated(),
            L2Entry::Data { copied: false, .. } => touched | map.allocated(),
            L2Entry::Compressed { .. } => u32::MAX,
            _ => touched,
        }
    }

    /// The bitmap that the cluster will have, where it changes as a whole.
    pub(crate) fn new_map(&self, geo: Geometry) -> Option<SubMap> {
        let old = self.old.map?;
        let filled = self.to_fill(geo, old);
        Some(SubMap::new(old.allocated() | filled, old.zero() & !filled))
    }

    /// The byte ranges of the first `end` bytes of the cluster that no part covers.
    fn uncovered(&self, end: u64) -> SmallVec<[(u64, u64); 2]> {
        let mut gaps = SmallVec::new();
        let mut at = 0;
        for part in &self.parts {
            if part.within > at {
                gaps.push((at, part.within));
            }
            at = at.max(part.within + part.buf.len() as u64);
        }
        if at < end {
            gaps.push((at, end));
        }
        gaps
    }

    /// What must be filled.
    fn gaps(&self, geo: Geometry) -> Gaps {
        let mut gaps = Gaps::new();
        let Some(map) = self.old.map else {
            if !self.is_mapped(geo) {
                let gap = |(start, end)| Gap { start, end, old: self.old.entry };
                gaps.extend(self.uncovered(geo.cluster_size()).into_iter().map(gap));
            }
            return gaps;
        };
        let (fill, size) = (self.to_fill(geo, map), geo.part_size());
        for (start, end) in self.uncovered(geo.cluster_size()) {
            let mut at = start;
            while at < end {
                let part = (at / size) as u32;
                let next = end.min(at - at % size + size);
                let old = self.old.part(part);
                match gaps.last_mut() {
                    _ if fill & SubMap::mask(part, 1) == 0 => {}
                    Some(gap) if gap.end == at && gap.old == old => gap.end = next,
                    _ => gaps.push(Gap { start: at, end: next, old }),
                }
                at = next;
            }
        }
        gaps
    }

    fn overlapping(&self) -> bool {
        self.parts.windows(2).any(|w| match w {
            [a, b] => a.within + a.buf.len() as u64 > b.within,
            _ => false,
        })
    }

    /// What the parts write; where they overlap, the later write of the batch wins.
    fn data(&self, segments: &mut Vec<Segment>) -> Result<()> {
        if !self.overlapping() {
            let segment = |p: &Part| Segment { within: p.within, buf: p.buf.clone() };
            segments.extend(self.parts.iter().map(segment));
            return Ok(());
        }
        let mut order: Vec<&Part> = self.parts.iter().collect();
        order.sort_by_key(|p| p.write);
        let ends = |p: &&Part| p.within + p.buf.len() as u64;
        let len = order.iter().map(ends).max().unwrap_or(0);
        let flat = SharedBuf::zeroed(len as usize)?.iovec();
        for part in order {
            flat.copy_between(part.within as usize, &part.buf, 0, part.buf.len());
        }
        let mut at = 0;
        for (start, end) in self.uncovered(len).into_iter().chain([(len, len)]) {
            if start > at {
                segments.push(Segment {
                    within: at,
                    buf: flat.slice(at as usize, (start - at) as usize),
                });
            }
            at = end;
        }
        Ok(())
    }
}

/// True when a write to the cluster needs new space.
pub(crate) fn needs_cluster(old: Cluster) -> bool {
    !matches!(
        old.entry,
        L2Entry::Data { copied: true, .. } | L2Entry::Zero { host: Some(_), copied: true }
    )
}

impl Gap {
    /// True when nothing must be read to fill it.
    fn is_zero(&self, below: &impl Below) -> bool {
        match self.old {
            L2Entry::Unallocated => below.is_empty(),
            L2Entry::Zero { .. } => true,
            L2Entry::Data { .. } | L2Entry::Compressed { .. } => false,
        }
    }
}

impl<S: Storage> Qcow2<S> {
    /// What must be filled of a job's cluster. A data file ends where the disk does.
    fn gaps(&self, job: &Job) -> Gaps {
        let mut gaps = job.gaps(self.tables.geo);
        if self.has_data_file() {
            let end = self.disk_end().saturating_sub(job.at.get());
            gaps.iter_mut().for_each(|gap| gap.end = gap.end.min(end));
            gaps.retain(|gap| gap.start < gap.end);
        }
        gaps
    }

    /// Adds all that must be written to a job's cluster to `segments`, if that needs no I/O; else adds nothing.
    pub(crate) fn compose_at_once<B: Below>(
        &self,
        below: &B,
        job: &Job,
        segments: &mut Vec<Segment>,
    ) -> Result<bool> {
        let gaps = self.gaps(job);
        if !gaps.iter().all(|gap| gap.is_zero(below)) {
            return Ok(false);
        }
        job.data(segments)?;
        for gap in gaps {
            self.fill_zeroes(job, gap.start, gap.end, segments)?;
        }
        Ok(true)
    }

    /// All that must be written to a job's cluster: its data, and around it the old content.
    pub(crate) async fn compose<B: Below>(&self, below: &B, job: &Job) -> Result<Vec<Segment>> {
        let mut segments = Vec::new();
        job.data(&mut segments)?;
        let gaps = self.gaps(job);
        let whole = match job.old.entry {
            L2Entry::Compressed { host, len } if !gaps.is_empty() => {
                Some(self.decompress(&CompressedCluster { host, len }).await?)
            }
            _ => None,
        };
        for gap in gaps {
            if let Some(old) = &whole {
                let buf = SharedBuf::zeroed((gap.end - gap.start) as usize)?.iovec();
                let from = old.get(gap.start as usize..gap.end as usize).unwrap_or_default();
                buf.copy_from(0, from);
                segments.push(Segment { within: gap.start, buf });
            } else {
                self.fill_gap(below, job, gap, &mut segments).await?;
            }
        }
        Ok(segments)
    }

    async fn fill_gap<B: Below>(
        &self,
        below: &B,
        job: &Job,
        Gap { start, end, old }: Gap,
        segments: &mut Vec<Segment>,
    ) -> Result<()> {
        match old {
            L2Entry::Data { host, .. } => {
                let buf = SharedBuf::zeroed((end - start) as usize)?.iovec();
                let from = HostOffset::new(host.get().saturating_add(start));
                self.read_data(from, buf.clone()).await?;
                segments.push(Segment { within: start, buf });
            }
            L2Entry::Unallocated if !below.is_empty() => {
                let mut at = start;
                while at < end {
                    let guest = GuestOffset::new(job.at.get().saturating_add(at));
                    let (zero, len) = below.zero_run(guest, ByteLen::new(end - at)).await?;
                    let next = at + len.get().clamp(1, end - at);
                    if zero {
                        self.fill_zeroes(job, at, next, segments)?;
                    } else {
                        let buf = SharedBuf::zeroed((next - at) as usize)?.iovec();
                        below.read(guest, buf.clone()).await?;
                        segments.push(Segment { within: at, buf });
                    }
                    at = next;
                }
            }
            _ => self.fill_zeroes(job, start, end, segments)?,
        }
        Ok(())
    }

    /// Zeroes for a gap: all of it, or in space that is zero anyway just what rounds the neighbours up to whole
    /// blocks of the storage.
    fn fill_zeroes(
        &self,
        job: &Job,
        start: u64,
        end: u64,
        segments: &mut Vec<Segment>,
    ) -> Result<()> {
        let mut add = |from: u64, to: u64| -> Result<()> {
            if from < to {
                let buf = IoVec::zeroes((to - from) as usize)?;
                segments.push(Segment { within: from, buf });
            }
            Ok(())
        };
        if !job.zeroed {
            return add(start, end);
        }
        let align = u64::from(self.data_storage().limits().align.max(1));
        let head = start.next_multiple_of(align).min(end);
        add(start, head)?;
        add((end - end % align).max(head), end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(parts: &[(usize, u64, &[u8])]) -> Job {
        let part = |(write, within, bytes): &(usize, u64, &[u8])| {
            let buf = SharedBuf::zeroed(bytes.len()).expect("memory").iovec();
            buf.copy_from(0, bytes);
            Part { write: *write, within: *within, buf }
        };
        let mut parts: SmallVec<[Part; 1]> = parts.iter().map(part).collect();
        parts.sort_by_key(|p| (p.within, p.write));
        Job::new(GuestOffset::ZERO, Cluster::standard(L2Entry::Unallocated), parts)
    }

    #[test]
    fn gaps_are_what_no_part_covers() {
        let gaps = |parts: &[(usize, u64, &[u8])]| job(parts).uncovered(12).to_vec();
        assert_eq!(gaps(&[(0, 2, &[1; 3]), (1, 8, &[1; 2])]), [(0, 2), (5, 8), (10, 12)]);
        assert_eq!(gaps(&[(0, 0, &[1; 12])]), []);
        assert_eq!(gaps(&[(0, 1, &[1; 8]), (1, 2, &[2; 2])]), [(0, 1), (9, 12)]);
    }

    #[test]
    fn where_parts_overlap_the_later_write_wins() {
        let mut segments = Vec::new();
        let job = job(&[(1, 1, &[2; 4]), (0, 3, &[1; 4]), (2, 9, &[3; 1])]);
        job.data(&mut segments).expect("memory");
        let flat: Vec<(u64, Vec<u8>)> = segments
            .iter()
            .map(|s| {
                let mut bytes = vec![0; s.buf.len()];
                s.buf.copy_to(0, &mut bytes);
                (s.within, bytes)
            })
            .collect();
        assert_eq!(flat, [(1, vec![2, 2, 2, 2, 1, 1]), (9, vec![3])]);
    }

    #[test]
    fn only_touched_subclusters_are_filled_and_those_that_move() {
        let geo = Geometry::extended(14).expect("16 KiB"); // subclusters of 512 bytes
        let gaps = |entry, map, parts: &[(usize, u64, &[u8])]| {
            let mut job = job(parts);
            job.old = Cluster { entry, map: Some(map) };
            (job.gaps(geo).to_vec(), job.new_map(geo).expect("extended"), job.is_mapped(geo))
        };
        let gap = |start, end, old| Gap { start, end, old };
        let (none, zero) = (L2Entry::Unallocated, L2Entry::Zero { host: None, copied: false });
        let (filled, map, _) = gaps(none, SubMap::new(0, 0b110), &[(0, 600, &[1; 100])]);
        assert_eq!(filled, [gap(512, 600, zero), gap(700, 1024, zero)]);
        assert_eq!(map, SubMap::new(0b10, 0b100));
        // In place: what is there already needs nothing, whatever a part leaves open.
        let own = L2Entry::Data { host: HostOffset::new(0x50000), copied: true };
        let (filled, map, mapped) = gaps(own, SubMap::new(1, 0), &[(0, 100, &[1; 500])]);
        assert_eq!(filled, [gap(600, 1024, none)]);
        assert_eq!((map, mapped), (SubMap::new(0b11, 0), false));
        assert!(gaps(own, SubMap::new(1, 0), &[(0, 100, &[1; 100])]).2);
        // A shared cluster takes along all that it has.
        let shared = L2Entry::Data { host: HostOffset::new(0x50000), copied: false };
        let (filled, map, _) = gaps(shared, SubMap::new(0b1110, 1), &[(0, 512, &[1; 512])]);
        assert_eq!(filled, [gap(1024, 2048, shared)]);
        assert_eq!(map, SubMap::new(0b1110, 1));
    }
}
