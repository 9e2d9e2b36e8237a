//! Every request to the storage fails in turn, once or from then on: nothing hangs, who asked is told, an image that may
//! have lost metadata takes no more changes, and what is left behind is sound.

use bedplate_model::{
    Budget, Profile, Recorded, Seeds, Spec, check_image, examine, for_seeds, matrix, record, seeds,
    verify_now,
};
use bedplate_sim::{Fault, OpKind, Rng};
use bedplate_types::ErrorKind;

const EIO: i32 = 5;
const ENOSPC: i32 = 28;

const SHORT: Profile =
    Profile { operations: 12, tasks: 3, area: 1 << 14, max_delay: 2, ..Profile::MIXED };

/// Crash states of a run with a fault.
const FEW: Budget = Budget { points: 5, states: 4, use_one_in: 10, qemu_one_in: 0 };

fn lazy(rng: &mut Rng) -> Spec {
    Spec { version: 3, lazy: true, refcount_bits: 16, below: None, ..Spec::tiny(rng) }
}

fn strict(rng: &mut Rng) -> Spec {
    Spec { lazy: false, ..Spec::tiny(rng) }
}

/// Says what a run with a fault should not have done.
type Judge = fn(&Recorded) -> Result<(), String>;

/// Lets each request of `kind` fail in turn, in all ways, in runs of these seeds.
fn sweep(kind: OpKind, profile: Profile, runs: u64, judge: Judge) {
    assert!(strike_each(kind, profile, runs, judge) > 0, "no fault has struck");
}

/// As [`sweep`]; returns how many faults struck.
fn strike_each(kind: OpKind, profile: Profile, runs: u64, judge: Judge) -> u64 {
    let mut struck = 0;
    for_seeds(&format!("faults of {kind:?}"), seeds(runs, runs * 5), |seed| {
        let whole = record(seed, profile, None)?;
        if let Some(t) = whole.troubles.first() {
            return Err(format!("without a fault, {} failed: {:#}", t.what, t.error));
        }
        for n in 0..whole.storage.counts().of(kind) {
            let once = Fault::nth_of(kind, n, EIO);
            let ways =
                [once.clone(), once.clone().forever(), once.torn(), Fault::nth_of(kind, n, ENOSPC)];
            for (way, fault) in ways.into_iter().enumerate() {
                let what = |e: String| format!("request {n}, way {way}: {e}");
                let run = record(seed, profile, Some(fault)).map_err(what)?;
                if run.storage.counts().failed == 0 {
                    break;
                }
                struck += 1;
                judge(&run)
                    .and_then(|()| sound(&run, seed + n))
                    .map_err(|e| what(story(&run, e)))?;
            }
        }
        Ok(())
    });
    struck
}

/// Lets each request of any kind fail in turn.
fn sweep_all(name: &str, profile: Profile, runs: u64) {
    let judges: [(OpKind, Judge); 7] = [
        (OpKind::Sync, after_sync),
        (OpKind::Write, after_write),
        (OpKind::Read, must_be_told),
        (OpKind::WriteZeroes, no_leaks_when_closed),
        (OpKind::Discard, no_leaks_when_closed),
        (OpKind::Allocate, after_allocate),
        (OpKind::SetLen, after_set_len),
    ];
    let all: u64 =
        judges.iter().map(|(kind, judge)| strike_each(*kind, profile, runs, *judge)).sum();
    println!("{name}: {all} faults");
    assert!(all >= runs * 60, "only {all} faults have struck");
}

fn story(run: &Recorded, what: String) -> String {
    let troubles: Vec<String> =
        run.troubles.iter().map(|t| format!("{}: {:#}", t.what, t.error)).collect();
    format!(
        "{what}\n  told: {}\n  {}\n  on {:?}",
        troubles.join("\n    "),
        run.log.join("\n  "),
        run.bed.spec
    )
}

/// What holds after any fault.
fn sound(run: &Recorded, seed: u64) -> Result<(), String> {
    if let Some(what) = run.pretended.first() {
        return Err(format!("a {what} succeeded on a poisoned image"));
    }
    verify_now(run, seed).map_err(|e| format!("reopened after it: {e}"))?;
    if seed.is_multiple_of(3) {
        examine(run, seed, FEW).map_err(|v| v.to_string())?;
    }
    Ok(())
}

fn poisoned(run: &Recorded) -> bool {
    run.open.qcow2.is_poisoned()
}

fn must_be_told(run: &Recorded) -> Result<(), String> {
    if run.troubles.is_empty() { Err("nobody was told".to_owned()) } else { Ok(()) }
}

/// A clean close leaves nothing behind.
fn no_leaks_when_closed(run: &Recorded) -> Result<(), String> {
    let image = || run.bed.metadata(&run.storage.image());
    if run.closed { check_image(&image(), false) } else { Ok(()) }
}

fn after_sync(run: &Recorded) -> Result<(), String> {
    must_be_told(run)?;
    if poisoned(run) { Ok(()) } else { Err("the image is not poisoned".to_owned()) }
}

fn after_write(run: &Recorded) -> Result<(), String> {
    must_be_told(run)?;
    no_leaks_when_closed(run)
}

