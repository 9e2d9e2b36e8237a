//! Files and block devices: the yardstick's ring ([`BareRing`]), and positioned reads and writes.

use crate::job::{Job, Op};
use crate::plan::Step;
use crate::port::{Done, Port, Status};
use bedplate_runtime::buf::AlignedBuf;
use bedplate_storage::bare::{BareOp, BareRing};
use bedplate_types::{Error, ErrorKind, Result, ResultExt};
use rustix::fs::{Advice, FallocateFlags, FileType, OFlags, fadvise, fallocate, fstat};
use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Opens a file or device that is there already; gives its size too.
pub(crate) fn open(path: &Path, direct: bool, write: bool) -> Result<(Arc<File>, u64)> {
    let flags = if direct { OFlags::DIRECT.bits() } else { 0 };
    let opened = OpenOptions::new().read(true).write(write).custom_flags(flags as i32).open(path);
    let how = if direct { " for direct I/O" } else { "" };
    let mut file = opened.context(|| format!("cannot open '{}'{how}", path.display()))?;
    let failed = || format!("cannot learn the size of '{}'", path.display());
    let kind = fstat(&file).map_err(std::io::Error::from).context(failed)?;
    match FileType::from_raw_mode(kind.st_mode) {
        FileType::RegularFile | FileType::BlockDevice => {}
        _ => {
            let text = format!("'{}' is neither a file nor a block device", path.display());
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
    }
    let size = file.seek(SeekFrom::End(0)).context(failed)?;
    if !direct {
        // What the page cache holds from before would flatter reads; that the system heeds this is not certain.
        let _ = fadvise(&file, 0, None, Advice::DontNeed);
    }
    Ok((Arc::new(file), size))
}

/// Ports of all threads of a job.
pub(crate) fn rings(job: &Job, file: &Arc<File>) -> Result<Vec<RingPort>> {
    let bytes = usize::try_from(job.sizes.largest()).unwrap_or(usize::MAX);
    let one = |_| {
        let ring = BareRing::new(file, job.depth as usize, bytes)?;
        let wanted = vec![0; job.depth as usize];
        Ok(RingPort { ring, _file: file.clone(), wanted })
    };
    (0..job.threads).map(one).collect()
}

/// As [`rings`], for one request at a time.
pub(crate) fn positioned(job: &Job, file: &Arc<File>) -> Result<Vec<PositionedPort>> {
    if job.depth != 1 {
        let text = format!(
            "psync has one request in flight a thread, not {}; use depth 1 and more threads",
            job.depth
        );
        return Err(Error::new(ErrorKind::InvalidInput, text));
    }
    let bytes = usize::try_from(job.sizes.largest()).unwrap_or(usize::MAX);
    let one = |_| {
        let memory = AlignedBuf::zeroed(bytes)?;
        Ok(PositionedPort { file: file.clone(), memory, pushed: None })
    };
    (0..job.threads).map(one).collect()
}

/// One io_uring.
pub(crate) struct RingPort {
    ring: BareRing,
    _file: Arc<File>,
    /// What each slot's request should give.
    wanted: Vec<u32>,
}

impl Port for RingPort {
    fn start(&mut self) -> Result<()> {
        self.ring.start()
    }

    fn put(&mut self, slot: usize, data: &[u8]) -> Result<()> {
        self.ring.put(slot, data)
    }

    fn get(&mut self, slot: usize, data: &mut [u8]) -> Result<()> {
        self.ring.get(slot, data)
    }

    #[inline]
    fn push(&mut self, slot: usize, step: Step) -> Result<()> {
        let (op, wanted) = match step.op {
            Op::Read => (BareOp::Read, step.len),
            Op::Write => (BareOp::Write, step.len),
            Op::Trim => (BareOp::Punch, 0),
            Op::Flush => (BareOp::Sync, 0),
        };
        if let Some(place) = self.wanted.get_mut(slot) {
            *place = wanted;
        }
        self.ring.push(slot, op, step.at, step.len)
    }

    fn send(&mut self) -> Result<()> {
        self.ring.enter(0, None)
    }

    #[inline]
    fn exchange(
        &mut self,
        limit: Option<Duration>,
        most: usize,
        done: &mut Vec<Done>,
    ) -> Result<()> {
        if self.ring.in_flight() == 0 {
            return Ok(());
        }
        self.ring.enter(1, limit)?;
        let wanted = &self.wanted;
        self.ring.drain(most, |slot, result| {
            let status = Status::of(result, wanted.get(slot).copied().unwrap_or(0));
            done.push(Done { slot, status });
        });
        Ok(())
    }
}

/// Positioned reads and writes.
pub(crate) struct PositionedPort {
    file: Arc<File>,
    memory: AlignedBuf,
    pushed: Option<(usize, Step)>,
}

impl PositionedPort {
    fn room(&mut self, len: usize) -> Result<&mut [u8]> {
        let too_small = || Error::new(ErrorKind::InvalidInput, format!("no room for {len} bytes"));
        self.memory.get_mut(..len).ok_or_else(too_small)
    }

    fn perform(&mut self, step: Step) -> std::io::Result<usize> {
        let len = step.len as usize;
        let memory = self.memory.get_mut(..len).unwrap_or_default();
        match step.op {
            Op::Read => self.file.read_at(memory, step.at),
            Op::Write => self.file.write_at(memory, step.at),
            Op::Trim => {
                let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                fallocate(&*self.file, mode, step.at, u64::from(step.len))?;
                Ok(len)
            }
            Op::Flush => self.file.sync_data().map(|()| len),
        }
    }
}

impl Port for PositionedPort {
    fn put(&mut self, _slot: usize, data: &[u8]) -> Result<()> {
        self.room(data.len())?.copy_from_slice(data);
        Ok(())
    }

    fn get(&mut self, _slot: usize, data: &mut [u8]) -> Result<()> {
        data.copy_from_slice(self.room(data.len())?);
        Ok(())
    }

    fn push(&mut self, slot: usize, step: Step) -> Result<()> {
        self.pushed = Some((slot, step));
        Ok(())
    }

    fn exchange(
        &mut self,
        _limit: Option<Duration>,
        _most: usize,
        done: &mut Vec<Done>,
    ) -> Result<()> {
        let Some((slot, step)) = self.pushed.take() else { return Ok(()) };
        let status = match self.perform(step) {
            Ok(n) if n == step.len as usize => Status::Good,
            Ok(_) => Status::Short,
            Err(e) => e.raw_os_error().map_or(Status::Failed, Status::Errno),
        };
        done.push(Done { slot, status });
        Ok(())
    }
}
