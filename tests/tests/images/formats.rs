//! Every variant of an image that qemu-img can make and Bedplate can work with.

use crate::harness::{Folder, noise};
use crate::tools::{content, create, exercise, have_qemu, poke, qemu_img, qemu_io, qemu_writes};
use anyhow::{Context, Result};
use bedplate_tests::random::Random;
use bedplate_types::Format;
use std::path::Path;

/// No multiple of any cluster size but the smallest.
const SIZE: u64 = (5 << 20) + 512 * 7;

/// Images with each of the options: filled by QEMU, then taken through everything.
fn all_of(test: &str, options: impl IntoIterator<Item = (String, u64)>) -> Result<()> {
    if !have_qemu(test) {
        return Ok(());
    }
    for (seed, (options, size)) in options.into_iter().enumerate() {
        let (folder, mut random) = (Folder::new()?, Random::new(seed as u64 + 17));
        let image = folder.path("image");
        create(&image, &options, size)?;
        qemu_io(&image, Format::Qcow2, &qemu_writes(&mut random, 25, size))?;
        exercise(&[(&image, Format::Qcow2)], &mut random)
            .with_context(|| format!("an image with {options}"))?;
    }
    Ok(())
}

#[test]
fn every_cluster_size_is_read_and_written() -> Result<()> {
    let sizes =
        (9..=21).map(|bits| (format!("cluster_size={}", 1_u32 << bits), SIZE.max(12 << bits)));
    all_of("every_cluster_size_is_read_and_written", sizes)
}

#[test]
fn every_refcount_width_is_read_and_written() -> Result<()> {
    let widths = (0..=6).map(|order| {
        let cluster = if order % 2 == 0 { 512 } else { 65536 };
        (format!("cluster_size={cluster},refcount_bits={}", 1 << order), SIZE)
    });
    all_of("every_refcount_width_is_read_and_written", widths)
}

#[test]
fn both_versions_and_lazy_refcounts_are_read_and_written() -> Result<()> {
    let options = [
        "compat=0.10",
        "compat=0.10,cluster_size=4096",
        "compat=1.1,lazy_refcounts=on",
        "compat=1.1,lazy_refcounts=on,cluster_size=512,refcount_bits=64",
    ];
    all_of(
        "both_versions_and_lazy_refcounts_are_read_and_written",
        options.map(|options| (options.to_owned(), SIZE)),
    )
}

#[test]
fn images_with_subclusters_are_read_and_written() -> Result<()> {
    let options = ["16K", "64K", "128K", "2M", "64K,lazy_refcounts=on", "32K,refcount_bits=1"];
    all_of(
        "images_with_subclusters_are_read_and_written",
        options.map(|o| (format!("extended_l2=on,cluster_size={o}"), SIZE.max(12 << 20))),
    )
}

#[test]
fn preallocated_images_are_read_and_written() -> Result<()> {
    let options =
        ["metadata", "falloc", "full", "metadata,cluster_size=4096", "metadata,compat=0.10"];
    all_of(
        "preallocated_images_are_read_and_written",
        options.map(|mode| (format!("preallocation={mode}"), SIZE)),
    )
}

#[test]
fn disks_smaller_than_a_cluster_are_read_and_written() -> Result<()> {
    let sizes = [512, 1024, 4096, 65536 + 512];
    all_of(
        "disks_smaller_than_a_cluster_are_read_and_written",
        sizes.map(|size| ("cluster_size=65536".to_owned(), size)),
    )
}

#[test]
fn discarded_and_zeroed_clusters_of_qemu_are_read_and_written() -> Result<()> {
    if !have_qemu("discarded_and_zeroed_clusters_of_qemu_are_read_and_written") {
        return Ok(());
    }
    for options in ["compat=1.1,cluster_size=65536", "compat=0.10,cluster_size=4096"] {
        let (folder, mut random) = (Folder::new()?, Random::new(5));
        let image = folder.path("image");
        create(&image, options, SIZE)?;
        let commands = [
            "write -P 1 0 3M",
            "discard 64k 1M",
            "write -z 1M 512k",
            "write -z -u 2M 512k",
            "write -z 4M 64k",
            "discard 4M 512k",
        ];
        qemu_io(&image, Format::Qcow2, &commands)?;
        exercise(&[(&image, Format::Qcow2)], &mut random).context(options)?;
    }
    Ok(())
}

