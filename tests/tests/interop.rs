//! Images made by qemu-img read the same through Bedplate, stay clean when Bedplate writes to them, and read the same to QEMU's tools
//! afterwards. What must be there is kept in a raw file to which QEMU makes the same writes.

use anyhow::{Context, Result, ensure};
use bedplate_tests::fixture::Fixture;
use bedplate_tests::random::Random;
use bedplate_tests::{has_or_skip, host};
use std::path::{Path, PathBuf};

const SIZE: u64 = 24 << 20;

/// Random writes as commands of `qemu-io`, on ranges below `limit`: data and zeroes, of whole and broken clusters.
fn writes(random: &mut Random, count: usize, limit: u64) -> Vec<String> {
    let one = |random: &mut Random| {
        let longest = if random.below(4) == 0 { 2000 } else { 40 };
        let length = 512 * (1 + random.below(longest));
        let at = 512 * random.below(limit.saturating_sub(length) / 512 + 1);
        match random.below(5) {
            0 => format!("write -z {at} {length}"),
            1 => format!("write -z -u {at} {length}"),
            _ => format!("write -P {} {at} {length}", 1 + random.below(255)),
        }
    };
    (0..count).map(|_| one(random)).collect()
}

fn qemu_io(format: &str, target: &str, commands: &[String]) -> Result<()> {
    let mut tool = host::tool("qemu-io");
    tool.args(["-f", format]);
    for command in commands {
        tool.args(["-c", command]);
    }
    let text = host::run(tool.arg(target))?;
    ensure!(!text.contains("failed"), "qemu-io on {target}:\n{text}");
    Ok(())
}

fn compare(model: &Path, format: &str, other: &str) -> Result<()> {
    host::run(
        host::tool("qemu-img").args(["compare", "-f", "raw", "-F", format]).arg(model).arg(other),
    )
    .map(drop)
}

fn path_text(path: &Path) -> Result<&str> {
    path.to_str().context("a path that is not text")
}

/// An image of QEMU's making, with the raw file that says what it holds.
struct Pair {
    fixture: Fixture,
    model: PathBuf,
}

impl Pair {
    /// `options` are those of `qemu-img create -o`.
    fn new(options: &str) -> Result<Pair> {
        let fixture = Fixture::new("qcow2", "1M")?.over_nbd();
        let model = fixture.folder().join("model.raw");
        let mut create = host::tool("qemu-img");
        create
            .args(["create", "-q", "-f", "qcow2", "-o", options])
            .arg(fixture.image())
            .arg(SIZE.to_string());
        host::run(&mut create)?;
        std::fs::File::create(&model)?.set_len(SIZE)?;
        Ok(Pair { fixture, model })
    }

    /// The same writes to the image (as a file, by QEMU) and to the model.
    fn write_by_qemu(&self, commands: &[String]) -> Result<()> {
        qemu_io("qcow2", path_text(self.fixture.image())?, commands)?;
        qemu_io("raw", path_text(&self.model)?, commands)
    }

    /// Reads through Bedplate, writes through Bedplate, reads again; then the same by QEMU.
    fn check(&self, random: &mut Random) -> Result<()> {
        let uri = self.fixture.nbd_uri();
        let server = self.fixture.serve()?;
        compare(&self.model, "raw", &uri).context("reading what QEMU wrote through Bedplate")?;
        let commands = writes(random, 40, SIZE);
        qemu_io("raw", &uri, &commands)?;
        qemu_io("raw", path_text(&self.model)?, &commands)?;
        compare(&self.model, "raw", &uri)
            .context("reading back through the Bedplate that wrote")?;
        server.stop()?;
        self.fixture.assert_clean()?;
        compare(&self.model, "qcow2", path_text(self.fixture.image())?)
            .context("reading by QEMU what Bedplate wrote")
    }
}

fn all_of(test: &str, options: &[String]) -> Result<()> {
    if !has_or_skip(test, "qemu-io") {
        return Ok(());
    }
    for (seed, options) in options.iter().enumerate() {
        let mut random = Random::new(seed as u64 + 0x1234_5679);
        let pair = Pair::new(options)?;
        pair.write_by_qemu(&writes(&mut random, 25, SIZE))?;
        pair.check(&mut random).with_context(|| format!("an image with {options}"))?;
    }
    Ok(())
}

