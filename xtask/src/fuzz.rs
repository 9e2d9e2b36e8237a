//! `cargo xtask fuzz`: coverage-guided fuzzing of the engine with hostile images.
//!
//! libFuzzer comes as a crate, and the compiler's instrumentation is asked for by flags that the stable toolchain has, so no other
//! toolchain and no cargo plug-in is needed; only a C++ compiler. The corpus that is kept in `fuzz/corpus` is read, what is found
//! anew goes to `target/fuzz`; bytes that make a target fail are left in `fuzz/artifacts`.

use anyhow::{Context, Result, bail};
use bedplate_tests::{host, paths};
use std::path::PathBuf;
use std::process::{Command, ExitCode};

/// What can be fuzzed.
const TARGETS: &[&str] = &["open", "work", "check"];
/// The time that each target gets without `--seconds`.
const SECONDS: u64 = 60;

/// The instrumentation that libFuzzer works with.
const FLAGS: &[&str] = &[
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Ccodegen-units=1",
    "--cfg",
    "fuzzing",
];

/// Fuzzes the targets that the arguments name, or all.
pub fn run(arguments: &[&str]) -> Result<ExitCode> {
    let (targets, seconds) = parse(arguments)?;
    host::run(Command::new("c++").arg("--version"))
        .context("fuzzing needs a C++ compiler (Debian: apt-get install g++)")?;
    let folder = paths::workspace().join("fuzz");
    let built = paths::target().join("fuzz");
    let flags = FLAGS.join("\x1f");
    let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    build
        .current_dir(&folder)
        // With a target stated, build scripts are left without the instrumentation.
        .args(["build", "--quiet", "--release", "--target", TRIPLE, "--target-dir"])
        .arg(&built)
        .env("CARGO_ENCODED_RUSTFLAGS", flags);
    eprintln!("fuzz: building");
    host::run(&mut build)?;
    let mut failed = Vec::new();
    for target in targets {
        let program = built.join(TRIPLE).join("release").join(target);
        if !fuzz(&program, target, seconds)? {
            failed.push(target);
        }
    }
    if failed.is_empty() {
        println!("fuzz: nothing found");
        return Ok(ExitCode::SUCCESS);
    }
    println!(
        "fuzz: FAILED: {}; the bytes are in {}",
        failed.join(", "),
        folder.join("artifacts").display()
    );
    Ok(ExitCode::FAILURE)
}

/// The one that instrumented programs are built for; it is what xtask itself was built for.
const TRIPLE: &str = if cfg!(target_arch = "aarch64") {
    "aarch64-unknown-linux-gnu"
} else {
    "x86_64-unknown-linux-gnu"
};

fn parse<'a>(arguments: &[&'a str]) -> Result<(Vec<&'a str>, u64)> {
    let (mut targets, mut seconds) = (Vec::new(), SECONDS);
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match *argument {
            "--seconds" => {
                let number = rest.next().context("--seconds needs a number")?;
                seconds = number.parse().with_context(|| format!("--seconds {number}"))?;
            }
            name if TARGETS.contains(&name) => targets.push(name),
            other => bail!("unknown target '{other}'; there are {}", TARGETS.join(", ")),
        }
    }
    if targets.is_empty() {
        targets.extend(TARGETS);
    }
    Ok((targets, seconds))
}

/// Runs one target; true when it found nothing.
fn fuzz(program: &std::path::Path, target: &str, seconds: u64) -> Result<bool> {
    let folder = paths::workspace().join("fuzz");
    let kept = folder.join("corpus").join(target);
    let new: PathBuf = paths::target().join("fuzz").join("corpus").join(target);
    let artifacts = folder.join("artifacts").join(target);
    std::fs::create_dir_all(&new)?;
    std::fs::create_dir_all(&artifacts)?;
    let mut command = Command::new(program);
    command
        .arg(&new)
        .arg(&kept)
        .arg(format!("-artifact_prefix={}/", artifacts.display()))
        .arg(format!("-max_total_time={seconds}"))
        // The promise for hostile images: 2 seconds and 512 MiB.
        .args(["-timeout=2", "-rss_limit_mb=512", "-max_len=200000", "-print_final_stats=1"]);
    eprintln!("fuzz: {target}: {}", host::show(&command));
    let status = command.status().with_context(|| format!("{} can't be run", program.display()))?;
    Ok(status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_and_seconds_are_read_and_others_refused() {
        assert_eq!(parse(&["work", "--seconds", "5"]).ok(), Some((vec!["work"], 5)));
        assert_eq!(parse(&[]).ok(), Some((TARGETS.to_vec(), SECONDS)));
        assert!(parse(&["nbd"]).is_err() && parse(&["--seconds"]).is_err());
    }
}
