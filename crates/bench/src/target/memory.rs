//! A disk in memory for tests, which can be made to lie.

use crate::job::Op;
use crate::plan::Step;
use crate::port::{Done, Port, Status};
use bedplate_types::Result;
use std::time::Duration;

/// What the disk does wrong, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lie {
    Nothing,
    /// The so many-th write has one bit flipped.
    Flip(u64),
    /// The so many-th write is completed and not done.
    Lose(u64),
    /// The so many-th write goes to the place of the one before.
    Misplace(u64),
    /// The so many-th read gives what was there before the last write to it.
    Stale(u64),
    /// The so many-th request fails.
    Fail(u64),
}

/// The disk, with one user.
pub(crate) struct Memory {
    pub now: Vec<u8>,
    before: Vec<u8>,
    slots: Vec<Vec<u8>>,
    pushed: Vec<(usize, Step)>,
    lie: Lie,
    count: [u64; 4],
    all: u64,
    last: u64,
    /// Every request in its order.
    pub log: Vec<Step>,
}

impl Memory {
    pub fn new(size: usize, depth: usize, block: usize, lie: Lie) -> Self {
        Self {
            now: vec![0; size],
            before: vec![0; size],
            slots: vec![vec![0; block]; depth],
            pushed: Vec::new(),
            lie,
            count: [0; 4],
            all: 0,
            last: 0,
            log: Vec::new(),
        }
    }

    fn perform(&mut self, slot: usize, step: Step) -> Status {
        self.log.push(step);
        self.all += 1;
        self.count[step.op as usize] += 1;
        let count = self.count[step.op as usize];
        if self.lie == Lie::Fail(self.all) {
            return Status::Errno(5);
        }
        let (at, len) = (step.at as usize, step.len as usize);
        let range = at..at + len;
        match step.op {
            Op::Write if self.lie == Lie::Lose(count) => {}
            Op::Write => {
                let to = if self.lie == Lie::Misplace(count) { self.last as usize } else { at };
                self.before[range.clone()].copy_from_slice(&self.now[range]);
                self.now[to..to + len].copy_from_slice(&self.slots[slot][..len]);
                if self.lie == Lie::Flip(count) {
                    self.now[to + 100] ^= 4;
                }
                self.last = step.at;
            }
            Op::Read => {
                // A stale read shows only where something was written.
                let stale = match &mut self.lie {
                    Lie::Stale(from) if count >= *from => {
                        self.before[range.clone()] != self.now[range.clone()]
                    }
                    _ => false,
                };
                let from = if stale { &self.before } else { &self.now };
                self.slots[slot][..len].copy_from_slice(&from[range]);
                if stale {
                    self.lie = Lie::Nothing;
                }
            }
            Op::Trim => self.now[range].fill(0),
            Op::Flush => {}
        }
        Status::Good
    }
}

impl Port for Memory {
    fn put(&mut self, slot: usize, data: &[u8]) -> Result<()> {
        self.slots[slot][..data.len()].copy_from_slice(data);
        Ok(())
    }

    fn get(&mut self, slot: usize, data: &mut [u8]) -> Result<()> {
        data.copy_from_slice(&self.slots[slot][..data.len()]);
        Ok(())
    }

    fn push(&mut self, slot: usize, step: Step) -> Result<()> {
        assert!(self.pushed.iter().all(|p| p.0 != slot), "the slot is in flight");
        self.pushed.push((slot, step));
        Ok(())
    }

    fn exchange(
        &mut self,
        _limit: Option<Duration>,
        most: usize,
        done: &mut Vec<Done>,
    ) -> Result<()> {
        // The newest first, so that nothing depends on the order; the oldest stay in flight.
        for _ in 0..self.pushed.len().div_ceil(2).min(most) {
            let Some((slot, step)) = self.pushed.pop() else { break };
            let status = self.perform(slot, step);
            done.push(Done { slot, status });
        }
        Ok(())
    }
}
