//! `bedplate snapshot`.

use super::Bench;
use anyhow::{Result, ensure};

#[test]
fn snapshots_are_listed_made_applied_and_deleted() -> Result<()> {
    let bench = Bench::new()?;
    bench.run(&["create", "-q", "a.qcow2", "10M"])?.ok()?;
    assert_eq!(bench.run(&["snapshot", "a.qcow2"])?.ok()?.out, "");
    bench.run(&["snapshot", "-c", "one", "a.qcow2"])?.ok()?;
    bench.run(&["snapshot", "--create", "two words", "a.qcow2"])?.ok()?;
    bench.run(&["snapshot", "-q", "-c", "one", "a.qcow2"])?.ok()?;
    let list = bench.run(&["snapshot", "-l", "a.qcow2"])?.ok()?.out;
    let lines: Vec<&str> = list.lines().collect();
    ensure!(lines.len() == 5 && lines[0] == "Snapshot list:", "{list}");
    for (line, start) in
        lines[2..].iter().zip(["1       one ", "2       two words ", "3       one "])
    {
        ensure!(line.starts_with(start), "{list}");
    }
    bench.run(&["snapshot", "-a", "two words", "a.qcow2"])?.ok()?;
    bench.run(&["snapshot", "-a", "3", "a.qcow2"])?.ok()?;
    bench.run(&["snapshot", "-d", "one", "a.qcow2"])?.ok()?;
    let list = bench.run(&["snapshot", "a.qcow2"])?.ok()?.out;
    ensure!(list.lines().count() == 4 && !list.contains("\n1 "), "{list}");
    bench.run(&["check", "a.qcow2"])?.ok()?;
    Ok(())
}

#[test]
fn what_cannot_be_done_changes_nothing() -> Result<()> {
    let bench = Bench::new()?;
    bench.run(&["create", "-q", "-o", "refcount_bits=1", "a.qcow2", "10M"])?.ok()?;
    bench.run(&["create", "-q", "b.raw", "1M"])?.ok()?;
    std::fs::write(bench.path("c.txt"), "no image")?;
    let refuses = |args: &[&str], words: &[&str]| bench.refuses(args, 1, words);
    refuses(&["snapshot", "-d", "none", "a.qcow2"], &["delete snapshot 'none'", "a.qcow2"])?;
    refuses(&["snapshot", "-a", "none", "a.qcow2"], &["apply snapshot 'none'", "snapshot -l"])?;
    refuses(&["snapshot", "-c", &"x".repeat(256), "a.qcow2"], &["255", "256"])?;
    refuses(&["snapshot", "-c", "x", "b.raw"], &["b.raw", "raw image"])?;
    refuses(&["snapshot", "-l", "b.raw"], &["b.raw", "raw image"])?;
    refuses(&["snapshot", "c.txt"], &["c.txt", "not a qcow2 image"])?;
    let usage = bench.run(&["snapshot", "-c", "x", "-d", "y", "a.qcow2"])?;
    assert_eq!(usage.code, 2);
    Ok(())
}

/// Refcounts of one bit were truncated without a word elsewhere.
#[test]
fn a_snapshot_that_the_refcounts_cannot_count_is_refused() -> Result<()> {
    let bench = Bench::new()?;
    if !bedplate_tests::has_or_skip(
        "a_snapshot_that_the_refcounts_cannot_count_is_refused",
        "qemu-io",
    ) {
        return Ok(());
    }
    for (bits, most) in [("1", 0), ("2", 2)] {
        let option = format!("refcount_bits={bits}");
        bench.run(&["create", "-q", "-o", &option, "a.qcow2", "10M"])?.ok()?;
        bench.tool("qemu-io", &["-f", "qcow2", "-c", "write -P 3 0 1M", "a.qcow2"])?;
        for _ in 0..most {
            bench.run(&["snapshot", "-c", "x", "a.qcow2"])?.ok()?;
        }
        let words = ["bit", "delete a snapshot"];
        bench.refuses(&["snapshot", "-c", "x", "a.qcow2"], 1, &words)?;
        bench.tool("qemu-img", &["check", "-q", "a.qcow2"])?;
    }
    Ok(())
}

/// Elsewhere a snapshot's table was believed to be as long as it said, and the heap behind it was overwritten.
#[test]
fn a_snapshot_with_an_impossible_table_is_listed_and_otherwise_refused() -> Result<()> {
    for (at, bytes) in [
        (8, [0x10, 0, 0, 0, 0, 1, 0, 3]),
        (0, [0, 0, 0, 0, 0, 6, 2, 1]),
        (0, [0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0]),
    ] {
        let bench = Bench::new()?;
        bench.run(&["create", "-q", "a.qcow2", "64M"])?.ok()?;
        bench.run(&["qemu-io", "-c", "write -P 7 0 512", "a.qcow2"])?.ok()?;
        bench.run(&["snapshot", "-c", "one", "a.qcow2"])?.ok()?;
        let header = std::fs::read(bench.path("a.qcow2"))?;
        let table = header[64..72].iter().fold(0, |n, b| n << 8 | u64::from(*b));
        super::poke(&bench.path("a.qcow2"), table + at, &bytes)?;
        for action in ["-a", "-d"] {
            bench.refuses(&["snapshot", action, "one", "a.qcow2"], 1, &["'one'", "a.qcow2"])?;
        }
        ensure!(bench.run(&["snapshot", "-l", "a.qcow2"])?.ok()?.out.contains("one"));
        bench.run(&["qemu-io", "-r", "-c", "read -P 7 0 512", "a.qcow2"])?.ok()?;
    }
    Ok(())
}
