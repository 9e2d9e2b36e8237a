//! What a runtime is told when it is made, and how long one of its rounds may wait.

use std::time::Duration;

/// How a runtime does its I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Backend {
    /// io_uring; where that can't be had, the thread pool, with a warning that says why.
    #[default]
    Auto,
    /// io_uring, or an error.
    Uring,
    /// Positioned reads and writes on a small pool of threads.
    Threads,
}

/// Settings of a [`crate::Runtime`].
#[derive(Clone, Debug)]
pub struct Config {
    /// Size of the submission ring. Rounded up to a power of two, and down to what the kernel allows.
    pub entries: u32,
    /// The longest time to look for work in a loop before sleeping; zero switches that off. How much of it is
    /// used adapts to how soon work usually comes.
    pub spin: Duration,
    /// How I/O is done.
    pub backend: Backend,
}

impl Default for Config {
    fn default() -> Self {
        Self { entries: 256, spin: Duration::from_micros(50), backend: Backend::Auto }
    }
}

/// How long [`crate::Runtime::turn`] may sleep when there is nothing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Not at all.
    No,
    /// Until something happens.
    Forever,
    /// Until something happens, at most this long.
    For(Duration),
}

/// When [`crate::Runtime::turn_polling`] asks its caller for work of the caller's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Idle {
    /// In the loop before sleeping; asked many times, so the answer should be cheap.
    Spinning,
    /// Once, right before sleeping: the time to ask for notifications and to look a last time.
    Sleeping,
}
