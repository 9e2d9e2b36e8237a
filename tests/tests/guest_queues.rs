//! A guest whose disk has two queues, and what the guest is told about the disk.

use anyhow::{Result, ensure};
use bedplate_tests::fixture::Fixture;
use bedplate_tests::guest::{Assets, VmBuilder};
use bedplate_tests::host;
use std::time::Duration;

#[test]
fn two_queues_carry_two_writers_at_once() -> Result<()> {
    let Some(assets) = Assets::or_skip("two_queues_carry_two_writers_at_once") else {
        return Ok(());
    };
    let fixture = Fixture::new("qcow2", "512M")?.queues(2);
    let server = fixture.serve()?;
    let mut vm = VmBuilder::new(&assets).disk(fixture.disk()).boot()?;
    let seen = vm.run("ls -d /sys/block/vda/mq/* | wc -l; cat /sys/block/vda/queue/write_cache /sys/block/vda/size")?;
    let lines: Vec<&str> = seen.lines().map(str::trim).collect();
    ensure!(lines == ["2", "write back", "1048576"], "queues, cache and sectors are {lines:?}");
    // Each writer stays on its CPU, and so on its queue; they write every other 64 KiB, so they meet in the same L2 tables.
    vm.run(
        r#"
cat > /tmp/writer <<'END'
cpu=$1
dd if=/dev/urandom of=/tmp/seed$cpu bs=64k count=64 2>/dev/null
round=0
while [ $round -lt 64 ]; do
    dd if=/tmp/seed$cpu of=/dev/vda bs=64k count=1 skip=$round seek=$((2 * round + cpu)) oflag=direct conv=notrunc 2>/dev/null || exit 1
    round=$((round + 1))
done
END
taskset 1 sh /tmp/writer 0 & first=$!
taskset 2 sh /tmp/writer 1 & second=$!
wait $first
wait $second
dd if=/dev/null of=/dev/vda bs=1 count=0 conv=notrunc,fsync 2>/dev/null
for cpu in 0 1; do
    round=0
    while [ $round -lt 64 ]; do
        dd if=/tmp/seed$cpu bs=64k count=1 skip=$round of=/tmp/want 2>/dev/null
        dd if=/dev/vda bs=64k count=1 skip=$((2 * round + cpu)) iflag=direct of=/tmp/got 2>/dev/null
        cmp /tmp/want /tmp/got
        round=$((round + 1))
    done
done
"#,
    )?;
    vm.power_off()?;
    server.stop()?;
    fixture.assert_clean()
}

#[test]
fn a_guest_trims_and_reads_zeroes_back() -> Result<()> {
    let Some(assets) = Assets::or_skip("a_guest_trims_and_reads_zeroes_back") else {
        return Ok(());
    };
    let fixture = Fixture::new("qcow2", "256M")?;
    let server = fixture.serve()?;
    let mut vm = VmBuilder::new(&assets).disk(fixture.disk()).boot()?;
    vm.run(
        "dd if=/dev/urandom of=/dev/vda bs=1M count=64 oflag=direct conv=notrunc,fsync 2>/dev/null",
    )?;
    let full = fixture.allocated()?;
    ensure!(full >= 64 << 20, "64 MiB were written and {full} bytes are allocated");
    vm.run(
        r#"
blkdiscard /dev/vda -o 1048576 -l 33554432
blkdiscard -z /dev/vda -o 41943040 -l 8388608
dd if=/dev/zero of=/tmp/zeroes bs=1M count=8 2>/dev/null
dd if=/dev/vda of=/tmp/got bs=1M skip=40 count=8 iflag=direct 2>/dev/null
cmp /tmp/zeroes /tmp/got
dd if=/dev/vda of=/tmp/got bs=1M skip=39 count=1 iflag=direct 2>/dev/null
! cmp -s -n 1048576 /tmp/zeroes /tmp/got
# Space goes back to the host once its removal is durable: with the next flush, or some seconds later.
dd if=/dev/urandom of=/dev/vda bs=4k count=1 oflag=direct conv=notrunc,fsync 2>/dev/null
"#,
    )?;
    let freed = || Ok((fixture.allocated()? <= full - (30 << 20)).then_some(()));
    host::wait_for("the trimmed space to be free on the host", Duration::from_secs(20), freed)?;
    vm.power_off()?;
    server.stop()?;
    fixture.assert_clean()
}
