//! `bedplate info`.

use super::{Bench, poke};
use anyhow::{Result, ensure};
use bedplate_tests::has_or_skip;
use serde_json::Value;

/// Both descriptions without what only one of the two tells.
fn both(bench: &Bench, name: &str) -> Result<(Value, Value)> {
    let ours = bench.run(&["info", "--output=json", name])?.ok()?.json()?;
    let mut peer = bench.tool_json("qemu-img", &["info", "--output=json", name])?;
    peer.as_object_mut().map(|o| o.remove("children"));
    Ok((ours, peer))
}

#[test]
fn json_says_the_same_as_qemu_img() -> Result<()> {
    if !has_or_skip("json_says_the_same_as_qemu_img", "qemu-img") {
        return Ok(());
    }
    let bench = Bench::new()?;
    bench.tool("qemu-img", &["create", "-q", "-f", "raw", "base.raw", "3M"])?;
    for options in [
        "cluster_size=64k",
        "compat=0.10",
        "lazy_refcounts=on,refcount_bits=8,cluster_size=2M",
        "compression_type=zstd",
        "backing_file=base.raw,backing_fmt=raw",
        "extended_l2=on",
    ] {
        bench.tool("qemu-img", &["create", "-q", "-f", "qcow2", "-o", options, "a.qcow2", "5M"])?;
        bench.tool("qemu-img", &["snapshot", "-c", "first one", "a.qcow2"])?;
        bench.tool("qemu-io", &["-f", "qcow2", "-c", "write 0 100k", "a.qcow2"])?;
        bench.tool("qemu-img", &["snapshot", "-c", "2", "a.qcow2"])?;
        let (ours, peer) = both(&bench, "a.qcow2")?;
        assert_eq!(ours, peer, "{options}");
    }
    bench.tool("qemu-img", &["bitmap", "--add", "-g", "64k", "a.qcow2", "b0"])?;
    let (ours, peer) = both(&bench, "a.qcow2")?;
    let bitmaps = |v: &Value| v["format-specific"]["data"]["bitmaps"].clone();
    assert_eq!(bitmaps(&ours), bitmaps(&peer));
    std::fs::write(bench.path("odd.raw"), vec![1; 1000])?;
    let ours = bench.run(&["info", "--json", "odd.raw"])?.ok()?.json()?;
    let peer = bench.tool_json("qemu-img", &["info", "-f", "raw", "--output=json", "odd.raw"])?;
    for key in ["virtual-size", "filename", "format", "actual-size", "dirty-flag"] {
        assert_eq!(ours[key], peer[key], "{key}");
    }
    Ok(())
}

#[test]
fn text_is_laid_out_like_qemu_imgs() -> Result<()> {
    if !has_or_skip("text_is_laid_out_like_qemu_imgs", "qemu-img") {
        return Ok(());
    }
    let bench = Bench::new()?;
    for options in ["cluster_size=64k", "compat=0.10", "backing_file=b/c.raw,backing_fmt=raw"] {
        let args = ["create", "-q", "-u", "-f", "qcow2", "-o", options, "a.qcow2", "1234567k"];
        bench.tool("qemu-img", &args)?;
        let ours = bench.run(&["info", "a.qcow2"])?.ok()?.out;
        let peer = bench.tool("qemu-img", &["info", "a.qcow2"])?;
        let peer = peer.split("Child node").next().unwrap_or_default();
        assert_eq!(ours, peer, "{options}");
    }
    Ok(())
}

#[test]
fn only_the_named_file_is_opened() -> Result<()> {
    let bench = Bench::new()?;
    // A backing file that is not there, and one that would block for ever, do not matter.
    bench.run(&["create", "-u", "-b", "none.raw", "-F", "raw", "a.qcow2", "1M"])?.ok()?;
    ensure!(bench.run(&["info", "a.qcow2"])?.ok()?.out.contains("backing file: none.raw"));
    bench.refuses(&["info", "--backing-chain", "a.qcow2"], 1, &["none.raw", "No such file"])
}

