//! Repairs of each kind of damage: afterwards nothing is wrong, for this check and for qemu-img's.

use super::*;
use crate::format::incompat;

/// Repairs an image; returns the report and the image as it is then.
pub(super) fn repaired(bytes: &[u8], what: Repair) -> (CheckReport, Vec<u8>) {
    let storage = SimStorage::from_image(Image::from_bytes(bytes), SimOptions::default());
    let report =
        block_on(repair(&storage, what, CheckOptions::default())).expect("can be repaired");
    (report, storage.image().to_vec())
}

/// Expects nothing wrong, by both checks; returns false without qemu-img.
pub(super) fn clean(dir: &Path, bytes: &[u8], what: &str) -> bool {
    let report = check_bytes(bytes).expect("opens");
    assert!(report.is_clean(), "{what}: {:#?}", report.findings);
    let Some(theirs) = by_qemu(dir, bytes) else { return false };
    let (numbers, code) = theirs.expect("qemu-img opens it");
    assert_eq!(code, 0, "{what}: {numbers:?}");
    true
}

/// What a guest sees, as qemu-img reads it.
fn content(dir: &Path, bytes: &[u8]) -> Vec<u8> {
    std::fs::write(dir.join("image"), bytes).expect("write");
    let dd = ["img", "dd", "-f", "qcow2", "-O", "raw", "bs=1M", "count=40", "if=image", "of=raw"];
    steps(dir, &[&dd]).expect("there");
    std::fs::read(dir.join("raw")).expect("read")
}

#[test]
fn each_kind_of_damage_is_put_right() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let Some(samples) = samples(dir.path()) else { return };
    let a = &samples.iter().find(|(n, _)| *n == "plain").expect("made").1;
    let right = content(dir.path(), a);
    for (what, _, bytes) in damages(a) {
        let before = check_bytes(&bytes).expect("opens");
        let (report, after) = repaired(&bytes, Repair::All);
        assert!(report.is_clean(), "{what}: {report:#?}");
        assert_eq!(report.corruptions_fixed, before.corruptions, "{what}");
        assert_eq!(report.leaks_fixed, before.leaks, "{what}");
        assert!(clean(dir.path(), &after, what));
        // Mappings that were right are as they were.
        let lossy = what.starts_with("L1") || what.starts_with("L2") || what == "cut";
        let kept = ["L1 reserved", "L1 not copied", "L2 not copied", "L2 reserved"].contains(&what);
        if kept || !(lossy || what == "compressed copied") {
            assert!(content(dir.path(), &after) == right, "{what}: the content has changed");
        }
        let (report, again) = repaired(&after, Repair::All);
        assert_eq!((report.corruptions_fixed, again == after), (0, true), "{what}");
    }
}

#[test]
fn leaks_are_given_back_without_touching_anything_else() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let Some(samples) = samples(dir.path()) else { return };
    let a = &samples.iter().find(|(n, _)| *n == "plain").expect("made").1;
    for (what, _, bytes) in damages(a) {
        let before = check_bytes(&bytes).expect("opens");
        let (report, after) = repaired(&bytes, Repair::Leaks);
        assert!(report.corruptions <= before.corruptions, "{what}: {report:#?}");
        if before.leaks == 0 || before.damage.entries > 0 || before.damage.refcounts {
            assert!(after == bytes, "{what}: has been changed");
            continue;
        }
        assert_eq!((report.leaks, report.leaks_fixed), (0, before.leaks), "{what}");
        if before.corruptions == 0 {
            assert!(clean(dir.path(), &after, what));
        }
    }
}

#[test]
fn a_leak_that_hides_a_wrong_flag_is_repaired_with_the_flag() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let Some(samples) = samples(dir.path()) else { return };
    let a = &samples.iter().find(|(n, _)| *n == "plain").expect("made").1;
    let (_, block, _, l2) = places(a);
    let host = be(a, l2) & crate::format::OFFSET_MASK;
    // The count is 2 and the flag says so, but there is one reference.
    let mut b = put(a, l2, host);
    b[block + 2 * (host >> 16) as usize + 1] = 2;
    assert_eq!(check_bytes(&b).expect("opens").leaks, 1);
    let (report, after) = repaired(&b, Repair::Leaks);
    assert_eq!((report.leaks_fixed, report.corruptions), (1, 0), "{report:#?}");
    assert!(clean(dir.path(), &after, "flag") && after == *a);
}

