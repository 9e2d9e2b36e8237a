//! `cargo xtask setup`: everything that the demo, the tests and the benchmark need from outside of Cargo.
//!
//! Packages of the distribution are installed when this runs as root, and named with the exact command when it does not. The
//! guest's kernel is downloaded and unpacked into the target folder, never installed.
//!
//! Invariants: safe to run twice at once (a lock file), safe to interrupt (results are put in place by renaming), and fast when
//! there is nothing to do: a stamp says what the guest was made from.

mod apt;
mod initramfs;
mod kernel;
mod packages;
pub mod tree;

use anyhow::{Context, Result};
use bedplate_tests::guest::{Assets, VmBuilder};
use bedplate_tests::paths;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::time::{Duration, Instant};

pub use initramfs::system_tree;

/// A guest that has not said a word after this time with KVM will not come.
const KVM_LIMIT: Duration = Duration::from_secs(10);

/// Makes sure that everything is there; says what it does only when there is something to do.
pub fn run() -> Result<()> {
    let guest = paths::guest();
    std::fs::create_dir_all(&guest).with_context(|| format!("creating {}", guest.display()))?;
    let lock = File::create(guest.join("setup.lock")).context("the lock file of the set-up")?;
    lock.lock().context("the lock file of the set-up")?;
    let start = Instant::now();
    let mut did = packages::ensure()?;
    did |= guest_files(&guest)?;
    did |= find_accelerator(&guest)?;
    if did {
        eprintln!("setup: done in {:.1} s", start.elapsed().as_secs_f64());
    }
    Ok(())
}

/// The guest's kernel and initramfs, made anew when anything they are made from has changed here.
fn guest_files(guest: &Path) -> Result<bool> {
    let mut hasher = DefaultHasher::new();
    (initramfs::AGENT, initramfs::MODULES, initramfs::TOOLS, kernel::RECIPE).hash(&mut hasher);
    let wanted = format!("{:016x}", hasher.finish());
    let stamp = guest.join("stamp");
    let complete = ["vmlinux", "initramfs.cpio"].iter().all(|name| guest.join(name).is_file());
    if complete && std::fs::read_to_string(&stamp).is_ok_and(|found| found == wanted) {
        return Ok(false);
    }
    let package = kernel::fetch(guest)?;
    eprintln!("setup: making the guest's kernel image and initramfs from {}", package.version);
    tree::replace(&guest.join("vmlinux"), &kernel::vmlinux(&package)?)?;
    let tree = initramfs::build(&package)?;
    tree::replace(&guest.join("initramfs.cpio"), &tree.to_cpio())?;
    // The next kernel may get on better, or worse, with this machine's KVM.
    let _ = std::fs::remove_file(guest.join("accel"));
    tree::replace(&stamp, wanted.as_bytes())?;
    Ok(true)
}

/// Whether KVM boots the kernel here is found by trying: a device file that can be opened is no proof.
fn find_accelerator(guest: &Path) -> Result<bool> {
    let file = guest.join("accel");
    if file.is_file() {
        return Ok(false);
    }
    let openable = File::options().read(true).write(true).open("/dev/kvm").is_ok();
    let mut accel = "tcg";
    if openable {
        eprintln!(
            "setup: trying whether KVM boots the guest here (at most {} s)",
            KVM_LIMIT.as_secs()
        );
        let assets = Assets { accel: "kvm".to_owned(), ..Assets::find()? };
        if VmBuilder::new(&assets).boot_limit(KVM_LIMIT).boot().is_ok() {
            accel = "kvm";
        }
    }
    let name = if accel == "kvm" { "KVM" } else { "software emulation (KVM does not work here)" };
    eprintln!("setup: guests run with {name}");
    tree::replace(&file, accel.as_bytes())?;
    Ok(true)
}
