//! Internal snapshots that QEMU made keep what they held, whatever is written to the disk above them; and those that
//! Bedplate makes, applies and deletes are as good to QEMU as its own.

use crate::harness::{Folder, same};
use crate::tools::{
    assert_clean, content, create, exercise, have_qemu, peek, poke, qemu_img, qemu_io, qemu_writes,
    snapshot_content,
};
use anyhow::{Context, Result, ensure};
use bedplate_tests::random::Random;
use bedplate_tests::{host, paths};
use bedplate_types::Format;

const SIZE: u64 = (4 << 20) + 512;

fn keep(options: &str, random: &mut Random) -> Result<()> {
    let folder = Folder::new()?;
    let image = folder.path("image");
    create(&image, options, SIZE)?;
    let mut kept = Vec::new();
    for name in ["first", "second", "third"] {
        qemu_io(&image, Format::Qcow2, &qemu_writes(random, 20, SIZE))?;
        qemu_img(&["snapshot", "-c", name], &[&image])?;
        kept.push((name, content(&image, Format::Qcow2)?));
    }
    // Some clusters of the first one are now in nothing but that snapshot.
    qemu_img(&["snapshot", "-d", "second"], &[&image])?;
    kept.remove(1);
    exercise(&[(&image, Format::Qcow2)], random)?;
    for (name, expected) in &kept {
        same(expected, &snapshot_content(&image, name)?)
            .with_context(|| format!("the snapshot {name:?} has changed"))?;
    }
    // QEMU goes back to a snapshot and takes it away: all refcounts must have been right.
    qemu_img(&["snapshot", "-a", "first"], &[&image])?;
    same(&kept[0].1, &content(&image, Format::Qcow2)?)?;
    exercise(&[(&image, Format::Qcow2)], random)?;
    for (name, _) in &kept {
        qemu_img(&["snapshot", "-d", name], &[&image])?;
    }
    exercise(&[(&image, Format::Qcow2)], random)
}

#[test]
fn snapshots_keep_what_they_held() -> Result<()> {
    if !have_qemu("snapshots_keep_what_they_held") {
        return Ok(());
    }
    let options = [
        "cluster_size=65536",
        "cluster_size=512",
        "cluster_size=4096,refcount_bits=4",
        "cluster_size=4096,refcount_bits=64,lazy_refcounts=on",
        "compat=0.10",
    ];
    for (seed, options) in options.into_iter().enumerate() {
        keep(options, &mut Random::new(seed as u64 + 200)).with_context(|| options.to_owned())?;
    }
    Ok(())
}

#[test]
fn snapshots_of_compressed_clusters_keep_what_they_held() -> Result<()> {
    if !have_qemu("snapshots_of_compressed_clusters_keep_what_they_held") {
        return Ok(());
    }
    let (folder, mut random) = (Folder::new()?, Random::new(220));
    let (image, raw) = (folder.path("image"), folder.path("raw"));
    std::fs::File::create(&raw)?.set_len(SIZE)?;
    qemu_io(&raw, Format::Raw, &qemu_writes(&mut random, 40, SIZE))?;
    qemu_img(&["convert", "-c", "-f", "raw", "-O", "qcow2"], &[&raw, &image])?;
    qemu_img(&["snapshot", "-c", "kept"], &[&image])?;
    exercise(&[(&image, Format::Qcow2)], &mut random)?;
    ensure!(snapshot_content(&image, "kept")? == std::fs::read(&raw)?, "the snapshot has changed");
    Ok(())
}

fn bedplate(words: &[&str], image: &std::path::Path) -> Result<String> {
    host::run(host::program(&paths::bedplate()?).args(words).arg(image))
}

