//! Many threads on one image, which is small so that what one frees another takes.

use crate::harness::{FileDisk, Folder, noise, open, read, run, same, verify, write};
use crate::tools::{assert_clean, content, create, have_qemu};
use anyhow::{Context, Result};
use bedplate_storage::ZeroMode;
use bedplate_tests::host;
use bedplate_tests::random::Random;
use bedplate_types::{ByteLen, Format, GuestOffset};
use std::sync::Arc;

const THREADS: usize = 4;
const BLOCK: usize = 4096;
const BLOCKS: usize = 1024;

/// One thread's blocks lie between those of the others: `model` holds them one after another.
async fn load(disk: &FileDisk, thread: usize, model: &mut [u8]) -> Result<()> {
    let mut random = Random::new(thread as u64 + 1000);
    let mode = ZeroMode { unmap: true, fast_only: false };
    for _ in 0..700 {
        let block = random.below((BLOCKS / THREADS) as u64) as usize;
        let at = ((block * THREADS + thread) * BLOCK) as u64;
        let (start, length) = (GuestOffset::new(at), ByteLen::from(BLOCK));
        let own = &mut model[block * BLOCK..][..BLOCK];
        match random.below(8) {
            0 => disk.flush().await?,
            // Clusters as large as a block: a discard gives this very block back.
            1 | 2 => {
                disk.discard(start, length).await?;
                own.fill(0);
            }
            3 => {
                disk.write_zeroes(start, length, mode).await?;
                own.fill(0);
            }
            _ => {
                own.copy_from_slice(&noise(&mut random, BLOCK));
                write(disk, at, own).await?;
            }
        }
        same(own, &read(disk, at, BLOCK).await?).with_context(|| format!("block at {at}"))?;
    }
    Ok(())
}

fn pound(options: &str) -> Result<()> {
    let folder = Folder::new()?;
    let image = folder.path("image");
    create(&image, options, (BLOCK * BLOCKS) as u64)?;
    let disk = run(async || Ok(Arc::new(open(&image).await?)))?;
    let mut parts = vec![vec![0; BLOCK * BLOCKS / THREADS]; THREADS];
    std::thread::scope(|scope| -> Result<()> {
        let threads: Vec<_> = parts
            .iter_mut()
            .enumerate()
            .map(|(thread, model)| {
                let disk = &disk;
                scope.spawn(move || run(async || load(disk, thread, model).await))
            })
            .collect();
        for thread in threads {
            thread.join().expect("no panic")?;
        }
        Ok(())
    })?;
    let mut model = vec![0; BLOCK * BLOCKS];
    for (index, block) in model.chunks_mut(BLOCK).enumerate() {
        block.copy_from_slice(&parts[index % THREADS][index / THREADS * BLOCK..][..BLOCK]);
    }
    run(async || {
        verify(&disk, &model).await?;
        Ok(disk.close().await?)
    })?;
    drop(disk);
    host::files_are_closed();
    assert_clean(&image)?;
    same(&model, &content(&image, Format::Qcow2)?)
}

/// A hole punched late erased a cluster that had been given to another queue's table meanwhile: production data was lost
/// elsewhere.
#[test]
fn discards_writes_and_flushes_of_many_threads_leave_each_others_blocks_alone() -> Result<()> {
    if !have_qemu("discards_writes_and_flushes_of_many_threads_leave_each_others_blocks_alone") {
        return Ok(());
    }
    for options in ["cluster_size=4096", "cluster_size=4096,lazy_refcounts=on", "cluster_size=512"]
    {
        pound(options).context(options)?;
    }
    Ok(())
}
