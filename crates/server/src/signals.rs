//! The signals that end a daemon: the first asks it to stop, a second one ends it at once.

use bedplate_runtime::readable;
use bedplate_types::{Error, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::{flag, low_level::pipe};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Exit code of a daemon that is ended by a second signal.
const AT_ONCE: i32 = 1;

/// SIGTERM and SIGINT, caught from when this was made until the process ends.
#[derive(Debug)]
pub struct Signals {
    asked: Arc<AtomicBool>,
    wake: UnixStream,
}

impl Signals {
    /// Catches the signals. To be called once, before there is anything that must be put in order at the end.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn catch() -> Result<Self> {
        let failed = |e| Error::io("cannot prepare for signals", e);
        let asked = Arc::new(AtomicBool::new(false));
        let (wake, write) = UnixStream::pair().map_err(failed)?;
        for signal in [SIGTERM, SIGINT] {
            // In this order: the second signal finds the flag that the first one set.
            flag::register_conditional_shutdown(signal, AT_ONCE, asked.clone()).map_err(failed)?;
            flag::register(signal, asked.clone()).map_err(failed)?;
            pipe::register(signal, write.try_clone().map_err(failed)?).map_err(failed)?;
        }
        Ok(Self { asked, wake })
    }

    /// Whether a signal has come.
    pub fn came(&self) -> bool {
        self.asked.load(Ordering::SeqCst)
    }

    /// Returns once a signal has come.
    pub(crate) async fn wait(&self) {
        while !self.came() {
            if let Err(e) = readable(&self.wake).await {
                tracing::error!("cannot wait for signals: {e}");
                return;
            }
        }
    }
}
