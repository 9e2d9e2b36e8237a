//! The server of a running guest's disk is killed again and again while fio in the guest writes 32 requests at a time and
//! reads everything back: no checksum may be wrong, no request may fail or hang, and the image is clean at the end (I11).

use anyhow::{Context, Result, ensure};
use bedplate_tests::fixture::Fixture;
use bedplate_tests::guest::{Assets, VmBuilder};
use bedplate_tests::random::Random;
use bedplate_tests::{has_or_skip, host};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Each pass overwrites what the passes before wrote and goes on behind it. The tools' disk is the second one.
const PASSES: &str = r#"
mount -o ro /dev/vdb /mnt || exit 1
pass=1
while [ $pass -le PASSES ]; do
    echo "pass $pass begins"
    /mnt/lib/LOADER --library-path /mnt/lib /mnt/fio --name=pass$pass --thread --filename=/dev/vda --direct=1 \
        --ioengine=libaio --iodepth=32 --rw=randwrite --bs=4k --size=$((pass * STEP))M --randseed=$pass \
        --verify=crc32c --do_verify=1 --verify_fatal=1 --group_reporting --output-format=terse > /tmp/out 2>&1 \
        || { cat /tmp/out; exit 1; }
    pass=$((pass + 1))
done
dmesg | grep -i 'i/o error' && exit 1
echo "all verified"
"#;

/// A file system with fio, its libraries and their loader; returns the loader's name too.
fn tools(folder: &Path) -> Result<(PathBuf, String)> {
    let (tree, image) = (folder.join("tools"), folder.join("tools.ext4"));
    let lib = tree.join("lib");
    std::fs::create_dir_all(&lib)?;
    let fio = host::which("fio").context("no fio")?;
    std::fs::copy(&fio, tree.join("fio"))?;
    let mut loader = None;
    for word in host::run(host::tool("ldd").arg(&fio))?.split_whitespace() {
        let path = Path::new(word);
        let (true, Some(name)) = (path.is_absolute(), path.file_name()) else { continue };
        std::fs::copy(path, lib.join(name)).with_context(|| word.to_owned())?;
        let name = name.to_string_lossy().into_owned();
        if name.starts_with("ld-") {
            loader = Some(name);
        }
    }
    host::run(host::tool("mkfs.ext4").args(["-q", "-d"]).args([&tree, &image]).arg("256M"))?;
    std::fs::remove_dir_all(&tree)?;
    Ok((image, loader.context("fio has no loader")?))
}

/// How long a run is, and how often the server is killed.
struct Run {
    passes: u64,
    /// MiB by which each pass is longer than the one before.
    step: u64,
    kills_a_pass: u64,
    seed: u64,
}

fn survive(test: &str, run: &Run) -> Result<()> {
    let Some(assets) = Assets::or_skip(test) else { return Ok(()) };
    if !has_or_skip(test, "fio") || !has_or_skip(test, "mkfs.ext4") {
        return Ok(());
    }
    let fixture = Fixture::new("qcow2", "1G")?.queues(2);
    let (image, loader) = tools(fixture.folder())?;
    let mut server = fixture.serve()?;
    let mut vm = VmBuilder::new(&assets).disk(fixture.disk()).tools(&image).boot()?;
    let script = PASSES.replace("PASSES", &run.passes.to_string()).replace("LOADER", &loader);
    vm.start(&script.replace("STEP", &run.step.to_string()))?;
    let mut random = Random::new(run.seed);
    for pass in 1..=run.passes {
        vm.wait_line(&format!("pass {pass} begins"), Duration::from_secs(300))?;
        for _ in 0..run.kills_a_pass {
            // Not to wait for anything, but to kill at a random moment.
            std::thread::sleep(Duration::from_millis(100 + random.below(1500)));
            server.kill()?;
            server = fixture.serve()?;
        }
    }
    let reply = vm.finish(Duration::from_secs(600))?;
    ensure!(
        reply.code == 0 && reply.output.contains("all verified"),
        "the guest ended with {}:\n{}\nthe server's log:\n{}",
        reply.code,
        reply.output,
        server.log()
    );
    vm.power_off()?;
    server.stop()?;
    fixture.assert_clean()?;
    ensure!(fixture.state_files()?.is_empty(), "a clean end leaves state behind");
    Ok(())
}

#[test]
fn i11_a_guest_verifies_its_writes_through_kills_of_the_server() -> Result<()> {
    let run = Run { passes: 2, step: 6, kills_a_pass: 2, seed: 0x11 };
    survive("i11_a_guest_verifies_its_writes_through_kills_of_the_server", &run)
}

#[test]
#[ignore = "takes minutes"]
fn i11_a_guest_verifies_its_writes_through_twenty_four_kills_of_the_server() -> Result<()> {
    let test = "i11_a_guest_verifies_its_writes_through_twenty_four_kills_of_the_server";
    survive(test, &Run { passes: 6, step: 4, kills_a_pass: 4, seed: 0x20 })
}
