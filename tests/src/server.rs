//! A server of one disk: `bedplate serve` or, as the peer to compare with, `qemu-storage-daemon`.
//!
//! Invariants: the process ends when [`Server`] is dropped; a server is only handed out once its sockets are listened on.

use crate::{host, paths};
use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

/// How long a server may take to listen, and to end when asked to.
const LIMIT: Duration = Duration::from_secs(30);

/// Which program serves the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Program {
    /// `bedplate serve`, from this path.
    Bedplate(PathBuf),
    /// `qemu-storage-daemon`.
    StorageDaemon,
}

/// What to serve, and where.
#[derive(Clone, Debug)]
pub struct Config {
    /// The program.
    pub program: Program,
    /// A path, or `null:SIZE` (in bytes for the peer) for a disk that costs nothing.
    pub image: String,
    /// `raw` or `qcow2`.
    pub format: String,
    /// The vhost-user-blk socket to offer.
    pub vhost_user_blk: Option<PathBuf>,
    /// The NBD socket to offer (`unix:PATH` on the command line).
    pub nbd: Option<PathBuf>,
    /// Virtqueues offered.
    pub queues: u16,
    /// Bypass the host's page cache.
    pub direct: bool,
    /// Further words for `bedplate serve` (the peer ignores them).
    pub extra: Vec<String>,
}

impl Config {
    /// The `bedplate` command under test serving `image` over vhost-user-blk on `socket`.
    pub fn bedplate(image: &Path, format: &str, socket: &Path) -> Result<Config> {
        Ok(Config {
            program: Program::Bedplate(paths::bedplate()?),
            image: image.display().to_string(),
            format: format.to_owned(),
            vhost_user_blk: Some(socket.to_path_buf()),
            nbd: None,
            queues: 1,
            direct: true,
            extra: Vec::new(),
        })
    }

    /// Sets the number of virtqueues.
    pub fn queues(mut self, queues: u16) -> Config {
        self.queues = queues;
        self
    }

    fn command(&self) -> Command {
        match &self.program {
            Program::Bedplate(path) => self.bedplate_command(path),
            Program::StorageDaemon => self.storage_daemon_command(),
        }
    }

    fn bedplate_command(&self, path: &Path) -> Command {
        let mut command = Command::new(path);
        command.arg("serve").arg(&self.image);
        if !self.image.starts_with("null:") {
            command.args(["-f", &self.format]);
        }
        if let Some(socket) = &self.vhost_user_blk {
            command
                .arg("--vhost-user-blk")
                .arg(socket)
                .args(["--queues", &self.queues.to_string()]);
        }
        if let Some(socket) = &self.nbd {
            command.arg("--nbd").arg(format!("unix:{}", socket.display()));
        }
        if !self.direct {
            command.args(["--cache", "writeback"]);
        }
        command.args(&self.extra);
        command
    }

    fn storage_daemon_command(&self) -> Command {
        let mut command = host::tool("qemu-storage-daemon");
        if let Some(size) = self.image.strip_prefix("null:") {
            command.arg("--blockdev").arg(format!("null-co,node-name=disk,size={size}"));
        } else {
            let driver =
                if is_block_device(Path::new(&self.image)) { "host_device" } else { "file" };
            let cache = if self.direct { "cache.direct=on,aio=native" } else { "cache.direct=off" };
            let file =
                format!("{driver},node-name=file,filename={},discard=unmap,{cache}", self.image);
            let format = format!("{},node-name=disk,file=file,discard=unmap", self.format);
            command.arg("--blockdev").arg(file).arg("--blockdev").arg(format);
        }
        // An I/O thread of its own is what a user who cares for speed gives it.
        command.args(["--object", "iothread,id=io"]);
        if let Some(socket) = &self.vhost_user_blk {
            command.arg("--export").arg(format!(
                "vhost-user-blk,id=blk,node-name=disk,addr.type=unix,addr.path={},writable=on,num-queues={},iothread=io",
                socket.display(),
                self.queues
            ));
        }
        if let Some(socket) = &self.nbd {
            command
                .arg("--nbd-server")
                .arg(format!("addr.type=unix,addr.path={}", socket.display()));
            command.args(["--export", "nbd,id=nbd,node-name=disk,name=,writable=on"]);
        }
        command
    }
}

