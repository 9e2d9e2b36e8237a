//! Where things lie: the workspace, its target folder, what `cargo xtask setup` prepared, and the `bedplate` command.

use anyhow::{Context, Result, bail};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The top folder of the workspace.
pub fn workspace() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.parent().unwrap_or(own).to_path_buf()
}

/// Cargo's target folder (`CARGO_TARGET_DIR` when set).
pub fn target() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => workspace().join(dir),
        None => workspace().join("target"),
    }
}

/// The folder with the guest's kernel and initramfs (`BEDPLATE_GUEST_DIR` when set).
pub fn guest() -> PathBuf {
    std::env::var_os("BEDPLATE_GUEST_DIR").map_or_else(|| target().join("guest"), PathBuf::from)
}

/// The `bedplate` command under test: `BEDPLATE_BIN` when set, else built once in the profile of the tests.
pub fn bedplate() -> Result<PathBuf> {
    static BUILT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    if let Some(path) = std::env::var_os("BEDPLATE_BIN") {
        return Ok(PathBuf::from(path));
    }
    let built = BUILT.get_or_init(|| build_bedplate("test").map_err(|error| format!("{error:#}")));
    built.clone().map_err(anyhow::Error::msg)
}

/// Builds the `bedplate` command in a cargo profile and returns its path.
pub fn build_bedplate(profile: &str) -> Result<PathBuf> {
    build(profile, "bedplate", "bedplate")
}

/// Builds the binary `bin` of `package` in a cargo profile and returns its path.
pub fn build(profile: &str, package: &str, bin: &str) -> Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo"));
    let status = Command::new(cargo)
        .current_dir(workspace())
        .args(["build", "--quiet", "--profile", profile, "--package", package, "--bin", bin])
        .status()
        .context("cargo can't be run")?;
    if !status.success() {
        bail!("building {bin} in the profile {profile} failed");
    }
    // The profiles dev and test share the folder `debug`.
    let folder = if matches!(profile, "dev" | "test") { "debug" } else { profile };
    Ok(target().join(folder).join(bin))
}
