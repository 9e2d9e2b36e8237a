//! Tables that point where they must not. What was noticed ends in an error, marks the image as corrupt, and leaves everything
//! else in the file alone; nothing panics, hangs or takes much memory.

use crate::harness::{FileDisk, Folder, memory, noise, open, open_read_only, read, run, write};
use crate::refused::refuses;
use crate::tools::{create, have_qemu, peek, poke, qemu_img, qemu_io};
use anyhow::{Context, Result, bail, ensure};
use bedplate_storage::ZeroMode;
use bedplate_tests::random::Random;
use bedplate_types::{ByteLen, ErrorKind, Format, GuestOffset};
use std::path::Path;
use std::time::Duration;

const CLUSTER: u64 = 65536;
/// Where images made by QEMU with clusters of 64 KiB have their structures.
const REFCOUNT_TABLE: u64 = CLUSTER;
const REFCOUNT_BLOCK: u64 = 2 * CLUSTER;
const L1: u64 = 3 * CLUSTER;
const L2: u64 = 4 * CLUSTER;
const COPIED: u64 = 1 << 63;
const SIZE: u64 = 1 << 30;
const FAR: u64 = 100 << 20;

/// The first L2 table of an image.
pub fn l2_table(image: &Path) -> Result<u64> {
    let l1 = u64::from_be_bytes(peek(image, 40)?);
    Ok(u64::from_be_bytes(peek(image, l1)?) & !COPIED)
}

/// An image whose first clusters QEMU has written (or, without `commands`, an empty one), at the places named above.
fn image(folder: &Folder, commands: &[&str]) -> Result<std::path::PathBuf> {
    let image = folder.path("image");
    create(&image, "compat=1.1", SIZE)?;
    if !commands.is_empty() {
        qemu_io(&image, Format::Qcow2, commands)?;
        ensure!(l2_table(&image)? == L2, "QEMU has put the L2 table elsewhere");
    }
    let places = [48, REFCOUNT_TABLE, 40].map(|at| peek(&image, at).map(u64::from_be_bytes));
    let [table, block, l1] = places;
    ensure!((table?, block?, l1?) == (REFCOUNT_TABLE, REFCOUNT_BLOCK, L1));
    Ok(image)
}

#[derive(Clone, Copy, Debug)]
enum Act {
    Read,
    Write,
    /// To a cluster that nothing is known about.
    WriteFar,
    /// Compressed, likewise.
    Pack,
    Zero,
    Discard,
}

async fn act(disk: &FileDisk, what: Act) -> Result<()> {
    let (at, len) = (GuestOffset::ZERO, ByteLen::new(CLUSTER));
    match what {
        Act::Read => read(disk, 0, 4096).await.map(drop),
        // A part of a cluster, so that old content would be read too.
        Act::Write => write(disk, 512, &[0xee; 4096]).await,
        Act::WriteFar => write(disk, FAR, &[0xee; 4096]).await,
        Act::Pack => {
            let data = memory(&[0xee; CLUSTER as usize])?;
            Ok(disk.write_compressed(GuestOffset::new(FAR), data).await?)
        }
        Act::Zero => {
            Ok(disk.write_zeroes(at, len, ZeroMode { unmap: true, fast_only: false }).await?)
        }
        Act::Discard => Ok(disk.discard(at, len).await?),
    }
}

fn is_marked(image: &Path) -> Result<bool> {
    ensure!(peek(image, 0)? == *b"QFI\xfb", "the header was overwritten");
    Ok(peek::<8>(image, 72)?[7] & 2 != 0)
}

/// The act ends in an error that says what is wrong, the image is marked, and nothing but that mark was written.
fn ends_in_an_error(image: &Path, what: Act) -> Result<()> {
    let before = std::fs::read(image)?;
    let error = run(async || {
        let disk = open(image).await?;
        let Err(error) = act(&disk, what).await else { bail!("it went well") };
        let error = error.downcast::<bedplate_types::Error>()?;
        ensure!(error.kind() == ErrorKind::Corrupt, "an error of another kind: {error:#}");
        ensure!(write(&disk, 32 << 20, &[1; 512]).await.is_err(), "later writes are accepted");
        ensure!(disk.close().await.is_err(), "the close pretends that all is well");
        Ok(format!("{error:#}"))
    })?;
    ensure!(error.contains(&image.display().to_string()), "the file is not named: {error}");
    ensure!(is_marked(image)?, "the image is not marked as corrupt: {error}");
    // Space may have been added at the end before the fault was found; what was there must be as it was.
    let mut after = std::fs::read(image)?;
    after.truncate(before.len());
    after[79] &= !2;
    let changed = before.iter().zip(&after).position(|(a, b)| a != b);
    ensure!(changed.is_none(), "byte {changed:?} of the file was changed");
    refuses(image, false, "corrupt")
}