#[test]
fn chains_are_described_to_the_end_and_loops_are_refused() -> Result<()> {
    let bench = Bench::new()?;
    bench.run(&["create", "c.raw", "1M"])?.ok()?;
    bench.run(&["create", "-b", "c.raw", "-F", "raw", "b.qcow2"])?.ok()?;
    bench.run(&["create", "-b", "b.qcow2", "-F", "qcow2", "a.qcow2"])?.ok()?;
    let all = bench.run(&["info", "--json", "--backing-chain", "a.qcow2"])?.ok()?.json()?;
    let names: Vec<&str> =
        all.as_array().into_iter().flatten().filter_map(|i| i["filename"].as_str()).collect();
    assert_eq!(names, ["a.qcow2", "b.qcow2", "c.raw"]);

    bench.run(&["create", "-u", "-b", "a.qcow2", "-F", "qcow2", "b.qcow2", "1M"])?.ok()?;
    bench.refuses(&["info", "--backing-chain", "a.qcow2"], 1, &["loop", "a.qcow2"])?;
    let serve = ["serve", "--nbd", "./s", "--allow-backing", "a.qcow2"];
    bench.refuses(&serve, 1, &["loop", "a.qcow2"])?;
    bench.refuses(&["map", "--allow-backing", "a.qcow2"], 1, &["loop", "a.qcow2"])
}

#[test]
fn hostile_headers_are_refused_with_a_sentence() -> Result<()> {
    let bench = Bench::new()?;
    let image = bench.path("a.qcow2");
    for (at, bytes, words) in [
        (0_u64, &[0_u8; 4][..], &["not a qcow2 image"][..]),
        (4, &[0, 0, 0, 9], &["version 9"]),
        (20, &[0, 0, 0, 40], &["cluster"]),
        (36, &[0xff; 4], &["L1 table"]),
        (56, &[0xff; 4], &["refcount table"]),
        (60, &[0xff; 4], &["snapshots"]),
        (100, &[0xff; 4], &["header"]),
        (8, &[0xff; 8], &["backing file"]),
        (112, &[0x12, 0x34, 0x56, 0x78, 0x7f, 0xff, 0xff, 0xff], &["extension"]),
    ] {
        bench.run(&["create", "-q", "a.qcow2", "64M"])?.ok()?;
        poke(&image, at, bytes)?;
        let mut all = vec!["a.qcow2"];
        all.extend_from_slice(words);
        for verb in ["info", "check", "map"] {
            bench.refuses(&[verb, "a.qcow2"], 1, &all)?;
        }
        bench.refuses(&["serve", "--nbd", "./s", "a.qcow2"], 1, &all)?;
    }
    Ok(())
}

#[test]
fn unknown_features_are_named_and_the_image_is_not_touched() -> Result<()> {
    let bench = Bench::new()?;
    bench.run(&["create", "a.qcow2", "1M"])?.ok()?;
    poke(&bench.path("a.qcow2"), 72, &[0x80, 0, 0, 0, 0, 0, 0, 0])?;
    let info = bench.run(&["info", "--json", "a.qcow2"])?.ok()?.json()?;
    let why = info["unsupported"].as_str().unwrap_or_default();
    ensure!(why.contains("bit 63"), "{info}");
    for args in
        [&["serve", "--nbd", "./s", "a.qcow2"][..], &["map", "a.qcow2"], &["check", "a.qcow2"]]
    {
        bench.refuses(args, 1, &["a.qcow2", "bit 63"])?;
    }
    Ok(())
}

#[test]
fn a_raw_image_that_looks_like_qcow2_stays_raw_and_is_remarked_on() -> Result<()> {
    let bench = Bench::new()?;
    bench.run(&["create", "-b", "/etc/passwd", "-F", "raw", "a.qcow2", "1M"])?.ok()?;
    std::fs::rename(bench.path("a.qcow2"), bench.path("a.img"))?;
    let out = bench.run(&["info", "a.img"])?.ok()?.out;
    ensure!(out.contains("file format: raw") && out.contains("state -f qcow2"), "{out}");
    ensure!(!out.contains("passwd"), "{out}");
    let map = bench.run(&["map", "--json", "a.img"])?.ok()?.json()?;
    assert_eq!(map[0]["offset"], 0);
    Ok(())
}
