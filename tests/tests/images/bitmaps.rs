//! Persistent bitmaps of QEMU's making go on recording while Bedplate writes, and QEMU can go on with them.

use crate::harness::{Folder, churn, open, read, run, write};
use crate::tools::{
    assert_clean, assert_not_corrupt, content, create, have_qemu, peek, qemu_img, qemu_io,
};
use anyhow::{Context, Result, bail, ensure};
use bedplate_disk::Plan;
use bedplate_storage::SegmentBits;
use bedplate_tests::random::Random;
use bedplate_tests::{host, skip};
use bedplate_types::{ByteLen, Format, GuestOffset};
use std::path::Path;

const SIZE: u64 = (8 << 20) + 512;

fn bitmap(words: &[&str], image: &Path, name: &str) -> Result<()> {
    let mut tool = host::tool("qemu-img");
    host::run(tool.arg("bitmap").args(words).args(["-f", "qcow2"]).arg(image).arg(name)).map(drop)
}

/// Runs that QEMU says are set, read over NBD.
fn dirty(image: &Path, name: &str) -> Result<Vec<(u64, u64)>> {
    let exported = format!("qemu-nbd -r -f qcow2 -B {name} '{}'", image.display());
    let context = format!("qemu:dirty-bitmap:{name}");
    let mut tool = host::tool("nbdinfo");
    tool.args([&format!("--map={context}"), "--json", "--"])
        .args(["[", "qemu-nbd", "-r", "-f", "qcow2", "-B", name])
        .arg(image)
        .arg("]");
    let text = host::run(&mut tool).context(exported)?;
    let map: serde_json::Value = serde_json::from_str(&text)?;
    let number = |v: &serde_json::Value| v.as_u64().unwrap_or(0);
    let list = map.as_array().context("a list")?;
    Ok(list
        .iter()
        .filter(|e| e["type"] == 1)
        .map(|e| (number(&e["offset"]), number(&e["length"])))
        .collect())
}

fn covers(runs: &[(u64, u64)], at: usize) -> bool {
    runs.iter().any(|(start, len)| (*start..start + len).contains(&(at as u64)))
}

#[test]
fn qemu_goes_on_with_bitmaps_that_bedplate_has_kept() -> Result<()> {
    let test = "qemu_goes_on_with_bitmaps_that_bedplate_has_kept";
    if !have_qemu(test) || ["nbdinfo", "qemu-nbd"].iter().any(|t| host::which(t).is_none()) {
        skip(test, "qemu-img, qemu-nbd or nbdinfo is not installed");
        return Ok(());
    }
    for (seed, (options, granularity)) in [
        ("cluster_size=65536", "65536"),
        ("cluster_size=512", "4096"),
        ("cluster_size=4096,lazy_refcounts=on", "512"),
        ("cluster_size=65536", "2147483648"),
    ]
    .into_iter()
    .enumerate()
    {
        let (folder, mut random) = (Folder::new()?, Random::new(seed as u64 + 300));
        let image = folder.path("image");
        create(&image, options, SIZE)?;
        qemu_io(&image, Format::Qcow2, &["write -P 5 1M 2M"])?;
        bitmap(&["--add", "-g", granularity], &image, "kept")?;
        bitmap(&["--add", "--disable"], &image, "still")?;
        let base = content(&image, Format::Qcow2)?;
        let mut model = base.clone();
        for rounds in [3, 2] {
            run(async || {
                let disk = open(&image).await?;
                churn(&disk, &mut model, &mut random, rounds).await?;
                Ok(disk.close().await?)
            })?;
            assert_clean(&image)?;
            let runs = dirty(&image, "kept")?;
            let lost = model
                .iter()
                .zip(&base)
                .enumerate()
                .find(|(at, (a, b))| a != b && !covers(&runs, *at));
            ensure!(
                lost.is_none(),
                "a change at {:?} was not recorded: {runs:?}",
                lost.map(|l| l.0)
            );
            ensure!(dirty(&image, "still")?.is_empty(), "a bitmap that was stopped has recorded");
            // What QEMU writes is recorded too.
            qemu_io(&image, Format::Qcow2, &["write -P 7 7M 64k"])?;
            model[7 << 20..(7 << 20) + (64 << 10)].fill(7);
            ensure!(covers(&dirty(&image, "kept")?, 7 << 20));
        }
        bitmap(&["--clear"], &image, "kept")?;
        run(async || {
            let disk = open(&image).await?;
            write(&disk, 3 << 20, &[1; 512]).await?;
            Ok(disk.close().await?)
        })?;
        let grain: u64 = granularity.parse()?;
        let start = (3 << 20) / grain * grain;
        ensure!(dirty(&image, "kept")? == [(start, grain.min(SIZE - start))]);
        bitmap(&["--remove"], &image, "kept")?;
        assert_clean(&image).with_context(|| options.to_owned())?;
    }
    Ok(())
}

