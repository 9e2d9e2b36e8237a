//! `bedplate create`.

use crate::failure::Failure;
use crate::keys::KeyArgs;
use crate::{cli, output};
use bedplate_image::{Backing, CreateOptions, create, format_of, human_size};
use bedplate_runtime::{Config, Runtime};
use bedplate_types::{ByteLen, Error, ErrorKind, Format, Preallocation, limits};
use clap::Args;
use std::path::PathBuf;
use std::process::ExitCode;

/// Create an image
///
/// A file that exists is overwritten, unless another program uses it as an image. When anything fails, a file that
/// was not there before is removed again.
#[derive(Args, Debug)]
#[command(after_long_help = after_help())]
pub struct CreateArgs {
    /// The image's format: raw or qcow2 [default: told by the extension]
    #[arg(short, long = "format", value_name = "FMT")]
    format: Option<Format>,
    /// Options of the format, see below; may be given several times
    #[arg(short, value_name = "KEY=VALUE,...")]
    options: Vec<String>,
    /// The backing file: what the new image does not hold is read from it
    ///
    /// A relative name is relative to the folder of the new image.
    #[arg(short, long = "backing", value_name = "FILE")]
    backing: Option<PathBuf>,
    /// The backing file's format: raw or qcow2
    #[arg(short = 'F', long, value_name = "FMT")]
    backing_format: Option<Format>,
    /// Do not look at the backing file; SIZE must be given then
    #[arg(short = 'u', long)]
    unsafe_backing: bool,
    #[command(flatten)]
    keys: KeyArgs,
    /// Print nothing
    #[arg(short, long)]
    quiet: bool,
    /// The new image
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// The disk's size, rounded up to 512 bytes [default: that of the backing file]
    #[arg(value_name = "SIZE", value_parser = cli::size)]
    size: Option<ByteLen>,
}

fn after_help() -> String {
    format!(
        "\
Options of qcow2 (-o):
  cluster_size=SIZE       512 to 2M, a power of two [default: 64K]
  compat=0.10|1.1         the version; v2 and v3 mean the same [default: 1.1]
  refcount_bits=N         1 to 64, a power of two [default: 16]
  lazy_refcounts=on|off   reference counts may be written late [default: off]
  compression_type=TYPE   zlib or zstd [default: zlib]
  backing_file=FILE       as -b; at most {name} bytes
  backing_fmt=FMT         as -F
  encrypt.format=luks     encrypt the data; the passphrase comes with --key-file or --key-fd
  encrypt.cipher-alg=ALG  aes-256 or aes-128, in XTS mode [default: aes-256]
  encrypt.ivgen-alg=ALG   plain64 or plain [default: plain64]
  encrypt.hash-alg=HASH   of key derivation: sha256, sha512 or sha1 [default: sha256]
  encrypt.iter-time=MS    milliseconds that trying a passphrase takes on this host [default: 2000]
  extended_l2=on|off      L2 entries describe subclusters [default: off]
  data_file=FILE          guest data goes to this file, which is made too; a relative name is relative to the current
                          folder, now and whenever the image is used
  data_file_raw=on|off    the data file reads as the disk at any time; its metadata is made at once [default: off]
Options of raw and qcow2 (-o):
  size=SIZE               as SIZE
  preallocation=MODE      the space that is taken at once [default: off]:
      off       none: space is taken as it is written
      metadata  qcow2: all metadata is made, the data's space is a hole
      falloc    space is allocated, but not written; file systems convert it at the first write
      full      zeroes are written
      prepared  as full and fast: allocated in one piece, written in large strides past the page cache

Examples:
  bedplate create disk.qcow2 20G
  bedplate create -f raw -o preallocation=falloc disk.raw 20G
  bedplate create -o preallocation=prepared disk.qcow2 20G
  bedplate create -o data_file=disk.data,data_file_raw=on disk.qcow2 20G
  bedplate create -b base.qcow2 -F qcow2 clone.qcow2
  bedplate create -o encrypt.format=luks --key-file disk.key disk.qcow2 20G",
        name = limits::MAX_BACKING_NAME
    )
}

pub fn run(args: CreateArgs) -> Result<ExitCode, Failure> {
    let format = format_of(&args.file, args.format)?;
    let mut options = CreateOptions::new(args.file, format);
    for text in &args.options {
        options.apply(text)?;
    }
    if let Some(size) = args.size {
        options.size = Some(size);
    }
    options.passphrase = args.keys.read_one()?;
    if let Some(name) = args.backing {
        options.backing.get_or_insert_with(Backing::default).name = name;
    }
    match &mut options.backing {
        Some(backing) => {
            backing.format = args.backing_format.or(backing.format);
            backing.unchecked = args.unsafe_backing;
        }
        None if args.backing_format.is_some() || args.unsafe_backing => {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "-F and -u say something about a backing file, but none was named; name it with -b",
            )
            .into());
        }
        None => {}
    }
    let runtime = Runtime::new(Config::default())?;
    let created = runtime.block_on(create(&options))?;
    if !args.quiet {
        let size = created.size.get();
        let taken = match options.preallocation {
            Preallocation::Off => String::new(),
            mode => format!(" preallocation={mode}"),
        };
        output::text(&format!(
            "created '{}', {} ({size} bytes): {options}{taken}\n",
            options.path.display(),
            human_size(size)
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}
