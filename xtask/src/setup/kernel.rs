//! The guest's kernel: Debian's kernel for clouds, downloaded and unpacked into the target folder.

use super::apt::Apt;
use super::tree;
use anyhow::{Context, Result, bail};
use bedplate_tests::host;
use std::cmp::Ordering;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// Raised when kernels unpacked by an earlier version of this file must not be used.
pub const RECIPE: u32 = 1;

/// An unpacked kernel package.
pub struct Package {
    /// The kernel's version, as `uname -r` gives it.
    pub version: String,
    /// The folder that holds `boot` and `lib/modules`.
    pub root: PathBuf,
}

impl Package {
    /// The folder of the modules.
    pub fn modules(&self) -> PathBuf {
        let merged = self.root.join("usr/lib/modules");
        let base = if merged.is_dir() { merged } else { self.root.join("lib/modules") };
        base.join(&self.version)
    }
}

/// The unpacked kernel; downloaded when it is not there yet.
pub fn fetch(guest: &Path) -> Result<Package> {
    let root = guest.join("kernel");
    if let Ok(version) = std::fs::read_to_string(root.join("version")) {
        return Ok(Package { version, root });
    }
    let mut apt = Apt::new().context("the guest's kernel comes as a Debian package")?;
    apt.update()?;
    let names = apt.names("linux-image-")?;
    let package =
        newest(&names).context("the package sources hold no linux-image-*-cloud-amd64")?;
    eprintln!("setup: downloading {package} (for the guests only; it is not installed)");
    let work = tempfile::tempdir_in(guest)?;
    apt.download(package, work.path())?;
    let deb = find(work.path(), |name| name.ends_with(".deb"))?;
    let unpacked = work.path().join("kernel");
    host::run(host::tool("dpkg-deb").arg("--extract").args([&deb, &unpacked]))?;
    let image = find(&unpacked.join("boot"), |name| name.starts_with("vmlinuz-"))?;
    let version = image
        .file_name()
        .and_then(|name| name.to_str())
        .and_then(|name| name.strip_prefix("vmlinuz-"));
    let version = version.context("the kernel's name is not text")?.to_owned();
    let made = Package { version: version.clone(), root: unpacked.clone() };
    make_dependencies(&made)?;
    tree::replace(&unpacked.join("version"), version.as_bytes())?;
    // An unpacked kernel without its version file is the rest of an interrupted run.
    let _ = std::fs::remove_dir_all(&root);
    std::fs::rename(&unpacked, &root)
        .with_context(|| format!("putting {} in place", root.display()))?;
    Ok(Package { version, root })
}

/// `depmod`, which Debian runs when a kernel is installed. It looks for `lib/modules` below the folder given.
fn make_dependencies(package: &Package) -> Result<()> {
    let base = package
        .modules()
        .ancestors()
        .nth(3)
        .map(Path::to_path_buf)
        .context("the modules' folder has no parents")?;
    host::run(host::tool("depmod").arg("-b").arg(base).arg(&package.version)).map(drop)
}

fn find(folder: &Path, wanted: impl Fn(&str) -> bool) -> Result<PathBuf> {
    let entries =
        std::fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))?;
    let mut paths = entries.flatten().map(|entry| entry.path());
    let found =
        paths.find(|path| path.file_name().and_then(|name| name.to_str()).is_some_and(&wanted));
    found.with_context(|| format!("{} does not hold what was expected", folder.display()))
}

/// The newest kernel for clouds; at the same version the signed package, as that is the ordinary one.
fn newest(names: &[String]) -> Option<&str> {
    let kernels = names.iter().filter_map(|name| {
        let rest = name.strip_prefix("linux-image-")?;
        let (version, signed) = match rest.strip_suffix("-unsigned") {
            Some(rest) => (rest, false),
            None => (rest, true),
        };
        let version = version.strip_suffix("-cloud-amd64")?;
        // Meta-packages such as linux-image-6.12-cloud-amd64 have no revision or no third number.
        let full =
            version.split(['.', '-', '+']).take_while(|part| part.parse::<u32>().is_ok()).count()
                >= 3;
        full.then_some((version, signed, name))
    });
    let best = kernels.max_by(|a, b| compare_versions(a.0, b.0).then(a.1.cmp(&b.1)));
    best.map(|(_, _, name)| name.as_str())
}

