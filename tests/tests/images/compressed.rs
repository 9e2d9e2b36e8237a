//! Compressed clusters that Bedplate writes, read by QEMU and taken through everything else.

use crate::harness::{FileDisk, Folder, churn, memory, noise, open, open_chain, run, same, verify};
use crate::tools::{assert_clean, content, create, create_over, have_qemu, qemu_io};
use anyhow::{Context, Result, ensure};
use bedplate_tests::random::Random;
use bedplate_types::{ByteLen, ErrorKind, Format, GuestOffset};
use futures_util::future::join_all;

/// No multiple of any cluster size but the smallest.
const SIZE: usize = (2 << 20) + 512 * 7;

/// Content of which a part can be compressed: some sectors are noise, the others repeat a byte.
fn mixed(random: &mut Random, len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len);
    let mut rough = false;
    while bytes.len() < len {
        if random.below(20) == 0 {
            rough = !rough;
        }
        if rough {
            bytes.extend(noise(random, 512));
        } else {
            bytes.resize(bytes.len() + 512, random.below(256) as u8);
        }
    }
    bytes.truncate(len);
    bytes
}

/// Writes the whole disk compressed, in several requests at once.
async fn fill(disk: &FileDisk, model: &[u8]) -> Result<()> {
    let cluster = disk.qcow2().context("a qcow2 image")?.cluster_size().get() as usize;
    let step = (model.len() / 5).next_multiple_of(cluster);
    let writes = model.chunks(step).enumerate().map(|(index, part)| async move {
        let at = GuestOffset::new((index * step) as u64);
        Ok(disk.write_compressed(at, memory(part)?).await?)
    });
    join_all(writes).await.into_iter().collect()
}

/// Filled, read by QEMU, overwritten here and there, given up, and filled again.
fn take_through(options: &str, seed: u64) -> Result<()> {
    let (folder, mut random) = (Folder::new()?, Random::new(seed));
    let image = folder.path("image");
    create(&image, options, SIZE as u64)?;
    let mut model = mixed(&mut random, SIZE);
    run(async || {
        let disk = open(&image).await?;
        fill(&disk, &model).await?;
        verify(&disk, &model).await.context("reading back before the close")?;
        Ok(disk.close().await?)
    })?;
    assert_clean(&image)?;
    same(&model, &content(&image, Format::Qcow2)?).context("reading by QEMU what was packed")?;
    run(async || {
        let disk = open(&image).await?;
        churn(&disk, &mut model, &mut random, 10).await?;
        verify(&disk, &model).await.context("after overwriting")?;
        Ok(disk.close().await?)
    })?;
    assert_clean(&image).context("after overwriting")?;
    same(&model, &content(&image, Format::Qcow2)?)
        .context("reading by QEMU what was overwritten")?;
    run(async || {
        let disk = open(&image).await?;
        disk.discard(GuestOffset::ZERO, ByteLen::from(SIZE)).await?;
        disk.flush().await?;
        model = mixed(&mut random, SIZE);
        fill(&disk, &model).await?;
        verify(&disk, &model).await.context("after filling again")?;
        Ok(disk.close().await?)
    })?;
    assert_clean(&image).context("after filling again")?;
    same(&model, &content(&image, Format::Qcow2)?)
}

#[test]
fn packed_clusters_of_every_kind_of_image_are_read_by_qemu() -> Result<()> {
    if !have_qemu("packed_clusters_of_every_kind_of_image_are_read_by_qemu") {
        return Ok(());
    }
    let variants = [
        "cluster_size=512",
        "cluster_size=512,refcount_bits=1",
        "cluster_size=4096,refcount_bits=2,compression_type=zstd",
        "cluster_size=4096,compat=0.10",
        "cluster_size=65536,refcount_bits=1",
        "cluster_size=65536,lazy_refcounts=on",
        "cluster_size=65536,compression_type=zstd",
        "cluster_size=65536,extended_l2=on",
        "cluster_size=2M,refcount_bits=64",
        "cluster_size=2M,compression_type=zstd",
    ];
    for (seed, options) in variants.into_iter().enumerate() {
        take_through(options, seed as u64 + 5)
            .with_context(|| format!("an image with {options}"))?;
    }
    Ok(())
}

#[test]
fn packed_clusters_lie_close_together_and_incompressible_ones_are_plain() -> Result<()> {
    if !have_qemu("packed_clusters_lie_close_together_and_incompressible_ones_are_plain") {
        return Ok(());
    }
    let (folder, mut random) = (Folder::new()?, Random::new(1));
    let image = folder.path("image");
    create(&image, "cluster_size=65536", 8 << 20)?;
    let smooth = vec![7; 4 << 20];
    let rough = noise(&mut random, 1 << 20);
    run(async || {
        let disk = open(&image).await?;
        // One cluster a request: the next goes on where the one before ended.
        for (index, part) in smooth.chunks(65536).enumerate() {
            let at = GuestOffset::new((index * 65536) as u64);
            disk.write_compressed(at, memory(part)?).await?;
        }
        disk.flush().await?;
        disk.write_compressed(GuestOffset::new(4 << 20), memory(&rough)?).await?;
        Ok(disk.close().await?)
    })?;
    let length = std::fs::metadata(&image)?.len();
    // Header, two tables, a refcount block, an L2 table, one cluster for all that was packed, and sixteen plain ones.
    ensure!(length <= 22 * 65536, "the file has {length} bytes");
    assert_clean(&image)?;
    let model = [smooth, rough, vec![0; 3 << 20]].concat();
    same(&model, &content(&image, Format::Qcow2)?)
}

