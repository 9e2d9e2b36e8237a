//! Extended L2 entries, external data files, encrypted images and bitmaps, sound and damaged, beside qemu-img.

use super::repairs::{clean, repaired};
use super::*;
use crate::format::{COMPRESSED, COPIED, EXT_ENCRYPTION, OFFSET_MASK};

/// An image made by steps like those of [`steps`], called `a`.
fn made(dir: &Path, list: &[&[&str]]) -> Option<Vec<u8>> {
    let _ = std::fs::remove_file(dir.join("a"));
    steps(dir, list)?;
    Some(std::fs::read(dir.join("a")).expect("read"))
}

/// What is done to an image, whether qemu-img finds the same, and what a finding says of it.
type Case = (&'static str, Vec<u8>, bool, &'static str);

/// Each is found, in qemu-img's numbers where it knows the kind, and is repaired.
fn all_are_found_and_repaired(dir: &Path, cases: Vec<Case>) {
    for (what, bytes, same, text) in cases {
        let report = if same {
            both(dir, &bytes, what).expect("was there").expect("opens")
        } else {
            check_bytes(&bytes).expect("opens")
        };
        let texts: Vec<_> = report.findings.iter().map(|f| f.text.as_str()).collect();
        assert!(texts.iter().any(|t| t.contains(text)), "{what}: {texts:#?}");
        let (report, after) = repaired(&bytes, Repair::All);
        assert!(report.is_clean(), "{what}: {report:#?}");
        assert!(clean(dir, &after, what));
    }
}

#[test]
fn extended_l2_entries() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let list: &[&[&str]] = &[
        &["img", "create", "-q", "-f", "qcow2", "-o", "extended_l2=on", "a", "8M"],
        &[
            "io",
            "-f",
            "qcow2",
            "-c",
            "write 0 256k",
            "-c",
            "write 1M 2k",
            "-c",
            "write 1028k 4k",
            "a",
        ],
        &["io", "-f", "qcow2", "-c", "write -z 300k 2k", "-c", "write -c 2M 64k", "a"],
        &["io", "-f", "qcow2", "-c", "write -z 10k 8k", "-c", "discard 1M 2k", "a"],
    ];
    let Some(a) = made(dir.path(), list) else { return };
    let report = both(dir.path(), &a, "extended").expect("was there").expect("opens");
    assert!(report.is_clean() && report.allocated_clusters > 5, "{report:#?}");
    let (_, _, _, l2) = places(&a);
    let entry = |n: usize| l2 + 16 * n;
    let first = be(&a, entry(0));
    let packed = entry(32);
    assert!(be(&a, packed) & COMPRESSED != 0);
    let cases = vec![
        ("bit 0", put(&a, entry(0), first | 1), false, "zero flag"),
        ("reserved", put(&a, entry(0), first | 1 << 58), true, "must be zero"),
        ("data and zero", put(&a, entry(0) + 8, 0x1_ffff_ffff), true, "also read as zeroes"),
        ("no space", put(&a, entry(20) + 8, 1), true, "has no space"),
        // qemu-img lets such a cluster leak; here it is still in use.
        ("packed bitmap", put(&a, packed + 8, 1), false, "instead of zero"),
        ("unaligned", put(&a, entry(0), first + 512), true, "not aligned"),
        ("outside", put(&a, entry(0), COPIED | 0x7700_0000), true, "beyond the file's end"),
        ("flag", put(&a, entry(0), first & !COPIED), true, "COPIED flag"),
        ("twice", put(&a, entry(21), first), true, "is too low"),
    ];
    all_are_found_and_repaired(dir.path(), cases);
    // What was allocated reads as zeroes when it is lost, what was not shows what lies below.
    let lost = put(&a, entry(16), COPIED | 0x7700_0000);
    let bitmap = be(&a, entry(16) + 8);
    let (_, after) = repaired(&lost, Repair::All);
    let zero = (bitmap | bitmap >> 32) & 0xffff_ffff;
    assert_eq!((be(&after, entry(16)), be(&after, entry(16) + 8)), (0, zero << 32), "{bitmap:#x}");
    let (_, after) = repaired(&put(&a, entry(0) + 8, 0x1_ffff_ffff), Repair::All);
    assert_eq!(be(&after, entry(0) + 8), 0xffff_ffff, "data that is there is kept");
}

