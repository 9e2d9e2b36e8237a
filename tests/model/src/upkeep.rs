//! Work on whole images (snapshots made, gone back to and deleted, other sizes, bitmaps) between writes, and what must be true of every
//! crash state of it: the image is what it was before the step, or what it is after.

use crate::bed::{Bed, Open, check_image, is_dirty, read_all};
use crate::dirty::check_bitmap;
use crate::pattern::{BYTES, tagged};
use crate::plain::whole_clusters;
use crate::qemu;
use crate::spec::{Spec, weighted};
use crate::workload::{on_device, random_limits};
use bedplate_qcow2::{BitmapChange, NewSnapshot, OrderRule, SnapshotRef};
use bedplate_runtime::buf::{AlignedBuf, SharedBuf};
use bedplate_sim::exec::{block_on, join_all};
use bedplate_sim::{Event, Fault, Image, Rng, SECTOR, SimOptions, SimStorage};
use bedplate_storage::ZeroMode;
use bedplate_types::{ByteLen, CacheMode, ErrorKind, GuestOffset, Preallocation};
use std::future::Future;
use std::time::Duration;

/// What the work is made of. Weights are shares of their sum.
#[derive(Clone, Copy, Debug)]
pub struct Chores {
    /// The image.
    pub spec: fn(&mut Rng) -> Spec,
    /// Steps of one run.
    pub steps: u64,
    /// Weight of writes, zeroes and discards, each followed by a flush.
    pub write: u64,
    /// Weight of making a snapshot.
    pub create: u64,
    /// Weight of going back to one.
    pub apply: u64,
    /// Weight of deleting one.
    pub delete: u64,
    /// Weight of another size.
    pub resize: u64,
    /// Weight of a bitmap's change: one is kept, and what it says is compared with what was changed.
    pub bitmap: u64,
    /// The image lies on a device of a fixed length.
    pub device: bool,
    /// Requests to the storage fail now and then.
    pub faults: bool,
    /// An ordering rule that is broken on purpose.
    pub broken: Option<OrderRule>,
    /// Crash states looked at, about; 0 for none.
    pub states: u64,
    /// The image is shown to `qemu-img check` at the end.
    pub qemu: bool,
}

impl Chores {
    /// Snapshots on images of any kind.
    pub const SNAPSHOTS: Self = Self {
        spec: Spec::random,
        steps: 14,
        write: 50,
        create: 20,
        apply: 15,
        delete: 15,
        resize: 0,
        bitmap: 0,
        device: false,
        faults: false,
        broken: None,
        states: 0,
        qemu: false,
    };

    /// Other sizes, with snapshots of some.
    pub const SIZES: Self =
        Self { write: 40, create: 10, apply: 8, delete: 8, resize: 40, ..Self::SNAPSHOTS };

    /// A bitmap that must know of every change.
    pub const BITMAPS: Self = Self {
        write: 60,
        create: 8,
        apply: 8,
        delete: 8,
        bitmap: 20,
        resize: 15,
        steps: 20,
        ..Self::SNAPSHOTS
    };
}

/// What an image holds.
#[derive(Clone, PartialEq, Eq)]
struct World {
    content: Vec<u8>,
    /// Ids and contents, in order.
    snapshots: Vec<(Vec<u8>, Vec<u8>)>,
    /// What the disk held when the bitmap was empty.
    base: Option<Vec<u8>>,
}

/// What happened in all.
#[derive(Clone, Copy, Debug, Default)]
pub struct Done {
    /// Changes of the whole image.
    pub changes: u64,
    /// Those that were refused or failed.
    pub failed: u64,
    /// An ordering rule that is broken on purpose.
    pub broken: Option<OrderRule>,
    /// Crash states looked at.
    pub states: u64,
}

/// A step.
#[derive(Clone, Copy, PartialEq, Eq)]
enum What {
    Write,
    Create,
    Apply,
    Delete,
    Resize,
    Bitmap,
}

struct Run {
    bed: Bed,
    chores: Chores,
    rng: Rng,
    storage: SimStorage,
    open: Open,
    /// Before the first step, and after each.
    worlds: Vec<World>,
    /// For each step: no space may be leaked by a crash in it, and it is done as a whole.
    whole: Vec<bool>,
    log: Vec<String>,
    leaky: bool,
    /// A failure or a power cut has made the bitmap useless.
    lost: bool,
    numbers: u64,
    done: Done,
}

