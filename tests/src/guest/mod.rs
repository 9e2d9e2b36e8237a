//! Real Linux guests in QEMU, whose disks come from a server outside.
//!
//! The kernel and the initramfs are made by `cargo xtask setup` (see `CONTRIBUTING.md`); in the guest runs a small agent on the
//! serial line that takes shell scripts and gives back their output and exit code. Everything else (hot-plug, kills) goes over
//! QMP or to the processes.
//!
//! Callers: the guest tests and the demo.

mod qmp;
mod serial;
mod vm;

pub use qmp::Qmp;
pub use serial::Reply;
pub use vm::{Disk, Vm, VmBuilder};

use crate::{host, paths, skip};
use anyhow::{Context, Result};
use std::path::PathBuf;

/// What a guest is booted from.
#[derive(Clone, Debug)]
pub struct Assets {
    /// The kernel as an ELF file that QEMU starts directly.
    pub kernel: PathBuf,
    /// The initramfs with the agent, the modules and the file-system tools.
    pub initramfs: PathBuf,
    /// `kvm` or `tcg`, as found by trying.
    pub accel: String,
}

impl Assets {
    /// What `cargo xtask setup` prepared, or a sentence saying what is missing.
    pub fn find() -> Result<Assets> {
        let dir = paths::guest();
        let hint = "run `cargo xtask setup` first";
        host::which("qemu-system-x86_64")
            .with_context(|| format!("qemu-system-x86_64 is not installed; {hint}"))?;
        let (kernel, initramfs) = (dir.join("vmlinux"), dir.join("initramfs.cpio"));
        for file in [&kernel, &initramfs] {
            std::fs::metadata(file)
                .with_context(|| format!("{} is missing; {hint}", file.display()))?;
        }
        let accel = match std::env::var("BEDPLATE_GUEST_ACCEL") {
            Ok(accel) => accel,
            Err(_) => {
                std::fs::read_to_string(dir.join("accel")).unwrap_or_else(|_| "tcg".to_owned())
            }
        };
        Ok(Assets { kernel, initramfs, accel: accel.trim().to_owned() })
    }

    /// The same for a test: when it can't run here, that is recorded under its name and `None` returned.
    pub fn or_skip(test: &str) -> Option<Assets> {
        match Assets::find() {
            Ok(assets) => Some(assets),
            Err(error) => {
                skip(test, &format!("{error:#}"));
                None
            }
        }
    }
}
