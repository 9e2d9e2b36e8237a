//! Every kind of image: random work on each, opened again in the middle, then checked and read by QEMU's tools with all its
//! snapshots. By default on kinds in which any three properties meet, with `BEDPLATE_SOAK=1` on all.

use bedplate_model::matrix::{Kind, Packing, RULES, all, covering, refused};
use bedplate_model::plain::{Options, run_on};
use bedplate_model::{Bed, DataFile, qemu, seeds};
use bedplate_qcow2::NewSnapshot;
use bedplate_runtime::buf::SharedBuf;
use bedplate_sim::exec::block_on;
use bedplate_sim::{Rng, SimOptions, SimStorage};
use bedplate_tests::{has_or_skip, host, skip};
use bedplate_types::{CacheMode, GuestOffset};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Random work on an image of the kind.
fn exercise(kind: &Kind, seed: u64, compare: bool) -> Result<(), String> {
    let mut rng = Rng::new(seed);
    let bed = Bed::new(kind.spec(&mut rng), &mut rng);
    let snapshot = kind.snapshots;
    let options = Options { compare, halfway: true, snapshot, ..Options::default() };
    run_on(bed, rng, options).map(drop).map_err(|e| format!("{e}\n  {kind:?}, seed {seed}"))
}

#[test]
fn every_kind_of_image_reads_like_a_byte_array_and_the_same_by_qemu() {
    let test = "every_kind_of_image_reads_like_a_byte_array_and_the_same_by_qemu";
    let compare = qemu::installed();
    if !compare {
        skip(test, "in part: qemu-img and qemu-io are not installed");
    }
    let (some, all) = (covering(), all());
    // A seed is a kind's place in the list.
    let range = seeds(some.len() as u64, all.len() as u64);
    let kinds = if range.end as usize > some.len() { all } else { some };
    let next = AtomicUsize::new(range.start as usize);
    let end = kinds.len().min(range.end as usize);
    let workers = std::thread::available_parallelism().map_or(1, |n| n.get().min(8));
    let failed: Vec<String> = std::thread::scope(|scope| {
        let work = || loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let kind = kinds.get(at).filter(|_| at < end)?;
            if let Err(e) = exercise(kind, at as u64, compare) {
                return Some(format!("{test}, kind {at}: {e}"));
            }
        };
        let running: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        // A panic has told which kind it met.
        running.into_iter().filter_map(|thread| thread.join().expect("no panic")).collect()
    });
    println!("{} kinds of images, of {}", end.saturating_sub(range.start as usize), kinds.len());
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// What QEMU's tools say when they are to make such an image.
fn qemu_makes(kind: &Kind) -> bool {
    let folder = tempfile::tempdir().expect("a folder");
    let run = |tool: &str, words: &[&str]| {
        let out = Command::new(tool).args(words).current_dir(folder.path()).output();
        out.expect("it can be started").status.success()
    };
    let mut options = format!(
        "cluster_size={},refcount_bits={},compat={},extended_l2={}",
        1 << kind.cluster_bits,
        1 << kind.refcount_order,
        if kind.version == 2 { "0.10" } else { "1.1" },
        if kind.extended { "on" } else { "off" },
    );
    if kind.packing == Packing::Zstd {
        options += ",compression_type=zstd";
    }
    if let Some(data) = kind.data_file {
        let raw = if data == DataFile::Raw { "on" } else { "off" };
        options += &format!(",data_file=data,data_file_raw={raw}");
    }
    if kind.luks {
        options += ",encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
    }
    let mut create = vec!["create", "-q", "-f", "qcow2", "-o", &options];
    create.extend(["--object", "secret,id=s,data=passphrase"]);
    if kind.below.is_some() {
        std::fs::write(folder.path().join("base"), [0; 512]).expect("a file");
        create.extend(["-b", "base", "-F", "raw"]);
    }
    create.extend(["image", "4M"]);
    let write = |command| run("qemu-io", &["-f", "qcow2", "-c", command, "image"]);
    run("qemu-img", &create)
        && (kind.packing == Packing::None || write("write -c 2M 2M"))
        && (!kind.snapshots
            || write("write 0 64k") && run("qemu-img", &["snapshot", "-c", "s", "image"]))
}

/// What Bedplate says when it is to make such an image.
fn bedplate_makes(kind: &Kind) -> Result<(), String> {
    kind.new_image().layout().map_err(|e| format!("{e:#}"))?;
    let mut rng = Rng::new(0);
    // The rest comes to an image that is there.
    let plain = Kind { snapshots: false, packing: Packing::None, ..*kind };
    let bed = Bed::new(plain.spec(&mut rng), &mut rng);
    let storage = SimStorage::from_image(bed.image.clone(), SimOptions::default());
    let open = bed.open(storage, CacheMode::None).map_err(|e| format!("{e:#}"))?;
    let cluster = SharedBuf::zeroed(1 << kind.cluster_bits).expect("memory").iovec();
    block_on(open.disk.write(GuestOffset::ZERO, cluster.clone(), false)).expect("space");
    if kind.packing != Packing::None {
        let write = open.disk.write_compressed(GuestOffset::new(1 << kind.cluster_bits), cluster);
        block_on(write).map_err(|e| format!("{e:#}"))?;
    }
    if kind.snapshots {
        let new = NewSnapshot { name: b"s", date: Duration::ZERO };
        block_on(open.qcow2.create_snapshot(&new)).map_err(|e| format!("{e:#}"))?;
    }
    Ok(())
}

#[test]
fn what_does_not_go_together_is_refused_by_bedplate_and_by_qemu() {
    let has = host::which("qemu-img").is_some()
        && has_or_skip("what_does_not_go_together_is_refused_by_bedplate_and_by_qemu", "qemu-io");
    let cases = refused();
    assert_eq!(cases.len(), RULES.len());
    for (kind, rule) in cases {
        let made = bedplate_makes(&kind);
        assert!(made.is_err(), "Bedplate makes {kind:?}, although {}", rule.why);
        if has {
            assert_eq!(!qemu_makes(&kind), rule.qemu, "QEMU on {kind:?}; {}", rule.why);
        }
    }
}
