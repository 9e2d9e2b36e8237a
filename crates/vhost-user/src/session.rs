//! What one front end has said: features, memory and rings; and the rings that run because of it.
//!
//! Callers: [`crate::handler`], which translates protocol messages into these calls. Front ends send their messages
//! in many orders, so every message only changes what is known, and whatever has become complete is started
//! ([`Session::start_ready`]). A change to a running ring stops it first (with all its requests done) and then
//! lets it go on.

use crate::export::Shared;
use crate::worker::{Command, RingStart, Worker};
use bedplate_storage::Storage;
use bedplate_types::{Error, ErrorKind, Result};
use bedplate_virtio::inflight::InflightArea;
use bedplate_virtio::memory::{GuestMemory, Region};
use bedplate_virtio::spec;
use bedplate_virtio::split::RingAddrs;
use bedplate_virtio::vanish::Alarm;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// What is known of a ring.
#[derive(Default)]
struct RingState {
    size: u16,
    addrs: Option<RingAddrs>,
    /// The next available index, while the ring does not run.
    base: u16,
    /// A kick was set: None inside means that the ring is to be polled.
    kick: Option<Option<Arc<OwnedFd>>>,
    call: Option<Arc<OwnedFd>>,
    err: Option<Arc<OwnedFd>>,
    enabled: bool,
    running: bool,
}

/// One front end's session, or the wait for one.
pub(crate) struct Session<S: Storage> {
    shared: Arc<Shared<S>>,
    workers: Arc<Vec<Worker>>,
    features: u64,
    /// Acknowledged protocol features.
    pub protocol: u64,
    memory: Arc<GuestMemory>,
    /// Rings when the front end has taken memory away that it had shared. None while there is no front end.
    alarm: Option<Alarm>,
    /// Records of the requests under way, where the front end keeps them for the next process.
    inflight: Option<Arc<InflightArea>>,
    rings: Vec<RingState>,
}

fn invalid(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::Protocol, text)
}

fn nonblocking(file: File) -> Result<Arc<OwnedFd>> {
    let fd = OwnedFd::from(file);
    // The other side could make a blocking descriptor hold up the queue's thread.
    let set = rustix::io::ioctl_fionbio(&fd, true);
    set.map_err(|e| Error::io("cannot use an event descriptor of the front end", e.into()))?;
    Ok(Arc::new(fd))
}

impl<S: Storage> Session<S> {
    pub(crate) fn new(shared: Arc<Shared<S>>, workers: Arc<Vec<Worker>>) -> Self {
        let rings = (0..shared.queues).map(|_| RingState::default()).collect();
        let memory = Arc::new(GuestMemory::default());
        Self {
            shared,
            workers,
            features: 0,
            protocol: 0,
            memory,
            alarm: None,
            inflight: None,
            rings,
        }
    }

    /// A front end has connected, whose memory `alarm` watches over.
    pub(crate) fn begin(&mut self, alarm: Alarm) {
        self.alarm = Some(alarm);
    }

    fn alarm(&self) -> Result<&Alarm> {
        self.alarm.as_ref().ok_or_else(|| invalid("no front end is connected"))
    }

    pub(crate) fn shared(&self) -> &Shared<S> {
        &self.shared
    }

    fn worker(&self, index: usize) -> &Worker {
        &self.workers[index % self.workers.len()]
    }

    fn ring(&mut self, index: u32) -> Result<&mut RingState> {
        let queues = self.rings.len();
        let found = usize::try_from(index).ok().and_then(|i| self.rings.get_mut(i));
        found.ok_or_else(|| invalid(format!("queue {index} does not exist, there are {queues}")))
    }

    /// Stops a ring once all its requests are done.
    fn stop(&mut self, index: usize) -> Result<()> {
        if self.rings[index].running {
            self.rings[index].running = false;
            self.rings[index].base = self.worker(index).stop(index)?;
        }
        Ok(())
    }

    fn stop_all(&mut self) -> Result<()> {
        // All are told first, so that their requests end together.
        let running = (0..self.rings.len()).filter(|&i| self.rings[i].running).collect::<Vec<_>>();
        let waits = running.iter().map(|&i| self.worker(i).begin_stop(i)).collect::<Vec<_>>();
        for (i, wait) in running.into_iter().zip(waits) {
            self.rings[i].running = false;
            self.rings[i].base = crate::worker::wait(&wait)?;
        }
        Ok(())
    }

