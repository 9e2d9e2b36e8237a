//! Headers that ask for more than there is: each is refused, quickly and with little memory, and the file stays as it is.

use crate::harness::{Folder, open, open_read_only, read, run, write};
use crate::refused::refuses;
use crate::tools::{create, have_qemu, poke, qemu_img, qemu_io};
use anyhow::{Context, Result, ensure};
use bedplate_types::Format;

/// What once went wrong elsewhere, and the bytes that make it so.
type Case = (&'static str, &'static [(u64, &'static [u8])]);

const MAX: &[u8] = &[0xff; 8];

const REFUSED: &[Case] = &[
    ("a header length of 4 GiB: the header was read past its buffer", &[(100, &[0xff; 4])]),
    ("a header length of 2 GiB", &[(100, &[0x7f, 0xff, 0xff, 0xff])]),
    ("a header length below that of version 3", &[(100, &[0, 0, 0, 72])]),
    ("clusters of 1 TiB: all bounds made of them meant nothing", &[(20, &[0, 0, 0, 40])]),
    ("clusters of 1 byte", &[(20, &[0, 0, 0, 0])]),
    ("clusters of 2^64 bytes", &[(20, &[0, 0, 0, 64])]),
    ("a backing name at the end of the address space", &[(8, MAX), (16, &[0, 0, 0, 8])]),
    ("a backing name of 4 GiB", &[(8, &[0, 0, 0, 0, 0, 0, 2, 0]), (16, &[0xff; 4])]),
    (
        "an extension of 2 GiB: a huge allocation, or a read out of bounds",
        &[(112, &[0x12, 0x34, 0x56, 0x78, 0x7f, 0xff, 0xff, 0xff])],
    ),
    (
        "an extension whose end wraps around: the check was switched off by that",
        &[(112, &[0x12, 0x34, 0x56, 0x78, 0xff, 0xff, 0xff, 0xf8])],
    ),
    ("a refcount table of 256 TiB", &[(56, &[0xff; 4])]),
    ("a refcount table of 8 GiB", &[(56, &[0, 2, 0, 1])]),
    ("no refcount table", &[(56, &[0; 4])]),
    ("a refcount table at offset 0, over the header", &[(48, &[0; 8])]),
    ("a refcount table that is not aligned", &[(48, &[0, 0, 0, 0, 0, 1, 2, 0])]),
    (
        "a refcount table beyond the largest file",
        &[(48, &[0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0])],
    ),
    ("refcounts of 128 bits", &[(96, &[0, 0, 0, 7])]),
    ("refcounts of 2^(2^32) bits", &[(96, &[0xff; 4])]),
    ("an L1 table of 32 GiB", &[(36, &[0xff; 4])]),
    (
        "an L1 table of 256 MiB for a disk of 2^38 bytes",
        &[(24, &[0, 0, 0, 0x3f, 0xff, 0xff, 0xff, 0xff]), (36, &[1, 0xff, 0xff, 0xff])],
    ),
    ("a disk that its L1 table is too short for", &[(24, &[0, 0, 0x10, 0, 0, 0, 0, 0])]),
    ("a disk of 2^64 bytes", &[(24, MAX)]),
    ("an L1 table that is not aligned", &[(40, &[0, 0, 0, 0, 0, 3, 0, 1])]),
    ("an L1 table at offset 0, over the header", &[(40, &[0; 8])]),
    (
        "an L1 table that ends beyond the largest file",
        &[(40, &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0])],
    ),
    ("4 billion snapshots", &[(60, &[0xff; 4])]),
    ("snapshots at offset 0", &[(60, &[0, 0, 0, 1]), (64, &[0; 8])]),
    ("snapshots that are not aligned", &[(60, &[0, 0, 0, 1]), (64, &[0, 0, 0, 0, 0, 7, 2, 0])]),
    ("an unknown encryption", &[(32, &[0, 0, 0, 9])]),
    ("an unknown compression", &[(104, &[9])]),
    ("a compression type that its feature bit does not announce", &[(104, &[1])]),
];

#[test]
fn headers_that_ask_for_the_impossible_are_refused() -> Result<()> {
    if !have_qemu("headers_that_ask_for_the_impossible_are_refused") {
        return Ok(());
    }
    let folder = Folder::new()?;
    let good = folder.path("good");
    create(&good, "compat=1.1", 64 << 20)?;
    for (story, pokes) in REFUSED {
        let image = folder.path("image");
        std::fs::copy(&good, &image)?;
        for (at, bytes) in *pokes {
            poke(&image, *at, bytes)?;
        }
        for read_only in [false, true] {
            refuses(&image, read_only, "").context(*story)?;
        }
    }
    Ok(())
}

/// A small file whose extension claims a gigabyte made a reader elsewhere allocate it.
#[test]
fn an_extension_that_leaves_a_cluster_of_512_bytes_is_refused() -> Result<()> {
    if !have_qemu("an_extension_that_leaves_a_cluster_of_512_bytes_is_refused") {
        return Ok(());
    }
    let folder = Folder::new()?;
    let image = folder.path("image");
    create(&image, "cluster_size=512", 1 << 20)?;
    poke(&image, 112, &[0x11, 0x22, 0x33, 0x44, 0x3f, 0xff, 0xff, 0xf8])?;
    refuses(&image, false, "extension")?;
    refuses(&image, true, "extension")
}

/// The largest tables that the format's limits allow, in a file that does not have them: they read as zeroes.
#[test]
fn the_largest_tables_in_a_tiny_file_cost_little() -> Result<()> {
    if !have_qemu("the_largest_tables_in_a_tiny_file_cost_little") {
        return Ok(());
    }
    let folder = Folder::new()?;
    let image = folder.path("image");
    create(&image, "compat=1.1", 64 << 20)?;
    // An L1 table of 32 MiB, which QEMU takes too, far past the end of the file.
    poke(&image, 36, &(4_u32 << 20).to_be_bytes())?;
    poke(&image, 40, &(1_u64 << 40).to_be_bytes())?;
    run(async || {
        let disk = open_read_only(&image).await?;
        ensure!(read(&disk, 0, 65536).await? == [0; 65536]);
        Ok(())
    })
}

/// A snapshot's own table was believed to be as long as it said: a heap overflow elsewhere.
#[test]
fn a_snapshot_with_an_impossible_table_leaves_the_disk_usable() -> Result<()> {
    if !have_qemu("a_snapshot_with_an_impossible_table_leaves_the_disk_usable") {
        return Ok(());
    }
    let pokes: [(u64, &[u8]); 3] = [
        (8, &[0x10, 0, 0, 0]),
        (0, &[0, 0, 0, 0, 0, 6, 2, 1]),
        (0, &[0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0]),
    ];
    for (at, bytes) in pokes {
        let folder = Folder::new()?;
        let image = folder.path("image");
        create(&image, "compat=1.1", 64 << 20)?;
        qemu_io(&image, Format::Qcow2, &["write -P 7 0 512"])?;
        qemu_img(&["snapshot", "-c", "one"], &[&image])?;
        let table = u64::from_be_bytes(crate::tools::peek(&image, 64)?);
        poke(&image, table + at, bytes)?;
        run(async || {
            let disk = open_read_only(&image).await?;
            ensure!(read(&disk, 0, 512).await? == [7; 512]);
            Ok(())
        })?;
        run(async || {
            let Ok(disk) = open(&image).await else { return Ok(()) };
            write(&disk, 0, &[8; 512]).await?;
            ensure!(read(&disk, 0, 1024).await?[..513] == [&[8; 512][..], &[0]].concat());
            Ok(disk.close().await?)
        })?;
    }
    Ok(())
}

/// More snapshots than there is file, and entries whose names and extra data leave it.
#[test]
fn a_snapshot_table_that_leaves_the_file_is_refused_for_writing() -> Result<()> {
    if !have_qemu("a_snapshot_table_that_leaves_the_file_is_refused_for_writing") {
        return Ok(());
    }
    let pokes: [(&str, u64, u64, &[u8]); 3] = [
        ("65536 snapshots", 0, 60, &[0, 1, 0, 0]),
        ("a table past the end", 0, 64, &[0, 0, 1, 0, 0, 0, 0, 0]),
        ("extra data of 4 GiB", 1, 36, &[0xff; 4]),
    ];
    for (story, inside, at, bytes) in pokes {
        let folder = Folder::new()?;
        let image = folder.path("image");
        create(&image, "compat=1.1", 1 << 20)?;
        qemu_img(&["snapshot", "-c", "one"], &[&image])?;
        let table = u64::from_be_bytes(crate::tools::peek(&image, 64)?);
        poke(&image, table * inside + at, bytes)?;
        refuses(&image, false, "snapshot").context(story)?;
        crate::refused::reads(&image).context(story)?;
    }
    Ok(())
}
