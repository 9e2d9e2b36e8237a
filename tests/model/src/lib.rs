//! Random work on qcow2 disks over simulated storage, and what must be true afterwards.
//!
//! Callers: `tests/tests/model.rs`, `crash.rs` and `faults.rs`. One seed decides everything: the image's geometry
//! and first content, the operations, delays and order, faults, and which crash states are looked at; so a failure
//! is repeated by its seed.
//!
//! - [`Spec`] says what an image is like; [`Bed`] is the image made by it, with what lies below and what the guest sees.
//! - [`plain`] runs operations against a byte array; [`matrix`] has the kinds of images for it, all that there can be.
//! - [`record`] runs operations and keeps what each sector may hold at each moment ([`Oracle`]); [`examine()`] goes
//!   through the crash states of the run.
//! - [`upkeep()`] does work on whole images (snapshots) between writes, and goes through the crash states of that.
#![forbid(unsafe_code)]

mod bed;
mod dirty;
mod examine;
pub mod fuzz;
mod kill;
mod maker;
pub mod matrix;
mod oracle;
mod pattern;
pub mod plain;
pub mod qemu;
mod spec;
mod upkeep;
mod workload;

pub use bed::{Bed, Open, check_image, is_dirty, read_all};
pub use examine::{Budget, Violation, examine, verify_now};
pub use kill::{Kills, survive_kills};
pub use oracle::Oracle;
pub use spec::{BelowKind, BelowSpec, DataFile, Seeds, Spec};
pub use upkeep::{Chores, Done, upkeep};
pub use workload::{Profile, Recorded, Trouble, record};

/// Runs `body` for each seed and panics with the seed at the first failure. A panic inside names the seed too.
///
/// # Panics
/// When `body` fails: that is its purpose.
pub fn for_seeds(
    name: &str,
    seeds: std::ops::Range<u64>,
    mut body: impl FnMut(u64) -> Result<(), String>,
) {
    for seed in seeds {
        let told = Told { name, seed };
        let result = body(seed);
        std::mem::forget(told);
        if let Err(text) = result {
            panic!("{name}, seed {seed}: {text}");
        }
    }
}

/// Names the seed when the test panics under it.
struct Told<'a> {
    name: &'a str,
    seed: u64,
}

impl Drop for Told<'_> {
    fn drop(&mut self) {
        eprintln!("{}: the panic happened with seed {}", self.name, self.seed);
    }
}

/// The share of the work that is done: `part` by default, all of it with `BEDPLATE_SOAK=1`; `BEDPLATE_SEEDS=from..to`
/// chooses seeds by hand.
pub fn seeds(part: u64, all: u64) -> std::ops::Range<u64> {
    let chosen = std::env::var("BEDPLATE_SEEDS").ok().and_then(|text| {
        let (from, to) = text.split_once("..")?;
        Some(from.parse().ok()?..to.parse().ok()?)
    });
    let soak = std::env::var_os("BEDPLATE_SOAK").is_some_and(|v| v != "0");
    chosen.unwrap_or(0..if soak { all } else { part })
}
