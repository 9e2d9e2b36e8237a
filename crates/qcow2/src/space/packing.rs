//! Where compressed data goes: one piece behind the other, over as many clusters as follow each other in the file.
//!
//! Caller: [`crate::pack`]. Each piece is one reference to each cluster that it touches. [`State::packing`] names the
//! cluster whose end is still unused; it has references, and stops to be the one before its last is taken away, so
//! that it can't be freed while something is packed into it.

use super::{FreeRun, Space, State};
use crate::image::Qcow2;
use bedplate_storage::Storage;
use bedplate_types::{HostOffset, Result};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

/// A cluster with room for more compressed data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packing {
    pub(crate) cluster: u64,
    /// The first unused byte, as an offset in the file.
    pub(crate) next: u64,
}

/// Places for pieces, before anything is written.
pub(crate) struct Layout {
    cluster: u64,
    /// References that a cluster can have.
    most: u64,
    /// Unused bytes of the file, in the order in which they are used. Each ends at a cluster's end.
    room: VecDeque<Range<u64>>,
    /// References of each cluster that has some: those it had, and those of pieces placed here.
    references: BTreeMap<u64, u64>,
    /// Where the last piece ends.
    end: u64,
}

impl Layout {
    /// Begins in `open`, which has `references`.
    pub(crate) fn new(cluster: u64, most: u64, open: Option<(Packing, u64)>) -> Self {
        let mut layout =
            Self { cluster, most, room: VecDeque::new(), references: BTreeMap::new(), end: 0 };
        if let Some((open, references)) = open {
            layout.room.push_back(open.next..(open.cluster + 1).saturating_mul(cluster));
            layout.references.insert(open.cluster, references);
        }
        layout
    }

    /// Adds free clusters.
    pub(crate) fn add(&mut self, run: FreeRun) {
        let bytes = run.first * self.cluster..run.end() * self.cluster;
        match self.room.back_mut() {
            Some(last) if last.end == bytes.start => last.end = bytes.end,
            _ => self.room.push_back(bytes),
        }
    }

    /// A place for `len` bytes, less than a cluster; `None` when more clusters must be added first.
    pub(crate) fn place(&mut self, len: u64) -> Option<HostOffset> {
        loop {
            let room = self.room.front_mut()?;
            let first = room.start / self.cluster;
            // A cluster that can't be referred to once more is full.
            if self.references.get(&first).is_some_and(|n| *n >= self.most) {
                room.start = ((first + 1) * self.cluster).min(room.end);
            }
            let start = room.start;
            if room.end - start >= len {
                self.end = start + len;
                room.start = self.end;
                for cluster in start / self.cluster..=(self.end - 1) / self.cluster {
                    *self.references.entry(cluster).or_insert(0) += 1;
                }
                return Some(HostOffset::new(start));
            }
            if self.room.len() == 1 {
                return None;
            }
            self.room.pop_front();
        }
    }

    /// References that `cluster` has with the pieces placed here.
    pub(crate) fn references(&self, cluster: u64) -> u64 {
        self.references.get(&cluster).copied().unwrap_or(0)
    }

    /// Clusters that `len` more bytes in `pieces` may need.
    pub(crate) fn clusters_for(&self, len: u64, pieces: u64) -> u64 {
        len.div_ceil(self.cluster).max(pieces.div_ceil(self.most)).max(1)
    }

    /// The cluster that the last piece left unused space in.
    pub(crate) fn open(&self) -> Option<Packing> {
        let cluster = self.end / self.cluster;
        (!self.end.is_multiple_of(self.cluster)).then_some(Packing { cluster, next: self.end })
    }
}

impl Space {
    /// Takes a reference to the cluster that is being packed into, so that it stays; returns how many it had.
    fn hold(&self, state: &mut State) -> Held {
        let Some(open) = state.packing else { return Held::Nothing };
        match self.count(state, open.cluster) {
            None => Held::Load(self.counts.position(open.cluster).0),
            Some(count) if count > 0 && count < self.counts.max() => {
                match self.set_count(state, open.cluster, count + 1) {
                    Ok(()) => Held::Open(open, count),
                    Err(_) => Held::Nothing,
                }
            }
            Some(_) => {
                state.packing = None;
                Held::Nothing
            }
        }
    }
}

enum Held {
    Nothing,
    Open(Packing, u64),
    Load(u64),
}

