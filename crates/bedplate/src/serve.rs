//! `bedplate serve`.

use crate::attach::{Attach, ways};
use crate::failure::Failure;
use crate::keys::KeyArgs;
use crate::output::OutputArgs;
use crate::{cli, output};
use bedplate_image::{ChainOptions, OpenLayer, StateDir, human_size};
use bedplate_server::{BlkOptions, Daemon, ExportKind, NbdAddr, NbdOptions, Signals, Stopped};
use bedplate_types::{
    ByteLen, CacheMode, Error, ErrorKind, Format, RequestStats, ResultExt, limits, parse_size,
};
use clap::{ArgGroup, Args};
use serde_json::{Map, Value, json};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Serve a disk to virtual machines and other programs
///
/// The image is locked against other writers, and served until SIGTERM or SIGINT comes; then requests under way are
/// finished, everything is made durable, and the image is closed cleanly. A second signal ends the process at once.
/// Clients may come and go.
///
/// Prints how to attach to each export, then 'ready'; at the end what was asked of each export.
#[derive(Args, Debug)]
#[command(
    after_long_help = after_help(),
    group(ArgGroup::new("exports").required(true).multiple(true).args(["vhost_user_blk", "nbd"]))
)]
pub struct ServeArgs {
    /// The image, or null:SIZE for a disk that keeps nothing, for measuring
    #[arg(value_name = "FILE")]
    file: String,
    /// The image's format: raw or qcow2 [default: told by the extension]
    #[arg(short, long = "format", value_name = "FMT")]
    format: Option<Format>,
    /// Serve as a virtio-blk device to virtual machines, over vhost-user on this Unix socket
    #[arg(long, value_name = "SOCKET")]
    vhost_user_blk: Vec<PathBuf>,
    /// Queues that a virtual machine may use; best one for each of its CPUs
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = queues(), requires = "vhost_user_blk")]
    queues: u16,
    /// Threads that serve the queues [default: one for each queue, at most one for each CPU of the host]
    #[arg(long, value_name = "N", value_parser = queues(), requires = "vhost_user_blk")]
    queue_threads: Option<u16>,
    /// Entries that a queue may have, a power of two
    #[arg(long, value_name = "N", default_value_t = limits::MAX_QUEUE_SIZE, value_parser = queue_size, requires = "vhost_user_blk")]
    queue_size: u16,
    /// Serial number that the guest sees, at most 20 bytes
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true, value_parser = serial, requires = "vhost_user_blk")]
    serial: String,
    /// Microseconds that a thread looks for requests before it sleeps; 0 saves CPU time, more saves latency
    #[arg(long, value_name = "USECS", default_value_t = 50, value_parser = clap::value_parser!(u64).range(..=1_000_000))]
    spin: u64,
    /// Serve over NBD at unix:PATH (or a path with a slash in it) or HOST:PORT
    #[arg(long, value_name = "ADDR")]
    nbd: Vec<NbdAddr>,
    /// Name of the NBD export [default: the empty name]
    #[arg(
        long,
        value_name = "NAME",
        default_value = "",
        hide_default_value = true,
        requires = "nbd"
    )]
    export_name: String,
    /// Let NBD clients ask for this persistent bitmap of the image, as qemu:dirty-bitmap:NAME; may be given several times
    #[arg(short = 'B', long, value_name = "NAME", requires = "nbd")]
    bitmap: Vec<String>,
    /// Refuse all changes
    #[arg(short, long)]
    read_only: bool,
    /// How the host's page cache is used, see below
    #[arg(long, value_name = "MODE", default_value = "none")]
    cache: CacheMode,
    /// Open the backing files that the image names
    #[arg(long)]
    allow_backing: bool,
    /// The format of backing files whose overlay does not state it
    #[arg(short = 'F', long, value_name = "FMT")]
    backing_format: Option<Format>,
    #[command(flatten)]
    data: cli::DataFileArgs,
    /// Serve although another program is writing to the image; needs --read-only
    #[arg(short = 'U', long, requires = "read_only")]
    force_share: bool,
    /// Memory for qcow2 L2 tables [default: 128M, which maps 1 TiB in clusters of 64 KiB]
    #[arg(long, value_name = "SIZE", value_parser = cli::size)]
    l2_cache_size: Option<ByteLen>,
    /// Where changes that are only in memory outlive a kill, see below; none does without
    #[arg(long, value_name = "DIR", value_parser = state_dir, default_value = "", hide_default_value = true)]
    state_dir: StateDir,
    /// Lose what a killed server of this image left, where it can't be taken up or is not wanted
    #[arg(long, conflicts_with = "read_only")]
    discard_state: bool,
    #[command(flatten)]
    keys: KeyArgs,
    #[command(flatten)]
    output: OutputArgs,
}

