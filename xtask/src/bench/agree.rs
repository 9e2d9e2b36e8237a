//! `cargo xtask bench --fio`: whether the load engine agrees with fio, job by job, in alternating runs.
//!
//! Both read the same job file. fio's buffers are left as they are (`scramble_buffers=0`), since the device compresses them; its
//! percentiles are those of the whole latency, as the engine's.

use super::rows::Fs;
use super::{Bench, REGION};
use anyhow::{Context, Result, bail, ensure};
use bedplate_tests::host;
use bedplate_tests::server::{Config, Program, Server};
use std::path::Path;
use std::process::Command;

/// How far the rate may be off.
const RATE: f64 = 0.05;
/// How far the percentiles may be off.
const LATENCY: f64 = 0.10;

/// What one run gave: requests a second, then latencies in microseconds.
type Figures = [f64; 5];
const HEADS: [&str; 5] = ["IOPS", "mean us", "p50 us", "p90 us", "p99 us"];

/// One job.
struct Case {
    name: &'static str,
    place: Place,
    /// Lines of the job file.
    lines: &'static str,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Device,
    File,
    Nbd,
}

const fn case(name: &'static str, place: Place, lines: &'static str) -> Case {
    Case { name, place, lines }
}

const DEEP: &str = "iodepth=16\niodepth_batch=16\niodepth_batch_complete_max=16";

const CASES: [Case; 8] = [
    case("device, random reads, depth 16", Place::Device, "rw=randread"),
    case("device, random writes, depth 16", Place::Device, "rw=randwrite"),
    case("device, random reads, one by one", Place::Device, "rw=randread\nioengine=psync"),
    case("file, random reads, depth 16", Place::File, "rw=randread"),
    case("file, random writes, depth 16", Place::File, "rw=randwrite"),
    case("file, sequential reads, 64 KiB", Place::File, "rw=read\nbs=64k"),
    case("NBD, random reads, depth 16", Place::Nbd, "rw=randread"),
    case("NBD, random writes, depth 16", Place::Nbd, "rw=randwrite"),
];

impl Bench {
    /// Measures all cases and prints what both said; gives how many of them agree.
    pub(super) fn agree(&self) -> Result<()> {
        let engines = host::run(host::tool("fio").arg("--enghelp"))?;
        let (mut table, mut good) = (Vec::new(), 0);
        for case in &CASES {
            if case.place == Place::Nbd && !engines.contains("nbd") {
                eprintln!("bench: this fio has no NBD; {} is left out", case.name);
                continue;
            }
            let (fio, own) = self.both(case).with_context(|| case.name.to_owned())?;
            let near = |index: usize| {
                let limit = if index == 0 { RATE } else { LATENCY };
                (own[index] / fio[index] - 1.0).abs() <= limit
            };
            let all = (0..HEADS.len()).all(near);
            good += usize::from(all);
            let mut row = vec![case.name.to_owned()];
            for index in 0..HEADS.len() {
                let mark = if near(index) { "" } else { " !" };
                let ratio = own[index] / fio[index];
                row.push(format!("{:.1} / {:.1} = {ratio:.2}{mark}", own[index], fio[index]));
            }
            row.push(if all { "agrees" } else { "differs" }.to_owned());
            table.push(row);
        }
        let heads: Vec<&str> = ["job"].into_iter().chain(HEADS).chain(["verdict"]).collect();
        println!();
        crate::report::table(&heads, &table);
        println!(
            "\nBedplate's load / fio's, medians of {} alternating runs of {} s; wanted: IOPS within 5 %, latencies within 10 %.",
            self.rounds, self.seconds
        );
        println!("{good} of {} agree.", table.len());
        Ok(())
    }

