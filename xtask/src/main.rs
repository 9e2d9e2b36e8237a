//! `cargo xtask`: the chores of this repository, each with its set-up included.

#![forbid(unsafe_code)]

mod bench;
mod demo;
mod fuzz;
mod licences;
mod report;
mod setup;
mod test;

use anyhow::{Result, bail};
use std::process::ExitCode;

const USAGE: &str = "\
cargo xtask COMMAND

  demo             build Bedplate, boot a Linux VM from a qcow2 disk that it serves, check the result
  test [--soak]    formatting, lints, documentation, licences, and all tests (with --soak the long ones too)
  bench [--quick]  measure against the bare device and QEMU's storage daemon (needs root for zram)
  bench --fio      measure whether the load engine agrees with fio
  fuzz [TARGET] [--seconds N]
                   feed hostile images to the engine (open, work, check; each N seconds, 60 by default); a finding is kept in
                   fuzz/artifacts, and what is new in target/fuzz/corpus
  setup            only install and prepare what these need

Missing Debian packages are installed when this runs as root; otherwise what is missing is named.";

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<ExitCode> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["demo"] => demo::run().map(|()| ExitCode::SUCCESS),
        ["test"] => test::run(false),
        ["test", "--soak"] => test::run(true),
        ["bench"] => bench::run(false, false).map(|()| ExitCode::SUCCESS),
        ["bench", "--fio"] => bench::run(false, true).map(|()| ExitCode::SUCCESS),
        ["bench", "--quick"] => bench::run(true, false).map(|()| ExitCode::SUCCESS),
        ["fuzz", rest @ ..] => fuzz::run(rest),
        ["setup"] => setup::run().map(|()| ExitCode::SUCCESS),
        [] | ["help" | "-h" | "--help"] => {
            println!("{USAGE}");
            Ok(ExitCode::SUCCESS)
        }
        _ => bail!("unknown command: {}\n{USAGE}", args.join(" ")),
    }
}