fn after_help() -> String {
    format!(
        "\
Cache modes (--cache):
  none          direct I/O; durable when the guest flushes [default]
  writeback     page cache; durable when the guest flushes
  writethrough  page cache; every write is durable before it completes
  directsync    direct I/O; every write is durable before it completes
  unsafe        page cache; flushes are ignored: a crash of the host loses the image

State (--state-dir):
  A guest goes on when its server is killed and started again. What it wrote to a qcow2 disk is in the image's file by
  then, but perhaps not yet where: that is kept in a state file, in memory (16 MiB for each disk), and taken up by the
  next server. Its folder must be on a memory file system, belong to this user, and be writable by nobody else. It is
  /run/bedplate for root, $XDG_RUNTIME_DIR/bedplate for others, and one of its own in /dev/shm where that is not in
  memory, as in most containers: give a container that is to be replaced a folder of the host's /run. A folder that is
  named and can't be used is refused; without any the server warns. A clean stop removes the file. State that doesn't fit, because another program has changed the image or the
  host was restarted, is refused, and dropped with --discard-state. Images of version 2 (compat=0.10) have no state.
  Persistent bitmaps that record can't be trusted after a kill.

Limits:
  layers of a backing chain         {chain}
  queues of an export               {queues}
  entries of a queue                {queue_size}
  segments of a request             {segments}
  NBD: connections                  {clients}
  NBD: bytes of one read or write   {request} MiB
  NBD: bytes of an export's name    {string}

Examples:
  bedplate serve --vhost-user-blk /run/disk.sock --queues 4 disk.qcow2
  bedplate serve --nbd unix:/run/disk.nbd disk.qcow2
  bedplate serve --nbd 127.0.0.1:10809 --read-only --allow-backing clone.qcow2
  bedplate serve --nbd unix:/run/disk.nbd --read-only --bitmap nightly disk.qcow2
  bedplate serve --nbd unix:/run/null.nbd null:100G",
        chain = limits::MAX_CHAIN_DEPTH,
        queues = limits::MAX_QUEUES,
        queue_size = limits::MAX_QUEUE_SIZE,
        segments = limits::MAX_SEGMENTS,
        clients = limits::MAX_NBD_CLIENTS,
        request = limits::MAX_NBD_REQUEST >> 20,
        string = limits::MAX_NBD_STRING,
    )
}

/// Bytes of a virtio-blk serial number.
const SERIAL_BYTES: usize = 20;

fn state_dir(text: &str) -> Result<StateDir, std::convert::Infallible> {
    Ok(match text {
        "" => StateDir::Usual,
        "none" => StateDir::None,
        dir => StateDir::At(dir.into()),
    })
}

fn queues() -> clap::builder::RangedI64ValueParser<u16> {
    clap::value_parser!(u16).range(1..=limits::MAX_QUEUES as i64)
}

fn queue_size(text: &str) -> Result<u16, String> {
    match text.parse::<u16>() {
        Ok(n) if n.is_power_of_two() && n <= limits::MAX_QUEUE_SIZE => Ok(n),
        _ => Err(format!("a power of two up to {} is needed", limits::MAX_QUEUE_SIZE)),
    }
}

fn serial(text: &str) -> Result<String, String> {
    if text.len() > SERIAL_BYTES || !text.bytes().all(|b| b.is_ascii_graphic() || b == b' ') {
        return Err(format!("a serial number has at most {SERIAL_BYTES} bytes of printable ASCII"));
    }
    Ok(text.to_owned())
}

pub fn run(args: &ServeArgs) -> Result<ExitCode, Failure> {
    let signals = Signals::catch()?;
    let mut daemon = open(args)?;
    if let Err(e) = export(&mut daemon, args) {
        // The image may have been changed by opening it, so it is closed as after serving.
        if let Err(also) = daemon.stop() {
            tracing::error!("{also:#}");
        }
        return Err(e.into());
    }
    quietly(announce(&daemon, args))?;
    let stopped = daemon.run(&signals)?;
    quietly(summarise(&stopped, args))?;
    Ok(ExitCode::SUCCESS)
}

/// A daemon goes on when nobody reads what it prints.
fn quietly(printed: Result<(), Failure>) -> Result<(), Failure> {
    match printed {
        Err(Failure::BrokenPipe) => Ok(()),
        other => other,
    }
}

