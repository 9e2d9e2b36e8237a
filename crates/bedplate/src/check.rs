//! `bedplate check`.

use crate::failure::Failure;
use crate::output::{self, OutputArgs};
use bedplate_image::{CheckOptions, CheckReport, Severity, check, format_of};
use bedplate_runtime::{Config, Runtime};
use bedplate_types::Format;
use clap::Args;
use std::fmt::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Exit code for a format that can't be checked.
const NOT_SUPPORTED: u8 = 63;

/// Check an image for damage; nothing is changed
///
/// Counts all references in a qcow2 image and compares them with what the image says.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Exit codes, as those of 'qemu-img check':
  0   nothing is wrong
  1   the check could not be done, or not all of it
  2   the image is corrupt
  3   clusters are leaked: space is lost, data is safe
  63  the format can't be checked (raw)

The JSON has the keys of 'qemu-img check --output=json'.

Example:
  bedplate check disk.qcow2")]
pub struct CheckArgs {
    /// The image's format: raw or qcow2 [default: told by the extension]
    #[arg(short, long = "format", value_name = "FMT")]
    format: Option<Format>,
    /// Check although another program is writing to the image; it may find what is no damage
    #[arg(short = 'U', long)]
    force_share: bool,
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
    let options = CheckOptions::default();
    let report = runtime
        .block_on(check(&args.file, args.format, args.force_share, options))
        .map_err(|e| if raw { Failure::Code(NOT_SUPPORTED, e) } else { e.into() })?;
    if args.output.is_json() {
        output::json(&report)?;
    } else {
        output::text(&text(&report, args.quiet))?;
    }
    Ok(ExitCode::from(report.exit_code()))
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
                 'qemu-img check -r all'.\n"
            }
            r if r.leaks > 0 => {
                "Leaks lose space, not data; 'qemu-img check -r leaks' gives the space back.\n"
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
