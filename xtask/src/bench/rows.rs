//! The rows of the benchmark's table: what is measured, on what, and what is wanted of it.

use super::Measured;

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
    /// A raw file on XFS.
    XfsFile,
    /// A qcow2 image on XFS; native is the bare device.
    Qcow2 {
        /// Bytes of a cluster.
        cluster: u32,
    },
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
    pub name: &'static str,
    /// What the disk lies on.
    pub target: Target,
    /// Who is measured.
    pub subjects: &'static [Subject],
    /// Virtqueues, and threads of the load.
    pub queues: u16,
    /// Every block once instead of for a time.
    pub once: bool,
    depth: u32,
    write: bool,
    wanted: Wanted,
}

const SERVERS: &[Subject] = &[Subject::Peer, Subject::Bedplate];
const ALL: &[Subject] = &[Subject::Native, Subject::Peer, Subject::Bedplate];

const fn row(name: &'static str, target: Target, write: bool, wanted: Wanted) -> Row {
    Row { name, target, subjects: ALL, queues: 1, once: false, depth: 64, write, wanted }
}

/// All rows, 4 KiB random I/O each.
pub fn all() -> Vec<Row> {
    use Target::{Device, Null, Qcow2, XfsFile};
    use Wanted::{LatencyOfPeer, OfNative, OfPeer};
    let (small, usual) = (Qcow2 { cluster: 4096 }, Qcow2 { cluster: 65536 });
    vec![
        Row { subjects: SERVERS, ..row("null disk, read, depth 64", Null, false, OfPeer(6.0)) },
        Row {
            subjects: SERVERS,
            depth: 1,
            ..row("null disk, read, depth 1", Null, false, LatencyOfPeer(0.5))
        },
        row("raw on the device, read", Device, false, OfNative(1.0)),
        row("raw on the device, write", Device, true, OfNative(0.93)),
        row("raw on XFS, read", XfsFile, false, OfNative(0.93)),
        row("raw on XFS, write", XfsFile, true, OfNative(0.93)),
        Row { queues: 2, ..row("raw on XFS, read, 2 queues", XfsFile, false, OfNative(0.9)) },
        Row { queues: 2, ..row("raw on XFS, write, 2 queues", XfsFile, true, OfNative(0.9)) },
        row("qcow2 on XFS, overwrite", usual, true, OfNative(0.9)),
        Row { once: true, ..row("qcow2 first pass, 64 KiB clusters", usual, true, OfPeer(3.0)) },
        Row { once: true, ..row("qcow2 first pass, 4 KiB clusters", small, true, OfPeer(3.0)) },
    ]
}

impl Row {
    /// The words of `bedplate bench run` for this row.
    pub fn words(&self) -> Vec<String> {
        vec![
            format!("--mix={}", if self.write { "write" } else { "read" }),
            format!("--depth={}", self.depth),
            format!("--jobs={}", self.queues),
            // At millions of requests a second each measured latency counts.
            format!("--sample={}", if self.depth == 1 { 1 } else { 16 }),
        ]
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
            self.name.to_owned(),
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
