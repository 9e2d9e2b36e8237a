//! How other programs attach to an export: the very words to give them.

use bedplate_server::{ExportKind, NbdAddr};
use std::path::Path;

/// A program and what to give it: options, a piece of XML or JSON, or command lines.
pub struct Attach {
    /// A short name, for JSON.
    pub key: &'static str,
    /// What it is, for people.
    pub title: &'static str,
    /// The lines.
    pub lines: Vec<String>,
}

/// The ways to attach to export number `n`.
pub fn ways(n: usize, export: &ExportKind) -> Vec<Attach> {
    match export {
        ExportKind::Nbd { addr, name } => nbd(n, addr, name),
    }
}

fn nbd(n: usize, addr: &NbdAddr, name: &str) -> Vec<Attach> {
    let uri = addr.uri(name);
    let client = match addr {
        NbdAddr::Unix(path) => format!("nbd-client -unix {} /dev/nbd0", shell(&absolute(path))),
        NbdAddr::Tcp { host, port } => format!("nbd-client {host} {port} /dev/nbd0"),
    };
    let name = if name.is_empty() { String::new() } else { format!(" -N {}", shell(name)) };
    let drive = shell(&format!("file={},format=raw,if=virtio,id=nbd{n}", commas(&uri)));
    vec![
        Attach { key: "uri", title: "URI", lines: vec![uri.clone()] },
        Attach { key: "qemu", title: "QEMU", lines: vec![format!("-drive {drive}")] },
        Attach {
            key: "nbdinfo",
            title: "nbdinfo",
            lines: vec![format!("nbdinfo {}", shell(&uri))],
        },
        Attach {
            key: "nbd-client",
            title: "Linux kernel (as root, after 'modprobe nbd')",
            lines: vec![format!("{client}{name}")],
        },
    ]
}

/// The path as programs in other folders find it.
fn absolute(path: &Path) -> String {
    std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf()).display().to_string()
}

/// The word as a shell takes it.
fn shell(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:,@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// The value as QEMU's options take it: commas are doubled.
fn commas(value: &str) -> String {
    value.replace(',', ",,")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_survive_the_shell_and_qemus_options() {
        assert_eq!(shell("/run/a.sock"), "/run/a.sock");
        assert_eq!(shell("a b"), "'a b'");
        assert_eq!(shell("it's"), r"'it'\''s'");
        assert_eq!(shell("nbd+unix:///?socket=/x"), "'nbd+unix:///?socket=/x'");
        assert_eq!(commas("a,b"), "a,,b");
    }
}
