//! Which layer holds which part of a disk, and where: for people and tools that look into chains.

use crate::chain::sector_end;
use crate::disk::Disk;
use crate::layer::Layer;
use bedplate_qcow2::Mapping;
use bedplate_storage::Storage;
use bedplate_types::{ByteLen, GuestOffset, HostOffset, Result};

/// A run of a disk and the layer that it comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapRun {
    /// Length of the run.
    pub len: ByteLen,
    /// The layer: 0 is the top. For what no layer has, the lowest layer that is long enough.
    pub depth: usize,
    /// A layer says something about it.
    pub present: bool,
    /// It is known to read as zeroes.
    pub zero: bool,
    /// Bytes of the storage of the layer's data belong to it.
    pub data: bool,
    /// It is compressed.
    pub compressed: bool,
    /// Where it starts in the storage of the layer's data.
    pub offset: Option<HostOffset>,
}

impl MapRun {
    fn of(len: ByteLen, depth: usize) -> Self {
        Self {
            len,
            depth,
            present: false,
            zero: false,
            data: false,
            compressed: false,
            offset: None,
        }
    }
}

impl<S: Storage> Disk<S> {
    /// Refuses images that name a table of theirs many times over, before all of a disk is looked through.
    ///
    /// # Errors
    /// `Corrupt`.
    pub fn refuse_shared_tables(&self) -> Result<()> {
        self.chain().layers.iter().try_for_each(|layer| match layer {
            Layer::Qcow2(image) => image.refuse_shared_tables(),
            _ => Ok(()),
        })
    }

    /// The run that starts at `at`, at most `len` bytes long and never empty for a non-empty `len`.
    ///
    /// # Errors
    /// `OutOfRange`, or what reading the metadata gives.
    pub async fn map_run(&self, at: GuestOffset, len: ByteLen) -> Result<MapRun> {
        self.check(at, len)?;
        let _inside = self.enter().await;
        let mut run = MapRun::of(len, 0);
        for (depth, layer) in self.chain().layers.iter().enumerate() {
            let size = sector_end(layer.size());
            let room = match size.checked_sub(ByteLen::new(at.get())) {
                Some(room) if room > ByteLen::ZERO => room,
                _ => break,
            };
            run.depth = depth;
            run.len = run.len.min(room);
            match layer {
                Layer::Null(_) => break,
                Layer::Raw(storage) => {
                    let here = HostOffset::new(at.get());
                    let extent = storage.extent(here, run.len).await?;
                    let (zero, len) = (!extent.data, extent.len.min(run.len));
                    let offset = Some(here);
                    return Ok(MapRun { len, present: true, zero, data: !zero, offset, ..run });
                }
                Layer::Qcow2(image) => match image.map(at, run.len).await? {
                    Mapping::Unallocated { len } => run.len = len,
                    Mapping::Zero { len, .. } => {
                        return Ok(MapRun { len, present: true, zero: true, ..run });
                    }
                    Mapping::Data { host, len, .. } => {
                        // A cluster can lie in a hole of its file.
                        let extent = image.data_storage().extent(host, len).await?;
                        let zero = !extent.data && !image.is_encrypted();
                        let len = extent.len.min(len);
                        let offset = Some(host);
                        return Ok(MapRun { len, present: true, zero, data: true, offset, ..run });
                    }
                    Mapping::Compressed { len, .. } => {
                        let run = MapRun { len, present: true, data: true, ..run };
                        return Ok(MapRun { compressed: true, ..run });
                    }
                },
            }
        }
        Ok(MapRun { zero: true, ..run })
    }
}
