//! One running ring: its requests under way, and when its driver is told of those that are done.
//!
//! Callers: the queue thread that owns it. Invariants: a request's slot holds its chain's head, its segments and the
//! disk's pin until it is given back; a ring ends only when all slots are free, so the kernel never uses guest memory
//! of a ring that was stopped. The hot path allocates nothing: slots keep their lists for the next request.

use crate::slow::Context;
use crate::stats::Counters;
use crate::worker::RingStart;
use bedplate_disk::{Plan, PlanPin};
use bedplate_runtime::DirectOp;
use bedplate_runtime::Wait;
use bedplate_runtime::buf::{IoVec, Owner};
use bedplate_storage::{SegmentBits, Storage};
use bedplate_types::{ByteLen, Error, ErrorKind, GuestOffset, Result};
use bedplate_virtio::blk::{self, Data, Request, StatusByte, What};
use bedplate_virtio::iovec;
use bedplate_virtio::memory::GuestMemory;
use bedplate_virtio::spec;
use bedplate_virtio::split::{Broken, Head, Pop, SplitQueue};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

/// Chains taken in one round. More make driver and device work in turn instead of together.
const BATCH: usize = 32;
/// Completions that are announced with one interrupt while more are to come.
const NOTIFY_AFTER: usize = 16;
/// The longest time a completion waits for others to be announced with.
pub(crate) const NOTIFY_WITHIN: Duration = Duration::from_micros(30);
/// How often a ring's failures are logged.
const LOG_EVERY: Duration = Duration::from_secs(1);

/// A request under way.
#[derive(Default)]
struct Slot {
    head: Option<Head>,
    status: Option<StatusByte>,
    written: u32,
    /// The chain's segments. Their place in memory stays while the request is under way.
    segs: Vec<iovec>,
    at: GuestOffset,
    data: Option<Data>,
    write: bool,
    pin: Option<PlanPin>,
}

/// A running ring.
pub(crate) struct Ring {
    name: String,
    /// The upper half of this ring's request tokens.
    token: u64,
    queue: SplitQueue,
    memory: Arc<GuestMemory>,
    slots: Box<[Slot]>,
    free: Vec<u32>,
    call: Option<Arc<OwnedFd>>,
    err: Option<Arc<OwnedFd>>,
    polled: bool,
    broken: bool,
    stopping: Option<Sender<u16>>,
    kicks_on: bool,
    unpublished: bool,
    /// Completions the driver was not told of.
    unsignalled: usize,
    unsignalled_since: Option<Instant>,
    /// Writes of this round that take the slow road together.
    slow_tokens: Vec<u64>,
    slow_writes: Vec<(GuestOffset, IoVec)>,
    counters: Arc<Counters>,
    logged: Option<Instant>,
}

impl Ring {
    /// A ring that goes on where the driver and an earlier device stopped.
    pub(crate) fn new(
        start: RingStart,
        token: u64,
        name: String,
        counters: Arc<Counters>,
    ) -> Result<Self> {
        let RingStart { size, addrs, next_avail, event_idx, memory, kick, call, err, .. } = start;
        let broken =
            |Broken(why)| Error::new(ErrorKind::Protocol, format!("the ring is refused: {why}"));
        let mut queue =
            SplitQueue::new(&memory, size, addrs, next_avail, event_idx).map_err(broken)?;
        if let Some(area) = start.inflight {
            queue.keep_records(area.queue(start.index)?).map_err(broken)?;
        }
        let mut ring = Self {
            name,
            token,
            queue,
            memory,
            slots: (0..size).map(|_| Slot::default()).collect(),
            free: (0..u32::from(size)).rev().collect(),
            call,
            err,
            polled: kick.is_none(),
            broken: false,
            stopping: None,
            kicks_on: true,
            unpublished: false,
            unsignalled: 0,
            unsignalled_since: None,
            slow_tokens: Vec::new(),
            slow_writes: Vec::new(),
            counters,
            logged: None,
        };
        ring.after_sleep();
        // A process that was killed may have shown completions without an interrupt.
        ring.interrupt();
        Ok(ring)
    }

    fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// A ring that stops still does again what an earlier process had begun: whoever goes on with it would not.
    fn takes_requests(&self) -> bool {
        !self.broken && (self.stopping.is_none() || self.queue.has_again())
    }

