//! A disk in memory for tests: it logs what it is asked, fails and holds requests on demand.

use crate::device::{Device, Run};
use bedplate_runtime::buf::IoVec;
use bedplate_runtime::sync::Event;
use bedplate_storage::ZeroMode;
use bedplate_types::{ByteLen, Error, ErrorKind, GuestOffset, Result};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

#[derive(Default)]
pub struct Ram {
    pub data: Mutex<Vec<u8>>,
    pub log: Mutex<Vec<String>>,
    pub fail: Mutex<Option<ErrorKind>>,
    pub runs: Mutex<Vec<Run>>,
    /// Reads at this offset wait until there was a write.
    pub hold_reads_at: Option<u64>,
    /// Reads wait while this is set.
    pub hold: AtomicBool,
    pub held: AtomicUsize,
    pub event: Event,
    pub written: AtomicBool,
}

impl Ram {
    pub fn new(size: usize) -> Self {
        Self { data: Mutex::new(vec![0; size]), ..Self::default() }
    }

    fn note(&self, what: String) -> Result<()> {
        self.log.lock().expect("log").push(what);
        match *self.fail.lock().expect("fail") {
            Some(kind) => Err(Error::new(kind, "a fault that the test asked for")),
            None => Ok(()),
        }
    }

    pub fn release(&self) {
        self.hold.store(false, SeqCst);
        self.event.notify_all();
    }

    pub fn log(&self) -> Vec<String> {
        self.log.lock().expect("log").clone()
    }
}

impl Device for Ram {
    fn size(&self) -> u64 {
        self.data.lock().expect("data").len() as u64
    }

    fn read_only(&self) -> bool {
        false
    }

    fn align(&self) -> u32 {
        1
    }

    async fn read(&self, at: GuestOffset, buf: IoVec) -> Result<()> {
        self.note(format!("read {} {}", at.get(), buf.len()))?;
        self.held.fetch_add(1, SeqCst);
        let waits = self.hold_reads_at == Some(at.get());
        let ready = || {
            let free = !self.hold.load(SeqCst) && (!waits || self.written.load(SeqCst));
            free.then_some(())
        };
        self.event.wait_until(ready).await;
        self.held.fetch_sub(1, SeqCst);
        let data = self.data.lock().expect("data");
        let at = at.get() as usize;
        buf.copy_from(0, &data[at..at + buf.len()]);
        Ok(())
    }

    async fn write(&self, at: GuestOffset, buf: IoVec, fua: bool) -> Result<()> {
        self.note(format!("write {} {} {fua}", at.get(), buf.len()))?;
        let mut data = self.data.lock().expect("data");
        let at = at.get() as usize;
        buf.copy_to(0, &mut data[at..at + buf.len()]);
        self.written.store(true, SeqCst);
        self.event.notify_all();
        Ok(())
    }

    async fn write_batch(&self, writes: Vec<(GuestOffset, IoVec)>) -> Vec<Result<()>> {
        self.log.lock().expect("log").push(format!("batch {}", writes.len()));
        let mut out = Vec::new();
        for (at, buf) in writes {
            out.push(self.write(at, buf, false).await);
        }
        out
    }

    async fn flush(&self) -> Result<()> {
        self.note("flush".into())
    }

    async fn discard(&self, at: GuestOffset, len: ByteLen) -> Result<()> {
        self.note(format!("discard {} {}", at.get(), len.get()))
    }

    async fn write_zeroes(&self, at: GuestOffset, len: ByteLen, mode: ZeroMode) -> Result<()> {
        let ZeroMode { unmap, fast_only } = mode;
        self.note(format!("zero {} {} {unmap} {fast_only}", at.get(), len.get()))
    }

    async fn block_status(&self, at: GuestOffset, len: ByteLen, max: usize) -> Result<Vec<Run>> {
        self.note(format!("status {} {} {max}", at.get(), len.get()))?;
        Ok(self.runs.lock().expect("runs").clone())
    }
}
