//! Whether a transfer that is alone should be done by the thread itself, without the ring.
//!
//! Devices that complete in the submitting call (RAM disks, compressed memory) make the ring hand the transfer to
//! a worker thread, which at depth 1 halves the speed. A positioned read or write in line is faster there; on
//! a device that takes its time it would block the queue thread. So it is tried now and then, and measured.

use std::cell::Cell;
use std::time::Duration;

/// Transfers in line are worth it up to this time, about twice a hand-over between threads.
const QUICK: Duration = Duration::from_micros(30);
/// After slow ones this many lone transfers go through the ring before the next try, doubled with each slow one.
const FIRST_PAUSE: u32 = 16;
const LONGEST_PAUSE: u32 = 2048;
/// Statistics are kept for this many files; more share places, which only makes the guesses worse.
const PLACES: usize = 64;

#[derive(Clone, Copy, Default)]
struct Place {
    /// Lone transfers still to go through the ring.
    pause: u32,
    /// The pause after the next slow one.
    next_pause: u32,
}

/// What is known about the files of a runtime.
pub(crate) struct Alone {
    places: Vec<Cell<Place>>,
}

impl Alone {
    pub(crate) fn new() -> Self {
        Self { places: vec![Cell::default(); PLACES] }
    }

    fn place(&self, file: u64) -> &Cell<Place> {
        &self.places[file as usize % PLACES]
    }

    /// True when a lone transfer of this file should be done in line.
    pub(crate) fn in_line(&self, file: u64) -> bool {
        let cell = self.place(file);
        let place = cell.get();
        cell.set(Place { pause: place.pause.saturating_sub(1), ..place });
        place.pause == 0
    }

    /// Learns how long a transfer in line took.
    pub(crate) fn took(&self, file: u64, time: Duration) {
        let cell = self.place(file);
        if time <= QUICK {
            cell.set(Place::default());
            return;
        }
        let pause = cell.get().next_pause.clamp(FIRST_PAUSE, LONGEST_PAUSE);
        cell.set(Place { pause, next_pause: pause * 2 });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_files_are_tried_ever_more_rarely_and_quick_ones_at_once_again() {
        let alone = Alone::new();
        let mut tries = Vec::new();
        for i in 0..10_000 {
            if alone.in_line(1) {
                tries.push(i);
                alone.took(1, Duration::from_millis(1));
            }
        }
        assert_eq!(tries[..4], [0, 17, 50, 115]);
        assert!(tries.len() < 15);
        while !alone.in_line(1) {}
        alone.took(1, Duration::from_micros(5));
        assert!(alone.in_line(1) && alone.in_line(1));
        assert!(alone.in_line(2));
    }
}
