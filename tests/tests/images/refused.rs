//! What Bedplate can't work with is refused with a sentence, and not one byte of the file changes.

use crate::harness::{Folder, open, open_read_only, read, run};
use crate::tools::{create, have_qemu, poke, qemu_img, qemu_io};
use anyhow::{Context, Result, ensure};
use bedplate_tests::host;
use bedplate_types::Format;
use std::path::Path;

/// Opening ends in a sentence that names the file and says `why`, and changes nothing.
pub fn refuses(image: &Path, read_only: bool, why: &str) -> Result<()> {
    let before = std::fs::read(image)?;
    let opened =
        run(async || if read_only { open_read_only(image).await } else { open(image).await });
    let how = if read_only { "reading" } else { "writing" };
    let error = opened.err().with_context(|| format!("it was opened for {how}"))?;
    let error = error.downcast::<bedplate_types::Error>()?;
    let text = format!("{error:#}");
    ensure!(text.contains(&image.display().to_string()), "the file is not named: {text}");
    ensure!(text.contains(why), "the sentence does not speak of {why:?}: {text}");
    ensure!(std::fs::read(image)? == before, "opening for {how} changed the file");
    Ok(())
}

/// Opening for reading works, gives the first sector, and changes nothing.
pub fn reads(image: &Path) -> Result<Vec<u8>> {
    let before = std::fs::read(image)?;
    let sector = run(async || {
        let disk = open_read_only(image).await?;
        let sector = read(&disk, 0, 512).await?;
        disk.close().await?;
        Ok(sector)
    })?;
    ensure!(std::fs::read(image)? == before, "reading changed the file");
    Ok(sector)
}

#[test]
fn encrypted_images_are_refused_without_a_key() -> Result<()> {
    if !have_qemu("encrypted_images_are_refused_without_a_key") {
        return Ok(());
    }
    let folder = Folder::new()?;
    let luks = folder.path("luks");
    let mut tool = host::tool("qemu-img");
    tool.args(["create", "-q", "-f", "qcow2", "--object", "secret,id=s,data=open-sesame", "-o"]);
    tool.arg("encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10");
    host::run(tool.arg(&luks).arg("1M"))?;
    refuses(&luks, false, "give its passphrase")?;
    refuses(&luks, true, "give its passphrase")?;
    // The old method can't be made by today's tools; its number in the header is what tells.
    let aes = folder.path("aes");
    create(&aes, "compat=0.10", 1 << 20)?;
    poke(&aes, 32, &1_u32.to_be_bytes())?;
    refuses(&aes, false, "AES")
}

#[test]
fn unknown_incompatible_features_are_refused_by_name() -> Result<()> {
    if !have_qemu("unknown_incompatible_features_are_refused_by_name") {
        return Ok(());
    }
    let folder = Folder::new()?;
    let image = folder.path("image");
    create(&image, "compat=1.1", 1 << 20)?;
    poke(&image, 72, &(1_u64 << 41).to_be_bytes())?;
    refuses(&image, false, "bit 41")?;
    refuses(&image, true, "bit 41")
}

#[test]
fn an_image_marked_corrupt_is_read_but_not_written() -> Result<()> {
    if !have_qemu("an_image_marked_corrupt_is_read_but_not_written") {
        return Ok(());
    }
    let folder = Folder::new()?;
    let image = folder.path("image");
    create(&image, "compat=1.1", 1 << 20)?;
    qemu_io(&image, Format::Qcow2, &["write -P 9 0 64k"])?;
    poke(&image, 72, &2_u64.to_be_bytes())?;
    refuses(&image, false, "corrupt")?;
    ensure!(reads(&image)? == [9; 512]);
    Ok(())
}

#[test]
fn a_dirty_image_whose_tables_are_damaged_is_not_repaired_by_guessing() -> Result<()> {
    if !have_qemu("a_dirty_image_whose_tables_are_damaged_is_not_repaired_by_guessing") {
        return Ok(());
    }
    let folder = Folder::new()?;
    let image = folder.path("image");
    create(&image, "lazy_refcounts=on", 1 << 20)?;
    qemu_io(&image, Format::Qcow2, &["write -P 9 0 192k"])?;
    let l2 = crate::hostile::l2_table(&image)?;
    poke(&image, l2 + 8, &(1_u64 << 63 | 0x7000_0000).to_be_bytes())?;
    poke(&image, 72, &1_u64.to_be_bytes())?;
    refuses(&image, false, "damaged")?;
    ensure!(reads(&image)? == [9; 512]);
    Ok(())
}

#[test]
fn files_that_are_no_image_are_refused() -> Result<()> {
    let folder = Folder::new()?;
    let cases: [(&str, &[u8]); 5] = [
        ("empty", &[]),
        ("zeroes", &[0; 70_000]),
        ("short", b"QFI\xfb\0\0\0\x03"),
        ("version", b"QFI\xfb\0\0\0\x04\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x10\0\0\0\0\0\0\0\0"),
        ("header-only", b"QFI\xfb\0\0\0\x03\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x10\0\0\0\0\0\0\0\0"),
    ];
    for (name, bytes) in cases {
        let image = folder.path(name);
        std::fs::write(&image, bytes)?;
        for read_only in [false, true] {
            refuses(&image, read_only, "").with_context(|| name.to_owned())?;
        }
    }
    Ok(())
}

#[test]
fn an_image_in_use_by_qemu_is_refused() -> Result<()> {
    use std::io::Read;
    use std::process::Stdio;
    if !have_qemu("an_image_in_use_by_qemu_is_refused") {
        return Ok(());
    }
    let folder = Folder::new()?;
    let image = folder.path("image");
    create(&image, "compat=1.1", 1 << 20)?;
    let mut tool = host::tool("qemu-io");
    tool.args(["-f", "qcow2"]).arg(&image).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut holder = host::start(&mut tool)?;
    // Its prompt says that it has opened the image.
    let mut prompt = [0; 8];
    let read = holder.stdout.as_mut().context("its output")?.read_exact(&mut prompt);
    let refused = read.map_err(Into::into).and_then(|()| refuses(&image, false, ""));
    drop(holder.stdin.take());
    holder.wait()?;
    refused?;
    // And the other way round.
    let theirs = run(async || {
        let _disk = open(&image).await?;
        host::output(host::tool("qemu-io").args(["-f", "qcow2", "-c", "write 0 512"]).arg(&image))
    })?;
    ensure!(!theirs.status.success(), "QEMU wrote to an image that Bedplate had open");
    qemu_img(&["check", "-q", "-f", "qcow2"], &[&image])
}
