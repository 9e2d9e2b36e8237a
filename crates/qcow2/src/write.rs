//! Writing: in place where the mapping allows it, else into clusters from this thread's lease.
//!
//! A batch is planned as one. Data is written before any mapping is changed ([`crate::commit`]), so a failed write
//! leaves the image as it was.

use crate::below::Below;
use crate::cow::{Job, Part, needs_cluster};
use crate::format::L2Entry;
use crate::image::Qcow2;
use crate::mapping::Mapping;
use bedplate_runtime::buf::IoVec;
use bedplate_runtime::sync::RangeGuard;
use bedplate_storage::Storage;
use bedplate_types::{ByteLen, Error, GuestOffset, HostOffset, Result};
use futures_util::future::join_all;
use smallvec::SmallVec;

/// Segments and bytes of one vectored write, at most.
const JOIN_SEGMENTS: usize = 512;
const JOIN_BYTES: usize = 4 << 20;

/// A new cluster of up to this many bytes is written whole, zeroes around the data. That costs bandwidth once, and saves
/// the file system from converting space piece by piece at every first write (`docs/architecture.md`, "Space").
pub(crate) const WRITTEN_WHOLE: u64 = 64 << 10;

type LockRanges = SmallVec<[(u64, u64); 32]>;

/// Adds a range behind those that are there, joined with the last where they meet or overlap.
fn push_range(ranges: &mut LockRanges, start: u64, len: u64) {
    match ranges.last_mut() {
        Some((first, have)) if *first + *have >= start => {
            *have = (*have).max(start + len - *first);
        }
        _ => ranges.push((start, len)),
    }
}

/// Results of a batch, one a write; the first failure of a write stays.
struct Outcome(Vec<Result<()>>);

impl Outcome {
    fn fail(&mut self, write: usize, e: &Error) {
        if let Some(slot) = self.0.get_mut(write)
            && slot.is_ok()
        {
            *slot = Err(e.clone());
        }
    }
}

impl<S: Storage> Qcow2<S> {
    /// Writes several requests that are under way at once. Each result is that of the write in its place.
    /// Requests must lie inside the disk (rounded up to whole clusters).
    pub async fn write_batch<B: Below>(
        &self,
        below: &B,
        writes: Vec<(GuestOffset, IoVec)>,
    ) -> Vec<Result<()>> {
        let end = writes.iter().map(|(at, buf)| at.get().saturating_add(buf.len() as u64)).max();
        let _inside = match self.enter_for(GuestOffset::ZERO, ByteLen::new(end.unwrap_or(0))).await
        {
            Ok(pin) => pin,
            Err(e) => return writes.iter().map(|_| Err(e.clone())).collect(),
        };
        self.write_inside(below, writes).await
    }

    /// As [`Self::write_batch`], by who is inside; also behind the disk's end. Host space found by the look-ups stays in
    /// place until all in-place writes have ended.
    pub(crate) async fn write_inside<B: Below>(
        &self,
        below: &B,
        writes: Vec<(GuestOffset, IoVec)>,
    ) -> Vec<Result<()>> {
        let mut outcome = Outcome(writes.iter().map(|_| self.check_writable()).collect());
        if outcome.0.iter().any(Result::is_err) {
            return outcome.0;
        }
        for (at, buf) in &writes {
            if let Err(e) = self.before_change(*at, buf.byte_len()).await {
                return writes.iter().map(|_| Err(e.clone())).collect();
            }
        }
        let mut in_place = Vec::new();
        let mut parts = Vec::with_capacity(writes.len());
        for (write, (at, buf)) in writes.iter().enumerate() {
            if let Err(e) = self.sort_out(write, *at, buf, &mut in_place, &mut parts).await {
                outcome.fail(write, &e);
            }
        }
        let failed = if in_place.is_empty() {
            self.write_allocating(below, parts).await
        } else {
            let direct = self.write_in_place(in_place);
            let (mut failed, more) =
                futures_util::future::join(direct, self.write_allocating(below, parts)).await;
            failed.extend(more);
            failed
        };
        for (write, e) in failed {
            outcome.fail(write, &e);
        }
        outcome.0
    }

