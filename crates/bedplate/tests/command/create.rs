//! `bedplate create`.

use super::Bench;
use anyhow::{Result, ensure};
use bedplate_tests::has_or_skip;
use std::os::unix::fs::MetadataExt;

#[test]
fn qcow2_images_are_what_qemu_img_would_make() -> Result<()> {
    if !has_or_skip("qcow2_images_are_what_qemu_img_would_make", "qemu-img") {
        return Ok(());
    }
    let bench = Bench::new()?;
    for (options, size) in [
        ("cluster_size=64k", "1G"),
        ("cluster_size=512", "10M"),
        ("cluster_size=2M,refcount_bits=1", "8T"),
        ("compat=0.10", "3M"),
        ("compat=v3,lazy_refcounts=on,refcount_bits=64", "1000001"),
        ("compression_type=zstd,cluster_size=4K", "1.5G"),
        ("preallocation=off,extended_l2=off", "2M"),
    ] {
        bench.run(&["create", "-o", options, "ours.qcow2", size])?.ok()?;
        bench.tool(
            "qemu-img",
            &["create", "-q", "-f", "qcow2", "-o", options, "peer.qcow2", size],
        )?;
        bench.tool("qemu-img", &["check", "-q", "ours.qcow2"])?;
        let info = |name: &str| -> Result<_> {
            let mut info = bench.tool_json("qemu-img", &["info", "--output=json", name])?;
            for key in ["actual-size", "children", "filename"] {
                info.as_object_mut().map(|o| o.remove(key));
            }
            Ok(info)
        };
        assert_eq!(info("ours.qcow2")?, info("peer.qcow2")?, "{options}");
    }
    Ok(())
}

#[test]
fn raw_images_are_holes_or_take_their_space_at_once() -> Result<()> {
    let bench = Bench::new()?;
    for (mode, takes) in [("off", false), ("falloc", true), ("full", true), ("prepared", true)] {
        let option = format!("preallocation={mode}");
        bench.run(&["create", "-q", "-o", &option, "a.raw", "3000001"])?.ok()?;
        let meta = std::fs::metadata(bench.path("a.raw"))?;
        assert_eq!(meta.len(), 3_000_320, "whole sectors");
        assert_eq!(meta.blocks() * 512 >= meta.len(), takes, "{mode}");
        ensure!(std::fs::read(bench.path("a.raw"))?.iter().all(|b| *b == 0), "{mode}");
    }
    Ok(())
}

#[test]
fn an_old_file_is_replaced_completely() -> Result<()> {
    let bench = Bench::new()?;
    std::fs::write(bench.path("a.qcow2"), vec![0xff; 3 << 20])?;
    bench.run(&["create", "a.qcow2", "1G"])?.ok()?;
    bench.run(&["check", "a.qcow2"])?.ok()?;
    std::fs::write(bench.path("a.raw"), vec![0xff; 3 << 20])?;
    bench.run(&["create", "a.raw", "1M"])?.ok()?;
    assert_eq!(std::fs::read(bench.path("a.raw"))?, vec![0; 1 << 20]);
    Ok(())
}

#[test]
fn the_size_comes_from_the_backing_file_relative_to_the_new_image() -> Result<()> {
    let bench = Bench::new()?;
    std::fs::create_dir(bench.path("sub"))?;
    bench.run(&["create", "sub/base.qcow2", "7M"])?.ok()?;
    bench.run(&["create", "sub/base.raw", "5M"])?.ok()?;
    for (base, format, size) in [("base.qcow2", "qcow2", 7 << 20), ("base.raw", "raw", 5 << 20)] {
        bench.run(&["create", "-b", base, "-F", format, "sub/over.qcow2"])?.ok()?;
        let info = bench.run(&["info", "--json", "sub/over.qcow2"])?.ok()?.json()?;
        assert_eq!(info["virtual-size"], size);
        assert_eq!(info["backing-filename"], base);
        assert_eq!(info["backing-filename-format"], format);
        assert_eq!(info["full-backing-filename"], format!("sub/{base}"));
    }
    let options = "backing_file=base.raw,backing_fmt=raw,cluster_size=512";
    bench.run(&["create", "-o", options, "sub/over.qcow2", "9M"])?.ok()?;
    let info = bench.run(&["info", "--json", "sub/over.qcow2"])?.ok()?.json()?;
    assert_eq!((&info["virtual-size"], &info["cluster-size"]), (&(9 << 20).into(), &512.into()));
    Ok(())
}

