//! Power cuts: which contents the medium may hold afterwards.
//!
//! The durable base is certain. Of each change since, any sectors may have arrived, and its growth of the length
//! independently of its data. Since any sector of any change may be missing, reordering adds nothing: a sector
//! holds what some change gave it, or what it held before.

use crate::{Change, Image, OpId, Rng, SECTOR};
use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

/// Fills are torn into at most this many pieces, or a large discard would have millions.
const FILL_PIECES: u64 = 64;

/// A change that is not known to be durable.
#[derive(Clone)]
pub(crate) struct Pending {
    pub(crate) id: OpId,
    pub(crate) change: Change,
    /// The length it grows the file to; kept apart from the data's sectors, which are whole.
    grow: u64,
    /// Its caller was told.
    pub(crate) ended: bool,
    /// A sync that covered it has failed; no later sync will make it durable.
    pub(crate) lost: bool,
    /// Ranges that something newer and durable has replaced.
    dead: Vec<(u64, u64)>,
}

impl Pending {
    pub(crate) fn new(id: OpId, change: Change, grow: u64) -> Self {
        Self { id, change, grow, ended: false, lost: false, dead: Vec::new() }
    }

    /// Takes note that `newer`, applied later, is durable.
    pub(crate) fn covered_by(&mut self, newer: &Change) {
        let range = match newer {
            Change::SetLen { len } => {
                self.grow = 0;
                *len..u64::MAX
            }
            other => other.range(),
        };
        let own = self.change.range();
        if own.start < range.end && range.start < own.end {
            self.dead.push((range.start, range.end));
        }
    }

    /// Lays the whole change over `image`.
    pub(crate) fn lay_all(&self, image: &mut Image) {
        self.lay(image, &Part { data: Data::All, len: true });
    }

    /// The size of the pieces that arrive or don't arrive.
    fn piece(&self) -> u64 {
        match &self.change {
            Change::Fill { len, .. } => {
                len.div_ceil(FILL_PIECES).next_multiple_of(SECTOR).max(SECTOR)
            }
            _ => SECTOR,
        }
    }

    /// How many pieces the data has.
    fn pieces(&self) -> usize {
        let range = self.change.range();
        (range.end - range.start).div_ceil(self.piece()) as usize
    }

    fn changes_len(&self) -> bool {
        self.grow > 0 || matches!(self.change, Change::SetLen { .. })
    }

    fn lay(&self, image: &mut Image, part: &Part) {
        match &part.data {
            Data::None => {}
            Data::All if self.dead.is_empty() => {
                let range = self.change.range();
                self.lay_range(image, range.start, range.end);
            }
            choice => {
                let (range, piece) = (self.change.range(), self.piece());
                for i in (0..self.pieces()).filter(|i| choice.has(*i)) {
                    let from = range.start + i as u64 * piece;
                    self.lay_living(image, from, range.end.min(from + piece));
                }
            }
        }
        if part.len {
            match self.change {
                Change::SetLen { len } => image.set_len(len),
                _ => image.reveal(self.grow),
            }
        }
    }

    /// Lays the bytes of `from..to` that nothing durable has replaced.
    fn lay_living(&self, image: &mut Image, from: u64, to: u64) {
        let mut at = from;
        while at < to {
            let dead = self.dead.iter().filter(|d| d.0 <= at && at < d.1).map(|d| d.1).max();
            if let Some(end) = dead {
                at = end;
                continue;
            }
            let next =
                self.dead.iter().map(|d| d.0).filter(|s| *s > at).min().unwrap_or(to).min(to);
            self.lay_range(image, at, next);
            at = next;
        }
    }

    fn lay_range(&self, image: &mut Image, from: u64, to: u64) {
        match &self.change {
            Change::Write { at, data } => {
                let part = data.get((from - at) as usize..(to - at) as usize);
                image.poke(from, part.unwrap_or_default());
            }
            Change::Fill { byte: 0, .. } => image.clear(from, to - from),
            Change::Fill { byte, .. } => image.poke(from, &vec![*byte; (to - from) as usize]),
            Change::Grow { .. } | Change::SetLen { .. } => {}
        }
    }
}

#[derive(Clone, PartialEq, Eq, Hash)]
enum Data {
    None,
    All,
    Some(Vec<bool>),
}

