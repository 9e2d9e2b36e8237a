//! Images laid out by Bedplate are what QEMU expects.

use crate::harness::{Folder, memory, run};
use crate::tools::{assert_clean, content, exercise, have_qemu, qemu_io, qemu_writes};
use anyhow::{Context, Result, ensure};
use bedplate_qcow2::format::{CompressionType, NewImage};
use bedplate_storage::{FileStorage, OpenOptions, Storage};
use bedplate_tests::random::Random;
use bedplate_types::{ByteLen, Format};
use std::path::Path;

fn make(image: &Path, new: &NewImage) -> Result<()> {
    let layout = new.layout()?;
    run(async || {
        let storage = FileStorage::create(&OpenOptions::new(image), layout.file_len)?;
        for (at, bytes) in &layout.writes {
            storage.write(*at, memory(bytes)?).await?;
        }
        Ok(storage.sync().await?)
    })
}

fn kinds() -> Vec<NewImage> {
    let size = ByteLen::new((5 << 20) + 512);
    let base = NewImage { size, ..NewImage::default() };
    let mut kinds: Vec<NewImage> =
        (9..=21).map(|bits| NewImage { cluster_size: 1 << bits, ..base.clone() }).collect();
    kinds.extend((0..=6).map(|order| NewImage {
        refcount_bits: 1 << order,
        cluster_size: 512,
        ..base.clone()
    }));
    kinds.push(NewImage { version: 2, ..base.clone() });
    kinds.push(NewImage { lazy_refcounts: true, ..base.clone() });
    kinds.push(NewImage { compression_type: CompressionType::Zstd, ..base });
    kinds
}

#[test]
fn an_image_of_each_kind_is_clean_and_equal_for_qemu() -> Result<()> {
    if !have_qemu("an_image_of_each_kind_is_clean_and_equal_for_qemu") {
        return Ok(());
    }
    for (seed, new) in kinds().iter().enumerate() {
        let (folder, mut random) = (Folder::new()?, Random::new(seed as u64 + 300));
        let image = folder.path("image");
        let tried = (|| {
            make(&image, new)?;
            assert_clean(&image)?;
            let empty = content(&image, Format::Qcow2)?;
            ensure!(ByteLen::from(empty.len()) == new.size, "QEMU sees {} bytes", empty.len());
            ensure!(empty.iter().all(|byte| *byte == 0), "a new image is not empty");
            if seed % 2 == 0 {
                qemu_io(&image, Format::Qcow2, &qemu_writes(&mut random, 15, new.size.get()))?;
            }
            exercise(&[(&image, Format::Qcow2)], &mut random)
        })();
        tried.with_context(|| format!("{new:?}"))?;
    }
    Ok(())
}
