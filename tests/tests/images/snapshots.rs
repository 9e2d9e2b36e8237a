//! Internal snapshots that QEMU made keep what they held, whatever is written to the disk above them.

use crate::harness::{Folder, same};
use crate::tools::{
    content, create, exercise, have_qemu, qemu_img, qemu_io, qemu_writes, snapshot_content,
};
use anyhow::{Context, Result, ensure};
use bedplate_tests::random::Random;
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