/// Does the chores of `seed` and checks the image after each; then goes through crash states.
///
/// # Errors
/// What is wrong.
pub fn upkeep(seed: u64, chores: Chores) -> Result<Done, String> {
    let mut rng = Rng::new(seed);
    // Images with a data file have no snapshots; their sizes are changed beside QEMU.
    let mut spec = Spec { data_file: None, ..(chores.spec)(&mut rng) };
    if let Some(below) = &mut spec.below {
        below.size = below.size.next_multiple_of(SECTOR);
    }
    spec.size = spec.size.next_multiple_of(SECTOR);
    let bed = Bed::new(spec, &mut rng);
    let options = SimOptions {
        seed: rng.next_u64(),
        keep_history: chores.states > 0,
        fast_zero: rng.chance(80),
        limits: random_limits(&mut rng),
        ..SimOptions::default()
    };
    let mut image = bed.image.clone();
    let options = if chores.device { on_device(&bed.spec, &mut image, options) } else { options };
    let storage = SimStorage::from_image(image, options);
    let open = bed.open(storage.clone(), CacheMode::None).map_err(|e| format!("opening: {e:#}"))?;
    let snapshots = (1..=bed.spec.seeds.snapshots)
        .map(|n| (n.to_string().into_bytes(), bed.content.clone()))
        .collect();
    let world = World { content: bed.content.clone(), snapshots, base: None };
    let mut run = Run {
        bed,
        chores,
        rng,
        storage,
        open,
        worlds: vec![world],
        whole: Vec::new(),
        log: Vec::new(),
        leaky: false,
        lost: false,
        numbers: 1000,
        done: Done::default(),
    };
    match run.all().and_then(|()| run.crash_states()) {
        Ok(()) => Ok(run.done),
        Err(e) => Err(format!("{e}\n  on {:?}\n  {}", run.bed.spec, run.log.join("\n  "))),
    }
}

impl Run {
    fn all(&mut self) -> Result<(), String> {
        for step in 0..self.chores.steps {
            self.step(step).map_err(|e| format!("step {step}: {e}"))?;
        }
        self.reopen()?;
        self.verify("at the end")?;
        if self.chores.qemu && qemu::installed() {
            qemu::check(&self.bed, &self.storage.image(), self.leaky)?;
        }
        Ok(())
    }

    /// Runs one future to its end, in an order of the seed's.
    fn wait<T, F: Future<Output = T>>(seed: u64, future: F) -> Result<T, String> {
        let mut all = join_all(seed, [future]).map_err(|e| e.to_string())?;
        all.pop().ok_or_else(|| "no result".to_owned())
    }

    fn step(&mut self, number: u64) -> Result<(), String> {
        let c = self.chores;
        let weights = [
            (c.write, What::Write),
            (c.create, What::Create),
            (c.apply, What::Apply),
            (c.delete, What::Delete),
            (c.resize, What::Resize),
            (c.bitmap, What::Bitmap),
        ];
        let what = weighted(&mut self.rng, &weights);
        // A resize may write to a cluster before or after, and a bitmap is stored after.
        let alone = c.bitmap == 0 && matches!(what, What::Create | What::Apply | What::Delete);
        let whole = alone && self.rng.chance(50);
        if whole {
            self.reopen()?;
        }
        self.whole.push(whole);
        self.storage.mark(number + 1);
        if what == What::Write {
            self.write()?;
            self.worlds.push(World { content: self.read()?, ..self.world().clone() });
            return Ok(());
        }
        self.change(what)?;
        if self.rng.chance(50) {
            self.reopen()?;
        }
        self.verify("after it")
    }

    fn world(&self) -> &World {
        self.worlds.last().expect("there is a first one")
    }

