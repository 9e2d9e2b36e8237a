//! The simulated storage itself.
//!
//! Each request takes a random number of polls and touches the contents at a random one of them. A request whose
//! future is dropped goes on while other requests are polled, as it would in a kernel. No lock is held across an
//! await; all methods work from any thread, but only one thread makes a run repeatable.

use crate::files::Window;
use crate::hold::HoldRule;
use crate::ledger::Ledger;
use crate::{Change, Counts, CrashPoint, Event, Fault, History, Image, OpId, OpKind, Rng};
use bedplate_runtime::buf::IoVec;
use bedplate_storage::{Extent, IoLimits, Storage, ZeroMode};
use bedplate_types::{ByteLen, Error, ErrorKind, HostOffset, HostRange, Result};
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// No space left on device, as Linux numbers it.
const ENOSPC: i32 = 28;
/// What a device makes of discarded bytes when it does not zero them.
const GARBAGE: u8 = 0xdb;

/// What a discard does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiscardMode {
    /// The range reads as zeroes, as on a file.
    Zeroes,
    /// The whole sectors of the range read as something else, as a device may do it.
    Garbage,
    /// Nothing, as where it isn't supported.
    Ignored,
}

/// How a [`SimStorage`] behaves.
#[derive(Clone, Debug)]
pub struct SimOptions {
    /// Decides delays, the order of completion and torn lengths.
    pub seed: u64,
    /// A request takes at most this many polls beyond its first; 0 completes everything at once.
    pub max_delay: u32,
    /// What [`Storage::limits`] says.
    pub limits: IoLimits,
    /// A fixed length: writes past the end find no space, and lengths can't be set.
    pub device: bool,
    /// Growth beyond this length finds no space.
    pub capacity: u64,
    /// What a discard does.
    pub discard: DiscardMode,
    /// Zeroes can be written without writing data; else `fast_only` is refused.
    pub fast_zero: bool,
    /// Refuse every change.
    pub read_only: bool,
    /// Keep every step, for [`SimStorage::history`]. Costs the memory of everything written.
    pub keep_history: bool,
    /// The name in messages.
    pub name: String,
}

impl Default for SimOptions {
    fn default() -> Self {
        Self {
            seed: 0,
            max_delay: 0,
            limits: IoLimits {
                align: 512,
                mem_align: 1,
                discard_align: 4096,
                physical_block: 4096,
            },
            device: false,
            capacity: i64::MAX as u64,
            discard: DiscardMode::Zeroes,
            fast_zero: true,
            read_only: false,
            keep_history: false,
            name: "simulated".to_owned(),
        }
    }
}

impl SimOptions {
    /// Files with delays and a history, decided by `seed`: what most tests want.
    pub fn seeded(seed: u64) -> Self {
        Self { seed, max_delay: 6, keep_history: true, ..Self::default() }
    }
}

/// A request on its way.
struct Running {
    id: OpId,
    kind: OpKind,
    polls_left: u32,
    apply_at: u32,
    applied: bool,
    /// The errno to fail with, and whether a part of the write stays.
    fault: Option<(i32, bool)>,
    held_by: Option<u64>,
    range: Range<u64>,
    change: bool,
    buf: Option<IoVec>,
    extent: (u64, bool),
}

pub(crate) struct State {
    options: SimOptions,
    start: Image,
    pub(crate) ledger: Ledger,
    events: Vec<Event>,
    rng: Rng,
    faults: Vec<Fault>,
    pub(crate) holds: Vec<HoldRule>,
    counts: Counts,
    next_id: u64,
    orphans: Vec<Running>,
}

impl State {
    pub(crate) fn event(&mut self, event: Event) {
        self.ledger.step(&event);
        if self.options.keep_history {
            self.events.push(event);
        }
    }

