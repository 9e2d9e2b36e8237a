//! Power cuts and I/O errors at every kind of moment of a repair: the image is never worse than it was, and a second
//! repair completes, with the same result.

mod damage;
mod danger;

use bedplate_model::{Bed, Spec, check_image, for_seeds, qemu, read_all, seeds};
use bedplate_qcow2::check::{CheckOptions, CheckReport, Repair, repair};
use bedplate_sim::exec::block_on;
use bedplate_sim::{CrashState, Fault, Image, Rng, SimOptions, SimStorage};
use bedplate_tests::skip;
use bedplate_types::{CacheMode, Error};
use damage::Damaged;
use danger::danger;
use std::collections::BTreeSet;

/// The errno of a device that fails.
const EIO: i32 = 5;
/// That of one that is full.
const ENOSPC: i32 = 28;

fn spec(rng: &mut Rng) -> Spec {
    let mut spec = if rng.chance(25) { Spec::subclusters(rng) } else { Spec::tiny(rng) };
    spec.seeds.filled = 40 + rng.below(60);
    // Narrow counts can't hold what random damage needs.
    spec.refcount_bits = spec.refcount_bits.max(8);
    spec
}

fn run(storage: &SimStorage, what: Repair) -> Result<CheckReport, Error> {
    block_on(repair(storage, what, CheckOptions::default()))
}

/// What the guest sees, and whether the snapshots are as they were; `None` when damage of guest data can't be read.
fn content(bed: &Bed, image: &Image) -> Result<Option<(Vec<u8>, bool)>, String> {
    let mut image = image.clone();
    if bed.spec.version >= 3 {
        // A mark that a repair of leaks leaves would forbid to look.
        let mut bits = [0];
        image.read(79, &mut bits);
        image.write(79, &[bits[0] & !3]);
    }
    let storage = SimStorage::from_image(image.clone(), SimOptions::default());
    let open = bed.open(storage, CacheMode::None).map_err(|e| format!("can't be opened: {e:#}"))?;
    let Ok(seen) = read_all(&open.disk) else { return Ok(None) };
    Ok(Some((seen, bed.check_snapshots(&image).is_ok())))
}

/// What must come out of a repair, however often it was cut off.
struct Expected {
    bed: Bed,
    what: Repair,
    /// What was wrong in a dangerous way before.
    danger: BTreeSet<String>,
    content: Option<Option<(Vec<u8>, bool)>>,
    clean: bool,
}

impl Expected {
    /// Repairs without interruption and keeps what came out.
    fn new(bed: &Bed, damaged: &Damaged, what: Repair) -> Result<Self, String> {
        let storage = SimStorage::from_image(damaged.image.clone(), SimOptions::default());
        let report = run(&storage, what).map_err(|e| format!("the repair fails: {e:#}"))?;
        let after = storage.image();
        let clean = report.is_clean();
        if what == Repair::All && !clean {
            return Err(format!("is not clean after a repair: {report:#?}"));
        }
        let content = if clean { Some(content(bed, &after)?) } else { None };
        let same = Some((bed.content.clone(), true));
        if content.as_ref().is_some_and(|seen| !damaged.lossy && *seen != same) {
            return Err("the repair has changed what the guest sees".to_owned());
        }
        Ok(Self { bed: bed.clone(), what, danger: danger(&damaged.image), content, clean })
    }

    /// Looks at an image that was left by a repair that was cut off.
    fn examine(&self, image: &Image) -> Result<(), String> {
        let now = danger(image);
        if let Some(new) = now.difference(&self.danger).next() {
            return Err(format!("is worse than before: {new}"));
        }
        let storage = SimStorage::from_image(image.clone(), SimOptions::default());
        let report = run(&storage, self.what).map_err(|e| format!("can't be repaired: {e:#}"))?;
        let after = storage.image();
        if self.clean {
            if !report.is_clean() {
                return Err(format!("is not clean after a second repair: {report:#?}"));
            }
            check_image(&after, false)?;
        }
        match &self.content {
            Some(right) if content(&self.bed, &after)? != *right => {
                Err("after a second repair the guest sees something else".to_owned())
            }
            _ => Ok(()),
        }
    }