fn after_help(run: &Recorded) -> Result<(), String> {
    match run.troubles.first() {
        Some(t) => Err(format!("{} failed for it: {:#}", t.what, t.error)),
        None if poisoned(run) => Err("the image is poisoned".to_owned()),
        None => no_leaks_when_closed(run),
    }
}

/// Without space for more refcounts a write fails, but nothing is lost.
fn after_allocate(run: &Recorded) -> Result<(), String> {
    match run.troubles.iter().find(|t| t.error.kind() != ErrorKind::NoSpace) {
        Some(t) => Err(format!("{} failed for it: {:#}", t.what, t.error)),
        None if poisoned(run) => Err("the image is poisoned".to_owned()),
        None => no_leaks_when_closed(run),
    }
}

fn after_set_len(run: &Recorded) -> Result<(), String> {
    match run.troubles.iter().find(|t| t.what != "close") {
        Some(t) => Err(format!("{} failed for it: {:#}", t.what, t.error)),
        None => Ok(()),
    }
}

#[test]
fn i5_after_a_failed_sync_the_image_takes_no_more_changes() {
    sweep(OpKind::Sync, Profile { spec: strict, ..SHORT }, 30, after_sync);
    sweep(OpKind::Sync, Profile { spec: lazy, ..SHORT }, 15, after_sync);
}

#[test]
fn i5_i6_after_a_failed_write_its_sectors_are_old_or_new_and_its_clusters_are_given_back() {
    sweep(OpKind::Write, Profile { spec: strict, ..SHORT }, 12, after_write);
    sweep(OpKind::Write, Profile { spec: lazy, ..SHORT }, 6, after_write);
}

#[test]
fn i6_a_failed_read_is_reported_and_nothing_else_is_lost() {
    sweep(OpKind::Read, SHORT, 20, must_be_told);
}

#[test]
fn space_that_the_host_does_not_take_back_or_prepare_is_nobodys_failure() {
    sweep(OpKind::WriteZeroes, SHORT, 15, after_help);
    sweep(OpKind::Discard, SHORT, 15, |_| Ok(()));
    sweep(OpKind::Allocate, SHORT, 15, after_allocate);
}

#[test]
fn a_file_that_can_not_be_cut_when_it_is_closed_is_sound_all_the_same() {
    sweep(OpKind::SetLen, SHORT, 20, after_set_len);
}

#[test]
fn i6_after_a_fault_and_a_power_cut_every_sector_is_as_it_may_be() {
    for_seeds("a fault and a power cut", seeds(30, 150), |seed| {
        let mut rng = Rng::new(seed);
        let kind =
            [OpKind::Write, OpKind::Write, OpKind::Sync, OpKind::Read][rng.below(4) as usize];
        let mut fault = Fault::nth_of(kind, rng.below(60), EIO);
        if rng.chance(50) {
            fault = fault.torn();
        }
        let run = record(seed, Profile::MIXED, Some(fault))?;
        if let Some(what) = run.pretended.first() {
            return Err(story(&run, format!("a {what} succeeded on a poisoned image")));
        }
        examine(&run, seed, Budget { points: 30, ..Budget::USUAL }).map_err(|v| v.to_string())?;
        Ok(())
    });
}

#[test]
fn i5_i6_faults_at_any_request_over_subclusters() {
    sweep_all("subclusters", Profile { spec: Spec::subclusters, zero: 20, ..SHORT }, 4);
}

#[test]
fn i5_i6_faults_at_any_request_over_every_kind_of_image() {
    sweep_all("every kind", Profile { spec: matrix::any, ..SHORT }, 4);
}

#[test]
fn i5_i6_faults_at_any_request_of_compressed_writes() {
    let spec = |rng: &mut Rng| Spec {
        cluster_bits: 10,
        refcount_bits: [1, 16, 64][rng.below(3) as usize],
        size: 1 << 15,
        seeds: Seeds { filled: 15, ..Seeds::default() },
        ..Spec::tiny(rng)
    };
    let packing = Profile { spec, compressed: 60, write: 15, area: 1 << 15, ..SHORT };
    sweep_all("compressed clusters", packing, 5);
}

#[test]
fn i5_i6_faults_at_any_request_over_data_files() {
    sweep_all("data files", Profile { spec: Spec::external, ..SHORT }, 6);
}

#[test]
fn i5_i6_faults_at_any_request_over_snapshots() {
    let spec = |rng: &mut Rng| {
        let seeds = Seeds { filled: 80, compressed: 30, zero: 20, snapshots: 1 + rng.below(2) };
        Spec { refcount_bits: [4, 16, 64][rng.below(3) as usize], seeds, ..strict(rng) }
    };
    sweep_all("snapshots", Profile { spec, ..SHORT }, 5);
}

#[test]
fn i5_i6_faults_at_any_request_over_encrypted_images() {
    sweep_all("encrypted", Profile { spec: Spec::encrypted, compressed: 0, ..SHORT }, 1);
}

#[test]
fn i5_i6_faults_at_any_request_over_images_with_bitmaps() {
    let spec = |rng: &mut Rng| Spec { version: 3, ..strict(rng) };
    sweep_all("bitmaps", Profile { spec, bitmap: true, ..SHORT }, 5);
    let external = Profile { spec: Spec::external, bitmap: true, ..SHORT };
    sweep_all("bitmaps and data files", external, 2);
}
