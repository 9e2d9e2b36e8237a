//! The packages: which program comes from which, and why it is needed.

use super::apt::Apt;
use anyhow::{Context, Result, bail};
use bedplate_tests::host;

/// A program that must be there.
struct Need {
    program: &'static str,
    package: &'static str,
    why: &'static str,
}

const fn need(program: &'static str, package: &'static str, why: &'static str) -> Need {
    Need { program, package, why }
}

const NEEDS: &[Need] = &[
    need("qemu-system-x86_64", "qemu-system-x86", "runs the guests"),
    need("qemu-img", "qemu-utils", "makes and checks images, to compare with"),
    need("qemu-io", "qemu-utils", "writes into images, to compare with"),
    need("qemu-storage-daemon", "qemu-utils", "the peer of the benchmark"),
    need("qemu-nbd", "qemu-utils", "NBD both ways"),
    need("fio", "fio", "verifying loads over NBD"),
    need("nbdinfo", "libnbd-bin", "an independent NBD client"),
    need("nbdcopy", "libnbd-bin", "an independent NBD client"),
    need("mkfs.xfs", "xfsprogs", "file systems in the guest and on the benchmark's device"),
    need("xfs_repair", "xfsprogs", "checks XFS after the guest's power-off"),
    need("xfs_db", "xfsprogs", "finds a guest's file in the image"),
    need("mkfs.ext4", "e2fsprogs", "file systems in the guest and for the demo's disk"),
    need("e2fsck", "e2fsprogs", "checks ext4 after the guest's power-off"),
    need("debugfs", "e2fsprogs", "reads a guest's file from the image"),
    need("blkdiscard", "util-linux", "trims from within the guest"),
    need("fstrim", "util-linux", "trims from within the guest"),
    need("mount", "mount", "mounts the benchmark's XFS"),
    need("busybox", "busybox-static", "the guest's ordinary commands"),
    need("dash", "dash", "the guest's shell"),
    need("depmod", "kmod", "finds which kernel modules belong together"),
    need("xz", "xz-utils", "unpacks the kernel and its modules"),
    need("zstd", "zstd", "unpacks the kernel and its modules"),
    need("dpkg-deb", "dpkg", "unpacks the kernel's package"),
];

/// `reconnect-ms`, which lets a guest outlive its disk's server, came with this version.
const QEMU_MAJOR: u32 = 10;

/// The packages that QEMU's programs come from; both must be of one version.
const QEMU_PACKAGES: [&str; 2] = ["qemu-system-x86", "qemu-utils"];

/// Installs what is missing; whether there was anything to do.
pub fn ensure() -> Result<bool> {
    if std::env::consts::ARCH != "x86_64" {
        bail!(
            "the guests and the benchmark need an x86_64 machine; this one is {}",
            std::env::consts::ARCH
        );
    }
    let missing: Vec<&Need> =
        NEEDS.iter().filter(|need| host::which(need.program).is_none()).collect();
    let old_qemu = !QEMU_VERSIONED
        .iter()
        .all(|program| installed_major(program).is_some_and(|major| major >= QEMU_MAJOR));
    if missing.is_empty() && !old_qemu {
        return Ok(false);
    }
    for need in &missing {
        eprintln!("setup: {} is missing ({}): package {}", need.program, need.why, need.package);
    }
    let mut others: Vec<&str> = missing
        .iter()
        .map(|need| need.package)
        .filter(|package| !QEMU_PACKAGES.contains(package))
        .collect();
    others.sort_unstable();
    others.dedup();
    let mut apt = Apt::new().with_context(|| {
        format!("missing here, to be installed by hand: {}", by_hand(&others, old_qemu))
    })?;
    apt.update()?;
    let suite = if old_qemu { qemu_suite(&mut apt)? } else { None };
    if !host::is_root() {
        bail!(
            "this is not root, so nothing was installed. Run as root:\n{}",
            commands(&others, old_qemu, suite.as_deref())
        );
    }
    if old_qemu {
        eprintln!("setup: installing {}", QEMU_PACKAGES.join(" "));
        apt.install(&QEMU_PACKAGES, suite.as_deref())?;
    }
    if !others.is_empty() {
        eprintln!("setup: installing {}", others.join(" "));
        apt.install(&others, None)?;
    }
    let still: Vec<&str> = NEEDS
        .iter()
        .map(|need| need.program)
        .filter(|program| host::which(program).is_none())
        .collect();
    if !still.is_empty() {
        bail!("still missing after the installation: {}", still.join(" "));
    }
    Ok(true)
}

const QEMU_VERSIONED: [&str; 2] = ["qemu-system-x86_64", "qemu-storage-daemon"];

/// The major version that a program of QEMU says it has.
fn installed_major(program: &str) -> Option<u32> {
    host::which(program)?;
    major_version(&host::run(host::tool(program).arg("--version")).ok()?)
}

/// The number before the first dot after the word `version`.
fn major_version(text: &str) -> Option<u32> {
    text.split_once("version ")?.1.split('.').next()?.parse().ok()
}

/// The suite to take QEMU from: `None` when the machine's own sources have a recent one.
fn qemu_suite(apt: &mut Apt) -> Result<Option<String>> {
    let candidate = apt.candidate("qemu-system-x86")?;
    if candidate.as_deref().and_then(upstream_major).is_some_and(|major| major >= QEMU_MAJOR) {
        return Ok(None);
    }
    eprintln!(
        "setup: QEMU {QEMU_MAJOR} or newer is needed, the machine's own package sources have {}",
        candidate.as_deref().unwrap_or("none")
    );
    let suite = apt.add_backports()?;
    apt.update()?;
    Ok(Some(suite))
}

/// The major version in a Debian version such as `1:10.0.2+ds-2`.
fn upstream_major(version: &str) -> Option<u32> {
    version.rsplit_once(':').map_or(version, |(_, rest)| rest).split('.').next()?.parse().ok()
}

fn by_hand(others: &[&str], qemu: bool) -> String {
    let mut words = others.to_vec();
    if qemu {
        words.extend(QEMU_PACKAGES);
        words.push("(QEMU 10 or newer)");
    }
    words.join(" ")
}

fn commands(others: &[&str], qemu: bool, suite: Option<&str>) -> String {
    let mut lines = Vec::new();
    if qemu {
        let mut line =
            format!("  apt-get install --no-install-recommends {}", QEMU_PACKAGES.join(" "));
        if let Some(suite) = suite {
            line.push_str(&format!(
                " -t {suite}    (after adding the suite {suite} to the apt sources)"
            ));
        }
        lines.push(line);
    }
    if !others.is_empty() {
        lines.push(format!("  apt-get install --no-install-recommends {}", others.join(" ")));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_programs_and_packages() {
        assert_eq!(major_version("QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)"), Some(10));
        assert_eq!(major_version("qemu-storage-daemon version 7.2.17"), Some(7));
        assert_eq!(upstream_major("1:7.2+dfsg-7+deb12u18"), Some(7));
        assert_eq!(upstream_major("10.0.2"), Some(10));
    }

    #[test]
    fn what_root_must_run_names_the_suite_only_for_qemu() {
        let text = commands(&["fio"], true, Some("bookworm-backports"));
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].contains("qemu-system-x86 qemu-utils -t bookworm-backports"));
        assert_eq!(lines[1].trim(), "apt-get install --no-install-recommends fio");
    }
}
