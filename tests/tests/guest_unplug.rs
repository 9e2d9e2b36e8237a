//! Disks that come and go while a guest runs.

use anyhow::{Result, ensure};
use bedplate_tests::fixture::Fixture;
use bedplate_tests::guest::{Assets, Vm, VmBuilder};
use std::time::Duration;

const WAIT_FOR_DISK: &str = "tries=0; while [ ! -b /dev/vda ] && [ $tries -lt 400 ]; do sleep 0.05; tries=$((tries + 1)); done; [ -b /dev/vda ]";

fn mount_and_read(vm: &mut Vm) -> Result<String> {
    vm.run(&format!("{WAIT_FOR_DISK}\nmount /dev/vda /mnt\nsha256sum < /mnt/file"))
}

#[test]
fn a_disk_can_be_unplugged_and_plugged_again() -> Result<()> {
    let Some(assets) = Assets::or_skip("a_disk_can_be_unplugged_and_plugged_again") else {
        return Ok(());
    };
    let fixture = Fixture::new("qcow2", "512M")?.queues(2);
    let server = fixture.serve()?;
    let mut vm = VmBuilder::new(&assets).hot_plug_slots(2).boot()?;
    let id = vm.plug(&fixture.disk(), 0)?;
    vm.run(&format!("{WAIT_FOR_DISK}\nmkfs.ext4 -q /dev/vda\nmount /dev/vda /mnt\ndd if=/dev/urandom of=/mnt/file bs=1M count=8 2>/dev/null"))?;
    let written = vm.run("sha256sum < /mnt/file\numount /mnt")?;
    vm.unplug(&id)?;
    vm.run("[ ! -b /dev/vda ]")?;
    // The server listens for the next front end: the disk comes back in another slot with all it held.
    let id = vm.plug(&fixture.disk(), 1)?;
    let read = mount_and_read(&mut vm)?;
    ensure!(read == written, "after the second plug the file reads as {read}, not {written}");

    // Pulling the disk out under a writer costs the guest its file system, and nothing else.
    vm.start("echo writing\ndd if=/dev/zero of=/mnt/big bs=1M count=200 conv=fsync 2>/dev/null")?;
    vm.wait_line("writing", Duration::from_secs(60))?;
    vm.unplug(&id)?;
    let reply = vm.finish(Duration::from_secs(120))?;
    ensure!(reply.code != 0, "a write to a disk that was pulled out succeeded");
    vm.sh("umount /mnt")?;
    vm.plug(&fixture.disk(), 0)?;
    let read = mount_and_read(&mut vm)?;
    ensure!(
        read == written,
        "after the disk was pulled out the flushed file reads as {read}, not {written}"
    );
    vm.run("umount /mnt")?;
    vm.power_off()?;
    server.stop()?;
    fixture.assert_clean()?;
    fixture.fsck("ext4")
}
