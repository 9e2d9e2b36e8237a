//! The check against qemu-img's, on sound images and on images damaged by hand and at random.

mod features;
mod hostile;
mod repairs;

use super::*;
use crate::format::{Header, NewImage};
use bedplate_sim::exec::block_on;
use bedplate_sim::{Image, Rng, SimOptions, SimStorage};
use bedplate_types::ByteLen;
use std::path::Path;
use std::process::{Command, Output};

/// Runs a program of QEMU's; `None` (and a line on stderr) where it is not installed.
fn run(dir: &Path, program: &str, args: &[&str]) -> Option<Output> {
    match Command::new(program).current_dir(dir).args(args).output() {
        Ok(out) => Some(out),
        Err(e) => {
            eprintln!("SKIPPED: {program} can't be run: {e}");
            None
        }
    }
}

/// Runs steps like `img create ...` and `io -c ... a` that must succeed.
fn steps(dir: &Path, list: &[&[&str]]) -> Option<()> {
    for args in list {
        let out = run(dir, &format!("qemu-{}", args[0]), &args[1..])?;
        assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    }
    Some(())
}

fn check_bytes(bytes: &[u8]) -> Result<CheckReport> {
    let options = SimOptions { read_only: true, ..SimOptions::default() };
    let storage = SimStorage::from_image(Image::from_bytes(bytes), options);
    block_on(check(&storage, CheckOptions { max_findings: 1 << 20, ..CheckOptions::default() }))
}

/// The numbers of a report, those of qemu-img or ours.
fn numbers(report: &serde_json::Value) -> Vec<(&'static str, u64)> {
    const KEYS: [&str; 8] = [
        "corruptions",
        "leaks",
        "check-errors",
        "image-end-offset",
        "total-clusters",
        "allocated-clusters",
        "fragmented-clusters",
        "compressed-clusters",
    ];
    KEYS.iter()
        .map(|k| (*k, report.get(k).and_then(serde_json::Value::as_u64).unwrap_or(0)))
        .collect()
}

