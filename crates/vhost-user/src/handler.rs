//! Protocol messages, as the crate `vhost` has decoded them, turned into calls of the [`Session`].

use crate::session::Session;
use bedplate_storage::Storage;
use bedplate_types::limits::MAX_MEMORY_SLOTS;
use bedplate_virtio::inflight::InflightArea;
use bedplate_virtio::split::RingAddrs;
use std::fs::File;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig,
    VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error, Result, VhostUserBackendReqHandlerMut};

/// What is offered of the protocol. REPLY_ACK is the codec's own and always offered.
pub(crate) const PROTOCOL: VhostUserProtocolFeatures = VhostUserProtocolFeatures::MQ
    .union(VhostUserProtocolFeatures::CONFIG)
    .union(VhostUserProtocolFeatures::REPLY_ACK)
    .union(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS)
    .union(VhostUserProtocolFeatures::RESET_DEVICE)
    .union(VhostUserProtocolFeatures::INFLIGHT_SHMFD);

/// Bytes of a configuration space (VHOST_USER_MAX_CONFIG_SIZE).
const MAX_CONFIG: u32 = 256;

/// The session, and whether the message under way has reached it.
pub(crate) struct Handler<S: Storage> {
    pub session: Session<S>,
    /// Set by every call: the codec then acknowledges the message itself, also when it failed.
    pub called: bool,
}

impl<S: Storage> Handler<S> {
    /// Runs one message's call. What went wrong is logged here, because the codec only passes on that it did.
    fn run<T>(
        &mut self,
        what: &str,
        f: impl FnOnce(&mut Session<S>) -> bedplate_types::Result<T>,
    ) -> Result<T> {
        self.called = true;
        f(&mut self.session).map_err(|e| {
            tracing::warn!(
                "{}: the front end's {what} is refused: {e:#}",
                self.session.shared().name
            );
            Error::ReqHandlerError(std::io::Error::other(e))
        })
    }

    fn refuse<T>(&mut self, what: &'static str) -> Result<T> {
        self.called = true;
        Err(Error::InvalidOperation(what))
    }
}

impl<S: Storage> VhostUserBackendReqHandlerMut for Handler<S> {
    fn set_owner(&mut self) -> Result<()> {
        self.run("SET_OWNER", Session::set_owner)
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.run("RESET_OWNER", Session::reset_owner)
    }

    fn reset_device(&mut self) -> Result<()> {
        self.run("RESET_DEVICE", Session::reset)
    }

    fn get_features(&mut self) -> Result<u64> {
        self.called = true;
        Ok(self.session.shared().features())
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        self.run("SET_FEATURES", |s| s.set_features(features))
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _: Option<bool>,
    ) -> Result<Option<Vec<u64>>> {
        let list = regions.iter().zip(files);
        let list = list.map(|(r, f)| {
            let r = *r;
            (r.mmap_offset, r.guest_phys_addr, r.user_addr, r.memory_size, f)
        });
        let list = list.collect();
        self.run("SET_MEM_TABLE", |s| s.set_mem_table(list)).map(|()| None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        self.run("SET_VRING_NUM", |s| s.set_size(index, num))
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        desc: u64,
        used: u64,
        avail: u64,
        _log: u64,
    ) -> Result<()> {
        if !flags.is_empty() {
            // The log is not offered: pages written here would be missed.
            return self.refuse("logging of writes is not offered");
        }
        self.run("SET_VRING_ADDR", |s| s.set_addrs(index, RingAddrs { desc, avail, used }))
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        self.run("SET_VRING_BASE", |s| s.set_base(index, base))
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let base = self.run("GET_VRING_BASE", |s| s.get_base(index))?;
        Ok(VhostUserVringState::new(index, u32::from(base)))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.run("SET_VRING_KICK", |s| s.set_kick(u32::from(index), fd))
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.run("SET_VRING_CALL", |s| s.set_call(u32::from(index), fd))
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.run("SET_VRING_ERR", |s| s.set_err(u32::from(index), fd))
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        self.called = true;
        Ok(PROTOCOL)
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        self.run("SET_PROTOCOL_FEATURES", |s| {
            s.protocol = features;
            Ok(())
        })
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        self.called = true;
        Ok(u64::from(self.session.shared().queues))
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.run("SET_VRING_ENABLE", |s| s.set_enabled(index, enable))
    }

    fn get_config(&mut self, offset: u32, size: u32, _: VhostUserConfigFlags) -> Result<Vec<u8>> {
        if offset.checked_add(size).is_none_or(|end| end > MAX_CONFIG) {
            return self.refuse("this lies outside the configuration space");
        }
        self.called = true;
        Ok(self.session.shared().config().read(offset, size))
    }

    fn set_config(&mut self, offset: u32, bytes: &[u8], _: VhostUserConfigFlags) -> Result<()> {
        self.run("SET_CONFIG", |s| s.set_config(offset, bytes))
    }

    fn get_shared_object(&mut self, _: VhostUserSharedMsg) -> Result<File> {
        self.refuse("shared objects are not offered")
    }

    fn get_inflight_fd(&mut self, m: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let (queues, entries) = (m.num_queues, m.queue_size);
        let made = self.run("GET_INFLIGHT_FD", |_| InflightArea::create(queues, entries));
        made.map(|(file, len)| (VhostUserInflight::new(len, 0, queues, entries), file))
    }

    fn set_inflight_fd(&mut self, m: &VhostUserInflight, file: File) -> Result<()> {
        let m = *m;
        let place = (m.mmap_offset, m.mmap_size);
        self.run("SET_INFLIGHT_FD", |s| s.set_inflight(&file, place, m.num_queues, m.queue_size))
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        self.called = true;
        Ok(MAX_MEMORY_SLOTS as u64)
    }

    fn add_mem_region(
        &mut self,
        r: &VhostUserSingleMemoryRegion,
        fd: File,
        _: Option<bool>,
    ) -> Result<Option<u64>> {
        let place = (r.guest_phys_addr, r.user_addr, r.memory_size);
        let offset = r.mmap_offset;
        self.run("ADD_MEM_REG", |s| s.add_region(offset, place, &fd)).map(|()| None)
    }

    fn remove_mem_region(&mut self, r: &VhostUserSingleMemoryRegion) -> Result<()> {
        let (gpa, uva, len) = (r.guest_phys_addr, r.user_addr, r.memory_size);
        self.run("REM_MEM_REG", |s| s.remove_region(gpa, uva, len))
    }

    fn set_device_state_fd(
        &mut self,
        _: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        _: File,
    ) -> Result<Option<File>> {
        self.refuse("device state is not offered")
    }

    fn check_device_state(&mut self) -> Result<()> {
        self.refuse("device state is not offered")
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        self.refuse("shared memory regions are not offered")
    }

    fn set_log_base(&mut self, _: &VhostUserLog, _: File) -> Result<()> {
        self.refuse("logging of writes is not offered")
    }

    fn set_gpu_socket(&mut self, _: vhost::vhost_user::GpuBackend) -> Result<()> {
        self.refuse("this is no GPU")
    }
}