/// Every variant on its own is tried without the command, in `images`.
#[test]
fn images_of_qemu_are_served_and_written() -> Result<()> {
    let options = [
        "cluster_size=512",
        "cluster_size=2M,lazy_refcounts=on",
        "cluster_size=4096,refcount_bits=1",
        "compat=0.10",
    ];
    all_of("images_of_qemu_are_served_and_written", &options.map(str::to_owned))
}

#[test]
fn backing_images_show_through_longer_and_shorter_ones_too() -> Result<()> {
    if !has_or_skip("backing_images_show_through_longer_and_shorter_ones_too", "qemu-io") {
        return Ok(());
    }
    let cases = [("raw", SIZE), ("qcow2", SIZE / 2 + 512 * 7), ("qcow2", SIZE + (3 << 20))];
    for (seed, (format, length)) in cases.into_iter().enumerate() {
        let mut random = Random::new(seed as u64 + 301);
        let pair = Pair::new("cluster_size=65536")?;
        let base = pair.fixture.folder().join("base");
        host::run(
            host::tool("qemu-img")
                .args(["create", "-q", "-f", format])
                .arg(&base)
                .arg(length.to_string()),
        )?;
        let commands = writes(&mut random, 30, length.min(SIZE));
        qemu_io(format, path_text(&base)?, &commands)?;
        qemu_io("raw", path_text(&pair.model)?, &commands)?;
        let mut create = host::tool("qemu-img");
        create
            .args(["create", "-q", "-f", "qcow2", "-F", format, "-b"])
            .arg(&base)
            .arg(pair.fixture.image())
            .arg(SIZE.to_string());
        host::run(&mut create)?;
        let before = host::sha256(&base)?;
        let pair = Pair { fixture: pair.fixture.option(&["--allow-backing"]), model: pair.model };
        pair.check(&mut random)
            .with_context(|| format!("over a {format} image of {length} bytes"))?;
        ensure!(host::sha256(&base)? == before, "the backing image was changed");
    }
    Ok(())
}

#[test]
fn internal_snapshots_keep_what_they_held() -> Result<()> {
    if !has_or_skip("internal_snapshots_keep_what_they_held", "qemu-io") {
        return Ok(());
    }
    let mut random = Random::new(9001);
    let pair = Pair::new("cluster_size=16384")?;
    let mut kept = Vec::new();
    for name in ["first", "second"] {
        pair.write_by_qemu(&writes(&mut random, 25, SIZE))?;
        host::run(host::tool("qemu-img").args(["snapshot", "-c", name]).arg(pair.fixture.image()))?;
        let copy = pair.fixture.folder().join(name);
        std::fs::copy(&pair.model, &copy)?;
        kept.push((name, copy));
    }
    pair.check(&mut random)?;
    for (name, copy) in kept {
        let out = pair.fixture.folder().join("out");
        let mut convert = host::tool("qemu-img");
        convert
            .args(["convert", "-l", name, "-f", "qcow2", "-O", "raw"])
            .arg(pair.fixture.image())
            .arg(&out);
        host::run(&mut convert)?;
        compare(&copy, "raw", path_text(&out)?)
            .with_context(|| format!("the snapshot {name:?} has changed"))?;
    }
    Ok(())
}

#[test]
fn an_image_made_by_bedplate_is_what_qemu_expects() -> Result<()> {
    if !has_or_skip("an_image_made_by_bedplate_is_what_qemu_expects", "qemu-io") {
        return Ok(());
    }
    let mut random = Random::new(4711);
    let fixture = Fixture::new("qcow2", &SIZE.to_string())?.over_nbd();
    let model = fixture.folder().join("model.raw");
    std::fs::File::create(&model)?.set_len(SIZE)?;
    fixture.assert_clean()?;
    let pair = Pair { fixture, model };
    pair.write_by_qemu(&writes(&mut random, 25, SIZE))?;
    pair.check(&mut random)
}
