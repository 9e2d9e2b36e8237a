//! `bedplate check`.

use super::{Bench, poke};
use anyhow::{Result, ensure};
use bedplate_tests::{has_or_skip, host};

#[test]
fn json_and_exit_codes_are_qemu_imgs() -> Result<()> {
    if !has_or_skip("json_and_exit_codes_are_qemu_imgs", "qemu-img") {
        return Ok(());
    }
    let bench = Bench::new()?;
    let image = bench.path("a.qcow2");
    // 64 KiB clusters: refcount block at 2, L1 table at 3, L2 table at 4, data from 5 on.
    let cluster = |n: u64| n << 16;
    for (what, at, bytes, code) in [
        ("clean", 0, &[][..], 0),
        ("leak", cluster(2) + 2 * 40, &[0, 1], 3),
        ("corruption", cluster(2) + 2 * 5, &[0, 0], 2),
    ] {
        bench.tool("qemu-img", &["create", "-q", "-f", "qcow2", "a.qcow2", "8M"])?;
        bench.tool("qemu-io", &["-f", "qcow2", "-c", "write 0 256k", "a.qcow2"])?;
        bench.tool("qemu-io", &["-f", "qcow2", "-c", "write -c 1M 64k", "a.qcow2"])?;
        // Only clusters inside the file are looked at.
        std::fs::File::options().write(true).open(&image)?.set_len(cluster(50))?;
        poke(&image, at, bytes)?;
        let before = bench.snapshot()?;
        let ours = bench.run(&["check", "--json", "a.qcow2"])?;
        let text = bench.run(&["check", "a.qcow2"])?;
        ensure!(bench.snapshot()? == before, "{what}: a check changed the image");
        let mut peer = host::tool("qemu-img");
        let peer = host::output(peer.args(["check", "--output=json"]).arg(&image))?;
        assert_eq!((ours.code, text.code, peer.status.code()), (code, code, Some(code)), "{what}");
        let mut theirs: serde_json::Value = serde_json::from_slice(&peer.stdout)?;
        theirs["filename"] = "a.qcow2".into();
        assert_eq!(ours.json()?, theirs, "{what}");
        let word = ["No errors", "", "CORRUPT", "LEAK"][code as usize];
        ensure!(text.out.contains(word), "{what}: {}", text.out);
    }
    Ok(())
}

#[test]
fn raw_images_cannot_be_checked() -> Result<()> {
    let bench = Bench::new()?;
    bench.run(&["create", "a.raw", "1M"])?.ok()?;
    bench.refuses(&["check", "a.raw"], 63, &["a.raw", "raw image"])?;
    // A name that tells nothing is that of a qcow2 image, as nothing else can be checked.
    bench.run(&["create", "-f", "qcow2", "b", "1M"])?.ok()?;
    bench.run(&["check", "b"])?.ok()?;
    std::fs::copy(bench.path("a.raw"), bench.path("c"))?;
    bench.refuses(&["check", "c"], 1, &["not a qcow2 image"])
}

#[test]
fn repairs_are_those_of_qemu_img() -> Result<()> {
    if !has_or_skip("repairs_are_those_of_qemu_img", "qemu-img") {
        return Ok(());
    }
    let bench = Bench::new()?;
    let image = bench.path("a.qcow2");
    let cluster = |n: u64| n << 16;
    for (what, repair, at, bytes, fixed) in [
        ("a leak", "leaks", cluster(2) + 2 * 40, &[0, 1][..], "leaks-fixed"),
        ("a leak", "all", cluster(2) + 2 * 40, &[0, 1], "leaks-fixed"),
        ("a low count", "all", cluster(2) + 2 * 5, &[0, 0], "corruptions-fixed"),
        ("a block outside", "all", cluster(1), &[0, 0, 0, 0, 0x77, 0, 0, 0], "corruptions-fixed"),
    ] {
        bench.tool("qemu-img", &["create", "-q", "-f", "qcow2", "a.qcow2", "8M"])?;
        bench.tool("qemu-io", &["-f", "qcow2", "-c", "write -P 7 0 256k", "a.qcow2"])?;
        std::fs::File::options().write(true).open(&image)?.set_len(cluster(50))?;
        poke(&image, at, bytes)?;
        let before = bench.run(&["check", "--json", "a.qcow2"])?.json()?;
        let found = before[fixed.trim_end_matches("-fixed")].clone();
        let ours = bench.run(&["check", "-r", repair, "--json", "a.qcow2"])?;
        assert_eq!((ours.code, &ours.json()?[fixed]), (0, &found), "{what}: {}", ours.err);
        let mut peer = host::tool("qemu-img");
        let peer = host::output(peer.args(["check", "-q"]).arg(&image))?;
        ensure!(peer.status.success(), "{what}: qemu-img still finds something");
        bench.tool("qemu-io", &["-f", "qcow2", "-c", "read -P 7 0 256k", "a.qcow2"])?;
        poke(&image, at, bytes)?;
        let text = bench.run(&["check", "-r", "all", "-p", "a.qcow2"])?.ok()?;
        ensure!(text.out.contains("No errors"), "{what}: {}", text.out);
        ensure!(text.err.contains("(100/100%)"), "{what}: no progress in {:?}", text.err);
    }
    Ok(())
}

#[test]
fn an_image_that_others_use_is_not_repaired() -> Result<()> {
    let bench = Bench::new()?;
    bench.run(&["create", "a.qcow2", "1M"])?.ok()?;
    let together = bench.run(&["check", "-U", "-r", "all", "a.qcow2"])?;
    assert_eq!(together.code, 1);
    let open = bedplate_tests::host::start(
        bedplate_tests::host::program(&bedplate_tests::paths::bedplate()?)
            .args(["serve", "--state-dir", "none", "--nbd"])
            .arg(format!("unix:{}", bench.path("s").display()))
            .arg(bench.path("a.qcow2"))
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null()),
    );
    let mut server = open?;
    let limit = std::time::Duration::from_secs(30);
    let ready = host::wait_for("the server", limit, || Ok(bench.path("s").exists().then_some(())));
    let refused = bench.run(&["check", "-r", "all", "a.qcow2"]);
    server.kill()?;
    server.wait()?;
    ready?;
    let refused = refused?;
    ensure!(refused.code == 1 && refused.err.contains("a.qcow2"), "{}", refused.err);
    Ok(())
}
