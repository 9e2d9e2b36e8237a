//! Writing: in place where the mapping allows it, else into clusters from this thread's lease.
//!
//! A batch is planned as one. Data is written before any mapping is changed ([`crate::commit`]), so a failed write
//! leaves the image as it was.

use crate::below::Below;
use crate::cow::{Job, Part, Segment};
use crate::format::L2Entry;
use crate::image::Qcow2;
use crate::mapping::Mapping;
use bedplate_runtime::buf::IoVec;
use bedplate_storage::Storage;
use bedplate_types::{ByteLen, Error, GuestOffset, HostOffset, Result};
use futures_util::future::join_all;
use std::collections::BTreeMap;

/// Segments and bytes of one vectored write, at most.
const JOIN_SEGMENTS: usize = 512;
const JOIN_BYTES: usize = 4 << 20;

/// A new cluster of up to this many bytes is written whole, zeroes around the data. That costs bandwidth once, and saves
/// the file system from converting space piece by piece at every first write (`docs/architecture.md`, "Space").
const WRITTEN_WHOLE: u64 = 64 << 10;

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
        let mut outcome = Outcome(writes.iter().map(|_| self.check_writable()).collect());
        if outcome.0.iter().any(Result::is_err) {
            return outcome.0;
        }
        // Host space found by the look-ups stays in place until all in-place writes have ended.
        let _pin = self.epochs.guard();
        let mut in_place = Vec::new();
        let mut clusters: BTreeMap<u64, Vec<Part>> = BTreeMap::new();
        for (write, (at, buf)) in writes.iter().enumerate() {
            if let Err(e) = self.sort_out(write, *at, buf, &mut in_place, &mut clusters).await {
                outcome.fail(write, &e);
            }
        }
        let direct =
            join_all(in_place.into_iter().map(|(write, host, buf)| async move {
                (write, self.storage.write(host, buf).await)
            }));
        let (direct, allocated) =
            futures_util::future::join(direct, self.write_allocating(below, clusters)).await;
        for (write, result) in direct.into_iter().chain(allocated) {
            if let Err(e) = result {
                outcome.fail(write, &e);
            }
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
        clusters: &mut BTreeMap<u64, Vec<Part>>,
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
                    clusters.entry(here.get() / self.tables.cluster()).or_default().push(part);
                    n
                }
            };
            done += n as usize;
        }
        Ok(())
    }

    /// Writes parts whose clusters need a new mapping. Returns a result for each part's write.
    async fn write_allocating<B: Below>(
        &self,
        below: &B,
        clusters: BTreeMap<u64, Vec<Part>>,
    ) -> Vec<(usize, Result<()>)> {
        if clusters.is_empty() {
            return Vec::new();
        }
        let writes: Vec<usize> = clusters.values().flatten().map(|p| p.write).collect();
        let all = |e: &Error| writes.iter().map(|w| (*w, Err(e.clone()))).collect();
        let _range = self.ranges.exclusive_many(&self.lock_ranges(clusters.keys().copied())).await;
        let mut jobs = match self.make_jobs(clusters).await {
            Ok(jobs) => jobs,
            Err(e) => return all(&e),
        };
        if let Err(e) = self.place_jobs(&mut jobs).await {
            return all(&e);
        }
        let composed = join_all(jobs.iter().map(|job| self.compose(below, job))).await;
        let mut segments = Vec::new();
        for (index, result) in composed.into_iter().enumerate() {
            match (result, jobs.get_mut(index)) {
                (Ok(parts), Some(job)) => {
                    segments.extend(parts.into_iter().map(|s| (index, job.host, s)))
                }
                (Err(e), Some(job)) => job.failed = Some(e),
                (_, None) => {}
            }
        }
        self.write_segments(&mut jobs, segments).await;
        self.commit(&mut jobs).await;
        let mut results = Vec::new();
        for job in &jobs {
            for part in &job.parts {
                results.push((part.write, job.failed.clone().map_or(Ok(()), Err)));
            }
        }
        results
    }

    /// Byte ranges for the range lock, neighbours joined.
    pub(crate) fn lock_ranges(&self, clusters: impl Iterator<Item = u64>) -> Vec<(u64, u64)> {
        let size = self.tables.cluster();
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        for cluster in clusters {
            let start = cluster * size;
            match ranges.last_mut() {
                Some((first, len)) if *first + *len == start => *len += size,
                _ => ranges.push((start, size)),
            }
        }
        ranges
    }

    /// Looks at each cluster again, now that nobody else changes it, and makes sure that its L2 table exists and
    /// may be changed.
    async fn make_jobs(&self, clusters: BTreeMap<u64, Vec<Part>>) -> Result<Vec<Job>> {
        let mut jobs = Vec::with_capacity(clusters.len());
        for (cluster, parts) in clusters {
            let at = GuestOffset::new(cluster * self.tables.cluster());
            let (id, _) = self.tables.locate(at);
            self.ensure_table(id.l1).await?;
            jobs.push(Job::new(at, self.entry(at).await?, parts));
        }
        Ok(jobs)
    }

    /// Gives each job the host cluster it will write to.
    async fn place_jobs(&self, jobs: &mut [Job]) -> Result<()> {
        let new = jobs.iter().filter(|j| j.needs_cluster()).count() as u64;
        let mut runs = self.take_clusters(new).await?.into_iter();
        let mut run = runs.next();
        for job in jobs {
            if !job.needs_cluster() {
                job.host = match job.old {
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
                job.zeroed = r.zeroed && self.tables.cluster() > WRITTEN_WHOLE;
                r.first += 1;
                r.clusters -= 1;
            }
        }
        Ok(())
    }

    /// Writes all data; neighbours in the file go out as one vectored write.
    async fn write_segments(&self, jobs: &mut [Job], segments: Vec<(usize, HostOffset, Segment)>) {
        let mut sorted: Vec<(u64, usize, IoVec)> = segments
            .into_iter()
            .map(|(job, host, s)| (host.get().saturating_add(s.within), job, s.buf))
            .collect();
        sorted.sort_by_key(|(at, ..)| *at);
        let mut joined: Vec<(u64, IoVec, Vec<usize>)> = Vec::new();
        for (at, job, buf) in sorted {
            match joined.last_mut() {
                Some((first, have, owners))
                    if *first + have.len() as u64 == at
                        && have.segments() + buf.segments() <= JOIN_SEGMENTS
                        && have.len() + buf.len() <= JOIN_BYTES =>
                {
                    have.append(buf);
                    owners.push(job);
                }
                _ => joined.push((at, buf, vec![job])),
            }
        }
        let all = joined.into_iter().map(|(at, buf, owners)| async move {
            (owners, self.storage.write(HostOffset::new(at), buf).await)
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
