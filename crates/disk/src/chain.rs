//! Reading through the layers: for each piece of a range, the topmost layer that has it.

use crate::layer::Layer;
use bedplate_qcow2::{Below, CompressedCluster, Mapping};
use bedplate_runtime::buf::IoVec;
use bedplate_storage::Storage;
use bedplate_types::{ByteLen, GuestOffset, HostOffset, Result};
use futures_util::stream::{FuturesUnordered, StreamExt};
use smallvec::SmallVec;
use std::sync::Arc;

/// Pieces of one request that are read at the same time.
const PARALLEL: usize = 32;

/// The layers of a disk, top first.
pub(crate) struct Chain<S: Storage> {
    pub(crate) layers: Vec<Layer<S>>,
}

/// Where a piece of a range comes from.
pub(crate) enum Source {
    /// It reads as zeroes; `allocated` when space is kept for it.
    Zero { allocated: bool },
    /// Bytes of the layer's file, or its external data file.
    Data { layer: usize, at: HostOffset },
    /// Inside a compressed cluster of the layer.
    Compressed { layer: usize, cluster: CompressedCluster, within: ByteLen },
}

pub(crate) struct Piece {
    pub(crate) source: Source,
    pub(crate) len: ByteLen,
}

impl<S: Storage> Chain<S> {
    /// The first piece of the range as seen from layer `from` down. Never empty for a non-empty range.
    pub(crate) async fn piece(&self, from: usize, at: GuestOffset, len: ByteLen) -> Result<Piece> {
        let mut len = len;
        for (index, layer) in self.layers.iter().enumerate().skip(from) {
            // Past the end of a layer nothing below it shows through.
            let Some(room) = sector_end(layer.size()).checked_sub(ByteLen::new(at.get())) else {
                break;
            };
            if room == ByteLen::ZERO {
                break;
            }
            len = len.min(room);
            match layer {
                Layer::Null(_) => break,
                Layer::Raw(_) => {
                    let source = Source::Data { layer: index, at: HostOffset::new(at.get()) };
                    return Ok(Piece { source, len });
                }
                Layer::Qcow2(image) => match image.map(at, len).await? {
                    Mapping::Unallocated { len: run } => len = run,
                    Mapping::Zero { len, allocated } => {
                        return Ok(Piece { source: Source::Zero { allocated }, len });
                    }
                    Mapping::Data { host, len, .. } => {
                        return Ok(Piece { source: Source::Data { layer: index, at: host }, len });
                    }
                    Mapping::Compressed { cluster, within, len } => {
                        let source = Source::Compressed { layer: index, cluster, within };
                        return Ok(Piece { source, len });
                    }
                },
            }
        }
        Ok(Piece { source: Source::Zero { allocated: false }, len })
    }

    /// Fills `buf` with what layer `from` and those below hold at `at`.
    pub(crate) async fn read(&self, from: usize, at: GuestOffset, buf: IoVec) -> Result<()> {
        let mut pieces: SmallVec<[(Source, IoVec); 4]> = SmallVec::new();
        let mut done = 0;
        while done < buf.len() {
            let here = GuestOffset::new(at.get() + done as u64);
            let piece = self.piece(from, here, ByteLen::from(buf.len() - done)).await?;
            let n = piece.len.get() as usize;
            match piece.source {
                Source::Zero { .. } => buf.fill(done, n, 0),
                source => pieces.push((source, buf.slice(done, n))),
            }
            done += n;
        }
        if pieces.len() == 1
            && let Some((source, part)) = pieces.pop()
        {
            return self.fetch(source, part).await;
        }
        let mut left = pieces.into_iter();
        let mut running = FuturesUnordered::new();
        let mut failed = Ok(());
        loop {
            while running.len() < PARALLEL
                && let Some((source, part)) = left.next()
            {
                running.push(self.fetch(source, part));
            }
            match running.next().await {
                Some(Ok(())) => {}
                // What is under way runs to its end, since its memory is the caller's.
                Some(Err(e)) => failed = Err(e),
                None => return failed,
            }
        }
    }

    async fn fetch(&self, source: Source, part: IoVec) -> Result<()> {
        match source {
            Source::Zero { .. } => part.fill(0, part.len(), 0),
            Source::Data { layer, at } => match self.layers.get(layer) {
                Some(Layer::Raw(storage)) => return storage.read(at, part).await,
                Some(Layer::Qcow2(image)) => return image.read_data(at, part).await,
                Some(Layer::Null(_)) | None => {}
            },
            Source::Compressed { layer, cluster, within } => {
                if let Some(Layer::Qcow2(image)) = self.layers.get(layer) {
                    return image.read_compressed(&cluster, within, &part).await;
                }
            }
        }
        Ok(())
    }
}

/// A size rounded up to whole 512-byte sectors, as guests see it.
pub(crate) fn sector_end(size: ByteLen) -> ByteLen {
    size.align_up(512).unwrap_or(size)
}

/// What lies under the top layer, for copy-on-write.
pub(crate) struct Under<S: Storage>(pub(crate) Arc<Chain<S>>);

impl<S: Storage> Below for Under<S> {
    fn is_empty(&self) -> bool {
        self.0.layers.len() < 2
    }

    async fn read(&self, at: GuestOffset, buf: IoVec) -> Result<()> {
        self.0.read(1, at, buf).await
    }

    async fn zero_run(&self, at: GuestOffset, len: ByteLen) -> Result<(bool, ByteLen)> {
        let piece = self.0.piece(1, at, len).await?;
        Ok((matches!(piece.source, Source::Zero { .. }), piece.len))
    }
}
