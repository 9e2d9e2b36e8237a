//! A disk image of one test with its server's socket and log, and the checks that every test makes at its end.
//!
//! With `BEDPLATE_TEST_SERVER=qemu-storage-daemon` the same tests run against the peer, which shows whether a failure is the
//! test's own.

use crate::guest::Disk;
use crate::host;
use crate::paths;
use crate::server::{Config, Program, Server};
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// One disk: its image, where it is served, and how.
#[derive(Debug)]
pub struct Fixture {
    config: Config,
    image: PathBuf,
    socket: PathBuf,
    log: PathBuf,
    _sockets: TempDir,
    /// Where servers keep their state: servers that are killed leave it.
    state: Option<TempDir>,
    images: TempDir,
}

impl Fixture {
    /// Creates an image of `size` (as the command takes it, `512M`) in the target folder, for the command under test.
    pub fn new(format: &str, size: &str) -> Result<Fixture> {
        let peer =
            std::env::var("BEDPLATE_TEST_SERVER").is_ok_and(|name| name == "qemu-storage-daemon");
        let program =
            if peer { Program::StorageDaemon } else { Program::Bedplate(paths::bedplate()?) };
        Fixture::with_program(program, format, size)
    }

    /// The same for a certain server.
    pub fn with_program(program: Program, format: &str, size: &str) -> Result<Fixture> {
        // The target folder is on a real file system, where direct I/O works; a socket's path must be short.
        let images = tempfile::Builder::new().prefix("test-disk-").tempdir_in(paths::target())?;
        let sockets = tempfile::tempdir()?;
        let (image, socket) =
            (images.path().join(format!("disk.{format}")), sockets.path().join("blk"));
        let mut create = match &program {
            Program::Bedplate(path) => host::program(path),
            Program::StorageDaemon => host::tool("qemu-img"),
        };
        host::run(create.args(["create", "-f", format]).arg(&image).arg(size))?;
        let state = tempfile::tempdir_in("/dev/shm").ok();
        let extra = match &state {
            Some(dir) => vec!["--state-dir".to_owned(), dir.path().display().to_string()],
            None => Vec::new(),
        };
        let config = Config {
            program,
            image: image.display().to_string(),
            format: format.to_owned(),
            vhost_user_blk: Some(socket.clone()),
            nbd: None,
            queues: 1,
            direct: true,
            extra,
        };
        Ok(Fixture {
            config,
            image,
            socket,
            log: images.path().join("server.log"),
            _sockets: sockets,
            state,
            images,
        })
    }

    /// Sets the number of virtqueues offered.
    pub fn queues(mut self, queues: u16) -> Fixture {
        self.config.queues = queues;
        self
    }

    /// Offers the disk over NBD, instead of vhost-user-blk.
    pub fn over_nbd(mut self) -> Fixture {
        self.config.nbd = self.config.vhost_user_blk.take();
        self
    }

    /// The files in which servers keep what is only in memory.
    pub fn state_files(&self) -> Result<Vec<PathBuf>> {
        let Some(dir) = &self.state else { return Ok(Vec::new()) };
        let entries = std::fs::read_dir(dir.path())?;
        entries.map(|entry| Ok(entry?.path())).collect()
    }

    /// Adds words to the command line of `bedplate serve`.
    pub fn option(mut self, words: &[&str]) -> Fixture {
        self.config.extra.extend(words.iter().map(|word| (*word).to_owned()));
        self
    }

    /// Uses the host's page cache.
    pub fn buffered(mut self) -> Fixture {
        self.config.direct = false;
        self
    }

    /// The socket that is served on.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The address for NBD clients.
    pub fn nbd_uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket.display())
    }

    /// The image.
    pub fn image(&self) -> &Path {
        &self.image
    }

    /// A folder for the test's other files, on the same file system as the image.
    pub fn folder(&self) -> &Path {
        self.images.path()
    }

    /// Starts a server; also again after one was killed.
    pub fn serve(&self) -> Result<Server> {
        Server::start(&self.config, &self.log)
    }

    /// The disk for a guest, with as many queues as are offered.
    pub fn disk(&self) -> Disk {
        let disk = Disk::new(&self.socket).queues(self.config.queues);
        match self.config.program {
            Program::Bedplate(_) => disk,
            // By default the peer reports its write cache off although it caches, and its guests never flush.
            Program::StorageDaemon => disk.property("config-wce", "off"),
        }
    }

    /// Bytes of the host's disk that the image takes.
    pub fn allocated(&self) -> Result<u64> {
        use std::os::unix::fs::MetadataExt;
        Ok(std::fs::metadata(&self.image)?.blocks() * 512)
    }

    /// Both checkers must find nothing at all, not even leaks: for after a clean end.
    pub fn assert_clean(&self) -> Result<()> {
        self.check(&[0])
    }

    /// Leaks are allowed, corruption is not: for after a kill.
    pub fn assert_not_corrupt(&self) -> Result<()> {
        self.check(&[0, 3])
    }

    fn check(&self, allowed: &[i32]) -> Result<()> {
        if self.config.format != "qcow2" {
            return Ok(());
        }
        let (code, text) = host::qemu_img_check(&self.image)?;
        if !allowed.contains(&code) {
            bail!("qemu-img check gave {code}:\n{text}");
        }
        if let Program::Bedplate(path) = &self.config.program {
            let out = host::output(host::program(path).arg("check").arg(&self.image))?;
            if !out.status.code().is_some_and(|code| allowed.contains(&code)) {
                let text = [out.stdout, out.stderr]
                    .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
                    .concat();
                bail!("bedplate check ended with {}:\n{text}", out.status);
            }
        }
        Ok(())
    }

    /// What the guest sees, as a raw file, read by QEMU's tools.
    pub fn to_raw(&self) -> Result<PathBuf> {
        let raw = self.images.path().join("content.raw");
        let mut command = host::tool("qemu-img");
        command.args(["convert", "-f", &self.config.format, "-O", "raw"]).args([&self.image, &raw]);
        host::run(&mut command).map(|_| raw)
    }

    /// Checks the guest's file system from the outside, after its power-off.
    pub fn fsck(&self, kind: &str) -> Result<()> {
        let raw = self.to_raw()?;
        let checked = match kind {
            "ext4" => host::run(host::tool("e2fsck").arg("-fn").arg(&raw)),
            "xfs" => host::run(host::tool("xfs_repair").args(["-n", "-f"]).arg(&raw)),
            _ => bail!("no checker is known for {kind}"),
        };
        std::fs::remove_file(&raw).with_context(|| raw.display().to_string())?;
        checked.map(drop)
    }
}