    /// True when there are chains to take.
    #[inline]
    pub(crate) fn has_avail(&self) -> bool {
        self.takes_requests() && !self.free.is_empty() && self.queue.has_avail()
    }

    /// True when no kick announces chains.
    pub(crate) fn is_polled(&self) -> bool {
        self.polled && self.takes_requests()
    }

    /// True when the driver was not told of all completions yet.
    pub(crate) fn owes_interrupt(&self) -> bool {
        self.unsignalled != 0
    }

    /// Asks for kicks. True when there are chains already.
    pub(crate) fn before_sleep(&mut self) -> bool {
        self.counters.sleeps.add(1);
        self.kicks_on = true;
        self.takes_requests() && self.queue.enable_kicks() && !self.free.is_empty()
    }

    /// Asks for no kicks while the thread is awake anyway.
    #[inline]
    pub(crate) fn after_sleep(&mut self) {
        if std::mem::take(&mut self.kicks_on) {
            self.queue.disable_kicks();
        }
    }

    pub(crate) fn set_call(&mut self, call: Option<Arc<OwnedFd>>) {
        self.call = call;
        // An interrupt may have gone to the old descriptor, where nobody looks any more.
        self.interrupt();
    }

    /// Takes no more chains; [`Self::end_if_drained`] answers when all are done.
    pub(crate) fn stop(&mut self, done: Sender<u16>) {
        self.stopping = Some(done);
    }

    /// Answers [`Self::stop`] once nothing is under way. True when the ring is to be dropped.
    pub(crate) fn end_if_drained(&mut self) -> bool {
        let again = !self.broken && self.queue.has_again();
        if self.stopping.is_none() || self.in_flight() != 0 || again {
            return false;
        }
        if self.unsignalled != 0 {
            self.notify();
        }
        // Later kicks must not be missed by whoever goes on with this ring.
        self.queue.enable_kicks();
        if let Some(done) = self.stopping.take() {
            // The asker waits for it; if it has gone nobody wants to know.
            let _ = done.send(self.queue.next_avail());
        }
        true
    }

    /// Takes a batch of chains and sets their requests going. True when there was one.
    pub(crate) fn pump<S: Storage>(&mut self, cx: &Context<S>) -> bool {
        if !self.takes_requests() {
            return false;
        }
        let mut taken = 0;
        while taken < BATCH && !self.broken {
            let Some(&i) = self.free.last() else { break };
            let segs = &mut self.slots[i as usize].segs;
            match self.queue.pop(&self.memory, segs) {
                Ok(Pop::Empty) => break,
                Ok(Pop::Chain(head, readable)) => self.begin(cx, i, head, readable),
                Ok(Pop::Malformed(head, _)) if self.memory.is_gone() => self.give_up(head),
                Ok(Pop::Malformed(head, why)) => self.malformed(head, why),
                Err(Broken(why)) => {
                    self.break_down(why);
                    break;
                }
            }
            taken += 1;
        }
        if taken == 0 {
            return false;
        }
        if !self.slow_writes.is_empty() {
            let writes = std::mem::take(&mut self.slow_writes);
            cx.write_batch(std::mem::take(&mut self.slow_tokens), writes);
        }
        self.settle();
        true
    }

    fn malformed(&mut self, head: Head, why: &str) {
        self.counters.malformed.add(1);
        self.log(|name| tracing::warn!("{name}: a request is refused: {why}"));
        self.queue.push_used(head, 0);
        self.unpublished = true;
        self.unsignalled += 1;
    }

    /// What stands in for memory that is gone holds no requests. Nobody waits for this one: the session ends.
    fn give_up(&mut self, head: Head) {
        self.broken = true;
        head.abandon();
    }

    fn break_down(&mut self, why: &str) {
        tracing::error!("{} is not served any more, until it is reset: {why}", self.name);
        self.broken = true;
        if let Some(err) = &self.err {
            // The front end may have closed its end; there is nobody else to tell.
            let _ = rustix::io::write(&**err, &1_u64.to_ne_bytes());
        }
    }