#[test]
fn both_programs_pack_into_one_image() -> Result<()> {
    if !have_qemu("both_programs_pack_into_one_image") {
        return Ok(());
    }
    for options in ["cluster_size=65536", "cluster_size=4096,compression_type=zstd"] {
        let folder = Folder::new()?;
        let image = folder.path("image");
        create(&image, options, 1 << 20)?;
        qemu_io(&image, Format::Qcow2, &["write -c -P 1 0 128k", "write -P 9 512k 3k"])?;
        run(async || {
            let disk = open(&image).await?;
            disk.write_compressed(GuestOffset::new(128 << 10), memory(&[2; 128 << 10])?).await?;
            Ok(disk.close().await?)
        })?;
        qemu_io(&image, Format::Qcow2, &["write -c -P 3 256k 128k", "write -P 4 100k 64k"])?;
        assert_clean(&image)?;
        let commands =
            ["read -P 1 0 100k", "read -P 4 100k 64k", "read -P 2 164k 92k", "read -P 3 256k 128k"];
        let model = content(&image, Format::Qcow2)?;
        qemu_io(&image, Format::Qcow2, &commands)?;
        run(async || verify(&open(&image).await?, &model).await)?;
    }
    Ok(())
}

#[test]
fn only_what_holds_nothing_is_written_compressed() -> Result<()> {
    if !have_qemu("only_what_holds_nothing_is_written_compressed") {
        return Ok(());
    }
    let folder = Folder::new()?;
    let (image, base) = (folder.path("image"), folder.path("base"));
    create(&base, "cluster_size=65536", 1 << 20)?;
    qemu_io(&base, Format::Qcow2, &["write -P 1 0 1M"])?;
    create_over(&image, "cluster_size=65536", 1 << 20, (&base, Format::Qcow2))?;
    qemu_io(
        &image,
        Format::Qcow2,
        &["write -P 2 64k 512", "write -z 128k 64k", "write -c 192k 64k"],
    )?;
    run(async || {
        let disk = open_chain(&[(&image, Format::Qcow2), (&base, Format::Qcow2)], false).await?;
        let cluster = vec![5; 65536];
        for (at, len, good) in [
            (0, 65536, true),        // shows what lies below
            (65536, 65536, false),   // holds data
            (131_072, 65536, true),  // is zero, without space
            (196_608, 65536, false), // holds compressed data
            (262_144, 32768, false), // not a whole cluster
            (262_656, 65536, false), // not where one begins
            (0, 65536, false),       // now it holds something
        ] {
            let result =
                disk.write_compressed(GuestOffset::new(at), memory(&cluster[..len])?).await;
            match result {
                Ok(()) => ensure!(good, "a write at {at} was not refused"),
                Err(e) => ensure!(!good && e.kind() == ErrorKind::InvalidInput, "at {at}: {e:#}"),
            }
        }
        Ok(disk.close().await?)
    })?;
    assert_clean(&image)?;
    let commands = [
        "read -P 5 0 64k",
        "read -P 2 64k 512",
        "read -P 1 65k 63k",
        "read -P 5 128k 64k",
        "read -P 1 256k 512k",
    ];
    qemu_io(&image, Format::Qcow2, &commands)
}

#[test]
fn a_cluster_that_lost_all_that_was_packed_into_it_is_not_packed_into_again() -> Result<()> {
    let test = "a_cluster_that_lost_all_that_was_packed_into_it_is_not_packed_into_again";
    if !have_qemu(test) {
        return Ok(());
    }
    const CLUSTER: usize = 2 << 20;
    let (folder, mut random) = (Folder::new()?, Random::new(3));
    let image = folder.path("image");
    create(&image, "cluster_size=2M", 16 * CLUSTER as u64)?;
    let place = |index: usize| GuestOffset::new((index * CLUSTER) as u64);
    let mut model = vec![0; 16 * CLUSTER];
    run(async || {
        let disk = open(&image).await?;
        disk.write_compressed(place(0), memory(&vec![1; CLUSTER])?).await?;
        disk.discard(place(0), ByteLen::from(CLUSTER)).await?;
        disk.flush().await?;
        // More than a lease, so that the freed cluster comes round again.
        for index in 1..10 {
            let data = noise(&mut random, CLUSTER);
            disk.write(place(index), memory(&data)?, false).await?;
            model[index * CLUSTER..][..CLUSTER].copy_from_slice(&data);
        }
        disk.write_compressed(place(12), memory(&vec![2; CLUSTER])?).await?;
        model[12 * CLUSTER..][..CLUSTER].fill(2);
        verify(&disk, &model).await?;
        Ok(disk.close().await?)
    })?;
    assert_clean(&image)?;
    same(&model, &content(&image, Format::Qcow2)?)
}
