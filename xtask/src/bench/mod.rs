//! `cargo xtask bench`: Bedplate against io_uring on the bare device or file, and against QEMU's storage daemon.
//!
//! Machines are shared and noisy, so only ratios within one run count: the subjects of a row are measured in turn, several times
//! over, and the medians compared. The load comes without a VM from a vhost-user front end in user space; the yardstick ("native") is
//! one thread that drives io_uring itself. A server has a core beside its client, so it can exceed native where the device costs CPU.

mod agree;
mod rows;
mod zram;

use crate::{report, setup};
use anyhow::{Context, Result, bail};
use bedplate_tests::server::{Config, Program, Server};
use bedplate_tests::{host, paths};
use rows::{Fs, Row, Subject, Target};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

const MIB: u64 = 1 << 20;

/// The parts of a disk that are written and read.
const REGION: u64 = 512 * MIB;

/// Fills a disk quickly.
const FILL: [&str; 3] = ["--mix=write", "--block=64K", "--depth=8"];

/// What one run measured.
#[derive(Clone, Copy, Debug)]
struct Measured {
    iops: f64,
    mean_us: f64,
    p99_us: f64,
    /// CPU time of the server a request, in microseconds; 0 for native.
    cpu_us: f64,
}

/// What all runs share.
struct Bench {
    bedplate: PathBuf,
    device: PathBuf,
    /// A mounted file system of each kind.
    mounted: Vec<(Fs, zram::Mounted)>,
    /// Sockets and logs.
    work: tempfile::TempDir,
    seconds: f64,
    rounds: usize,
    interrupted: Arc<AtomicBool>,
}

/// Measures everything and prints the table; with `fio` compares the load engine with fio instead.
pub fn run(quick: bool, fio: bool) -> Result<()> {
    setup::run()?;
    if !host::is_root() {
        bail!(
            "the benchmark makes zram devices and mounts file systems on them, and that needs root"
        );
    }
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&interrupted))?;
    }
    eprintln!("bench: building in the release profile");
    let bedplate = paths::build_bedplate("release")?;
    let device = zram::Zram::new(REGION)?;
    let mount = |fs: Fs| {
        let folder = paths::target().join(format!("bench-{}", fs.name()));
        Ok((fs, zram::Mounted::new(fs.name(), 3 * 1024 * MIB, &folder)?))
    };
    let mounted = Fs::ALL.into_iter().map(mount).collect::<Result<Vec<_>>>()?;
    let (seconds, rounds) = if quick { (0.7, 1) } else { (3.0, 5) };
    let bench = Bench {
        bedplate,
        device: device.device()?,
        mounted,
        work: tempfile::tempdir()?,
        seconds,
        rounds,
        interrupted,
    };
    let start = Instant::now();
    bench.prepare()?;
    if fio {
        return bench.agree();
    }
    let mut table = Vec::new();
    for row in rows::all() {
        table.push(bench.row(&row).with_context(|| format!("while measuring {}", row.name))?);
    }
    println!();
    report::table(
        &[
            "load",
            "unit",
            "native",
            "peer",
            "bedplate",
            "to native",
            "to peer",
            "wanted",
            "p99 us",
            "peer p99",
            "CPU us",
            "peer CPU",
        ],
        &table,
    );
    println!(
        "\nMedians of {rounds} alternating runs of {seconds} s (first passes: 512 MiB once). Peer: qemu-storage-daemon with an iothread and"
    );
    println!(
        "aio=native. Native: io_uring on the bare device or file. CPU: of the server, a request. {:.0} s in all.",
        start.elapsed().as_secs_f64()
    );
    Ok(())
}

impl Bench {
    /// Writes the device and the files once: reading space that was never written measures nothing.
    fn prepare(&self) -> Result<()> {
        eprintln!("bench: filling the device and the files");
        let mut places = vec![self.device.clone()];
        for fs in Fs::ALL {
            let path = self.raw_file(fs)?;
            std::fs::File::create(&path)?.set_len(REGION)?;
            places.push(path);
        }
        for path in &places {
            self.load(Some(path), None, &FILL, true, REGION)?;
        }
        Ok(())
    }

    fn folder(&self, fs: Fs) -> Result<&Path> {
        let mounted = self.mounted.iter().find(|(one, _)| *one == fs);
        Ok(mounted.with_context(|| format!("{} is not mounted", fs.name()))?.1.folder())
    }

    fn raw_file(&self, fs: Fs) -> Result<PathBuf> {
        Ok(self.folder(fs)?.join("disk.raw"))
    }

    /// An error after ctrl-c.
    fn go_on(&self) -> Result<()> {
        if self.interrupted.load(Ordering::Relaxed) {
            bail!("interrupted");
        }
        Ok(())
    }

