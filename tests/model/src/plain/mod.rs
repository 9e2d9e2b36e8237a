//! Random operations on a disk against a byte array.
//!
//! A run is a row of rounds. In a round several tasks work at once, in an order and with delays that the seed
//! chooses; between rounds everything is at rest. Where requests of one round overlap, a byte may be what any of
//! them made of it; everywhere else it must be exactly what the array says. Reopening happens between rounds,
//! with or without closing: then bytes not flushed may be any that they were since the last flush.

use crate::bed::{Bed, Open, check_image, is_dirty, read_all};
use crate::workload::{on_device, random_limits};
use crate::{DataFile, Spec, qemu};
use bedplate_qcow2::NewSnapshot;
use bedplate_sim::exec::join_all;
use bedplate_sim::{DiscardMode, Fault, OpKind, Rng, SimOptions, SimStorage};
use bedplate_types::{CacheMode, ErrorKind};
use ops::{Done, Effect, Op, brief, perform, random_op, read};
use std::time::Duration;

mod ops;

pub(crate) use ops::{discarded, empties};

/// How a run is to be.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Requests to the storage fail now and then.
    pub faults: bool,
    /// The image lies on a device of a fixed length.
    pub device: bool,
    /// `qemu-img check` looks at the image at the end.
    pub qemu: bool,
    /// QEMU also reads the disk and the snapshots at the end.
    pub compare: bool,
    /// In the middle the image is opened again, after a snapshot where `snapshot` says so.
    pub halfway: bool,
    /// A snapshot is made in the middle.
    pub snapshot: bool,
}

/// What a run did.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stats {
    /// Operations.
    pub operations: u64,
    /// Operations that failed, as they may with faults.
    pub failed: u64,
    /// Times the image was poisoned.
    pub poisoned: u64,
}

struct Run {
    bed: Bed,
    rng: Rng,
    storage: SimStorage,
    open: Open,
    cache: CacheMode,
    /// What the disk holds.
    model: Vec<u8>,
    /// What it held at the last flush, and what was done since.
    base: Vec<u8>,
    journal: Vec<Effect>,
    /// Space may have leaked, since the image was not always closed.
    leaky: bool,
    faults: bool,
    stats: Stats,
}

/// Runs one random sequence on one random image.
///
/// # Errors
/// What differs from the model.
pub fn run(seed: u64, options: Options) -> Result<Stats, String> {
    let mut rng = Rng::new(seed);
    let bed = Bed::new(Spec::random(&mut rng), &mut rng);
    run_on(bed, rng, options)
}

/// Runs one random sequence on this image.
///
/// # Errors
/// What differs from the model.
pub fn run_on(bed: Bed, mut rng: Rng, options: Options) -> Result<Stats, String> {
    let discard = [DiscardMode::Zeroes, DiscardMode::Garbage, DiscardMode::Ignored];
    let sim = SimOptions {
        seed: rng.next_u64(),
        max_delay: [0, 2, 6][rng.below(3) as usize],
        discard: discard[rng.below(3) as usize],
        fast_zero: rng.chance(70),
        limits: random_limits(&mut rng),
        ..SimOptions::default()
    };
    let mut image = bed.image.clone();
    let device = options.device && bed.spec.data_file.is_none();
    let sim = if device { on_device(&bed.spec, &mut image, sim) } else { sim };
    let storage = SimStorage::from_image(image, sim);
    let cache = if rng.chance(10) { CacheMode::Writethrough } else { CacheMode::None };
    let open = bed.open(storage.clone(), cache).map_err(|e| format!("can't open: {e:#}"))?;
    let (model, base) = (bed.content.clone(), bed.content.clone());
    let faults = options.faults;
    let mut run = Run {
        bed,
        rng,
        storage,
        open,
        cache,
        model,
        base,
        journal: Vec::new(),
        leaky: false,
        faults,
        stats: Stats::default(),
    };
    let rounds = 3 + run.rng.below(8);
    for round in 0..rounds {
        run.round()?;
        if options.halfway && round == rounds / 2 {
            run.halfway(options.snapshot)?;
        } else if run.rng.chance(15) || run.open.qcow2.is_poisoned() {
            run.reopen()?;
        }
    }
    run.finish(options)
}

impl Run {
    fn context(&self) -> String {
        format!("{:?}", self.bed.spec)
    }

    /// Several tasks at once.
    fn round(&mut self) -> Result<(), String> {
        if self.faults && self.rng.chance(50) {
            self.inject();
        }
        let tasks = [1, 1, 2, 3, 5][self.rng.below(5) as usize];
        let plans: Vec<Vec<Op>> = (0..tasks)
            .map(|_| {
                (0..1 + self.rng.below(4))
                    .map(|_| random_op(&self.bed.spec, &mut self.rng))
                    .collect()
            })
            .collect();
        let seed = self.rng.next_u64();
        let (open, spec) = (&self.open, &self.bed.spec);
        let running = plans.iter().map(|ops| async move {
            let mut all = Vec::new();
            for op in ops {
                all.push(perform(open, spec, op).await);
            }
            all
        });
        let done = join_all(seed, running).map_err(|e| format!("{e}; {plans:?}"))?;
        let failed_before = self.storage.counts().failed;
        self.storage.clear_faults();
        self.settle(done.into_iter().flatten().collect(), failed_before > 0)
            .map_err(|e| format!("{e}\n  in a round of {}\n  on {}", brief(&plans), self.context()))
    }