impl<S: Storage> Qcow2<S> {
    /// The cluster that is being packed into and the references it had, held by one more: to be given back by
    /// [`Self::count_packed`] or [`Self::release_packing`].
    ///
    /// # Errors
    /// What loading a refcount block reports.
    pub(crate) async fn hold_packing(&self) -> Result<Option<(Packing, u64)>> {
        loop {
            let held = self.space.hold(&mut self.space.state());
            match held {
                Held::Nothing => return Ok(None),
                Held::Open(open, count) => return Ok(Some((open, count))),
                Held::Load(index) => self.load_block(index).await?,
            }
        }
    }

    /// Gives the hold back without having packed anything.
    pub(crate) async fn release_packing(&self, open: Packing) -> Result<()> {
        self.release_durable(vec![open.cluster]).await
    }

    /// Counts what `layout` has placed: in the cluster that was `held`, and in clusters taken from a lease, `fresh`. Those
    /// that were not needed go back. The cluster with room left is the next to be packed into.
    ///
    /// # Errors
    /// What loading a refcount block reports.
    pub(crate) async fn count_packed(
        &self,
        layout: &Layout,
        held: Option<(Packing, u64)>,
        fresh: &[FreeRun],
    ) -> Result<()> {
        if let Some((open, before)) = held {
            let pieces = layout.references(open.cluster) - before;
            if pieces == 0 {
                self.release_packing(open).await?;
            } else {
                self.raise(open.cluster, pieces - 1).await?;
            }
        }
        let mut unused = Vec::new();
        {
            let mut state = self.space.state();
            for run in fresh {
                for cluster in run.first..run.end() {
                    match layout.references(cluster) {
                        0 => unused.push(FreeRun { first: cluster, clusters: 1, ..*run }),
                        references => {
                            self.space.set_count(&mut state, cluster, references)?;
                            self.space.unpin(&mut state, cluster, 1);
                        }
                    }
                }
            }
            state.packing = layout.open();
        }
        // The lowest is taken first again.
        unused.into_iter().rev().for_each(|run| self.give_back(run));
        Ok(())
    }

    /// Adds references to a cluster that has some.
    async fn raise(&self, cluster: u64, references: u64) -> Result<()> {
        let (index, _) = self.space.counts.position(cluster);
        loop {
            {
                let mut state = self.space.state();
                if let Some(count) = self.space.count(&state, cluster) {
                    let count = count.saturating_add(references);
                    return self.space.set_count(&mut state, cluster, count);
                }
            }
            self.load_block(index).await?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(first: u64, clusters: u64) -> FreeRun {
        FreeRun { first, clusters, zeroed: true }
    }

    fn at(place: Option<HostOffset>) -> Option<u64> {
        place.map(HostOffset::get)
    }

    #[test]
    fn pieces_follow_each_other_across_clusters_that_do() {
        let open = Packing { cluster: 4, next: 4900 };
        let mut layout = Layout::new(1000, 100, Some((open, 3)));
        assert_eq!(at(layout.place(90)), Some(4900));
        assert_eq!(layout.place(20), None);
        layout.add(run(5, 2));
        assert_eq!(at(layout.place(20)), Some(4990));
        assert_eq!(at(layout.place(990)), Some(5010));
        assert_eq!((layout.references(4), layout.references(5), layout.references(6)), (5, 2, 0));
        assert_eq!(layout.open(), None, "the last one ends with its cluster");
        assert_eq!(at(layout.place(1)), Some(6000));
        assert_eq!(layout.open(), Some(Packing { cluster: 6, next: 6001 }));
    }

    #[test]
    fn what_does_not_fit_begins_in_the_next_run() {
        let open = Packing { cluster: 4, next: 4900 };
        let mut layout = Layout::new(1000, 100, Some((open, 1)));
        layout.add(run(8, 1));
        assert_eq!(at(layout.place(101)), Some(8000));
        assert_eq!((layout.references(4), layout.references(8)), (1, 1));
        assert_eq!(layout.place(900), None);
    }

    #[test]
    fn no_cluster_gets_more_references_than_can_be_counted() {
        let mut layout = Layout::new(1000, 1, None);
        layout.add(run(8, 3));
        assert_eq!(at(layout.place(10)), Some(8000));
        assert_eq!(at(layout.place(10)), Some(9000));
        assert_eq!(layout.clusters_for(20, 2), 2);
        let mut layout = Layout::new(1000, 3, Some((Packing { cluster: 7, next: 7100 }, 2)));
        layout.add(run(8, 1));
        assert_eq!(at(layout.place(100)), Some(7100));
        assert_eq!(at(layout.place(100)), Some(8000), "there are three in cluster 7 now");
    }
}
