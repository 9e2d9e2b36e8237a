//! Help, version, wrong words, and readers that go away.

use super::Bench;
use anyhow::{Result, ensure};
use bedplate_types::limits;
use std::process::Stdio;

#[test]
fn help_names_the_limits_and_gives_examples() -> Result<()> {
    let bench = Bench::new()?;
    let help = bench.run(&["--help"])?.ok()?.out;
    for verb in ["create", "info", "check", "map", "serve", "bench"] {
        ensure!(help.contains(&format!("\n  {verb} ")), "{verb} is not in\n{help}");
        let own = bench.run(&[verb, "--help"])?.ok()?.out;
        ensure!(own.contains("Example") && own.contains(&format!("bedplate {verb} ")), "{own}");
    }
    for number in [
        limits::MAX_CHAIN_DEPTH.to_string(),
        limits::MAX_BACKING_NAME.to_string(),
        limits::MAX_QUEUES.to_string(),
        limits::MAX_QUEUE_SIZE.to_string(),
        limits::MAX_NBD_CLIENTS.to_string(),
    ] {
        ensure!(help.contains(&number), "{number} is not in\n{help}");
    }
    Ok(())
}

#[test]
fn the_version_is_told() -> Result<()> {
    let out = Bench::new()?.run(&["-V"])?.ok()?.out;
    assert_eq!(out, format!("bedplate {}\n", env!("CARGO_PKG_VERSION")));
    Ok(())
}

#[test]
fn wrong_usage_ends_with_2_but_a_check_never_seems_to_find_corruption() -> Result<()> {
    let bench = Bench::new()?;
    for (args, code) in [
        (&["frob"][..], 2),
        (&["create"], 2),
        (&["create", "-f", "vmdk", "a", "1M"], 2),
        (&["create", "a.raw", "1Q"], 2),
        (&["serve", "a.raw"], 2),
        (&["serve", "a.raw", "--nbd", "unix:"], 2),
        (&["serve", "null:1G", "--vhost-user-blk", "s", "--queues", "65"], 2),
        (&["serve", "null:1G", "--vhost-user-blk", "s", "--queue-size", "100"], 2),
        (&["serve", "null:1G", "--vhost-user-blk", "s", "--serial", "123456789012345678901"], 2),
        (&["serve", "null:1G", "--nbd", "./s", "--queues", "2"], 2),
        (&["serve", "a.raw", "--nbd", "./s", "--force-share"], 2),
        (&["info", "--output=xml", "a.raw"], 2),
        (&["check"], 1),
        (&["check", "--frob", "a.qcow2"], 1),
    ] {
        let ended = bench.run(args)?;
        ensure!(ended.code == code && !ended.err.is_empty(), "{args:?}: {ended:?}");
    }
    assert!(bench.snapshot()?.is_empty());
    Ok(())
}

#[test]
fn a_format_is_told_by_the_extension_or_must_be_stated() -> Result<()> {
    let bench = Bench::new()?;
    bench.run(&["create", "a.qcow2", "1M"])?.ok()?;
    std::fs::copy(bench.path("a.qcow2"), bench.path("a.bin"))?;
    // Only what can be nothing but qcow2, as a check, needs no statement.
    let words = ["a.bin", "-f raw or -f qcow2"];
    bench.refuses(&["info", "a.bin"], 1, &words)?;
    bench.refuses(&["map", "a.bin"], 1, &words)?;
    bench.refuses(&["serve", "a.bin", "--nbd", "./s"], 1, &words)?;
    bench.refuses(&["create", "b.bin", "1M"], 1, &["b.bin", "-f raw or -f qcow2"])?;
    assert!(bench.run(&["info", "-f", "qcow2", "a.bin"])?.ok()?.out.contains("format: qcow2"));
    Ok(())
}

#[test]
fn files_that_are_missing_or_no_disks_are_refused() -> Result<()> {
    let bench = Bench::new()?;
    std::fs::create_dir(bench.path("d.raw"))?;
    for verb in ["info", "map"] {
        bench.refuses(&[verb, "none.raw"], 1, &["none.raw", "No such file"])?;
        bench.refuses(&[verb, "d.raw"], 1, &["d.raw", "a directory"])?;
    }
    bench.refuses(&["check", "none.qcow2"], 1, &["none.qcow2", "No such file"])?;
    bench.refuses(&["serve", "--nbd", "./s", "d.raw"], 1, &["d.raw", "a directory"])?;
    Ok(())
}

#[test]
fn a_reader_that_goes_away_is_not_worth_a_word() -> Result<()> {
    let bench = Bench::new()?;
    bench.run(&["create", "a.qcow2", "1M"])?.ok()?;
    for args in [&["info", "a.qcow2"][..], &["map", "--json", "a.qcow2"], &["check", "a.qcow2"]] {
        let (reader, writer) = std::io::pipe()?;
        drop(reader);
        let out = bench.command(args).stdout(writer).stderr(Stdio::piped()).output()?;
        ensure!(out.status.success() && out.stderr.is_empty(), "{args:?}: {out:?}");
    }
    Ok(())
}
