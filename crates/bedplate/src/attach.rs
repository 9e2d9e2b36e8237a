//! How other programs attach to an export: the very words to give them.

use bedplate_server::{ExportKind, NbdAddr};

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
        ExportKind::VhostUserBlk { socket, queues, queue_size } => vhost_user_blk(
            n,
            &socket.display().to_string(),
            *queues,
            (*queue_size).min(GUEST_QUEUE_SIZE),
        ),
    }
}

/// Large enough for the largest request; what more brings is little.
const GUEST_QUEUE_SIZE: u16 = 256;

fn vhost_user_blk(n: usize, socket: &str, queues: u16, entries: u16) -> Vec<Attach> {
    let chardev =
        shell(&format!("socket,id=bedplate{n},path={},reconnect-ms=1000", commas(socket)));
    let device =
        format!("vhost-user-blk-pci,chardev=bedplate{n},num-queues={queues},queue-size={entries}");
    let memory = "-object memory-backend-memfd,id=mem,size=4G,share=on -machine memory-backend=mem";
    let cloud =
        shell(&format!("vhost_user=true,socket={socket},num_queues={queues},queue_size={entries}"));
    let drive = serde_json::json!({
        "drive_id": format!("bedplate{n}"), "is_root_device": false, "cache_type": "Writeback",
        "socket": socket,
    });
    vec![
        Attach {
            key: "qemu",
            title: "QEMU (before 9.2 write reconnect=1 for reconnect-ms=1000; size= is that of -m)",
            lines: vec![memory.into(), format!("-chardev {chardev} -device {device}")],
        },
        Attach { key: "libvirt", title: "libvirt", lines: libvirt(n, socket, queues, entries) },
        Attach {
            key: "cloud-hypervisor",
            title: "Cloud Hypervisor (size= as the machine has)",
            lines: vec![format!("--memory size=4G,shared=on --disk {cloud}")],
        },
        Attach {
            key: "firecracker",
            title: "Firecracker (one queue; give the path inside its jail)",
            lines: vec![format!("PUT /drives/bedplate{n} {drive}")],
        },
    ]
}

fn libvirt(n: usize, socket: &str, queues: u16, entries: u16) -> Vec<String> {
    // The first disk of a machine is often its own.
    let target = char::from(b'b' + (n % 25) as u8);
    let text = format!(
        "\
<memoryBacking>
  <source type='memfd'/>
  <access mode='shared'/>
</memoryBacking>
<disk type='vhostuser' device='disk'>
  <driver name='qemu' type='raw' queues='{queues}' queue_size='{entries}'/>
  <source type='unix' path='{}'>
    <reconnect enabled='yes' timeout='1'/>
  </source>
  <target dev='vd{target}' bus='virtio'/>
</disk>",
        xml(socket)
    );
    text.lines().map(str::to_owned).collect()
}

fn nbd(n: usize, addr: &NbdAddr, name: &str) -> Vec<Attach> {
    let uri = addr.uri(name);
    let client = match addr {
        NbdAddr::Unix(path) => {
            format!("nbd-client -unix {} /dev/nbd0", shell(&path.display().to_string()))
        }
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

/// The text as a value of an XML attribute.
fn xml(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&apos;"),
            '"' => out.push_str("&quot;"),
            c => out.push(c),
        }
    }
    out
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
        assert_eq!(xml("a'<&"), "a&apos;&lt;&amp;");
    }
}
