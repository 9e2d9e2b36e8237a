//! How a subcommand fails: with an error to print and an exit code, or because nobody reads its output any more.

use bedplate_types::Error;
use std::io;

/// Exit code of a failure.
const FAILED: u8 = 1;

/// Why a subcommand did not end well.
pub enum Failure {
    /// The reader of the output has gone.
    BrokenPipe,
    /// Print this and exit with the code.
    Code(u8, Error),
}

impl From<Error> for Failure {
    fn from(e: Error) -> Self {
        Self::Code(FAILED, e)
    }
}

impl From<io::Error> for Failure {
    /// A failed write to the standard output.
    fn from(e: io::Error) -> Self {
        match e.kind() {
            io::ErrorKind::BrokenPipe => Self::BrokenPipe,
            _ => Error::io("cannot write to the standard output", e).into(),
        }
    }
}

impl From<serde_json::Error> for Failure {
    fn from(e: serde_json::Error) -> Self {
        io::Error::from(e).into()
    }
}
