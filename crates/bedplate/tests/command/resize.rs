//! `bedplate resize`.

use super::Bench;
use anyhow::{Result, ensure};
use bedplate_tests::has_or_skip;
use std::os::unix::fs::MetadataExt;

fn size(bench: &Bench, image: &str) -> Result<u64> {
    let info = bench.run(&["info", "--json", image])?.ok()?.json()?;
    Ok(info["virtual-size"].as_u64().unwrap_or(0))
}

#[test]
fn sizes_change_as_they_are_spelled() -> Result<()> {
    let bench = Bench::new()?;
    for image in ["a.qcow2", "a.raw"] {
        bench.run(&["create", "-q", image, "10M"])?.ok()?;
        assert_eq!(bench.run(&["resize", image, "12M"])?.ok()?.out, "Image resized.\n");
        assert_eq!(size(&bench, image)?, 12 << 20);
        assert_eq!(bench.run(&["resize", "-q", image, "+3M"])?.ok()?.out, "");
        assert_eq!(size(&bench, image)?, 15 << 20);
        bench.run(&["resize", "--shrink", image, "-5M"])?.ok()?;
        assert_eq!(size(&bench, image)?, 10 << 20);
        bench.run(&["resize", "--shrink", image, "--", "-1536"])?.ok()?;
        assert_eq!(size(&bench, image)?, (10 << 20) - 1536);
        bench.run(&["resize", image, "2T"])?.ok()?;
        bench.run(&["resize", "--shrink", image, "3M"])?.ok()?;
        assert_eq!(size(&bench, image)?, 3 << 20);
    }
    bench.run(&["check", "a.qcow2"])?.ok()?;
    // A raw image can end anywhere.
    bench.run(&["resize", "--shrink", "a.raw", "1000001"])?.ok()?;
    assert_eq!(std::fs::metadata(bench.path("a.raw"))?.len(), 1_000_001);
    Ok(())
}

#[test]
fn what_cannot_be_done_changes_nothing() -> Result<()> {
    let bench = Bench::new()?;
    bench.run(&["create", "-q", "a.qcow2", "10M"])?.ok()?;
    bench.run(&["create", "-q", "a.raw", "10M"])?.ok()?;
    bench.run(&["create", "-q", "-b", "a.raw", "-F", "raw", "over.qcow2", "5M"])?.ok()?;
    bench.run(&["create", "-q", "-o", "compat=0.10", "old.qcow2", "5M"])?.ok()?;
    bench.run(&["snapshot", "-c", "x", "old.qcow2"])?.ok()?;
    std::fs::write(bench.path("noname"), vec![0; 4096])?;
    for image in ["a.qcow2", "a.raw"] {
        bench.refuses(&["resize", image, "9M"], 1, &[image, "--shrink"])?;
        bench.refuses(&["resize", image, "-1M"], 1, &[image, "--shrink"])?;
        bench.refuses(&["resize", "--shrink", image, "-10M"], 1, &["larger than zero"])?;
        bench.refuses(
            &["resize", "--shrink", "--preallocation=full", image, "9M"],
            1,
            &["--preallocation", "grow"],
        )?;
        bench.refuses(&["resize", image, "7.9E"], 1, &[image])?;
    }
    bench.refuses(&["resize", "--preallocation=metadata", "a.raw", "11M"], 1, &["no metadata"])?;
    bench.refuses(&["resize", "a.qcow2", "10485761"], 1, &["multiple of 512"])?;
    bench.refuses(&["resize", "over.qcow2", "6M"], 1, &["a.raw", "--allow-backing"])?;
    bench.refuses(&["resize", "old.qcow2", "6M"], 1, &["snapshots", "version 2"])?;
    bench.refuses(&["resize", "noname", "6M"], 1, &["noname", "-f raw"])?;
    assert_eq!(bench.run(&["resize", "a.raw", "much"])?.code, 2);
    Ok(())
}

/// Elsewhere the second cluster was not taken, and what the backing file holds was not copied.
#[test]
fn an_overlay_grows_with_its_space_and_shows_nothing_of_its_backing_file_beyond_its_end()
-> Result<()> {
    let test =
        "an_overlay_grows_with_its_space_and_shows_nothing_of_its_backing_file_beyond_its_end";
    if !has_or_skip(test, "qemu-io") {
        return Ok(());
    }
    let bench = Bench::new()?;
    let io = |image: &str, command: &str| -> Result<()> {
        let out = bench.tool("qemu-io", &["-f", "qcow2", "-c", command, image])?;
        ensure!(!out.contains("failed"), "{command}: {out}");
        Ok(())
    };
    for (compat, mode) in [("1.1", "off"), ("1.1", "full"), ("1.1", "falloc"), ("0.10", "off")] {
        let option = format!("compat={compat}");
        bench.run(&["create", "-q", "base.qcow2", "300K"])?.ok()?;
        io("base.qcow2", "write -P 1 0 300K")?;
        let over =
            ["create", "-q", "-o", &option, "-b", "base.qcow2", "-F", "qcow2", "o.qcow2", "60K"];
        bench.run(&over)?.ok()?;
        let fill = format!("--preallocation={mode}");
        bench.run(&["resize", "--allow-backing", &fill, "o.qcow2", "400K"])?.ok()?;
        bench.tool("qemu-img", &["check", "-q", "o.qcow2"])?;
        io("o.qcow2", "read -P 1 0 60K")?;
        io("o.qcow2", "read -P 0 60K 340K")?;
        if mode != "off" {
            let map = bench.tool_json("qemu-img", &["map", "--output=json", "o.qcow2"])?;
            let all = map.as_array().map_or(&[][..], Vec::as_slice);
            ensure!(all.iter().all(|e| e["depth"] == 0 && e["data"] == true), "{map}");
        }
    }
    Ok(())
}