fn open(args: &ServeArgs) -> bedplate_types::Result<Daemon> {
    if let Some(size) = args.file.strip_prefix("null:") {
        let size = parse_size(size).context(|| format!("'{}' can't be served", args.file))?;
        let data = args.data.allow_data_file || args.data.data_file.is_some();
        if args.format.is_some() || args.allow_backing || data {
            let text = "a null disk has no format, no backing file and no data file; leave -f, --allow-backing, \
                        --allow-data-file and --data-file out";
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        return Daemon::null(size, args.read_only, args.cache);
    }
    let options = ChainOptions {
        format: args.format,
        read_only: args.read_only,
        cache: args.cache,
        allow_backing: args.allow_backing,
        backing_format: args.backing_format,
        allow_data_file: args.data.allow_data_file,
        data_file: args.data.data_file.clone(),
        force_share: args.force_share,
        l2_cache: args.l2_cache_size,
        state: args.state_dir.clone(),
        discard_state: args.discard_state,
        passphrases: args.keys.read()?,
        metadata_only: false,
    };
    Daemon::open(Path::new(&args.file), &options)
}

fn export(daemon: &mut Daemon, args: &ServeArgs) -> bedplate_types::Result<()> {
    let spin = Duration::from_micros(args.spin);
    let cpus = std::thread::available_parallelism().map_or(1, |n| n.get());
    let usual = args.queues.min(u16::try_from(cpus).unwrap_or(u16::MAX));
    for socket in &args.vhost_user_blk {
        let options = BlkOptions {
            queues: args.queues,
            threads: args.queue_threads.unwrap_or(usual),
            queue_size: args.queue_size,
            serial: args.serial.clone(),
            spin,
            ..BlkOptions::default()
        };
        daemon.export_vhost_user_blk(socket, options)?;
    }
    for addr in &args.nbd {
        let mut options = NbdOptions::default();
        options.runtime.spin = spin;
        daemon.export_nbd(addr, &args.export_name, &args.bitmap, options)?;
    }
    Ok(())
}

/// Protocol and place of an export.
fn place(export: &ExportKind) -> (&'static str, String) {
    match export {
        ExportKind::Nbd { addr, name } => ("nbd", addr.uri(name)),
        ExportKind::VhostUserBlk { socket, .. } => ("vhost-user-blk", socket.display().to_string()),
    }
}

/// Prints how to attach, then that it is ready.
fn announce(daemon: &Daemon, args: &ServeArgs) -> Result<(), Failure> {
    let opened = daemon.opened();
    let (disk, layers) = (&opened.disk, &opened.layers);
    let (size, access) =
        (disk.size().get(), if disk.read_only() { "read-only" } else { "read-write" });
    if args.output.is_json() {
        let exports: Vec<Value> =
            daemon.exports().enumerate().map(|(n, e)| export_json(n, e)).collect();
        let layers: Vec<Value> = layers.iter().map(layer_json).collect();
        return output::json_line(&json!({
            "event": "ready", "filename": args.file, "layers": layers, "virtual-size": size,
            "read-only": disk.read_only(), "cache": args.cache.to_string(), "exports": exports,
            "state-file": opened.state.as_ref().map(|s| s.path().display().to_string()),
        }));
    }
    let mut out = String::new();
    let format = layers.first().map_or("null".to_owned(), |l| l.format.to_string());
    let _ = writeln!(
        out,
        "disk {}: {format}, {} ({size} bytes), {access}, cache {}",
        disk.name(),
        human_size(size),
        args.cache
    );
    if let Some(data) = layers.first().and_then(|l| l.data_file.as_ref()) {
        let _ = writeln!(out, "  data in {}", data.display());
    }
    for layer in layers.iter().skip(1) {
        let _ = writeln!(out, "  over {} ({})", layer.path.display(), layer.format);
    }
    if let Some(state) = &opened.state {
        let _ = writeln!(out, "  state in {}", state.path().display());
    }
    for (n, export) in daemon.exports().enumerate() {
        let (protocol, place) = place(export);
        let _ = writeln!(out, "\n{protocol} at {place}");
        for Attach { title, lines, .. } in ways(n, export) {
            let _ = writeln!(out, "  {title}:");
            for line in lines {
                let _ = writeln!(out, "    {line}");
            }
        }
    }
    out.push_str("\nready\n");
    output::text(&out)
}

fn layer_json(layer: &OpenLayer) -> Value {
    let mut json = json!({
        "filename": layer.path.display().to_string(), "format": layer.format.to_string(),
    });
    if let Some(data) = &layer.data_file {
        json["data-file"] = data.display().to_string().into();
    }
    json
}

fn export_json(n: usize, export: &ExportKind) -> Value {
    let (protocol, place) = place(export);
    let attach: Map<String, Value> = ways(n, export)
        .into_iter()
        .map(|a| (a.key.to_owned(), a.lines.join("\n").into()))
        .collect();
    json!({"protocol": protocol, "address": place, "attach": attach})
}

/// Prints what was asked of each export.
fn summarise(stopped: &Stopped, args: &ServeArgs) -> Result<(), Failure> {
    if args.output.is_json() {
        let exports: Vec<Value> = stopped.exports.iter().map(|(e, s)| stats_json(e, s)).collect();
        return output::json_line(&json!({"event": "stopped", "exports": exports}));
    }
    let mut out = String::from("\nstopped\n");
    for (export, s) in &stopped.exports {
        let (protocol, place) = place(export);
        let _ = writeln!(
            out,
            "{protocol} at {place}: {} requests: {} reads ({}), {} writes ({}), {} flushes, {} discards and zeroings, \
             {} others; {} failed",
            s.requests(),
            s.reads,
            human_size(s.read_bytes),
            s.writes,
            human_size(s.write_bytes),
            s.flushes,
            s.discards,
            s.other,
            s.errors
        );
    }
    output::text(&out)
}

fn stats_json(export: &ExportKind, s: &RequestStats) -> Value {
    let (protocol, place) = place(export);
    json!({
        "protocol": protocol, "address": place, "requests": s.requests(), "reads": s.reads,
        "read-bytes": s.read_bytes, "writes": s.writes, "write-bytes": s.write_bytes, "flushes": s.flushes,
        "discards": s.discards, "other": s.other, "errors": s.errors,
    })
}
