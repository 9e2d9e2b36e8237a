//! Which parts of a disk hold data.

use crate::chain::Source;
use crate::disk::Disk;
use crate::layer::Layer;
use bedplate_storage::Storage;
use bedplate_types::{ByteLen, GuestOffset, Result};

/// A run of a disk that is of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockStatus {
    /// Length of the run.
    pub len: ByteLen,
    /// No space is allocated for it.
    pub hole: bool,
    /// It is known to read as zeroes.
    pub zero: bool,
}

impl<S: Storage> Disk<S> {
    /// The kinds of the runs that start at `at`, up to `len` bytes or `max` runs, whichever comes first.
    ///
    /// # Errors
    /// `OutOfRange`, or what reading the metadata gives.
    pub async fn block_status(
        &self,
        at: GuestOffset,
        len: ByteLen,
        max: usize,
    ) -> Result<Vec<BlockStatus>> {
        self.check(at, len)?;
        let mut runs: Vec<BlockStatus> = Vec::new();
        let mut done = 0;
        while done < len.get() {
            let here = GuestOffset::new(at.get() + done);
            let run = self.status_run(here, ByteLen::new(len.get() - done)).await?;
            done += run.len.get();
            let joins = runs.last().is_some_and(|r| (r.hole, r.zero) == (run.hole, run.zero));
            if let Some(last) = runs.last_mut().filter(|_| joins) {
                last.len = ByteLen::new(last.len.get() + run.len.get());
            } else if runs.len() < max {
                runs.push(run);
            } else {
                break;
            }
        }
        Ok(runs)
    }

    async fn status_run(&self, at: GuestOffset, len: ByteLen) -> Result<BlockStatus> {
        let _inside = self.enter().await;
        let piece = self.chain().piece(0, at, len).await?;
        Ok(match piece.source {
            Source::Zero { allocated } => {
                BlockStatus { len: piece.len, hole: !allocated, zero: true }
            }
            Source::Compressed { .. } => BlockStatus { len: piece.len, hole: false, zero: false },
            Source::Data { layer, at } => match self.chain().layers.get(layer) {
                Some(Layer::Raw(storage)) => {
                    let extent = storage.extent(at, piece.len).await?;
                    let len = extent.len.min(piece.len);
                    BlockStatus { len, hole: !extent.data, zero: !extent.data }
                }
                _ => BlockStatus { len: piece.len, hole: false, zero: false },
            },
        })
    }
}