/// Snapshots that Bedplate makes, applies and deletes, between writes of QEMU's, with QEMU as the judge.
#[test]
fn snapshots_of_bedplate_and_of_qemu_live_side_by_side() -> Result<()> {
    if !have_qemu("snapshots_of_bedplate_and_of_qemu_live_side_by_side") {
        return Ok(());
    }
    let options = [
        "cluster_size=65536",
        "cluster_size=512,refcount_bits=8",
        "cluster_size=4096,refcount_bits=64,lazy_refcounts=on",
        "compat=0.10",
    ];
    for (seed, options) in options.into_iter().enumerate() {
        let mut random = Random::new(seed as u64 + 240);
        let folder = Folder::new()?;
        let image = folder.path("image.qcow2");
        create(&image, options, SIZE)?;
        let mut kept = Vec::new();
        for name in ["a", "b", "c", "d"] {
            qemu_io(&image, Format::Qcow2, &qemu_writes(&mut random, 20, SIZE))?;
            match name {
                "a" | "c" => drop(bedplate(&["snapshot", "-c", name], &image)?),
                _ => qemu_img(&["snapshot", "-c", name], &[&image])?,
            }
            assert_clean(&image)?;
            kept.push((name, content(&image, Format::Qcow2)?));
        }
        let all_kept = |kept: &[(&str, Vec<u8>)]| -> Result<()> {
            for (name, expected) in kept {
                same(expected, &snapshot_content(&image, name)?)
                    .with_context(|| name.to_string())?;
            }
            Ok(())
        };
        for name in ["a", "b"] {
            bedplate(&["snapshot", "-a", name], &image)?;
            assert_clean(&image)?;
            let expected = kept.iter().find(|k| k.0 == name).context("kept")?;
            same(&expected.1, &content(&image, Format::Qcow2)?)?;
            qemu_io(&image, Format::Qcow2, &qemu_writes(&mut random, 20, SIZE))?;
            assert_clean(&image)?;
        }
        all_kept(&kept)?;
        bedplate(&["snapshot", "-d", "b"], &image)?;
        assert_clean(&image)?;
        kept.remove(1);
        qemu_img(&["snapshot", "-d", "a"], &[&image])?;
        assert_clean(&image)?;
        kept.remove(0);
        exercise(&[(&image, Format::Qcow2)], &mut random)?;
        all_kept(&kept).with_context(|| options.to_owned())?;
        bedplate(&["snapshot", "-d", "c"], &image)?;
        bedplate(&["snapshot", "-d", "d"], &image)?;
        assert_clean(&image)?;
        ensure!(bedplate(&["snapshot"], &image)?.is_empty(), "a snapshot is left");
    }
    Ok(())
}

#[test]
fn entries_of_other_snapshots_are_kept_byte_for_byte() -> Result<()> {
    if !have_qemu("entries_of_other_snapshots_are_kept_byte_for_byte") {
        return Ok(());
    }
    let folder = Folder::new()?;
    let image = folder.path("image.qcow2");
    create(&image, "cluster_size=65536", SIZE)?;
    qemu_io(&image, Format::Qcow2, &["write -P 5 0 1M"])?;
    qemu_img(&["snapshot", "-c", "vm"], &[&image])?;
    let table =
        |image: &std::path::Path| -> Result<u64> { Ok(u64::from_be_bytes(peek(image, 64)?)) };
    // As a program of the future would write it: VM state of more than 32 bits can say, more extra data than is known.
    let at = table(&image)?;
    let mut entry: Vec<u8> = peek::<40>(&image, at)?.to_vec();
    entry[24..32].copy_from_slice(&3_600_000_000_007_u64.to_be_bytes());
    entry[36..40].copy_from_slice(&37_u32.to_be_bytes());
    entry.extend((5_u64 << 33).to_be_bytes());
    entry.extend(SIZE.to_be_bytes());
    entry.extend(77_u64.to_be_bytes());
    entry.extend(b"what is this?");
    entry.extend(b"1vm");
    entry.resize(entry.len().next_multiple_of(8), 0);
    poke(&image, at, &entry)?;
    bedplate(&["snapshot", "-c", "second"], &image)?;
    bedplate(&["snapshot", "-c", "third"], &image)?;
    bedplate(&["snapshot", "-d", "second"], &image)?;
    bedplate(&["snapshot", "-a", "vm"], &image)?;
    assert_clean(&image)?;
    let at = table(&image)?;
    let kept: [u8; 80] = peek(&image, at)?;
    ensure!(kept[..] == entry[..], "the entry has changed: {kept:?}");
    let list = bedplate(&["snapshot", "-l"], &image)?;
    let lines: Vec<&str> = list.lines().collect();
    ensure!(lines.len() == 4, "{list}");
    ensure!(
        lines[2].contains("40 GiB") && lines[2].ends_with("0001:00:00.000         77"),
        "{list}"
    );
    let theirs = host::run(host::tool("qemu-img").args(["snapshot", "-l"]).arg(&image))?;
    // Times of day are in UTC here and local there; all else is as QEMU prints it.
    let words = |line: &str| line.split_whitespace().take(4).map(str::to_owned).collect::<Vec<_>>();
    for (ours, theirs) in lines.iter().zip(theirs.lines()).skip(2) {
        ensure!(words(ours) == words(theirs), "{ours}\n{theirs}");
    }
    Ok(())
}
