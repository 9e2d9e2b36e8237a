//! `bedplate resize`.

use crate::failure::Failure;
use crate::keys::KeyArgs;
use crate::{cli, output};
use bedplate_image::{NewSize, ResizeOptions, resize};
use bedplate_runtime::{Config, Runtime};
use bedplate_types::{Format, Preallocation};
use clap::Args;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

/// Change the size of the disk in an image
///
/// Only while nobody uses the image. A power cut leaves the old size or the new one. What a disk grows by reads as zeroes;
/// partitions and file systems in it keep their size until they are grown too.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Values of --preallocation: off (the default), metadata (qcow2 only), falloc, full, prepared; see 'bedplate create
--help'.

Growing an image with a backing file needs --allow-backing: what that file holds beyond the old end must not show.
Images with an external data file need --allow-data-file or --data-file; that file changes its size too.
Internal snapshots keep the size that the disk had; going back to one brings that size back.

Examples:
  bedplate resize disk.qcow2 +10G
  bedplate resize --preallocation=falloc disk.raw 20G
  bedplate resize --shrink disk.qcow2 -1G")]
pub struct ResizeArgs {
    /// The image's format: raw or qcow2 [default: told by the extension]
    #[arg(short, long = "format", value_name = "FMT")]
    format: Option<Format>,
    /// How the space that the disk grows by is taken
    #[arg(long, value_name = "MODE", default_value_t)]
    preallocation: Preallocation,
    /// Allow a smaller size; what lies beyond it is lost
    #[arg(long)]
    shrink: bool,
    /// Open the backing files that the image names
    #[arg(long)]
    allow_backing: bool,
    /// The format of backing files whose overlay does not state it
    #[arg(short = 'F', long, value_name = "FMT")]
    backing_format: Option<Format>,
    #[command(flatten)]
    keys: KeyArgs,
    #[command(flatten)]
    data: cli::DataFileArgs,
    /// Print nothing
    #[arg(short, long)]
    quiet: bool,
    /// The image
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// The new size; with + or - in front, the change
    #[arg(value_name = "[+-]SIZE")]
    size: NewSize,
}

/// The words of the command line, with `--` before a size like `-1G` at the end of `resize`, which is no option.
pub fn protect_size(words: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut words: Vec<OsString> = words.collect();
    let resize = words.get(1).is_some_and(|verb| verb == "resize");
    let negative = words.last().is_some_and(|last| {
        let bytes = last.as_encoded_bytes();
        bytes.first() == Some(&b'-') && bytes.get(1).is_some_and(u8::is_ascii_digit)
    });
    if resize && negative && !words.iter().any(|word| word == "--") {
        words.insert(words.len() - 1, "--".into());
    }
    words
}

pub fn run(args: &ResizeArgs) -> Result<ExitCode, Failure> {
    let options = ResizeOptions {
        format: args.format,
        size: args.size,
        shrink: args.shrink,
        preallocation: args.preallocation,
        allow_backing: args.allow_backing,
        backing_format: args.backing_format,
        passphrases: args.keys.read()?,
        allow_data_file: args.data.allow_data_file,
        data_file: args.data.data_file.clone(),
    };
    let runtime = Runtime::new(Config::default())?;
    runtime.block_on(resize(&args.file, &options))?;
    if !args.quiet {
        output::text("Image resized.\n")?;
    }
    Ok(ExitCode::SUCCESS)
}
