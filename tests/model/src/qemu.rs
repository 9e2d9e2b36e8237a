//! QEMU's tools as a second opinion: they check images that we have written, and make images to start from.

use crate::bed::Bed;
use crate::spec::{Seeds, Spec};
use bedplate_sim::Image;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::OnceLock;
use tempfile::TempDir;

/// True when `qemu-img` and `qemu-io` are installed.
pub fn installed() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| {
        ["qemu-img", "qemu-io"].iter().all(|tool| {
            Command::new(tool).arg("--version").output().is_ok_and(|out| out.status.success())
        })
    })
}

fn run(tool: &str, args: &[&str]) -> Result<Output, String> {
    Command::new(tool).args(args).output().map_err(|e| format!("{tool} can't be run: {e}"))
}

fn must(tool: &str, args: &[&str]) -> Result<(), String> {
    let out = run(tool, args)?;
    if out.status.success() {
        return Ok(());
    }
    Err(format!("{tool} {args:?}: {}", String::from_utf8_lossy(&out.stderr)))
}

/// An image with all that belongs to it, in files of a folder of its own.
struct Files {
    dir: TempDir,
    luks: bool,
}

impl Files {
    /// What became of `bed` on this medium.
    fn new(bed: &Bed, medium: &Image) -> Result<Self, String> {
        let dir = tempfile::tempdir().map_err(|e| e.to_string())?;
        let path = |name: &str| dir.path().join(name);
        bed.metadata(medium).save(&path("image.qcow2")).map_err(|e| e.to_string())?;
        if let Some(below) = &bed.below {
            below.save(&path("base")).map_err(|e| e.to_string())?;
        }
        if let Some(data) = bed.data(medium) {
            std::fs::write(path("data"), data).map_err(|e| e.to_string())?;
        }
        Ok(Self { luks: bed.spec.luks, dir })
    }

    /// Runs a command of `qemu-img` on the image.
    fn run(&self, words: &[&str], target: Option<&str>) -> Result<Output, String> {
        let mut options = "driver=qcow2,file.driver=file,file.filename=image.qcow2".to_owned();
        let (command, rest) = words.split_first().ok_or("no command")?;
        let mut args = vec![*command];
        if self.luks {
            args.extend(["--object", "secret,id=s,data=passphrase"]);
            options += ",encrypt.key-secret=s";
        }
        args.extend(rest);
        args.extend(["--image-opts", &options]);
        args.extend(target);
        // Names of data files are those in the folder where it runs.
        let tool = Command::new("qemu-img").args(args).current_dir(self.dir.path()).output();
        tool.map_err(|e| format!("qemu-img can't be run: {e}"))
    }

    fn check(&self, leaks: bool) -> Result<(), String> {
        let out = self.run(&["check"], None)?;
        match out.status.code() {
            Some(0) => Ok(()),
            Some(3) if leaks => Ok(()),
            code => Err(format!("qemu-img check ends with {code:?}: {}", told(&out))),
        }
    }

    /// What QEMU reads from the image, or from a snapshot in it.
    fn content(&self, snapshot: Option<&str>) -> Result<Vec<u8>, String> {
        let mut words = vec!["convert", "-O", "raw"];
        words.extend(snapshot.iter().flat_map(|name| ["-l", *name]));
        let out = self.run(&words, Some("out"))?;
        if !out.status.success() {
            return Err(format!("qemu-img {words:?} ends with {:?}: {}", out.status, told(&out)));
        }
        std::fs::read(self.dir.path().join("out")).map_err(|e| e.to_string())
    }
}

fn told(out: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    text(&out.stdout) + &text(&out.stderr)
}

/// Runs `qemu-img check` over what became of a bed on this medium; with `leaks` they are allowed.
///
/// # Errors
/// What it finds.
pub fn check(bed: &Bed, medium: &Image, leaks: bool) -> Result<(), String> {
    Files::new(bed, medium)?.check(leaks)
}

/// Checks as [`check`] does, and lets QEMU read the disk, which must hold `content`, and all snapshots.
///
/// # Errors
/// What differs.
pub fn read(bed: &Bed, medium: &Image, leaks: bool, content: &[u8]) -> Result<(), String> {
    let files = Files::new(bed, medium)?;
    files.check(leaks)?;
    same(content, &files.content(None)?).map_err(|e| format!("the disk, read by QEMU: {e}"))?;
    let first = (0..bed.spec.seeds.snapshots).map(|n| format!("s{n}"));
    for name in first.chain(bed.kept.iter().map(|kept| kept.0.clone())) {
        same(bed.snapshot(name.as_bytes()), &files.content(Some(&name))?)
            .map_err(|e| format!("snapshot '{name}', read by QEMU: {e}"))?;
    }
    Ok(())
}

fn same(right: &[u8], seen: &[u8]) -> Result<(), String> {
    match right.iter().zip(seen).position(|(a, b)| a != b) {
        Some(at) => Err(format!("byte {at:#x} is {:#04x}, not {:#04x}", seen[at], right[at])),
        None if right.len() != seen.len() => Err(format!("{} bytes", seen.len())),
        None => Ok(()),
    }
}

fn text(path: &Path) -> Result<&str, String> {
    path.to_str().ok_or_else(|| "a path is not text".to_owned())
}

/// Images made by QEMU's tools, with compressed clusters and a snapshot.
///
/// # Errors
/// What a tool reports.
pub fn beds() -> Result<Vec<Bed>, String> {
    let all = [(9, 16, false, 64), (12, 16, true, 512), (12, 64, false, 512), (16, 8, false, 2048)];
    all.iter().map(|(bits, width, lazy, kib)| bed(*bits, *width, *lazy, *kib)).collect()
}

fn bed(cluster_bits: u32, refcount_bits: u32, lazy: bool, kib: u64) -> Result<Bed, String> {
    let dir = tempfile::tempdir().map_err(|e| e.to_string())?;
    let path = dir.path().join("image.qcow2");
    let path = text(&path)?;
    let on = if lazy { "on" } else { "off" };
    let options = format!(
        "cluster_size={},refcount_bits={refcount_bits},lazy_refcounts={on}",
        1u64 << cluster_bits
    );
    let (size, cluster) = (kib << 10, 1u64 << cluster_bits);
    must("qemu-img", &["create", "-q", "-f", "qcow2", "-o", &options, path, &format!("{kib}K")])?;
    let mut content = vec![0; size as usize];
    let mut write = |flags: &str, byte: u8, at: u64, len: u64| {
        content[at as usize..(at + len) as usize].fill(byte);
        let command = format!("write {flags} -P {byte} {at} {len}");
        must("qemu-io", &["-f", "qcow2", "-c", &command, path])
    };
    write("", 1, 0, size / 2 + 512)?;
    for i in 0..4 {
        write("-c", 10 + i as u8, (size / 2 / cluster + 2 + i) * cluster, cluster)?;
    }
    must("qemu-img", &["snapshot", "-c", "first", path])?;
    write("", 2, cluster, cluster * 2)?;
    let image = Image::load(Path::new(path)).map_err(|e| e.to_string())?;
    let spec = Spec {
        cluster_bits,
        refcount_bits,
        version: 3,
        extended: false,
        lazy,
        zstd: false,
        unpacked: false,
        luks: false,
        size,
        seeds: Seeds::default(),
        below: None,
        data_file: None,
        l2_cache: 0,
        refcount_cache: 0,
    };
    Ok(Bed::around(spec, image, content))
}
