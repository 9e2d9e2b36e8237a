//! The rows of the benchmark's table: what is measured, on what, and what is wanted of it.

use super::{Measured, REGION};

/// Who does the I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// io_uring on the bare device or file.
    Native,
    /// `qemu-storage-daemon`.
    Peer,
    /// `bedplate serve`.
    Bedplate,
}

/// What the disk lies on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// A disk that costs nothing.
    Null,
    /// The bare device.
    Device,
    /// A raw file.
    File(Fs),
    /// A qcow2 image.
    Qcow2 {
        /// What it lies on.
        fs: Fs,
        /// Bytes of a cluster.
        cluster: u32,
        /// What native works on: the bare device, else a raw file that was written before.
        bare: bool,
    },
}

/// A file system on a device of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fs {
    /// XFS.
    Xfs,
    /// ext4.
    Ext4,
}

impl Fs {
    /// Both.
    pub const ALL: [Fs; 2] = [Fs::Xfs, Fs::Ext4];

    /// The name as `mkfs` has it.
    pub fn name(self) -> &'static str {
        match self {
            Fs::Xfs => "xfs",
            Fs::Ext4 => "ext4",
        }
    }
}

/// What the ratio that a row is about should be.
#[derive(Clone, Copy, Debug)]
enum Wanted {
    /// At least this many times native's rate.
    OfNative(f64),
    /// At least this many times the peer's rate.
    OfPeer(f64),
    /// At most this part of the peer's latency.
    LatencyOfPeer(f64),
}

/// One row.
pub struct Row {
    /// For the table.
    pub name: String,
    /// What the disk lies on.
    pub target: Target,
    /// Who is measured.
    pub subjects: &'static [Subject],
    /// Virtqueues, and threads of the load.
    pub queues: u16,
    /// Every block once instead of for a time.
    pub once: bool,
    /// Bytes of the disk that are used.
    pub region: u64,
    depth: u32,
    write: bool,
    /// Bytes a request.
    block: u64,
    sequential: bool,
    /// Bytes of writes after which all is waited for and flushed.
    flush: Option<u64>,
    wanted: Wanted,
}

const SERVERS: &[Subject] = &[Subject::Peer, Subject::Bedplate];
const ALL: &[Subject] = &[Subject::Native, Subject::Peer, Subject::Bedplate];

fn row(name: impl Into<String>, target: Target, write: bool, wanted: Wanted) -> Row {
    Row {
        name: name.into(),
        target,
        subjects: ALL,
        queues: 1,
        once: false,
        region: REGION,
        depth: 64,
        write,
        block: 4096,
        sequential: false,
        flush: None,
        wanted,
    }
}

/// All rows; 4 KiB random I/O where the name does not say otherwise.
pub fn all() -> Vec<Row> {
    use Target::{Device, File, Null};
    use Wanted::{LatencyOfPeer, OfNative, OfPeer};
    let xfs = File(Fs::Xfs);
    let mut rows = vec![
        Row { subjects: SERVERS, ..row("null disk, read, depth 64", Null, false, OfPeer(6.0)) },
        Row {
            subjects: SERVERS,
            depth: 1,
            ..row("null disk, read, depth 1", Null, false, LatencyOfPeer(0.5))
        },
        row("raw on the device, read", Device, false, OfNative(1.0)),
        row("raw on the device, write", Device, true, OfNative(0.93)),
        row("raw on XFS, read", xfs, false, OfNative(0.93)),
        row("raw on XFS, write", xfs, true, OfNative(0.93)),
        Row { queues: 2, ..row("raw on XFS, read, 2 queues", xfs, false, OfNative(0.9)) },
        Row { queues: 2, ..row("raw on XFS, write, 2 queues", xfs, true, OfNative(0.9)) },
    ];
    rows.extend(Fs::ALL.into_iter().flat_map(qcow2));
    rows
}

