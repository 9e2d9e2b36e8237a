//! The qcow2 format as bytes: parsing and encoding, without any I/O.
//!
//! Callers: the engine and the checker of this crate, and `image`. Everything here is pure and takes
//! untrusted bytes: every bound is checked before it is used to index, allocate or loop, and nothing panics.
//! Written from the public qcow2 specification.

mod bitmap;
mod bytes;
mod compress;
mod entry;
mod features;
mod geometry;
mod header;
mod layout;
mod luks;
mod refcount;
mod snapshot;
mod subcluster;
#[cfg(test)]
mod tests;

pub use bitmap::{Bitmap, BitmapExtension, MAX_BITMAP_NAME, MAX_BITMAP_TABLE, MAX_BITMAPS};
pub use bytes::printable;
pub use compress::{Compressor, decompress};
pub use entry::{
    COMPRESSED, COPIED, EntryCodec, EntryError, L1Entry, L2Entry, MAX_HOST, OFFSET_MASK, ZERO,
};
pub use features::{
    FeatureName, FeatureSet, autoclear, check_checkable, check_supported, compat,
    encode_feature_names, incompat, incompatible_names, parse_feature_names,
};
pub use geometry::{ENTRY_BYTES, Geometry, MAX_CLUSTER_BITS, MIN_CLUSTER_BITS};
pub use header::{
    BackingFile, CompressionType, EXT_BACKING_FORMAT, EXT_BITMAPS, EXT_DATA_FILE, EXT_ENCRYPTION,
    EXT_END, EXT_FEATURE_NAMES, Extension, Header, MAGIC, V2_HEADER_BYTES, V3_FULL_HEADER_BYTES,
    V3_HEADER_BYTES, field,
};
pub use layout::{Layout, LuksArea, NewImage};
pub use luks::{
    LUKS_DIGEST_BYTES, LUKS_HEADER_BYTES, LUKS_SALT_BYTES, LUKS_SLOTS, LUKS_STRIPES, LuksCipher,
    LuksHash, LuksHeader, LuksIv, LuksSlot, LuksSuite, luks_place,
};
pub use refcount::{MAX_REFCOUNT_ORDER, RefcountError, RefcountFormat};
/// Bytes of a snapshot table entry before its variable parts.
pub use snapshot::FIXED_BYTES as SNAPSHOT_FIXED_BYTES;
pub use snapshot::{MAX_ENTRY_BYTES, Snapshot, parse_table};
pub use subcluster::{Cluster, SUBCLUSTERS, SubMap};