/// The numbers of a report and the exit code.
type Verdict = (Vec<(&'static str, u64)>, i32);

/// qemu-img's verdict; `Some(None)` when it refuses the image altogether.
fn by_qemu(dir: &Path, bytes: &[u8]) -> Option<Option<Verdict>> {
    std::fs::write(dir.join("damaged"), bytes).expect("write");
    let out = run(dir, "qemu-img", &["check", "--output=json", "-f", "qcow2", "damaged"])?;
    let Ok(report) = serde_json::from_slice(&out.stdout) else { return Some(None) };
    Some(Some((numbers(&report), out.status.code().unwrap_or(-1))))
}

/// Checks with both and compares. Returns what ours said, or `None` without qemu-img.
fn both(dir: &Path, bytes: &[u8], what: &str) -> Option<Result<CheckReport>> {
    let theirs = by_qemu(dir, bytes)?;
    let ours = check_bytes(bytes);
    match (&theirs, &ours) {
        (None, Ok(report)) => assert!(!report.is_clean(), "{what}: qemu-img refuses it"),
        (None, Err(_)) => {}
        (Some(theirs), Err(e)) => panic!("{what}: qemu-img says {theirs:?} but ours {e:?}"),
        (Some((theirs, code)), Ok(report)) => {
            let json = serde_json::to_value(report).expect("serialises");
            let mut ours = numbers(&json);
            // The one thing that only this check counts.
            let mixed = report.findings.iter().filter(|f| f.text.ends_with("at once")).count();
            ours[0].1 -= mixed as u64;
            if report.findings.iter().any(|f| f.text.ends_with("which version 2 does not have")) {
                // qemu-img does not mind; it may be there as often as the L2 table is named.
                assert!(ours[0].1 > theirs[0].1, "{what}");
                ours[0].1 = theirs[0].1;
            }
            assert_eq!(&ours, theirs, "{what}: {:#?}", report.findings);
            if mixed == 0 {
                assert_eq!(i32::from(report.exit_code()), *code, "{what}");
            }
        }
    }
    Some(ours)
}

/// Images of all kinds, made by QEMU.
fn samples(dir: &Path) -> Option<Vec<(&'static str, Vec<u8>)>> {
    let noise: Vec<u8> =
        (0..1u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8 & 0x3f).collect();
    std::fs::write(dir.join("noise"), noise).expect("write");
    let create = |options: &'static str| {
        vec!["img", "create", "-q", "-f", "qcow2", "-o", options, "a", "1100M"]
    };
    let write = vec![
        "io",
        "-f",
        "qcow2",
        "-c",
        "write 0 256k",
        "-c",
        "write 10M 128k",
        "-c",
        "write 33M 64k",
        "-c",
        "write 1M 64k",
        "-c",
        "write -z 12M 128k",
        "a",
    ];
    let kinds: Vec<(&'static str, Vec<Vec<&str>>)> = vec![
        ("plain", vec![create("cluster_size=64k"), write.clone()]),
        ("version 2", vec![create("compat=0.10,cluster_size=16k"), write.clone()]),
        ("4k", vec![create("cluster_size=4k,refcount_bits=64"), write.clone()]),
        ("512", vec![create("cluster_size=512"), write.clone()]),
        ("1 bit", vec![create("refcount_bits=1"), write.clone()]),
        (
            "snapshots",
            vec![
                create("refcount_bits=4"),
                write.clone(),
                vec!["img", "snapshot", "-c", "one", "a"],
                vec!["io", "-f", "qcow2", "-c", "write 64k 64k", "-c", "discard 10M 64k", "a"],
                vec!["img", "snapshot", "-c", "two", "a"],
                vec!["io", "-f", "qcow2", "-c", "write 20M 64k", "a"],
            ],
        ),
        (
            "bitmaps",
            vec![
                create("cluster_size=4k"),
                vec!["img", "bitmap", "--add", "-g", "4k", "a", "b0"],
                vec!["img", "bitmap", "--add", "a", "b1"],
                write.clone(),
            ],
        ),
        ("zlib", vec![vec!["img", "convert", "-c", "-f", "raw", "-O", "qcow2", "noise", "a"]]),
        (
            "zstd",
            vec![
                vec![
                    "img",
                    "convert",
                    "-c",
                    "-f",
                    "raw",
                    "-O",
                    "qcow2",
                    "-o",
                    "compression_type=zstd,cluster_size=8k",
                    "noise",
                    "a",
                ],
                vec!["img", "snapshot", "-c", "one", "a"],
            ],
        ),
    ];
    let mut out = Vec::new();
    for (name, commands) in kinds {
        let _ = std::fs::remove_file(dir.join("a"));
        let list: Vec<&[&str]> = commands.iter().map(Vec::as_slice).collect();
        steps(dir, &list)?;
        out.push((name, std::fs::read(dir.join("a")).expect("read")));
    }
    Some(out)
}

#[test]
fn sound_images_are_clean_with_the_numbers_of_qemu() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let Some(samples) = samples(dir.path()) else { return };
    for (name, bytes) in samples {
        let report = both(dir.path(), &bytes, name).expect("was there").expect("valid");
        assert!(report.is_clean(), "{name}: {:#?}", report.findings);
    }
}

fn be(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(*bytes[at..].first_chunk().expect("in range"))
}

fn put(bytes: &[u8], at: usize, value: u64) -> Vec<u8> {
    let mut out = bytes.to_vec();
    out[at..at + 8].copy_from_slice(&value.to_be_bytes());
    out
}

/// Where the parts of a sample with 64 KiB clusters lie: refcount table, first block, L1, first L2.
fn places(bytes: &[u8]) -> (usize, usize, usize, usize) {
    let table = be(bytes, 48) as usize;
    let l1 = be(bytes, 40) as usize;
    let mask = crate::format::OFFSET_MASK;
    (table, be(bytes, table) as usize, l1, (be(bytes, l1) & mask) as usize)
}

