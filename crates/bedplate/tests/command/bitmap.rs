//! `bedplate bitmap`.

use super::Bench;
use super::serve::{Serving, uri};
use anyhow::{Result, ensure};
use bedplate_tests::has_or_skip;
use serde_json::{Value, json};

fn bitmaps(bench: &Bench, image: &str) -> Result<Value> {
    let ours = bench.run(&["info", "--json", image])?.ok()?.json()?;
    Ok(ours["format-specific"]["data"]["bitmaps"].clone())
}

#[test]
fn bitmaps_are_changed_in_the_order_of_the_words() -> Result<()> {
    if !has_or_skip("bitmaps_are_changed_in_the_order_of_the_words", "qemu-img") {
        return Ok(());
    }
    let bench = Bench::new()?;
    bench.run(&["create", "-q", "a.qcow2", "10M"])?.ok()?;
    bench.run(&["bitmap", "--add", "a.qcow2", "b0"])?.ok()?;
    bench.run(&["bitmap", "--add", "--disable", "-g", "4K", "a.qcow2", "b1"])?.ok()?;
    let one = |name: &str, granularity: u64, flags: &[&str]| json!({"name": name, "granularity": granularity, "flags": flags});
    assert_eq!(
        bitmaps(&bench, "a.qcow2")?,
        json!([one("b0", 65536, &["auto"]), one("b1", 4096, &[])])
    );
    bench.run(&["bitmap", "--disable", "--enable", "--clear", "a.qcow2", "b1"])?.ok()?;
    bench.run(&["bitmap", "--remove", "--add", "-g", "1M", "a.qcow2", "b0"])?.ok()?;
    let theirs = bench.tool_json("qemu-img", &["info", "--output=json", "a.qcow2"])?;
    assert_eq!(bitmaps(&bench, "a.qcow2")?, theirs["format-specific"]["data"]["bitmaps"]);
    assert_eq!(bitmaps(&bench, "a.qcow2")?[1], one("b0", 1 << 20, &["auto"]));
    bench.tool("qemu-img", &["check", "-q", "a.qcow2"])?;
    bench.tool("qemu-img", &["bitmap", "--merge", "b0", "a.qcow2", "b1"])?;
    bench.run(&["bitmap", "--remove", "a.qcow2", "b0"])?.ok()?;
    bench.run(&["bitmap", "--remove", "a.qcow2", "b1"])?.ok()?;
    ensure!(bitmaps(&bench, "a.qcow2")?.is_null());
    bench.tool("qemu-img", &["check", "-q", "a.qcow2"])?;
    Ok(())
}

#[test]
fn what_cannot_be_done_changes_nothing() -> Result<()> {
    let bench = Bench::new()?;
    bench.run(&["create", "-q", "a.qcow2", "10M"])?.ok()?;
    bench.run(&["create", "-q", "-o", "compat=0.10", "old.qcow2", "10M"])?.ok()?;
    bench.run(&["create", "-q", "b.raw", "1M"])?.ok()?;
    bench.run(&["bitmap", "--add", "a.qcow2", "b0"])?.ok()?;
    let refuses = |args: &[&str], words: &[&str]| bench.refuses(args, 1, words);
    refuses(&["bitmap", "--add", "a.qcow2", "b0"], &["add bitmap 'b0'", "already"])?;
    refuses(&["bitmap", "--remove", "a.qcow2", "b1"], &["remove bitmap 'b1'", "bedplate info"])?;
    refuses(&["bitmap", "--add", "a.qcow2", ""], &["0 bytes"])?;
    refuses(&["bitmap", "--add", "-g", "100", "a.qcow2", "b1"], &["100", "power of two"])?;
    refuses(&["bitmap", "--clear", "-g", "1M", "a.qcow2", "b0"], &["--add"])?;
    refuses(&["bitmap", "a.qcow2", "b0"], &["--add", "--disable"])?;
    refuses(&["bitmap", "--add", "old.qcow2", "b0"], &["old.qcow2", "version 2"])?;
    refuses(&["bitmap", "--add", "b.raw", "b0"], &["b.raw", "raw image"])?;
    // As after the death of a program that was recording: the flag is in the directory's first entry.
    let header = std::fs::read(bench.path("a.qcow2"))?;
    let ext = header.windows(4).position(|w| w == 0x2385_2875_u32.to_be_bytes());
    let at = ext.map_or(0, |at| at + 8 + 16);
    let at = header[at..at + 8].iter().fold(0, |n, b| n << 8 | u64::from(*b));
    super::poke(&bench.path("a.qcow2"), at + 15, &[3])?;
    refuses(&["resize", "a.qcow2", "11M"], &["'b0'", "bitmap --remove"])?;
    refuses(&["bitmap", "--clear", "a.qcow2", "b0"], &["'b0'", "only be removed"])?;
    bench.run(&["bitmap", "--remove", "a.qcow2", "b0"])?.ok()?;
    bench.run(&["resize", "a.qcow2", "11M"])?.ok()?;
    bench.run(&["check", "a.qcow2"])?.ok()?;
    Ok(())
}

