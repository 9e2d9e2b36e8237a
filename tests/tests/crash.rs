//! Power cuts at every kind of moment of random work: whatever arrived on the medium, the image must be sound and
//! each sector must hold a value that it had at or after the last completed flush.

use bedplate_model::{
    BelowSpec, Budget, DataFile, Profile, Seeds, Spec, examine, for_seeds, matrix, qemu, record,
    seeds,
};
use bedplate_qcow2::OrderRule;
use bedplate_sim::Rng;
use bedplate_tests::skip;

/// Examines the runs of a profile and sees to it that enough states came up.
fn survive(name: &str, profile: Profile, runs: u64) {
    survive_on(name, profile, (runs, runs * 5), Budget::USUAL, 250);
}

/// As [`survive`], looking at as much of each run as the budget says, and at `least` so many states.
fn survive_on(name: &str, profile: Profile, runs: (u64, u64), budget: Budget, least: u64) {
    let (mut states, mut done) = (0, 0);
    for_seeds(name, seeds(runs.0, runs.1), |seed| {
        let run = record(seed, profile, None)?;
        if let Some(trouble) = run.troubles.first() {
            return Err(format!("{} failed: {:#}", trouble.what, trouble.error));
        }
        states += examine(&run, seed, budget).map_err(|v| v.to_string())?;
        done += 1;
        Ok(())
    });
    println!("{name}: {states} states in {done} runs");
    assert!(states >= done * least, "only {states} states in {done} runs");
    if budget.qemu_one_in > 0 && !qemu::installed() {
        skip(name, "in part: no qemu-img to look at some of the states");
    }
}

/// The crash test must find a broken rule within so many runs.
fn notice(rule: OrderRule, profile: Profile) -> String {
    let broken = Profile { broken: Some(rule), ..profile };
    for seed in 0..60 {
        let run = match record(seed, broken, None) {
            Ok(run) => run,
            Err(e) => return e,
        };
        // An engine that trips over its own trespass has noticed as well.
        if let Some(trouble) = run.troubles.first() {
            return format!("{:#}", trouble.error);
        }
        if let Err(violation) = examine(&run, seed, Budget::USUAL) {
            return violation.what.clone();
        }
    }
    panic!("breaking {rule:?} was not noticed");
}

fn plain(rng: &mut Rng) -> Spec {
    Spec {
        version: 3,
        lazy: false,
        below: None,
        seeds: Seeds { filled: [0, 50, 90][rng.below(3) as usize], ..Seeds::default() },
        ..Spec::tiny(rng)
    }
}

fn growing(rng: &mut Rng) -> Spec {
    Spec { cluster_bits: 9, refcount_bits: 64, size: 1 << 17, refcount_cache: 0, ..plain(rng) }
}

fn shared(rng: &mut Rng) -> Spec {
    let refcount_bits = [2, 4, 16, 64][rng.below(4) as usize];
    let seeds = Seeds {
        filled: 80,
        compressed: [0, 40][rng.below(2) as usize],
        zero: 20,
        snapshots: 1 + rng.below(2),
    };
    Spec { refcount_bits, seeds, ..plain(rng) }
}

fn lazy(rng: &mut Rng) -> Spec {
    let base = if rng.chance(50) { growing(rng) } else { shared(rng) };
    Spec { lazy: true, ..base }
}

fn packing(rng: &mut Rng) -> Spec {
    let refcount_bits = [1, 2, 16, 64][rng.below(4) as usize];
    let seeds = Seeds { filled: [0, 20][rng.below(2) as usize], ..Seeds::default() };
    Spec { cluster_bits: [10, 12][rng.below(2) as usize], refcount_bits, seeds, ..plain(rng) }
}

fn backed(rng: &mut Rng) -> Spec {
    let spec = Spec::tiny(rng);
    let below = Some(BelowSpec::random(rng, spec.size));
    Spec { lazy: false, below, ..spec }
}

const GROWING: Profile =
    Profile { spec: growing, write: 75, discard: 10, zero: 5, ..Profile::MIXED };
const REUSING: Profile = Profile {
    spec: plain,
    write: 45,
    discard: 25,
    flush: 15,
    maintain: 15,
    area: 1 << 15,
    ..Profile::MIXED
};
const PACKING: Profile = Profile {
    compressed: 45,
    write: 12,
    fua: 3,
    discard: 25,
    zero: 5,
    maintain: 10,
    area: 1 << 16,
    ..Profile::MIXED
};
const FLUSHING: Profile = Profile { spec: plain, flush: 30, fua: 20, ..Profile::MIXED };

#[test]
fn i6_after_any_power_cut_the_image_is_sound_and_reads_allowed_values() {
    survive("mixed work", Profile::MIXED, 60);
}

#[test]
fn i6_after_any_power_cut_on_every_kind_of_image() {
    let budget = Budget { points: 15, states: 4, use_one_in: 20, qemu_one_in: 1000 };
    let profile = Profile { spec: matrix::any, ..Profile::MIXED };
    survive_on("every kind", profile, (50, 2000), budget, 25);
    survive_on(
        "every kind, with bitmaps",
        Profile { bitmap: true, ..profile },
        (20, 500),
        budget,
        25,
    );
}

#[test]
fn i1_mappings_are_never_durable_before_their_refcounts() {
    survive("growing refcounts", GROWING, 30);
}