    /// Splits one write into what can be written in place and what needs work, by cluster.
    async fn sort_out(
        &self,
        write: usize,
        at: GuestOffset,
        buf: &IoVec,
        in_place: &mut Vec<(usize, HostOffset, IoVec)>,
        parts: &mut Vec<(u64, Part)>,
    ) -> Result<()> {
        let mut done = 0;
        while done < buf.len() {
            let here = GuestOffset::new(at.get() + done as u64);
            let left = ByteLen::from(buf.len() - done);
            let n = match self.map(here, left).await? {
                Mapping::Data { host, len, in_place: true } => {
                    in_place.push((write, host, buf.slice(done, len.get() as usize)));
                    len.get()
                }
                _ => {
                    let within = self.tables.geo.in_cluster(here);
                    let n = left.get().min(self.tables.cluster() - within);
                    let part = Part { write, within, buf: buf.slice(done, n as usize) };
                    parts.push((here.get() / self.tables.cluster(), part));
                    n
                }
            };
            done += n as usize;
        }
        Ok(())
    }

    async fn write_in_place(&self, parts: Vec<(usize, HostOffset, IoVec)>) -> Vec<(usize, Error)> {
        let writes = parts.into_iter().map(|(write, host, buf)| async move {
            self.write_data(host, buf).await.err().map(|e| (write, e))
        });
        join_all(writes).await.into_iter().flatten().collect()
    }

    /// Writes parts, given with their clusters, that need a new mapping. Returns the writes that failed.
    async fn write_allocating<B: Below>(
        &self,
        below: &B,
        mut parts: Vec<(u64, Part)>,
    ) -> Vec<(usize, Error)> {
        if parts.is_empty() {
            return Vec::new();
        }
        parts.sort_by_key(|(cluster, p)| (*cluster, p.within, p.write));
        let writes: SmallVec<[usize; 32]> = parts.iter().map(|(_, p)| p.write).collect();
        let all = |e: Error| writes.iter().map(|w| (*w, e.clone())).collect();
        let _range = match self.lock_for(&parts).await {
            Ok(range) => range,
            Err(e) => return all(e),
        };
        let mut jobs = match self.make_jobs(parts).await {
            Ok(jobs) => jobs,
            Err(e) => return all(e),
        };
        if let Err(e) = self.place_jobs(&mut jobs).await {
            return all(e);
        }
        let segments = self.compose_all(below, &mut jobs).await;
        self.write_segments(&mut jobs, segments).await;
        self.commit(&mut jobs).await;
        let failed = jobs.iter().filter_map(|job| job.failed.as_ref().map(|e| (&job.parts, e)));
        failed.flat_map(|(parts, e)| parts.iter().map(|p| (p.write, e.clone()))).collect()
    }

    /// All that must be written, by place in the file, with the index of its job.
    async fn compose_all<B: Below>(&self, below: &B, jobs: &mut [Job]) -> Vec<(u64, usize, IoVec)> {
        let mut all = Vec::with_capacity(jobs.len());
        let (mut segments, mut later) = (Vec::new(), Vec::new());
        for (index, job) in jobs.iter_mut().enumerate() {
            match self.compose_at_once(below, job, &mut segments) {
                Ok(true) => {}
                Ok(false) => later.push(index),
                Err(e) => job.failed = Some(e),
            }
            let host = job.host.get();
            all.extend(segments.drain(..).map(|s| (host.saturating_add(s.within), index, s.buf)));
        }
        let reads = later.iter().filter_map(|index| jobs.get(*index));
        let composed = join_all(reads.map(|job| self.compose(below, job))).await;
        for (index, result) in later.into_iter().zip(composed) {
            let Some(job) = jobs.get_mut(index) else { continue };
            let host = job.host.get();
            match result {
                Ok(more) => all.extend(
                    more.into_iter().map(|s| (host.saturating_add(s.within), index, s.buf)),
                ),
                Err(e) => job.failed = Some(e),
            }
        }
        all.sort_by_key(|(at, ..)| *at);
        all
    }