    /// Starts every ring that is complete and does not run.
    fn start_ready(&mut self) {
        let event_idx = self.features & spec::F_EVENT_IDX != 0;
        for i in 0..self.rings.len() {
            let r = &self.rings[i];
            let (false, true, Some(kick), Some(addrs)) = (r.running, r.enabled, &r.kick, r.addrs)
            else {
                continue;
            };
            if r.size == 0 || self.memory.regions().is_empty() {
                continue;
            }
            let start = RingStart {
                index: i,
                size: r.size,
                addrs,
                next_avail: r.base,
                event_idx,
                memory: self.memory.clone(),
                inflight: self.inflight.clone(),
                kick: kick.clone(),
                call: r.call.clone(),
                err: r.err.clone(),
            };
            match self.worker(i).start(start) {
                Ok(()) => self.rings[i].running = true,
                Err(e) => tracing::warn!("queue {i} of {} can't run: {e:#}", self.shared.name),
            }
        }
    }

    /// Changes a ring, which is stopped for that time.
    fn change(&mut self, index: u32, f: impl FnOnce(&mut RingState) -> Result<()>) -> Result<()> {
        self.ring(index)?;
        self.stop(index as usize)?;
        let result = f(self.ring(index)?);
        self.start_ready();
        result
    }

    /// A new session begins: nothing that an earlier one said counts any more. Protocol features stay, since
    /// some front ends agree on them first.
    pub(crate) fn set_owner(&mut self) -> Result<()> {
        self.reset()?;
        self.memory = Arc::new(GuestMemory::default());
        Ok(())
    }

    /// Stops all rings and forgets them, and the driver's features with them.
    pub(crate) fn reset(&mut self) -> Result<()> {
        self.stop_all()?;
        self.rings.iter_mut().for_each(|r| *r = RingState::default());
        self.inflight = None;
        self.features = 0;
        self.shared.set_writeback(true);
        Ok(())
    }

    /// Disables all rings.
    pub(crate) fn reset_owner(&mut self) -> Result<()> {
        self.stop_all()?;
        self.rings.iter_mut().for_each(|r| r.enabled = false);
        Ok(())
    }

    /// The front end has gone: all requests are finished, memory and descriptors given back.
    pub(crate) fn end(&mut self) {
        if let Err(e) = self.set_owner() {
            tracing::error!("cannot end a session of {}: {e:#}", self.shared.name);
        }
        self.protocol = 0;
        self.alarm = None;
    }

    pub(crate) fn set_features(&mut self, features: u64) -> Result<()> {
        let unknown = features & !self.shared.features();
        if unknown != 0 {
            return Err(invalid(format!("features {unknown:#x} were not offered")));
        }
        if (features ^ self.features) & spec::F_EVENT_IDX != 0 {
            self.stop_all()?;
        }
        self.features = features;
        // A driver that can't flush or switch the cache must find its writes durable (virtio 1.2, 5.2.6.2).
        let can_flush = features & (spec::BLK_F_FLUSH | spec::BLK_F_CONFIG_WCE) != 0;
        self.shared.set_writeback(can_flush);
        if features & spec::VHOST_USER_F_PROTOCOL_FEATURES == 0 {
            // Without them there is no message to enable rings.
            self.rings.iter_mut().for_each(|r| r.enabled = true);
        }
        self.start_ready();
        Ok(())
    }

    fn set_memory(&mut self, memory: GuestMemory) -> Result<()> {
        self.stop_all()?;
        self.memory = Arc::new(memory);
        self.start_ready();
        Ok(())
    }

    /// Replaces all memory by `regions`: (file offset, guest address, front end's address, length, file).
    pub(crate) fn set_mem_table(&mut self, regions: Vec<(u64, u64, u64, u64, File)>) -> Result<()> {
        let alarm = self.alarm()?;
        let map = |(offset, gpa, uva, len, file): (_, _, _, _, File)| {
            Region::map(file.as_fd(), offset, gpa, uva, len, alarm)
        };
        let regions = regions.into_iter().map(map).collect::<Result<Vec<_>>>()?;
        self.set_memory(GuestMemory::new(regions)?)
    }

    /// Adds a region of memory.
    pub(crate) fn add_region(
        &mut self,
        offset: u64,
        (gpa, uva, len): (u64, u64, u64),
        file: &File,
    ) -> Result<()> {
        let mut regions = self.memory.regions().to_vec();
        if regions.len() >= bedplate_types::limits::MAX_MEMORY_SLOTS {
            return Err(Error::new(ErrorKind::Limit, "all memory slots are in use"));
        }
        regions.push(Region::map(file.as_fd(), offset, gpa, uva, len, self.alarm()?)?);
        self.set_memory(GuestMemory::new(regions)?)
    }

