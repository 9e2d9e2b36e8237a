//! What the tests share: disks, exports, raw protocol messages.

use bedplate_disk::{Disk, Layer};
use bedplate_storage::{FileStorage, OpenOptions};
use bedplate_types::{ByteLen, CacheMode};
use bedplate_vhost_user::frontend::{Client, ClientOptions, Queue};
use bedplate_vhost_user::{BlkOptions, Export, VhostUserBlk};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

pub const SIZE: u64 = 16 << 20;

pub type TestDisk = Disk<FileStorage>;

/// A directory with an export in it.
pub struct Rig {
    pub dir: tempfile::TempDir,
    pub export: Option<Export>,
}

pub fn null(size: u64) -> TestDisk {
    Disk::new("null", vec![Layer::Null(ByteLen::new(size))], false, CacheMode::None).expect("disk")
}

pub fn raw(dir: &tempfile::TempDir, read_only: bool) -> TestDisk {
    cached(dir, read_only, CacheMode::Writeback)
}

/// A raw disk in a cache mode.
pub fn cached(dir: &tempfile::TempDir, read_only: bool, cache: CacheMode) -> TestDisk {
    let path = dir.path().join("disk.raw");
    let mut how = std::fs::File::options();
    how.write(true).create(true).truncate(false);
    how.open(&path).and_then(|f| f.set_len(SIZE)).expect("create");
    let storage = FileStorage::open(&OpenOptions::new(path).read_only(read_only).cache(cache));
    let layers = vec![Layer::Raw(Arc::new(storage.expect("open")))];
    Disk::new("raw", layers, read_only, cache).expect("disk")
}

impl Rig {
    pub fn with(options: BlkOptions, disk: impl FnOnce(&tempfile::TempDir) -> TestDisk) -> Self {
        let dir = tempfile::tempdir().expect("directory");
        let disk = Arc::new(disk(&dir));
        let export = VhostUserBlk::start(&dir.path().join("s"), disk, options).expect("export");
        Self { dir, export: Some(export) }
    }

    pub fn raw() -> Self {
        Self::with(BlkOptions { serial: "bed-1".into(), ..BlkOptions::default() }, |d| {
            raw(d, false)
        })
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("s")
    }

    pub fn file(&self) -> Vec<u8> {
        std::fs::read(self.dir.path().join("disk.raw")).expect("read")
    }

    pub fn client(&self, options: &ClientOptions) -> Client {
        Client::connect(&self.socket(), options).expect("connect")
    }

    pub fn one(&self) -> (Client, Queue) {
        let mut client = self.client(&ClientOptions::default());
        let queue = client.take_queues().pop().expect("queue");
        (client, queue)
    }
}

/// A front end that sends messages byte by byte as told.
pub struct Raw(pub UnixStream);

impl Raw {
    pub fn connect(rig: &Rig) -> Self {
        let stream = UnixStream::connect(rig.socket()).expect("connect");
        let patience = std::time::Duration::from_secs(30);
        stream.set_read_timeout(Some(patience)).expect("timeout");
        let mut raw = Self(stream);
        raw.send(3, 0, &[], &[]); // SET_OWNER
        let features = raw.get(1); // GET_FEATURES
        let protocol = raw.get(15); // GET_PROTOCOL_FEATURES
        raw.send(16, 0, &protocol.to_ne_bytes(), &[]); // SET_PROTOCOL_FEATURES
        raw.send(2, 0, &features.to_ne_bytes(), &[]); // SET_FEATURES
        raw
    }

    pub fn send(&mut self, code: u32, flags: u32, body: &[u8], fds: &[i32]) {
        let mut b = Vec::new();
        for word in [code, 1 | flags, body.len() as u32] {
            b.extend(word.to_ne_bytes());
        }
        b.extend(body);
        self.try_send(&b, fds).expect("send");
    }

    /// Sends bytes and descriptors.
    pub fn try_send(
        &mut self,
        bytes: &[u8],
        fds: &[i32],
    ) -> Result<usize, vmm_sys_util::errno::Error> {
        self.0.send_with_fds(&[bytes], fds)
    }

    /// The body of the next reply, which must be one to `code`; None when the connection has ended.
    pub fn reply(&mut self, code: u32) -> Option<Vec<u8>> {
        use std::io::Read;
        let mut head = [0; 12];
        self.0.read_exact(&mut head).ok()?;
        let word = |i: usize| u32::from_ne_bytes([head[i], head[i + 1], head[i + 2], head[i + 3]]);
        assert_eq!((word(0), word(4)), (code, 5), "code and flags of a reply");
        let mut body = vec![0; word(8) as usize];
        self.0.read_exact(&mut body).ok()?;
        Some(body)
    }

    /// Sends a message that asks for an acknowledgement; returns that.
    pub fn ack(&mut self, code: u32, body: &[u8], fds: &[i32]) -> Option<u64> {
        self.send(code, 8, body, fds);
        let body = self.reply(code)?;
        Some(u64::from_ne_bytes(body.try_into().expect("eight bytes")))
    }

    pub fn get(&mut self, code: u32) -> u64 {
        self.send(code, 0, &[], &[]);
        let body = self.reply(code).expect("reply");
        u64::from_ne_bytes(body.try_into().expect("eight bytes"))
    }
}

pub fn words(list: &[u64]) -> Vec<u8> {
    list.iter().flat_map(|w| w.to_ne_bytes()).collect()
}

pub fn state(index: u32, num: u32) -> Vec<u8> {
    [index.to_ne_bytes(), num.to_ne_bytes()].concat()
}

/// A memory file.
pub fn memfd(len: u64) -> OwnedFd {
    let file = tempfile::tempfile().expect("file");
    file.set_len(len).expect("size");
    file.into()
}

pub fn fd(fd: &impl AsRawFd) -> i32 {
    fd.as_raw_fd()
}
