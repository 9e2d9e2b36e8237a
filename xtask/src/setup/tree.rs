//! A small file tree in memory, written out as a cpio archive for the kernel or as a folder for a file system image.

use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

enum Node {
    Folder,
    File { mode: u32, content: Vec<u8> },
    Link(String),
}

/// Paths (without a leading slash) and what they hold. Folders come before what is in them, as their names sort.
#[derive(Default)]
pub struct Tree(BTreeMap<String, Node>);

impl Tree {
    /// Adds a folder and those above it.
    pub fn folder(&mut self, path: &str) {
        let path = path.trim_matches('/');
        for (at, _) in path.match_indices('/').chain([(path.len(), "")]) {
            if at > 0 {
                self.0.entry(path[..at].to_owned()).or_insert(Node::Folder);
            }
        }
    }

    fn add(&mut self, path: &str, node: Node) {
        let path = path.trim_start_matches('/');
        if let Some((above, _)) = path.rsplit_once('/') {
            self.folder(above);
        }
        self.0.insert(path.to_owned(), node);
    }

    /// Adds a file.
    pub fn file(&mut self, path: &str, mode: u32, content: impl Into<Vec<u8>>) {
        self.add(path, Node::File { mode, content: content.into() });
    }

    /// Adds a copy of a file of this machine, following links.
    pub fn copy(&mut self, from: &Path, to: &str) -> Result<()> {
        let content = std::fs::read(from).with_context(|| format!("reading {}", from.display()))?;
        let mode = std::fs::metadata(from)?.permissions().mode() & 0o777;
        self.file(to, mode, content);
        Ok(())
    }

    /// Adds a symbolic link.
    pub fn link(&mut self, path: &str, target: &str) {
        self.add(path, Node::Link(target.to_owned()));
    }

    /// Whether something is at this path.
    pub fn has(&self, path: &str) -> bool {
        self.0.contains_key(path.trim_start_matches('/'))
    }

    /// The tree as a cpio archive in the "newc" format, owned by root.
    pub fn to_cpio(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for (number, (path, node)) in self.0.iter().enumerate() {
            let (mode, content) = match node {
                Node::Folder => (0o040_755, &[][..]),
                Node::File { mode, content } => (0o100_000 | mode, &content[..]),
                Node::Link(target) => (0o120_777, target.as_bytes()),
            };
            cpio_entry(&mut out, number + 1, path, mode, content);
        }
        cpio_entry(&mut out, 0, "TRAILER!!!", 0, &[]);
        out
    }

    /// Writes the tree into an existing folder.
    pub fn write_to(&self, folder: &Path) -> Result<()> {
        for (path, node) in &self.0 {
            let to = folder.join(path);
            let result = match node {
                Node::Folder => std::fs::create_dir_all(&to),
                Node::File { mode, content } => std::fs::write(&to, content).and_then(|()| {
                    std::fs::set_permissions(&to, std::fs::Permissions::from_mode(*mode))
                }),
                Node::Link(target) => symlink(target, &to),
            };
            result.with_context(|| format!("writing {}", to.display()))?;
        }
        Ok(())
    }
}

fn cpio_entry(out: &mut Vec<u8>, inode: usize, name: &str, mode: u32, content: &[u8]) {
    // inode, mode, uid, gid, links, mtime, size, device (2), rdevice (2), length of the name with its NUL, checksum
    let fields = [inode, mode as usize, 0, 0, 1, 0, content.len(), 0, 0, 0, 0, name.len() + 1, 0];
    out.extend_from_slice(b"070701");
    for field in fields {
        out.extend_from_slice(format!("{field:08x}").as_bytes());
    }
    out.extend_from_slice(name.as_bytes());
    out.push(0);
    out.resize(out.len().next_multiple_of(4), 0);
    out.extend_from_slice(content);
    out.resize(out.len().next_multiple_of(4), 0);
}

/// Writes a file beside `path` and renames it, so that nobody ever sees half of it.
pub fn replace(path: &Path, content: &[u8]) -> Result<()> {
    let part = path.with_extension("part");
    std::fs::write(&part, content).with_context(|| format!("writing {}", part.display()))?;
    std::fs::rename(&part, path).with_context(|| format!("putting {} in place", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_archive_holds_folders_before_their_files_and_ends_with_the_trailer() {
        let mut tree = Tree::default();
        tree.file("/a/b/file", 0o755, *b"12345");
        tree.link("a/link", "b/file");
        let names: Vec<&str> = tree.0.keys().map(String::as_str).collect();
        assert_eq!(names, ["a", "a/b", "a/b/file", "a/link"]);
        let cpio = tree.to_cpio();
        assert_eq!(cpio.len() % 4, 0);
        // The first entry: header of 110 bytes, "a" and NUL, no content.
        assert_eq!(&cpio[..14], b"07070100000001");
        assert_eq!(&cpio[14..22], b"000041ed");
        assert_eq!(&cpio[110..112], b"a\0");
        assert!(cpio.windows(10).any(|window| window == b"TRAILER!!!"));
    }

    #[test]
    fn the_folder_on_disk_is_the_same_tree() -> Result<()> {
        let dir = tempfile::tempdir()?;
        let mut tree = Tree::default();
        tree.file("bin/tool", 0o755, *b"x");
        tree.link("bin/other", "tool");
        tree.write_to(dir.path())?;
        assert_eq!(std::fs::read(dir.path().join("bin/other"))?, b"x");
        assert_eq!(
            std::fs::metadata(dir.path().join("bin/tool"))?.permissions().mode() & 0o777,
            0o755
        );
        Ok(())
    }
}
