//! Backing images: raw and qcow2, shorter and longer than what lies on them, several deep.

use crate::harness::Folder;
use crate::tools::{create, create_over, exercise, have_qemu, qemu_io, qemu_writes};
use anyhow::{Context, Result};
use bedplate_tests::random::Random;
use bedplate_types::Format;
use std::path::Path;

const SIZE: u64 = (4 << 20) + 512 * 3;

fn base(path: &Path, format: Format, size: u64, random: &mut Random) -> Result<()> {
    match format {
        Format::Raw => std::fs::File::create(path)?.set_len(size)?,
        Format::Qcow2 => create(path, "cluster_size=4096", size)?,
    }
    qemu_io(path, format, &qemu_writes(random, 30, size / 512 * 512))
}

#[test]
fn backing_images_of_any_length_show_through() -> Result<()> {
    if !have_qemu("backing_images_of_any_length_show_through") {
        return Ok(());
    }
    let cases = [
        (Format::Raw, SIZE, "cluster_size=65536"),
        (Format::Raw, SIZE / 2 + 512 * 5, "cluster_size=65536"),
        // Not even whole sectors.
        (Format::Raw, 1_000_001, "cluster_size=4096"),
        (Format::Raw, SIZE + 1_000_000, "cluster_size=512"),
        (Format::Qcow2, SIZE / 2 + 512 * 7, "cluster_size=65536"),
        (Format::Qcow2, SIZE + (3 << 20), "cluster_size=65536,lazy_refcounts=on"),
        (Format::Qcow2, SIZE / 3, "cluster_size=1M"),
        (Format::Qcow2, SIZE, "compat=0.10"),
    ];
    for (seed, (format, length, options)) in cases.into_iter().enumerate() {
        let (folder, mut random) = (Folder::new()?, Random::new(seed as u64 + 40));
        let (below, image) = (folder.path("base"), folder.path("image"));
        base(&below, format, length, &mut random)?;
        create_over(&image, options, SIZE, (&below, format))?;
        exercise(&[(&image, Format::Qcow2), (&below, format)], &mut random)
            .with_context(|| format!("{options} over a {format:?} image of {length} bytes"))?;
    }
    Ok(())
}

#[test]
fn a_chain_of_four_with_different_clusters_shows_through() -> Result<()> {
    if !have_qemu("a_chain_of_four_with_different_clusters_shows_through") {
        return Ok(());
    }
    for raw in [true, false] {
        let (folder, mut random) = (Folder::new()?, Random::new(60 + u64::from(raw)));
        let format = if raw { Format::Raw } else { Format::Qcow2 };
        let paths = ["image", "upper", "lower", "base"].map(|name| folder.path(name));
        let [image, upper, lower, below] = paths.each_ref().map(|path| path.as_path());
        base(below, format, SIZE / 2 + 512, &mut random)?;
        // The one in the middle is longer than both of its neighbours.
        create_over(lower, "cluster_size=512", SIZE / 4 * 3 / 512 * 512, (below, format))?;
        qemu_io(lower, Format::Qcow2, &qemu_writes(&mut random, 10, SIZE / 2))?;
        create_over(upper, "cluster_size=1M", SIZE * 2, (lower, Format::Qcow2))?;
        qemu_io(upper, Format::Qcow2, &qemu_writes(&mut random, 4, SIZE / 2))?;
        create_over(image, "cluster_size=65536", SIZE, (upper, Format::Qcow2))?;
        qemu_io(image, Format::Qcow2, &qemu_writes(&mut random, 4, SIZE / 2))?;
        let chain = [
            (image, Format::Qcow2),
            (upper, Format::Qcow2),
            (lower, Format::Qcow2),
            (below, format),
        ];
        exercise(&chain, &mut random)?;
    }
    Ok(())
}
