//! How long to look for work before sleeping, learnt from how long past waits took.
//!
//! Sleeping and being woken costs about 10 µs. Looking in a loop saves that when work comes soon, and wastes the
//! core when it does not; so the window grows after short waits and is halved after long ones.

use std::cell::Cell;
use std::time::Duration;

/// The first window when short waits begin.
const FIRST: Duration = Duration::from_micros(10);
/// Windows below this are not worth the loop.
const LEAST: Duration = Duration::from_micros(4);

/// The adaptive window.
pub(crate) struct Spin {
    max: Duration,
    window: Cell<Duration>,
}

impl Spin {
    pub(crate) fn new(max: Duration) -> Self {
        Self { max, window: Cell::new(FIRST.min(max)) }
    }

    /// False when spinning is switched off.
    pub(crate) fn enabled(&self) -> bool {
        !self.max.is_zero()
    }

    /// How long to look for work now.
    pub(crate) fn window(&self) -> Duration {
        self.window.get()
    }

    /// Learns that looking was in vain, and that work came `waited` after the wait began.
    pub(crate) fn slept(&self, waited: Duration) {
        let window = self.window.get();
        let new = if waited <= self.max {
            (window * 2).max(FIRST).min(self.max)
        } else if window / 2 < LEAST {
            Duration::ZERO
        } else {
            window / 2
        };
        self.window.set(new);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_follows_how_soon_work_comes() {
        let spin = Spin::new(Duration::from_micros(50));
        for _ in 0..4 {
            spin.slept(Duration::from_micros(30));
        }
        assert_eq!(spin.window(), Duration::from_micros(50));
        for _ in 0..5 {
            spin.slept(Duration::from_millis(3));
        }
        assert_eq!(spin.window(), Duration::ZERO);
        spin.slept(Duration::from_micros(40));
        assert_eq!(spin.window(), FIRST);
    }

    #[test]
    fn a_maximum_of_zero_switches_it_off() {
        let spin = Spin::new(Duration::ZERO);
        assert!(!spin.enabled());
        spin.slept(Duration::ZERO);
        assert_eq!(spin.window(), Duration::ZERO);
    }
}
