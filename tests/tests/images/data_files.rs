//! Images that keep their guest data in an external data file: both engines read what the other wrote there, QEMU's check stays
//! clean, and a file that shall read as the disk does so.

use crate::harness::{Folder, churn, open, open_read_only, read, run, same, verify, write};
use crate::tools::{
    assert_clean, content, create, create_over, exercise, have_qemu, peek, poke, qemu_io,
    qemu_writes,
};
use anyhow::{Context, Result, ensure};
use bedplate_qcow2::{OpenOptions, Qcow2};
use bedplate_storage::{FileStorage, OpenOptions as FileOptions};
use bedplate_tests::random::Random;
use bedplate_types::{ByteLen, ErrorKind, Format, Preallocation};
use std::path::Path;

const SIZE: u64 = (4 << 20) + 512;

fn with_data(data: &Path, options: &str) -> String {
    format!("data_file={},{options}", data.display())
}

#[test]
fn data_files_are_read_and_written() -> Result<()> {
    if !have_qemu("data_files_are_read_and_written") {
        return Ok(());
    }
    let options = [
        "cluster_size=65536",
        "cluster_size=512,refcount_bits=1",
        "cluster_size=2M",
        "cluster_size=4096,lazy_refcounts=on",
        "cluster_size=65536,extended_l2=on",
        "cluster_size=65536,preallocation=metadata",
        "data_file_raw=on,cluster_size=65536",
        "data_file_raw=on,cluster_size=4096",
        "data_file_raw=on,cluster_size=65536,extended_l2=on",
    ];
    for (seed, options) in options.into_iter().enumerate() {
        let (folder, mut random) = (Folder::new()?, Random::new(900 + seed as u64));
        let (image, data) = (folder.path("image"), folder.path("data"));
        create(&image, &with_data(&data, options), SIZE)?;
        qemu_io(&image, Format::Qcow2, &qemu_writes(&mut random, 30, SIZE))?;
        let before = peek::<8>(&image, 88)?;
        exercise(&[(&image, Format::Qcow2)], &mut random).context(options)?;
        ensure!(peek::<8>(&image, 88)? == before, "{options}: the autoclear bits changed");
        let raw = std::fs::read(&data)?;
        ensure!(raw.len() as u64 >= SIZE, "{options}: the data file became shorter");
        if options.contains("raw") {
            // QEMU makes it some bytes longer than the disk.
            same(&content(&image, Format::Qcow2)?, &raw[..SIZE as usize]).context(options)?;
        }
        // And QEMU goes on.
        qemu_io(&image, Format::Qcow2, &qemu_writes(&mut random, 30, SIZE))?;
        exercise(&[(&image, Format::Qcow2)], &mut random).context(options)?;
    }
    Ok(())
}

#[test]
fn a_raw_data_file_reads_as_the_disk_after_every_request() -> Result<()> {
    if !have_qemu("a_raw_data_file_reads_as_the_disk_after_every_request") {
        return Ok(());
    }
    let (folder, mut random) = (Folder::new()?, Random::new(920));
    let (image, data) = (folder.path("image"), folder.path("data"));
    create(&image, &with_data(&data, "data_file_raw=on"), SIZE)?;
    // QEMU unmaps what it discards.
    qemu_io(&image, Format::Qcow2, &["write -P 5 0 1M", "discard 128k 256k", "write -z 512k 64k"])?;
    let mut model = content(&image, Format::Qcow2)?;
    run(async || {
        let disk = open(&image).await?;
        for round in 0..30 {
            churn(&disk, &mut model, &mut random, 1).await?;
            same(&model, &std::fs::read(&data)?[..model.len()])
                .with_context(|| format!("after round {round}"))?;
        }
        Ok(disk.close().await?)
    })?;
    assert_clean(&image)
}

