//! `bedplate-load`: runs one load and prints its outcome as a line of JSON. Used by `cargo xtask bench`.

use anyhow::{Context, Result, bail};
use bedplate_load::{Job, Op, front, native};
use std::collections::HashMap;
use std::path::Path;
use std::process::ExitCode;

const USAGE: &str = "\
bedplate-load native FILE|DEVICE key=value...
bedplate-load vhost SOCKET key=value...
  op=read|write block=BYTES depth=N queues=N region=BYTES seed=N
  seconds=S   run for a time; without it every block is used exactly once, in random order";

fn main() -> ExitCode {
    match run() {
        Ok(line) => {
            println!("{line}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("bedplate-load: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<String> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [kind, path, rest @ ..] = args.as_slice() else { bail!("{USAGE}") };
    let job = parse(rest)?;
    let outcome = match kind.as_str() {
        "native" => native::run(&job, Path::new(path))?,
        "vhost" => front::run(&job, Path::new(path))?,
        _ => bail!("{USAGE}"),
    };
    Ok(outcome.to_json().to_string())
}

fn parse(words: &[String]) -> Result<Job> {
    let mut keys: HashMap<&str, &str> = HashMap::new();
    for word in words {
        let (key, value) =
            word.split_once('=').with_context(|| format!("{word:?} is not key=value\n{USAGE}"))?;
        keys.insert(key, value);
    }
    let mut number = |key: &str, default: u64| match keys.remove(key) {
        Some(value) => {
            value.parse::<u64>().with_context(|| format!("{key}={value} is not a number"))
        }
        None => Ok(default),
    };
    let (block, depth, queues) =
        (number("block", 4096)?, number("depth", 64)?, number("queues", 1)?);
    let (region, seed) = (number("region", 1 << 30)?, number("seed", 1)?);
    let op = match keys.remove("op").unwrap_or("read") {
        "read" => Op::Read,
        "write" => Op::Write,
        other => bail!("op={other} is neither read nor write"),
    };
    let seconds = keys
        .remove("seconds")
        .map(str::parse::<f64>)
        .transpose()
        .context("seconds= is not a number")?;
    if let Some(key) = keys.keys().next() {
        bail!("there is no key {key}\n{USAGE}");
    }
    let job = Job {
        op,
        block: usize::try_from(block)?,
        depth: usize::try_from(depth)?,
        queues: usize::try_from(queues)?,
        region,
        seconds,
        seed,
    };
    if job.block == 0 || job.depth == 0 || job.queues == 0 || job.blocks_per_queue() == 0 {
        bail!("block, depth, queues and the blocks of each queue must be at least 1");
    }
    Ok(job)
}