    /// Measures all subjects of a row in turn, and gives its line of the table.
    fn row(&self, row: &Row) -> Result<Vec<String>> {
        let mut found: Vec<(Subject, Vec<Measured>)> =
            row.subjects.iter().map(|&subject| (subject, Vec::new())).collect();
        for _ in 0..self.rounds {
            for (subject, runs) in &mut found {
                self.go_on()?;
                let measured =
                    self.measure(row, *subject).with_context(|| format!("{subject:?}"))?;
                eprintln!(
                    "bench: {}: {subject:?}: {:.0} requests/s, {:.1} us",
                    row.name, measured.iops, measured.mean_us
                );
                runs.push(measured);
            }
        }
        let median = |subject: Subject, value: fn(&Measured) -> f64| {
            let runs = &found.iter().find(|(one, _)| *one == subject)?.1;
            let mut values: Vec<f64> = runs.iter().map(value).collect();
            values.sort_by(f64::total_cmp);
            values.get(values.len() / 2).copied()
        };
        Ok(row.line(&median))
    }

    fn measure(&self, row: &Row, subject: Subject) -> Result<Measured> {
        let words = row.words();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        if subject == Subject::Native {
            let path = match row.target {
                Target::File(fs) | Target::Qcow2 { fs, bare: false, .. } => self.raw_file(fs)?,
                _ => self.device.clone(),
            };
            return self.load(Some(&path), None, &words, row.once, row.region);
        }
        let image = self.image(row, subject)?;
        let socket = self.work.path().join("blk");
        let config = Config {
            program: match subject {
                Subject::Bedplate => Program::Bedplate(self.bedplate.clone()),
                _ => Program::StorageDaemon,
            },
            image: image.clone(),
            format: if matches!(row.target, Target::Qcow2 { .. }) { "qcow2" } else { "raw" }
                .to_owned(),
            vhost_user_blk: Some(socket.clone()),
            nbd: None,
            queues: row.queues,
            direct: true,
            extra: Vec::new(),
        };
        let server = Server::start(&config, &self.work.path().join("server.log"))?;
        if matches!(row.target, Target::Qcow2 { .. }) && !row.once {
            self.load(None, Some((&socket, &server)), &FILL, true, REGION)?;
        }
        let measured = self.load(None, Some((&socket, &server)), &words, row.once, row.region)?;
        server.stop()?;
        if let Target::Qcow2 { .. } = row.target {
            let (code, text) = host::qemu_img_check(Path::new(&image))?;
            if code != 0 {
                bail!("after the load qemu-img check finds fault with the image ({code}):\n{text}");
            }
            std::fs::remove_file(&image)?;
        }
        Ok(measured)
    }

    /// The image for one run; qcow2 images are made anew each time, by the program that will serve them.
    fn image(&self, row: &Row, subject: Subject) -> Result<String> {
        let path = match row.target {
            Target::Null => return Ok(format!("null:{REGION}")),
            Target::Device => self.device.clone(),
            Target::File(fs) => self.raw_file(fs)?,
            Target::Qcow2 { fs, cluster, .. } => {
                let path = self.folder(fs)?.join("disk.qcow2");
                let mut create = match subject {
                    Subject::Bedplate => Command::new(&self.bedplate),
                    _ => host::tool("qemu-img"),
                };
                create
                    .args(["create", "-f", "qcow2", "-o", &format!("cluster_size={cluster}")])
                    .arg(&path)
                    .arg(REGION.to_string());
                host::run(&mut create)?;
                path
            }
        };
        Ok(path.display().to_string())
    }

    /// Runs a load on a file, or on a server's socket, and gives what it measured.
    fn load(
        &self,
        file: Option<&Path>,
        server: Option<(&Path, &Server)>,
        words: &[&str],
        once: bool,
        region: u64,
    ) -> Result<Measured> {
        let mut command = Command::new(&self.bedplate);
        command.args(["bench", "run"]);
        if let Some(path) = file {
            command.arg(path).arg("--destroy").arg(path);
        }
        if let Some((socket, server)) = server {
            command.arg(format!("vhost-user-blk:{}", socket.display()));
            command.arg("--destroy").arg(socket);
            command.arg(format!("--server-pid={}", server.id()));
        }
        command.args(words).arg(format!("--region={region}")).arg("--json");
        if once {
            command.args(["--pass", "--final-flush"]);
        } else {
            command.arg(format!("--seconds={}", self.seconds));
        }
        let text = host::run(&mut command)?;
        let value: serde_json::Value =
            serde_json::from_str(&text).with_context(|| format!("the load said {text:?}"))?;
        let outcome = &value["runs"][0]["outcome"];
        let number = |value: &serde_json::Value, key: &str| {
            value[key].as_f64().with_context(|| format!("the load gave no {key}"))
        };
        Ok(Measured {
            iops: number(outcome, "iops")?,
            mean_us: number(&outcome["latency"], "mean_ns")? / 1000.0,
            p99_us: number(&outcome["latency"], "p99_ns")? / 1000.0,
            cpu_us: outcome["cpu"]["server_us_per_request"].as_f64().unwrap_or(0.0),
        })
    }
}
