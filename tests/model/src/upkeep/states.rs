//! Crash states of the work on whole images: each is what was there before the step under way, or what is there after it.

use super::{Run, World};
use crate::bed::{Bed, check_image, is_dirty, read_all};
use crate::dirty::check_bitmap;
use crate::pattern::BYTES;
use bedplate_sim::exec::block_on;
use bedplate_sim::{Event, Image, SimOptions, SimStorage};
use bedplate_types::{ByteLen, CacheMode};

impl Run {
    pub(super) fn crash_states(&mut self) -> Result<(), String> {
        if self.chores.states == 0 {
            return Ok(());
        }
        let history = self.storage.history();
        let every = (history.events().len() as u64 * 5 / self.chores.states).max(1);
        let mut replay = history.replay();
        let mut now = 0;
        while let Some(event) = replay.step() {
            if let Event::Mark(mark) = event {
                now = *mark as usize;
            }
            if now == 0 || self.rng.below(every) != 0 {
                continue;
            }
            for state in replay.crash_point().states(self.rng.next_u64(), 5) {
                self.done.states += 1;
                self.crash_state(&state.image, now)
                    .map_err(|e| format!("power cut in step {}: {e}\n  {state}", now - 1))?;
            }
        }
        Ok(())
    }

    fn crash_state(&self, medium: &Image, now: usize) -> Result<(), String> {
        let whole = self.whole.get(now - 1).copied().unwrap_or(false);
        let (image, seen) = self.found(medium, !whole || self.leaky)?;
        let (before, after) = (&self.worlds[now - 1], &self.worlds[now]);
        // A bitmap that can be trusted knows of every change since it was empty, whichever step is taken for the last.
        let base = |w: &World| check_bitmap(&image, &seen, w.base.as_deref(), false);
        base(before).or_else(|e| base(after).map_err(|_| e))?;
        let old = same(&self.bed, &image, &seen, before);
        if old.is_ok() || same(&self.bed, &image, &seen, after).is_ok() {
            return Ok(());
        }
        // Of a write, any sectors may be there.
        let same_size = [before, after].iter().all(|w| w.content.len() == seen.len());
        let mixed = before.snapshots == after.snapshots && same_size;
        let wrong = |(i, sector): &(usize, &[u8])| {
            let range = i * BYTES..i * BYTES + sector.len();
            **sector != before.content[range.clone()] && **sector != after.content[range]
        };
        if mixed && !seen.chunks(BYTES).enumerate().any(|piece| wrong(&piece)) {
            let world = World { content: seen.clone(), ..before.clone() };
            return same(&self.bed, &image, &seen, &world);
        }
        old.map_err(|e| format!("neither as before nor as after the step: {e}"))
    }

    /// Checks and opens what a medium holds, which repairs it if it must be; returns the image and what the disk holds.
    pub(super) fn found(&self, medium: &Image, leaks: bool) -> Result<(Image, Vec<u8>), String> {
        let image = self.bed.metadata(medium);
        if !is_dirty(&image) {
            check_image(&image, leaks)?;
        }
        let storage = SimStorage::from_image(medium.clone(), SimOptions::default());
        let open = self
            .bed
            .open(storage.clone(), CacheMode::None)
            .map_err(|e| format!("can't be opened: {e:#}"))?;
        let seen = read_all(&open.disk).map_err(|e| format!("can't be read: {e:#}"))?;
        Ok((self.bed.metadata(&storage.image()), seen))
    }
}

/// Says how an image differs from a world.
pub(super) fn same(bed: &Bed, image: &Image, seen: &[u8], world: &World) -> Result<(), String> {
    if seen.len() != world.content.len() {
        return Err(format!("the disk has {:#x} bytes", seen.len()));
    }
    if let Some(at) = seen.iter().zip(&world.content).position(|(a, b)| a != b) {
        return Err(format!("the disk is wrong at {at:#x}"));
    }
    let storage = SimStorage::from_image(image.clone(), SimOptions::default());
    let failed = |e| format!("{e:#}");
    let header = block_on(bedplate_qcow2::read_header(&storage)).map_err(failed)?;
    let list = match header.nb_snapshots {
        0 => Vec::new(),
        _ => block_on(bedplate_qcow2::read_snapshots(&storage, &header)).map_err(failed)?.0,
    };
    if list.len() != world.snapshots.len() {
        return Err(format!("there are {} snapshots", list.len()));
    }
    for (found, (id, content)) in list.iter().zip(&world.snapshots) {
        if found.id != *id {
            return Err(format!("a snapshot has the id {:?}", found.id));
        }
        let mut view = image.clone();
        view.write(24, &found.disk_size.map_or(content.len() as u64, ByteLen::get).to_be_bytes());
        view.write(36, &found.l1_size.to_be_bytes());
        view.write(40, &found.l1_offset.get().to_be_bytes());
        let options = SimOptions { read_only: true, ..SimOptions::default() };
        let open = bed
            .open(SimStorage::from_image(view, options), CacheMode::None)
            .map_err(|e| format!("a snapshot can't be opened: {e:#}"))?;
        let seen = read_all(&open.disk).map_err(|e| format!("a snapshot can't be read: {e:#}"))?;
        if seen != *content {
            return Err(format!("snapshot {:?} has changed", String::from_utf8_lossy(id)));
        }
    }
    Ok(())
}
