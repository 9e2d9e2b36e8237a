//! Whether a transfer should be done by the thread itself, without the ring.
//!
//! Two kinds may gain by it. *Lone transfers*: devices that complete in the submitting call (RAM disks, compressed
//! memory) make the ring hand a transfer to a worker thread, which at depth 1 halves the speed. *Writes of the slow
//! road*, most of which need new space: the ring can't do them without blocking, so it fails once and hands them to a worker,
//! on a core that others need if the device's work is the CPU's. On a device that takes its time both would block
//! the queue thread. So it is tried now and then, and measured.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// Lone transfers in line are worth it up to this time, about twice a hand-over between threads.
pub(crate) const QUICK: Duration = Duration::from_micros(30);
/// After slow ones this many transfers go through the ring before the next try, doubled with each slow one.
const FIRST_PAUSE: u32 = 16;
const LONGEST_PAUSE: u32 = 2048;
/// Statistics are kept for this many files; more share places, which only makes the guesses worse.
const PLACES: usize = 64;

#[derive(Clone, Copy, Default)]
struct Place {
    /// Transfers still to go through the ring.
    pause: u32,
    /// The pause after the next slow one.
    next_pause: u32,
}

/// What is known about one kind of transfer of a runtime's files.
pub(crate) struct Inline {
    places: Vec<Cell<Place>>,
}

impl Inline {
    pub(crate) fn new() -> Self {
        Self { places: vec![Cell::default(); PLACES] }
    }

    fn place(&self, file: u64) -> &Cell<Place> {
        &self.places[file as usize % PLACES]
    }

    /// True when the next transfer of this file should be done in line.
    pub(crate) fn worth(&self, file: u64) -> bool {
        let cell = self.place(file);
        let place = cell.get();
        cell.set(Place { pause: place.pause.saturating_sub(1), ..place });
        place.pause == 0
    }

    /// Learns whether a transfer in line was good.
    pub(crate) fn learn(&self, file: u64, good: bool) {
        let cell = self.place(file);
        if good {
            cell.set(Place::default());
            return;
        }
        let pause = cell.get().next_pause.clamp(FIRST_PAUSE, LONGEST_PAUSE);
        cell.set(Place { pause, next_pause: pause * 2 });
    }
}

/// Measures whether a transfer in line is the processor's work.
pub(crate) struct Timed {
    begin: Instant,
    cpu: Duration,
}

impl Timed {
    pub(crate) fn begin() -> Self {
        Self { begin: Instant::now(), cpu: cpu_time() }
    }

    /// True when the thread worked most of the time: there was nothing to wait for.
    pub(crate) fn was_work(&self) -> bool {
        let (cpu, wall) = (cpu_time().saturating_sub(self.cpu), self.begin.elapsed());
        cpu * 4 >= wall * 3
    }
}

/// CPU time of this thread.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_files_are_tried_ever_more_rarely_and_quick_ones_at_once_again() {
        let lone = Inline::new();
        let mut tries = Vec::new();
        for i in 0..10_000 {
            if lone.worth(1) {
                tries.push(i);
                lone.learn(1, false);
            }
        }
        assert_eq!(tries[..4], [0, 17, 50, 115]);
        assert!(tries.len() < 15);
        while !lone.worth(1) {}
        lone.learn(1, true);
        assert!(lone.worth(1) && lone.worth(1));
        assert!(lone.worth(2));
    }

    #[test]
    fn waiting_is_told_from_working() {
        let waited = Timed::begin();
        let (_keep, never) = std::sync::mpsc::channel::<()>();
        let limit = Duration::from_millis(20);
        assert!(never.recv_timeout(limit).is_err());
        assert!(!waited.was_work());
    }
}