#[test]
fn what_cannot_be_is_refused_and_nothing_is_left_behind() -> Result<()> {
    let bench = Bench::new()?;
    bench.run(&["create", "base.qcow2", "1M"])?.ok()?;
    let over = |extra: &[&str], words: &[&str]| {
        let mut args = vec!["create", "new.qcow2"];
        args.extend_from_slice(extra);
        bench.refuses(&args, 1, words)
    };
    over(&[], &["size"])?;
    over(&["-b", "base.qcow2"], &["base.qcow2", "-F raw or -F qcow2"])?;
    over(&["-b", "none.raw", "-F", "raw"], &["none.raw", "No such file", "relative"])?;
    over(&["-o", "backing_file=", "-F", "raw", "1M"], &["0 bytes long"])?;
    over(&["-b", &"x".repeat(1024), "-F", "raw", "-u", "1M"], &["1024 bytes long", "1023"])?;
    over(&["-b", "json:{}", "-F", "raw", "-u", "1M"], &["not a plain path"])?;
    over(&["-b", "nbd://h/x", "-F", "raw", "1M"], &["not a plain path"])?;
    over(&["-b", "base.qcow2", "-F", "qcow2", "-u"], &["size"])?;
    over(&["-F", "raw", "1M"], &["-b"])?;
    over(&["-o", "frob=1", "1M"], &["frob", "cluster_size"])?;
    over(&["-o", "cluster_size=1000", "1M"], &["1000", "power of two"])?;
    over(&["-o", "cluster_size=4M", "1M"], &["new.qcow2"])?;
    over(&["-o", "refcount_bits=3", "1M"], &["refcount_bits=3"])?;
    over(&["-o", "compat=0.10,lazy_refcounts=on", "1M"], &["compat=1.1"])?;
    over(&["-o", "preallocation=some", "1M"], &["preallocation", "prepared"])?;
    over(
        &["-b", "base.qcow2", "-F", "qcow2", "-o", "preallocation=full", "1M"],
        &["backing file", "preallocated"],
    )?;
    over(&["-o", "lazy_refcounts=maybe", "1M"], &["on or off"])?;
    over(&["1E"], &["too large", "cluster_size"])?;
    let raw = |extra: &[&str], words: &[&str]| {
        let mut args = vec!["create", "new.raw"];
        args.extend_from_slice(extra);
        bench.refuses(&args, 1, words)
    };
    raw(&["-b", "base.qcow2", "-F", "qcow2", "1M"], &["raw images have no backing file"])?;
    raw(&["-o", "preallocation=metadata", "1M"], &["no metadata"])?;
    raw(&["-o", "cluster_size=4k", "1M"], &["cluster_size"])?;
    bench.refuses(&["create", "none/new.raw", "1M"], 1, &["none/new.raw", "No such file"])?;
    bench.refuses(&["create", "-b", "base.qcow2", "-F", "qcow2", "base.qcow2"], 1, &["its own"])?;
    Ok(())
}

#[test]
fn a_file_that_cannot_be_as_large_is_removed_again() -> Result<()> {
    let bench = Bench::new()?;
    // Larger than any file system's largest file.
    bench.refuses(&["create", "big.raw", "7.9E"], 1, &["big.raw"])?;
    bench.refuses(&["create", "-o", "preallocation=falloc", "b.raw", "7.9E"], 1, &["b.raw"])
}

#[test]
fn the_largest_disks_can_be_used_up_to_their_last_sector() -> Result<()> {
    let bench = Bench::new()?;
    bench.run(&["create", "-q", "-o", "cluster_size=2M", "a.qcow2", "512T"])?.ok()?;
    let last = (512_u64 << 40) - 512;
    let write = format!("write -P 3 {last} 512");
    let read = format!("read -P 3 {last} 512");
    let beyond = format!("write {} 512", last + 512);
    bench.run(&["qemu-io", "-c", &write, "-c", &read, "a.qcow2"])?.ok()?;
    assert_eq!(bench.run(&["qemu-io", "-c", &beyond, "a.qcow2"])?.code, 1);
    assert_eq!(bench.run(&["qemu-io", "-c", "write 9223372036854775296 512", "a.qcow2"])?.code, 1);
    bench.run(&["check", "a.qcow2"])?.ok()?;
    ensure!(std::fs::metadata(bench.path("a.qcow2"))?.blocks() * 512 < 16 << 20);
    Ok(())
}

