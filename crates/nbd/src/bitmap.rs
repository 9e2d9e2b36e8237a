//! Dirty bitmaps as metadata contexts, `qemu:dirty-bitmap:NAME` (NBD protocol, "Metadata querying"; the names are QEMU's).

use std::sync::Arc;

/// What a bitmap says.
pub trait DirtyMap: Send + Sync + 'static {
    /// The run that starts at byte `at`: whether it was changed, and its length, at most `most` bytes and never zero.
    fn run(&self, at: u64, most: u64) -> (bool, u64);
}

/// A bitmap that clients may ask for.
#[derive(Clone)]
pub struct NamedBitmap {
    /// Its name.
    pub name: String,
    /// What it says.
    pub map: Arc<dyn DirtyMap>,
}

/// Bitmaps of one export, at most.
pub const MAX_BITMAPS: usize = 32;

/// The metadata context of a bitmap.
pub(crate) fn context(name: &str) -> Vec<u8> {
    [b"qemu:dirty-bitmap:", name.as_bytes()].concat()
}

/// Runs of a range as (length, flags); bit 0 says that the run was changed.
pub(crate) fn status(map: &dyn DirtyMap, at: u64, len: u64, max: usize) -> Vec<(u32, u32)> {
    let mut out: Vec<(u32, u32)> = Vec::new();
    let mut done = 0;
    while done < len {
        let (dirty, run) = map.run(at.saturating_add(done), len - done);
        // A request's length has 32 bits, so that of a part of it has too.
        let run = run.clamp(1, len - done) as u32;
        let full = out.len() == max;
        match out.last_mut() {
            Some((last, flags)) if *flags == u32::from(dirty) => *last += run,
            _ if full => break,
            _ => out.push((run, u32::from(dirty))),
        }
        done += u64::from(run);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Stripes;

    impl DirtyMap for Stripes {
        fn run(&self, at: u64, most: u64) -> (bool, u64) {
            (at / 100 % 3 == 1, (100 - at % 100).min(most))
        }
    }

    #[test]
    fn runs_are_joined_bounded_and_never_longer_than_asked_for() {
        assert_eq!(status(&Stripes, 0, 350, 9), [(100, 0), (100, 1), (150, 0)]);
        assert_eq!(status(&Stripes, 150, 10, 9), [(10, 1)]);
        assert_eq!(status(&Stripes, 150, 500, 2), [(50, 1), (200, 0)]);
    }
}