/// What was wrong, the bytes that make it so, and what notices.
type Case = (&'static str, u64, u64, &'static [Act]);

const ANY_WRITE: &[Act] = &[Act::Write, Act::WriteFar, Act::Zero];
const READ_AND_WRITE: &[Act] = &[Act::Read, Act::Write, Act::Zero, Act::Discard];

#[test]
fn mapping_tables_that_point_nowhere_end_in_an_error() -> Result<()> {
    if !have_qemu("mapping_tables_that_point_nowhere_end_in_an_error") {
        return Ok(());
    }
    let cases: &[Case] = &[
        (
            "an L2 table that is not aligned: used as it stood",
            L1,
            COPIED | L2 | 0x2a00,
            READ_AND_WRITE,
        ),
        ("an L2 table past the end of the file", L1, COPIED | 1 << 40, READ_AND_WRITE),
        ("an L1 entry with reserved bits", L1, COPIED | L2 | 1, READ_AND_WRITE),
        ("a cluster that is not aligned: used as it stood", L2, COPIED | 0x5_2a00, READ_AND_WRITE),
        ("a cluster past the end of the file", L2, COPIED | 1 << 40, READ_AND_WRITE),
        ("an L2 entry with reserved bits", L2, COPIED | 0x5_0000 | 1 << 58, READ_AND_WRITE),
        ("a zero cluster with space that is not aligned", L2, COPIED | 0x2a01, READ_AND_WRITE),
        ("a cluster that is the L1 table", L2, COPIED | L1, &[Act::Write, Act::Discard]),
        (
            "a cluster that is the refcount table",
            L2,
            COPIED | REFCOUNT_TABLE,
            &[Act::Write, Act::Zero],
        ),
        ("a cluster that is a refcount block", L2, COPIED | REFCOUNT_BLOCK, &[Act::Write]),
        ("a cluster that is its own L2 table", L2, COPIED | L2, &[Act::Write]),
        ("a compressed cluster past the end of the file", L2, 1 << 62 | 1 << 40, READ_AND_WRITE),
        (
            "a compressed cluster that is marked as in place",
            L2,
            COPIED | 1 << 62 | 0x5_0000,
            READ_AND_WRITE,
        ),
        ("an L2 table that is a refcount block", L1, COPIED | REFCOUNT_BLOCK, ANY_WRITE),
        ("an L2 table that is the L1 table", L1, COPIED | L1, ANY_WRITE),
        ("an L2 table that is the refcount table", L1, COPIED | REFCOUNT_TABLE, ANY_WRITE),
        ("an L2 table for two parts of the disk", L1 + 8, COPIED | L2, ANY_WRITE),
    ];
    for (story, at, word, acts) in cases {
        for what in *acts {
            let folder = Folder::new()?;
            let image = image(&folder, &["write -P 1 0 64k"])?;
            poke(&image, *at, &word.to_be_bytes())?;
            ends_in_an_error(&image, *what).with_context(|| format!("{story}; {what:?}"))?;
        }
    }
    Ok(())
}

