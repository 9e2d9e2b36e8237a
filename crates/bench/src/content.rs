//! What blocks hold when their content is checked, and who remembers what they should hold.
//!
//! Callers: the loop that drives a port ([`crate::drive`]).
//!
//! A unit (the largest piece that divides every request) begins with a stamp: a magic number, the run, its place on the disk, its
//! generation and a checksum over all of it; the rest is drawn from these. A [`Ledger`] knows each unit's generation. What is read
//! back and is not what was written is one of four things:
//! - *corrupt*: the stamp or its checksum is wrong, so nobody wrote this;
//! - *misplaced*: sound, but written to another place;
//! - *lost*: an older content although a newer write was completed, and it stays so;
//! - *stale*: an older content at first, the right one when read again.
//!
//! Invariant: the driver never has two requests under way that overlap in a unit when one of them changes it; so there is always
//! one generation that is right.

use crate::random::{Random, mix};
use serde::{Deserialize, Serialize};

const MAGIC: u64 = 0x6265_6470_6c61_7465;
/// Bytes of a stamp: magic, run, place, generation, checksum.
const STAMP: usize = 40;
/// Findings that are kept as sentences.
const KEPT: usize = 20;

/// What is wrong with a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fault {
    /// Nobody wrote this.
    Corrupt,
    /// Written to another place.
    Misplaced,
    /// A completed write is not there.
    Lost,
    /// A completed write was not seen at first.
    Stale,
}

/// What was found wrong at one place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// The kind.
    pub fault: Fault,
    /// Byte on the disk where the unit begins.
    pub at: u64,
    /// A sentence.
    pub text: String,
}

/// What the checks of a run found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verified {
    /// Units compared.
    pub units: u64,
    /// Bytes of a unit.
    pub unit_bytes: u64,
    /// Units with wrong content.
    pub corrupt: u64,
    /// Units with the content of another place.
    pub misplaced: u64,
    /// Units with an older content than was written.
    pub lost: u64,
    /// Units that gave an older content at first.
    pub stale: u64,
    /// The first of them.
    pub findings: Vec<Finding>,
}

impl Verified {
    /// All that was wrong.
    pub fn faults(&self) -> u64 {
        self.corrupt + self.misplaced + self.lost + self.stale
    }

    pub(crate) fn add(&mut self, other: Verified) {
        self.units += other.units;
        self.unit_bytes = self.unit_bytes.max(other.unit_bytes);
        self.corrupt += other.corrupt;
        self.misplaced += other.misplaced;
        self.lost += other.lost;
        self.stale += other.stale;
        self.findings.extend(other.findings);
        self.findings.truncate(KEPT);
    }

    fn note(&mut self, finding: Finding) {
        *match finding.fault {
            Fault::Corrupt => &mut self.corrupt,
            Fault::Misplaced => &mut self.misplaced,
            Fault::Lost => &mut self.lost,
            Fault::Stale => &mut self.stale,
        } += 1;
        if self.findings.len() < KEPT {
            self.findings.push(finding);
        }
    }
}

/// A unit as it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    /// Neither stamp nor checksum fit.
    Nothing,
    /// A sound unit of this run and place, by its generation.
    Generation(u64),
    /// A sound unit of another place or run.
    Other { run: u64, at: u64 },
}