    /// Locks what parts, sorted by cluster, will change: whole clusters, or of those that stay in place just the
    /// subclusters, so that writes to different subclusters don't wait for each other.
    async fn lock_for(&self, parts: &[(u64, Part)]) -> Result<RangeGuard<'_>> {
        let geo = self.tables.geo;
        let by_cluster = || parts.chunk_by(|a, b| a.0 == b.0);
        let start = |same: &[(u64, Part)]| GuestOffset::new(same[0].0 * geo.cluster_size());
        if geo.is_extended() {
            let mut ranges: LockRanges = SmallVec::new();
            let mut narrow: SmallVec<[GuestOffset; 32]> = SmallVec::new();
            for same in by_cluster() {
                let at = start(same);
                if needs_cluster(self.cluster(at).await?) {
                    push_range(&mut ranges, at.get(), geo.cluster_size());
                    continue;
                }
                narrow.push(at);
                for (_, part) in same {
                    let size = geo.part_size();
                    let first = part.within - part.within % size;
                    let end = (part.within + part.buf.len() as u64).next_multiple_of(size);
                    push_range(&mut ranges, at.get() + first, end - first);
                }
            }
            let guard = self.ranges.exclusive_many(&ranges).await;
            let mut moved = false;
            for at in narrow {
                moved |= needs_cluster(self.cluster(at).await?);
            }
            if !moved {
                return Ok(guard);
            }
            // A discard came between: the clusters must be allocated after all.
        }
        let mut ranges: LockRanges = SmallVec::new();
        for same in by_cluster() {
            push_range(&mut ranges, start(same).get(), geo.cluster_size());
        }
        Ok(self.ranges.exclusive_many(&ranges).await)
    }

    /// Looks at each cluster again, now that nobody else changes it, and makes sure that its L2 table exists and
    /// may be changed. Parts are sorted by cluster.
    async fn make_jobs(&self, parts: Vec<(u64, Part)>) -> Result<Vec<Job>> {
        let mut jobs: Vec<Job> = Vec::with_capacity(parts.len());
        for (cluster, part) in parts {
            let at = GuestOffset::new(cluster * self.tables.cluster());
            match jobs.last_mut() {
                Some(job) if job.at == at => job.parts.push(part),
                _ => {
                    let (id, _) = self.tables.locate(at);
                    self.ensure_table(id.l1).await?;
                    jobs.push(Job::new(at, self.cluster(at).await?, SmallVec::from([part])));
                }
            }
        }
        Ok(jobs)
    }

    /// Gives each job the host cluster it will write to.
    async fn place_jobs(&self, jobs: &mut [Job]) -> Result<()> {
        if self.has_data_file() {
            // The guest's own offset, where anything may lie that nothing maps.
            jobs.iter_mut().for_each(|j| j.host = HostOffset::new(j.at.get()));
            return Ok(());
        }
        let new = jobs.iter().filter(|j| j.needs_cluster()).count() as u64;
        let mut runs = self.take_clusters(new).await?.into_iter();
        let mut run = runs.next();
        for job in jobs {
            if !job.needs_cluster() {
                job.host = match job.old.entry {
                    L2Entry::Data { host, .. } | L2Entry::Zero { host: Some(host), .. } => host,
                    _ => HostOffset::ZERO,
                };
                continue;
            }
            while run.as_ref().is_some_and(|r| r.clusters == 0) {
                run = runs.next();
            }
            if let Some(r) = run.as_mut() {
                job.host = self.space.offset_of(r.first);
                // Zeroes in the file are not zeroes of an encrypted disk.
                let sparse = self.tables.cluster() > WRITTEN_WHOLE && !self.is_encrypted();
                job.zeroed = r.zeroed && sparse;
                r.first += 1;
                r.clusters -= 1;
            }
        }
        Ok(())
    }

    /// True when two neighbours are not too much for one write.
    fn joins(&self, have: &IoVec, more: &IoVec) -> bool {
        have.segments() + more.segments() <= JOIN_SEGMENTS && have.len() + more.len() <= JOIN_BYTES
    }

    /// Writes all data, sorted by place; neighbours in the file go out as one vectored write.
    async fn write_segments(&self, jobs: &mut [Job], segments: Vec<(u64, usize, IoVec)>) {
        let mut joined: Vec<(u64, IoVec, SmallVec<[usize; 32]>)> = Vec::new();
        for (at, job, buf) in segments {
            match joined.last_mut() {
                Some((first, have, owners))
                    if *first + have.len() as u64 == at
                        && (self.joins(have, &buf) || !at.is_multiple_of(512)) =>
                {
                    have.append(buf);
                    owners.push(job);
                }
                _ => joined.push((at, buf, SmallVec::from_slice(&[job]))),
            }
        }
        let all = joined.into_iter().map(|(at, buf, owners)| async move {
            (owners, self.write_data(HostOffset::new(at), buf).await)
        });
        for (owners, result) in join_all(all).await {
            let Err(e) = result else { continue };
            for owner in owners {
                if let Some(job) = jobs.get_mut(owner) {
                    job.failed.get_or_insert_with(|| e.clone());
                }
            }
        }
    }
}
