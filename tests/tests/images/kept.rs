//! What Bedplate does not know it keeps, or drops as the format's rules say; what it only reads it leaves alone.

use crate::harness::{Folder, open, open_read_only, run, verify, write};
use crate::tools::{assert_clean, content, create, have_qemu, peek, poke, qemu_img, qemu_io};
use anyhow::{Context, Result, ensure};
use bedplate_qcow2::format::{EXT_BITMAPS, Extension, Header};
use bedplate_tests::{host, paths};
use bedplate_types::{Format, HostOffset};
use std::path::Path;

const SIZE: u64 = 4 << 20;
/// Where a version 3 header made by QEMU has its feature name table, and how long that is with its head.
const EXTENSIONS: u64 = 112;

fn write_through_bedplate(image: &Path) -> Result<()> {
    run(async || {
        let disk = open(image).await?;
        write(&disk, 1 << 20, &[7; 100_000]).await?;
        disk.flush().await?;
        Ok(disk.close().await?)
    })
}

#[test]
fn reading_changes_nothing_whatever_state_the_image_is_in() -> Result<()> {
    if !have_qemu("reading_changes_nothing_whatever_state_the_image_is_in") {
        return Ok(());
    }
    let states: [(&str, u64, &[u8]); 5] = [
        ("as QEMU left it", 72, &[0]),
        ("dirty", 79, &[1]),
        ("corrupt", 79, &[2]),
        ("with unknown autoclear features", 88, &[0x80, 0, 0, 0, 0, 0, 0, 0x40]),
        ("with unknown compatible features", 80, &[0x80]),
    ];
    for (state, at, bytes) in states {
        let folder = Folder::new()?;
        let image = folder.path("image");
        create(&image, "lazy_refcounts=on", SIZE)?;
        qemu_io(&image, Format::Qcow2, &["write -P 5 0 1M", "write -z 512k 256k"])?;
        let model = content(&image, Format::Qcow2)?;
        poke(&image, at, bytes)?;
        let before = std::fs::read(&image)?;
        run(async || {
            let disk = open_read_only(&image).await?;
            verify(&disk, &model).await?;
            ensure!(write(&disk, 0, &[1; 512]).await.is_err(), "a read-only disk was written");
            disk.flush().await?;
            disk.maintain().await?;
            Ok(disk.close().await?)
        })?;
        ensure!(std::fs::read(&image)? == before, "an image {state} was changed by reading");
    }
    Ok(())
}

/// Elsewhere such bits were kept although what they vouch for had become stale.
#[test]
fn unknown_autoclear_features_are_cleared_when_the_image_is_opened_for_writing() -> Result<()> {
    if !have_qemu("unknown_autoclear_features_are_cleared_when_the_image_is_opened_for_writing") {
        return Ok(());
    }
    let folder = Folder::new()?;
    let image = folder.path("image");
    create(&image, "compat=1.1", SIZE)?;
    poke(&image, 88, &0x8000_0000_0000_8000_u64.to_be_bytes())?;
    run(async || Ok(open_read_only(&image).await?.close().await?))?;
    ensure!(peek(&image, 88)? == 0x8000_0000_0000_8000_u64.to_be_bytes());
    run(async || Ok(open(&image).await?.close().await?))?;
    ensure!(peek(&image, 88)? == [0; 8], "they are still set");
    assert_clean(&image)
}

#[test]
fn unknown_extensions_and_fields_are_kept_byte_for_byte() -> Result<()> {
    if !have_qemu("unknown_extensions_and_fields_are_kept_byte_for_byte") {
        return Ok(());
    }
    let folder = Folder::new()?;
    let image = folder.path("image");
    create(&image, "lazy_refcounts=on", SIZE)?;
    let names = u64::from(u32::from_be_bytes(peek(&image, EXTENSIONS + 4)?));
    let end = EXTENSIONS + 8 + names.next_multiple_of(8);
    // Two of one kind, one empty, one that ends in the middle of a word, and text behind the end.
    let mut extra = Vec::new();
    for (kind, data) in
        [(0x1234_5678_u32, &b"thirteen byte"[..]), (0x1234_5678, b"again"), (0x0bad_cafe, b"")]
    {
        extra.extend(kind.to_be_bytes());
        extra.extend(u32::try_from(data.len())?.to_be_bytes());
        extra.extend(data);
        extra.resize(extra.len().next_multiple_of(8), 0);
    }
    extra.extend([0; 8]);
    poke(&image, end, &extra)?;
    // Something to clear, so that the header is written; and compatible bits that nobody knows.
    poke(&image, 88, &[0x40])?;
    poke(&image, 80, &[0x20])?;
    let before = std::fs::read(&image)?;
    write_through_bedplate(&image)?;
    assert_clean(&image)?;
    let after = std::fs::read(&image)?;
    let mut expected = before[..65536].to_vec();
    expected[88] = 0;
    let at = expected.iter().zip(&after).position(|(a, b)| a != b);
    ensure!(at.is_none(), "byte {at:?} of the first cluster has changed");
    Ok(())
}

/// Extensions, fields and bits of a header that Bedplate gives no meaning to.
type Strange = (Vec<(u32, Vec<u8>)>, Vec<u8>, u64);

