//! Copy-on-write: what a cluster that gets a new mapping must hold besides what is written to it.
//!
//! Only what the batch does not cover is read, and nothing where the old content is known to be zero.

use crate::below::Below;
use crate::format::L2Entry;
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
    /// The entry before.
    pub(crate) old: L2Entry,
    pub(crate) parts: SmallVec<[Part; 1]>,
    /// Where the cluster will be.
    pub(crate) host: HostOffset,
    /// That space reads as zeroes, and may stay unwritten.
    pub(crate) zeroed: bool,
    pub(crate) failed: Option<Error>,
}

impl Job {
    /// A job for parts that are sorted by place, then by write.
    pub(crate) fn new(at: GuestOffset, old: L2Entry, parts: SmallVec<[Part; 1]>) -> Self {
        Self { at, old, parts, host: HostOffset::ZERO, zeroed: false, failed: None }
    }

    /// True unless the cluster keeps its place: it became writable in place meanwhile, or holds space of its own
    /// behind a zero flag.
    pub(crate) fn needs_cluster(&self) -> bool {
        !matches!(
            self.old,
            L2Entry::Data { copied: true, .. } | L2Entry::Zero { host: Some(_), copied: true }
        )
    }

    /// True when the mapping is already as it must be.
    pub(crate) fn is_mapped(&self) -> bool {
        matches!(self.old, L2Entry::Data { copied: true, .. })
    }

    /// The byte ranges of the cluster that no part covers.
    fn gaps(&self, cluster: u64) -> SmallVec<[(u64, u64); 2]> {
        let mut gaps = SmallVec::new();
        let mut at = 0;
        for part in &self.parts {
            if part.within > at {
                gaps.push((at, part.within));
            }
            at = at.max(part.within + part.buf.len() as u64);
        }
        if at < cluster {
            gaps.push((at, cluster));
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
        for (start, end) in self.gaps(len).into_iter().chain([(len, len)]) {
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

    /// True when nothing of the old content must be read, whatever the parts leave open.
    fn needs_no_reading(&self, below: &impl Below) -> bool {
        match self.old {
            L2Entry::Data { copied, .. } => copied,
            L2Entry::Unallocated => below.is_empty(),
            L2Entry::Zero { .. } => true,
            L2Entry::Compressed { .. } => false,
        }
    }
}

impl<S: Storage> Qcow2<S> {
    /// Adds all that must be written to a job's cluster to `segments`, if that needs no I/O; else adds nothing.
    pub(crate) fn compose_at_once<B: Below>(
        &self,
        below: &B,
        job: &Job,
        segments: &mut Vec<Segment>,
    ) -> Result<bool> {
        let gaps = job.gaps(self.tables.cluster());
        if !gaps.is_empty() && !job.needs_no_reading(below) {
            return Ok(false);
        }
        job.data(segments)?;
        if !job.is_mapped() {
            for (start, end) in gaps {
                self.fill_zeroes(job, start, end, segments)?;
            }
        }
        Ok(true)
    }

    /// All that must be written to a job's cluster: its data, and around it the old content.
    pub(crate) async fn compose<B: Below>(&self, below: &B, job: &Job) -> Result<Vec<Segment>> {
        let mut segments = Vec::new();
        job.data(&mut segments)?;
        if job.is_mapped() {
            return Ok(segments);
        }
        let gaps = job.gaps(self.tables.cluster());
        let whole = match job.old {
            L2Entry::Compressed { host, len } if !gaps.is_empty() => {
                Some(self.decompress(&CompressedCluster { host, len }).await?)
            }
            _ => None,
        };
        for (start, end) in gaps {
            if let Some(old) = &whole {
                let buf = SharedBuf::zeroed((end - start) as usize)?.iovec();
                let from = old.get(start as usize..end as usize).unwrap_or_default();
                buf.copy_from(0, from);
                segments.push(Segment { within: start, buf });
            } else {
                self.fill_gap(below, job, start, end, &mut segments).await?;
            }
        }
        Ok(segments)
    }

    async fn fill_gap<B: Below>(
        &self,
        below: &B,
        job: &Job,
        start: u64,
        end: u64,
        segments: &mut Vec<Segment>,
    ) -> Result<()> {
        match job.old {
            L2Entry::Data { host, .. } => {
                let buf = SharedBuf::zeroed((end - start) as usize)?.iovec();
                let from = HostOffset::new(host.get().saturating_add(start));
                self.storage.read(from, buf.clone()).await?;
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
        let align = u64::from(self.storage.limits().align.max(1));
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
        Job::new(GuestOffset::ZERO, L2Entry::Unallocated, parts)
    }

    #[test]
    fn gaps_are_what_no_part_covers() {
        let gaps = |parts: &[(usize, u64, &[u8])]| job(parts).gaps(12).to_vec();
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
}