#[test]
fn data_files_lie_over_backing_files_and_under_overlays() -> Result<()> {
    if !have_qemu("data_files_lie_over_backing_files_and_under_overlays") {
        return Ok(());
    }
    let (folder, mut random) = (Folder::new()?, Random::new(930));
    let base = (folder.path("base"), Format::Qcow2);
    create(&base.0, &with_data(&folder.path("base-data"), "cluster_size=4096"), SIZE)?;
    qemu_io(&base.0, Format::Qcow2, &qemu_writes(&mut random, 60, SIZE))?;
    let middle = (folder.path("middle"), Format::Qcow2);
    let options = with_data(&folder.path("middle-data"), "cluster_size=65536");
    create_over(&middle.0, &options, SIZE + 4096, (&base.0, base.1))?;
    exercise(&[(&middle.0, middle.1), (&base.0, base.1)], &mut random)?;
    let top = (folder.path("top"), Format::Qcow2);
    create_over(&top.0, "cluster_size=65536", SIZE, (&middle.0, middle.1))?;
    let chain = [(&*top.0, top.1), (&*middle.0, middle.1), (&*base.0, base.1)];
    exercise(&chain, &mut random)
}

#[test]
fn disks_with_data_files_change_their_size_as_qemu_expects() -> Result<()> {
    if !have_qemu("disks_with_data_files_change_their_size_as_qemu_expects") {
        return Ok(());
    }
    for raw in ["off", "on"] {
        let (folder, mut random) = (Folder::new()?, Random::new(940));
        let (image, data) = (folder.path("image"), folder.path("data"));
        create(&image, &with_data(&data, &format!("data_file_raw={raw}")), SIZE)?;
        qemu_io(&image, Format::Qcow2, &qemu_writes(&mut random, 60, SIZE))?;
        let mut model = content(&image, Format::Qcow2)?;
        let sizes = [
            (SIZE + 1024, Preallocation::Off),
            (SIZE - 200_192, Preallocation::Off),
            (SIZE + (1 << 20), Preallocation::Off),
            (SIZE + (3 << 20), Preallocation::Falloc),
            (70_144, Preallocation::Off),
            (SIZE, Preallocation::Metadata),
        ];
        for (size, fill) in sizes {
            run(async || {
                let disk = open(&image).await?;
                disk.resize(ByteLen::new(size), fill).await?;
                model.resize(size as usize, 0);
                verify(&disk, &model).await?;
                churn(&disk, &mut model, &mut random, 3).await?;
                Ok(disk.close().await?)
            })
            .with_context(|| format!("raw {raw}, size {size}"))?;
            assert_clean(&image)?;
            same(&model, &content(&image, Format::Qcow2)?)?;
            let file = std::fs::read(&data)?;
            ensure!(file.len() as u64 >= size, "raw {raw}: the data file has {} bytes", file.len());
            if raw == "on" {
                same(&model, &file[..model.len()])?;
            }
        }
    }
    Ok(())
}

#[test]
fn stale_bytes_in_a_data_file_never_show() -> Result<()> {
    if !have_qemu("stale_bytes_in_a_data_file_never_show") {
        return Ok(());
    }
    let folder = Folder::new()?;
    let (image, data) = (folder.path("image"), folder.path("data"));
    create(&image, &with_data(&data, "cluster_size=2M"), 5 << 20)?;
    std::fs::write(&data, vec![0xee; 9 << 20])?;
    run(async || {
        let disk = open(&image).await?;
        write(&disk, 1 << 20, &[1; 4096]).await?;
        disk.resize(ByteLen::new(9 << 20), Preallocation::Off).await?;
        write(&disk, 8 << 20, &[2; 512]).await?;
        let mut expected = vec![0; 9 << 20];
        expected[1 << 20..(1 << 20) + 4096].fill(1);
        expected[8 << 20..(8 << 20) + 512].fill(2);
        same(&expected, &read(&disk, 0, 9 << 20).await?)?;
        Ok(disk.close().await?)
    })?;
    assert_clean(&image)
}