fn strange(image: &Path) -> Result<Strange> {
    let header = Header::parse(&std::fs::read(image)?[..65536])?;
    let known = [EXT_BITMAPS];
    let extensions = header.extensions.into_iter().filter(|e| !known.contains(&e.id));
    let all = extensions.map(|e| (e.id, e.data)).collect();
    Ok((all, header.unknown_fields, header.compatible))
}

#[test]
fn every_change_of_the_header_keeps_what_it_does_not_know() -> Result<()> {
    if !have_qemu("every_change_of_the_header_keeps_what_it_does_not_know") {
        return Ok(());
    }
    let folder = Folder::new()?;
    let (base, image) = (folder.path("base.raw"), folder.path("image.qcow2"));
    std::fs::write(&base, vec![3; SIZE as usize])?;
    crate::tools::create_over(&image, "lazy_refcounts=on", SIZE, (&base, Format::Raw))?;
    // A header of the future: longer, with three strange extensions, one as long as sectors, and the name far behind.
    let mut header = Header::parse(&std::fs::read(&image)?[..65536])?;
    header.header_length += 24;
    header.unknown_fields.extend((0..24).map(|n| 0xa0 + n));
    header.compatible |= 1 << 61;
    for (id, len) in [(0x1234_5678, 13), (0x1234_5678, 700), (0x0bad_cafe, 0)] {
        header.extensions.push(Extension { id, data: (0..len).map(|n| n as u8).collect() });
    }
    header.backing_file.as_mut().context("a backing file")?.offset = HostOffset::ZERO;
    let mut bytes = header.encode()?;
    bytes.resize(65536, 0);
    poke(&image, 0, &bytes)?;
    let before = strange(&image)?;
    ensure!(before.0.len() == 5, "{:?}", before.0);
    let commands: [&[&str]; 9] = [
        &["snapshot", "-c", "one", "IMAGE"],
        &["resize", "--allow-backing", "IMAGE", "+64M"],
        &["bitmap", "--add", "IMAGE", "kept"],
        &["bitmap", "--add", "IMAGE", "other"],
        &["bitmap", "--remove", "--add", "--clear", "--disable", "IMAGE", "kept"],
        &["bitmap", "--remove", "IMAGE", "kept"],
        &["bitmap", "--remove", "IMAGE", "other"],
        &["snapshot", "-a", "one", "IMAGE"],
        &["snapshot", "-d", "one", "IMAGE"],
    ];
    let chain = [(&*image, Format::Qcow2), (&*base, Format::Raw)];
    for command in commands {
        let words: Vec<&str> =
            command.iter().map(|w| if *w == "IMAGE" { "image.qcow2" } else { *w }).collect();
        let mut tool = host::program(&paths::bedplate()?);
        host::run(tool.args(&words).current_dir(image.parent().context("a folder")?))?;
        ensure!(strange(&image)? == before, "{command:?} changed what it does not know");
        run(async || {
            let disk = crate::harness::open_chain(&chain, false).await?;
            write(&disk, 1 << 20, &[7; 70_000]).await?;
            Ok(disk.close().await?)
        })?;
        ensure!(strange(&image)? == before, "a write after {command:?} changed it");
        assert_clean(&image)?;
        let mut expected = vec![3; SIZE as usize];
        expected[1 << 20..(1 << 20) + 70_000].fill(7);
        ensure!(content(&image, Format::Qcow2)?[..SIZE as usize] == expected, "{command:?}");
    }
    Ok(())
}

/// Fields of version 3 were written into headers of version 2 elsewhere.
#[test]
fn the_header_of_a_version_2_image_stays_as_it_was() -> Result<()> {
    if !have_qemu("the_header_of_a_version_2_image_stays_as_it_was") {
        return Ok(());
    }
    let folder = Folder::new()?;
    let (base, image) = (folder.path("base"), folder.path("image"));
    create(&base, "compat=0.10", SIZE)?;
    crate::tools::create_over(&image, "compat=0.10", SIZE, (&base, Format::Qcow2))?;
    let before: [u8; 4096] = peek(&image, 0)?;
    let chain = [(&*image, Format::Qcow2), (&*base, Format::Qcow2)];
    run(async || {
        let disk = crate::harness::open_chain(&chain, false).await?;
        write(&disk, 0, &[3; 70_000]).await?;
        Ok(disk.close().await?)
    })?;
    ensure!(peek::<4096>(&image, 0)? == before, "the header was changed");
    assert_clean(&image)
}

#[test]
fn bitmaps_that_are_out_of_date_already_do_not_stand_in_the_way_and_stay() -> Result<()> {
    if !have_qemu("bitmaps_that_are_out_of_date_already_do_not_stand_in_the_way_and_stay") {
        return Ok(());
    }
    let folder = Folder::new()?;
    let image = folder.path("image");
    create(&image, "compat=1.1", SIZE)?;
    let mut tool = host::tool("qemu-img");
    host::run(tool.args(["bitmap", "--add", "-f", "qcow2"]).arg(&image).arg("nightly"))?;
    poke(&image, 88, &[0; 8])?;
    let before: [u8; 4096] = peek(&image, 0)?;
    write_through_bedplate(&image)?;
    ensure!(peek::<4096>(&image, 0)? == before, "the bitmaps' extension was changed");
    // QEMU drops bitmaps that are out of date when it next writes, and counts their space as leaked until then.
    crate::tools::assert_not_corrupt(&image)?;
    qemu_img(&["check", "-q", "-f", "qcow2", "-r", "leaks"], &[&image])
}