fn is_block_device(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    std::fs::metadata(path).is_ok_and(|meta| meta.file_type().is_block_device())
}

/// A running server of one disk.
#[derive(Debug)]
pub struct Server {
    child: Child,
    log: PathBuf,
    ended: bool,
}

impl Server {
    /// Starts a server and waits until its sockets are listened on. Its output goes to `log`.
    pub fn start(config: &Config, log: &Path) -> Result<Server> {
        for socket in [&config.vhost_user_blk, &config.nbd].into_iter().flatten() {
            if config.program == Program::StorageDaemon && socket.exists() {
                // The peer refuses to start over a socket that a killed process left behind.
                std::fs::remove_file(socket)
                    .with_context(|| format!("removing {}", socket.display()))?;
            }
        }
        let out = File::options()
            .create(true)
            .append(true)
            .open(log)
            .with_context(|| log.display().to_string())?;
        let sockets: Vec<_> = [&config.vhost_user_blk, &config.nbd].into_iter().flatten().collect();
        let before: Vec<_> = sockets.iter().map(|socket| host::listeners(socket)).collect();
        let mut command = config.command();
        command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
        let child = host::start(&mut command)?;
        let mut server = Server { child, log: log.to_path_buf(), ended: false };
        for (socket, before) in sockets.into_iter().zip(&before) {
            let listening = host::wait_for(
                &format!("{} to listen on {}", host::show(&command), socket.display()),
                LIMIT,
                || {
                    if let Some(status) = server.child.try_wait()? {
                        server.ended = true;
                        bail!(
                            "{} ended with {status} at once:\n{}",
                            host::show(&command),
                            server.log()
                        );
                    }
                    let now = host::listeners(socket);
                    Ok((!now.is_subset(before)).then_some(()))
                },
            );
            listening.with_context(|| format!("its log:\n{}", server.log()))?;
        }
        Ok(server)
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// All that the server wrote up to now.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// CPU time used up to now (all threads, user and system).
    pub fn cpu_time(&self) -> Result<Duration> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        // Field 2 is the name in parentheses and may hold blanks; utime and stime are fields 14 and 15.
        let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
        let mut fields =
            rest.split_whitespace().skip(11).map(|field| field.parse::<u64>().unwrap_or(0));
        let ticks = fields.next().unwrap_or(0) + fields.next().unwrap_or(0);
        Ok(Duration::from_millis(
            ticks.saturating_mul(1000) / rustix::param::clock_ticks_per_second().max(1),
        ))
    }

    /// Asks the server to end (SIGTERM) and waits; an error when it does not end well.
    pub fn stop(mut self) -> Result<String> {
        let status = self.end(Signal::TERM)?;
        // The peer has no clean exit code of its own for SIGTERM in every version: dying of the signal is fine too.
        use std::os::unix::process::ExitStatusExt;
        if !status.success() && status.signal() != Some(Signal::TERM.as_raw()) {
            bail!("the server ended with {status} when asked to stop:\n{}", self.log());
        }
        Ok(self.log())
    }

    /// Kills the server without warning (SIGKILL) and waits for its end.
    pub fn kill(mut self) -> Result<()> {
        self.end(Signal::KILL).map(drop)
    }

    fn end(&mut self, signal: Signal) -> Result<ExitStatus> {
        if let Some(status) = self.child.try_wait()? {
            self.ended = true;
            return Ok(status);
        }
        kill_process(Pid::from_child(&self.child), signal)
            .context("the server can't be signalled")?;
        let ended = host::wait_for("the server to end", LIMIT, || Ok(self.child.try_wait()?));
        let status = ended.with_context(|| format!("its log:\n{}", self.log()))?;
        self.ended = true;
        Ok(status)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if !self.ended {
            // Nothing more can be done about errors here: the process is gone or the test is failing already.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