    fn inject(&mut self) {
        let kinds = [OpKind::Read, OpKind::Write, OpKind::Write, OpKind::Sync, OpKind::WriteZeroes];
        let errno = if self.rng.chance(50) { 5 } else { 28 };
        let mut fault = match self.rng.below(6) {
            5 => Fault::nth(self.rng.below(30), errno),
            k => Fault::nth_of(kinds[k as usize], self.rng.below(12), errno),
        };
        if self.rng.chance(30) {
            fault = fault.forever();
        }
        if self.rng.chance(50) {
            fault = fault.torn();
        }
        self.storage.inject(fault);
    }

    /// Compares what the round's requests returned with the model, and takes over what they did.
    fn settle(&mut self, done: Vec<Done>, may_fail: bool) -> Result<(), String> {
        self.stats.operations += done.len() as u64;
        let flushed = done.iter().any(|d| d.flushed);
        for failure in done.iter().flat_map(|d| &d.failures) {
            if !may_fail {
                return Err(format!("a request failed: {failure:#}"));
            }
            self.stats.failed += 1;
            // A failed read of a refcount block leaves what was to be freed by it.
            self.leaky = true;
        }
        let effects: Vec<&Effect> = done.iter().flat_map(|d| &d.effects).collect();
        for (at, bytes) in done.iter().filter_map(|d| d.read.as_ref()) {
            self.compare(*at, bytes, &effects, true)
                .map_err(|e| format!("a read during it: {e}"))?;
        }
        let at_rest = if flushed { self.model.clone() } else { Vec::new() };
        self.apply(&effects)?;
        if flushed {
            self.base = at_rest;
            self.journal.clear();
        }
        self.journal.extend(done.into_iter().flat_map(|d| d.effects));
        Ok(())
    }

    /// Puts the effects into the model. Where it is open what came of them, the disk is asked.
    fn apply(&mut self, effects: &[&Effect]) -> Result<(), String> {
        for (i, effect) in effects.iter().enumerate() {
            let meets = |other: &&Effect| other.at < effect.end() && effect.at < other.end();
            let alone = !effects.iter().enumerate().any(|(j, e)| j != i && meets(e));
            if alone && effect.sure {
                self.model[effect.at..effect.end()].copy_from_slice(&effect.bytes);
                continue;
            }
            let seen = self.read(effect.at, effect.bytes.len())?;
            self.compare(effect.at, &seen, effects, false)
                .map_err(|e| format!("after overlapping requests: {e}"))?;
            self.model[effect.at..effect.end()].copy_from_slice(&seen);
        }
        Ok(())
    }

    fn read(&self, at: usize, len: usize) -> Result<Vec<u8>, String> {
        let seed = self.storage.counts().total();
        let done = join_all(seed, [read(&self.open, at as u64, len, false)]);
        let bytes = done.map_err(|e| e.to_string())?.pop().ok_or("no result")?;
        bytes.map_err(|e| format!("a read failed: {e:#}"))
    }

    /// Each byte must be as in the model or, when touched, as an effect made it.
    fn compare(
        &self,
        at: usize,
        seen: &[u8],
        effects: &[&Effect],
        old: bool,
    ) -> Result<(), String> {
        let end = at + seen.len();
        if old && self.model[at..end] == *seen {
            return Ok(());
        }
        // Between two cuts, the same effects touch every byte.
        let mut cuts: Vec<usize> = effects.iter().flat_map(|e| [e.at, e.end()]).collect();
        cuts.retain(|cut| at < *cut && *cut < end);
        cuts.extend([at, end]);
        cuts.sort_unstable();
        cuts.dedup();
        for pair in cuts.windows(2) {
            let (from, to) = (pair[0], pair[1]);
            let touching: Vec<&&Effect> =
                effects.iter().filter(|e| e.at <= from && to <= e.end()).collect();
            let mut may_be: Vec<&[u8]> =
                touching.iter().map(|e| &e.bytes[from - e.at..to - e.at]).collect();
            // A byte that some request has surely changed can't be the old one after the round.
            if old || touching.iter().all(|e| !e.sure) {
                may_be.push(&self.model[from..to]);
            }
            let found = &seen[from - at..to - at];
            if may_be.contains(&found) {
                continue;
            }
            let wrong = |(i, byte): &(usize, &u8)| may_be.iter().all(|all| all[*i] != **byte);
            if let Some((i, byte)) = found.iter().enumerate().find(wrong) {
                return Err(format!(
                    "byte {:#x} is {byte:#04x}; it was {:#04x} and {} request(s) touched it",
                    from + i,
                    self.model[from + i],
                    touching.len()
                ));
            }
        }
        Ok(())
    }

