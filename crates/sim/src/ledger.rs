//! What is visible, what is durable, and what lies between: the state machine behind the simulated storage.
//!
//! A change goes through *start* (it may reach the medium from here on), *apply* (reads see it) and *end* (its
//! caller knows). A sync makes durable what had ended before the sync started. Every step is an [`Event`]; the
//! same machine replays a recorded [`History`], so that each moment of a run can be looked at afterwards.

use crate::crash::{CrashPoint, Pending};
use crate::{Image, SECTOR};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Number of a request, unique in one storage.
pub type OpId = u64;

/// A change of contents or length.
#[derive(Clone)]
pub enum Change {
    /// Bytes written.
    Write {
        /// First byte.
        at: u64,
        /// What was written.
        data: Arc<[u8]>,
    },
    /// A range that reads as `byte` afterwards: zeroes, or what a device makes of discarded space.
    Fill {
        /// First byte.
        at: u64,
        /// Bytes.
        len: u64,
        /// The value; 0 makes a hole.
        byte: u8,
        /// True when the length grows to hold the range.
        grow: bool,
    },
    /// Growth to at least this length.
    Grow {
        /// The length.
        len: u64,
    },
    /// A new length.
    SetLen {
        /// The length.
        len: u64,
    },
}

impl Change {
    /// The range whose contents change, empty when only the length does.
    pub fn range(&self) -> std::ops::Range<u64> {
        match self {
            Self::Write { at, data } => *at..at.saturating_add(data.len() as u64),
            Self::Fill { at, len, .. } => *at..at.saturating_add(*len),
            Self::Grow { .. } | Self::SetLen { .. } => 0..0,
        }
    }

    /// The length up to which the change makes the file grow.
    pub(crate) fn grows_to(&self) -> u64 {
        match self {
            Self::Write { .. } | Self::Fill { grow: true, .. } => self.range().end,
            Self::Grow { len } => *len,
            Self::Fill { .. } | Self::SetLen { .. } => 0,
        }
    }

    /// Only the first `len` bytes of a write.
    fn cut(self, len: usize) -> Self {
        match self {
            Self::Write { at, data } => {
                Self::Write { at, data: data.get(..len).unwrap_or(&data).into() }
            }
            other => other,
        }
    }

    /// The write extended to whole sectors with what `around` holds: a medium can't take less.
    fn whole_sectors(self, around: &Image) -> Self {
        let Self::Write { at, data } = self else { return self };
        let end = at + data.len() as u64;
        let (from, to) = (at - at % SECTOR, end.next_multiple_of(SECTOR));
        if (from, to) == (at, end) || data.is_empty() {
            return Self::Write { at, data };
        }
        let mut whole = vec![0; (to - from) as usize];
        around.read(from, &mut whole);
        whole[(at - from) as usize..(end - from) as usize].copy_from_slice(&data);
        Self::Write { at: from, data: whole.into() }
    }
}

impl std::fmt::Debug for Change {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Write { at, data } => write!(f, "write {:#x}+{:#x}", at, data.len()),
            Self::Fill { at, len, byte, .. } => write!(f, "fill {at:#x}+{len:#x} with {byte}"),
            Self::Grow { len } => write!(f, "grow to {len:#x}"),
            Self::SetLen { len } => write!(f, "set length {len:#x}"),
        }
    }
}

/// One step of a run.
#[derive(Clone, Debug)]
pub enum Event {
    /// A change was issued.
    Start {
        /// The request.
        id: OpId,
        /// What it does.
        change: Change,
    },
    /// A change became visible to reads.
    Apply {
        /// The request.
        id: OpId,
        /// For a write that fails: how many of its bytes were written.
        only: Option<usize>,
    },
    /// A change's caller was told.
    End {
        /// The request.
        id: OpId,
        /// False when it was told of an error.
        ok: bool,
    },
    /// A sync was issued.
    SyncStart {
        /// The request.
        id: OpId,
        /// Where changes become durable. Changes of the length belong to the end.
        range: std::ops::Range<u64>,
    },
    /// A sync's caller was told.
    SyncEnd {
        /// The request.
        id: OpId,
        /// False when it was told of an error.
        ok: bool,
    },
    /// A note of the test's own, made with [`crate::SimStorage::mark`].
    Mark(u64),
}

