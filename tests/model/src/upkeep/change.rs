//! One change of a whole image: chosen, carried out, and what is there afterwards if it fails.

use super::states::same;
use super::{Run, What, World};
use crate::bed::Open;
use crate::dirty::check_bitmap;
use bedplate_qcow2::{BitmapChange, NewSnapshot, SnapshotRef};
use bedplate_sim::{Fault, SECTOR};
use bedplate_types::{ByteLen, CacheMode, Error, ErrorKind, Preallocation};
use std::time::Duration;

/// A change; snapshots are named by their place in the list.
#[derive(Clone, Copy, Debug)]
pub(super) enum Change {
    Create,
    Apply(usize),
    Delete(usize),
    Resize(u64, Preallocation),
    Bitmap(BitmapChange),
    /// The bitmap with itself: all of it is written anew, and says what it said.
    Merge,
}

impl Change {
    /// What is there afterwards.
    pub(super) fn after(self, before: &World) -> World {
        let mut world = before.clone();
        match self {
            Self::Create => world.snapshots.push((before.next_id(), before.content.clone())),
            Self::Apply(n) => world.content.clone_from(&before.snapshots[n].1),
            Self::Delete(n) => drop(world.snapshots.remove(n)),
            Self::Resize(size, _) => {
                world.content.resize(size as usize, 0);
                if let Some(base) = &mut world.base {
                    base.resize(size as usize, 0);
                }
            }
            Self::Bitmap(BitmapChange::Remove) => world.base = None,
            Self::Merge => {}
            Self::Bitmap(_) => world.base = Some(before.content.clone()),
        }
        world
    }

    /// Carries it out on an image that holds what `before` says.
    pub(super) fn carry_out(
        self,
        open: &Open,
        before: &World,
        seed: u64,
    ) -> Result<Result<(), Error>, String> {
        let qcow2 = &open.qcow2;
        let id = |n: usize| SnapshotRef::IdOrName(&before.snapshots[n].0);
        match self {
            Self::Create => {
                let new = NewSnapshot { name: b"a snapshot", date: Duration::new(1000, 7) };
                let made = Run::wait(seed, qcow2.create_snapshot(&new))?;
                Ok(made.map(|id| assert_eq!(id, before.next_id(), "ids go on from the largest")))
            }
            Self::Apply(n) => Run::wait(seed, qcow2.apply_snapshot(id(n))),
            Self::Delete(n) => Run::wait(seed, qcow2.delete_snapshot(id(n))),
            Self::Resize(size, fill) => Run::wait(seed, open.disk.resize(ByteLen::new(size), fill)),
            Self::Bitmap(change) => Run::wait(seed, qcow2.change_bitmap(b"changes", change)),
            Self::Merge => Run::wait(seed, async {
                let view = qcow2.bitmap(b"changes").await?;
                qcow2.merge_bitmap(b"changes", &view).await
            }),
        }
    }
}

impl World {
    /// The id of the next snapshot.
    fn next_id(&self) -> Vec<u8> {
        let number = |id: &[u8]| std::str::from_utf8(id).ok()?.parse::<u64>().ok();
        let largest = self.snapshots.iter().filter_map(|s| number(&s.0)).max();
        (largest.unwrap_or(0) + 1).to_string().into_bytes()
    }
}

impl Run {
    pub(super) fn choose(&mut self, what: What) -> Change {
        let count = self.world().snapshots.len() as u64;
        let chosen = self.rng.below(count.max(1)) as usize;
        match what {
            What::Bitmap if self.world().base.is_some() && self.rng.chance(30) => Change::Merge,
            What::Bitmap => Change::Bitmap(match self.world().base.is_some() {
                false => {
                    let granularity = self.rng.chance(70).then(|| 512 << self.rng.below(8));
                    BitmapChange::Add { granularity }
                }
                true if self.rng.chance(50) => BitmapChange::Remove,
                true => BitmapChange::Clear,
            }),
            What::Resize => {
                let (size, fill) = self.random_size();
                Change::Resize(size, fill)
            }
            What::Apply if count > 0 => Change::Apply(chosen),
            What::Delete if count > 0 => Change::Delete(chosen),
            _ => Change::Create,
        }
    }