/// What a bitmap marks, as a server at `uri` says.
fn marked(bench: &Bench, uri: &str, name: &str) -> Result<Vec<(u64, u64)>> {
    let word = format!("--map=qemu:dirty-bitmap:{name}");
    let map = bench.tool_json("nbdinfo", &[&word, "--json", uri])?;
    let all = map.as_array().map_or(&[][..], Vec::as_slice);
    let number = |v: &Value| v.as_u64().unwrap_or(u64::MAX);
    let dirty = all.iter().filter(|e| e["type"] == 1);
    Ok(dirty.map(|e| (number(&e["offset"]), number(&e["length"]))).collect())
}

#[test]
fn merged_bitmaps_mark_what_qemus_mark() -> Result<()> {
    let test = "merged_bitmaps_mark_what_qemus_mark";
    if !has_or_skip(test, "qemu-img") || !has_or_skip(test, "nbdinfo") {
        return Ok(());
    }
    let bench = Bench::new()?;
    let size = "9994752"; // no multiple of any granularity
    bench.run(&["create", "-q", "a.qcow2", size])?.ok()?;
    bench.run(&["create", "-q", "-o", "cluster_size=4k", "other.qcow2", size])?.ok()?;
    let write = |image: &str, commands: &[&str]| {
        let mut args = vec!["-f", "qcow2"];
        commands.iter().for_each(|c| args.extend(["-c", *c]));
        args.push(image);
        bench.tool("qemu-io", &args)
    };
    for (image, name, granularity, commands) in [
        ("a.qcow2", "fine", "512", &["write 700k 512", "write 3M 33k", "write 9994240 512"][..]),
        ("a.qcow2", "coarse", "1M", &["write 5M 64k"]),
        ("other.qcow2", "far", "16k", &["write 0 1k", "discard 8M 1M"]),
    ] {
        bench.run(&["bitmap", "--add", "-g", granularity, image, name])?.ok()?;
        write(image, commands)?;
        bench.run(&["bitmap", "--disable", image, name])?.ok()?;
    }
    bench.run(&["bitmap", "--add", "--disable", "-g", "64k", "a.qcow2", "all"])?.ok()?;
    std::fs::copy(bench.path("a.qcow2"), bench.path("q.qcow2"))?;
    let far = ["-b", "other.qcow2", "-F", "qcow2"];
    for args in [
        &["--merge", "fine", "--merge", "coarse", "FILE", "all"][..],
        &["--merge", "far", far[0], far[1], far[2], far[3], "FILE", "all"],
        &["--merge", "coarse", "FILE", "fine"],
        &["--add", "--merge", "fine", "--disable", "-g", "4k", "FILE", "new"],
    ] {
        let with = |file| args.iter().map(move |w| if *w == "FILE" { file } else { *w });
        let ours: Vec<&str> = ["bitmap"].into_iter().chain(with("a.qcow2")).collect();
        bench.run(&ours)?.ok()?;
        let theirs: Vec<&str> = ["bitmap"].into_iter().chain(with("q.qcow2")).collect();
        bench.tool("qemu-img", &theirs)?;
    }
    assert_eq!(bitmaps(&bench, "a.qcow2")?, bitmaps(&bench, "q.qcow2")?);
    for image in ["a.qcow2", "q.qcow2"] {
        bench.tool("qemu-img", &["check", "-q", image])?;
        bench.run(&["check", image])?.ok()?;
    }
    let all = |image: &str| -> Result<Vec<Vec<(u64, u64)>>> {
        let mut args = vec!["--nbd", "./s", "--read-only", image];
        let names = ["all", "fine", "coarse", "new"];
        names.iter().for_each(|name| args.extend(["-B", *name]));
        let serving = Serving::start(&bench, &args)?;
        let at = uri(&serving.hello)?.to_owned();
        let marks = names.iter().map(|name| marked(&bench, &at, name)).collect();
        serving.stop()?;
        marks
    };
    let marks = all("a.qcow2")?;
    assert_eq!(marks, all("q.qcow2")?);
    ensure!(marks[0].len() >= 5 && marks[1].len() >= 4, "{marks:?}");
    let refuses = |args: &[&str], words: &[&str]| bench.refuses(args, 1, words);
    bench.run(&["resize", "other.qcow2", "16M"])?.ok()?;
    let words = ["merge 'far' into bitmap 'all'", "9994752", "16777216", "different sizes"];
    let far = ["bitmap", "--merge", "far", far[0], far[1], "a.qcow2", "all"];
    refuses(&far, &words)?;
    refuses(&["bitmap", "--merge", "none", "a.qcow2", "all"], &["no bitmap 'none'"])?;
    refuses(&["bitmap", "--merge", "all", "a.qcow2", "none"], &["no bitmap 'none'"])?;
    let code = bench.run(&["bitmap", "--clear", "-b", "other.qcow2", "a.qcow2", "all"])?.code;
    ensure!(code == 2, "a source without a merge");
    Ok(())
}