/// The rows of qcow2 images on one file system.
fn qcow2(fs: Fs) -> Vec<Row> {
    use Wanted::{OfNative, OfPeer};
    const MIB: u64 = 1 << 20;
    let usual = Target::Qcow2 { fs, cluster: 65536, bare: true };
    let small = Target::Qcow2 { fs, cluster: 4096, bare: true };
    let beside_a_file = Target::Qcow2 { fs, cluster: 65536, bare: false };
    let name = |what: &str| format!("qcow2 on {}, {what}", fs.name());
    let pass =
        |what: &str, target, wanted| Row { once: true, ..row(name(what), target, true, wanted) };
    let stream = |what: &str, block, depth| Row {
        block,
        depth,
        sequential: true,
        ..pass(what, usual, OfNative(0.9))
    };
    vec![
        row(name("overwrite"), usual, true, OfNative(0.9)),
        pass("first pass", usual, OfPeer(3.0)),
        pass("first pass, 4K clusters", small, OfNative(0.9)),
        stream("first pass, sequential 64K", 65536, 8),
        stream("first pass, sequential 1M", MIB, 4),
        Row {
            flush: Some(64 * MIB),
            target: beside_a_file,
            wanted: OfPeer(2.0),
            ..stream("growth by 1M, flush each 64M", MIB, 4)
        },
        Row {
            depth: 1,
            flush: Some(4096),
            region: 32 * MIB,
            ..pass("first pass, flush after each", beside_a_file, OfPeer(1.5))
        },
        row(name("overwrite, beside a raw file"), beside_a_file, true, OfNative(0.9)),
        Row { queues: 2, ..row(name("overwrite, 2 queues"), beside_a_file, true, OfNative(0.9)) },
    ]
}

impl Row {
    /// The words of `bedplate bench run` for this row.
    pub fn words(&self) -> Vec<String> {
        let mix = if self.write { "write" } else { "read" };
        let mut words = vec![
            format!("--mix={mix}"),
            format!("--block={}", self.block),
            format!("--depth={}", self.depth),
            format!("--jobs={}", self.queues),
        ];
        if self.sequential {
            words.push("--pattern=sequential".to_owned());
        }
        if let Some(bytes) = self.flush {
            words.extend([format!("--flush-bytes={bytes}"), "--flush-alone".to_owned()]);
        }
        words
    }

    /// The row's line of the table; `median` gives the median of a value over a subject's runs, if it was measured.
    pub fn line(
        &self,
        median: &dyn Fn(Subject, fn(&Measured) -> f64) -> Option<f64>,
    ) -> Vec<String> {
        let latency = matches!(self.wanted, Wanted::LatencyOfPeer(_));
        let value: fn(&Measured) -> f64 = if latency { |run| run.mean_us } else { |run| run.iops };
        let [native, peer, own] = [Subject::Native, Subject::Peer, Subject::Bedplate]
            .map(|subject| median(subject, value));
        let show = |value: Option<f64>| match value {
            Some(value) if latency => format!("{value:.1}"),
            Some(value) => format!("{:.1}k", value / 1000.0),
            None => "-".to_owned(),
        };
        let ratio = |other: Option<f64>| own.zip(other).map(|(own, other)| own / other);
        let show_ratio =
            |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.2}"));
        let (wanted, reached) = match self.wanted {
            Wanted::OfNative(least) => {
                (format!("{least:.2} of native"), ratio(native).map(|ratio| ratio >= least))
            }
            Wanted::OfPeer(least) => {
                (format!("{least:.1} x peer"), ratio(peer).map(|ratio| ratio >= least))
            }
            Wanted::LatencyOfPeer(most) => {
                (format!("<= {most:.1} x peer"), ratio(peer).map(|ratio| ratio <= most))
            }
        };
        let mark = match reached {
            Some(true) => "reached",
            Some(false) => "missed",
            None => "-",
        };
        let plain = |subject, value: fn(&Measured) -> f64| {
            median(subject, value).map_or("-".to_owned(), |value| format!("{value:.1}"))
        };
        vec![
            self.name.clone(),
            if latency { "us" } else { "IOPS" }.to_owned(),
            show(native),
            show(peer),
            show(own),
            show_ratio(ratio(native)),
            show_ratio(ratio(peer)),
            format!("{wanted}: {mark}"),
            plain(Subject::Bedplate, |run| run.p99_us),
            plain(Subject::Peer, |run| run.p99_us),
            plain(Subject::Bedplate, |run| run.cpu_us),
            plain(Subject::Peer, |run| run.cpu_us),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_compares_with_what_it_is_about() {
        let measured = |subject, _: fn(&Measured) -> f64| match subject {
            Subject::Native => Some(100_000.0),
            Subject::Peer => Some(50_000.0),
            Subject::Bedplate => Some(95_000.0),
        };
        let rows = all();
        let line = |name: &str| {
            rows.iter()
                .find(|row| row.name == name)
                .map(|row| row.line(&measured))
                .unwrap_or_default()
        };
        assert_eq!(
            line("raw on the device, write")[4..8],
            ["95.0k", "0.95", "1.90", "0.93 of native: reached"]
        );
        assert_eq!(line("raw on the device, read")[7], "1.00 of native: missed");
        assert_eq!(line("null disk, read, depth 64")[7], "6.0 x peer: missed");
    }
}
