//! `bedplate snapshot`.

use crate::failure::Failure;
use crate::output;
use bedplate_image::{SnapshotChange, change_snapshots, describe_snapshots, snapshots};
use bedplate_runtime::{Config, Runtime};
use bedplate_types::{Format, limits};
use clap::Args;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::ExitCode;

/// List, make, apply or delete internal snapshots of a qcow2 image
///
/// Only while nobody uses the image. A power cut leaves each change done or not begun.
#[derive(Args, Debug)]
#[command(after_long_help = after_help())]
pub struct SnapshotArgs {
    /// The image's format: qcow2 [default: qcow2, unless the extension tells raw]
    #[arg(short, long = "format", value_name = "FMT")]
    format: Option<Format>,
    #[command(flatten)]
    what: What,
    /// List although another program is writing to the image
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Print nothing but the list, as without it: for scripts that were written for qemu-img
    #[arg(short, long)]
    quiet: bool,
    /// The image
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

#[derive(Args, Debug)]
#[group(multiple = false)]
struct What {
    /// List the snapshots (the default)
    #[arg(short, long)]
    list: bool,
    /// Make a snapshot of this name
    #[arg(short, long, value_name = "SNAPSHOT")]
    create: Option<OsString>,
    /// Take the disk back to the snapshot of this id or name, its size too
    #[arg(short, long, value_name = "SNAPSHOT")]
    apply: Option<OsString>,
    /// Delete the first snapshot of this name
    #[arg(short, long, value_name = "SNAPSHOT")]
    delete: Option<OsString>,
}

fn after_help() -> String {
    format!(
        "\
An image can have {} snapshots, and each cluster of an image with refcount_bits=N at most 2^N-1 references.

Examples:
  bedplate snapshot -c before-upgrade disk.qcow2
  bedplate snapshot -l disk.qcow2
  bedplate snapshot -a before-upgrade disk.qcow2
  bedplate snapshot -d before-upgrade disk.qcow2",
        limits::MAX_SNAPSHOTS
    )
}

pub fn run(args: &SnapshotArgs) -> Result<ExitCode, Failure> {
    let runtime = Runtime::new(Config::default())?;
    let What { create, apply, delete, .. } = &args.what;
    let change = match (create, apply, delete) {
        (Some(name), _, _) => Some(SnapshotChange::Create(name.as_bytes())),
        (_, Some(name), _) => Some(SnapshotChange::Apply(name.as_bytes())),
        (_, _, Some(name)) => Some(SnapshotChange::Delete(name.as_bytes())),
        _ => None,
    };
    if let Some(change) = change {
        runtime.block_on(change_snapshots(&args.file, args.format, change))?;
    } else {
        let list = runtime.block_on(snapshots(&args.file, args.format, args.force_share))?;
        output::text(&describe_snapshots(&list))?;
    }
    Ok(ExitCode::SUCCESS)
}