/// Compares the numbers in two versions, one after the other.
fn compare_versions(a: &str, b: &str) -> Ordering {
    let numbers = |text: &str| -> Vec<u64> {
        text.split(|letter: char| !letter.is_ascii_digit())
            .filter_map(|part| part.parse().ok())
            .collect()
    };
    numbers(a).cmp(&numbers(b))
}

/// The kernel as an ELF file, taken out of the compressed image: QEMU starts it directly, which saves the emulated
/// decompression at every boot.
pub fn vmlinux(package: &Package) -> Result<Vec<u8>> {
    let path = package.root.join("boot").join(format!("vmlinuz-{}", package.version));
    let image = std::fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
    let payload = payload(&image)
        .with_context(|| format!("{} is not a kernel image of the known form", path.display()))?;
    let elf = decompress(payload)?;
    if !elf.starts_with(b"\x7fELF") {
        bail!("the payload of {} is not an ELF file", path.display());
    }
    Ok(elf)
}

/// The compressed payload, found through the header of the x86 boot protocol.
fn payload(image: &[u8]) -> Option<&[u8]> {
    let word =
        |at: usize| Some(u32::from_le_bytes(image.get(at..at + 4)?.try_into().ok()?) as usize);
    let version = u16::from_le_bytes(image.get(0x206..0x208)?.try_into().ok()?);
    // The header names the payload since version 2.08 of the protocol.
    if image.get(0x202..0x206)? != b"HdrS" || version < 0x208 {
        return None;
    }
    let setup_sectors = match image.get(0x1f1)? {
        0 => 4,
        sectors => usize::from(*sectors),
    };
    let start = (setup_sectors + 1) * 512 + word(0x248)?;
    // The last four bytes are the length after decompression, for the kernel's own use.
    let length = word(0x24c)?.checked_sub(4)?;
    image.get(start..start.checked_add(length)?)
}

/// Decompresses by the magic number at the start, with the ordinary tools.
pub fn decompress(data: &[u8]) -> Result<Vec<u8>> {
    let (program, arguments) = match data {
        [0xfd, b'7', b'z', b'X', b'Z', ..] => ("xz", "-dc"),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => ("zstd", "-dc"),
        [0x1f, 0x8b, ..] => ("gzip", "-dc"),
        [0x5d, 0, 0, ..] => ("xz", "-dcFlzma"),
        [0x7f, b'E', b'L', b'F', ..] => return Ok(data.to_vec()),
        _ => bail!("compressed in a way that is not known here"),
    };
    let mut command = host::tool(program);
    let mut child = command
        .arg(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("{program} can't be run"))?;
    let mut input = child.stdin.take().context("no pipe")?;
    let output = std::thread::scope(|scope| {
        // A broken pipe shows as a failed exit below.
        scope.spawn(move || input.write_all(data));
        child.wait_with_output()
    })?;
    if !output.status.success() {
        bail!("{program} could not decompress the kernel or a module ({})", output.status);
    }
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_full_and_signed_kernel_is_chosen() {
        let names = [
            "linux-image-cloud-amd64",
            "linux-image-6.12-cloud-amd64",
            "linux-image-6.1.0-57-cloud-amd64",
            "linux-image-6.12.9+deb12-cloud-amd64",
            "linux-image-6.12.117+deb12-cloud-amd64-unsigned",
            "linux-image-6.12.117+deb12-cloud-amd64",
            "linux-image-6.12.117+deb12-cloud-amd64-dbg",
            "linux-image-6.13.1+deb12-amd64",
        ]
        .map(str::to_owned);
        assert_eq!(newest(&names), Some("linux-image-6.12.117+deb12-cloud-amd64"));
        assert_eq!(newest(&names[..2]), None);
    }

    #[test]
    fn a_payload_outside_of_the_image_is_refused() {
        let mut image = vec![0; 0x400];
        image[0x202..0x208].copy_from_slice(b"HdrS\x0f\x02");
        image[0x248..0x24c].copy_from_slice(&u32::MAX.to_le_bytes());
        image[0x24c..0x250].copy_from_slice(&100_u32.to_le_bytes());
        assert!(payload(&image).is_none());
        assert!(payload(&image[..0x100]).is_none());
    }
}