    pub(crate) fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn begin(
        &mut self,
        kind: OpKind,
        range: Range<u64>,
        change: Option<Change>,
        buf: Option<IoVec>,
    ) -> Running {
        let id = self.new_id();
        self.counts.add(kind);
        let len = range.end - range.start;
        let align = u64::from(self.options.limits.align).max(1);
        match kind {
            OpKind::Read => self.counts.read_bytes += len,
            OpKind::Write => self.counts.written_bytes += len,
            _ => {}
        }
        if matches!(kind, OpKind::Read | OpKind::Write)
            && (!range.start.is_multiple_of(align) || !len.is_multiple_of(align))
        {
            self.counts.unaligned += 1;
        }
        // Each rule counts each request, also when another rule has struck already.
        let mut fault = None;
        for f in &mut self.faults {
            if f.hits(kind, &range) {
                fault = fault.or(Some((f.errno, f.torn)));
            }
        }
        self.counts.failed += u64::from(fault.is_some());
        let hold = self.holds.iter_mut().find(|h| {
            h.kind.is_none_or(|k| k == kind)
                && h.range.start < range.end
                && range.start < h.range.end
        });
        let held_by = hold.map(|h| {
            h.caught += 1;
            h.id
        });
        let polls_left = self.rng.below(u64::from(self.options.max_delay) + 1) as u32;
        let apply_at = self.rng.below(u64::from(polls_left) + 1) as u32;
        let has_change = change.is_some();
        if kind == OpKind::Sync {
            self.event(Event::SyncStart { id, range: range.clone() });
        } else if let Some(change) = change {
            self.event(Event::Start { id, change });
        }
        Running {
            id,
            kind,
            polls_left,
            apply_at,
            applied: false,
            fault,
            held_by,
            range,
            change: has_change,
            buf,
            extent: (0, false),
        }
    }

    /// The moment at which the request touches the contents.
    fn apply(&mut self, op: &mut Running) {
        op.applied = true;
        if let Some((_, torn)) = op.fault {
            if torn && op.kind == OpKind::Write {
                let cut = op.range.start + self.rng.below(op.range.end - op.range.start + 1);
                // A medium takes whole sectors.
                let cut = (cut - cut % crate::SECTOR).max(op.range.start);
                let only = (cut - op.range.start) as usize;
                self.event(Event::Apply { id: op.id, only: Some(only) });
            }
            return;
        }
        if op.change {
            self.event(Event::Apply { id: op.id, only: None });
        }
        let image = self.ledger.visible();
        if let (OpKind::Read, Some(buf)) = (op.kind, &op.buf) {
            let mut out = vec![0; buf.len()];
            image.read(op.range.start, &mut out);
            buf.copy_from(0, &out);
        }
        if op.kind == OpKind::Extent {
            op.extent = image.extent(op.range.start, op.range.end - op.range.start);
        }
    }

    fn end(&mut self, op: &Running) -> std::result::Result<(), i32> {
        let ok = op.fault.is_none();
        if op.kind == OpKind::Sync {
            self.event(Event::SyncEnd { id: op.id, ok });
        } else if op.change {
            self.event(Event::End { id: op.id, ok });
        }
        op.fault.map_or(Ok(()), |(errno, _)| Err(errno))
    }

    /// One poll's worth of progress; the result when the request has ended.
    fn tick(
        &mut self,
        op: &mut Running,
        waker: Option<&Waker>,
    ) -> Option<std::result::Result<(), i32>> {
        if let Some(hold) = self.holds.iter_mut().find(|h| Some(h.id) == op.held_by) {
            hold.wakers.extend(waker.cloned());
            return None;
        }
        if !op.applied && op.polls_left <= op.apply_at {
            self.apply(op);
        }
        if op.polls_left == 0 {
            return Some(self.end(op));
        }
        op.polls_left -= 1;
        if let Some(w) = waker {
            w.wake_by_ref();
        }
        None
    }

    fn tick_orphans(&mut self) {
        let mut orphans = std::mem::take(&mut self.orphans);
        orphans.retain_mut(|op| self.tick(op, None).is_none());
        self.orphans.append(&mut orphans);
    }
}

/// An in-memory storage; clones are handles on the same contents.
#[derive(Clone)]
pub struct SimStorage {
    state: Arc<Mutex<State>>,
    /// The part of the contents that this is a handle on.
    pub(crate) window: Window,
}

impl SimStorage {
    /// An empty storage of `len` bytes.
    pub fn new(len: u64, options: SimOptions) -> Self {
        Self::from_image(Image::new(len), options)
    }

    /// A storage that holds `image`, all of it durable.
    pub fn from_image(image: Image, options: SimOptions) -> Self {
        let state = State {
            rng: Rng::new(options.seed),
            start: image.clone(),
            ledger: Ledger::new(image),
            options,
            events: Vec::new(),
            faults: Vec::new(),
            holds: Vec::new(),
            counts: Counts::default(),
            next_id: 0,
            orphans: Vec::new(),
        };
        Self { state: Arc::new(Mutex::new(state)), window: Window::WHOLE }
    }