/// A client that asked for both contexts waited for ever elsewhere, since the last part was not marked as such.
#[test]
fn clients_learn_over_nbd_what_was_changed() -> Result<()> {
    if !has_or_skip("clients_learn_over_nbd_what_was_changed", "nbdinfo") {
        return Ok(());
    }
    let bench = Bench::new()?;
    bench.run(&["create", "-q", "a.qcow2", "8M"])?.ok()?;
    bench.run(&["bitmap", "--add", "a.qcow2", "b0"])?.ok()?;
    bench.run(&["bitmap", "--add", "--disable", "-g", "4K", "a.qcow2", "b1"])?.ok()?;
    let maps = |uri: &str, name: &str| marked(&bench, uri, name);
    let serving = Serving::start(&bench, &["--nbd", "./s", "-B", "b0", "-B", "b1", "a.qcow2"])?;
    let at = uri(&serving.hello)?.to_owned();
    ensure!(maps(&at, "b0")?.is_empty());
    bench.tool("qemu-io", &["-f", "raw", "-c", "write 1M 100k", "-c", "discard 4M 1M", &at])?;
    // One that records tells of it at once.
    assert_eq!(maps(&at, "b0")?, [(1 << 20, 128 << 10), (4 << 20, 1 << 20)]);
    ensure!(maps(&at, "b1")?.is_empty());
    let totals = bench.tool("nbdinfo", &["--map", &at])?;
    ensure!(totals.contains("data"), "{totals}");
    let all = bench.tool("nbdinfo", &["--list", &at])?;
    ensure!(all.contains("qemu:dirty-bitmap:b0") && all.contains("base:allocation"), "{all}");
    serving.stop()?;
    bench.tool("qemu-img", &["check", "-q", "a.qcow2"])?;
    let read_only = ["--nbd", "./s", "--read-only", "--bitmap", "b0", "a.qcow2"];
    let serving = Serving::start(&bench, &read_only)?;
    assert_eq!(maps(uri(&serving.hello)?, "b0")?, [(1 << 20, 128 << 10), (4 << 20, 1 << 20)]);
    serving.stop()?;
    let none = ["--log-level=error", "serve", "--nbd", "./s", "-B", "b2", "a.qcow2"];
    bench.refuses(&none, 1, &["b2", "bedplate info"])?;
    Ok(())
}

#[test]
fn the_granularity_may_be_anything_the_format_has_whatever_the_clusters_are() -> Result<()> {
    if !has_or_skip(
        "the_granularity_may_be_anything_the_format_has_whatever_the_clusters_are",
        "qemu-img",
    ) {
        return Ok(());
    }
    let bench = Bench::new()?;
    for cluster in ["512", "64K", "2M"] {
        let option = format!("cluster_size={cluster}");
        bench.run(&["create", "-q", "-o", &option, "a.qcow2", "64M"])?.ok()?;
        for (name, granularity) in [("small", "512"), ("middle", "1M"), ("large", "2G")] {
            bench.run(&["bitmap", "--add", "-g", granularity, "a.qcow2", name])?.ok()?;
        }
        for granularity in ["256", "4G", "100K"] {
            let add = ["bitmap", "--add", "-g", granularity, "a.qcow2", "x"];
            bench.refuses(&add, 1, &["power of two", "512"])?;
        }
        bench.run(&["qemu-io", "-c", "write 5M 64K", "a.qcow2"])?.ok()?;
        let theirs = bench.tool_json("qemu-img", &["info", "--output=json", "a.qcow2"])?;
        assert_eq!(bitmaps(&bench, "a.qcow2")?, theirs["format-specific"]["data"]["bitmaps"]);
        bench.tool("qemu-img", &["check", "-q", "a.qcow2"])?;
    }
    Ok(())
}