#[test]
fn each_kind_of_damage_is_reported_as_qemu_reports_it() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let Some(samples) = samples(dir.path()) else { return };
    let find = |name| &samples.iter().find(|(n, _)| *n == name).expect("made").1;
    let a = find("plain");
    for (what, want, bytes) in &damages(a) {
        let report = both(dir.path(), bytes, what).expect("was there").expect("opens");
        assert!(!report.is_clean(), "{what}");
        let texts: Vec<_> = report.findings.iter().map(|f| f.text.as_str()).collect();
        assert!(texts.iter().any(|t| t.contains(want)), "{what}: {texts:#?}");
    }
    for (what, bytes) in snapshot_damages(find("snapshots")) {
        let report = both(dir.path(), &bytes, what).expect("was there").expect("opens");
        assert!(!report.is_clean(), "{what}");
    }
}

/// A damage's name, what a finding says of it, and the damaged image.
type Damaged = (&'static str, &'static str, Vec<u8>);

/// The sample "plain", damaged in all ways.
fn damages(a: &[u8]) -> Vec<Damaged> {
    let (table, block, l1, l2) = places(a);
    let (l1e, l2e, counts) = (be(a, l1), be(a, l2), be(a, block));
    let copied = 1u64 << 63;
    vec![
        ("too low", "is too low", put(a, block, counts & !0xffff)),
        ("leak", "leaks space", put(a, block, counts ^ 3 << 48)),
        (
            "count 2",
            "COPIED flag of the data cluster",
            put(a, block + 8, be(a, block + 8) | 0x0002_0002_0002_0002),
        ),
        ("no block", "is too low", put(a, table, 0)),
        ("block outside", "beyond the file's end", put(a, table, 0x5500_0000)),
        ("block unaligned", "can't be read", put(a, table, block as u64 + 512)),
        ("block reserved", "refcount table entry 0", put(a, table, block as u64 + 1)),
        ("block twice", "has 2 references", put(a, table + 8, block as u64)),
        ("block on L2", "has 2 references", put(a, table + 8, l2 as u64)),
        ("L1 reserved", "bits set", put(a, l1, l1e | 1)),
        ("L1 unaligned", "not aligned", put(a, l1, l1e + 512)),
        ("L1 outside", "beyond the file's end", put(a, l1, copied | 0x7700_0000)),
        ("L1 not copied", "COPIED flag of the L2 table", put(a, l1, l1e & !copied)),
        ("L1 twice", "is too low", put(a, l1 + 8, l1e)),
        ("L1 on header", "is too low", put(a, l1 + 8, copied | 0x1_0000)),
        ("L2 reserved", "bits set", put(a, l2, l2e | 2)),
        ("L2 reserved high", "bits set", put(a, l2, l2e | 1 << 58)),
        ("L2 unaligned", "not aligned", put(a, l2, l2e + 512)),
        ("L2 zero unaligned", "not aligned", put(a, l2, (l2e + 512) | 1)),
        ("L2 outside", "beyond the file's end", put(a, l2, copied | 0x7700_0000)),
        ("L2 not copied", "COPIED flag of the data cluster", put(a, l2, l2e & !copied)),
        ("L2 twice", "is too low", put(a, l2 + 8, l2e)),
        ("L2 on L1", "is too low", put(a, l2, copied | l1 as u64)),
        ("L2 compressed", "leaks space", put(a, l2, 1 << 62 | 0x9_0123)),
        (
            "compressed copied",
            "never may",
            put(a, l2, 3 << 62 | (l2e & crate::format::OFFSET_MASK)),
        ),
        ("cut", "beyond the file's end", a[..a.len() - 0x2_0000].to_vec()),
    ]
}

/// The sample "snapshots", with its snapshots damaged.
fn snapshot_damages(s: &[u8]) -> Vec<(&'static str, Vec<u8>)> {
    let entry = be(s, 64) as usize;
    vec![
        ("snapshot L1 too large", put(s, entry + 8, 0x1000_0000_0001_0003)),
        ("snapshot L1 unaligned", put(s, entry, be(s, entry) + 8)),
        ("snapshot L1 outside", put(s, entry, 0x7700_0000)),
        ("snapshot L1 shared", put(s, entry, be(s, 40))),
        ("snapshot extra data", put(s, entry + 32, 0x0000_0000_0010_0018)),
    ]
}