    /// Sets the request of a chain going.
    #[inline]
    fn begin<S: Storage>(&mut self, cx: &Context<S>, i: u32, head: Head, readable: usize) {
        let slot = &mut self.slots[i as usize];
        let Some(request) = blk::parse(&mut slot.segs, readable, &cx.shared.limits) else {
            return self.malformed(head, "it has no room for a status");
        };
        if self.memory.is_gone() {
            return self.give_up(head);
        }
        let Request { what, status, written } = request;
        self.free.pop();
        slot.head = Some(head);
        slot.status = Some(status);
        slot.written = written;
        let token = self.token | u64::from(i);
        let c = &self.counters;
        match what {
            What::Read(at, data) => {
                c.reads.add(1);
                c.read_bytes.add(data.len);
                self.transfer(cx, i, at, data, false);
            }
            What::Write(at, data) => {
                c.writes.add(1);
                c.write_bytes.add(data.len);
                self.transfer(cx, i, at, data, true);
            }
            What::Flush => {
                c.flushes.add(1);
                cx.flush(token);
            }
            What::Discard(spans) => {
                c.discards.add(1);
                cx.discard(token, spans);
            }
            What::WriteZeroes(spans) => {
                c.discards.add(1);
                cx.write_zeroes(token, spans);
            }
            What::GetId(data) => {
                c.other.add(1);
                let segs = &self.slots[i as usize].segs[data.first..data.first + data.count];
                // SAFETY: the segments lie in `self.memory`.
                unsafe { blk::copy_out(segs, &cx.shared.id) };
                self.complete(i, spec::S_OK);
            }
            What::Refuse(status) => {
                c.other.add(1);
                c.errors.add(1);
                self.log(|name| tracing::warn!("{name}: a request is refused, status {status}"));
                self.complete(i, status);
            }
        }
    }

    /// Sets a read or write going: straight between guest memory and the file where the disk allows.
    #[inline]
    fn transfer<S: Storage>(
        &mut self,
        cx: &Context<S>,
        i: u32,
        at: GuestOffset,
        data: Data,
        write: bool,
    ) {
        let slot = &mut self.slots[i as usize];
        (slot.at, slot.data, slot.write) = (at, Some(data), write);
        if data.len == 0 {
            return self.complete(i, spec::S_OK);
        }
        if write && !cx.shared.is_writeback() {
            return self.slow(cx, i, 0);
        }
        let segs = &slot.segs[data.first..data.first + data.count];
        let bits = segs.iter().fold(SegmentBits::default(), |b, s| SegmentBits {
            addresses: b.addresses | s.iov_base.addr(),
            lengths: b.lengths | s.iov_len,
        });
        match cx.shared.disk.plan(write, at, ByteLen::new(data.len), bits) {
            Plan::Done => self.complete(i, spec::S_OK),
            Plan::Zeroes if !write => {
                // SAFETY: the segments lie in `self.memory`.
                unsafe { blk::zero(segs) };
                self.complete(i, spec::S_OK);
            }
            Plan::Zeroes => self.slow(cx, i, 0),
            Plan::Direct { file, at, pin } => {
                self.counters.direct.add(1);
                slot.pin = Some(pin);
                let (iov, n) = (segs.as_ptr(), segs.len() as u32);
                let op = if write { DirectOp::Write } else { DirectOp::Read };
                let token = self.token | u64::from(i);
                // SAFETY: the list and its memory stay until the slot is free, which is after the completion;
                // `self.memory` is held until the ring is dropped, which waits for all slots.
                while !unsafe { cx.rt.submit_direct(op, file, iov, n, at, token) } {
                    cx.rt.turn(Wait::No);
                }
            }
            Plan::Slow if write => {
                self.slow_tokens.push(self.token | u64::from(i));
                let buf = self.buffer(i, 0);
                self.slow_writes.push((at, buf));
            }
            Plan::Slow => self.slow(cx, i, 0),
        }
    }

    /// The memory of a request's data from byte `skip` on.
    fn buffer(&self, i: u32, skip: usize) -> IoVec {
        let slot = &self.slots[i as usize];
        let Some(data) = slot.data else { return IoVec::default() };
        let segs = &slot.segs[data.first..data.first + data.count];
        let owner: Owner = self.memory.clone();
        let segs = segs.iter().map(|s| (s.iov_base.cast::<u8>(), s.iov_len));
        // SAFETY: the segments were translated in `self.memory`, which the list now owns a share of.
        let all = unsafe { IoVec::from_raw(segs, Some(owner)) };
        if skip == 0 { all } else { all.slice(skip, all.len().saturating_sub(skip)) }
    }

