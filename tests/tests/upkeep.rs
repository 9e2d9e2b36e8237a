//! Work on whole images: whatever is done between writes, the image stays sound and holds what it must, and a power cut
//! at any moment leaves it as it was before the step or as it is after.

use bedplate_model::{Chores, Seeds, Spec, for_seeds, matrix, seeds, upkeep};
use bedplate_qcow2::OrderRule;
use bedplate_sim::Rng;

fn chores(name: &str, count: (u64, u64), chores: Chores) -> (u64, u64, u64) {
    let (mut changes, mut failed, mut states, mut struck) = (0, 0, 0, 0);
    for_seeds(name, seeds(count.0, count.1), |seed| {
        let qemu = seed % 40 == 0;
        let done = upkeep(seed, Chores { qemu, ..chores })?;
        changes += done.changes;
        failed += done.failed;
        states += done.states;
        struck += done.struck;
        Ok(())
    });
    println!("{name}: {changes} changes, {failed} failed, {states} crash states, {struck} faults");
    assert!(!chores.every || struck > 400, "only {struck} faults");
    (changes, failed, states)
}

/// Few refcount blocks in small clusters, so that every block and the table come up.
fn small(rng: &mut Rng) -> Spec {
    let spec = Spec::tiny(rng);
    let snapshots = if spec.refcount_bits == 1 { 0 } else { rng.below(3) };
    Spec { seeds: Seeds { filled: 60, zero: 0, snapshots, ..spec.seeds }, ..spec }
}

/// As [`small`], with a data file.
fn external(rng: &mut Rng) -> Spec {
    let spec = Spec::external(rng);
    Spec { seeds: Seeds { filled: 60, ..spec.seeds }, ..spec }
}

fn subclusters(rng: &mut Rng) -> Spec {
    let spec = Spec::subclusters(rng);
    Spec { size: spec.size.min(4 * spec.cluster()), ..spec }
}

#[test]
fn snapshots_of_any_image_hold_what_they_were_made_of() {
    chores("snapshots", (60, 4000), Chores::SNAPSHOTS);
}

#[test]
fn i6_a_power_cut_leaves_a_change_of_snapshots_done_or_not_begun() {
    let cut = Chores { spec: small, states: 250, steps: 10, write: 30, ..Chores::SNAPSHOTS };
    let (.., states) = chores("snapshots and power cuts", (24, 600), cut);
    assert!(states > 3000, "only {states} states");
}

#[test]
fn snapshots_on_a_device_find_their_space_inside_it() {
    let device = Chores { device: true, ..Chores::SNAPSHOTS };
    chores("snapshots on a device", (25, 600), device);
}

#[test]
fn a_change_of_snapshots_that_fails_leaves_the_image_as_it_was() {
    let faults = Chores { faults: true, ..Chores::SNAPSHOTS };
    let (_, failed, _) = chores("snapshots and faults", (50, 2000), faults);
    assert!(failed > 20, "only {failed} failed");
}

#[test]
fn naming_a_generation_before_it_is_durable_is_noticed() {
    let broken = Some(OrderRule::GenerationFirst);
    let cut = Chores { spec: small, states: 250, broken, ..Chores::SNAPSHOTS };
    let noticed = (0..20).find_map(|seed| upkeep(seed, cut).err());
    let what = noticed.expect("a violation is found");
    assert!(what.contains("power cut in step"), "noticed as: {what}");
}

#[test]
fn disks_of_any_image_grow_and_shrink_and_new_space_reads_as_zeroes() {
    chores("sizes", (50, 4000), Chores::SIZES);
}

#[test]
fn i6_a_power_cut_leaves_the_old_size_or_the_new_one() {
    let cut = Chores { spec: small, states: 250, steps: 8, write: 30, ..Chores::SIZES };
    let (.., states) = chores("sizes and power cuts", (24, 600), cut);
    assert!(states > 3000, "only {states} states");
}

#[test]
fn sizes_on_a_device_are_bounded_by_it() {
    chores("sizes on a device", (25, 600), Chores { device: true, ..Chores::SIZES });
}

#[test]
fn a_change_of_the_size_that_fails_leaves_the_image_as_it_was() {
    let faults = Chores { faults: true, ..Chores::SIZES };
    let (_, failed, _) = chores("sizes and faults", (50, 2000), faults);
    assert!(failed > 20, "only {failed} failed");
}

#[test]
fn a_bitmap_knows_of_every_change_of_any_image() {
    chores("bitmaps", (50, 4000), Chores::BITMAPS);
}

#[test]
fn after_a_power_cut_a_bitmap_knows_of_every_change_or_says_that_it_does_not() {
    let cut = Chores { spec: small, states: 300, steps: 12, ..Chores::BITMAPS };
    let (.., states) = chores("bitmaps and power cuts", (24, 900), cut);
    assert!(states > 3000, "only {states} states");
}

#[test]
fn a_change_of_a_bitmap_that_fails_is_told_and_harms_nothing() {
    let faults = Chores { faults: true, ..Chores::BITMAPS };
    let (_, failed, _) = chores("bitmaps and faults", (50, 2000), faults);
    assert!(failed > 20, "only {failed} failed");
}

#[test]
fn i6_a_power_cut_leaves_any_change_of_every_kind_of_image_done_or_not_begun() {
    let all = Chores { bitmap: 15, resize: 20, spec: matrix::any, ..Chores::SNAPSHOTS };
    let cut = Chores { states: 100, steps: 8, write: 30, ..all };
    let (.., states) = chores("every kind and power cuts", (12, 1000), cut);
    assert!(states > 400, "only {states} states");
}

#[test]
fn i6_a_power_cut_leaves_the_old_size_or_the_new_one_of_a_data_file_too() {
    let cut = Chores { spec: external, states: 250, steps: 8, write: 30, ..Chores::SIZES };
    let (.., states) = chores("sizes of data files and power cuts", (16, 600), cut);
    assert!(states > 2000, "only {states} states");
}

/// Few steps, and at each change every request fails in turn.
const EVERY: Chores = Chores { every: true, steps: 6, write: 30, ..Chores::SNAPSHOTS };

#[test]
fn a_fault_at_any_request_of_a_change_of_snapshots_leaves_it_done_or_not_begun() {
    chores("snapshots and every fault", (6, 300), Chores { spec: small, ..EVERY });
    chores("and subclusters", (3, 100), Chores { spec: subclusters, ..EVERY });
    chores("and encryption", (1, 20), Chores { spec: Spec::encrypted, ..EVERY });
}

#[test]
fn a_fault_at_any_request_of_a_resize_leaves_the_old_size_or_the_new_one() {
    let every = Chores { resize: 40, create: 8, apply: 5, delete: 5, ..EVERY };
    chores("sizes and every fault", (6, 300), Chores { spec: small, ..every });
    chores("and subclusters", (3, 100), Chores { spec: subclusters, ..every });
    chores("and data files", (5, 100), Chores { spec: external, ..every });
    chores("and encryption", (1, 20), Chores { spec: Spec::encrypted, ..every });
}

#[test]
fn a_fault_at_any_request_of_a_change_of_bitmaps_is_told_and_harms_nothing() {
    let every = Chores { bitmap: 40, resize: 10, create: 5, apply: 5, delete: 5, ..EVERY };
    chores("bitmaps and every fault", (6, 300), Chores { spec: small, ..every });
    chores("and data files", (4, 100), Chores { spec: external, ..every });
}
