//! Runs of free clusters, merged with their neighbours.

use std::collections::BTreeMap;

/// Free clusters that follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FreeRun {
    pub(crate) first: u64,
    pub(crate) clusters: u64,
    /// The space reads as zeroes.
    pub(crate) zeroed: bool,
}

impl FreeRun {
    pub(crate) fn end(self) -> u64 {
        self.first + self.clusters
    }
}

/// All known free clusters below the end of used space.
#[derive(Default, Debug)]
pub(crate) struct FreeMap {
    /// First cluster to (number, zeroed); runs neither overlap nor touch, unless they differ in `zeroed`.
    runs: BTreeMap<u64, (u64, bool)>,
}

impl FreeMap {
    /// Adds a run that is in no other.
    pub(crate) fn insert(&mut self, run: FreeRun) {
        if run.clusters == 0 {
            return;
        }
        let mut run = run;
        if let Some((&first, &(clusters, zeroed))) = self.runs.range(..run.first).next_back()
            && zeroed == run.zeroed
            && first + clusters == run.first
        {
            self.runs.remove(&first);
            run = FreeRun { first, clusters: clusters + run.clusters, zeroed };
        }
        if let Some(&(clusters, zeroed)) = self.runs.get(&run.end())
            && zeroed == run.zeroed
        {
            self.runs.remove(&run.end());
            run.clusters += clusters;
        }
        self.runs.insert(run.first, (run.clusters, run.zeroed));
    }

    /// Takes up to `want` clusters from the lowest run.
    pub(crate) fn take(&mut self, want: u64) -> Option<FreeRun> {
        let (first, (clusters, zeroed)) = self.runs.pop_first()?;
        let n = clusters.min(want);
        if n < clusters {
            self.runs.insert(first + n, (clusters - n, zeroed));
        }
        Some(FreeRun { first, clusters: n, zeroed })
    }

    /// Takes the lowest run of at least `want` clusters, all of it.
    pub(crate) fn take_long(&mut self, want: u64) -> Option<FreeRun> {
        let long = |(_, (clusters, _)): &(&u64, &(u64, bool))| *clusters >= want;
        let (&first, &(clusters, zeroed)) = self.runs.iter().find(long)?;
        self.runs.remove(&first);
        Some(FreeRun { first, clusters, zeroed })
    }

    /// Takes the run that ends at `end`, if there is one.
    pub(crate) fn take_tail(&mut self, end: u64) -> Option<FreeRun> {
        let (&first, &(clusters, zeroed)) = self.runs.last_key_value()?;
        if first + clusters != end {
            return None;
        }
        self.runs.pop_last();
        Some(FreeRun { first, clusters, zeroed })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(first: u64, clusters: u64) -> FreeRun {
        FreeRun { first, clusters, zeroed: false }
    }

    #[test]
    fn neighbours_merge_unless_only_one_is_zeroed() {
        let mut map = FreeMap::default();
        map.insert(run(10, 2));
        map.insert(run(14, 2));
        map.insert(run(12, 2));
        map.insert(FreeRun { zeroed: true, ..run(16, 1) });
        assert_eq!(map.take(100), Some(run(10, 6)));
        assert_eq!(map.take_tail(17), Some(FreeRun { zeroed: true, ..run(16, 1) }));
        assert_eq!(map.take(1), None);
    }

    #[test]
    fn a_long_run_is_the_lowest_that_is_long_enough() {
        let mut map = FreeMap::default();
        map.insert(run(10, 2));
        map.insert(run(20, 8));
        assert_eq!(map.take_long(9), None);
        assert_eq!(map.take_long(3), Some(run(20, 8)));
        assert_eq!(map.take(5), Some(run(10, 2)));
    }

    #[test]
    fn a_part_of_a_run_leaves_the_rest() {
        let mut map = FreeMap::default();
        map.insert(run(10, 8));
        assert_eq!(map.take(3), Some(run(10, 3)));
        assert_eq!(map.take_tail(18), Some(run(13, 5)));
        assert_eq!(map.take(1), None);
    }
}