impl Data {
    fn has(&self, piece: usize) -> bool {
        match self {
            Self::None => false,
            Self::All => true,
            Self::Some(v) => v.get(piece).copied().unwrap_or(false),
        }
    }

    fn from_bits(bits: Vec<bool>) -> Self {
        if bits.iter().all(|b| *b) {
            Self::All
        } else if bits.iter().any(|b| *b) {
            Self::Some(bits)
        } else {
            Self::None
        }
    }
}

/// What of one change arrived.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Part {
    data: Data,
    len: bool,
}

impl Part {
    const NOTHING: Self = Self { data: Data::None, len: false };
    const ALL: Self = Self { data: Data::All, len: true };
}

/// A moment at which the power may fail.
#[derive(Clone)]
pub struct CrashPoint {
    base: Image,
    pending: Arc<[Pending]>,
}

impl CrashPoint {
    pub(crate) fn new(base: Image, mut pending: Vec<Pending>) -> Self {
        // Growth to less than the certain length is no choice, or half of the states would be repeats.
        if !pending.iter().any(|p| matches!(p.change, Change::SetLen { .. })) {
            for p in pending.iter_mut().filter(|p| p.grow <= base.len()) {
                p.grow = 0;
            }
        }
        Self { base, pending: pending.into() }
    }

    /// What is certain to be on the medium, give or take the changes in doubt.
    pub fn durable(&self) -> &Image {
        &self.base
    }

    /// How many changes are in doubt.
    pub fn in_doubt(&self) -> usize {
        self.pending.len()
    }

    /// The changes in doubt, in the order in which they became visible; those in flight come last.
    pub fn changes(&self) -> impl Iterator<Item = (OpId, &Change)> + '_ {
        self.pending.iter().map(|p| (p.id, &p.change))
    }

    /// The state in which nothing in doubt has arrived.
    pub fn drop_all(&self) -> CrashState {
        self.build(vec![Part::NOTHING; self.pending.len()])
    }

    /// The state in which everything has arrived.
    pub fn keep_all(&self) -> CrashState {
        self.build(vec![Part::ALL; self.pending.len()])
    }

    /// States that the medium may be in, all different in what arrived, at most `max`. All there are when they are
    /// few enough; else the corners (all, nothing, each prefix, one alone, all but one, lengths without data and
    /// the reverse, one torn) and then random ones of `seed`.
    pub fn states(&self, seed: u64, max: usize) -> CrashStates {
        let mut rng = Rng::new(seed);
        let (plans, complete) = match self.exhaustive(max) {
            Some(all) => (all, true),
            None => (self.corners(&mut rng, max), false),
        };
        CrashStates {
            point: self.clone(),
            plans: plans.into_iter(),
            seen: HashSet::new(),
            rng,
            left: max,
            complete,
        }
    }

    /// Every combination, when there are at most `max`.
    fn exhaustive(&self, max: usize) -> Option<Vec<Vec<Part>>> {
        let bits: usize =
            self.pending.iter().map(|p| p.pieces() + usize::from(p.changes_len())).sum();
        let count = u32::try_from(bits).ok().and_then(|b| 1usize.checked_shl(b))?;
        (bits < usize::BITS as usize && count <= max).then(|| {
            (0..count)
                .map(|mut n| {
                    let mut bit = || {
                        let set = n & 1 == 1;
                        n >>= 1;
                        set
                    };
                    let part = |p: &Pending| Part {
                        data: Data::from_bits((0..p.pieces()).map(|_| bit()).collect()),
                        len: p.changes_len() && bit(),
                    };
                    self.pending.iter().map(part).collect()
                })
                .collect()
        })
    }

    /// The states that bugs most often show in: half of the budget at most, and all and nothing first.
    fn corners(&self, rng: &mut Rng, max: usize) -> Vec<Vec<Part>> {
        let n = self.pending.len();
        let pick = |f: &dyn Fn(usize) -> Part| (0..n).map(f).collect::<Vec<_>>();
        let when = |b: bool| if b { Part::ALL } else { Part::NOTHING };
        let mut rest = vec![
            pick(&|_| Part { data: Data::All, len: false }),
            pick(&|_| Part { data: Data::None, len: true }),
        ];
        for i in 0..n {
            rest.push(pick(&|j| when(j <= i)));
            rest.push(pick(&|j| when(j == i)));
            rest.push(pick(&|j| when(j != i)));
            let pieces = self.pending[i].pieces();
            if pieces > 1 {
                let torn = Part { data: random_data(pieces, rng), len: rng.chance(50) };
                rest.push(pick(&|j| if j == i { torn.clone() } else { when(j < i) }));
            }
        }
        rng.shuffle(&mut rest);
        rest.truncate((max / 2).max(1));
        let mut plans = vec![vec![Part::ALL; n], vec![Part::NOTHING; n]];
        plans.append(&mut rest);
        plans
    }

    fn random(&self, rng: &mut Rng) -> Vec<Part> {
        let keep = [5, 25, 50, 75, 95][rng.below(5) as usize];
        let tear = [0, 20, 60][rng.below(3) as usize];
        self.pending
            .iter()
            .map(|p| {
                let data = match (rng.chance(tear), rng.chance(keep)) {
                    (true, _) => random_data(p.pieces(), rng),
                    (false, true) => Data::All,
                    (false, false) => Data::None,
                };
                // Lengths mostly travel with their data, but need not.
                let len = if rng.chance(70) { data != Data::None } else { rng.chance(50) };
                Part { data, len }
            })
            .collect()
    }

    fn build(&self, parts: Vec<Part>) -> CrashState {
        let mut image = self.base.clone();
        for (p, part) in self.pending.iter().zip(&parts) {
            p.lay(&mut image, part);
        }
        image.trim();
        CrashState { image, pending: self.pending.clone(), parts }
    }
}

