//! A second engine that is not QEMU's as a witness: the crate `imago` reads and goes on with what Bedplate wrote, and Bedplate
//! with what that crate made and wrote; QEMU's check and Bedplate's own stay clean.
//!
//! It knows neither subclusters, zstd nor encryption, and refuses images that are marked dirty.

use crate::harness::{Folder, churn, memory, noise, open_chain, run, same, verify};
use crate::tools::{
    assert_clean, content, create, create_over, have_qemu, peek, qemu_io, qemu_writes,
};
use anyhow::{Context, Result, ensure};
use bedplate_qcow2::NewSnapshot;
use bedplate_qcow2::check::{CheckOptions, check};
use bedplate_storage::{FileStorage, OpenOptions};
use bedplate_tests::random::Random;
use bedplate_types::{Format, GuestOffset};
use imago::file::File;
use imago::format::PreallocateMode;
use imago::qcow2::Qcow2;
use imago::storage::{PreallocateMode as StoragePreallocation, StorageCreateOptions};
use imago::{
    FormatAccess, FormatCreateBuilder, FormatDriverBuilder, PermissiveImplicitOpenGate, Storage,
    StorageOpenOptions,
};
use std::path::Path;
use std::time::Duration;

const SIZE: u64 = (3 << 20) + 512 * 5;

/// Opens an image, and what it names, with the other engine.
fn theirs(image: &Path, write: bool) -> Result<FormatAccess<File>> {
    let builder = Qcow2::<File>::builder_path(image)
        .storage_open_options(StorageOpenOptions::new())
        .write(write);
    Ok(FormatAccess::new(builder.open(PermissiveImplicitOpenGate::default())?))
}

/// All that the other engine reads from an image.
fn read_by_them(image: &Path) -> Result<Vec<u8>> {
    let disk = theirs(image, false)?;
    let mut bytes = vec![0; disk.size() as usize];
    // Not in one piece, nor at places that any cluster begins at.
    for (index, part) in bytes.chunks_mut(99_999).enumerate() {
        disk.read(part, index as u64 * 99_999)?;
    }
    Ok(bytes)
}

/// Random changes by the other engine, taken over into the model.
fn written_by_them(
    image: &Path,
    model: &mut [u8],
    random: &mut Random,
    times: usize,
) -> Result<()> {
    let mut disk = theirs(image, true)?;
    // It zeroes nothing in version 2, whose entries have no flag for that.
    let zeroes = peek::<8>(image, 0)?[7] > 2;
    for _ in 0..times {
        let longest = if random.below(4) == 0 { 300_000 } else { 20_000 };
        let len = 1 + random.below(longest);
        let at = random.below(model.len() as u64 - len);
        let part = &mut model[at as usize..(at + len) as usize];
        match random.below(8) {
            0 if zeroes => {
                disk.write_zeroes(at, len)?;
                part.fill(0);
            }
            1 if zeroes => {
                disk.discard_to_zero(at, len)?;
                part.fill(0);
            }
            _ => {
                part.copy_from_slice(&noise(random, part.len()));
                disk.write(&*part, at)?;
            }
        }
    }
    Ok(disk.flush()?)
}

/// Both checks find nothing.
fn clean(image: &Path) -> Result<()> {
    let report = run(async || {
        let storage = FileStorage::open(&OpenOptions::new(image).read_only(true))?;
        Ok(check(&storage, CheckOptions::default()).await?)
    })?;
    ensure!(report.is_clean(), "{:#?}", report.findings);
    assert_clean(image)
}

/// One after the other goes on where the one before ended, twice.
fn in_turns(chain: &[(&Path, Format)], model: &mut [u8], random: &mut Random) -> Result<()> {
    let image = chain.first().context("an image")?.0;
    for round in 0..2 {
        run(async || {
            let disk = open_chain(chain, false).await?;
            verify(&disk, model).await.context("what they wrote, read by us")?;
            churn(&disk, model, random, 8).await?;
            Ok(disk.close().await?)
        })
        .with_context(|| format!("round {round}"))?;
        clean(image).with_context(|| format!("after our round {round}"))?;
        same(model, &read_by_them(image)?).context("what we wrote, read by them")?;
        written_by_them(image, model, random, 30)?;
        clean(image).with_context(|| format!("after their round {round}"))?;
        same(model, &read_by_them(image)?).context("what they wrote, read by them")?;
    }
    same(model, &content(image, Format::Qcow2)?).context("read by QEMU at the end")
}

#[test]
fn images_of_every_kind_are_written_in_turns() -> Result<()> {
    if !have_qemu("images_of_every_kind_are_written_in_turns") {
        return Ok(());
    }
    let options = [
        "cluster_size=512",
        "cluster_size=4096,refcount_bits=1",
        "cluster_size=65536",
        "cluster_size=65536,refcount_bits=64",
        "cluster_size=65536,preallocation=metadata",
        "cluster_size=2M,refcount_bits=8",
        "compat=0.10",
        "compat=0.10,cluster_size=512",
    ];
    for (seed, options) in options.into_iter().enumerate() {
        let (folder, mut random) = (Folder::new()?, Random::new(1_100 + seed as u64));
        let image = folder.path("image");
        create(&image, options, SIZE)?;
        in_turns(&[(&image, Format::Qcow2)], &mut vec![0; SIZE as usize], &mut random)
            .context(options)?;
    }
    Ok(())
}