/// The state at one moment.
#[derive(Clone, Default)]
pub(crate) struct Ledger {
    visible: Image,
    durable: Image,
    /// Applied and not known to be durable, in the order of application.
    pending: Vec<Pending>,
    /// Issued, not yet applied.
    started: BTreeMap<OpId, Change>,
    /// What each running sync will make durable.
    syncs: BTreeMap<OpId, Vec<OpId>>,
}

impl Ledger {
    pub(crate) fn new(image: Image) -> Self {
        Self { visible: image.clone(), durable: image, ..Self::default() }
    }

    pub(crate) fn visible(&self) -> &Image {
        &self.visible
    }

    pub(crate) fn durable(&self) -> &Image {
        &self.durable
    }

    /// Takes one step.
    pub(crate) fn step(&mut self, event: &Event) {
        match event {
            Event::Start { id, change } => {
                self.started.insert(*id, change.clone());
            }
            Event::Apply { id, only } => self.apply(*id, *only),
            Event::End { id, ok: _ } => {
                // A request that failed before it was applied has done nothing.
                self.started.remove(id);
                if let Some(p) = self.pending.iter_mut().find(|p| p.id == *id) {
                    p.ended = true;
                }
            }
            Event::SyncStart { id, range } => {
                let covers = |p: &&Pending| match p.change {
                    Change::Grow { .. } | Change::SetLen { .. } => range.end == u64::MAX,
                    _ => range.contains(&p.change.range().start),
                };
                let done = self.pending.iter().filter(|p| p.ended && !p.lost).filter(covers);
                self.syncs.insert(*id, done.map(|p| p.id).collect());
            }
            Event::SyncEnd { id, ok } => {
                let covered = self.syncs.remove(id).unwrap_or_default();
                if *ok {
                    self.make_durable(&covered);
                } else {
                    // As with Linux: what a failed sync was to write out counts as written to later syncs.
                    for p in self.pending.iter_mut().filter(|p| covered.contains(&p.id)) {
                        p.lost = true;
                    }
                }
            }
            Event::Mark(_) => {}
        }
    }

    fn apply(&mut self, id: OpId, only: Option<usize>) {
        let Some(mut change) = self.started.remove(&id) else { return };
        if let Some(n) = only {
            change = change.cut(n);
        }
        let grow = change.grows_to();
        let p = Pending::new(id, change.whole_sectors(&self.visible), grow);
        p.lay_all(&mut self.visible);
        self.pending.push(p);
    }

    /// Moves changes to the durable image, in the order in which they were applied.
    fn make_durable(&mut self, ids: &[OpId]) {
        let mut take: Vec<bool> = self.pending.iter().map(|p| ids.contains(&p.id)).collect();
        // A change of length can't come to lie behind what was applied after it.
        let last = take.iter().rposition(|t| *t).unwrap_or(0);
        for (p, t) in self.pending.iter().zip(&mut take).take(last) {
            *t |= matches!(p.change, Change::SetLen { .. });
        }
        for i in 0..self.pending.len() {
            let (older, rest) = self.pending.split_at_mut(i);
            if let (true, Some(p)) = (take[i], rest.first()) {
                p.lay_all(&mut self.durable);
                for (old, _) in older.iter_mut().zip(&take).filter(|(_, taken)| !**taken) {
                    old.covered_by(&p.change);
                }
            }
        }
        let mut taken = take.into_iter();
        self.pending.retain(|_| !taken.next().unwrap_or(false));
    }

    /// What a power cut at this moment leaves to choose from.
    pub(crate) fn crash_point(&self) -> CrashPoint {
        let mut pending = self.pending.clone();
        for (id, change) in &self.started {
            let grow = change.grows_to();
            pending.push(Pending::new(*id, change.clone().whole_sectors(&self.visible), grow));
        }
        CrashPoint::new(self.durable.clone(), pending)
    }
}

/// The recorded steps of a run and the image it began with.
#[derive(Clone)]
pub struct History {
    pub(crate) start: Image,
    pub(crate) events: Vec<Event>,
}

impl History {
    /// The steps.
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// Goes through the run again from its beginning.
    pub fn replay(&self) -> Replay<'_> {
        Replay { ledger: Ledger::new(self.start.clone()), events: self.events.iter() }
    }
}

/// A run that is gone through again, step by step.
pub struct Replay<'a> {
    ledger: Ledger,
    events: std::slice::Iter<'a, Event>,
}