#[test]
fn i1_i6_with_lazy_refcounts_the_image_is_repaired_when_it_is_opened() {
    survive("lazy refcounts", Profile { spec: lazy, ..Profile::MIXED }, 30);
}

#[test]
fn i2_mappings_are_never_durable_before_their_data() {
    survive("copy-on-write over other layers", Profile { spec: backed, ..Profile::MIXED }, 25);
}

#[test]
fn i6_with_more_metadata_than_the_caches_hold() {
    let wide = Profile { spec: Spec::wide, area: 1 << 21, flush: 6, ..Profile::MIXED };
    survive("small caches", wide, 10);
}

#[test]
fn i2_i6_on_a_device_unused_space_holds_anything() {
    survive("on a device", Profile { device: true, ..Profile::MIXED }, 12);
}

#[test]
fn i2_i6_snapshots_stay_as_they_are_whatever_is_written_over_them() {
    survive("shared clusters and tables", Profile { spec: shared, ..Profile::MIXED }, 30);
}

#[test]
fn i2_i4_i6_a_data_file_is_durable_before_what_maps_it() {
    survive("data files", Profile { spec: Spec::external, ..Profile::MIXED }, 20);
}

#[test]
fn i2_i6_subclusters_are_mapped_one_by_one() {
    // A discard leaves parts of compressed clusters as they are, so none are written here.
    let profile =
        Profile { spec: Spec::subclusters, discard: 20, zero: 20, compressed: 0, ..Profile::MIXED };
    survive("subclusters", profile, 30);
}

#[test]
fn i6_a_bitmap_knows_of_every_change_or_says_that_it_does_not() {
    survive("bitmaps", Profile { bitmap: true, ..Profile::MIXED }, 15);
    let subclusters = Profile { spec: Spec::subclusters, bitmap: true, ..Profile::MIXED };
    survive("bitmaps and subclusters", subclusters, 8);
    let external = Profile { spec: Spec::external, bitmap: true, ..Profile::MIXED };
    survive("bitmaps and data files", external, 8);
}

#[test]
fn i2_i6_encrypted_space_is_written_whole_before_it_is_mapped() {
    let profile = Profile { spec: Spec::encrypted, compressed: 0, ..Profile::MIXED };
    let budget = Budget { points: 15, states: 4, use_one_in: 20, qemu_one_in: 0 };
    survive_on("encrypted", profile, (12, 200), budget, 25);
}

#[test]
fn i1_i2_compressed_clusters_share_space_and_are_counted_before_they_are_mapped() {
    // Refused ones, over clusters that hold something, prove nothing.
    let packed = |seed| {
        let run = record(seed, Profile { spec: packing, ..PACKING }, None).expect("a run");
        let good = |l: &&String| l.contains("end of write compressed") && l.ends_with("Ok(())");
        run.log.iter().filter(good).count()
    };
    assert!((0..10).map(packed).sum::<usize>() > 30);
    survive("compressed clusters", Profile { spec: packing, ..PACKING }, 30);
    let lazy = |rng: &mut Rng| Spec { lazy: true, version: 3, ..packing(rng) };
    survive("compressed clusters and lazy refcounts", Profile { spec: lazy, ..PACKING }, 12);
}

#[test]
fn i3_freed_space_is_not_used_again_before_its_removal_is_durable() {
    survive("discard and reuse", REUSING, 40);
}

#[test]
fn i4_what_was_flushed_or_written_with_fua_is_there() {
    survive("flushes and durable writes", FLUSHING, 30);
    let through = Profile { writethrough: true, flush: 2, ..FLUSHING };
    survive("no write cache", through, 15);
}

#[test]
fn breaking_i1_is_noticed() {
    let what = notice(OrderRule::RefcountsFirst, GROWING);
    assert!(what.contains("check finds"), "noticed as: {what}");
}

#[test]
fn breaking_i2_is_noticed() {
    let what = notice(OrderRule::DataFirst, Profile { spec: backed, ..REUSING });
    assert!(
        what.contains("which it may not") || what.contains("check finds"),
        "noticed as: {what}"
    );
}

#[test]
fn breaking_i2_with_a_data_file_is_noticed() {
    let spec = |rng: &mut Rng| Spec { data_file: Some(DataFile::Mapped), ..plain(rng) };
    let what = notice(OrderRule::DataFirst, Profile { spec, ..REUSING });
    assert!(what.contains("which it may not"), "noticed as: {what}");
}

#[test]
fn breaking_i3_is_noticed() {
    let what = notice(OrderRule::FreeLater, REUSING);
    assert!(
        what.contains("which it may not") || what.contains("check finds"),
        "noticed as: {what}"
    );
}

#[test]
fn breaking_i1_to_i3_under_compressed_clusters_is_noticed() {
    let rules = [OrderRule::RefcountsFirst, OrderRule::DataFirst, OrderRule::FreeLater];
    for rule in rules {
        let what = notice(rule, Profile { spec: packing, ..PACKING });
        assert!(
            what.contains("which it may not") || what.contains("check finds"),
            "{rule:?} noticed as: {what}"
        );
    }
}

#[test]
fn breaking_i4_is_noticed() {
    let what = notice(OrderRule::FlushWaits, FLUSHING);
    assert!(what.contains("which it may not"), "noticed as: {what}");
}
