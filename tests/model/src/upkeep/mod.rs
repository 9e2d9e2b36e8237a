//! Work on whole images (snapshots made, gone back to and deleted, other sizes, bitmaps) between writes, and what must be true of every
//! crash state of it: the image is what it was before the step, or what it is after.

use crate::bed::{Bed, Open, check_image, is_dirty, read_all};
use crate::dirty::check_bitmap;
use crate::pattern::tagged;
use crate::plain::{discarded, empties};
use crate::qemu;
use crate::spec::{Spec, weighted};
use crate::workload::{on_device, random_limits};
use bedplate_qcow2::OrderRule;
use bedplate_runtime::buf::{AlignedBuf, SharedBuf};
use bedplate_sim::exec::join_all;
use bedplate_sim::{Rng, SECTOR, SimOptions, SimStorage};
use bedplate_storage::ZeroMode;
use bedplate_types::{ByteLen, CacheMode, GuestOffset};
use states::same;
use std::future::Future;

mod change;
mod states;
mod sweep;

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
    /// Every request of every change fails in turn, on copies of the image.
    pub every: bool,
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
        every: false,
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
    /// Requests to the storage that failed, one each time.
    pub struck: u64,
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
    let mut spec = (chores.spec)(&mut rng);
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
    let device = chores.device && bed.spec.data_file.is_none();
    let options = if device { on_device(&bed.spec, &mut image, options) } else { options };
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
        let change = self.choose(what);
        if c.every {
            self.sweep(change)?;
        }
        self.change(change)?;
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
                let (from_cluster, to) = discarded(&spec, at * SECTOR, len * SECTOR);
                if empties(&spec) {
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
        if (kind != 0 || empties(&spec)) && seen != content {
            return Err("the disk does not read as it was written".to_owned());
        }
        Ok(())
    }

    fn read(&self) -> Result<Vec<u8>, String> {
        read_all(&self.open.disk).map_err(|e| format!("can't be read: {e:#}"))
    }

    fn reopen(&mut self) -> Result<(), String> {
        let seed = self.rng.next_u64();
        Self::wait(seed, self.open.disk.close())?.map_err(|e| format!("closing: {e:#}"))?;
        let image = self.bed.metadata(&self.storage.image());
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
        let image = self.bed.metadata(&self.storage.image());
        if !is_dirty(&image) {
            check_image(&image, true).map_err(|e| format!("{when}: {e}"))?;
        }
        same(&self.bed, &image, &self.read()?, self.world()).map_err(|e| format!("{when}: {e}"))
    }
}