    fn write(&mut self) -> Result<(), String> {
        let size = self.world().content.len() as u64;
        let spec = Spec { size, ..self.bed.spec.clone() };
        let sectors = self.world().content.len() as u64 / SECTOR;
        let at = self.rng.below(sectors);
        let most = (4 * spec.cluster()).clamp(8 * SECTOR, 1 << 18) / SECTOR;
        let len = (1 + self.rng.below(most)).min(sectors - at);
        let (start, end) = ((at * SECTOR) as usize, ((at + len) * SECTOR) as usize);
        let kind = self.rng.below(6);
        let (from, bytes) = (GuestOffset::new(at * SECTOR), ByteLen::new(len * SECTOR));
        self.log.push(format!("write of kind {kind} at {at:#x}+{len:#x} sectors"));
        self.numbers += 1;
        let mut content = self.world().content.clone();
        let disk = &self.open.disk;
        let seed = self.rng.next_u64();
        let result = match kind {
            0 => {
                let (from_cluster, to) = whole_clusters(&spec, at * SECTOR, len * SECTOR);
                if spec.below.is_none() {
                    content[from_cluster as usize..to as usize].fill(0);
                }
                Self::wait(seed, disk.discard(from, bytes))?
            }
            1 => {
                let mode = ZeroMode { unmap: self.rng.chance(50), fast_only: false };
                content[start..end].fill(0);
                Self::wait(seed, disk.write_zeroes(from, bytes, mode))?
            }
            _ => {
                let data = tagged(self.numbers, at, len);
                content[start..end].copy_from_slice(&data);
                let buf = AlignedBuf::from_slice(&data).map_err(|e| e.to_string())?;
                Self::wait(seed, disk.write(from, SharedBuf::new(buf).iovec(), false))?
            }
        };
        result.map_err(|e| format!("a write failed: {e:#}"))?;
        Self::wait(seed, self.open.disk.flush())?.map_err(|e| format!("a flush failed: {e:#}"))?;
        let seen = self.read()?;
        if (kind != 0 || spec.below.is_none()) && seen != content {
            return Err("the disk does not read as it was written".to_owned());
        }
        Ok(())
    }

    fn read(&self) -> Result<Vec<u8>, String> {
        read_all(&self.open.disk).map_err(|e| format!("can't be read: {e:#}"))
    }

