//! Where the new generation goes: clusters that the old one does not count.

use super::Generation;
use bedplate_storage::Storage;
use bedplate_types::{ByteLen, Error, ErrorKind, Result};

impl<S: Storage> Generation<'_, S> {
    /// The first of `clusters` clusters in a row that nothing uses. They are not counted yet.
    pub(crate) async fn free_run(&mut self, clusters: u64) -> Result<u64> {
        let mut first = self.scan;
        let mut at = first;
        while at < self.old_end {
            let (index, entry) = self.counts.position(at);
            let counts = self.counts;
            let block = self.old_block(index).await?;
            let free = match &block.bytes {
                None => true,
                Some(bytes) => counts.get(bytes, entry) == Some(0),
            };
            at += 1;
            if !free || self.is_taken(at - 1) {
                first = at;
                if clusters == 1 {
                    self.scan = at;
                }
                continue;
            }
            if at - first == clusters {
                self.check_unused(first, clusters)?;
                if clusters == 1 {
                    self.scan = at;
                } else {
                    self.taken.push((first, clusters));
                }
                return Ok(first);
            }
        }
        // A free tail of the file would do as a start, but hardly ever is there one.
        self.extend(clusters)
    }

    /// Clusters behind everything.
    fn extend(&mut self, clusters: u64) -> Result<u64> {
        let first = self.end;
        let end = first.saturating_add(clusters);
        if end > crate::format::MAX_HOST >> self.geo.cluster_bits() {
            return Err(Error::new(
                ErrorKind::Limit,
                format!(
                    "image '{}' would be longer than the largest file that qcow2 allows",
                    self.image.storage.name()
                ),
            ));
        }
        self.end = end;
        Ok(first)
    }

    /// As [`Self::free_run`], behind the end where the file can grow, so that it reads as zeroes: true then.
    pub(crate) async fn fresh_run(&mut self, clusters: u64) -> Result<(u64, bool)> {
        let first = self.extend(clusters)?;
        let len = self.image.space.offset_of(self.end);
        match self.image.storage.set_len(ByteLen::new(len.get())).await {
            Ok(()) => Ok((first, true)),
            // A device: what lies in it is unknown.
            Err(e) if e.kind() == ErrorKind::Unsupported => {
                self.end = first;
                Ok((self.free_run(clusters).await?, false))
            }
            Err(e) => Err(e),
        }
    }

    fn is_taken(&self, cluster: u64) -> bool {
        self.taken.iter().any(|(first, n)| (*first..first + n).contains(&cluster))
    }

    /// Refuses space that the refcounts call free although metadata lies there.
    fn check_unused(&self, first: u64, clusters: u64) -> Result<()> {
        match self.image.space.metadata_in(first, clusters) {
            None => Ok(()),
            Some(cluster) => Err(self.corrupt(format!(
                "its refcounts call the cluster at {} free, which holds metadata",
                self.image.space.offset_of(cluster)
            ))),
        }
    }
}
