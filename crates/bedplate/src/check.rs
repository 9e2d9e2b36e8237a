//! `bedplate check`.

use crate::failure::Failure;
use crate::output::{self, OutputArgs};
use bedplate_image::{CheckOptions, CheckReport, Progress, Repair, Severity, check, format_of};
use bedplate_runtime::{Config, Runtime};
use bedplate_types::Format;
use clap::{Args, ValueEnum};
use std::fmt::Write;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::thread::available_parallelism;

/// Exit code for a format that can't be checked.
const NOT_SUPPORTED: u8 = 63;
/// Threads that read tables at most; more would only wait for the device.
const MAX_THREADS: usize = 16;

/// What is repaired, by the words of qemu-img.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum What {
    /// Space that nothing refers to is given back
    Leaks,
    /// Everything that can be put right
    All,
}

impl From<What> for Repair {
    fn from(what: What) -> Self {
        match what {
            What::Leaks => Self::Leaks,
            What::All => Self::All,
        }
    }
}

/// Check an image for damage, and repair it when asked
///
/// Counts all references in a qcow2 image and compares them with what the image says. Nothing is changed without -r.
///
/// A repair may be interrupted at any moment, also by a power cut; it is then done again. Entries of tables that can't be used
/// any more are dropped by '-r all': what they mapped, which could not be read either, reads as zeroes. Copy an image of
/// value before.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Exit codes, as those of 'qemu-img check'; after a repair they tell how the image is now:
  0   nothing is wrong
  1   the check could not be done, or not all of it
  2   the image is corrupt
  3   clusters are leaked: space is lost, data is safe
  63  the format can't be checked (raw)

The JSON has the keys of 'qemu-img check --output=json'.

Examples:
  bedplate check disk.qcow2
  bedplate check -r leaks disk.qcow2")]
pub struct CheckArgs {
    /// The image's format: qcow2 [default: qcow2, unless the extension tells raw]
    #[arg(short, long = "format", value_name = "FMT")]
    format: Option<Format>,
    /// Repair what is wrong
    #[arg(short, long, value_name = "WHAT")]
    repair: Option<What>,
    /// Check although another program is writing to the image; it may find what is no damage
    #[arg(short = 'U', long, conflicts_with = "repair")]
    force_share: bool,
    /// Show how far the work is, also where the standard error is no terminal
    #[arg(short, long)]
    progress: bool,
    /// Print nothing but what is wrong
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    output: OutputArgs,
    /// The image
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

pub fn run(args: &CheckArgs) -> Result<ExitCode, Failure> {
    let raw = matches!(format_of(&args.file, args.format), Ok(Format::Raw));
    let runtime = Runtime::new(Config::default())?;
    let shown = args.progress || (std::io::stderr().is_terminal() && !args.quiet);
    let options = CheckOptions {
        threads: available_parallelism().map_or(1, |n| n.get().min(MAX_THREADS)),
        progress: shown.then(meter),
        ..CheckOptions::default()
    };
    let repair = args.repair.map(Repair::from);
    let checked =
        runtime.block_on(check(&args.file, args.format, args.force_share, repair, options));
    if shown {
        // The line is for something else now.
        eprint!("\r{:60}\r", "");
    }
    let report =
        checked.map_err(|e| if raw { Failure::Code(NOT_SUPPORTED, e) } else { e.into() })?;
    if args.output.is_json() {
        output::json(&report)?;
    } else {
        output::text(&text(&report, args.quiet))?;
    }
    Ok(ExitCode::from(report.exit_code()))
}

/// Shows each hundredth on the standard error.
fn meter() -> Progress {
    let last = Mutex::new(("", u64::MAX));
    Progress::new(move |stage, done| {
        let hundredth = (done * 100.0) as u64;
        let Ok(mut last) = last.lock() else { return };
        // Threads may tell in another order than they counted.
        let news = last.0 != stage || last.1 == u64::MAX || hundredth > last.1;
        if news {
            *last = (stage, hundredth);
            eprint!("\r    {stage} ({hundredth}/100%)    ");
        }
    })
}

/// The report for people.
fn text(report: &CheckReport, quiet: bool) -> String {
    let mut out = String::new();
    for finding in &report.findings {
        let what = match finding.severity {
            Severity::Corruption => "CORRUPT",
            Severity::Leak => "LEAK",
            Severity::Error => "ERROR",
        };
        let _ = writeln!(out, "{what}: {}", finding.text);
    }
    if report.findings_left_out > 0 {
        let _ = writeln!(out, "and {} more like these", report.findings_left_out);
    }
    if quiet {
        return out;
    }
    if report.leaks_fixed + report.corruptions_fixed > 0 {
        let _ = writeln!(
            out,
            "\nRepaired: {} corruptions, {} leaked clusters. The image was checked again.\n",
            report.corruptions_fixed, report.leaks_fixed
        );
    }
    if report.is_clean() {
        out.push_str("No errors were found on the image.\n");
    } else {
        let _ = writeln!(
            out,
            "\n{} corruptions, {} leaked clusters, {} parts that could not be checked.",
            report.corruptions, report.leaks, report.check_errors
        );
        out.push_str(match report {
            r if r.corruptions > 0 => {
                "Data may be damaged, and writing may do more harm: copy the file, then repair the copy with \
                 'bedplate check -r all'.\n"
            }
            r if r.leaks > 0 => {
                "Leaks lose space, not data; 'bedplate check -r leaks' gives the space back.\n"
            }
            _ => "",
        });
    }
    let percent = |n: u64, of: u64| n as f64 * 100.0 / of.max(1) as f64;
    let (all, used) = (report.total_clusters, report.allocated_clusters);
    let _ = writeln!(
        out,
        "{used}/{all} = {:.2}% allocated, {:.2}% fragmented, {:.2}% compressed clusters",
        percent(used, all),
        percent(report.fragmented_clusters, used),
        percent(report.compressed_clusters, used)
    );
    let _ = writeln!(out, "Image end offset: {}", report.image_end_offset);
    out
}
