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
    bench.refuses(&["check", "a.raw"], 63, &["a.raw", "raw image"])
}
