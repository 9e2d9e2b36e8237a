//! The tools of the host: running a command with its output kept for the error, looking for programs, checksums, waiting.

use anyhow::{Context, Result, bail};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{PoisonError, RwLock};
use std::time::{Duration, Instant};

/// Looks for a program in `PATH` and in the system folders that an ordinary user's `PATH` lacks.
pub fn which(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(PathBuf::from);
    std::env::split_paths(&path)
        .chain(system)
        .map(|dir| dir.join(program))
        .find(|file| file.is_file())
}

/// A command for a program, found as [`which`] finds it, with nothing on its standard input.
pub fn tool(program: &str) -> Command {
    self::program(&which(program).unwrap_or_else(|| PathBuf::from(program)))
}

/// The same for a program of which the path is known.
pub fn program(path: &Path) -> Command {
    let mut command = Command::new(path);
    command.stdin(Stdio::null());
    command
}

/// Whether this process is root.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Held for reading while a process is being started: until it has become the program, it shares this process's open files.
static STARTING: RwLock<()> = RwLock::new(());

/// Runs a command to its end; any exit code is fine.
pub fn output(command: &mut Command) -> Result<Output> {
    let child = start(command.stdout(Stdio::piped()).stderr(Stdio::piped()))?;
    child.wait_with_output().with_context(|| format!("{} can't be run", show(command)))
}

/// Starts a command and returns once it is the program.
pub fn start(command: &mut Command) -> Result<Child> {
    let _starting = STARTING.read().unwrap_or_else(PoisonError::into_inner);
    command.spawn().with_context(|| format!("{} can't be run", show(command)))
}

/// After files were closed: waits until no process that is just being started by another thread holds them, and with them their
/// locks, open any more.
pub fn files_are_closed() {
    drop(STARTING.write().unwrap_or_else(PoisonError::into_inner));
}

/// Runs a command that must succeed and returns its standard output. The error has all it wrote.
pub fn run(command: &mut Command) -> Result<String> {
    let out = output(command)?;
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    if !out.status.success() {
        bail!(
            "{} ended with {}:\n{}{}",
            show(command),
            out.status,
            text,
            String::from_utf8_lossy(&out.stderr)
        );
    }
    Ok(text)
}

/// The command line, for messages.
pub fn show(command: &Command) -> String {
    let mut line = command.get_program().to_string_lossy().into_owned();
    for arg in command.get_args() {
        line.push(' ');
        line.push_str(&arg.to_string_lossy());
    }
    line
}

/// SHA-256 of a file, in hexadecimal.
pub fn sha256(file: &Path) -> Result<String> {
    let text = run(tool("sha256sum").arg(file))?;
    let sum = text.trim_start_matches('\\').split_whitespace().next();
    sum.map(str::to_owned)
        .with_context(|| format!("sha256sum said nothing about {}", file.display()))
}

/// Asks again and again until `ready` gives a value; an error after `limit`, naming `what`.
pub fn wait_for<T>(
    what: &str,
    limit: Duration,
    mut ready: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let start = Instant::now();
    loop {
        if let Some(value) = ready()? {
            return Ok(value);
        }
        if start.elapsed() > limit {
            bail!("waited {} s in vain for {what}", limit.as_secs());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The numbers of the sockets that listen at `path`, read from `/proc/net/unix` so that no server notices anything.
///
/// There can be several: the ring of a server that was killed keeps its socket for a moment.
pub fn listeners(path: &Path) -> HashSet<u64> {
    const SO_ACCEPTCON: u64 = 1 << 16;
    let table = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let listening = |line: &str| {
        let mut words = line.split_whitespace().skip(3);
        let flags = u64::from_str_radix(words.next()?, 16).ok()?;
        let inode = words.nth(2)?.parse().ok()?;
        let here = words.next().is_some_and(|name| Path::new(name) == path);
        (flags & SO_ACCEPTCON != 0 && here).then_some(inode)
    };
    table.lines().skip(1).filter_map(listening).collect()
}

/// `qemu-img check` of a qcow2 image: its exit code (0 clean, 2 corrupt, 3 leaks only) and what it wrote.
pub fn qemu_img_check(image: &Path) -> Result<(i32, String)> {
    let out = output(tool("qemu-img").args(["check", "-f", "qcow2"]).arg(image))?;
    let text =
        [out.stdout, out.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    Ok((out.status.code().unwrap_or(-1), text))
}
