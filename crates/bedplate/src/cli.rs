//! The words of the command line.

use crate::{bench, bitmap, check, create, info, map, qemu_io, resize, serve, snapshot};
use bedplate_types::limits;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;

/// Disks for virtual machines, kept in ordinary files and served at the speed of the device underneath.
///
/// Works on raw and qcow2 images, byte for byte as QEMU reads and writes them. Options and sizes are spelled as
/// qemu-img spells them: sizes are bytes, or a number with K, M, G, T, P or E (powers of 1024).
///
/// The format of an image is told by its extension (.qcow2, .raw or .img) or by -f; content is never guessed
/// from.
#[derive(Parser, Debug)]
#[command(name = "bedplate", version, max_term_width = 100, after_long_help = after_help())]
pub struct Cli {
    /// How much is logged to the standard error [default: info for serve, else warn; RUST_LOG is heeded]
    #[arg(long, global = true, value_name = "LEVEL")]
    pub log_level: Option<Level>,

    #[command(subcommand)]
    pub verb: Verb,
}

/// How much is logged.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Level {
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

impl Level {
    pub fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        }
    }
}

/// What can be done.
#[derive(Subcommand, Debug)]
pub enum Verb {
    Create(create::CreateArgs),
    Info(info::InfoArgs),
    Check(check::CheckArgs),
    Map(map::MapArgs),
    Resize(resize::ResizeArgs),
    Snapshot(snapshot::SnapshotArgs),
    Bitmap(bitmap::BitmapArgs),
    Serve(serve::ServeArgs),
    Bench(bench::BenchArgs),
    QemuIo(qemu_io::QemuIoArgs),
}

/// Which external data files may be used.
#[derive(Args, Debug)]
pub struct DataFileArgs {
    /// Open the external data files that qcow2 headers name; relative names are relative to the current folder
    #[arg(long)]
    pub allow_data_file: bool,
    /// The external data file of the image, whatever its header says
    #[arg(long, value_name = "PATH")]
    pub data_file: Option<PathBuf>,
}

fn after_help() -> String {
    let mib = |bytes: u64| bytes >> 20;
    format!(
        "\
Examples:
  bedplate create disk.qcow2 20G
  bedplate serve disk.qcow2 --vhost-user-blk /run/disk.sock
  bedplate info --json disk.qcow2
  bedplate check disk.qcow2

Exit codes: 0 done, 1 failed, 2 wrong usage. 'check' has codes of its own, see 'bedplate check --help'.

Limits:
  layers of a backing chain                {chain}
  bytes of a backing file's name           {name}
  qcow2: bytes of an L1 table              {l1} MiB
  qcow2: bytes of a refcount table         {reftable} MiB
  qcow2: internal snapshots                {snapshots}, in a table of {table} MiB
  qcow2: memory for recording bitmaps      {bitmap} MiB, each taking a cluster at least
  LUKS: bytes of the header with its keys  {luks} MiB
  LUKS: rounds of derivation of all keys   {rounds} million
  LUKS: bytes of a passphrase              {pass} KiB
  LUKS: passphrases of a command           {passes}
  vhost-user: queues of an export          {queues}
  vhost-user: entries of a queue           {queue_size}
  vhost-user: segments of a request        {segments}
  vhost-user: guest memory regions         {slots}
  NBD: connections                         {clients}
  NBD: bytes of one read or write          {request} MiB
  NBD: requests of a connection under way  {flight}
  NBD: bytes of an option                  {option} KiB
  NBD: bytes of an export's name           {string}
  NBD: seconds to negotiate                {handshake}",
        chain = limits::MAX_CHAIN_DEPTH,
        name = limits::MAX_BACKING_NAME,
        l1 = mib(limits::MAX_L1_BYTES),
        reftable = mib(limits::MAX_REFTABLE_BYTES),
        snapshots = limits::MAX_SNAPSHOTS,
        table = mib(limits::MAX_SNAPSHOT_TABLE_BYTES),
        bitmap = mib(limits::MAX_BITMAP_BYTES),
        luks = mib(limits::MAX_LUKS_BYTES),
        rounds = limits::MAX_LUKS_ITERATIONS / 1_000_000,
        pass = limits::MAX_PASSPHRASE_BYTES >> 10,
        passes = limits::MAX_PASSPHRASES,
        queues = limits::MAX_QUEUES,
        queue_size = limits::MAX_QUEUE_SIZE,
        segments = limits::MAX_SEGMENTS,
        slots = limits::MAX_MEMORY_SLOTS,
        clients = limits::MAX_NBD_CLIENTS,
        request = mib(u64::from(limits::MAX_NBD_REQUEST)),
        flight = limits::MAX_NBD_IN_FLIGHT,
        option = limits::MAX_NBD_OPTION >> 10,
        string = limits::MAX_NBD_STRING,
        handshake = limits::NBD_HANDSHAKE_SECONDS,
    )
}

/// Reads a size as clap wants it.
pub fn size(text: &str) -> bedplate_types::Result<bedplate_types::ByteLen> {
    bedplate_types::parse_size(text)
}