    /// Another handle, on a part of the contents.
    pub(crate) fn part(&self, window: Window) -> Self {
        Self { state: self.state.clone(), window }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere in a test must not hide behind a second one here.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What reads see now.
    pub fn image(&self) -> Image {
        self.lock().ledger.visible().clone()
    }

    /// What is certain to survive a power cut now.
    pub fn durable(&self) -> Image {
        self.lock().ledger.durable().clone()
    }

    /// What a power cut now leaves to choose from.
    pub fn crash_point(&self) -> CrashPoint {
        self.lock().ledger.crash_point()
    }

    /// All steps so far; empty unless `keep_history` is set.
    pub fn history(&self) -> History {
        let state = self.lock();
        History { start: state.start.clone(), events: state.events.clone() }
    }

    /// Puts a note of the test's own into the history.
    pub fn mark(&self, note: u64) {
        self.lock().event(Event::Mark(note));
    }

    /// Adds a rule by which requests fail.
    pub fn inject(&self, fault: Fault) {
        self.lock().faults.push(fault);
    }

    /// Removes all rules by which requests fail.
    pub fn clear_faults(&self) {
        self.lock().faults.clear();
    }

    /// The requests counted so far.
    pub fn counts(&self) -> Counts {
        self.lock().counts.clone()
    }

    /// Starts counting from zero.
    pub fn reset_counts(&self) {
        self.lock().counts = Counts::default();
    }

    /// Lets requests whose futures were dropped run to their ends, unless they are held.
    pub fn settle(&self) {
        let mut state = self.lock();
        for _ in 0..=state.options.max_delay {
            state.tick_orphans();
        }
    }

    /// Requests whose futures were dropped and that have not ended.
    pub fn abandoned(&self) -> usize {
        self.lock().orphans.len()
    }

    fn error(&self, kind: ErrorKind, what: &str) -> Error {
        Error::new(kind, format!("{what} '{}'", self.lock().options.name))
    }

    fn range(&self, at: HostOffset, len: ByteLen) -> Result<Range<u64>> {
        let at = at.checked_add(ByteLen::new(self.window.start));
        at.and_then(|at| HostRange::new(at, len))
            .map(|r| r.start().get()..r.end().get())
            .filter(|r| r.end <= i64::MAX as u64)
            .ok_or_else(|| self.error(ErrorKind::OutOfRange, "range beyond the largest offset of"))
    }

    /// Refuses what can't be changed: read-only storages, and growth where there is no space.
    fn check_change(&self, change: &Change) -> Result<()> {
        let state = self.lock();
        let len = state.ledger.visible().len();
        let grown = match change {
            Change::SetLen { len } => *len,
            other => other.grows_to(),
        };
        let limit = match self.window.room {
            Some(room) => room,
            None if state.options.device => len,
            None => state.options.capacity,
        };
        let (read_only, name) = (state.options.read_only, state.options.name.clone());
        drop(state);
        if read_only {
            return Err(Error::new(ErrorKind::ReadOnly, format!("'{name}' is read-only")));
        }
        if grown > limit {
            return Err(Error::errno(format!("cannot grow '{name}' to {grown} bytes"), ENOSPC));
        }
        Ok(())
    }

    async fn change(&self, kind: OpKind, touched: Range<u64>, change: Change) -> Result<()> {
        self.check_change(&change)?;
        self.run(kind, touched, Some(change), None).await.map(drop)
    }

    /// Issues a request and waits for it.
    pub(crate) async fn run(
        &self,
        kind: OpKind,
        touched: Range<u64>,
        change: Option<Change>,
        buf: Option<IoVec>,
    ) -> Result<(u64, bool)> {
        let op = self.lock().begin(kind, touched, change, buf);
        let mut request = Request { storage: self, op: Some(op), extent: (0, false) };
        match (&mut request).await {
            Ok(()) => Ok(request.extent),
            Err(errno) => {
                let name = self.lock().options.name.clone();
                Err(Error::errno(format!("{kind:?} of '{name}' failed"), errno))
            }
        }
    }
}

struct Request<'a> {
    storage: &'a SimStorage,
    op: Option<Running>,
    extent: (u64, bool),
}

impl Future for Request<'_> {
    type Output = std::result::Result<(), i32>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(mut op) = self.op.take() else { return Poll::Pending };
        let mut state = self.storage.lock();
        state.tick_orphans();
        let result = state.tick(&mut op, Some(cx.waker()));
        drop(state);
        match result {
            Some(result) => {
                self.extent = op.extent;
                Poll::Ready(result)
            }
            None => {
                self.op = Some(op);
                Poll::Pending
            }
        }
    }
}

impl Drop for Request<'_> {
    fn drop(&mut self) {
        if let Some(op) = self.op.take() {
            self.storage.lock().orphans.push(op);
        }
    }
}

impl Storage for SimStorage {
    fn name(&self) -> String {
        self.lock().options.name.clone()
    }

