//! One layer of a disk: an image in a format, or nothing at all.

use bedplate_qcow2::Qcow2;
use bedplate_storage::Storage;
use bedplate_types::{ByteLen, Result};
use std::sync::Arc;

/// One image of a chain.
pub enum Layer<S: Storage> {
    /// A disk that costs nothing: reads give zeroes (or leave memory as it is, on the hot path), writes vanish.
    Null(ByteLen),
    /// The disk's bytes as they are.
    Raw(Arc<S>),
    /// A qcow2 image.
    Qcow2(Arc<Qcow2<S>>),
}

impl<S: Storage> Layer<S> {
    /// The size of the disk that this layer describes.
    pub fn size(&self) -> ByteLen {
        match self {
            Self::Null(size) => *size,
            Self::Raw(storage) => storage.len(),
            Self::Qcow2(image) => image.size(),
        }
    }

    /// The file or device that is the layer's image.
    pub fn storage(&self) -> Option<&S> {
        match self {
            Self::Null(_) => None,
            Self::Raw(storage) => Some(storage),
            Self::Qcow2(image) => Some(image.storage()),
        }
    }

    /// True when the layer can't be written.
    pub fn read_only(&self) -> bool {
        match self {
            Self::Null(_) => false,
            Self::Raw(storage) => storage.read_only(),
            Self::Qcow2(image) => image.read_only(),
        }
    }

    /// Makes all completed writes durable.
    pub(crate) async fn flush(&self) -> Result<()> {
        match self {
            Self::Null(_) => Ok(()),
            Self::Raw(storage) => storage.sync().await,
            Self::Qcow2(image) => image.flush().await,
        }
    }
}
