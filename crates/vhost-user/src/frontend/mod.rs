//! A vhost-user-blk front end in user space, to test and to measure any back end without a virtual machine.
//!
//! Callers: this crate's tests, the tests across crates, and benchmarks. [`Client`] connects and sets rings up,
//! [`Queue`] sends single requests and raw chains (bad ones too), [`Slots`] keeps many in flight at full speed.

mod queue;
mod slots;

pub use queue::{Answer, Buffer, Queue};
pub use slots::{SlotOp, Slots};

use bedplate_types::{Error, ErrorKind, Result};
use bedplate_virtio::config::CONFIG_BYTES;
use bedplate_virtio::driver::SharedMemory;
use bedplate_virtio::spec;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};

/// How a front end connects.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// Queues to set up.
    pub queues: usize,
    /// Entries of each, a power of two.
    pub queue_size: u16,
    /// Bytes of memory that each queue has for its requests, headers included.
    pub memory_per_queue: u64,
    /// Features to ask for; those that the back end does not offer are left out.
    pub features: u64,
    /// Protocol features to ask for; without any, the old protocol is spoken.
    pub protocol: VhostUserProtocolFeatures,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            queues: 1,
            queue_size: 256,
            memory_per_queue: 4 << 20,
            features: u64::MAX,
            protocol: VhostUserProtocolFeatures::MQ
                | VhostUserProtocolFeatures::CONFIG
                | VhostUserProtocolFeatures::REPLY_ACK
                | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
                | VhostUserProtocolFeatures::RESET_DEVICE,
        }
    }
}

/// What this front end knows how to use.
const KNOWN: u64 = spec::F_VERSION_1
    | spec::F_EVENT_IDX
    | spec::F_INDIRECT_DESC
    | spec::VHOST_USER_F_PROTOCOL_FEATURES
    | spec::BLK_F_RO
    | spec::BLK_F_SIZE_MAX
    | spec::BLK_F_SEG_MAX
    | spec::BLK_F_BLK_SIZE
    | spec::BLK_F_FLUSH
    | spec::BLK_F_TOPOLOGY
    | spec::BLK_F_CONFIG_WCE
    | spec::BLK_F_MQ
    | spec::BLK_F_DISCARD
    | spec::BLK_F_WRITE_ZEROES;

/// A connection to a back end. Its queues are taken out with [`Client::take_queues`].
pub struct Client {
    vhost: Frontend,
    memory: Arc<SharedMemory>,
    features: u64,
    protocol: VhostUserProtocolFeatures,
    queues: Vec<Queue>,
}

/// What of the agreed features a load must know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// The disk can't be written.
    pub read_only: bool,
    /// Flushes may be sent.
    pub flush: bool,
    /// Discards may be sent.
    pub discard: bool,
}

impl Features {
    /// What this client agreed on.
    pub fn of(client: &Client) -> Self {
        let has = |flag| client.features & flag != 0;
        Self {
            read_only: has(spec::BLK_F_RO),
            flush: has(spec::BLK_F_FLUSH),
            discard: has(spec::BLK_F_DISCARD),
        }
    }
}

/// Says what failed, for a failed call of the crate `vhost`.
pub(crate) fn failed(what: &str) -> impl Fn(vhost::Error) -> Error {
    move |e| Error::new(ErrorKind::Protocol, format!("the back end fails {what}: {e}"))
}

impl Client {
    /// Connects and agrees on features; sets no memory and no rings up.
    ///
    /// # Errors
    /// `Protocol` when the back end refuses something.
    pub fn negotiate(socket: &Path, options: &ClientOptions) -> Result<Self> {
        let connect = |e| {
            let text = format!("cannot connect to '{}': {e}", socket.display());
            Error::new(ErrorKind::NotFound, text)
        };
        let mut vhost = Frontend::connect(socket, options.queues as u64).map_err(connect)?;
        vhost.set_owner().map_err(failed("SET_OWNER"))?;
        let offered = vhost.get_features().map_err(failed("GET_FEATURES"))?;
        let mut features = offered & options.features & KNOWN;
        let mut protocol = VhostUserProtocolFeatures::empty();
        if options.protocol.is_empty() {
            features &= !spec::VHOST_USER_F_PROTOCOL_FEATURES;
        }
        if features & spec::VHOST_USER_F_PROTOCOL_FEATURES != 0 {
            let has = vhost.get_protocol_features().map_err(failed("GET_PROTOCOL_FEATURES"))?;
            protocol = has & options.protocol;
            vhost.set_protocol_features(protocol).map_err(failed("SET_PROTOCOL_FEATURES"))?;
            if protocol.contains(VhostUserProtocolFeatures::REPLY_ACK) {
                vhost.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
            }
        }
        vhost.set_features(features).map_err(failed("SET_FEATURES"))?;
        let len = options.memory_per_queue.saturating_mul(options.queues as u64);
        let memory = Arc::new(SharedMemory::new(0, len)?);
        Ok(Self { vhost, memory, features, protocol, queues: Vec::new() })
    }

