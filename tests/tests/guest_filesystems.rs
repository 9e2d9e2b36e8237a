//! Real guests make file systems, fill them, trim them and power off; then the host checks what is left.

use anyhow::{Result, ensure};
use bedplate_tests::fixture::Fixture;
use bedplate_tests::guest::{Assets, VmBuilder};

/// Fills the file system until there is no more space, reads all of it back, deletes it, trims, and leaves one small file.
/// `$1` is the device, `$2` the file system.
const FILL: &str = r#"
fill() {
    mkfs.$2 -q "$1"
    mount "$1" /mnt
    dd if=/dev/urandom of=/tmp/seed bs=1M count=8 2>/dev/null
    count=0
    while cp /tmp/seed /mnt/fill$count 2>/dev/null; do count=$((count + 1)); done
    rm /mnt/fill$count
    sync
    echo 3 > /proc/sys/vm/drop_caches
    index=0
    while [ $index -lt $count ]; do cmp /tmp/seed /mnt/fill$index; index=$((index + 1)); done
    [ $count -ge 18 ]
    echo "filled with $count files"
}
trim() {
    rm /mnt/fill*
    sync
    fstrim -v /mnt
    cp /tmp/seed /mnt/kept
    sync
    echo 3 > /proc/sys/vm/drop_caches
    cmp /tmp/seed /mnt/kept
    umount /mnt
}
"#;

fn fill_trim_and_check(test: &str, format: &str) -> Result<()> {
    let Some(assets) = Assets::or_skip(test) else { return Ok(()) };
    let ext4 = Fixture::new(format, "192M")?;
    let xfs = Fixture::new(format, "304M")?;
    let (server_a, server_b) = (ext4.serve()?, xfs.serve()?);
    let mut vm = VmBuilder::new(&assets).disk(ext4.disk()).disk(xfs.disk()).boot()?;
    for (fixture, device, kind) in [(&ext4, "/dev/vda", "ext4"), (&xfs, "/dev/vdb", "xfs")] {
        vm.run(&format!("{FILL}\nfill {device} {kind}"))?;
        let full = fixture.allocated()?;
        vm.run(&format!("{FILL}\ntrim"))?;
        let trimmed = fixture.allocated()?;
        ensure!(full >= 150 << 20, "the full {kind} takes only {full} bytes of the host's disk");
        ensure!(
            trimmed < full / 2,
            "trimming gave nothing back: {full} bytes before, {trimmed} after ({kind})"
        );
    }
    vm.power_off()?;
    server_a.stop()?;
    server_b.stop()?;
    for (fixture, kind) in [(&ext4, "ext4"), (&xfs, "xfs")] {
        fixture.assert_clean()?;
        fixture.fsck(kind)?;
    }
    Ok(())
}

#[test]
fn a_guest_fills_and_trims_file_systems_on_qcow2() -> Result<()> {
    fill_trim_and_check("a_guest_fills_and_trims_file_systems_on_qcow2", "qcow2")
}

#[test]
fn a_guest_fills_and_trims_file_systems_on_raw() -> Result<()> {
    fill_trim_and_check("a_guest_fills_and_trims_file_systems_on_raw", "raw")
}