fn random_data(pieces: usize, rng: &mut Rng) -> Data {
    // Half of the tears are a cut, as when the power fails in the middle of a transfer.
    if rng.chance(50) {
        let cut = rng.below(pieces as u64 + 1) as usize;
        let tail = rng.chance(50);
        return Data::from_bits((0..pieces).map(|i| (i < cut) != tail).collect());
    }
    Data::from_bits((0..pieces).map(|_| rng.chance(50)).collect())
}

/// One possible content of the medium after a power cut. Its `Display` tells what arrived.
pub struct CrashState {
    /// The content.
    pub image: Image,
    pending: Arc<[Pending]>,
    parts: Vec<Part>,
}

impl fmt::Display for CrashState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "length {:#x}; arrived:", self.image.len())?;
        for (p, part) in self.pending.iter().zip(&self.parts) {
            let len = if part.len && p.changes_len() { " and its length" } else { "" };
            match &part.data {
                Data::None if len.is_empty() => continue,
                Data::None => write!(f, " [#{} {:?}: only its length]", p.id, p.change)?,
                Data::All => write!(f, " [#{} {:?}{len}]", p.id, p.change)?,
                Data::Some(bits) => {
                    let map: String = bits.iter().map(|b| if *b { '1' } else { '0' }).collect();
                    write!(f, " [#{} {:?}: pieces {map}{len}]", p.id, p.change)?;
                }
            }
        }
        Ok(())
    }
}

/// The states of one [`CrashPoint`].
pub struct CrashStates {
    point: CrashPoint,
    plans: std::vec::IntoIter<Vec<Part>>,
    seen: HashSet<Vec<Part>>,
    rng: Rng,
    left: usize,
    complete: bool,
}

impl CrashStates {
    /// True when these are all the states there are, not a sample.
    pub fn is_complete(&self) -> bool {
        self.complete
    }

    fn plan(&mut self) -> Option<Vec<Part>> {
        while let Some(plan) = self.plans.next() {
            if self.complete || self.is_new(&plan) {
                return Some(plan);
            }
        }
        if self.complete {
            return None;
        }
        // So many misses in a row mean that there is hardly anything new to find.
        for _ in 0..64 {
            let plan = self.point.random(&mut self.rng);
            if self.is_new(&plan) {
                return Some(plan);
            }
        }
        None
    }

    /// Takes note of a plan, without the choices that make no difference.
    fn is_new(&mut self, plan: &[Part]) -> bool {
        let mut plain = plan.to_vec();
        for (p, part) in self.point.pending.iter().zip(&mut plain) {
            part.len &= p.changes_len();
            if p.pieces() == 0 {
                part.data = Data::None;
            }
        }
        self.seen.insert(plain)
    }
}

impl Iterator for CrashStates {
    type Item = CrashState;

    fn next(&mut self) -> Option<CrashState> {
        self.left = self.left.checked_sub(1)?;
        let plan = self.plan()?;
        Some(self.point.build(plan))
    }
}
