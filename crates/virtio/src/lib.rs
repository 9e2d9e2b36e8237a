//! Virtqueues over guest memory, and virtio-blk requests. Knows no sockets and does no I/O.
//!
//! Callers: `bedplate-vhost-user`, whose queue threads pop chains here and complete them.
//!
//! Invariants: everything in guest memory is read once into a local copy before it is judged, since the guest may
//! change it at any moment; no index, length or address of a guest is used before it was checked; and every chain
//! that was taken is given back exactly once ([`split::Head`]).

pub mod blk;
pub mod config;
pub mod driver;
pub mod inflight;
pub mod memory;
pub mod split;
pub mod vanish;

pub use libc::iovec;

/// Feature bits and numbers of virtio 1.2, named as in the specification.
pub mod spec {
    /// Device is read-only.
    pub const BLK_F_RO: u64 = 1 << 5;
    /// Maximum size of one segment is in `size_max`.
    pub const BLK_F_SIZE_MAX: u64 = 1 << 1;
    /// Maximum number of segments is in `seg_max`.
    pub const BLK_F_SEG_MAX: u64 = 1 << 2;
    /// Block size is in `blk_size`.
    pub const BLK_F_BLK_SIZE: u64 = 1 << 6;
    /// Flush requests.
    pub const BLK_F_FLUSH: u64 = 1 << 9;
    /// Optimal alignment is in `topology`.
    pub const BLK_F_TOPOLOGY: u64 = 1 << 10;
    /// The driver can switch the write cache.
    pub const BLK_F_CONFIG_WCE: u64 = 1 << 11;
    /// Several queues.
    pub const BLK_F_MQ: u64 = 1 << 12;
    /// Discard requests.
    pub const BLK_F_DISCARD: u64 = 1 << 13;
    /// Write-zeroes requests.
    pub const BLK_F_WRITE_ZEROES: u64 = 1 << 14;
    /// Indirect descriptors.
    pub const F_INDIRECT_DESC: u64 = 1 << 28;
    /// `used_event` and `avail_event`.
    pub const F_EVENT_IDX: u64 = 1 << 29;
    /// vhost-user: protocol features can be negotiated.
    pub const VHOST_USER_F_PROTOCOL_FEATURES: u64 = 1 << 30;
    /// Virtio 1.0 and later.
    pub const F_VERSION_1: u64 = 1 << 32;

    /// Read.
    pub const T_IN: u32 = 0;
    /// Write.
    pub const T_OUT: u32 = 1;
    /// Flush.
    pub const T_FLUSH: u32 = 4;
    /// The device's serial number.
    pub const T_GET_ID: u32 = 8;
    /// Discard.
    pub const T_DISCARD: u32 = 11;
    /// Write zeroes.
    pub const T_WRITE_ZEROES: u32 = 13;
    /// Flag of a write-zeroes segment: the space may be given back.
    pub const WZ_FLAG_UNMAP: u32 = 1;

    /// Status: done.
    pub const S_OK: u8 = 0;
    /// Status: failed.
    pub const S_IOERR: u8 = 1;
    /// Status: not supported.
    pub const S_UNSUPP: u8 = 2;

    /// Descriptor flag: the chain goes on.
    pub const DESC_F_NEXT: u16 = 1;
    /// Descriptor flag: the device writes this buffer.
    pub const DESC_F_WRITE: u16 = 2;
    /// Descriptor flag: the buffer is a table of descriptors.
    pub const DESC_F_INDIRECT: u16 = 4;
    /// `used.flags`: the device asks for no kicks.
    pub const USED_F_NO_NOTIFY: u16 = 1;
    /// `avail.flags`: the driver asks for no interrupts.
    pub const AVAIL_F_NO_INTERRUPT: u16 = 1;
}