    /// Makes, applies or deletes a snapshot, or changes the size.
    fn change(&mut self, what: What) -> Result<(), String> {
        let mut world = self.world().clone();
        let seed = self.rng.next_u64();
        let count = world.snapshots.len() as u64;
        let chosen = self.rng.below(count.max(1)) as usize;
        let id = world.snapshots.get(chosen).map(|s| s.0.clone());
        if self.chores.faults && self.rng.chance(60) {
            let fault = Fault::nth(self.rng.below(60), [5, 28][self.rng.below(2) as usize]);
            let fault = if self.rng.chance(50) { fault.forever() } else { fault };
            self.storage.inject(if self.rng.chance(50) { fault.torn() } else { fault });
        }
        self.done.changes += 1;
        let qcow2 = self.open.qcow2.clone();
        if let Some(rule) = self.chores.broken {
            qcow2.order_faults().break_rule(rule);
        }
        let result = match id {
            _ if what == What::Bitmap => {
                let change = match world.base {
                    None => {
                        let granularity = self.rng.chance(70).then(|| 512 << self.rng.below(8));
                        BitmapChange::Add { granularity }
                    }
                    Some(_) if self.rng.chance(50) => BitmapChange::Remove,
                    Some(_) => BitmapChange::Clear,
                };
                self.log.push(format!("bitmap {change:?}"));
                let gone = change == BitmapChange::Remove;
                world.base = (!gone).then(|| world.content.clone());
                Self::wait(seed, qcow2.change_bitmap(b"changes", change))?
            }
            _ if what == What::Resize => {
                let (size, fill) = self.random_size();
                self.log.push(format!("resize to {size:#x}, preallocation {fill}"));
                world.content.resize(size as usize, 0);
                if let Some(base) = &mut world.base {
                    base.resize(size as usize, 0);
                }
                Self::wait(seed, self.open.disk.resize(ByteLen::new(size), fill))?
            }
            Some(id) if what == What::Apply => {
                self.log.push(format!("apply {}", String::from_utf8_lossy(&id)));
                world.content.clone_from(&world.snapshots[chosen].1);
                Self::wait(seed, qcow2.apply_snapshot(SnapshotRef::IdOrName(&id)))?
            }
            Some(id) if what == What::Delete => {
                self.log.push(format!("delete {}", String::from_utf8_lossy(&id)));
                world.snapshots.remove(chosen);
                Self::wait(seed, qcow2.delete_snapshot(SnapshotRef::IdOrName(&id)))?
            }
            _ => {
                self.log.push("create".to_owned());
                let new = NewSnapshot { name: b"a snapshot", date: Duration::new(1000, 7) };
                let largest = world.snapshots.iter().filter_map(|s| number(&s.0)).max();
                let id = (largest.unwrap_or(0) + 1).to_string().into_bytes();
                world.snapshots.push((id.clone(), world.content.clone()));
                let made = Self::wait(seed, qcow2.create_snapshot(&new))?;
                made.map(|made| assert_eq!(made, id, "ids go on from the largest"))
            }
        };
        self.storage.clear_faults();
        match result {
            Ok(()) => {
                let resized = world.content.len() != self.world().content.len();
                self.worlds.push(world);
                // A disk does not know that its image has gone back to another size.
                if self.open.qcow2.is_poisoned() {
                    // It is done; what went wrong was the tidying after it.
                    self.take_again()?;
                } else if resized && what == What::Apply {
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
            let image = self.storage.image();
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

    fn reopen(&mut self) -> Result<(), String> {
        let seed = self.rng.next_u64();
        Self::wait(seed, self.open.disk.close())?.map_err(|e| format!("closing: {e:#}"))?;
        let image = self.storage.image();
        check_image(&image, self.leaky)?;
        let world = self.world();
        check_bitmap(&image, &world.content, world.base.as_deref(), !self.lost)
            .map_err(|e| format!("after closing: {e}"))?;
        self.bed.spec.l2_cache ^= 1 << 20;
        self.open = self
            .bed
            .open(self.storage.clone(), CacheMode::None)
            .map_err(|e| format!("can't be opened again: {e:#}"))?;
        Ok(())
    }

    fn verify(&self, when: &str) -> Result<(), String> {
        let image = self.storage.image();
        if !is_dirty(&image) {
            check_image(&image, true).map_err(|e| format!("{when}: {e}"))?;
        }
        same(&self.bed, &image, &self.read()?, self.world()).map_err(|e| format!("{when}: {e}"))
    }

    fn crash_states(&mut self) -> Result<(), String> {
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

    fn crash_state(&self, image: &Image, now: usize) -> Result<(), String> {
        let whole = self.whole.get(now - 1).copied().unwrap_or(false);
        if !is_dirty(image) {
            check_image(image, !whole || self.leaky)?;
        }
        let storage = SimStorage::from_image(image.clone(), SimOptions::default());
        let open = self
            .bed
            .open(storage.clone(), CacheMode::None)
            .map_err(|e| format!("can't be opened: {e:#}"))?;
        let seen = read_all(&open.disk).map_err(|e| format!("can't be read: {e:#}"))?;
        let (before, after) = (&self.worlds[now - 1], &self.worlds[now]);
        let image = storage.image();
        // A bitmap that can be trusted knows of every change since it was empty, whichever step is taken for the last.
        let base = |w: &World| check_bitmap(&image, &seen, w.base.as_deref(), false);
        base(before).or_else(|e| base(after).map_err(|_| e))?;
        let old = same(&self.bed, &image, &seen, before);
        if old.is_ok() || same(&self.bed, &image, &seen, after).is_ok() {
            return Ok(());
        }
        // Of a write, any sectors may be there.
        let mixed = before.snapshots == after.snapshots && seen.len() == before.content.len();
        let wrong = |(i, sector): &(usize, &[u8])| {
            let range = i * BYTES..i * BYTES + sector.len();
            **sector != before.content[range.clone()] && **sector != after.content[range]
        };
        match (old, seen.chunks(BYTES).enumerate().find(wrong)) {
            (_, None) if mixed => {
                let world = World { content: seen.clone(), ..before.clone() };
                same(&self.bed, &image, &seen, &world)
            }
            (Err(e), _) => Err(format!("neither as before nor as after the step: {e}")),
            (Ok(()), _) => Ok(()),
        }
    }
}

fn number(id: &[u8]) -> Option<u64> {
    std::str::from_utf8(id).ok()?.parse().ok()
}

/// Says how an image differs from a world.
fn same(bed: &Bed, image: &Image, seen: &[u8], world: &World) -> Result<(), String> {
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
