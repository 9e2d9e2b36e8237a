//! `cargo xtask test`: everything that must hold before a change is accepted, in one run.

use crate::{licences, setup};
use anyhow::{Context, Result, bail};
use bedplate_tests::{host, paths};
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

/// What the test binaries' own closing lines add up to.
#[derive(Debug, Default, PartialEq, Eq)]
struct Counts {
    passed: u64,
    failed: u64,
    ignored: u64,
}

/// Runs all checks, then all tests; the last line is `N passed, N failed`.
pub fn run(soak: bool) -> Result<ExitCode> {
    setup::run()?;
    let start = Instant::now();
    let mut broken: Vec<String> = Vec::new();
    check(&mut broken, "formatting", cargo(&["fmt", "--all", "--check"]));
    check(
        &mut broken,
        "lints",
        cargo(&["clippy", "--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"]),
    );
    let mut documentation =
        cargo(&["doc", "--quiet", "--workspace", "--no-deps", "--document-private-items"]);
    documentation.env("RUSTDOCFLAGS", "-D warnings -A rustdoc::private-intra-doc-links");
    check(&mut broken, "documentation", documentation);
    match licences::check() {
        Ok(count) => println!("== licences: fine ({count} crates)"),
        Err(error) => {
            println!("{error:#}");
            broken.push("licences".to_owned());
        }
    }
    let skipped = paths::target().join("skipped-tests");
    // Only what this run skips counts.
    let _ = std::fs::remove_file(&skipped);
    let mut counts = Counts::default();
    let bedplate = paths::build_bedplate("test")?;
    let mut tests = cargo(&["test", "--workspace", "--no-fail-fast"]);
    tests
        .env("BEDPLATE_BIN", bedplate)
        .env("BEDPLATE_SKIP_LOG", &skipped)
        .env("BEDPLATE_GUEST_DIR", paths::guest());
    if soak {
        tests.env("BEDPLATE_SOAK", "1").args(["--", "--include-ignored"]);
    }
    println!("== tests: {}", host::show(&tests));
    if !run_counting(&mut tests, &mut counts)? && counts.failed == 0 {
        // A binary that does not compile or dies has no closing line.
        broken.push("tests (a test program did not come to its end)".to_owned());
    }
    finish(&counts, &broken, &std::fs::read_to_string(&skipped).unwrap_or_default(), start)
}

fn finish(counts: &Counts, broken: &[String], skipped: &str, start: Instant) -> Result<ExitCode> {
    println!();
    let mut reasons: Vec<&str> = skipped.lines().collect();
    reasons.sort_unstable();
    reasons.dedup();
    if !reasons.is_empty() {
        println!("{} tests did not run on this machine:", reasons.len());
        reasons.iter().for_each(|reason| println!("  {reason}"));
    }
    for what in broken {
        println!("FAILED: {what}");
    }
    println!(
        "all checks and tests took {:.0} s; {} tests ignored (the long ones run with --soak)",
        start.elapsed().as_secs_f64(),
        counts.ignored
    );
    // Checks count as one test each, so that the closing line alone tells whether all is well.
    const CHECKS: u64 = 4;
    let failed_checks = broken.len() as u64;
    let passed =
        (counts.passed + CHECKS.saturating_sub(failed_checks)).saturating_sub(reasons.len() as u64);
    println!("{passed} passed, {} failed", counts.failed + failed_checks);
    Ok(if counts.failed + failed_checks == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn cargo(arguments: &[&str]) -> Command {
    let mut command =
        Command::new(std::env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo")));
    command.current_dir(paths::workspace()).args(arguments);
    command
}

/// Runs a check whose output goes to the terminal; a failure is noted and the next check still runs.
fn check(broken: &mut Vec<String>, what: &str, mut command: Command) {
    let start = Instant::now();
    match command.status() {
        Ok(status) if status.success() => {
            println!("== {what}: fine ({:.0} s)", start.elapsed().as_secs_f64())
        }
        Ok(status) => {
            println!("== {what}: {} ended with {status}", host::show(&command));
            broken.push(what.to_owned());
        }
        Err(error) => {
            println!("== {what}: {} can't be run: {error}", host::show(&command));
            broken.push(what.to_owned());
        }
    }
}

/// Runs `cargo test`, passing its output on and adding up the closing lines; whether it succeeded.
fn run_counting(command: &mut Command, counts: &mut Counts) -> Result<bool> {
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("{} can't be run", host::show(command)))?;
    let output = child.stdout.take().context("no pipe")?;
    for line in BufReader::new(output).split(b'\n') {
        let line = line?;
        let line = String::from_utf8_lossy(&line);
        println!("{line}");
        counts.add(&line);
    }
    let status = child.wait()?;
    if status.code().is_none() {
        bail!("{} ended with {status}", host::show(command));
    }
    Ok(status.success())
}

impl Counts {
    /// Takes in `test result: ok. 12 passed; 0 failed; 1 ignored; ...`.
    fn add(&mut self, line: &str) {
        let Some(rest) = line.trim().strip_prefix("test result: ") else { return };
        let Some((_, numbers)) = rest.split_once(". ") else { return };
        for part in numbers.split(';') {
            let mut words = part.split_whitespace();
            let (Some(Ok(number)), Some(kind)) =
                (words.next().map(str::parse::<u64>), words.next())
            else {
                continue;
            };
            match kind {
                "passed" => self.passed += number,
                "failed" => self.failed += number,
                "ignored" => self.ignored += number,
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_lines_are_added_up() {
        let mut counts = Counts::default();
        for line in [
            "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.01s",
            "test something ... ok",
            "test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 2.00s",
        ] {
            counts.add(line);
        }
        assert_eq!(counts, Counts { passed: 13, failed: 2, ignored: 1 });
    }
}