#[test]
fn entries_that_break_the_rules_of_data_files_are_not_followed() -> Result<()> {
    if !have_qemu("entries_that_break_the_rules_of_data_files_are_not_followed") {
        return Ok(());
    }
    let cases = [
        ("another offset", 1_u64 << 63 | 0x20000, "own offset"),
        ("a compressed cluster", 1 << 62 | 0x10000, "compressed"),
    ];
    for (name, entry, why) in cases {
        let folder = Folder::new()?;
        let (image, data) = (folder.path("image"), folder.path("data"));
        create(&image, &with_data(&data, "cluster_size=65536"), 1 << 20)?;
        qemu_io(&image, Format::Qcow2, &["write -P 9 0 192k"])?;
        let l2 = crate::hostile::l2_table(&image)?;
        poke(&image, l2 + 8, &entry.to_be_bytes())?;
        run(async || {
            let disk = open_read_only(&image).await?;
            ensure!(read(&disk, 0, 512).await? == [9; 512], "{name}: a good cluster before it");
            let failed = read(&disk, 65536, 512).await.err().context(name)?;
            ensure!(format!("{failed:#}").contains(why), "{name}: {failed:#}");
            ensure!(read(&disk, 131_072, 512).await? == [9; 512], "{name}: a good one behind it");
            Ok(())
        })?;
    }
    Ok(())
}

/// Opening `image` with `data` ends in this kind of error, in words that say `why`, and no byte of either changes.
fn refuses(image: &Path, data: Option<&Path>, kind: ErrorKind, why: &str) -> Result<()> {
    let files: Vec<&Path> = std::iter::once(image).chain(data).collect();
    let bytes = || files.iter().map(std::fs::read).collect::<Result<Vec<_>, _>>();
    let before = bytes()?;
    for read_only in [false, true] {
        let opened = run(async || {
            let storage = |path| FileStorage::open(&FileOptions::new(path).read_only(read_only));
            let data = data.map(storage).transpose()?;
            let options = OpenOptions { read_only, ..OpenOptions::default() };
            Ok(Qcow2::open_with_data(storage(image)?, data, &options).await.err())
        })?;
        let error = opened.context("it was opened")?;
        let text = format!("{error:#}");
        ensure!(error.kind() == kind && text.contains(why), "{text}");
        ensure!(text.contains(&image.display().to_string()), "{text}");
    }
    ensure!(bytes()? == before, "a file was changed");
    Ok(())
}

#[test]
fn what_does_not_go_together_is_refused_and_not_changed() -> Result<()> {
    if !have_qemu("what_does_not_go_together_is_refused_and_not_changed") {
        return Ok(());
    }
    let folder = Folder::new()?;
    let (image, data) = (folder.path("image"), folder.path("data"));
    create(&image, &with_data(&data, "cluster_size=65536"), 1 << 20)?;
    qemu_io(&image, Format::Qcow2, &["write -P 9 0 192k"])?;
    refuses(&image, None, ErrorKind::Denied, "external data file")?;
    let (short, plain) = (folder.path("short"), folder.path("plain"));
    std::fs::write(&short, vec![9; (1 << 20) - 512])?;
    refuses(&image, Some(&short), ErrorKind::BadImage, "shorter than the disk")?;
    create(&plain, "cluster_size=65536", 1 << 20)?;
    refuses(&plain, Some(&data), ErrorKind::InvalidInput, "holds its data itself")?;
    // A number of snapshots, of which such an image can have none; then a backing file's name under a raw data file.
    let header: [u8; 104] = peek(&image, 0)?;
    poke(&image, 60, &1_u32.to_be_bytes())?;
    poke(&image, 64, &0x10000_u64.to_be_bytes())?;
    refuses(&image, Some(&data), ErrorKind::Unsupported, "internal snapshots")?;
    poke(&image, 0, &header)?;
    poke(&image, 8, &1024_u64.to_be_bytes())?;
    poke(&image, 16, &4_u32.to_be_bytes())?;
    poke(&image, 1024, b"base")?;
    poke(&image, 88, &2_u64.to_be_bytes())?;
    refuses(&image, Some(&data), ErrorKind::Unsupported, "data_file_raw")
}