    /// Repairs, and looks at what a power cut may leave at some moments.
    fn cut_off(&self, damaged: &Damaged, rng: &mut Rng) -> Result<u64, String> {
        let options = SimOptions { seed: rng.next_u64(), ..SimOptions::seeded(0) };
        let storage = SimStorage::from_image(damaged.image.clone(), options);
        run(&storage, self.what).map_err(|e| format!("the repair fails: {e:#}"))?;
        let history = storage.history();
        let mut replay = history.replay();
        let mut seen = 0;
        let chance = if history.events().len() < 60 { 100 } else { 35 };
        while replay.step().is_some() {
            let point = replay.crash_point();
            if point.in_doubt() == 0 || !rng.chance(chance) {
                continue;
            }
            for state in point.states(rng.next_u64(), 4) {
                seen += 1;
                let told = |e| format!("{e}\n  {}", with_name(&state));
                self.examine(&state.image).map_err(told)?;
            }
        }
        Ok(seen)
    }
}

impl Expected {
    /// Lets each request of the repair fail in turn, in all ways; returns how many did.
    fn fail_in_turn(&self, damaged: &Damaged) -> Result<u64, String> {
        let mut struck = 0;
        for n in 0.. {
            let once = Fault::nth(n, EIO);
            let ways = [once.clone(), once.clone().forever(), once.torn(), Fault::nth(n, ENOSPC)];
            for (way, fault) in ways.into_iter().enumerate() {
                let storage = SimStorage::from_image(damaged.image.clone(), SimOptions::default());
                storage.inject(fault);
                let done = run(&storage, self.what);
                if storage.counts().failed == 0 {
                    return Ok(struck);
                }
                struck += 1;
                let told = |e: String| format!("request {n}, way {way}: {e}");
                if done.is_ok() {
                    return Err(told("the failure was not told".to_owned()));
                }
                storage.clear_faults();
                self.examine(&storage.image()).map_err(told)?;
                for state in storage.crash_point().states(n, 2) {
                    self.examine(&state.image)
                        .map_err(|e| told(format!("and a power cut: {e}\n  {state}")))?;
                }
            }
        }
        Ok(struck)
    }
}

fn with_name(state: &CrashState) -> String {
    format!("power cut while it was repaired: {state}")
}

/// Cuts off the repairs of so many damaged images, and sees to it that enough states came up for each.
fn survive(name: &str, what: Repair, runs: u64, least: u64) {
    let (mut states, mut done) = (0, 0);
    for_seeds(name, seeds(runs, runs * 40), |seed| {
        let mut rng = Rng::new(seed);
        let bed = Bed::new(spec(&mut rng), &mut rng);
        // A repair of leaks has little to do where other things are damaged too.
        let damaged = match what {
            Repair::Leaks if rng.chance(70) => Damaged::leaks(&bed, &mut rng),
            _ => Damaged::new(&bed, &mut rng),
        };
        let told = |e| format!("{e}\n  {}\n  {:?}", damaged.story.join("\n  "), bed.spec);
        let expected = Expected::new(&bed, &damaged, what).map_err(told)?;
        states += expected.cut_off(&damaged, &mut rng).map_err(told)?;
        done += 1;
        if expected.clean && seed % 20 == 0 && qemu::installed() {
            let storage = SimStorage::from_image(damaged.image.clone(), SimOptions::default());
            run(&storage, what).map_err(|e| e.to_string())?;
            qemu::check(&bed, &storage.image(), false).map_err(told)?;
        }
        Ok(())
    });
    println!("{name}: {states} states in {done} runs");
    assert!(states >= done * least, "only {states} states in {done} runs");
    if !qemu::installed() {
        skip(name, "in part: no qemu-img to look at some of the images");
    }
}

#[test]
fn a_repair_of_everything_may_be_cut_off_at_any_moment() {
    survive("repair of everything", Repair::All, 60, 10);
}

#[test]
fn a_repair_of_leaks_may_be_cut_off_at_any_moment() {
    survive("repair of leaks", Repair::Leaks, 100, 2);
}

#[test]
fn an_io_error_at_any_request_of_a_repair_is_told_and_does_no_harm() {
    let mut faults = 0;
    for_seeds("repair on a failing device", seeds(6, 200), |seed| {
        let mut rng = Rng::new(seed);
        let bed = Bed::new(spec(&mut rng), &mut rng);
        let damaged = Damaged::new(&bed, &mut rng);
        let told = |e| format!("{e}\n  {}\n  {:?}", damaged.story.join("\n  "), bed.spec);
        for what in [Repair::All, Repair::Leaks] {
            let expected = Expected::new(&bed, &damaged, what).map_err(told)?;
            faults +=
                expected.fail_in_turn(&damaged).map_err(|e| told(format!("{what:?}: {e}")))?;
        }
        Ok(())
    });
    println!("repair on a failing device: {faults} faults");
    assert!(faults > 500, "only {faults} faults");
}