#[test]
fn refcounts_that_call_metadata_free_never_let_it_be_overwritten() -> Result<()> {
    if !have_qemu("refcounts_that_call_metadata_free_never_let_it_be_overwritten") {
        return Ok(());
    }
    let cases: &[Case] = &[
        ("no refcount block: one was put at offset 0", REFCOUNT_TABLE, 0, &[Act::Write, Act::Pack]),
        (
            "the header counted as free: an L2 table was put over it",
            REFCOUNT_BLOCK,
            0,
            &[Act::Write, Act::Pack],
        ),
        ("a refcount block that is not aligned", REFCOUNT_TABLE, 0x2a00, &[Act::Write, Act::Pack]),
        (
            "a refcount block past the end of the file",
            REFCOUNT_TABLE,
            1 << 36,
            &[Act::Write, Act::Pack],
        ),
        (
            "a refcount block with reserved bits",
            REFCOUNT_TABLE,
            REFCOUNT_BLOCK | 1,
            &[Act::Write, Act::Pack],
        ),
        ("a refcount block that is the L1 table", REFCOUNT_TABLE, L1, &[Act::Write, Act::Pack]),
        (
            "a refcount block for two parts of the file",
            REFCOUNT_TABLE + 8,
            REFCOUNT_BLOCK,
            &[Act::Write, Act::Pack],
        ),
    ];
    for (story, at, word, acts) in cases {
        for what in *acts {
            let folder = Folder::new()?;
            let image = image(&folder, &[])?;
            poke(&image, *at, &word.to_be_bytes())?;
            ends_in_an_error(&image, *what).with_context(|| format!("{story}; {what:?}"))?;
        }
    }
    Ok(())
}

#[test]
fn an_l1_table_in_the_refcount_table_is_refused_for_writing() -> Result<()> {
    if !have_qemu("an_l1_table_in_the_refcount_table_is_refused_for_writing") {
        return Ok(());
    }
    let folder = Folder::new()?;
    let image = image(&folder, &["write -P 1 0 64k"])?;
    poke(&image, 40, &REFCOUNT_TABLE.to_be_bytes())?;
    refuses(&image, false, "overlap")
}

/// A compressed cluster was written to offset 0 elsewhere; here a compressed cluster is to be replaced.
#[test]
fn a_write_to_a_compressed_cluster_with_wrong_refcounts_spares_the_header() -> Result<()> {
    if !have_qemu("a_write_to_a_compressed_cluster_with_wrong_refcounts_spares_the_header") {
        return Ok(());
    }
    let folder = Folder::new()?;
    let image = image(&folder, &["write -c -P 3 0 64k"])?;
    poke(&image, REFCOUNT_BLOCK, &[0; 8])?;
    ends_in_an_error(&image, Act::Write)
}

/// Half of a discard made the image unusable elsewhere, and the other half went on with it.
#[test]
fn a_discard_with_a_bad_refcount_table_fails_in_the_end_and_does_no_harm() -> Result<()> {
    if !have_qemu("a_discard_with_a_bad_refcount_table_fails_in_the_end_and_does_no_harm") {
        return Ok(());
    }
    let folder = Folder::new()?;
    let image = image(&folder, &["write -P 1 0 128k"])?;
    poke(&image, REFCOUNT_TABLE, &0x2a00_u64.to_be_bytes())?;
    run(async || {
        let disk = open(&image).await?;
        let discarded = disk.discard(GuestOffset::ZERO, ByteLen::new(65537)).await;
        let (flushed, closed) = (disk.flush().await, disk.close().await);
        ensure!(discarded.is_err() || flushed.is_err() || closed.is_err(), "nobody has noticed");
        Ok(())
    })?;
    ensure!(is_marked(&image)?, "the image is not marked as corrupt");
    Ok(())
}

/// Guest data went over the header of an image elsewhere: offset 0 was taken for a place of data.
#[test]
fn a_cluster_at_offset_0_is_none() -> Result<()> {
    if !have_qemu("a_cluster_at_offset_0_is_none") {
        return Ok(());
    }
    let folder = Folder::new()?;
    let image = image(&folder, &["write -P 1 0 64k"])?;
    poke(&image, L2, &COPIED.to_be_bytes())?;
    let header: [u8; 4096] = peek(&image, 0)?;
    run(async || {
        let disk = open(&image).await?;
        write(&disk, 0, &[2; 512]).await?;
        ensure!(read(&disk, 0, 513).await? == [&[2; 512][..], &[0]].concat());
        Ok(disk.close().await?)
    })?;
    ensure!(peek::<4096>(&image, 0)? == header, "the header was overwritten");
    crate::tools::assert_not_corrupt(&image)
}

