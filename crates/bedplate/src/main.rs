//! The command: parses, calls the libraries, prints. One file a subcommand.
//!
//! Called by the name `qemu-io` it is `bedplate qemu-io`.
//!
//! Exit codes: 0 done, 1 failed, 2 wrong usage; `check` keeps those of qemu-img, `qemu-io` those of its model.
#![forbid(unsafe_code)]

mod attach;
mod bench;
mod bitmap;
mod check;
mod cli;
mod create;
mod failure;
mod info;
mod keys;
mod map;
mod output;
mod qemu_io;
mod resize;
mod serve;
mod snapshot;

use clap::Parser;
use cli::{Cli, Level, Verb};
use failure::Failure;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

/// Exit code for wrong usage.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    let mut words = std::env::args_os();
    let called = words.next().map(PathBuf::from);
    if called.as_deref().and_then(Path::file_name).is_some_and(|name| name == "qemu-io") {
        start_logging(None, "warn");
        return qemu_io::run(words);
    }
    let cli = match Cli::try_parse_from(resize::protect_size(std::env::args_os())) {
        Ok(cli) => cli,
        Err(e) => return told_by_parser(&e),
    };
    let usual = if matches!(cli.verb, Verb::Serve(_)) { "info" } else { "warn" };
    start_logging(cli.log_level, usual);
    let done = match cli.verb {
        Verb::Create(args) => create::run(args),
        Verb::Info(args) => info::run(&args),
        Verb::Check(args) => check::run(&args),
        Verb::Map(args) => map::run(&args),
        Verb::Resize(args) => resize::run(&args),
        Verb::Bitmap(args) => bitmap::run(&args),
        Verb::Snapshot(args) => snapshot::run(&args),
        Verb::Serve(args) => serve::run(&args),
        Verb::Bench(args) => bench::run(args),
        Verb::QemuIo(args) => return qemu_io::run(args.words.into_iter()),
    };
    match done {
        Ok(code) => code,
        // Who closed the pipe wants no more, and no words about it.
        Err(Failure::BrokenPipe) => ExitCode::SUCCESS,
        Err(Failure::Code(code, e)) => {
            eprintln!("bedplate: {}", harmless(&format!("{e:#}")));
            ExitCode::from(code)
        }
    }
}

/// The text in one line: names that an image holds can have control characters, and those could play with the
/// terminal.
fn harmless(text: &str) -> String {
    text.chars()
        .flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] })
        .collect()
}

/// Help, version, or a mistake in the words of the command line.
fn told_by_parser(e: &clap::Error) -> ExitCode {
    // Nobody is there to be told that this can't be printed.
    let _ = e.print();
    if !e.use_stderr() {
        return ExitCode::SUCCESS;
    }
    // For qemu-img's check, and so for this one, 2 means that the image is corrupt.
    let check = std::env::args_os().nth(1).is_some_and(|verb| verb == "check");
    ExitCode::from(if check { 1 } else { USAGE })
}

fn start_logging(level: Option<Level>, usual: &str) {
    use std::io::IsTerminal;
    let filter = match level {
        Some(level) => EnvFilter::new(level.name()),
        None => EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(usual)),
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .init();
}