#[test]
fn random_damage_gives_the_counts_of_qemu() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let Some(samples) = samples(dir.path()) else { return };
    let mut rng = Rng::new(7);
    for (name, bytes) in &samples {
        for round in 0..20 {
            let (damaged, story) = random_damage(bytes, &mut rng);
            let _ = both(dir.path(), &damaged, &format!("{name}, round {round}:{story}"));
        }
    }
}

/// Some words of the tables are overwritten; returns also what was done.
fn random_damage(bytes: &[u8], rng: &mut Rng) -> (Vec<u8>, String) {
    let header = Header::parse(bytes).expect("valid");
    let (table, block, l1, l2) = places(bytes);
    let cluster = 1u64 << header.cluster_bits;
    let clusters = bytes.len() as u64 / cluster;
    let mut damaged = bytes.to_vec();
    let mut story = format!(" table {table:#x}, block {block:#x}, L1 {l1:#x}, L2 {l2:#x}:");
    for _ in 0..=rng.below(3) {
        let (place, n) = match rng.below(8) {
            0 => (table, 2),
            1 | 2 => (block, 32),
            3 | 4 => (l1, u64::from(header.l1_size).min(128)),
            _ => (l2, 64.min(cluster / 8)),
        };
        let at = place + 8 * rng.below(n) as usize;
        let host = rng.below(clusters + 2) * cluster;
        let flags = [0, 1 << 63, 1 << 63 | 1, 1, 512][rng.below(5) as usize];
        let value = match rng.below(8) {
            0 => 0,
            1 => be(&damaged, at) ^ 1 << rng.below(62),
            2 if place == l2 => 1 << 62 | rng.below(clusters * cluster),
            // Neighbouring refcounts of different values.
            _ if place == block => rng.next_u64() & 0x0101_0302_0001_0100,
            _ => host | flags,
        };
        // Version 2 has no zero flag: there the two checks differ on purpose.
        let value = if header.version == 2 && place == l2 { value & !1 } else { value };
        // An L1 entry of nothing but flags makes qemu-img take the header for an L2 table.
        let flags_only = place == l1 && value & crate::format::OFFSET_MASK == 0;
        let value = if flags_only { 0 } else { value };
        damaged = put(&damaged, at, value);
        story += &format!(" {at:#x}={value:#x}");
    }
    (damaged, story)
}

fn fresh(size: u64, cluster_size: u64) -> Vec<u8> {
    let image = NewImage { size: ByteLen::new(size), cluster_size, ..NewImage::default() };
    let layout = image.layout().expect("valid");
    let mut out = vec![0; layout.file_len.get() as usize];
    for (at, bytes) in layout.writes {
        let at = at.get() as usize;
        out[at..at + bytes.len()].copy_from_slice(&bytes);
    }
    out
}

#[test]
fn new_images_are_clean() {
    for (size, cluster) in [(0, 65536), (1 << 30, 512), (1 << 40, 4096), (64 << 40, 65536)] {
        let report = check_bytes(&fresh(size, cluster)).expect("valid");
        assert!(report.is_clean(), "{size} {cluster}: {:#?}", report.findings);
        assert_eq!(report.total_clusters, size / cluster);
    }
}

#[test]
fn space_used_for_two_things_is_corrupt_even_when_the_refcount_allows_it() {
    let a = fresh(1 << 30, 65536);
    let (_, block, l1, _) = places(&a);
    let block_index = block / 65536;
    // The refcount block also holds an L2 table, with a refcount of 2 and without COPIED.
    let mut a = put(&a, l1, block as u64);
    a[block + 2 * block_index + 1] = 2;
    let report = check_bytes(&a).expect("opens");
    let found =
        report.findings.iter().any(|f| f.text.contains("reference counts and an L2 table at once"));
    assert!(found, "{:#?}", report.findings);
}