#[test]
fn a_growing_disk_takes_its_space_at_once_when_asked() -> Result<()> {
    let bench = Bench::new()?;
    for image in ["a.qcow2", "a.raw"] {
        for (mode, takes) in [("off", false), ("falloc", true), ("full", true), ("prepared", true)]
        {
            bench.run(&["create", "-q", image, "1M"])?.ok()?;
            let fill = format!("--preallocation={mode}");
            bench.run(&["resize", &fill, image, "9M"])?.ok()?;
            let meta = std::fs::metadata(bench.path(image))?;
            assert_eq!(meta.blocks() * 512 >= 8 << 20, takes, "{image} {mode}");
        }
    }
    bench.run(&["check", "a.qcow2"])?.ok()?;
    Ok(())
}

/// Headers were rewritten with another compression type elsewhere.
#[test]
fn what_a_header_says_beside_the_size_is_kept() -> Result<()> {
    if !has_or_skip("what_a_header_says_beside_the_size_is_kept", "qemu-img") {
        return Ok(());
    }
    let bench = Bench::new()?;
    let text: Vec<u8> = (0..100_000_u32).flat_map(|n| n.to_string().into_bytes()).collect();
    std::fs::write(bench.path("r.raw"), &text)?;
    let convert = ["convert", "-c", "-O", "qcow2", "-o", "compression_type=zstd", "-f", "raw"];
    bench.tool("qemu-img", &[&convert[..], &["r.raw", "a.qcow2"]].concat())?;
    bench.run(&["resize", "a.qcow2", "4M"])?.ok()?;
    bench.run(&["resize", "--shrink", "a.qcow2", "256K"])?.ok()?;
    bench.run(&["resize", "a.qcow2", "512K"])?.ok()?;
    bench.tool("qemu-img", &["check", "-q", "a.qcow2"])?;
    bench.tool("qemu-img", &["convert", "-O", "raw", "a.qcow2", "back.raw"])?;
    let mut expected = text[..256 << 10].to_vec();
    expected.resize(512 << 10, 0);
    ensure!(std::fs::read(bench.path("back.raw"))? == expected, "the content has changed");
    Ok(())
}

/// Content is never guessed from: a guest may write a header that names any file of the host.
#[test]
fn a_raw_disk_that_looks_like_qcow2_changes_its_size_as_a_raw_one() -> Result<()> {
    let bench = Bench::new()?;
    let over = ["create", "-q", "-u", "-b", "/etc/passwd", "-F", "raw", "over.qcow2", "64K"];
    bench.run(&over)?.ok()?;
    std::fs::rename(bench.path("over.qcow2"), bench.path("a"))?;
    bench.refuses(&["resize", "a", "1M"], 1, &["-f raw"])?;
    let before = std::fs::read(bench.path("a"))?;
    bench.run(&["resize", "-f", "raw", "a", "1M"])?.ok()?;
    let after = std::fs::read(bench.path("a"))?;
    assert_eq!(after.len(), 1 << 20);
    ensure!(after.starts_with(&before), "the content was taken for more than bytes");
    bench.run(&["resize", "-f", "raw", "--shrink", "a", "4K"])?.ok()?;
    ensure!(std::fs::read(bench.path("a"))? == before[..4096]);
    Ok(())
}

/// Shrinking went through refcount blocks wherever the table said that they were.
#[test]
fn a_damaged_refcount_table_does_no_harm_when_a_disk_shrinks() -> Result<()> {
    let test = "a_damaged_refcount_table_does_no_harm_when_a_disk_shrinks";
    if !has_or_skip(test, "qemu-io") {
        return Ok(());
    }
    // The entry, what it is, and whether shrinking needs what it should name.
    for (entry, value, needed) in [
        (1_u64, 0x00ff_ffff_0000_0000_u64, false),
        (1, 0x2a00, false),
        (0, 0x00ff_ffff_0000_0000, true),
        (0, 0x2a00, true),
        (0, 0, true),
    ] {
        let bench = Bench::new()?;
        bench.run(&["create", "-q", "a.qcow2", "64M"])?.ok()?;
        let io = |command: &str| bench.tool("qemu-io", &["-f", "qcow2", "-c", command, "a.qcow2"]);
        io("write -P 7 0 64K")?;
        io("write -P 8 40M 64K")?;
        super::poke(&bench.path("a.qcow2"), 0x1_0000 + entry * 8, &value.to_be_bytes())?;
        let resize = ["resize", "-q", "--shrink", "a.qcow2", "32M"];
        let first = bench.run(&resize)?;
        if needed {
            first.fails(1, &["a.qcow2", "bedplate check -r all"])?;
        } else {
            first.ok()?;
        }
        bench.run(&["check", "-r", "all", "a.qcow2"])?.ok()?;
        bench.run(&resize)?.ok()?;
        bench.tool("qemu-img", &["check", "-q", "a.qcow2"])?;
        assert_eq!(size(&bench, "a.qcow2")?, 32 << 20);
        ensure!(!io("read -P 7 0 64K")?.contains("failed"), "entry {entry} {value:#x}");
    }
    Ok(())
}
