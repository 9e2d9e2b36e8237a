//! External data files on the command line: made, allowed or stated, and never opened otherwise.

use super::serve::Serving;
use super::{Bench, poke};
use anyhow::{Context, Result, ensure};
use bedplate_tests::{has_or_skip, host};
use std::process::Stdio;

#[test]
fn images_with_a_data_file_are_what_qemu_img_would_make() -> Result<()> {
    if !has_or_skip("images_with_a_data_file_are_what_qemu_img_would_make", "qemu-img") {
        return Ok(());
    }
    let bench = Bench::new()?;
    for (options, size) in [
        ("cluster_size=64k", "10M"),
        ("data_file_raw=on", "3M"),
        ("data_file_raw=on,cluster_size=4k,extended_l2=off,preallocation=falloc", "5M"),
        ("preallocation=metadata", "3M"),
    ] {
        let options = format!("data_file=data,{options}");
        bench.run(&["create", "-o", &options, "ours.qcow2", size])?.ok()?;
        let ours = std::fs::read(bench.path("data"))?;
        bench.tool("qemu-img", &["check", "-q", "ours.qcow2"])?;
        bench.run(&["check", "-q", "ours.qcow2"])?.ok()?;
        let map = |name: &str| bench.tool_json("qemu-img", &["map", "--output=json", name]);
        let info = |name: &str| -> Result<_> {
            let mut info = bench.tool_json("qemu-img", &["info", "--output=json", name])?;
            for key in ["actual-size", "children", "filename"] {
                info.as_object_mut().map(|o| o.remove(key));
            }
            Ok(info)
        };
        let (mapped, told) = (map("ours.qcow2")?, info("ours.qcow2")?);
        let args = ["create", "-q", "-f", "qcow2", "-o", &options, "peer.qcow2", size];
        bench.tool("qemu-img", &args)?;
        assert_eq!(told, info("peer.qcow2")?, "{options}");
        assert_eq!(mapped, map("peer.qcow2")?, "{options}");
        ensure!(std::fs::read(bench.path("data"))? == ours, "{options}: another data file");
    }
    Ok(())
}

#[test]
fn full_preallocation_takes_the_space_in_the_data_file() -> Result<()> {
    use std::os::unix::fs::MetadataExt;
    let bench = Bench::new()?;
    for mode in ["full", "prepared", "falloc"] {
        let options = format!("data_file=d,data_file_raw=on,preallocation={mode}");
        bench.run(&["create", "-q", "-o", &options, "a.qcow2", "4M"])?.ok()?;
        let blocks = std::fs::metadata(bench.path("d"))?.blocks();
        ensure!(blocks >= 8192, "{mode}: {blocks} blocks");
        let image = std::fs::metadata(bench.path("a.qcow2"))?.len();
        ensure!(image < 1 << 20, "{mode}: the image has {image} bytes");
        // The data file's offset 0 is one like others.
        bench.run(&["qemu-io", "-c", "write -P 1 0 64k", "a.qcow2"])?.ok()?;
        ensure!(std::fs::read(bench.path("d"))?[..65536] == [1; 65536], "{mode}");
        bench.run(&["check", "-q", "a.qcow2"])?.ok()?;
    }
    Ok(())
}

#[test]
fn a_data_file_is_opened_only_when_it_is_allowed_or_stated() -> Result<()> {
    let bench = Bench::new()?;
    bench.run(&["create", "-o", "data_file=d", "a.qcow2", "1M"])?.ok()?;
    bench.run(&["qemu-io", "-c", "write -P 3 64k 64k", "a.qcow2"])?.ok()?;
    let words = ["data file 'd'", "--allow-data-file", "--data-file"];
    bench.refuses(&["map", "a.qcow2"], 1, &words)?;
    bench.refuses(&["resize", "a.qcow2", "2M"], 1, &words)?;
    bench.refuses(&["serve", "--nbd", "unix:s", "a.qcow2"], 1, &words)?;
    let json = bench.run(&["map", "--json", "--allow-data-file", "a.qcow2"])?.ok()?.json()?;
    assert_eq!((&json[1]["start"], &json[1]["offset"]), (&65536.into(), &65536.into()));
    let table = bench.run(&["map", "--allow-data-file", "a.qcow2"])?.ok()?.out;
    ensure!(table.lines().any(|l| l.starts_with("0x10000 ") && l.ends_with(" d")), "{table}");
    // What is stated counts, whatever the header says.
    std::fs::rename(bench.path("d"), bench.path("moved"))?;
    let words = ["'d'", "the data file of 'a.qcow2'", "--data-file", "No such file"];
    bench.refuses(&["map", "--allow-data-file", "a.qcow2"], 1, &words)?;
    let stated = bench.run(&["map", "--json", "--data-file", "moved", "a.qcow2"])?.ok()?.json()?;
    assert_eq!(json, stated);
    bench.run(&["info", "a.qcow2"])?.ok().context("info opens nothing but its argument")?;
    let read = "driver=qcow2,file.filename=a.qcow2,data-file.filename=moved";
    let args = ["qemu-io", "--image-opts", "-c", "read -P 3 64k 64k", read];
    bench.run(&args)?.ok()?;
    bench.run(&["resize", "-q", "--data-file", "moved", "a.qcow2", "2M"])?.ok()?;
    assert_eq!(std::fs::metadata(bench.path("moved"))?.len(), 2 << 20);
    Ok(())
}

