//! `bedplate bitmap`.

use crate::cli;
use crate::failure::Failure;
use bedplate_image::{BitmapChange, BitmapEdit, BitmapSource, change_bitmap};
use bedplate_runtime::{Config, Runtime};
use bedplate_types::{ByteLen, Error, ErrorKind, Format};
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::ExitCode;

/// Change a persistent bitmap of a qcow2 image
///
/// A persistent bitmap records which parts of the disk are written, for incremental backups. Only while nobody uses the
/// image. Several changes are made in the order in which they are given.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Bitmaps that record are kept up to date by 'bedplate serve'. One that was recording when a program or the host died can't be
trusted any more (its flag in-use stays): 'info' shows that, and it can only be removed.

Examples:
  bedplate bitmap --add disk.qcow2 nightly
  bedplate bitmap --clear --enable disk.qcow2 nightly
  bedplate bitmap --remove disk.qcow2 nightly
  bedplate bitmap --merge monday --merge tuesday disk.qcow2 week
  bedplate bitmap --merge nightly -b overlay.qcow2 disk.qcow2 nightly")]
pub struct BitmapArgs {
    #[command(flatten)]
    changes: Changes,
    /// The image's format: qcow2 [default: qcow2, unless the extension tells raw]
    #[arg(short, long = "format", value_name = "FMT")]
    format: Option<Format>,
    /// With --add: bytes that a bit stands for, a power of two from 512 to 2G [default: the cluster size, from 4K to 64K]
    #[arg(short, long, value_name = "SIZE", value_parser = cli::size)]
    granularity: Option<ByteLen>,
    /// With --merge: the image that has the bitmaps to be merged [default: the image itself]
    #[arg(short = 'b', long, value_name = "FILE", requires = "merge")]
    source_file: Option<PathBuf>,
    /// The format of that image: qcow2 [default: qcow2, unless the extension tells raw]
    #[arg(short = 'F', long, value_name = "FMT", requires = "source_file")]
    source_format: Option<Format>,
    /// The image
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// The bitmap's name
    #[arg(value_name = "BITMAP")]
    bitmap: OsString,
}

/// The changes, in the order of their words.
#[derive(Debug, Default)]
struct Changes(Vec<BitmapEdit>);

const CHANGES: [(&str, BitmapChange, &str); 5] = [
    ("add", BitmapChange::Add { granularity: None }, "Make it: empty, and recording"),
    ("remove", BitmapChange::Remove, "Remove it"),
    ("clear", BitmapChange::Clear, "Make it empty"),
    ("enable", BitmapChange::Enable, "Record what is written from now on"),
    ("disable", BitmapChange::Disable, "Record nothing more, and keep what is there"),
];

const MERGE: &str = "merge";

impl Args for Changes {
    fn augment_args(cmd: Command) -> Command {
        let cmd = CHANGES.iter().fold(cmd, |cmd, (word, _, help)| {
            cmd.arg(Arg::new(*word).long(*word).help(*help).action(ArgAction::SetTrue))
        });
        let merge = Arg::new(MERGE).long(MERGE).value_name("SOURCE").action(ArgAction::Append);
        let merge = merge.value_parser(clap::value_parser!(OsString));
        cmd.arg(merge.help("Mark in it what the bitmap SOURCE marks; may be given several times"))
    }

    fn augment_args_for_update(cmd: Command) -> Command {
        Self::augment_args(cmd)
    }
}

impl FromArgMatches for Changes {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let flags = CHANGES.iter().filter(|(word, ..)| matches.get_flag(word)).flat_map(
            |(word, change, _)| {
                let change = BitmapEdit::Change(*change);
                matches.indices_of(word).into_iter().flatten().map(move |at| (at, change.clone()))
            },
        );
        let sources = matches.get_many::<OsString>(MERGE).into_iter().flatten();
        let merges = matches.indices_of(MERGE).into_iter().flatten().zip(sources);
        let merges = merges.map(|(at, source)| (at, BitmapEdit::Merge(source.as_bytes().to_vec())));
        let mut given: Vec<(usize, BitmapEdit)> = flags.chain(merges).collect();
        given.sort_by_key(|(at, _)| *at);
        Ok(Self(given.into_iter().map(|(_, change)| change).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

pub fn run(args: &BitmapArgs) -> Result<ExitCode, Failure> {
    let invalid = |text: &str| Err(Failure::from(Error::new(ErrorKind::InvalidInput, text)));
    let mut changes = args.changes.0.clone();
    if changes.is_empty() {
        return invalid("say what to do: --add, --remove, --clear, --enable, --disable or --merge");
    }
    if let Some(bytes) = args.granularity {
        let added = changes.iter_mut().find_map(|change| match change {
            BitmapEdit::Change(BitmapChange::Add { granularity }) => Some(granularity),
            _ => None,
        });
        let Some(granularity) = added else {
            return invalid("a granularity is only for --add");
        };
        *granularity = Some(bytes.get());
    }
    let runtime = Runtime::new(Config::default())?;
    let source = args.source_file.as_deref();
    let source = source.map(|path| BitmapSource { path, format: args.source_format });
    let name = args.bitmap.as_bytes();
    runtime.block_on(change_bitmap(&args.file, args.format, name, &changes, source))?;
    Ok(ExitCode::SUCCESS)
}
