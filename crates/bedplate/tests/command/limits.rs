//! Images made to take time and memory: every command ends soon, in half a GiB, with a sentence.
//!
//! The memory is what the kernel lets the process have. The time is a bound on the processor's, far above what is needed
//! (well under 2 seconds in a release build), since tests run unoptimised and beside others.

use super::{Bench, Ended, poke};
use anyhow::{Result, ensure};
use bedplate_tests::{has_or_skip, host};
use std::process::Command;

const COPIED: u64 = 1 << 63;
const CLUSTER: u64 = 65536;
/// Where new images with clusters of 64 KiB have these.
const REFCOUNTS: u64 = 2 * CLUSTER;
const L1: u64 = 3 * CLUSTER;

/// Runs a command within the limits.
fn bounded(bench: &Bench, args: &[&str]) -> Result<Ended> {
    let mut command: Command = host::tool("prlimit");
    command.args(["--data=536870912", "--core=0", "--cpu=20"]).arg(env!("CARGO_BIN_EXE_bedplate"));
    command.args(args).current_dir(bench.folder.path()).env_remove("RUST_LOG");
    let out = host::output(&mut command)?;
    let ended = Ended {
        code: out.status.code().unwrap_or(-1),
        out: String::from_utf8_lossy(&out.stdout[..out.stdout.len().min(4096)]).into_owned(),
        err: String::from_utf8_lossy(&out.stderr).into_owned(),
    };
    ensure!((0..=3).contains(&ended.code), "{args:?} did not end well: {ended:?}");
    ensure!(ended.code == 0 || !(ended.out.is_empty() && ended.err.is_empty()), "{args:?}");
    Ok(ended)
}

fn words(words: impl Iterator<Item = u64>) -> Vec<u8> {
    words.flat_map(u64::to_be_bytes).collect()
}

/// Every command on the image, those that change it on a copy; what is only looked at stays as it is.
fn try_all(bench: &Bench, image: &str) -> Result<()> {
    let before = std::fs::metadata(bench.path(image))?.modified()?;
    for args in [
        &["info", image][..],
        &["check", image],
        &["map", "--json", image],
        &["snapshot", image],
        &["qemu-io", "-r", "-c", "read 0 64k", "-c", "map", image],
    ] {
        bounded(bench, args)?;
    }
    ensure!(std::fs::metadata(bench.path(image))?.modified()? == before, "{image} was written to");
    for args in [
        &["check", "-r", "leaks"][..],
        &["check", "-r", "all"],
        &["snapshot", "-c", "new"],
        &["bitmap", "--add"],
        &["resize", "+64M"],
        &["qemu-io", "-c", "write 0 64k", "-c", "discard 1M 1M", "-c", "write -z 2M 1M"],
    ] {
        host::run(
            Command::new("cp")
                .arg("--sparse=always")
                .args([image, "copy.qcow2"])
                .current_dir(bench.folder.path()),
        )?;
        let mut args = args.to_vec();
        match args[0] {
            "resize" => args.insert(1, "copy.qcow2"),
            "bitmap" => args.extend(["copy.qcow2", "new"]),
            _ => args.push("copy.qcow2"),
        }
        bounded(bench, &args)?;
    }
    Ok(())
}

/// Entries of a long L1 table: a 16th of the longest.
const ENTRIES: u64 = (2 << 20) / 8;

/// An image with a long L1 table whose entries are what `fill` says.
fn with_l1(bench: &Bench, cluster: u64, fill: impl Fn(u64) -> u64) -> Result<()> {
    let size = (ENTRIES * cluster / 8 * cluster).to_string();
    let option = format!("cluster_size={cluster}");
    bench.run(&["create", "-q", "-o", &option, "a.qcow2", &size])?.ok()?;
    let header = std::fs::read(bench.path("a.qcow2"))?;
    let l1 = header[40..48].iter().fold(0, |n, b| n << 8 | u64::from(*b));
    poke(&bench.path("a.qcow2"), l1, &words((0..ENTRIES).map(fill)))
}

