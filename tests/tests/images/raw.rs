//! Raw files and block devices: lengths that fit no sector, devices of large sectors, requests of a thousand pieces.

use crate::harness::{Folder, churn, noise, open_chain, read, run, same, verify, write};
use crate::tools::{create, exercise, have_qemu, qemu_io, qemu_writes};
use anyhow::{Context, Result, ensure};
use bedplate_runtime::buf::{IoVec, SharedBuf};
use bedplate_tests::random::Random;
use bedplate_tests::{host, skip};
use bedplate_types::{Format, GuestOffset};
use std::path::{Path, PathBuf};

#[test]
fn raw_files_of_any_length_are_read_and_written_to_the_last_byte() -> Result<()> {
    for length in [1, 511, 512, 100_001, (3 << 20) + 4096 + 17] {
        let (folder, mut random) = (Folder::new()?, Random::new(length as u64));
        let file = folder.path("raw");
        let mut model = noise(&mut random, length);
        std::fs::write(&file, &model)?;
        let chain = [(&*file, Format::Raw)];
        run(async || {
            let disk = open_chain(&chain, false).await?;
            verify(&disk, &model).await?;
            churn(&disk, &mut model, &mut random, 20).await?;
            verify(&disk, &model).await?;
            Ok(disk.close().await?)
        })
        .with_context(|| format!("a file of {length} bytes"))?;
        // The last sector may have been filled up.
        same(&model, &std::fs::read(&file)?)
            .with_context(|| format!("a file of {length} bytes"))?;
    }
    Ok(())
}

/// A loop device with sectors of 4096 bytes, full of noise, under a name in the test's folder.
struct Device {
    name: PathBuf,
    device: String,
}

impl Device {
    fn new(folder: &Folder, random: &mut Random) -> Result<Device> {
        let file = folder.path("device-content");
        std::fs::write(&file, noise(random, 16 << 20))?;
        let mut setup = host::tool("losetup");
        setup.args(["--find", "--show", "--sector-size", "4096", "--direct-io=on"]);
        let device = host::run(setup.arg(&file))?.trim().to_owned();
        let device = Device { name: folder.path("device"), device };
        std::os::unix::fs::symlink(&device.device, &device.name)?;
        Ok(device)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // The kernel lets it go with its last user, whatever becomes of this.
        let _ = host::run(host::tool("losetup").args(["--detach", &self.device]));
    }
}

fn have_devices(test: &str) -> bool {
    let have = host::is_root()
        && host::which("losetup").is_some()
        && Path::new("/dev/loop-control").exists();
    if !have {
        skip(test, "loop devices need root, losetup and /dev/loop-control");
    }
    have
}

#[test]
fn images_on_a_device_of_large_sectors_are_read_and_written() -> Result<()> {
    const TEST: &str = "images_on_a_device_of_large_sectors_are_read_and_written";
    if !have_devices(TEST) || !have_qemu(TEST) {
        return Ok(());
    }
    for options in ["cluster_size=65536", "cluster_size=4096,lazy_refcounts=on", "cluster_size=512"]
    {
        let (folder, mut random) = (Folder::new()?, Random::new(600));
        let device = Device::new(&folder, &mut random)?;
        let size = (4 << 20) + 512;
        create(&device.name, options, size)?;
        qemu_io(&device.name, Format::Qcow2, &qemu_writes(&mut random, 15, size))?;
        exercise(&[(&device.name, Format::Qcow2)], &mut random).context(options)?;
    }
    Ok(())
}

/// A thousand pieces, none of them aligned, ended in an error of the host elsewhere.
#[test]
fn a_request_of_a_thousand_pieces_that_fits_no_sector_is_carried_out() -> Result<()> {
    if !have_devices("a_request_of_a_thousand_pieces_that_fits_no_sector_is_carried_out") {
        return Ok(());
    }
    let (folder, mut random) = (Folder::new()?, Random::new(601));
    let device = Device::new(&folder, &mut random)?;
    let bytes = noise(&mut random, 1024 * 512);
    let mut pieces = IoVec::default();
    for piece in bytes.chunks(512) {
        let buf = SharedBuf::zeroed(1024)?.iovec().slice(256, 512);
        buf.copy_from(0, piece);
        pieces.append(buf);
    }
    ensure!(pieces.segments() == 1024);
    run(async || {
        let disk = open_chain(&[(&device.name, Format::Raw)], false).await?;
        write(&disk, 0, &[1; 1 << 20]).await?;
        disk.write(GuestOffset::new(512), pieces.clone(), true).await?;
        let expected = [&[1; 512][..], &bytes, &[1; 512]].concat();
        same(&expected, &read(&disk, 0, expected.len()).await?)?;
        pieces.fill(0, pieces.len(), 0);
        disk.read(GuestOffset::new(512), pieces.clone()).await?;
        let mut got = vec![0; bytes.len()];
        pieces.copy_to(0, &mut got);
        same(&bytes, &got)?;
        Ok(disk.close().await?)
    })
}