    fn len(&self) -> ByteLen {
        let len = self.lock().ledger.visible().len();
        let end = self.window.room.map_or(len, |room| self.stored_len(room));
        ByteLen::new(end.saturating_sub(self.window.start))
    }

    fn read_only(&self) -> bool {
        self.lock().options.read_only
    }

    fn limits(&self) -> IoLimits {
        self.lock().options.limits
    }

    async fn read(&self, at: HostOffset, buf: IoVec) -> Result<()> {
        let mut range = self.range(at, buf.byte_len())?;
        let mut part = buf.clone();
        if let Some(inside) = self.inside(&range) {
            let bytes = inside as usize;
            buf.fill(bytes, buf.len() - bytes, 0);
            part = buf.slice(0, bytes);
            range.end = range.start + inside;
        }
        self.run(OpKind::Read, range, None, Some(part)).await.map(drop)
    }

    async fn write(&self, at: HostOffset, buf: IoVec) -> Result<()> {
        let range = self.range(at, buf.byte_len())?;
        if buf.is_empty() {
            return Ok(());
        }
        let mut data = vec![0; buf.len()];
        buf.copy_to(0, &mut data);
        let (end, change) = (range.end, Change::Write { at: range.start, data: data.into() });
        self.change(OpKind::Write, range, change).await?;
        match self.window.room {
            Some(room) => self.extend_stored(room, end, OpKind::Write).await,
            None => Ok(()),
        }
    }

    async fn sync(&self) -> Result<()> {
        self.run(OpKind::Sync, self.window.synced(), None, None).await.map(drop)
    }

    async fn discard(&self, at: HostOffset, len: ByteLen) -> Result<()> {
        let range = self.range(at, len)?;
        let mode = self.lock().options.discard;
        let (at, len, byte) = match mode {
            DiscardMode::Ignored => (0, 0, 0),
            DiscardMode::Zeroes => (range.start, len.get(), 0),
            DiscardMode::Garbage => {
                let len = self.lock().ledger.visible().len();
                let end = range.end.min(len) / crate::SECTOR * crate::SECTOR;
                let start = range.start.next_multiple_of(crate::SECTOR).min(end);
                (start, end - start, GARBAGE)
            }
        };
        let change = Change::Fill { at, len, byte, grow: false };
        self.change(OpKind::Discard, range, change).await
    }

    async fn write_zeroes(&self, at: HostOffset, len: ByteLen, mode: ZeroMode) -> Result<()> {
        let range = self.range(at, len)?;
        let fast = self.lock().options.fast_zero;
        if mode.fast_only && !fast {
            return Err(self.error(ErrorKind::Unsupported, "no fast zeroes on"));
        }
        let change = Change::Fill {
            at: range.start,
            len: len.get(),
            byte: 0,
            grow: !len.eq(&ByteLen::ZERO),
        };
        let end = range.end;
        self.change(OpKind::WriteZeroes, range, change).await?;
        match self.window.room {
            Some(room) => self.extend_stored(room, end, OpKind::WriteZeroes).await,
            None => Ok(()),
        }
    }

    async fn allocate(&self, at: HostOffset, len: ByteLen) -> Result<()> {
        let range = self.range(at, len)?;
        if let Some(room) = self.window.room {
            return self.extend_stored(room, range.end, OpKind::Allocate).await;
        }
        let change = Change::Grow { len: range.end };
        self.change(OpKind::Allocate, range, change).await
    }

    async fn grow(&self, len: ByteLen) -> Result<()> {
        let range = self.range(HostOffset::ZERO, len)?;
        if let Some(room) = self.window.room {
            return self.extend_stored(room, range.end, OpKind::Allocate).await;
        }
        if self.lock().options.device {
            return Ok(());
        }
        self.change(OpKind::Allocate, range.clone(), Change::Grow { len: range.end }).await
    }

    async fn set_len(&self, len: ByteLen) -> Result<()> {
        let end = self.range(HostOffset::ZERO, len)?.end;
        if let Some(room) = self.window.room {
            return self.set_stored_len(room, end, OpKind::SetLen).await;
        }
        if self.lock().options.device {
            return Err(self.error(ErrorKind::Unsupported, "the length is fixed of the device"));
        }
        let change = Change::SetLen { len: end };
        self.change(OpKind::SetLen, end..u64::MAX, change).await
    }

    async fn extent(&self, at: HostOffset, len: ByteLen) -> Result<Extent> {
        let range = self.range(at, len)?;
        let (len, data) = self.run(OpKind::Extent, range, None, None).await?;
        Ok(Extent { len: ByteLen::new(len), data })
    }
}

#[cfg(test)]
#[path = "storage_tests.rs"]
mod tests;