impl<'a> Replay<'a> {
    /// Takes the next step and tells which it was; `None` at the end of the run.
    pub fn step(&mut self) -> Option<&'a Event> {
        let event = self.events.next()?;
        self.ledger.step(event);
        Some(event)
    }

    /// What a power cut after the last step leaves to choose from.
    pub fn crash_point(&self) -> CrashPoint {
        self.ledger.crash_point()
    }

    /// What reads saw after the last step.
    pub fn visible(&self) -> &Image {
        self.ledger.visible()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(at: u64, byte: u8, len: usize) -> Change {
        Change::Write { at, data: vec![byte; len].into() }
    }

    fn run(ledger: &mut Ledger, id: OpId, change: Change) {
        ledger.step(&Event::Start { id, change });
        ledger.step(&Event::Apply { id, only: None });
        ledger.step(&Event::End { id, ok: true });
    }

    fn byte(image: &Image, at: u64) -> u8 {
        let mut b = [0];
        image.read(at, &mut b);
        b[0]
    }

    #[test]
    fn a_sync_covers_what_ended_before_it_started_and_nothing_else() {
        let mut l = Ledger::new(Image::new(4096));
        run(&mut l, 1, write(0, 1, 512));
        l.step(&Event::SyncStart { id: 2, range: 0..u64::MAX });
        run(&mut l, 3, write(512, 3, 512));
        l.step(&Event::SyncEnd { id: 2, ok: true });
        assert_eq!((byte(l.durable(), 0), byte(l.durable(), 512)), (1, 0));
        assert_eq!(byte(l.visible(), 512), 3);
    }

    #[test]
    fn a_sync_of_one_part_leaves_the_other_in_doubt() {
        let mut l = Ledger::new(Image::new(4096));
        run(&mut l, 1, write(0, 1, 512));
        run(&mut l, 2, write(2048, 2, 512));
        run(&mut l, 3, Change::SetLen { len: 8192 });
        l.step(&Event::SyncStart { id: 4, range: 0..2048 });
        l.step(&Event::SyncEnd { id: 4, ok: true });
        assert_eq!((byte(l.durable(), 0), byte(l.durable(), 2048)), (1, 0));
        assert_eq!(l.durable().len(), 4096);
        l.step(&Event::SyncStart { id: 5, range: 2048..u64::MAX });
        l.step(&Event::SyncEnd { id: 5, ok: true });
        assert_eq!((byte(l.durable(), 2048), l.durable().len()), (2, 8192));
    }

    #[test]
    fn an_older_write_in_flight_cannot_undo_a_durable_newer_one() {
        let mut l = Ledger::new(Image::new(4096));
        l.step(&Event::Start { id: 1, change: write(0, 1, 1024) });
        l.step(&Event::Apply { id: 1, only: None });
        run(&mut l, 2, write(512, 2, 512));
        l.step(&Event::SyncStart { id: 3, range: 0..u64::MAX });
        l.step(&Event::SyncEnd { id: 3, ok: true });
        for state in l.crash_point().states(1, 100) {
            assert_eq!(byte(&state.image, 512), 2, "{state}");
        }
    }

    #[test]
    fn what_a_failed_sync_covered_stays_in_doubt_after_a_later_sync() {
        let mut l = Ledger::new(Image::new(4096));
        run(&mut l, 1, write(0, 1, 512));
        for (id, ok) in [(2, false), (3, true)] {
            l.step(&Event::SyncStart { id, range: 0..u64::MAX });
            l.step(&Event::SyncEnd { id, ok });
        }
        assert!(l.crash_point().states(1, 100).any(|s| byte(&s.image, 0) == 0));
    }

    #[test]
    fn a_part_of_a_sector_is_written_with_what_stood_around_it() {
        let mut l = Ledger::new(Image::new(4096));
        run(&mut l, 1, write(0, 1, 256));
        run(&mut l, 2, write(256, 2, 256));
        let seen: std::collections::BTreeSet<(u8, u8)> = l
            .crash_point()
            .states(1, 100)
            .map(|s| (byte(&s.image, 0), byte(&s.image, 256)))
            .collect();
        assert_eq!(seen.into_iter().collect::<Vec<_>>(), [(0, 0), (1, 0), (1, 2)]);
    }
}