/// Each step is one to one in the sum so far, so that a change of one word alone always shows.
fn checksum(unit: &[u8]) -> u64 {
    let mut sum = MAGIC;
    let (before, rest) =
        (unit.get(..32).unwrap_or_default(), unit.get(STAMP..).unwrap_or_default());
    for word in before.chunks(8).chain(rest.chunks(8)) {
        let mut bytes = [0; 8];
        bytes[..word.len()].copy_from_slice(word);
        sum = (sum ^ u64::from_le_bytes(bytes)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        sum ^= sum >> 29;
    }
    sum
}

fn word(unit: &[u8], index: usize) -> u64 {
    let bytes = unit.get(index * 8..).and_then(|rest| rest.first_chunk());
    bytes.map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// Fills a unit with the content of its place and generation.
fn fill(unit: &mut [u8], run: u64, at: u64, generation: u64) {
    let seed = mix(run ^ mix(at)).wrapping_add(generation);
    Random::new(seed).fill(unit.get_mut(STAMP..).unwrap_or_default());
    for (to, value) in unit.chunks_exact_mut(8).zip([MAGIC, run, at, generation]) {
        to.copy_from_slice(&value.to_le_bytes());
    }
    let sum = checksum(unit);
    if let Some(to) = unit.get_mut(32..STAMP) {
        to.copy_from_slice(&sum.to_le_bytes());
    }
}

fn look(unit: &[u8], run: u64, at: u64) -> Seen {
    if word(unit, 0) != MAGIC || word(unit, 4) != checksum(unit) {
        return Seen::Nothing;
    }
    match (word(unit, 1), word(unit, 2)) {
        (r, a) if (r, a) == (run, at) => Seen::Generation(word(unit, 3)),
        (run, at) => Seen::Other { run, at },
    }
}

/// What one thread wrote to its part of the disk.
pub struct Ledger {
    run: u64,
    first: u64,
    unit: u64,
    /// The generation that each unit has; 0: not written by this run, or trimmed.
    generations: Vec<u64>,
    next: u64,
    found: Verified,
}

impl Ledger {
    /// A ledger for `len` bytes from byte `first` of the disk, in units of `unit` bytes.
    pub fn new(run: u64, first: u64, len: u64, unit: u64) -> Self {
        let units = usize::try_from(len / unit).unwrap_or(0);
        let found = Verified { unit_bytes: unit, ..Verified::default() };
        Self { run, first, unit, generations: vec![0; units], next: 1, found }
    }

    fn units(&self, at: u64, len: usize) -> std::ops::Range<usize> {
        let start = (at.saturating_sub(self.first) / self.unit) as usize;
        start..(start + len / self.unit as usize).min(self.generations.len())
    }

    /// Fills a buffer for a write to `at`; gives the generation, for [`Self::wrote`].
    pub fn stamp(&mut self, at: u64, buffer: &mut [u8]) -> u64 {
        let generation = self.next;
        self.next += 1;
        let mut place = at;
        for unit in buffer.chunks_mut(self.unit as usize) {
            fill(unit, self.run, place, generation);
            place += self.unit;
        }
        generation
    }

    /// Notes a completed write. One that failed has no generation: its content is not known any more.
    pub fn wrote(&mut self, at: u64, len: usize, generation: Option<u64>) {
        let range = self.units(at, len);
        if let Some(all) = self.generations.get_mut(range) {
            all.fill(generation.unwrap_or(0));
        }
    }

    /// Notes a completed trim, after which any content is right.
    pub fn trimmed(&mut self, at: u64, len: usize) {
        self.wrote(at, len, None);
    }

    /// Compares what was read from `at`; the places of units that must be read again to tell a lost write from a stale read are
    /// given back.
    pub fn compare(&mut self, at: u64, data: &[u8]) -> Vec<u64> {
        let mut again = Vec::new();
        for (index, unit) in self.units(at, data.len()).zip(data.chunks(self.unit as usize)) {
            let place = self.first + index as u64 * self.unit;
            let wanted = self.generations.get(index).copied().unwrap_or(0);
            if wanted == 0 {
                continue;
            }
            self.found.units += 1;
            match look(unit, self.run, place) {
                Seen::Generation(is) if is == wanted => {}
                Seen::Other { run, at } if run == self.run => self.note(
                    Fault::Misplaced,
                    place,
                    format!("it holds what was written to byte {at}"),
                ),
                Seen::Generation(_) | Seen::Other { .. } => again.push(place),
                Seen::Nothing if is_blank(unit) => again.push(place),
                Seen::Nothing => {
                    let text = format!("its checksum is wrong (write {wanted} was expected)");
                    self.note(Fault::Corrupt, place, text);
                }
            }
        }
        again
    }

    /// Tells a lost write from a stale read, by what a second read of the unit at `place` gave.
    pub fn compare_again(&mut self, place: u64, data: &[u8]) {
        let index = self.units(place, 1).start;
        let wanted = self.generations.get(index).copied().unwrap_or(0);
        match look(data, self.run, place) {
            Seen::Generation(is) if is == wanted => {
                let text =
                    format!("a read gave older content, the next one write {wanted} as it should");
                self.note(Fault::Stale, place, text);
            }
            seen => {
                let is = match seen {
                    Seen::Generation(is) => format!("write {is}"),
                    _ => "what was there before".to_owned(),
                };
                let text = format!("write {wanted} was completed, but it still holds {is}");
                self.note(Fault::Lost, place, text);
            }
        }
    }

    fn note(&mut self, fault: Fault, at: u64, text: String) {
        let text = format!("the block at byte {at}: {text}");
        self.found.note(Finding { fault, at, text });
    }

    /// Runs of units that were written, as (first byte, bytes), none longer than `most` bytes.
    pub fn written(&self, most: u64) -> Vec<(u64, u64)> {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for (index, _) in self.generations.iter().enumerate().filter(|(_, g)| **g != 0) {
            let at = self.first + index as u64 * self.unit;
            match runs.last_mut() {
                Some((start, len)) if *start + *len == at && *len + self.unit <= most => {
                    *len += self.unit;
                }
                _ => runs.push((at, self.unit)),
            }
        }
        runs
    }

    /// Bytes of a unit.
    pub fn unit(&self) -> u64 {
        self.unit
    }

    /// What was found.
    pub fn into_found(self) -> Verified {
        self.found
    }
}

/// Zeroes or one repeated byte: space that was never written.
fn is_blank(unit: &[u8]) -> bool {
    unit.first().is_some_and(|first| unit.iter().all(|byte| byte == first))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flipped_bit_shows() {
        let mut unit = vec![0; 512];
        fill(&mut unit, 7, 4096, 3);
        assert_eq!(look(&unit, 7, 4096), Seen::Generation(3));
        for bit in 0..512 * 8 {
            unit[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(look(&unit, 7, 4096), Seen::Nothing, "bit {bit}");
            unit[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn each_fault_is_told_from_the_others() {
        let mut ledger = Ledger::new(9, 4096, 4096, 512);
        let (mut old, mut new) = (vec![0; 1024], vec![0; 1024]);
        let first = ledger.stamp(4608, &mut old);
        let second = ledger.stamp(4608, &mut new);
        ledger.wrote(4608, 1024, Some(first));
        assert!(ledger.compare(4608, &old).is_empty());
        ledger.wrote(4608, 1024, Some(second));
        assert!(ledger.compare(4608, &new).is_empty() && ledger.found.faults() == 0);
        // Older content, and none at all.
        assert_eq!(ledger.compare(4608, &old), [4608, 5120]);
        ledger.compare_again(4608, &new[..512]);
        ledger.compare_again(5120, &old[512..]);
        assert_eq!(ledger.compare(4608, &[0; 512]), [4608]);
        ledger.compare_again(4608, &[0; 512]);
        // The content of the neighbour, and a flipped bit.
        assert!(ledger.compare(4608, &new[512..]).is_empty());
        new[700] ^= 1;
        assert!(ledger.compare(4608, &new).is_empty());
        let found = &ledger.found;
        let counts = (found.stale, found.lost, found.misplaced, found.corrupt);
        assert_eq!(counts, (1, 2, 1, 1), "{found:?}");
        assert_eq!(ledger.written(1 << 20), [(4608, 1024)]);
        assert_eq!(ledger.written(512), [(4608, 512), (5120, 512)]);
        ledger.trimmed(4608, 512);
        ledger.wrote(5120, 512, None);
        assert!(ledger.written(1 << 20).is_empty());
    }
}