    /// Makes, applies or deletes a snapshot, or changes the size or a bitmap.
    pub(super) fn change(&mut self, change: Change) -> Result<(), String> {
        let before = self.world().clone();
        let seed = self.rng.next_u64();
        if self.chores.faults && self.rng.chance(60) {
            let fault = Fault::nth(self.rng.below(60), [5, 28][self.rng.below(2) as usize]);
            let fault = if self.rng.chance(50) { fault.forever() } else { fault };
            self.storage.inject(if self.rng.chance(50) { fault.torn() } else { fault });
        }
        self.done.changes += 1;
        if let Some(rule) = self.chores.broken {
            self.open.qcow2.order_faults().break_rule(rule);
        }
        self.log.push(format!("{change:x?}"));
        let (result, world) = (change.carry_out(&self.open, &before, seed)?, change.after(&before));
        self.storage.clear_faults();
        match result {
            Ok(()) => {
                let resized = world.content.len() != before.content.len();
                self.worlds.push(world);
                // A disk does not know that its image has gone back to another size.
                if self.open.qcow2.is_poisoned() {
                    // It is done; what went wrong was the tidying after it.
                    self.take_again()?;
                } else if resized && matches!(change, Change::Apply(_)) {
                    self.reopen()?;
                }
            }
            Err(e) => self.failed(&e, world)?,
        }
        Ok(())
    }

    /// A size near the present one, and how growth is to be filled.
    fn random_size(&mut self) -> (u64, Preallocation) {
        let old = self.world().content.len() as u64 / SECTOR;
        let fills = [
            Preallocation::Metadata,
            Preallocation::Falloc,
            Preallocation::Full,
            Preallocation::Prepared,
        ];
        let fill = fills[self.rng.below(4) as usize];
        let fill = if self.rng.chance(50) { fill } else { Preallocation::Off };
        if self.rng.chance(45) {
            return ((1 + self.rng.below(old)) * SECTOR, Preallocation::Off);
        }
        // Now and then so much that the L1 table needs more clusters.
        let most = if self.rng.chance(20) { 1 << 12 } else { old };
        let new = (old + 1 + self.rng.below(most)).min(old.max(1 << 14) + 1);
        (new * SECTOR, if new > old { fill } else { Preallocation::Off })
    }

    /// After a failure all is as before; where the image is poisoned, either way.
    fn failed(&mut self, e: &bedplate_types::Error, after: World) -> Result<(), String> {
        self.log.push(format!("failed: {e:#}"));
        self.done.failed += 1;
        self.lost |= self.chores.faults;
        let expected = matches!(e.kind(), ErrorKind::Limit | ErrorKind::Unsupported);
        if !self.chores.faults && !expected {
            return Err(format!("a change failed: {e:#}"));
        }
        let before = self.world().clone();
        self.worlds.push(before.clone());
        if self.open.qcow2.is_poisoned() {
            self.take_again()?;
            let image = self.bed.metadata(&self.storage.image());
            let seen = self.read()?;
            let bitmap = check_bitmap(&image, &seen, before.base.as_deref(), false);
            if bitmap.is_err() || same(&self.bed, &image, &seen, &before).is_err() {
                *self.worlds.last_mut().expect("just pushed") = after;
            }
        }
        Ok(())
    }

    /// Opens the image anew after it was poisoned.
    fn take_again(&mut self) -> Result<(), String> {
        (self.leaky, self.lost) = (true, true);
        self.open = self
            .bed
            .open(self.storage.clone(), CacheMode::None)
            .map_err(|e| format!("can't be opened after a failure: {e:#}"))?;
        Ok(())
    }
}
