//! QEMU's tools as a second opinion: they check images that we have written, and make images to start from.

use crate::bed::Bed;
use crate::spec::{Seeds, Spec};
use bedplate_sim::Image;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::OnceLock;

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

/// Runs `qemu-img check` over an image; with `leaks` they are allowed.
///
/// # Errors
/// What it finds.
pub fn check(image: &Image, leaks: bool) -> Result<(), String> {
    let dir = tempfile::tempdir().map_err(|e| e.to_string())?;
    let path = dir.path().join("image.qcow2");
    image.save(&path).map_err(|e| e.to_string())?;
    // A backing file must be there, whatever it holds.
    std::fs::write(dir.path().join("base"), [0; 512]).map_err(|e| e.to_string())?;
    let out = run("qemu-img", &["check", "-f", "qcow2", text(&path)?])?;
    match out.status.code() {
        Some(0) => Ok(()),
        Some(3) if leaks => Ok(()),
        code => Err(format!(
            "qemu-img check ends with {code:?}: {}{}",
            String::from_utf8_lossy(&out.stdout),
            String::from_utf8_lossy(&out.stderr)
        )),
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