#[test]
fn clusters_that_bedplate_has_compressed_are_read_and_overwritten_by_others() -> Result<()> {
    if !have_qemu("clusters_that_bedplate_has_compressed_are_read_and_overwritten_by_others") {
        return Ok(());
    }
    for (seed, bits) in [9, 12, 16, 21].into_iter().enumerate() {
        let (folder, mut random) = (Folder::new()?, Random::new(1_200 + seed as u64));
        let image = folder.path("image");
        create(&image, &format!("cluster_size={}", 1 << bits), 4 << 20)?;
        let mut model = vec![0; 4 << 20];
        for (index, sector) in model.chunks_mut(512).enumerate() {
            // A part of it can't be made smaller.
            match random.below(5) {
                0 => sector.copy_from_slice(&noise(&mut random, 512)),
                _ => sector.fill((index / 7) as u8),
            }
        }
        run(async || {
            let disk = open_chain(&[(&image, Format::Qcow2)], false).await?;
            for at in [0, 2 << 20] {
                let part = memory(&model[at..at + (2 << 20)])?;
                disk.write_compressed(GuestOffset::new(at as u64), part).await?;
            }
            Ok(disk.close().await?)
        })?;
        clean(&image)?;
        same(&model, &read_by_them(&image)?).with_context(|| format!("clusters of 2^{bits}"))?;
        in_turns(&[(&image, Format::Qcow2)], &mut model, &mut random)
            .with_context(|| format!("clusters of 2^{bits}"))?;
    }
    Ok(())
}

#[test]
fn overlays_and_data_files_are_written_in_turns() -> Result<()> {
    if !have_qemu("overlays_and_data_files_are_written_in_turns") {
        return Ok(());
    }
    let (folder, mut random) = (Folder::new()?, Random::new(1_300));
    for (name, length, options) in [
        ("longer", SIZE + 70_000, "cluster_size=4096"),
        ("shorter", SIZE / 2 + 512, "cluster_size=65536"),
    ] {
        let (base, image) = (folder.path(name), folder.path("image"));
        create(&base, "cluster_size=16384", length / 512 * 512)?;
        qemu_io(&base, Format::Qcow2, &qemu_writes(&mut random, 40, length / 512 * 512))?;
        create_over(&image, options, SIZE, (&base, Format::Qcow2))?;
        let mut model = content(&image, Format::Qcow2)?;
        let chain = [(image.as_path(), Format::Qcow2), (base.as_path(), Format::Qcow2)];
        in_turns(&chain, &mut model, &mut random).context(name)?;
    }
    for raw in ["off", "on"] {
        let (image, data) = (folder.path("image"), folder.path("data"));
        let options = format!("data_file={},data_file_raw={raw}", data.display());
        create(&image, &options, SIZE)?;
        let mut model = vec![0; SIZE as usize];
        in_turns(&[(&image, Format::Qcow2)], &mut model, &mut random)
            .with_context(|| format!("a data file, raw {raw}"))?;
    }
    Ok(())
}

#[test]
fn snapshots_that_bedplate_has_made_are_left_alone_by_others() -> Result<()> {
    if !have_qemu("snapshots_that_bedplate_has_made_are_left_alone_by_others") {
        return Ok(());
    }
    let (folder, mut random) = (Folder::new()?, Random::new(1_400));
    let image = folder.path("image");
    create(&image, "cluster_size=4096", SIZE)?;
    let mut model = vec![0; SIZE as usize];
    let mut kept = Vec::new();
    for name in ["one", "two"] {
        in_turns(&[(&image, Format::Qcow2)], &mut model, &mut random)?;
        run(async || {
            let disk = open_chain(&[(&image, Format::Qcow2)], false).await?;
            let qcow2 = disk.qcow2().context("a qcow2 image")?;
            let date = Duration::from_secs(1_700_000_000);
            qcow2.create_snapshot(&NewSnapshot { name: name.as_bytes(), date }).await?;
            Ok(disk.close().await?)
        })?;
        kept.push((name, model.clone()));
    }
    in_turns(&[(&image, Format::Qcow2)], &mut model, &mut random)?;
    for (name, held) in kept {
        same(&held, &crate::tools::snapshot_content(&image, name)?).context(name)?;
    }
    Ok(())
}

/// Makes an image with the other engine.
fn make(image: &Path, cluster: usize, width: usize, fill: PreallocateMode) -> Result<()> {
    let options = StorageOpenOptions::new().filename(image).write(true);
    let create = StorageCreateOptions::new()
        .filename(image)
        .size(0)
        .preallocate(StoragePreallocation::None)
        .modify_open_opts(|_| options);
    let file = File::create_open(create)?;
    let builder = Qcow2::<File>::create_builder(file)
        .size(SIZE)
        .cluster_size(cluster)
        .refcount_width(width)
        .preallocate(fill);
    Ok(builder.create()?)
}

#[test]
fn bedplate_goes_on_with_images_that_others_have_made() -> Result<()> {
    if !have_qemu("bedplate_goes_on_with_images_that_others_have_made") {
        return Ok(());
    }
    let kinds = [
        (512, 16, PreallocateMode::None),
        (4096, 1, PreallocateMode::None),
        (65536, 2, PreallocateMode::FormatAllocate),
        (65536, 4, PreallocateMode::FullAllocate),
        (65536, 32, PreallocateMode::WriteData),
        (2 << 20, 64, PreallocateMode::None),
    ];
    for (seed, (cluster, width, fill)) in kinds.into_iter().enumerate() {
        let (folder, mut random) = (Folder::new()?, Random::new(1_500 + seed as u64));
        let image = folder.path("image");
        let kind = format!("clusters of {cluster}, counts of {width} bits, {fill:?}");
        make(&image, cluster, width, fill).context(kind.clone())?;
        clean(&image).with_context(|| format!("as they made it: {kind}"))?;
        let mut model = vec![0; SIZE as usize];
        written_by_them(&image, &mut model, &mut random, 30)?;
        in_turns(&[(&image, Format::Qcow2)], &mut model, &mut random).context(kind)?;
    }
    Ok(())
}