#[test]
fn external_data_files() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let create = ["img", "create", "-q", "-f", "qcow2", "-o", "data_file=d", "a", "8M"];
    let list: &[&[&str]] = &[
        &create,
        &["io", "-f", "qcow2", "-c", "write 0 256k", "-c", "write 1M 64k", "a"],
        &["img", "snapshot", "-c", "refused", "a"],
    ];
    let Some(a) = made(dir.path(), &list[..2]) else { return };
    let report = both(dir.path(), &a, "data file").expect("was there").expect("opens");
    assert!(report.is_clean() && report.allocated_clusters == 5, "{report:#?}");
    let (_, block, _, l2) = places(&a);
    let cases = vec![
        ("flag", put(&a, l2 + 8, 0x1_0000), true, "in the data file is not set"),
        ("unaligned", put(&a, l2 + 8, COPIED | 0x1_0200), true, "not aligned"),
        ("compressed", put(&a, l2 + 8, COMPRESSED | 0x1_0000), true, "with a data file"),
        ("leak", put(&a, block, be(&a, block) + 1), true, "leaks"),
    ];
    all_are_found_and_repaired(dir.path(), cases);
    // Space in the data file is nobody's business here, wherever it lies.
    let far = put(&a, l2 + 8, COPIED | 0x77_0000_0000);
    assert!(both(dir.path(), &far, "far").expect("was there").expect("opens").is_clean());
    let (_, after) = repaired(&put(&far, block, 0), Repair::All);
    assert_eq!(be(&after, l2 + 8), be(&far, l2 + 8));
}

#[test]
fn encrypted_images_keep_their_encryption_header() {
    let dir = tempfile::tempdir().expect("temporary folder");
    std::fs::write(dir.path().join("key"), "secret phrase").expect("write");
    let options = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
    let key = "secret,id=s,file=key";
    let list: &[&[&str]] =
        &[&["img", "create", "-q", "-f", "qcow2", "--object", key, "-o", options, "a", "8M"]];
    let Some(a) = made(dir.path(), list) else { return };
    let report = check_bytes(&a).expect("opens");
    assert!(report.is_clean(), "{:#?}", report.findings);
    let (_, block, l1, _) = places(&a);
    let header = Header::parse(&a).expect("valid");
    let place = be(header.extension(EXT_ENCRYPTION).expect("has one"), 0);
    // An L1 entry that names it is dropped, and its counts come back.
    let damaged = put(&a, l1, COPIED | place);
    let cluster = (place >> 16) as usize;
    let damaged = put(&damaged, block + 2 * cluster, 0);
    let report = check_bytes(&damaged).expect("opens");
    assert!(report.corruptions > 4, "{:#?}", report.findings);
    let (report, after) = repaired(&damaged, Repair::All);
    assert!(report.is_clean() && after == a, "{report:#?}");
    // Where it lies is not known: nothing is given back.
    let at = a.windows(4).position(|w| w == EXT_ENCRYPTION.to_be_bytes()).expect("is there");
    let unknown = put(&a, at + 8, 0x7700_0000);
    let (report, after) = repaired(&unknown, Repair::All);
    assert!(!report.is_clean() && after == unknown, "{report:#?}");
}

#[test]
fn bitmaps_that_are_damaged_are_given_up_and_those_that_are_sound_are_kept() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let Some(samples) = samples(dir.path()) else { return };
    let (_, a) = samples.iter().find(|(n, _)| *n == "bitmaps").expect("made");
    let header = Header::parse(a).expect("valid");
    let data = header.extension(crate::format::EXT_BITMAPS).expect("has bitmaps");
    let directory = be(data, 16) as usize;
    let table = be(a, directory) as usize;
    let (_, block, _, l2) = places(a);
    let cases = vec![
        ("entry", put(a, table, be(a, table) | 2), true, "wrong entry"),
        ("outside", put(a, table, 0x7700_0000), true, "beyond the file's end"),
        ("table", put(a, directory, 0x7700_0000), true, "beyond the file's end"),
        ("directory", put(a, directory + 16, 0), false, "0 bytes long"),
        ("over data", put(a, table, be(a, l2) & OFFSET_MASK), true, "is too low"),
    ];
    for (what, bytes, ..) in &cases {
        let (_, after) = repaired(bytes, Repair::All);
        assert_eq!(be(&after, 88) & 1, 0, "{what}: the bitmaps are still valid");
    }
    all_are_found_and_repaired(dir.path(), cases);
    let (report, after) = repaired(&put(a, block, 0), Repair::All);
    assert!(report.is_clean() && after == *a, "{report:#?}");
}
