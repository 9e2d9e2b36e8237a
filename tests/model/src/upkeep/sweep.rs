//! Every request of a change fails in turn: nothing panics or hangs, who asked is told, and the image is what it was or what it
//! was to become.

use super::change::Change;
use super::states::same;
use super::{Run, World};
use crate::bed::Open;
use crate::dirty::check_bitmap;
use crate::pattern::tagged;
use bedplate_runtime::buf::{AlignedBuf, SharedBuf};
use bedplate_sim::{Fault, Image, SECTOR, SimOptions, SimStorage};
use bedplate_types::{CacheMode, Error, GuestOffset};

const EIO: i32 = 5;
const ENOSPC: i32 = 28;

/// The ways in which the `n`-th request fails.
fn ways(n: u64) -> [Fault; 4] {
    let once = Fault::nth(n, EIO);
    [once.clone(), once.clone().forever(), once.torn(), Fault::nth(n, ENOSPC)]
}

impl Run {
    /// Lets each request of the change fail in all ways, on copies of the image.
    pub(super) fn sweep(&mut self, change: Change) -> Result<(), String> {
        // So that all is in the file.
        self.reopen()?;
        let start = self.storage.image();
        let seed = self.rng.next_u64();
        for n in 0.. {
            for (way, fault) in ways(n).into_iter().enumerate() {
                let struck = self.strike(&start, change, fault, seed).map_err(|e| {
                    format!("{change:x?}, failure of request {n} in way {way}: {e}")
                })?;
                if !struck {
                    return Ok(());
                }
                self.done.struck += 1;
            }
        }
        Ok(())
    }

    /// Makes the change with a fault and looks at what it leaves; false when the fault met nothing.
    fn strike(
        &self,
        start: &Image,
        change: Change,
        fault: Fault,
        seed: u64,
    ) -> Result<bool, String> {
        let options = SimOptions { seed, ..SimOptions::default() };
        let storage = SimStorage::from_image(start.clone(), options);
        let open = self.bed.open(storage.clone(), CacheMode::None);
        let open = open.map_err(|e| format!("can't be opened: {e:#}"))?;
        storage.inject(fault);
        let before = self.world();
        let result = change.carry_out(&open, before, seed)?;
        if result.is_ok() {
            // Whether this fails or not, the change is made.
            let _ = Self::wait(seed, open.disk.close())?;
        }
        if storage.counts().failed == 0 {
            return Ok(false);
        }
        storage.clear_faults();
        let after = change.after(before);
        let may: &[&World] = match &result {
            Ok(()) => &[&after],
            Err(_) if open.qcow2.is_poisoned() => &[before, &after],
            Err(_) => &[before],
        };
        let told = |e: String| format!("{e}\n  answered {result:?}");
        for state in storage.crash_point().states(seed, 2) {
            self.is_one_of(&state.image, may)
                .map_err(|e| told(format!("power cut after it: {e}\n  {state}")))?;
        }
        if result.is_ok() {
            self.is_one_of(&storage.image(), may).map_err(told)?;
        } else if open.qcow2.is_poisoned() {
            self.takes_no_changes(&open, seed).map_err(told)?;
            self.is_one_of(&storage.image(), may).map_err(told)?;
        } else {
            let world = self.goes_on(&open, before, seed).map_err(|e| told(format!("{e:#}")))?;
            self.is_one_of(&storage.image(), &[&world]).map_err(told)?;
        }
        Ok(true)
    }

    /// What a medium holds is one of these worlds, and its bitmap says nothing wrong.
    fn is_one_of(&self, medium: &Image, may: &[&World]) -> Result<(), String> {
        let (image, seen) = self.found(medium, true)?;
        let mut first = None;
        for world in may {
            let is = same(&self.bed, &image, &seen, world).and_then(|()| {
                // A change of the bitmap may be done though the failure was told, or the other way round.
                let of = |w: &World| check_bitmap(&image, &seen, w.base.as_deref(), false);
                of(world).or_else(|e| may.iter().find_map(|w| of(w).ok()).ok_or(e))
            });
            match is {
                Ok(()) => return Ok(()),
                Err(e) => drop(first.get_or_insert(e)),
            }
        }
        Err(first.unwrap_or_default())
    }

    fn sector(&self) -> Result<(Vec<u8>, SharedBuf), Error> {
        let bytes = tagged(self.numbers + 1, 0, 1);
        let buf = SharedBuf::new(AlignedBuf::from_slice(&bytes)?);
        Ok((bytes, buf))
    }

    fn takes_no_changes(&self, open: &Open, seed: u64) -> Result<(), String> {
        let (_, buf) = self.sector().map_err(|e| e.to_string())?;
        let written =
            Self::wait(seed, open.disk.write(GuestOffset::ZERO, buf.iovec(), false))?.is_ok();
        let flushed = Self::wait(seed, open.disk.flush())?.is_ok();
        if written || flushed {
            return Err("a poisoned image takes changes".to_owned());
        }
        Ok(())
    }

    /// After a failure that did no harm the disk is used further.
    fn goes_on(&self, open: &Open, before: &World, seed: u64) -> Result<World, String> {
        let failed = |e: Error| format!("the disk can't be used further: {e:#}");
        let (bytes, buf) = self.sector().map_err(failed)?;
        let write = open.disk.write(GuestOffset::ZERO, buf.iovec(), false);
        Self::wait(seed, write)?.map_err(failed)?;
        Self::wait(seed, open.disk.flush())?.map_err(failed)?;
        Self::wait(seed, open.disk.close())?.map_err(failed)?;
        let mut world = before.clone();
        world.content[..SECTOR as usize].copy_from_slice(&bytes);
        Ok(world)
    }
}