#[test]
fn files_that_can_t_be_the_data_file_are_refused() -> Result<()> {
    let bench = Bench::new()?;
    bench.run(&["create", "-o", "data_file=d", "a.qcow2", "1M"])?.ok()?;
    bench.run(&["create", "b.qcow2", "1M"])?.ok()?;
    bench.run(&["create", "c.raw", "1M"])?.ok()?;
    std::fs::write(bench.path("short"), [0; 512])?;
    std::os::unix::fs::symlink("a.qcow2", bench.path("link"))?;
    for (file, words) in [
        ("a.qcow2", "that image itself"),
        ("link", "that image itself"),
        ("short", "shorter than the disk"),
        ("missing", "No such file"),
    ] {
        bench.refuses(&["map", "--data-file", file, "a.qcow2"], 1, &[words])?;
    }
    bench.refuses(&["map", "--data-file", "d", "b.qcow2"], 1, &["holds its data itself"])?;
    bench.refuses(&["map", "--data-file", "d", "c.raw"], 1, &["has no data file"])?;
    bench.refuses(&["snapshot", "-c", "s", "a.qcow2"], 1, &["external data file", "snapshots"])?;
    for (options, words) in [
        ("data_file=new.qcow2", "itself"),
        ("data_file_raw=on", "data_file"),
        ("data_file=x,compat=0.10", "compat=1.1"),
        ("data_file=x,data_file_raw=on,backing_file=b.qcow2,backing_fmt=qcow2", "backing file"),
        ("data_file=nbd:x", "not a plain path"),
        ("data_file=b.qcow2,backing_file=b.qcow2,backing_fmt=qcow2", "backing file"),
    ] {
        bench.refuses(&["create", "-o", options, "new.qcow2", "1M"], 1, &[words])?;
    }
    Ok(())
}

#[test]
fn an_image_that_can_t_be_made_leaves_no_data_file_behind() -> Result<()> {
    let bench = Bench::new()?;
    let words = ["cannot"];
    bench.refuses(&["create", "-o", "data_file=d", "no-folder/a.qcow2", "1M"], 1, &words)
}

/// Two images that name one data file, which no lock on the images would notice.
#[test]
fn two_images_do_not_write_to_one_data_file_at_once() -> Result<()> {
    if !has_or_skip("two_images_do_not_write_to_one_data_file_at_once", "qemu-io") {
        return Ok(());
    }
    let bench = Bench::new()?;
    for image in ["a", "b"] {
        let option = format!("data_file={image}-data");
        bench.run(&["create", "-q", "-o", &option, &format!("{image}.qcow2"), "8M"])?.ok()?;
    }
    let header = std::fs::read(bench.path("b.qcow2"))?;
    let name = header.windows(6).position(|w| w == b"b-data").context("the name")?;
    poke(&bench.path("b.qcow2"), name as u64, b"a")?;
    std::fs::hard_link(bench.path("a-data"), bench.path("again"))?;
    let write = ["qemu-io", "-c", "write -P 1 0 64k", "b.qcow2"];
    let refused = |how: &str| -> Result<()> {
        let before = bench.snapshot()?;
        let ended = bench.run(&write)?;
        ensure!(ended.code == 1 && ended.err.contains("cannot lock 'a-data'"), "{how}: {ended:?}");
        let serve = ["--log-level=error", "serve", "--allow-data-file", "--nbd", "./t", "b.qcow2"];
        bench.refuses(&serve, 1, &["'a-data', the data file of 'b.qcow2'", "cannot lock"])?;
        let serve = ["--log-level=error", "serve", "--data-file=again", "--nbd", "./t", "b.qcow2"];
        bench.refuses(&serve, 1, &["'again', the data file of 'b.qcow2'", "cannot lock"])?;
        let resize = ["resize", "--allow-data-file", "b.qcow2", "9M"];
        bench.refuses(&resize, 1, &["'a-data'", "cannot lock"])?;
        let create = ["create", "-o", "data_file=a-data", "c.qcow2", "8M"];
        bench.refuses(&create, 1, &["'a-data'", "cannot lock"])?;
        ensure!(bench.snapshot()? == before, "{how}: files were changed");
        Ok(())
    };
    let serving = Serving::start(&bench, &["--allow-data-file", "--nbd", "./s", "a.qcow2"])?;
    refused("Bedplate serves the other image")?;
    for image in ["b.qcow2", "a-data"] {
        let format = if image == "a-data" { "raw" } else { "qcow2" };
        let args = ["-f", format, "-c", "write -P 1 0 64k", image];
        let mut theirs = host::tool("qemu-io");
        let ended = host::output(theirs.args(args).current_dir(bench.folder.path()))?;
        ensure!(!ended.status.success(), "QEMU wrote to {image} too: {ended:?}");
    }
    serving.stop()?;
    // QEMU's program holds the other image until its standard input ends.
    let mut theirs = host::tool("qemu-io");
    theirs.args(["-f", "qcow2", "a.qcow2"]).current_dir(bench.folder.path());
    let mut theirs = theirs.stdin(Stdio::piped()).stdout(Stdio::null()).spawn()?;
    let input = theirs.stdin.take().context("no stdin")?;
    while bench.run(&["info", "a.qcow2"])?.code == 0 {
        ensure!(theirs.try_wait()?.is_none(), "it has ended");
    }
    let tried = refused("QEMU has the other image");
    drop(input);
    theirs.wait()?;
    tried?;
    bench.run(&write)?.ok()?;
    Ok(())
}