#[test]
fn random_damage_is_repaired_wherever_references_are_known() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let Some(samples) = samples(dir.path()) else { return };
    let mut rng = Rng::new(11);
    for (name, bytes) in &samples {
        for round in 0..30 {
            let (damaged, story) = random_damage(bytes, &mut rng);
            let before = check_bytes(&damaged).expect("opens");
            let what = format!("{name}, round {round}:{story}");
            let (report, after) = repaired(&damaged, Repair::All);
            // A refcount that would have to be wider than the image's can't be stored.
            let narrow = before.findings.iter().any(|f| f.text.contains("refcount width"));
            if before.damage.unknown == 0 && !narrow {
                assert!(
                    report.is_clean(),
                    "{what}\n{:#?}\n{:#?}",
                    before.findings,
                    check_bytes(&after)
                );
                if round < 6 {
                    assert!(clean(dir.path(), &after, &what));
                }
            }
            assert!(report.corruptions <= before.corruptions, "{what}: {report:#?}");
        }
    }
}

#[test]
fn what_can_not_be_read_keeps_its_clusters() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let Some(samples) = samples(dir.path()) else { return };
    let s = &samples.iter().find(|(n, _)| *n == "snapshots").expect("made").1;
    for (what, bytes) in snapshot_damages(s) {
        let before = check_bytes(&bytes).expect("opens");
        for how in [Repair::Leaks, Repair::All] {
            let (report, after) = repaired(&bytes, how);
            if before.damage.unknown == 0 {
                continue;
            }
            assert!(!report.is_clean(), "{what}");
            assert_eq!(report.leaks, before.leaks, "{what}: the snapshot's clusters are free");
            // Once the snapshot is readable again, nothing is missing.
            let entry = be(s, 64) as usize;
            let mut mended = after;
            mended[entry..entry + 64].copy_from_slice(&s[entry..entry + 64]);
            let report = check_bytes(&mended).expect("opens");
            assert!(
                !report.findings.iter().any(|f| f.text.contains("is too low")),
                "{what}: {:#?}",
                report.findings
            );
        }
    }
}

#[test]
fn marks_are_cleared_when_the_image_is_sound() {
    let a = fresh(1 << 30, 65536);
    let set = |bytes: &[u8], bits: u64| put(bytes, 72, be(bytes, 72) | bits);
    let both = set(&a, incompat::DIRTY | incompat::CORRUPT);
    assert!(repaired(&both, Repair::All).1 == a);
    assert!(repaired(&both, Repair::Leaks).1 == set(&a, incompat::CORRUPT));
    // Not while something is wrong.
    let (_, block, ..) = places(&a);
    let low = put(&both, block, 0);
    assert!(repaired(&low, Repair::Leaks).1 == low);
    assert_eq!(be(&repaired(&low, Repair::All).1, 72), be(&a, 72));
}

#[test]
fn refcounts_are_rebuilt_inside_a_device_that_is_full_to_its_end() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let a = fresh(1 << 30, 65536);
    let (table, _, l1, _) = places(&a);
    // Eight clusters, the last of which holds an L2 table; between them there is room.
    let mut a = a;
    a.resize(8 << 16, 0);
    let a = put(&put(&a, l1, 1 << 63 | 7 << 16), table, 0);
    let options = SimOptions { device: true, capacity: a.len() as u64, ..SimOptions::default() };
    let storage = SimStorage::from_image(Image::from_bytes(&a), options);
    let report = block_on(repair(&storage, Repair::All, CheckOptions::default())).expect("fits");
    assert!(report.is_clean(), "{report:#?}");
    assert_eq!(storage.image().len(), a.len() as u64);
    clean(dir.path(), &storage.image().to_vec(), "device");
}

#[test]
fn a_device_without_room_for_new_refcounts_is_left_as_it_is() {
    let a = fresh(1 << 30, 65536);
    let (table, ..) = places(&a);
    let a = put(&a, table, 0);
    let options = SimOptions { device: true, capacity: a.len() as u64, ..SimOptions::default() };
    let storage = SimStorage::from_image(Image::from_bytes(&a), options);
    assert!(block_on(repair(&storage, Repair::All, CheckOptions::default())).is_err());
    assert!(storage.image().to_vec() == a);
}

#[test]
fn read_only_storage_is_refused() {
    let options = SimOptions { read_only: true, ..SimOptions::default() };
    let storage = SimStorage::from_image(Image::from_bytes(&fresh(1 << 30, 65536)), options);
    let e = block_on(repair(&storage, Repair::All, CheckOptions::default())).expect_err("refused");
    assert_eq!(e.kind(), bedplate_types::ErrorKind::ReadOnly);
}
