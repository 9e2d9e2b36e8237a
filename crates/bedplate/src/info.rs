//! `bedplate info`.

use crate::failure::Failure;
use crate::output::{self, OutputArgs};
use bedplate_image::{InfoOptions, backing_chain, describe, info};
use bedplate_runtime::{Config, Runtime};
use bedplate_types::{Format, limits};
use clap::Args;
use std::path::PathBuf;
use std::process::ExitCode;

/// Describe an image
///
/// Opens nothing but FILE, whatever the image says, and takes little time and memory whatever it holds. Images with
/// features that this version can't use are described too.
#[derive(Args, Debug)]
#[command(after_long_help = after_help())]
pub struct InfoArgs {
    /// The image's format: raw or qcow2 [default: told by the extension]
    #[arg(short, long = "format", value_name = "FMT")]
    format: Option<Format>,
    /// Describe the backing files too; this opens files that the image names
    #[arg(long)]
    backing_chain: bool,
    /// The format of backing files whose overlay does not state it
    #[arg(short = 'F', long, value_name = "FMT", requires = "backing_chain")]
    backing_format: Option<Format>,
    /// Look although another program is writing to the image
    #[arg(short = 'U', long)]
    force_share: bool,
    #[command(flatten)]
    output: OutputArgs,
    /// The image
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

fn after_help() -> String {
    format!(
        "\
The JSON has the keys of 'qemu-img info --output=json'. The key 'unsupported' is added to images that this version
can't open, with the reason.

At most {} images of a backing chain are described.

Examples:
  bedplate info disk.qcow2
  bedplate info --json -f raw /dev/vg0/disk
  bedplate info --backing-chain clone.qcow2",
        limits::MAX_CHAIN_DEPTH
    )
}

pub fn run(args: &InfoArgs) -> Result<ExitCode, Failure> {
    let options = InfoOptions {
        format: args.format,
        backing_format: args.backing_format,
        force_share: args.force_share,
    };
    let runtime = Runtime::new(Config::default())?;
    if args.backing_chain {
        let all = runtime.block_on(backing_chain(&args.file, &options))?;
        if args.output.is_json() {
            output::json(&all)?;
        } else {
            let texts: Vec<String> = all.iter().map(describe).collect();
            output::text(&texts.join("\n"))?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let info = runtime.block_on(info(&args.file, &options))?;
    if args.output.is_json() {
        output::json(&info)?;
    } else {
        output::text(&describe(&info))?;
    }
    Ok(ExitCode::SUCCESS)
}
