//! Compressed memory disks of the kernel (zram): fast block devices that any Linux machine has, made and removed here.
//!
//! Invariant: only devices that this run added are touched; dropping a value unmounts and removes its device, also after ctrl-c.

use anyhow::{Context, Result, bail};
use bedplate_tests::host;
use std::path::{Path, PathBuf};
use std::time::Duration;

const CONTROL: &str = "/sys/class/zram-control";

/// For the kernel to let go of a device or mount after the last process that used it has ended.
const RELEASE_LIMIT: Duration = Duration::from_secs(20);

/// One device.
#[derive(Debug)]
pub struct Zram {
    id: u32,
}

impl Zram {
    /// Adds a device of `bytes`.
    pub fn new(bytes: u64) -> Result<Zram> {
        if !Path::new(CONTROL).is_dir() {
            // Built as a module on most kernels; built-in here otherwise.
            let _ = host::run(host::tool("modprobe").arg("zram"));
        }
        let answer = std::fs::read_to_string(format!("{CONTROL}/hot_add"))
            .context("the kernel has no zram, on which the benchmark measures")?;
        let zram = Zram {
            id: answer.trim().parse().with_context(|| format!("zram's hot_add said {answer:?}"))?,
        };
        let size = format!("/sys/block/zram{}/disksize", zram.id);
        std::fs::write(&size, bytes.to_string()).with_context(|| format!("setting {size}"))?;
        Ok(zram)
    }

    /// The device file; made here where nothing like udev does it.
    pub fn device(&self) -> Result<PathBuf> {
        let path = PathBuf::from(format!("/dev/zram{}", self.id));
        if !path.exists() {
            let numbers = std::fs::read_to_string(format!("/sys/block/zram{}/dev", self.id))?;
            let (major, minor) =
                numbers.trim().split_once(':').context("the device has no numbers")?;
            host::run(host::tool("mknod").arg(&path).args(["b", major, minor]))?;
        }
        Ok(path)
    }
}

impl Drop for Zram {
    fn drop(&mut self) {
        let remove = || {
            std::fs::write(format!("/sys/block/zram{}/reset", self.id), "1")
                .and_then(|()| std::fs::write(format!("{CONTROL}/hot_remove"), self.id.to_string()))
        };
        if let Err(error) = host::wait_for("the device", RELEASE_LIMIT, || Ok(remove().ok())) {
            eprintln!("bench: /dev/zram{} could not be removed: {error:#}", self.id);
        }
    }
}

/// A mounted file system on a device of its own.
#[derive(Debug)]
pub struct Mounted {
    folder: PathBuf,
    // Dropped after the unmounting in `drop`.
    _device: Zram,
}

impl Mounted {
    /// Makes a file system of `bytes`, xfs or ext4, and mounts it on `folder`.
    pub fn new(kind: &str, bytes: u64, folder: &Path) -> Result<Mounted> {
        let device = Zram::new(bytes)?;
        let path = device.device()?;
        host::run(
            host::tool(&format!("mkfs.{kind}"))
                .args(["-q", if kind == "xfs" { "-f" } else { "-F" }])
                .arg(&path),
        )?;
        std::fs::create_dir_all(folder)?;
        host::run(host::tool("mount").arg(&path).arg(folder))?;
        let mounted = Mounted { folder: folder.to_path_buf(), _device: device };
        let mounts = std::fs::read_to_string("/proc/self/mounts")?;
        if !mounts.lines().any(|line| {
            line.split_whitespace().nth(1).is_some_and(|place| Path::new(place) == folder)
        }) {
            bail!("{} is not mounted after mounting it", folder.display());
        }
        Ok(mounted)
    }

    /// Where it is mounted.
    pub fn folder(&self) -> &Path {
        &self.folder
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // A ring's files are let go some time after its process has ended.
        let unmounted = host::wait_for("unmounting", RELEASE_LIMIT, || {
            match host::output(host::tool("umount").arg(&self.folder))? {
                out if out.status.success() => Ok(Some(())),
                _ => Ok(None),
            }
        });
        if let Err(error) = unmounted {
            eprintln!("bench: {} is still mounted: {error:#}", self.folder.display());
        }
    }
}
