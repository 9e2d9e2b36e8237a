//! fio writes at random over NBD, reads everything back and compares checksums.

use anyhow::{Result, ensure};
use bedplate_tests::fixture::Fixture;
use bedplate_tests::{host, skip};

fn verify(test: &str, fixture: Fixture, block: &str) -> Result<()> {
    if !host::run(host::tool("fio").arg("--enghelp")).is_ok_and(|engines| engines.contains("nbd")) {
        skip(test, "there is no fio with the engine nbd");
        return Ok(());
    }
    let fixture = fixture.over_nbd();
    let server = fixture.serve()?;
    let mut fio = host::tool("fio");
    fio.current_dir(fixture.folder());
    fio.args([
        "--name=verify",
        "--ioengine=nbd",
        "--rw=randwrite",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--do_verify=1",
    ]);
    fio.args([
        "--iodepth=16",
        "--size=48M",
        "--fsync=64",
        "--randseed=11",
        "--output-format=terse",
    ]);
    let text = host::run(
        fio.arg(format!("--uri={}", fixture.nbd_uri())).arg(format!("--bsrange={block}")),
    )?;
    ensure!(
        text.contains(";verify;0;") || text.split(';').nth(4) == Some("0"),
        "fio reports an error: {text}"
    );
    server.stop()?;
    fixture.assert_clean()
}

#[test]
fn fio_verifies_random_writes_to_qcow2() -> Result<()> {
    verify("fio_verifies_random_writes_to_qcow2", Fixture::new("qcow2", "64M")?, "4k-4k")
}

#[test]
fn fio_verifies_random_writes_to_raw() -> Result<()> {
    verify("fio_verifies_random_writes_to_raw", Fixture::new("raw", "64M")?, "4k-4k")
}

#[test]
fn fio_verifies_sector_sized_writes_to_qcow2() -> Result<()> {
    verify("fio_verifies_sector_sized_writes_to_qcow2", Fixture::new("qcow2", "64M")?, "512-16k")
}

#[test]
fn fio_verifies_buffered_writes_to_qcow2() -> Result<()> {
    verify(
        "fio_verifies_buffered_writes_to_qcow2",
        Fixture::new("qcow2", "64M")?.buffered(),
        "4k-4k",
    )
}