    /// Connects, shares memory and starts all queues.
    ///
    /// # Errors
    /// As [`Self::negotiate`].
    pub fn connect(socket: &Path, options: &ClientOptions) -> Result<Self> {
        let mut client = Self::negotiate(socket, options)?;
        client.share_memory()?;
        for index in 0..options.queues {
            let queue = client.make_queue(index, options)?;
            client.start_queue(&queue, 0)?;
            client.queues.push(queue);
        }
        Ok(client)
    }

    /// The memory as the back end is told of it.
    pub fn region(&self) -> VhostUserMemoryRegionInfo {
        VhostUserMemoryRegionInfo {
            guest_phys_addr: 0,
            memory_size: self.memory.len(),
            userspace_addr: self.base(),
            mmap_offset: 0,
            mmap_handle: self.memory.fd().as_raw_fd(),
        }
    }

    fn base(&self) -> u64 {
        self.memory.at(0, 0) as u64
    }

    /// Tells the back end of the memory.
    ///
    /// # Errors
    /// As [`Self::negotiate`].
    pub fn share_memory(&mut self) -> Result<()> {
        self.vhost.set_mem_table(&[self.region()]).map(drop).map_err(failed("SET_MEM_TABLE"))
    }

    /// Lays queue `index` out in memory without telling the back end.
    ///
    /// # Errors
    /// `Io` when the system gives no eventfd.
    pub fn make_queue(&self, index: usize, options: &ClientOptions) -> Result<Queue> {
        let event_idx = self.features & spec::F_EVENT_IDX != 0;
        let place = (options.memory_per_queue * index as u64, options.memory_per_queue);
        Queue::new(index, self.memory.clone(), place, options.queue_size, event_idx)
    }

    /// Sets a queue up at the back end, and enables it. It goes on at the available index `base`.
    ///
    /// # Errors
    /// As [`Self::negotiate`].
    pub fn start_queue(&mut self, queue: &Queue, base: u16) -> Result<()> {
        let (i, v) = (queue.index(), &mut self.vhost);
        v.set_vring_num(i, queue.size()).map_err(failed("SET_VRING_NUM"))?;
        v.set_vring_base(i, base).map_err(failed("SET_VRING_BASE"))?;
        let addr = queue.config(self.memory.at(0, 0) as u64);
        v.set_vring_addr(i, &addr).map_err(failed("SET_VRING_ADDR"))?;
        v.set_vring_call(i, queue.call()).map_err(failed("SET_VRING_CALL"))?;
        v.set_vring_kick(i, queue.kick()).map_err(failed("SET_VRING_KICK"))?;
        if self.features & spec::VHOST_USER_F_PROTOCOL_FEATURES != 0 {
            v.set_vring_enable(i, true).map_err(failed("SET_VRING_ENABLE"))?;
        }
        Ok(())
    }

    /// The codec, for messages of one's own.
    pub fn vhost(&mut self) -> &mut Frontend {
        &mut self.vhost
    }

    /// The shared memory.
    pub fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }

    /// The features agreed on.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// The protocol features agreed on.
    pub fn protocol(&self) -> VhostUserProtocolFeatures {
        self.protocol
    }

    /// The queues, for threads of their own. They are only served while the client lives.
    pub fn take_queues(&mut self) -> Vec<Queue> {
        std::mem::take(&mut self.queues)
    }

    /// The configuration space.
    ///
    /// # Errors
    /// As [`Self::negotiate`].
    pub fn config(&mut self, offset: u32, len: u32) -> Result<Vec<u8>> {
        let buf = vec![0; len as usize];
        let flags = VhostUserConfigFlags::empty();
        let got = self.vhost.get_config(offset, len, flags, &buf).map_err(failed("GET_CONFIG"))?;
        Ok(got.1)
    }

    /// The disk's size in bytes.
    ///
    /// # Errors
    /// As [`Self::config`].
    pub fn capacity(&mut self) -> Result<u64> {
        let b = self.config(0, CONFIG_BYTES as u32)?;
        let sectors = b.first_chunk::<8>().map_or(0, |b| u64::from_le_bytes(*b));
        Ok(sectors.saturating_mul(512))
    }
}