#[test]
fn an_overlay_in_the_smallest_clusters_keeps_a_long_name() -> Result<()> {
    let bench = Bench::new()?;
    let base = format!("{}.raw", "x".repeat(200));
    bench.run(&["create", &base, "1M"])?.ok()?;
    bench.run(&["create", "-o", "cluster_size=512", "-b", &base, "-F", "raw", "a.qcow2"])?.ok()?;
    let info = bench.run(&["info", "--json", "a.qcow2"])?.ok()?.json()?;
    assert_eq!(info["backing-filename"], base.as_str());
    Ok(())
}

/// Runs of a disk that are alike, as (start, length, data, zero). What file systems know of holes does not count: QEMU writes
/// the last bytes of a hole's end.
fn runs(map: &serde_json::Value, holes: bool) -> Vec<(u64, u64, bool, bool)> {
    let mut runs: Vec<(u64, u64, bool, bool)> = Vec::new();
    for entry in map.as_array().into_iter().flatten() {
        let number = |key: &str| entry[key].as_u64().unwrap_or(u64::MAX);
        let (data, zero) = (entry["data"] == true, holes && entry["zero"] == true);
        match runs.last_mut() {
            Some((start, len, d, z))
                if *start + *len == number("start") && (*d, *z) == (data, zero) =>
            {
                *len += number("length");
            }
            _ => runs.push((number("start"), number("length"), data, zero)),
        }
    }
    runs
}

#[test]
fn preallocated_images_are_of_the_kind_that_qemu_img_makes() -> Result<()> {
    if !has_or_skip("preallocated_images_are_of_the_kind_that_qemu_img_makes", "qemu-img") {
        return Ok(());
    }
    let bench = Bench::new()?;
    for (mode, peer, options) in [
        ("off", "off", ""),
        ("metadata", "metadata", ""),
        ("metadata", "metadata", ",cluster_size=512,refcount_bits=64"),
        ("falloc", "falloc", ""),
        ("full", "full", ",compat=0.10"),
        ("prepared", "full", ",cluster_size=2M"),
    ] {
        let of = |mode: &str| format!("preallocation={mode}{options}");
        bench.run(&["create", "-q", "-o", &of(mode), "ours.qcow2", "9000448"])?.ok()?;
        bench.tool(
            "qemu-img",
            &["create", "-q", "-f", "qcow2", "-o", &of(peer), "peer.qcow2", "9000448"],
        )?;
        bench.tool("qemu-img", &["check", "-q", "ours.qcow2"])?;
        let map = |name: &str| bench.tool_json("qemu-img", &["map", "--output=json", name]);
        let of = |name: &str| Ok::<_, anyhow::Error>(runs(&map(name)?, mode != "metadata"));
        assert_eq!(of("ours.qcow2")?, of("peer.qcow2")?, "{mode}{options}");
        bench.tool("qemu-img", &["compare", "-q", "ours.qcow2", "peer.qcow2"])?;
        let blocks =
            |name: &str| -> Result<u64> { Ok(std::fs::metadata(bench.path(name))?.blocks() * 512) };
        let takes = blocks("ours.qcow2")? >= 9_000_448;
        assert_eq!(takes, blocks("peer.qcow2")? >= 9_000_448, "{mode}{options}");
        assert_eq!(takes, !matches!(mode, "off" | "metadata"), "{mode}{options}");
        bench.tool("qemu-io", &["-f", "qcow2", "-c", "write -P 9 1M 3M", "ours.qcow2"])?;
        bench.run(&["check", "ours.qcow2"])?.ok()?;
    }
    Ok(())
}

#[test]
fn prepared_data_lies_in_one_run_of_the_file() -> Result<()> {
    let bench = Bench::new()?;
    bench.run(&["create", "-q", "-o", "preallocation=prepared", "a.qcow2", "40M"])?.ok()?;
    let map = bench.run(&["map", "--json", "a.qcow2"])?.ok()?.json()?;
    let entries = map.as_array().map_or(&[][..], Vec::as_slice);
    let mut next = entries.first().and_then(|e| e["offset"].as_u64());
    for entry in entries {
        assert_eq!((entry["offset"].as_u64(), &entry["data"]), (next, &true.into()), "{map}");
        next = next.zip(entry["length"].as_u64()).map(|(at, len)| at + len);
    }
    Ok(())
}
