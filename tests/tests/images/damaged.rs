//! Images that were not closed cleanly.

use crate::harness::{Folder, noise, open, read, run, verify, write};
use crate::tools::{
    assert_clean, content, create, exercise, have_qemu, poke, qemu_io, qemu_writes,
};
use anyhow::{Context, Result, ensure};
use bedplate_tests::host;
use bedplate_tests::random::Random;
use bedplate_types::Format;

const SIZE: u64 = (4 << 20) + 512;

#[test]
fn a_dirty_image_gets_its_refcounts_back() -> Result<()> {
    if !have_qemu("a_dirty_image_gets_its_refcounts_back") {
        return Ok(());
    }
    for options in ["", "cluster_size=512,", "cluster_size=4096,refcount_bits=1,"] {
        let (folder, mut random) = (Folder::new()?, Random::new(77));
        let image = folder.path("image");
        create(&image, &format!("{options}lazy_refcounts=on"), SIZE)?;
        qemu_io(&image, Format::Qcow2, &qemu_writes(&mut random, 20, SIZE))?;
        let model = content(&image, Format::Qcow2)?;
        // As after a crash: no refcount past the first few was written.
        let table = u64::from_be_bytes(crate::tools::peek(&image, 48)?);
        let block = u64::from_be_bytes(crate::tools::peek(&image, table)?);
        poke(&image, block + 16, &[0; 200])?;
        poke(&image, 72, &1_u64.to_be_bytes())?;
        let tried = run(async || {
            let disk = open(&image).await?;
            verify(&disk, &model).await?;
            Ok(disk.close().await?)
        });
        tried.with_context(|| options.to_owned())?;
        assert_clean(&image)?;
        exercise(&[(&image, Format::Qcow2)], &mut random)?;
    }
    Ok(())
}

/// Bedplate's own memory ends, as when its process is killed: nothing but leaks, and what was flushed is there.
#[test]
fn an_image_that_was_dropped_without_closing_opens_again() -> Result<()> {
    if !have_qemu("an_image_that_was_dropped_without_closing_opens_again") {
        return Ok(());
    }
    for options in ["cluster_size=65536", "cluster_size=512", "cluster_size=4096,lazy_refcounts=on"]
    {
        let folder = Folder::new()?;
        let image = folder.path("image");
        create(&image, options, SIZE)?;
        let mut random = Random::new(78);
        let mut model = vec![0; SIZE as usize];
        for _ in 0..6 {
            run(async || {
                let disk = open(&image).await?;
                crate::harness::churn(&disk, &mut model, &mut random, 5).await?;
                disk.flush().await?;
                // Not flushed, so it may be lost: at a place that the next round writes first.
                write(&disk, SIZE - 4096, &noise(&mut random, 4096)).await
            })?;
            if !options.contains("lazy") {
                crate::tools::assert_not_corrupt(&image)?;
            }
            run(async || {
                let disk = open(&image).await?;
                let tail = read(&disk, SIZE - 4096, 4096).await?;
                model[SIZE as usize - 4096..].copy_from_slice(&tail);
                verify(&disk, &model).await
            })?;
        }
        run(async || Ok(open(&image).await?.close().await?))?;
        host::run(host::tool("qemu-img").args(["check", "-q", "-r", "leaks"]).arg(&image))?;
        assert_clean(&image)?;
        ensure!(content(&image, Format::Qcow2)? == model, "QEMU reads something else");
    }
    Ok(())
}
