//! `bedplate map`.

use crate::cli;
use crate::failure::Failure;
use crate::output::OutputArgs;
use bedplate_image::{ChainOptions, MapEntry, OpenLayer, map, open_chain};
use bedplate_runtime::{Config, Runtime};
use bedplate_types::{ByteLen, CacheMode, Error, Format};
use clap::Args;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

/// Show which parts of a disk hold data, and where
#[derive(Args, Debug)]
#[command(after_long_help = "\
The JSON has the keys of 'qemu-img map --output=json': depth 0 is FILE itself, 1 its backing file, and so on.
The table for people lists data only, with the offset in the file that holds it.

Examples:
  bedplate map disk.qcow2
  bedplate map --json --allow-backing clone.qcow2
  bedplate map --start-offset 1G --max-length 64M disk.raw")]
pub struct MapArgs {
    /// The image's format: raw or qcow2 [default: told by the extension]
    #[arg(short, long = "format", value_name = "FMT")]
    format: Option<Format>,
    /// Open the backing files that the image names
    #[arg(long)]
    allow_backing: bool,
    /// The format of backing files whose overlay does not state it
    #[arg(short = 'F', long, value_name = "FMT")]
    backing_format: Option<Format>,
    #[command(flatten)]
    data: cli::DataFileArgs,
    /// Look although another program is writing to the image
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Where to start
    #[arg(short, long, value_name = "OFFSET", default_value = "0", value_parser = cli::size)]
    start_offset: ByteLen,
    /// How much to look at [default: all]
    #[arg(short = 'l', long, value_name = "LENGTH", value_parser = cli::size)]
    max_length: Option<ByteLen>,
    #[command(flatten)]
    output: OutputArgs,
    /// The image
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

pub fn run(args: &MapArgs) -> Result<ExitCode, Failure> {
    let options = ChainOptions {
        format: args.format,
        read_only: true,
        cache: CacheMode::Writeback,
        allow_backing: args.allow_backing,
        backing_format: args.backing_format,
        allow_data_file: args.data.allow_data_file,
        data_file: args.data.data_file.clone(),
        force_share: args.force_share,
        metadata_only: true,
        ..ChainOptions::default()
    };
    let runtime = Runtime::new(Config::default())?;
    let json = args.output.is_json();
    // Entries are printed as they come: a large disk can have millions.
    let mut out = io::BufWriter::new(io::stdout().lock());
    let mut failed: Option<io::Error> = None;
    let mut first = true;
    runtime
        .block_on(async {
            let opened = open_chain(&args.file, &options).await?;
            if !json {
                let head = format!("{:<15} {:<15} {:<15} File\n", "Offset", "Length", "Mapped to");
                failed = out.write_all(head.as_bytes()).err();
            }
            let len = args.max_length.unwrap_or(ByteLen::new(u64::MAX)).get();
            map(&opened.disk, args.start_offset.get(), len, |entry| {
                let text =
                    if json { json_line(&entry, first) } else { row(&entry, &opened.layers) };
                first = false;
                out.write_all(text.as_bytes()).map_err(|e| {
                    let stop = Error::io("cannot write to the standard output", e.kind().into());
                    failed = Some(e);
                    stop
                })
            })
            .await
        })
        .map_err(|e| failed.take().map_or_else(|| e.into(), Failure::from))?;
    if let Some(e) = failed {
        return Err(e.into());
    }
    if json {
        out.write_all(if first { b"[]\n" } else { b"]\n" })?;
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

fn json_line(entry: &MapEntry, first: bool) -> String {
    // Numbers and truth values always have a text.
    let text = serde_json::to_string(entry).unwrap_or_default();
    format!("{}{text}", if first { "[" } else { ",\n" })
}

fn row(entry: &MapEntry, layers: &[OpenLayer]) -> String {
    if !entry.data || entry.zero {
        return String::new();
    }
    let path = |l: &OpenLayer| l.data_file.as_ref().unwrap_or(&l.path).display().to_string();
    let file = layers.get(entry.depth).map(path).unwrap_or_default();
    let at = entry.offset.map_or_else(|| "compressed".into(), |at| format!("{at:#x}"));
    let (start, len) = (format!("{:#x}", entry.start), format!("{:#x}", entry.length));
    format!("{start:<15} {len:<15} {at:<15} {file}\n")
}
