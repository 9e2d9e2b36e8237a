//! What each sector of a disk may hold at each moment of a run, also after a power cut at that moment.
//!
//! Time is counted in marks. A change of a sector has a start (submitted) and an end (its request completed); it is
//! *overtaken* once a change that started after its end can no longer be lost. Until then a sector may hold it.

use crate::pattern::{BYTES, tag_of};
use bedplate_sim::SECTOR;

/// A moment: the number of the last mark.
pub type Time = u64;

/// Never.
const NEVER: Time = Time::MAX;

#[derive(Clone, Copy, Debug)]
struct Change {
    value: u64,
    start: Time,
    end: Time,
    /// It surely happened, so that it can overtake others.
    sure: bool,
    /// When it was certain to survive a power cut.
    durable: Time,
}

/// The changes of all sectors, and the flushes.
#[derive(Clone, Debug)]
pub struct Oracle {
    sectors: Vec<Vec<Change>>,
    /// Start and end of each flush that succeeded.
    flushes: Vec<(Time, Time)>,
}

/// A change of some sectors that is under way.
#[must_use]
pub struct Pending(Vec<(usize, usize)>);

/// How a change ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It happened.
    Done,
    /// It happened, and is durable.
    Durable,
    /// It may have happened.
    Unknown,
}

impl Oracle {
    /// The first content of a disk, in whole sectors.
    ///
    /// # Errors
    /// The sector that does not repeat one number.
    pub fn new(content: &[u8]) -> Result<Self, String> {
        let mut sectors = Vec::new();
        for (i, sector) in content.chunks(BYTES).enumerate() {
            let value = tag_of(sector).ok_or(format!("sector {i} has no tag"))?;
            sectors.push(vec![Change { value, start: 0, end: 0, sure: true, durable: 0 }]);
        }
        Ok(Self { sectors, flushes: Vec::new() })
    }

    /// How many sectors the disk has.
    pub fn sectors(&self) -> u64 {
        self.sectors.len() as u64
    }

    /// The byte range begins to change; `value` tells each sector's new number.
    pub fn begin(&mut self, now: Time, at: u64, len: u64, value: impl Fn(u64) -> u64) -> Pending {
        let mut places = Vec::new();
        for sector in at / SECTOR..(at + len).div_ceil(SECTOR) {
            let Some(list) = self.sectors.get_mut(sector as usize) else { continue };
            places.push((sector as usize, list.len()));
            let value = value(sector);
            list.push(Change { value, start: now, end: NEVER, sure: false, durable: NEVER });
        }
        Pending(places)
    }

    /// The change has ended.
    pub fn end(&mut self, pending: Pending, now: Time, outcome: Outcome) {
        for (sector, index) in pending.0 {
            let change = self.sectors.get_mut(sector).and_then(|list| list.get_mut(index));
            if let Some(c) = change {
                c.end = now;
                c.sure = outcome != Outcome::Unknown;
                c.durable = if outcome == Outcome::Durable { now } else { NEVER };
            }
        }
    }

    /// A flush has succeeded: what had completed at `start` is durable from `end` on.
    pub fn flushed(&mut self, start: Time, end: Time) {
        self.flushes.push((start, end));
        let changes = self.sectors.iter_mut().flatten();
        for c in changes.filter(|c| c.sure && c.end <= start) {
            c.durable = c.durable.min(end);
        }
    }

    /// Which numbers each sector may hold after a power cut at `now`.
    pub fn after_crash(&self, now: Time) -> Allowed {
        self.allowed(now, |c| c.durable <= now)
    }

    /// Which numbers each sector may hold when all is well and nothing is under way at `now`.
    pub fn at_rest(&self, now: Time) -> Allowed {
        self.allowed(now, |c| c.end <= now)
    }

    fn allowed(&self, now: Time, settled: impl Fn(&Change) -> bool) -> Allowed {
        let of = |list: &Vec<Change>| {
            let begun = || list.iter().filter(|c| c.start <= now);
            // The latest start of what can't be lost overtakes most.
            let bar = begun().filter(|c| c.sure && settled(c)).map(|c| c.start).max();
            let kept = begun().filter(|c| bar.is_none_or(|bar| c.end >= bar));
            kept.map(|c| c.value).collect()
        };
        Allowed(self.sectors.iter().map(of).collect())
    }

    /// All that happened to a sector, for messages.
    pub fn story(&self, sector: u64) -> String {
        let mut text = String::new();
        for c in self.sectors.get(sector as usize).into_iter().flatten() {
            let time = |t: Time| if t == NEVER { "never".to_owned() } else { t.to_string() };
            text += &format!(
                " [{:#x} from {} to {}, sure {}, durable {}]",
                c.value,
                c.start,
                time(c.end),
                c.sure,
                time(c.durable)
            );
        }
        text
    }
}

/// The numbers that each sector may hold.
pub struct Allowed(Vec<Vec<u64>>);

impl Allowed {
    /// The first sector of `content` that holds what it may not, with what it holds.
    pub fn wrong(&self, content: &[u8]) -> Option<(u64, Option<u64>)> {
        for (i, sector) in content.chunks(BYTES).enumerate() {
            let value = tag_of(sector);
            let allowed = self.0.get(i).is_some_and(|all| value.is_some_and(|v| all.contains(&v)));
            if !allowed {
                return Some((i as u64, value));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(allowed: &Allowed) -> Vec<u64> {
        allowed.0[0].clone()
    }

    #[test]
    fn a_value_is_allowed_until_a_later_one_is_durable() {
        let mut o = Oracle::new(&[0; BYTES]).expect("zeroes");
        let a = o.begin(1, 0, 512, |_| 7);
        assert_eq!(values(&o.after_crash(1)), [0, 7]);
        o.end(a, 2, Outcome::Done);
        assert_eq!(values(&o.at_rest(2)), [7]);
        o.flushed(3, 5);
        assert_eq!(values(&o.after_crash(4)), [0, 7]);
        assert_eq!(values(&o.after_crash(5)), [7]);
        let b = o.begin(6, 0, 512, |_| 8);
        assert_eq!(values(&o.after_crash(6)), [7, 8]);
        o.end(b, 7, Outcome::Unknown);
        assert_eq!(values(&o.at_rest(7)), [7, 8]);
    }

    #[test]
    fn changes_at_the_same_time_may_end_in_any_order() {
        let mut o = Oracle::new(&[0; BYTES]).expect("zeroes");
        let a = o.begin(1, 0, 512, |_| 7);
        let b = o.begin(2, 0, 512, |_| 8);
        o.end(b, 3, Outcome::Durable);
        o.end(a, 4, Outcome::Done);
        assert_eq!(values(&o.after_crash(4)), [7, 8]);
    }
}