#[test]
fn compressed_data_that_is_garbage_ends_in_an_error() -> Result<()> {
    if !have_qemu("compressed_data_that_is_garbage_ends_in_an_error") {
        return Ok(());
    }
    for kind in ["zlib", "zstd"] {
        for garbage in [[0xff; 16], [0; 16], [0x55; 16]] {
            let folder = Folder::new()?;
            let (image, raw) = (folder.path("image"), folder.path("raw"));
            std::fs::write(&raw, [&[1; 1000][..], &[2; 70_000], &[3; 60_000]].concat())?;
            let option = format!("compression_type={kind}");
            qemu_img(
                &["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", &option],
                &[&raw, &image],
            )?;
            let entry = u64::from_be_bytes(peek(&image, l2_table(&image)?)?);
            ensure!(entry >> 62 == 1, "the cluster is not compressed");
            poke(&image, entry & 0xff_ffff, &garbage)?;
            run(async || {
                let disk = open_read_only(&image).await?;
                ensure!(read(&disk, 0, 512).await.is_err(), "garbage was believed");
                let second = read(&disk, 66_000, 512).await.context("its neighbour")?;
                ensure!(second == [2; 512], "its neighbour is damaged");
                Ok(())
            })?;
        }
    }
    Ok(())
}

/// An image with some of everything, in small clusters, so that few bytes are not metadata.
fn busy_image(folder: &Folder) -> Result<std::path::PathBuf> {
    let (image, raw) = (folder.path("busy"), folder.path("raw"));
    std::fs::write(&raw, [&[1; 50_000][..], &[0; 50_000], &[2; 50_000]].concat())?;
    let options = "cluster_size=512,lazy_refcounts=on";
    qemu_img(&["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", options], &[&raw, &image])?;
    qemu_io(
        &image,
        Format::Qcow2,
        &["write -P 4 0 20k", "write -z 30k 10k", "write -P 5 100k 9k"],
    )?;
    qemu_img(&["snapshot", "-c", "one"], &[&image])?;
    qemu_io(&image, Format::Qcow2, &["write -P 6 10k 50k", "discard 40k 8k"])?;
    Ok(image)
}

/// All that a guest can ask for; errors are fine.
async fn everything(image: &Path, random: &mut Random) {
    let Ok(disk) = open(image).await else { return };
    let size = disk.size().get();
    for _ in 0..30 {
        let at = random.below(size.clamp(1, 200_000));
        let len = random.below(20_000).min(size - at);
        let (start, length) = (GuestOffset::new(at), ByteLen::new(len));
        let mode = ZeroMode { unmap: random.below(2) == 0, fast_only: false };
        // Each may fail or not, as the damage has it.
        let _ = match random.below(7) {
            0 => disk.write_zeroes(start, length, mode).await.map_err(Into::into),
            1 => disk.discard(start, length).await.map_err(Into::into),
            2 => disk.flush().await.map_err(Into::into),
            3 => disk.block_status(start, length, 100).await.map(drop).map_err(Into::into),
            4 | 5 => write(&disk, at, &vec![7; len as usize]).await,
            _ => read(&disk, at, len as usize).await.map(drop),
        };
    }
    let _ = disk.close().await;
}

#[test]
fn random_damage_to_metadata_never_panics_hangs_or_hides_the_header() -> Result<()> {
    if !have_qemu("random_damage_to_metadata_never_panics_hangs_or_hides_the_header") {
        return Ok(());
    }
    let folder = Folder::new()?;
    let good = std::fs::read(busy_image(&folder)?)?;
    let image = folder.path("image");
    let mut random = Random::new(31_337);
    for round in 0..400 {
        let mut bytes = good.clone();
        for _ in 0..1 + random.below(4) {
            // The magic is left alone: without it the file is no image at all.
            let at = 4 + random.below(bytes.len() as u64 - 12) as usize;
            let at = if random.below(4) == 0 { 4 + at % 600 } else { at & !7 | 4 };
            match random.below(3) {
                0 => bytes[at] ^= 1 << random.below(8),
                1 => bytes[at..at + 4].fill([0, 0xff][random.below(2) as usize]),
                _ => bytes[at..at + 4].copy_from_slice(&noise(&mut random, 4)),
            }
        }
        std::fs::write(&image, &bytes)?;
        let done = run(async || {
            let all = everything(&image, &mut random);
            Ok(bedplate_runtime::timeout(Duration::from_secs(60), all).await)
        })?;
        ensure!(done.is_some(), "round {round} did not come to an end");
        ensure!(peek(&image, 0)? == *b"QFI\xfb", "round {round} overwrote the header");
    }
    Ok(())
}