    /// Sends the rest of a transfer, from byte `skip` on, over the slow road.
    fn slow<S: Storage>(&self, cx: &Context<S>, i: u32, skip: usize) {
        let slot = &self.slots[i as usize];
        let token = self.token | u64::from(i);
        let buf = self.buffer(i, skip);
        // Both lie on the disk, so their sum does.
        let at = GuestOffset::new(slot.at.get().saturating_add(skip as u64));
        if slot.write {
            cx.write(token, at, buf);
        } else {
            cx.read(token, at, buf);
        }
    }

    /// A direct transfer is over.
    pub(crate) fn direct_done<S: Storage>(&mut self, cx: &Context<S>, i: u32, result: i32) {
        let Some(slot) = self.slots.get_mut(i as usize) else { return };
        if let Some(pin) = slot.pin.take() {
            cx.shared.disk.finish(pin);
        }
        let want = slot.data.map_or(0, |d| d.len);
        match u64::try_from(result) {
            Ok(n) if n == want => self.complete(i, spec::S_OK),
            Ok(n) => self.slow(cx, i, n.min(want) as usize),
            Err(_) => match -result {
                // The slow road knows what to do about these (a file that is not as aligned as it says, perhaps).
                libc::EINTR | libc::EAGAIN | libc::EINVAL | libc::EOPNOTSUPP => {
                    self.slow(cx, i, 0);
                }
                errno => {
                    let what = if slot.write { "write to" } else { "read from" };
                    let e = Error::errno(format!("cannot {what} disk '{}'", cx.shared.name), errno);
                    self.slow_done(i, Err(e));
                }
            },
        }
    }

    /// A request of the slow road is over.
    pub(crate) fn slow_done(&mut self, i: u32, result: Result<()>) {
        let status = match result {
            Ok(()) => spec::S_OK,
            Err(e) => {
                self.counters.errors.add(1);
                self.log(|name| tracing::error!("{name}: a request has failed: {e:#}"));
                if e.kind() == ErrorKind::Unsupported { spec::S_UNSUPP } else { spec::S_IOERR }
            }
        };
        self.complete(i, status);
    }

    /// Gives a request back to the driver.
    #[inline]
    fn complete(&mut self, i: u32, status: u8) {
        let Some(slot) = self.slots.get_mut(i as usize) else { return };
        let (Some(head), Some(place)) = (slot.head.take(), slot.status.take()) else { return };
        // SAFETY: the status byte was translated in `self.memory`.
        unsafe { place.set(status) };
        self.queue.push_used(head, slot.written);
        self.free.push(i);
        self.unpublished = true;
        self.unsignalled += 1;
    }

    /// Shows the driver what is done, and interrupts it when enough has come together, nothing more is to come, or
    /// the first has waited long enough.
    #[inline]
    pub(crate) fn settle(&mut self) {
        if std::mem::take(&mut self.unpublished) {
            self.queue.publish();
        }
        if self.unsignalled == 0 {
            return;
        }
        // With few requests under way, the driver may wait for just this one.
        let enough = (self.in_flight() / 2).clamp(1, NOTIFY_AFTER);
        if self.unsignalled >= enough {
            return self.notify();
        }
        match self.unsignalled_since {
            None => self.unsignalled_since = Some(Instant::now()),
            Some(since) if since.elapsed() >= NOTIFY_WITHIN => self.notify(),
            Some(_) => {}
        }
    }

    /// Interrupts the driver if it wants to be.
    fn notify(&mut self) {
        self.unsignalled = 0;
        self.unsignalled_since = None;
        if self.queue.wants_interrupt() {
            self.interrupt();
        }
    }

    fn interrupt(&mut self) {
        if let Some(call) = &self.call {
            self.counters.interrupts.add(1);
            // EAGAIN means that the counter is full: the driver is being interrupted already.
            let _ = rustix::io::write(&**call, &1_u64.to_ne_bytes());
        }
    }

    /// Logs at most once in a while, so that a guest can't fill the host's disk.
    fn log(&mut self, f: impl FnOnce(&str)) {
        if self.logged.is_none_or(|t| t.elapsed() >= LOG_EVERY) {
            self.logged = Some(Instant::now());
            f(&self.name);
        }
    }
}
