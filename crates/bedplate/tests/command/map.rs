//! `bedplate map`.

use super::Bench;
use anyhow::{Result, ensure};
use bedplate_tests::has_or_skip;

#[test]
fn json_says_the_same_as_qemu_img() -> Result<()> {
    if !has_or_skip("json_says_the_same_as_qemu_img", "qemu-img") {
        return Ok(());
    }
    let bench = Bench::new()?;
    let io = |file: &str, commands: &[&str]| {
        let mut args = vec!["-f", file.rsplit('.').next().unwrap_or_default()];
        commands.iter().for_each(|c| args.extend(["-c", c]));
        args.push(file);
        bench.tool("qemu-io", &args)
    };
    bench.tool("qemu-img", &["create", "-q", "-f", "raw", "c.raw", "1M"])?;
    io("c.raw", &["write -P 3 128k 64k", "write -P 4 960k 64k"])?;
    let over = |base: &str, format: &str, top: &str, size: &str| {
        let args = ["create", "-q", "-f", "qcow2", "-b", base, "-F", format, top, size];
        bench.tool("qemu-img", &args)
    };
    over("c.raw", "raw", "b.qcow2", "3M")?;
    io("b.qcow2", &["write 0 64k", "write -c 192k 64k", "write -z 256k 64k", "write 2M 300k"])?;
    over("b.qcow2", "qcow2", "a.qcow2", "4M")?;
    io("a.qcow2", &["write 512k 128k", "write 64k 64k", "write 3M 64k"])?;
    for file in ["a.qcow2", "b.qcow2", "c.raw"] {
        let args = ["map", "--allow-backing", "--json", file];
        let ours = bench.run(&args)?.ok()?.json()?;
        let format = file.rsplit('.').next().unwrap_or_default();
        let peer = bench.tool_json("qemu-img", &["map", "-f", format, "--output=json", file])?;
        assert_eq!(ours, peer, "{file}");
    }
    let ours = bench.run(&["map", "--json", "-s", "70000", "-l", "64k", "c.raw"])?.ok()?.json()?;
    assert_eq!((&ours[0]["start"], &ours[0]["zero"]), (&70000.into(), &true.into()));
    let table = bench.run(&["map", "--allow-backing", "a.qcow2"])?.ok()?.out;
    ensure!(table.lines().any(|l| l.starts_with("0x80000 ") && l.ends_with("a.qcow2")), "{table}");
    ensure!(table.lines().any(|l| l.contains("compressed") && l.ends_with("b.qcow2")), "{table}");
    Ok(())
}

#[test]
fn backing_files_are_opened_only_when_allowed_and_of_a_stated_format() -> Result<()> {
    let bench = Bench::new()?;
    bench.run(&["create", "base.raw", "1M"])?.ok()?;
    bench.run(&["create", "-b", "base.raw", "-F", "raw", "a.qcow2"])?.ok()?;
    bench.refuses(
        &["map", "a.qcow2"],
        1,
        &["has the backing file 'base.raw'", "--allow-backing"],
    )?;
    if !has_or_skip("backing_files_are_opened_only_when_allowed", "qemu-img") {
        return Ok(());
    }
    // The format's extension is the first one; another type makes it an unknown one.
    let image = bench.path("a.qcow2");
    let bytes = std::fs::read(&image)?;
    let at = bytes.windows(4).position(|w| w == [0xe2, 0x79, 0x2a, 0xca]).unwrap_or(0);
    super::poke(&image, at as u64, &[1, 2, 3, 4])?;
    let args = ["map", "--allow-backing", "a.qcow2"];
    bench.refuses(&args, 1, &["'base.raw'", "--backing-format raw"])?;
    bench.run(&["map", "--allow-backing", "--backing-format", "raw", "a.qcow2"])?.ok()?;
    Ok(())
}

#[test]
fn what_an_image_says_cannot_play_with_the_terminal() -> Result<()> {
    let bench = Bench::new()?;
    let name = "\x1b]0;title\x07\nbedplate, all is well";
    bench.run(&["create", "-u", "-b", name, "-F", "raw", "a.qcow2", "1M"])?.ok()?;
    let info = bench.run(&["info", "a.qcow2"])?.ok()?.out;
    ensure!(!info.contains(['\x1b', '\x07']) && !info.contains("\nbedplate"), "{info:?}");
    for args in [&["map", "a.qcow2"][..], &["map", "--allow-backing", "a.qcow2"]] {
        let ended = bench.run(args)?;
        ensure!(!ended.err.contains(['\x1b', '\x07']), "{ended:?}");
        ended.fails(1, &["all is well"])?;
    }
    Ok(())
}

#[test]
fn backing_names_are_relative_to_the_image_that_holds_them_at_every_level() -> Result<()> {
    let bench = Bench::new()?;
    std::fs::create_dir_all(bench.path("top/middle/base"))?;
    bench.run(&["create", "-q", "top/middle/base/b.qcow2", "1M"])?.ok()?;
    bench.run(&["qemu-io", "-c", "write -P 4 0 64K", "top/middle/base/b.qcow2"])?.ok()?;
    for (image, base) in [("top/middle/m.qcow2", "base/b.qcow2"), ("top/t.qcow2", "middle/m.qcow2")]
    {
        bench.run(&["create", "-q", "-b", base, "-F", "qcow2", image])?.ok()?;
    }
    bench.run(&["qemu-io", "-c", "read -P 4 0 64K", "top/t.qcow2"])?.ok()?;
    let map = bench.run(&["map", "--json", "--allow-backing", "top/t.qcow2"])?.ok()?.json()?;
    assert_eq!((&map[0]["depth"], &map[0]["data"]), (&2.into(), &true.into()), "{map}");
    Ok(())
}