    /// Removes a region of memory; no request uses it any more afterwards.
    pub(crate) fn remove_region(&mut self, gpa: u64, uva: u64, len: u64) -> Result<()> {
        let mut regions = self.memory.regions().to_vec();
        let same = |r: &Region| (r.gpa(), r.uva(), r.len()) == (gpa, uva, len);
        let at = regions.iter().position(same);
        let at = at.ok_or_else(|| invalid(format!("there is no memory region at {gpa:#x}")))?;
        regions.remove(at);
        self.set_memory(GuestMemory::new(regions)?)
    }

    /// Keeps records of the requests under way in `file` (at an offset, of a length) from now on, and does those again that
    /// it holds.
    pub(crate) fn set_inflight(
        &mut self,
        file: &File,
        place: (u64, u64),
        queues: u16,
        entries: u16,
    ) -> Result<()> {
        let area = InflightArea::map(file, place, queues, entries, self.alarm()?)?;
        self.stop_all()?;
        self.inflight = Some(Arc::new(area));
        self.start_ready();
        Ok(())
    }

    pub(crate) fn set_size(&mut self, index: u32, size: u32) -> Result<()> {
        let most = u32::from(self.shared.queue_size);
        if !size.is_power_of_two() || size > most {
            let text = format!("queue size {size} is no power of two up to {most}");
            return Err(invalid(text));
        }
        self.change(index, |r| {
            r.size = size as u16;
            Ok(())
        })
    }

    pub(crate) fn set_addrs(&mut self, index: u32, addrs: RingAddrs) -> Result<()> {
        self.change(index, |r| {
            r.addrs = Some(addrs);
            Ok(())
        })
    }

    pub(crate) fn set_base(&mut self, index: u32, base: u32) -> Result<()> {
        let base =
            u16::try_from(base).map_err(|_| invalid(format!("index {base} is too large")))?;
        self.change(index, |r| {
            r.base = base;
            Ok(())
        })
    }

    /// Stops a ring and tells where it would go on. It needs a new kick to run again.
    pub(crate) fn get_base(&mut self, index: u32) -> Result<u16> {
        self.ring(index)?;
        self.stop(index as usize)?;
        let r = self.ring(index)?;
        r.kick = None;
        Ok(r.base)
    }

    pub(crate) fn set_kick(&mut self, index: u32, fd: Option<File>) -> Result<()> {
        let fd = fd.map(nonblocking).transpose()?;
        self.change(index, |r| {
            r.kick = Some(fd);
            Ok(())
        })
    }

    pub(crate) fn set_call(&mut self, index: u32, fd: Option<File>) -> Result<()> {
        let fd = fd.map(nonblocking).transpose()?;
        let r = self.ring(index)?;
        r.call.clone_from(&fd);
        // Front ends switch this often, so the ring is not stopped for it.
        if r.running {
            let index = index as usize;
            self.worker(index).send(Command::SetCall { index, call: fd });
        }
        Ok(())
    }

    pub(crate) fn set_err(&mut self, index: u32, fd: Option<File>) -> Result<()> {
        let fd = fd.map(nonblocking).transpose()?;
        self.change(index, |r| {
            r.err = fd;
            Ok(())
        })
    }

    pub(crate) fn set_enabled(&mut self, index: u32, on: bool) -> Result<()> {
        if self.ring(index)?.enabled == on {
            return Ok(());
        }
        self.change(index, |r| {
            r.enabled = on;
            Ok(())
        })
    }

    /// Writes to the configuration space: only the write cache can be switched.
    pub(crate) fn set_config(&mut self, offset: u32, bytes: &[u8]) -> Result<()> {
        let [on @ (0 | 1)] = *bytes else {
            return Err(invalid("only the write cache's byte can be written, with 0 or 1"));
        };
        if offset != bedplate_virtio::config::WRITEBACK_OFFSET
            || self.shared.features() & spec::BLK_F_CONFIG_WCE == 0
        {
            return Err(invalid("only the write cache's byte can be written"));
        }
        self.shared.set_writeback(on == 1);
        if on == 0 {
            // What was written under the old rule becomes durable before the new rule is acknowledged.
            self.worker(0).flush()?;
        }
        Ok(())
    }
}
