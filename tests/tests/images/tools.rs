//! QEMU's tools on image files, and looks at a file's bytes.

use crate::harness::{churn, open_chain, run, same, verify};
use anyhow::{Context, Result, ensure};
use bedplate_tests::random::Random;
use bedplate_tests::{host, skip};
use bedplate_types::Format;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

/// False, with a note that the test is skipped, when QEMU's tools are not installed.
pub fn have_qemu(test: &str) -> bool {
    let missing = ["qemu-img", "qemu-io"].into_iter().find(|tool| host::which(tool).is_none());
    if let Some(tool) = missing {
        skip(test, &format!("{tool} is not installed"));
    }
    missing.is_none()
}

pub fn qemu_img(words: &[&str], paths: &[&Path]) -> Result<()> {
    host::run(host::tool("qemu-img").args(words).args(paths)).map(drop)
}

/// Creates a qcow2 image with the options of `-o`.
pub fn create(image: &Path, options: &str, size: u64) -> Result<()> {
    let mut tool = host::tool("qemu-img");
    tool.args(["create", "-q", "-f", "qcow2", "-o", options]).arg(image).arg(size.to_string());
    host::run(&mut tool).map(drop)
}

/// Creates a qcow2 image over another one.
pub fn create_over(image: &Path, options: &str, size: u64, base: (&Path, Format)) -> Result<()> {
    let mut tool = host::tool("qemu-img");
    tool.args(["create", "-q", "-f", "qcow2", "-o", options, "-F", name_of(base.1), "-b"]);
    host::run(tool.arg(base.0).arg(image).arg(size.to_string())).map(drop)
}

pub fn name_of(format: Format) -> &'static str {
    match format {
        Format::Raw => "raw",
        Format::Qcow2 => "qcow2",
    }
}

/// Runs commands of qemu-io, with discards passed on.
pub fn qemu_io<T: AsRef<str>>(image: &Path, format: Format, commands: &[T]) -> Result<()> {
    let mut tool = host::tool("qemu-io");
    tool.args(["-d", "unmap", "-f", name_of(format)]);
    for command in commands {
        tool.args(["-c", command.as_ref()]);
    }
    let text = host::run(tool.arg(image))?;
    ensure!(!text.contains("failed"), "qemu-io on {}:\n{text}", image.display());
    Ok(())
}

/// Random writes, zeroes and discards for [`qemu_io`], below `limit`.
pub fn qemu_writes(random: &mut Random, count: usize, limit: u64) -> Vec<String> {
    let one = |random: &mut Random| {
        let longest = if random.below(4) == 0 { 1500 } else { 40 };
        let len = 512 * (1 + random.below(longest)).min(limit / 512);
        let at = 512 * random.below((limit - len) / 512 + 1);
        match random.below(8) {
            0 => format!("write -z {at} {len}"),
            1 => format!("write -z -u {at} {len}"),
            2 => format!("discard {at} {len}"),
            _ => format!("write -P {} {at} {len}", 1 + random.below(255)),
        }
    };
    (0..count).map(|_| one(random)).collect()
}

/// What QEMU reads from an image.
pub fn content(image: &Path, format: Format) -> Result<Vec<u8>> {
    converted(image, host::tool("qemu-img").args(["convert", "-f", name_of(format), "-O", "raw"]))
}

/// What QEMU reads from an internal snapshot.
pub fn snapshot_content(image: &Path, name: &str) -> Result<Vec<u8>> {
    let words = ["convert", "-l", name, "-f", "qcow2", "-O", "raw"];
    converted(image, host::tool("qemu-img").args(words))
}

fn converted(image: &Path, convert: &mut Command) -> Result<Vec<u8>> {
    let out = image.with_extension("out");
    host::run(convert.arg(image).arg(&out))?;
    let bytes = std::fs::read(&out)?;
    std::fs::remove_file(&out)?;
    Ok(bytes)
}

/// QEMU's checker finds neither corruption nor leaks.
pub fn assert_clean(image: &Path) -> Result<()> {
    let (code, text) = host::qemu_img_check(image)?;
    ensure!(code == 0, "qemu-img check of {} gave {code}:\n{text}", image.display());
    Ok(())
}

/// QEMU's checker finds no corruption; leaks are allowed.
pub fn assert_not_corrupt(image: &Path) -> Result<()> {
    let (code, text) = host::qemu_img_check(image)?;
    ensure!([0, 3].contains(&code), "qemu-img check of {} gave {code}:\n{text}", image.display());
    Ok(())
}

/// Changes bytes of a file.
pub fn poke(image: &Path, at: u64, bytes: &[u8]) -> Result<()> {
    Ok(std::fs::File::options().write(true).open(image)?.write_all_at(bytes, at)?)
}

/// Bytes of a file.
pub fn peek<const N: usize>(image: &Path, at: u64) -> Result<[u8; N]> {
    let mut bytes = [0; N];
    std::fs::File::open(image)?.read_exact_at(&mut bytes, at)?;
    Ok(bytes)
}

/// The whole way of an image of QEMU's: read through Bedplate, written through Bedplate, closed, checked and read by QEMU;
/// twice, so that what Bedplate left behind is taken up by Bedplate too. `chain` has the image and those under it.
pub fn exercise(chain: &[(&Path, Format)], random: &mut Random) -> Result<()> {
    let (image, format) = *chain.first().context("an image")?;
    let below: Vec<Vec<u8>> =
        chain.iter().skip(1).map(|(path, _)| std::fs::read(path)).collect::<Result<_, _>>()?;
    let mut model = content(image, format)?;
    run(async || verify(&open_chain(chain, true).await?, &model).await)
        .context("reading what QEMU made")?;
    for rounds in [12, 5] {
        run(async || {
            let disk = open_chain(chain, false).await?;
            churn(&disk, &mut model, random, rounds).await?;
            verify(&disk, &model).await.context("reading back before the close")?;
            Ok(disk.close().await?)
        })?;
        if format == Format::Qcow2 {
            assert_clean(image)?;
        }
        same(&model, &content(image, format)?).context("reading by QEMU what Bedplate wrote")?;
    }
    for ((path, _), before) in chain.iter().skip(1).zip(&below) {
        ensure!(std::fs::read(path)? == *before, "{} was changed", path.display());
    }
    Ok(())
}
