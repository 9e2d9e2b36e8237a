//! Reading compressed clusters.

use crate::format::decompress;
use crate::image::Qcow2;
use crate::mapping::CompressedCluster;
use bedplate_runtime::buf::{IoVec, SharedBuf};
use bedplate_storage::Storage;
use bedplate_types::{ByteLen, Error, ErrorKind, HostOffset, Result};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

/// Clusters kept in memory after they were decompressed, so that small reads in a row unpack each once.
const KEPT: usize = 16;

/// Decompressed clusters, latest last. A short mutex; the content of a place never changes while it is mapped, and
/// is forgotten before something else is mapped there.
#[derive(Default)]
pub(crate) struct Unpacked(Mutex<VecDeque<(CompressedCluster, Arc<Vec<u8>>)>>);

impl Unpacked {
    fn get(&self, cluster: &CompressedCluster) -> Option<Arc<Vec<u8>>> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.iter().find(|(c, _)| c == cluster).map(|(_, bytes)| bytes.clone())
    }

    /// Forgets everything: places are about to hold something else.
    pub(crate) fn clear(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Forgets what lay at these places before.
    pub(crate) fn forget(&self, places: &[HostOffset]) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|(c, _)| !places.contains(&c.host));
    }

    fn put(&self, cluster: CompressedCluster, bytes: Arc<Vec<u8>>) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() >= KEPT {
            kept.pop_front();
        }
        kept.push_back((cluster, bytes));
    }
}

impl<S: Storage> Qcow2<S> {
    /// Fills `buf` from `within` bytes into a compressed cluster's content.
    ///
    /// # Errors
    /// `Corrupt` when the data can't be decompressed, or what the storage reports.
    pub async fn read_compressed(
        &self,
        cluster: &CompressedCluster,
        within: ByteLen,
        buf: &IoVec,
    ) -> Result<()> {
        let bytes = self.decompress(cluster).await?;
        let start = within.to_usize().unwrap_or(usize::MAX);
        let part = start.checked_add(buf.len()).and_then(|end| bytes.get(start..end));
        match part {
            Some(part) => {
                buf.copy_from(0, part);
                Ok(())
            }
            None => Err(Error::new(ErrorKind::OutOfRange, "a read leaves its compressed cluster")),
        }
    }

    /// The whole content of a compressed cluster.
    pub(crate) async fn decompress(&self, cluster: &CompressedCluster) -> Result<Arc<Vec<u8>>> {
        if let Some(bytes) = self.unpacked.get(cluster) {
            return Ok(bytes);
        }
        let len = cluster.len.to_usize().unwrap_or(0);
        let buf = SharedBuf::zeroed(len)?;
        self.storage.read(cluster.host, buf.iovec()).await?;
        let packed = buf.into_buf()?;
        let kind = self.header().compression_type;
        let mut bytes = vec![0; self.tables.cluster() as usize];
        decompress(kind, &packed, &mut bytes).map_err(|e| {
            e.context(format!(
                "image '{}' is corrupt: the compressed cluster at {} can't be unpacked",
                self.storage.name(),
                cluster.host
            ))
        })?;
        let bytes = Arc::new(bytes);
        self.unpacked.put(*cluster, bytes.clone());
        Ok(bytes)
    }
}