#[test]
fn a_long_l1_table_is_bounded_work_whatever_its_entries_say() -> Result<()> {
    if !has_or_skip("a_long_l1_table_is_bounded_work_whatever_its_entries_say", "prlimit") {
        return Ok(());
    }
    const FAR: u64 = 1 << 30;
    let bench = Bench::new()?;
    for (cluster, story) in
        [(512, "in holes"), (CLUSTER, "in holes"), (512, "one"), (CLUSTER, "one")]
    {
        with_l1(&bench, cluster, |index| {
            COPIED | (FAR + if story == "one" { 0 } else { index * cluster })
        })?;
        let end = FAR + cluster * if story == "one" { 1 } else { ENTRIES };
        let file = std::fs::File::options().write(true).open(bench.path("a.qcow2"))?;
        file.set_len(end)?;
        if story == "one" {
            // Every other cluster is zero.
            let table = words((0..cluster / 8).map(|index| index % 2));
            poke(&bench.path("a.qcow2"), FAR, &table)?;
        }
        try_all(&bench, "a.qcow2")?;
        let mapped = bounded(&bench, &["map", "--json", "a.qcow2"])?;
        match story {
            "one" => mapped.fails(1, &["a.qcow2", "more than once"])?,
            _ => ensure!(mapped.code == 0 && mapped.out.lines().count() == 1, "{mapped:?}"),
        }
    }
    Ok(())
}

/// As many bitmaps as there can be, all recording.
#[test]
fn very_many_bitmaps_keep_no_command_from_ending() -> Result<()> {
    if !has_or_skip("very_many_bitmaps_keep_no_command_from_ending", "prlimit") {
        return Ok(());
    }
    let bench = Bench::new()?;
    for (count, name) in [(65535_u32, 8), (60_000, 1000)] {
        bench.run(&["create", "-q", "a.qcow2", "1G"])?.ok()?;
        bench.run(&["bitmap", "--add", "a.qcow2", "b0"])?.ok()?;
        let bytes = std::fs::read(bench.path("a.qcow2"))?;
        let ext = bytes.windows(4).position(|w| w == 0x2385_2875_u32.to_be_bytes());
        let ext = ext.unwrap_or_default();
        let old = bytes[ext + 24..ext + 32].iter().fold(0, |n, b| n << 8 | usize::from(*b));
        // All of them share the table of the first.
        let mut directory = Vec::new();
        for index in 0..count {
            let mut entry = bytes[old..old + 24].to_vec();
            entry[18..20].copy_from_slice(&(name as u16).to_be_bytes());
            entry.extend(format!("{index:0name$}").into_bytes());
            entry.resize(entry.len().next_multiple_of(8), 0);
            directory.extend(entry);
        }
        let at = (bytes.len() as u64).next_multiple_of(CLUSTER);
        let mut told = count.to_be_bytes().to_vec();
        told.extend([0; 4]);
        told.extend(words([directory.len() as u64, at].into_iter()));
        let path = bench.path("a.qcow2");
        poke(&path, at, &directory)?;
        poke(&path, ext as u64 + 8, &told)?;
        let clusters = (directory.len() as u64).div_ceil(CLUSTER);
        let ones = [0, 1].repeat(clusters as usize);
        poke(&path, REFCOUNTS + at / CLUSTER * 2, &ones)?;
        try_all(&bench, "a.qcow2")?;
        let write = bounded(&bench, &["qemu-io", "-c", "write 0 64k", "a.qcow2"])?;
        ensure!(write.code == 1 && write.err.contains("bedplate bitmap"), "{write:?}");
        let first = format!("{:0name$}", 0);
        let changed = bounded(&bench, &["bitmap", "--disable", "a.qcow2", &first])?;
        ensure!(changed.code == 0, "the way out is closed: {changed:?}");
    }
    Ok(())
}

#[test]
fn clusters_far_apart_in_a_long_file_are_not_gone_through_one_by_one() -> Result<()> {
    let test = "clusters_far_apart_in_a_long_file_are_not_gone_through_one_by_one";
    if !has_or_skip(test, "prlimit") {
        return Ok(());
    }
    for (cluster, compat) in [(512, "1.1"), (CLUSTER, "1.1"), (CLUSTER, "0.10")] {
        let bench = Bench::new()?;
        let option = format!("cluster_size={cluster},compat={compat}");
        bench.run(&["create", "-q", "-o", &option, "a.qcow2", "1G"])?.ok()?;
        let bytes = std::fs::read(bench.path("a.qcow2"))?;
        let l1 = bytes[40..48].iter().fold(0, |n, b| n << 8 | u64::from(*b));
        let table = (bytes.len() as u64).next_multiple_of(cluster);
        let path = bench.path("a.qcow2");
        poke(&path, l1, &words([COPIED | table].into_iter()))?;
        poke(&path, table, &words((1..=64).map(|n| COPIED | n << 37)))?;
        // As long as ext4 lets a file be, nearly.
        std::fs::File::options().write(true).open(&path)?.set_len(15 << 40)?;
        try_all(&bench, "a.qcow2")?;
        if compat == "1.1" {
            // Not closed cleanly.
            poke(&path, 79, &[1])?;
            try_all(&bench, "a.qcow2")?;
        }
        ensure!(l1 == L1 || cluster == 512);
    }
    Ok(())
}
