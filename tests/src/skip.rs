//! Tests that can't run on this machine. Rust's test harness can't mark a test as skipped at run time, so the reason goes to
//! standard error and, when `BEDPLATE_SKIP_LOG` names a file (`cargo xtask test` sets it), to that file, which is summed up
//! at the end of the run.

use crate::host;
use std::io::Write;

/// Records that `test` does not run here, and why. The caller returns right after.
pub fn skip(test: &str, why: &str) {
    eprintln!("SKIPPED {test}: {why}");
    let Some(path) = std::env::var_os("BEDPLATE_SKIP_LOG") else { return };
    let line = format!("{test}: {why}\n");
    let file = std::fs::OpenOptions::new().create(true).append(true).open(&path);
    if let Err(error) = file.and_then(|mut file| file.write_all(line.as_bytes())) {
        eprintln!("the skip log {} can't be written: {error}", path.display());
    }
}

/// Whether a program is there; when not, the test is recorded as skipped.
pub fn has_or_skip(test: &str, program: &str) -> bool {
    let there = host::which(program).is_some();
    if !there {
        skip(test, &format!("{program} is not installed"));
    }
    there
}