    /// Medians of fio's runs and of the engine's.
    fn both(&self, case: &Case) -> Result<(Figures, Figures)> {
        let (path, socket) = match case.place {
            Place::Device => (self.device.clone(), None),
            Place::File => (self.raw_file(Fs::Xfs)?, None),
            Place::Nbd => (self.raw_file(Fs::Xfs)?, Some(self.work.path().join("nbd"))),
        };
        let config = socket.as_ref().map(|socket| Config {
            program: Program::Bedplate(self.bedplate.clone()),
            image: path.display().to_string(),
            format: "raw".to_owned(),
            vhost_user_blk: None,
            nbd: Some(socket.clone()),
            queues: 1,
            direct: true,
            extra: Vec::new(),
        });
        let log = self.work.path().join("server.log");
        let server = config.as_ref().map(|config| Server::start(config, &log)).transpose()?;
        let job = self.work.path().join("job.fio");
        let place = match &socket {
            Some(socket) => {
                format!("ioengine=nbd\nuri=nbd+unix:///?socket={}", socket.display())
            }
            None => format!("ioengine=io_uring\nfilename={}", path.display()),
        };
        let depth = if case.lines.contains("psync") { "" } else { DEEP };
        std::fs::write(
            &job,
            format!(
                "[global]\n{place}\ndirect=1\nbs=4k\nsize={REGION}\nruntime={}ms\ntime_based\nscramble_buffers=0\n{depth}\n\
                 [job]\n{}\n",
                (self.seconds * 1000.0).round(),
                case.lines
            ),
        )?;
        let (mut fio, mut own) = (Vec::new(), Vec::new());
        let destroy = socket.as_deref().unwrap_or(&path);
        for _ in 0..self.rounds {
            self.go_on()?;
            fio.push(fio_runs(&job)?);
            own.push(self.engine_runs(&job, destroy)?);
            eprintln!(
                "bench: {}: fio {:.0}, own {:.0}",
                case.name,
                fio.last().map_or(0.0, |f| f[0]),
                own.last().map_or(0.0, |o| o[0])
            );
        }
        if let Some(server) = server {
            server.stop()?;
        }
        Ok((medians(&fio), medians(&own)))
    }

    fn engine_runs(&self, job: &Path, destroy: &Path) -> Result<Figures> {
        let mut command = Command::new(&self.bedplate);
        command.args(["bench", "run", "--json", "--fio"]).arg(job).arg("--destroy").arg(destroy);
        let value = parse(&host::run(&mut command)?)?;
        let outcome = &value["runs"][0]["outcome"];
        let number = |value: &serde_json::Value| {
            value.as_f64().with_context(|| format!("a figure is missing in {outcome}"))
        };
        let latency = &outcome["latency"];
        let us = |key: &str| Ok::<f64, anyhow::Error>(number(&latency[key])? / 1000.0);
        let iops = number(&outcome["iops"])?;
        Ok([iops, us("mean_ns")?, us("p50_ns")?, us("p90_ns")?, us("p99_ns")?])
    }
}

fn parse(text: &str) -> Result<serde_json::Value> {
    // fio's NBD engine says something before.
    let json = text.find('{').and_then(|at| text.get(at..)).unwrap_or(text);
    serde_json::from_str(json).with_context(|| format!("this is no JSON: {text}"))
}

fn fio_runs(job: &Path) -> Result<Figures> {
    // Only a report's option, which the engine does not know.
    let own = job.with_extension("with-lat.fio");
    std::fs::write(&own, std::fs::read_to_string(job)? + "lat_percentiles=1\n")?;
    let value = parse(&host::run(host::tool("fio").arg("--output-format=json").arg(&own))?)?;
    let job = &value["jobs"][0];
    ensure!(job["error"] == 0, "fio failed: {job}");
    let done = ["read", "write"].map(|op| &job[op]);
    let Some(done) = done.into_iter().find(|done| done["total_ios"].as_u64() > Some(0)) else {
        bail!("fio did nothing: {job}");
    };
    let latency = &done["lat_ns"];
    let number = |value: &serde_json::Value| {
        value.as_f64().with_context(|| format!("a figure is missing in {done}"))
    };
    let percentile =
        |key: &str| Ok::<f64, anyhow::Error>(number(&latency["percentile"][key])? / 1000.0);
    Ok([
        number(&done["iops"])?,
        number(&latency["mean"])? / 1000.0,
        percentile("50.000000")?,
        percentile("90.000000")?,
        percentile("99.000000")?,
    ])
}

/// The median of each figure.
fn medians(runs: &[Figures]) -> Figures {
    let mut out = [0.0; 5];
    for (index, out) in out.iter_mut().enumerate() {
        let mut values: Vec<f64> = runs.iter().map(|run| run[index]).collect();
        values.sort_by(f64::total_cmp);
        *out = values.get(values.len() / 2).copied().unwrap_or(0.0);
    }
    out
}
