//! One side of the connection dies and comes back: the server under a running guest, and the guest under a running server.

use anyhow::{Context, Result, ensure};
use bedplate_tests::fixture::Fixture;
use bedplate_tests::guest::{Assets, VmBuilder};
use std::time::Duration;

/// Writes 64 KiB of new random bytes at a time, flushes, and notes the checksum only then.
const WRITER: &str = r#"
index=0
while [ $index -lt 80 ]; do
    dd if=/dev/urandom of=/tmp/piece bs=64k count=1 2>/dev/null
    dd if=/tmp/piece of=/dev/vda bs=64k seek=$((index * 3)) oflag=direct conv=notrunc,fsync 2>/tmp/error || { cat /tmp/error; exit 1; }
    sha256sum < /tmp/piece >> /tmp/sums
    index=$((index + 1))
    echo "written $index"
done
"#;

const VERIFIER: &str = r#"
index=0
while read -r sum rest; do
    dd if=/dev/vda of=/tmp/piece bs=64k count=1 skip=$((index * 3)) iflag=direct 2>/dev/null
    sha256sum < /tmp/piece | grep -q "$sum" || { echo "piece $index is wrong"; exit 1; }
    index=$((index + 1))
done < /tmp/sums
echo "$index pieces"
"#;

fn kill_server_under_writer(test: &str, format: &str) -> Result<()> {
    let Some(assets) = Assets::or_skip(test) else { return Ok(()) };
    let fixture = Fixture::new(format, "512M")?;
    let mut server = fixture.serve()?;
    let mut vm = VmBuilder::new(&assets).disk(fixture.disk()).boot()?;
    vm.start(WRITER)?;
    for pieces in [10, 30, 50] {
        vm.wait_line(&format!("written {pieces}"), Duration::from_secs(120))?;
        server.kill()?;
        fixture
            .assert_not_corrupt()
            .with_context(|| format!("after the kill at piece {pieces}"))?;
        server = fixture.serve()?;
    }
    let reply = vm.finish(Duration::from_secs(180))?;
    ensure!(reply.code == 0, "the guest's writer failed with {}:\n{}", reply.code, reply.output);
    let verified = vm.run(VERIFIER)?;
    ensure!(verified == "80 pieces", "the guest verified {verified}");
    vm.power_off()?;
    server.stop()?;
    fixture.assert_not_corrupt()
}

#[test]
fn flushed_writes_to_qcow2_outlive_a_killed_server() -> Result<()> {
    kill_server_under_writer("flushed_writes_to_qcow2_outlive_a_killed_server", "qcow2")
}

#[test]
fn flushed_writes_to_raw_outlive_a_killed_server() -> Result<()> {
    kill_server_under_writer("flushed_writes_to_raw_outlive_a_killed_server", "raw")
}

#[test]
fn a_killed_guest_leaves_the_server_ready_for_the_next() -> Result<()> {
    let Some(assets) = Assets::or_skip("a_killed_guest_leaves_the_server_ready_for_the_next")
    else {
        return Ok(());
    };
    let fixture = Fixture::new("qcow2", "512M")?.queues(2);
    let server = fixture.serve()?;
    let mut vm = VmBuilder::new(&assets).disk(fixture.disk()).boot()?;
    let sum = vm.run("mkfs.ext4 -q /dev/vda\nmount /dev/vda /mnt\ndd if=/dev/urandom of=/mnt/file bs=1M count=8 conv=fsync 2>/dev/null\nsha256sum < /mnt/file")?;
    vm.start("echo writing\nwhile true; do dd if=/dev/urandom of=/mnt/other bs=64k count=64 conv=notrunc 2>/dev/null; done")?;
    vm.wait_line("writing", Duration::from_secs(60))?;
    vm.kill()?;
    // The same server serves the next guest, which finds what was flushed and a file system that its journal can mend.
    let mut vm = VmBuilder::new(&assets).disk(fixture.disk()).boot()?;
    let read = vm.run("mount /dev/vda /mnt\nsha256sum < /mnt/file\numount /mnt")?;
    ensure!(read == sum, "after the first guest was killed the file reads as {read}, not {sum}");
    vm.power_off()?;
    server.stop()?;
    fixture.assert_clean()?;
    fixture.fsck("ext4")
}