#[test]
fn the_zero_flag_in_version_2_is_a_corruption() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let Some(samples) = samples(dir.path()) else { return };
    let (_, bytes) = samples.iter().find(|(n, _)| *n == "version 2").expect("made");
    let (_, _, _, l2) = places(bytes);
    let report = check_bytes(&put(bytes, l2, be(bytes, l2) | 1)).expect("opens");
    assert_eq!(report.corruptions, 1, "{:#?}", report.findings);
}

#[test]
fn findings_beyond_the_limit_are_counted_but_not_kept() {
    let a = fresh(1 << 30, 65536);
    let (table, ..) = places(&a);
    let storage =
        SimStorage::from_image(Image::from_bytes(&put(&a, table, 0)), SimOptions::default());
    let options = CheckOptions { max_findings: 2, ..CheckOptions::default() };
    let report = block_on(check(&storage, options)).expect("opens");
    assert_eq!(
        (report.corruptions, report.leaks),
        (3, 0),
        "header, refcount table and L1 are uncounted"
    );
    assert_eq!((report.findings.len(), report.findings_left_out), (2, 1));
}

#[test]
fn little_memory_means_several_windows_and_the_same_report() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let Some(samples) = samples(dir.path()) else { return };
    let (_, sound) = samples.iter().find(|(n, _)| *n == "512").expect("made");
    let (table, block, l1, l2) = places(sound);
    for bytes in [
        sound.clone(),
        put(sound, l2, 0),
        put(sound, l1, be(sound, l1) + 512),
        put(sound, block + 8, 0),
        put(sound, table + 8, 0),
        // References and counts far from everything else.
        [&put(sound, l2, 1 << 63 | 40 << 20)[..], &vec![0; 50 << 20][..]].concat(),
    ] {
        let want = check_bytes(&bytes).expect("opens");
        let options = SimOptions { read_only: true, ..SimOptions::default() };
        let storage = SimStorage::from_image(Image::from_bytes(&bytes), options);
        let options =
            CheckOptions { max_memory: 1, max_findings: 1 << 20, ..CheckOptions::default() };
        let mut got = block_on(check(&storage, options)).expect("opens");
        let mut want = want.clone();
        for report in [&mut got, &mut want] {
            report.findings.sort_by(|a, b| a.text.cmp(&b.text));
        }
        assert_eq!(got, want);
    }
}

#[test]
fn threads_give_the_report_of_one() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let Some(samples) = samples(dir.path()) else { return };
    for (name, bytes) in samples {
        let (_, _, l1, l2) = places(&bytes);
        for (n, bytes) in [bytes.clone(), put(&bytes, l2, 2), put(&bytes, l1, 1)].iter().enumerate()
        {
            let path = dir.path().join("file");
            std::fs::write(&path, bytes).expect("write");
            let how = bedplate_storage::OpenOptions::new(&path)
                .read_only(true)
                .cache(bedplate_types::CacheMode::Writeback);
            let runtime = bedplate_runtime::Runtime::new(Default::default()).expect("runtime");
            let one_and_many = [1, 3].map(|threads| {
                let storage = bedplate_storage::FileStorage::open(&how).expect("opens");
                let options = CheckOptions { threads, ..CheckOptions::default() };
                runtime.block_on(check(&storage, options)).expect("checks")
            });
            assert_eq!(one_and_many[0], one_and_many[1], "{name} {n}");
            assert_eq!(one_and_many[0].is_clean(), n == 0, "{name} {n}");
        }
    }
}

#[test]
fn progress_is_told_up_to_the_end() {
    let a = fresh(64 << 40, 65536);
    let a = put(&a, places(&a).2, 1 << 63 | 0x9_0000);
    let storage = SimStorage::from_image(Image::from_bytes(&a), SimOptions::default());
    let told = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let theirs = told.clone();
    let progress = Progress::new(move |_, done| theirs.lock().expect("alive").push(done));
    let options = CheckOptions { progress: Some(progress), ..CheckOptions::default() };
    block_on(check(&storage, options)).expect("opens");
    let told = told.lock().expect("alive");
    assert_eq!((told.first(), told.last()), (Some(&0.0), Some(&1.0)));
}

#[test]
fn what_is_no_image_is_an_error() {
    assert!(check_bytes(b"not an image").is_err());
}