/// A raw file that compresses in parts: patterns, zeroes and noise.
fn partly_compressible(path: &Path, random: &mut Random) -> Result<()> {
    std::fs::File::create(path)?.set_len(SIZE)?;
    qemu_io(path, Format::Raw, &qemu_writes(random, 25, SIZE))?;
    for _ in 0..6 {
        let at = random.below(SIZE - 100_000);
        poke(path, at, &noise(random, 100_000))?;
    }
    Ok(())
}

#[test]
fn compressed_clusters_of_both_kinds_are_read_and_overwritten() -> Result<()> {
    if !have_qemu("compressed_clusters_of_both_kinds_are_read_and_overwritten") {
        return Ok(());
    }
    for (seed, options) in [
        "compression_type=zlib",
        "compression_type=zstd",
        "compression_type=zlib,cluster_size=512",
        "compression_type=zstd,cluster_size=4096",
        "compression_type=zlib,cluster_size=2M",
        "compression_type=zstd,cluster_size=2M,refcount_bits=64",
        "compat=0.10",
    ]
    .iter()
    .enumerate()
    {
        let (folder, mut random) = (Folder::new()?, Random::new(seed as u64 + 90));
        let (image, raw) = (folder.path("image"), folder.path("raw"));
        partly_compressible(&raw, &mut random)?;
        qemu_img(&["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", options], &[&raw, &image])?;
        exercise(&[(&image, Format::Qcow2)], &mut random).context(*options)?;
    }
    Ok(())
}

/// Writing zeroes where a compressed cluster lies at an odd address was once skipped elsewhere: bit 0 of its entry, a part of
/// the address, was taken for the zero flag.
#[test]
fn zeroes_are_written_over_compressed_clusters_at_odd_addresses() -> Result<()> {
    use crate::harness::{open, run};
    use bedplate_storage::ZeroMode;
    use bedplate_types::{ByteLen, GuestOffset};
    if !have_qemu("zeroes_are_written_over_compressed_clusters_at_odd_addresses") {
        return Ok(());
    }
    let folder = Folder::new()?;
    let (image, raw) = (folder.path("image"), folder.path("raw"));
    let bytes: Vec<u8> = (0..1_u32 << 20).flat_map(|n| (n / 7).to_le_bytes()).collect();
    std::fs::write(&raw, &bytes)?;
    qemu_img(&["convert", "-c", "-f", "raw", "-O", "qcow2"], &[&raw, &image])?;
    run(async || {
        let disk = open(&image).await?;
        let mode = ZeroMode { unmap: false, fast_only: false };
        disk.write_zeroes(GuestOffset::ZERO, ByteLen::new(1 << 21), mode).await?;
        Ok(disk.close().await?)
    })?;
    crate::tools::assert_clean(&image)?;
    let mut expected = bytes;
    expected[..1 << 21].fill(0);
    crate::harness::same(&expected, &content(&image, Format::Qcow2)?)
}

/// Images that management tools had grown carry a refcount table larger than their present size needs; a reader elsewhere
/// refused them.
#[test]
fn a_refcount_table_larger_than_needed_is_no_fault() -> Result<()> {
    if !have_qemu("a_refcount_table_larger_than_needed_is_no_fault") {
        return Ok(());
    }
    let (folder, mut random) = (Folder::new()?, Random::new(3));
    let image = folder.path("image");
    create(&image, "cluster_size=4096", SIZE)?;
    qemu_img(
        &["resize", "-q", "-f", "qcow2", "--preallocation=metadata"],
        &[&image, Path::new("1G")],
    )?;
    qemu_img(
        &["resize", "-q", "-f", "qcow2", "--shrink"],
        &[&image, Path::new(&SIZE.to_string())],
    )?;
    exercise(&[(&image, Format::Qcow2)], &mut random)
}
