//! The program is killed at any moment of random work: what had completed is there when the image is opened again.

use bedplate_model::{
    BelowSpec, Kills, Profile, Seeds, Spec, for_seeds, matrix, seeds, survive_kills,
};
use bedplate_qcow2::OrderRule;
use bedplate_sim::Rng;

fn survive(name: &str, profile: Profile, runs: u64) -> Kills {
    let mut all = Kills::default();
    for_seeds(name, seeds(runs, runs * 10), |seed| {
        let run = survive_kills(seed, profile, 4)?;
        all.kills += run.kills;
        all.needed += run.needed;
        all.busy += run.busy;
        all.refused += run.refused;
        all.between += run.between;
        all.snapshots += run.snapshots;
        all.within += run.within;
        Ok(())
    });
    println!("{name}: {all:?}");
    // Else the journal was never needed.
    assert!(all.needed * 4 > all.kills && all.busy * 4 > all.kills, "{name}: {all:?}");
    all
}

fn backed(rng: &mut Rng) -> Spec {
    let spec = Spec::tiny(rng);
    let below = Some(BelowSpec::random(rng, spec.size));
    Spec { below, ..spec }
}

fn shared(rng: &mut Rng) -> Spec {
    let seeds = Seeds {
        filled: 80,
        compressed: [0, 40][rng.below(2) as usize],
        zero: 20,
        snapshots: 1 + rng.below(2),
    };
    Spec { refcount_bits: [2, 4, 16, 64][rng.below(4) as usize], seeds, ..Spec::tiny(rng) }
}

fn lazy(rng: &mut Rng) -> Spec {
    Spec { lazy: true, ..Spec::tiny(rng) }
}

fn growing(rng: &mut Rng) -> Spec {
    Spec { cluster_bits: 9, refcount_bits: 64, size: 1 << 17, refcount_cache: 0, ..Spec::tiny(rng) }
}

const RARE_FLUSHES: Profile = Profile { flush: 4, fua: 1, maintain: 3, ..Profile::MIXED };

#[test]
fn i11_what_was_completed_survives_kills_of_the_program() {
    let kills = survive("mixed work", RARE_FLUSHES, 300);
    let seen = kills.refused.min(kills.between).min(kills.snapshots).min(kills.within);
    assert!(seen > 0, "something did not come up: {kills:?}");
}

#[test]
fn i11_on_every_kind_of_image() {
    survive("every kind", Profile { spec: matrix::any, ..RARE_FLUSHES }, 60);
}

#[test]
fn i11_with_more_metadata_than_the_caches_hold() {
    let wide = Profile { spec: Spec::wide, area: 1 << 21, ..RARE_FLUSHES };
    survive("small caches", wide, 40);
}

#[test]
fn i11_with_copies_of_shared_and_compressed_clusters() {
    survive("snapshots", Profile { spec: shared, ..RARE_FLUSHES }, 100);
    survive("backing files", Profile { spec: backed, ..RARE_FLUSHES }, 80);
}

#[test]
fn i11_with_subclusters() {
    // A discard leaves parts of compressed clusters as they are, so none are written here.
    let profile = Profile { spec: Spec::subclusters, compressed: 0, ..RARE_FLUSHES };
    survive("subclusters", profile, 100);
}

#[test]
fn i11_with_data_files_and_with_encryption() {
    survive("data files", Profile { spec: Spec::external, ..RARE_FLUSHES }, 60);
    let encrypted = Profile { spec: Spec::encrypted, compressed: 0, ..RARE_FLUSHES };
    survive("encrypted", encrypted, 20);
}

#[test]
fn i11_with_many_compressed_clusters() {
    let spec = |rng: &mut Rng| Spec { cluster_bits: 10, size: 1 << 16, ..Spec::tiny(rng) };
    survive("compressed", Profile { spec, compressed: 40, discard: 25, ..RARE_FLUSHES }, 50);
}

#[test]
fn i11_with_a_bitmap_that_records_every_change() {
    survive("bitmaps", Profile { bitmap: true, ..RARE_FLUSHES }, 40);
    let subclusters = Profile { spec: Spec::subclusters, bitmap: true, ..RARE_FLUSHES };
    survive("bitmaps and subclusters", subclusters, 20);
    let external = Profile { spec: Spec::external, bitmap: true, ..RARE_FLUSHES };
    survive("bitmaps and data files", external, 20);
}

#[test]
fn i11_with_growing_and_with_lazy_refcounts() {
    survive("growing refcounts", Profile { spec: growing, write: 75, ..RARE_FLUSHES }, 80);
    survive("lazy refcounts", Profile { spec: lazy, ..RARE_FLUSHES }, 100);
}

#[test]
fn breaking_i11_is_noticed() {
    let broken = Profile { broken: Some(OrderRule::JournalLasts), ..Profile::MIXED };
    let external = Profile { spec: Spec::external, ..broken };
    let encrypted = Profile { spec: Spec::encrypted, compressed: 0, ..broken };
    for profile in [broken, external, encrypted] {
        let noticed = (0..300).find_map(|seed| survive_kills(seed, profile, 4).err());
        let what = noticed.expect("a journal that forgets too early must be noticed");
        assert!(what.contains("which it may not"), "noticed as: {what}");
    }
}
