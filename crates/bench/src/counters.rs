//! Counters of the system before and after a run: devices underneath, CPU time of processes.
//!
//! Callers: [`crate::run()`].

use bedplate_types::{Error, ErrorKind, Result, ResultExt};
use rustix::fs::{FileType, major, minor, stat};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The kernel counts sectors of this size, whatever the device's are.
const SECTOR: u64 = 512;

/// What a device did during a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DeviceUse {
    /// The kernel's name.
    pub name: String,
    /// Reads completed.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Writes completed.
    pub writes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Discards completed.
    pub discards: u64,
    /// Bytes discarded.
    pub discarded_bytes: u64,
    /// Flushes completed.
    pub flushes: u64,
    /// Time with something under way, in seconds.
    pub busy_s: f64,
    /// Bytes read for each byte that the load read.
    pub read_amplification: Option<f64>,
    /// Bytes written for each byte that the load wrote.
    pub write_amplification: Option<f64>,
}

/// A block device whose counters are read.
#[derive(Clone, Debug)]
pub(crate) struct Device {
    name: String,
    stat: PathBuf,
    before: [u64; 17],
}

impl Device {
    /// The block device that `path` is, or that its file system lies on; `None` where that is no block device.
    pub fn of(path: &Path) -> Result<Option<Device>> {
        let found = stat(path).map_err(std::io::Error::from);
        let found = found.context(|| format!("cannot look at '{}'", path.display()))?;
        let number = match FileType::from_raw_mode(found.st_mode) {
            FileType::BlockDevice => found.st_rdev,
            _ => found.st_dev,
        };
        let link = format!("/sys/dev/block/{}:{}", major(number), minor(number));
        let Ok(folder) = std::fs::canonicalize(&link) else { return Ok(None) };
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut device = Device { name, stat: folder.join("stat"), before: [0; 17] };
        device.before = device.read()?;
        Ok(Some(device))
    }

    fn read(&self) -> Result<[u64; 17]> {
        let text = std::fs::read_to_string(&self.stat)
            .context(|| format!("cannot read '{}'", self.stat.display()))?;
        let mut all = [0; 17];
        for (to, word) in all.iter_mut().zip(text.split_whitespace()) {
            *to = word.parse().unwrap_or(0);
        }
        Ok(all)
    }

    /// What it did since [`Self::of`], beside `read` and `written` bytes of the load.
    pub fn since(&self, read: u64, written: u64) -> Result<DeviceUse> {
        let now = self.read()?;
        let since = |index: usize| {
            let pair = now.get(index).zip(self.before.get(index));
            pair.map_or(0, |(now, before)| now.wrapping_sub(*before))
        };
        let (read_bytes, written_bytes) = (since(2) * SECTOR, since(6) * SECTOR);
        let times = |device: u64, load: u64| (load > 0).then(|| device as f64 / load as f64);
        Ok(DeviceUse {
            name: self.name.clone(),
            reads: since(0),
            read_bytes,
            writes: since(4),
            written_bytes,
            discards: since(11),
            discarded_bytes: since(13) * SECTOR,
            flushes: since(15),
            busy_s: since(9) as f64 / 1000.0,
            read_amplification: times(read_bytes, read),
            write_amplification: times(written_bytes, written),
        })
    }
}

/// CPU time of this process so far.
pub(crate) fn own_cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// CPU time of another process's threads so far.
pub(crate) fn cpu_of(pid: u32) -> Result<Duration> {
    let gone = || {
        let text = format!("there is no process {pid} whose CPU time could be read");
        Error::new(ErrorKind::NotFound, text)
    };
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).map_err(|_| gone())?;
    let mut sum = 0;
    for thread in threads.flatten() {
        // Nanoseconds on a core come first. A thread that has just ended has no file any more.
        let text = std::fs::read_to_string(thread.path().join("schedstat")).unwrap_or_default();
        sum += text.split_whitespace().next().and_then(|ns| ns.parse::<u64>().ok()).unwrap_or(0);
    }
    if sum > 0 {
        return Ok(Duration::from_nanos(sum));
    }
    // A kernel without these counts in ticks only.
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).map_err(|_| gone())?;
    // The second field is the name in parentheses and may hold blanks.
    let rest = text.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks: u64 = rest.split_whitespace().skip(11).take(2).flat_map(str::parse::<u64>).sum();
    let second = rustix::param::clock_ticks_per_second().max(1);
    Ok(Duration::from_secs_f64(ticks as f64 / second as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_of_a_process_grows_with_its_work() {
        let (own, other) = (own_cpu(), cpu_of(std::process::id()).expect("this process"));
        let mut sum = 0_u64;
        while own_cpu() < own + Duration::from_millis(30) {
            sum = std::hint::black_box(sum.wrapping_mul(3) + 1);
        }
        assert!(cpu_of(std::process::id()).expect("this process") > other);
        // No process has the largest number.
        assert!(cpu_of(u32::MAX).is_err());
    }

    #[test]
    fn a_file_without_a_device_has_no_counters() {
        assert!(Device::of(Path::new("/proc/self/stat")).expect("looked at").is_none());
        assert!(Device::of(Path::new("/nowhere")).is_err());
    }
}
