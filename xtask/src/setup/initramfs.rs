//! The guest's first file system: the agent, a shell, the file-system tools of this machine and the kernel modules they need.

use super::kernel::{self, Package};
use super::tree::Tree;
use anyhow::{Context, Result};
use bedplate_tests::host;
use std::collections::HashMap;
use std::path::Path;

/// The agent: sets the guest up, then runs what comes over the serial line (see `tests/src/guest/serial.rs`).
pub const AGENT: &str = include_str!("agent.sh");

/// Modules loaded at boot, with those that they need; what the kernel has built in is left out by itself.
pub const MODULES: &[&str] = &["virtio_pci", "virtio_blk", "ext4", "xfs"];

/// Programs copied from this machine, with their libraries.
pub const TOOLS: &[&str] =
    &["mkfs.ext4", "e2fsck", "mkfs.xfs", "xfs_repair", "blkdiscard", "blockdev", "fstrim", "dd"];

/// The whole initramfs.
pub fn build(package: &Package) -> Result<Tree> {
    let mut tree = system_tree()?;
    tree.file("init", 0o755, AGENT);
    let mut order = String::new();
    for module in load_order(package)? {
        let file = package.modules().join(&module);
        let packed = std::fs::read(&file).with_context(|| format!("reading {}", file.display()))?;
        let name = module.rsplit('/').next().unwrap_or(&module);
        let name = format!("{}.ko", name.split(".ko").next().unwrap_or(name));
        tree.file(&format!("modules/{name}"), 0o644, kernel::decompress(&packed)?);
        order.push_str(&name);
        order.push('\n');
    }
    tree.file("modules/order", 0o644, order);
    Ok(tree)
}

/// A root file system for a guest: the same without kernel modules, the agent being `/sbin/init`.
pub fn system_tree() -> Result<Tree> {
    let mut tree = Tree::default();
    for folder in ["bin", "dev", "etc", "mnt", "proc", "root", "run", "sbin", "sys", "tmp"] {
        tree.folder(folder);
    }
    tree.file("etc/passwd", 0o644, "root:x:0:0:root:/root:/bin/sh\n");
    tree.file("etc/group", 0o644, "root:x:0:\n");
    tree.link("etc/mtab", "/proc/mounts");
    if Path::new("/etc/mke2fs.conf").is_file() {
        tree.copy(Path::new("/etc/mke2fs.conf"), "etc/mke2fs.conf")?;
    }
    program(&mut tree, "busybox", "bin/busybox")?;
    for applet in host::run(host::tool("busybox").arg("--list"))?.lines() {
        // The list names busybox itself too.
        if !tree.has(&format!("bin/{applet}")) {
            tree.link(&format!("bin/{applet}"), "busybox");
        }
    }
    // Debian's busybox shell prefers its own applets to the PATH, so the shell is dash.
    program(&mut tree, "dash", "bin/dash")?;
    tree.link("bin/sh", "dash");
    for tool in TOOLS {
        program(&mut tree, tool, &format!("bin/{tool}"))?;
    }
    tree.file("sbin/init", 0o755, AGENT);
    Ok(tree)
}

/// Copies a program and the libraries that it is linked with.
fn program(tree: &mut Tree, name: &str, to: &str) -> Result<()> {
    let path = host::which(name).with_context(|| format!("{name} is not installed"))?;
    tree.copy(&path, to)?;
    // A static program makes ldd fail; it needs nothing.
    let libraries = host::output(host::tool("ldd").env("LC_ALL", "C").arg(&path))?;
    for word in String::from_utf8_lossy(&libraries.stdout).split_whitespace() {
        if word.starts_with('/') && !word.ends_with(':') && !tree.has(word) {
            tree.copy(Path::new(word), word)?;
        }
    }
    Ok(())
}

/// The module files (below the modules' folder) in the order in which they can be loaded.
fn load_order(package: &Package) -> Result<Vec<String>> {
    let folder = package.modules();
    let read = |name: &str| {
        std::fs::read_to_string(folder.join(name))
            .with_context(|| format!("reading {name} in {}", folder.display()))
    };
    order_from(
        &read("modules.dep")?,
        &read("modules.softdep").unwrap_or_default(),
        &read("modules.builtin")?,
        MODULES,
    )
}

/// `file.ko` of `kernel/fs/xfs/xfs.ko.xz`, with `_` for `-` as the kernel itself writes it.
fn module_name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split(".ko").next().unwrap_or(file).replace('-', "_")
}

fn order_from(
    dependencies: &str,
    soft: &str,
    builtin: &str,
    wanted: &[&str],
) -> Result<Vec<String>> {
    let mut files: HashMap<String, (&str, Vec<&str>)> = HashMap::new();
    for line in dependencies.lines() {
        if let Some((file, needs)) = line.split_once(':') {
            files.insert(module_name(file), (file, needs.split_whitespace().collect()));
        }
    }
    let is_builtin = |name: &str| builtin.lines().any(|line| module_name(line) == name);
    let mut order: Vec<String> = Vec::new();
    let mut add = |file: &str| {
        if !order.iter().any(|known| known == file) {
            order.push(file.to_owned());
        }
    };
    for name in wanted {
        let Some((file, needs)) = files.get(&name.replace('-', "_")) else {
            anyhow::ensure!(
                is_builtin(name),
                "the kernel has neither a module nor a built-in {name}"
            );
            continue;
        };
        // `softdep xfs pre: crc32c`: by the name of a module or an alias; an alias without a module of this name is built in.
        let pre =
            soft.lines().filter_map(|line| line.strip_prefix("softdep ")?.split_once(" pre: "));
        for (_, names) in pre.filter(|(module, _)| module == name) {
            for (soft_file, soft_needs) in
                names.split_whitespace().filter_map(|soft| files.get(&soft.replace('-', "_")))
            {
                soft_needs.iter().rev().for_each(|file| add(file));
                add(soft_file);
            }
        }
        // depmod lists what a module needs with the innermost last.
        needs.iter().rev().for_each(|file| add(file));
        add(file);
    }
    Ok(order)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_come_after_what_they_need() -> Result<()> {
        let dependencies = "kernel/a/top.ko.xz: kernel/a/middle.ko.xz kernel/a/low-est.ko.xz\n\
                            kernel/a/middle.ko.xz: kernel/a/low-est.ko.xz\nkernel/a/low-est.ko.xz:\nkernel/b/soft.ko:\n";
        let order = order_from(
            dependencies,
            "softdep top pre: soft other\n",
            "kernel/c/inside.ko\n",
            &["inside", "top"],
        )?;
        assert_eq!(
            order,
            [
                "kernel/b/soft.ko",
                "kernel/a/low-est.ko.xz",
                "kernel/a/middle.ko.xz",
                "kernel/a/top.ko.xz"
            ]
        );
        assert!(order_from(dependencies, "", "", &["absent"]).is_err());
        Ok(())
    }
}
