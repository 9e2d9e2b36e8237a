//! Disks served to virtual machines: the user-space front end, one queue a thread.

use crate::job::{Job, Op};
use crate::plan::Step;
use crate::port::{Done, Port, Status};
use bedplate_types::{Error, ErrorKind, Result};
use bedplate_vhost_user::frontend::{Client, ClientOptions, Features, SlotOp, Slots};
use std::path::Path;
use std::time::Duration;

/// Connects a front end with a queue for every thread of a job; gives the disk's size too. The client must live as long as its
/// queues are used.
pub(crate) fn open(
    job: &Job,
    socket: &Path,
    spin_us: Option<u64>,
) -> Result<(Client, Vec<VhostPort>, u64)> {
    let limit = |_| {
        let text = format!("a vhost-user-blk queue can't have {} requests in flight", job.depth);
        Error::new(ErrorKind::Limit, text)
    };
    let depth = u16::try_from(job.depth).map_err(limit)?;
    let bytes = u32::try_from(job.sizes.largest()).map_err(limit)?;
    let queue_size = Slots::queue_size(depth).max(128);
    let ring = u64::from(queue_size) * 64;
    let options = ClientOptions {
        queues: job.threads as usize,
        queue_size,
        memory_per_queue: (Slots::room(depth, bytes) + ring + (1 << 20)).next_multiple_of(1 << 20),
        ..ClientOptions::default()
    };
    let mut client = Client::connect(socket, &options)?;
    let size = client.capacity()?;
    let features = Features::of(&client);
    if job.changes() && features.read_only {
        let text = format!("the disk behind '{}' is read-only", socket.display());
        return Err(Error::new(ErrorKind::ReadOnly, text));
    }
    if job.mix.trim > 0 && !features.discard {
        let text = format!("the back end behind '{}' has no discard", socket.display());
        return Err(Error::new(ErrorKind::Unsupported, text));
    }
    let spin = spin_us.map(Duration::from_micros);
    let ports = client
        .take_queues()
        .into_iter()
        .map(|queue| {
            let slots = Slots::new(queue, depth, bytes, spin)?;
            Ok(VhostPort { slots, flush: features.flush, skipped: Vec::new(), in_flight: 0 })
        })
        .collect::<Result<Vec<_>>>()?;
    Ok((client, ports, size))
}

/// One queue.
pub(crate) struct VhostPort {
    slots: Slots,
    /// The device has flushes; without, it has no cache to flush.
    flush: bool,
    skipped: Vec<usize>,
    in_flight: usize,
}

impl Port for VhostPort {
    fn put(&mut self, slot: usize, data: &[u8]) -> Result<()> {
        self.slots.put(slot as u16, data)
    }

    fn get(&mut self, slot: usize, data: &mut [u8]) -> Result<()> {
        self.slots.get(slot as u16, data)
    }

    #[inline]
    fn push(&mut self, slot: usize, step: Step) -> Result<()> {
        let op = match step.op {
            Op::Read => SlotOp::Read,
            Op::Write => SlotOp::Write,
            Op::Trim => SlotOp::Discard,
            Op::Flush if !self.flush => {
                self.skipped.push(slot);
                return Ok(());
            }
            Op::Flush => SlotOp::Flush,
        };
        self.in_flight += 1;
        self.slots.push(slot as u16, op, step.at, step.len)
    }

    #[inline]
    fn send(&mut self) -> Result<()> {
        self.slots.publish();
        Ok(())
    }

    #[inline]
    fn exchange(
        &mut self,
        limit: Option<Duration>,
        most: usize,
        done: &mut Vec<Done>,
    ) -> Result<()> {
        done.extend(self.skipped.drain(..).map(|slot| Done { slot, status: Status::Good }));
        if self.in_flight == 0 {
            return Ok(());
        }
        self.slots.publish();
        self.slots.wait(if done.is_empty() { limit } else { Some(Duration::ZERO) })?;
        // Bounded: with a fast back end new completions come while these are handled.
        for _ in 0..self.in_flight.min(most) {
            let Some((slot, good)) = self.slots.take() else { break };
            self.in_flight -= 1;
            let status = if good { Status::Good } else { Status::Failed };
            done.push(Done { slot: usize::from(slot), status });
        }
        Ok(())
    }
}