#[test]
fn writes_that_go_straight_to_the_file_are_recorded() -> Result<()> {
    let test = "writes_that_go_straight_to_the_file_are_recorded";
    if !have_qemu(test) || ["nbdinfo", "qemu-nbd"].iter().any(|t| host::which(t).is_none()) {
        skip(test, "qemu-img, qemu-nbd or nbdinfo is not installed");
        return Ok(());
    }
    for options in ["cluster_size=65536", "cluster_size=65536,extended_l2=on"] {
        let folder = Folder::new()?;
        let image = folder.path("image");
        create(&image, options, SIZE)?;
        qemu_io(&image, Format::Qcow2, &["write -P 5 0 4M"])?;
        bitmap(&["--add", "-g", "4096"], &image, "kept")?;
        run(async || {
            let disk = open(&image).await?;
            // The first write marks the bitmaps and loads what is needed.
            write(&disk, 2 << 20, &[1; 4096]).await?;
            let (at, len) = (GuestOffset::new((2 << 20) + 8192), ByteLen::new(4096));
            match disk.plan(true, at, len, SegmentBits::default()) {
                Plan::Direct { pin, .. } => disk.finish(pin),
                _ => bail!("a write to mapped space is not planned as direct: {options}"),
            }
            Ok(disk.close().await?)
        })?;
        let runs = dirty(&image, "kept")?;
        ensure!(covers(&runs, (2 << 20) + 8192), "{options}: recorded were {runs:?}");
    }
    Ok(())
}

#[test]
fn reading_leaves_bitmaps_valid_and_a_death_after_a_write_leaves_them_in_use() -> Result<()> {
    if !have_qemu("reading_leaves_bitmaps_valid_and_a_death_after_a_write_leaves_them_in_use") {
        return Ok(());
    }
    let folder = Folder::new()?;
    let image = folder.path("image");
    create(&image, "compat=1.1", SIZE)?;
    bitmap(&["--add"], &image, "nightly")?;
    let in_use = || -> Result<bool> {
        let text =
            host::run(host::tool("qemu-img").args(["info", "-U", "--output=json"]).arg(&image))?;
        let info: serde_json::Value = serde_json::from_str(&text)?;
        let flags = &info["format-specific"]["data"]["bitmaps"][0]["flags"];
        ensure!(flags.is_array(), "the bitmap is gone: {text}");
        Ok(flags.as_array().is_some_and(|all| all.iter().any(|f| f == "in-use")))
    };
    run(async || {
        let disk = open(&image).await?;
        read(&disk, 0, 4096).await?;
        disk.flush().await?;
        Ok(())
    })?;
    ensure!(!in_use()?, "only opened and read, not even closed");
    run(async || {
        let disk = open(&image).await?;
        write(&disk, 0, &[1; 4096]).await?;
        disk.flush().await?;
        Ok(())
    })?;
    ensure!(in_use()?, "written and not closed");
    assert_not_corrupt(&image)?;
    let before: [u8; 4096] = peek(&image, 0)?;
    run(async || {
        let disk = open(&image).await?;
        write(&disk, 8192, &[2; 4096]).await?;
        Ok(disk.close().await?)
    })?;
    ensure!(in_use()?, "what can't be trusted stays so");
    ensure!(peek::<4096>(&image, 0)? == before, "the header was changed");
    assert_not_corrupt(&image)?;
    qemu_img(&["check", "-q", "-f", "qcow2", "-r", "leaks"], &[&image])?;
    bitmap(&["--remove"], &image, "nightly")?;
    assert_clean(&image)
}