    /// Opens the image again, and makes a snapshot of it before if that is asked for.
    fn halfway(&mut self, snapshot: bool) -> Result<(), String> {
        if snapshot {
            let name = "halfway".to_owned();
            let new = NewSnapshot { name: name.as_bytes(), date: Duration::from_secs(1) };
            let making = self.open.qcow2.create_snapshot(&new);
            let made = join_all(self.rng.next_u64(), [making]).map_err(|e| e.to_string())?.pop();
            match made.ok_or("no result")? {
                Ok(_) => {
                    // All of it is durable now.
                    self.base.clone_from(&self.model);
                    self.journal.clear();
                    self.bed.kept.push((name, self.model.clone()));
                }
                // A few bits can't count twice what many compressed clusters share.
                Err(e) if e.kind() == ErrorKind::Limit && self.bed.spec.refcount_bits < 8 => {}
                Err(e) => return Err(format!("a snapshot can't be made: {e:#}")),
            }
        }
        self.reopen()
    }

    /// Closes the disk or just drops it, and opens it again.
    fn reopen(&mut self) -> Result<(), String> {
        let poisoned = self.open.qcow2.is_poisoned();
        self.stats.poisoned += u64::from(poisoned);
        let close = !poisoned && self.rng.chance(60);
        if close {
            self.close()?;
        } else {
            self.leaky = true;
        }
        // Other caches than before, so that the same image meets both.
        self.bed.spec.l2_cache ^= 1 << 20;
        let check = |run: &Self| {
            check_image(&run.bed.metadata(&run.storage.image()), run.leaky)
                .map_err(|e| format!("at reopening (closed: {close}): {e}\n  on {}", run.context()))
        };
        // With the dirty bit set, opening makes the image sound.
        if !is_dirty(&self.bed.metadata(&self.storage.image())) {
            check(self)?;
        }
        self.open = self.bed.open(self.storage.clone(), self.cache).map_err(|e| {
            format!("can't reopen (closed: {close}): {e:#}\n  on {}", self.context())
        })?;
        check(self)?;
        let seen = read_all(&self.open.disk).map_err(|e| format!("can't be read: {e:#}"))?;
        self.compare_reopened(&seen, close)
            .map_err(|e| format!("reopened (closed: {close}): {e}\n  on {}", self.context()))?;
        self.model = seen;
        self.base.clone_from(&self.model);
        self.journal.clear();
        Ok(())
    }

    /// A raw data file holds what the disk holds.
    fn raw_data(&self) -> Result<(), String> {
        if self.bed.spec.data_file != Some(DataFile::Raw) {
            return Ok(());
        }
        let mut file = vec![0; self.model.len()];
        self.storage.image().read(0, &mut file);
        match file.iter().zip(&self.model).position(|(a, b)| a != b) {
            Some(at) => Err(format!("the raw data file differs from the disk at {at:#x}")),
            None => Ok(()),
        }
    }

    fn close(&mut self) -> Result<(), String> {
        let closed = join_all(self.rng.next_u64(), [self.open.disk.close()]);
        match closed.map_err(|e| format!("closing: {e}"))?.pop() {
            Some(Ok(())) => Ok(()),
            Some(Err(e)) => Err(format!("can't close: {e:#}")),
            None => Ok(()),
        }
    }

    fn compare_reopened(&self, seen: &[u8], closed: bool) -> Result<(), String> {
        if seen == self.model {
            return Ok(());
        }
        let allowed = |at: usize, byte: u8| {
            !closed
                && (self.base[at] == byte || self.journal.iter().any(|e| e.at(at) == Some(byte)))
        };
        let wrong =
            |(at, (byte, model)): &(usize, (&u8, &u8))| byte != model && !allowed(*at, **byte);
        match seen.iter().zip(&self.model).enumerate().find(wrong) {
            Some((at, (byte, model))) => Err(format!(
                "byte {at:#x} is {byte:#04x}; it was {model:#04x}, and {:#04x} when flushed",
                self.base[at]
            )),
            None => Ok(()),
        }
    }

    /// Compares everything, before and after closing, and checks the image.
    fn finish(mut self, options: Options) -> Result<Stats, String> {
        let context = self.context();
        let all = |e: String| format!("at the end: {e}\n  on {context}");
        let seen = self.read(0, self.model.len()).map_err(all)?;
        self.compare(0, &seen, &[], true).map_err(all)?;
        self.close().map_err(all)?;
        let image = self.storage.image();
        check_image(&self.bed.metadata(&image), self.leaky).map_err(all)?;
        self.raw_data().map_err(all)?;
        if options.compare {
            qemu::read(&self.bed, &image, self.leaky, &self.model).map_err(all)?;
        } else if options.qemu {
            qemu::check(&self.bed, &image, self.leaky).map_err(all)?;
        }
        self.bed.check_snapshots(&image).map_err(all)?;
        let storage = SimStorage::from_image(image, SimOptions::default());
        let open = self.bed.open(storage, CacheMode::None);
        let open = open.map_err(|e| all(format!("can't reopen: {e:#}")))?;
        let seen = read_all(&open.disk).map_err(|e| all(format!("can't be read: {e:#}")))?;
        self.compare_reopened(&seen, true).map_err(|e| all(format!("closed and reopened: {e}")))?;
        Ok(self.stats)
    }
}
