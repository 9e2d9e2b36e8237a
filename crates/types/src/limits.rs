//! Every limit of the program in one place; `--help` and the documentation quote these.

/// Virtqueues of one vhost-user export.
pub const MAX_QUEUES: usize = 64;
/// Entries of one virtqueue (virtio 1.2, 2.7: at most 32768; front ends use at most 1024).
pub const MAX_QUEUE_SIZE: u16 = 1024;
/// Data segments of one virtio-blk request that the export announces (`seg_max`).
pub const MAX_SEGMENTS: usize = 254;
/// Sectors of one discard or write-zeroes segment that the export announces.
pub const MAX_DISCARD_SECTORS: u32 = u32::MAX >> 9;
/// Segments of one discard or write-zeroes request that the export announces.
pub const MAX_DISCARD_SEGMENTS: u32 = 16;
/// Guest memory regions of one session.
pub const MAX_MEMORY_SLOTS: usize = 509;
/// Layers of one backing chain.
pub const MAX_CHAIN_DEPTH: usize = 64;
/// Bytes of a qcow2 L1 table (as QEMU).
pub const MAX_L1_BYTES: u64 = 32 << 20;
/// Bytes of a qcow2 refcount table (as QEMU).
pub const MAX_REFTABLE_BYTES: u64 = 8 << 20;
/// Internal snapshots of one image (as QEMU).
pub const MAX_SNAPSHOTS: u32 = 65536;
/// Bytes of a qcow2 snapshot table (as QEMU).
pub const MAX_SNAPSHOT_TABLE_BYTES: u64 = 1024 * MAX_SNAPSHOTS as u64;
/// Extra data bytes of one snapshot entry (as QEMU).
pub const MAX_SNAPSHOT_EXTRA_BYTES: u32 = 1024;
/// Bytes of all bitmaps that are kept up to date in memory while an image is written.
pub const MAX_BITMAP_BYTES: u64 = 256 << 20;
/// Bytes of a backing file name (qcow2 specification).
pub const MAX_BACKING_NAME: u32 = 1023;
/// Bytes of qcow2 metadata kept in memory for mapping (L2 slices), by default.
pub const DEFAULT_L2_CACHE_BYTES: u64 = 128 << 20;
/// Bytes of refcount blocks kept in memory, by default.
pub const DEFAULT_REFCOUNT_CACHE_BYTES: u64 = 32 << 20;
/// NBD connections to one server.
pub const MAX_NBD_CLIENTS: usize = 64;
/// Bytes of one NBD option's payload.
pub const MAX_NBD_OPTION: u32 = 64 << 10;
/// Bytes of an NBD export name (NBD protocol, "Values").
pub const MAX_NBD_STRING: u32 = 4096;
/// Bytes of one NBD read or write.
pub const MAX_NBD_REQUEST: u32 = 32 << 20;
/// Requests of one NBD connection under way at once.
pub const MAX_NBD_IN_FLIGHT: usize = 128;
/// Seconds an NBD client may take to negotiate.
pub const NBD_HANDSHAKE_SECONDS: u64 = 10;
/// Bytes of a LUKS header with its key material. Eight keys take 2 MiB.
pub const MAX_LUKS_BYTES: u64 = 16 << 20;
/// Rounds of key derivation that one image may ask for, over all its keys: some 20 seconds.
pub const MAX_LUKS_ITERATIONS: u64 = 1 << 27;
/// Bytes of a passphrase.
pub const MAX_PASSPHRASE_BYTES: usize = 64 << 10;
/// Passphrases given to one command, each of which is tried on every encrypted image of a chain.
pub const MAX_PASSPHRASES: usize = 8;
