//! Where something was measured: the machine, the kernel, and what lies under the targets.
//!
//! Callers: whoever makes a report.

use rustix::fs::{FileType, major, minor, stat};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::Path;

/// The machine and its settings. What can't be learnt is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Environment {
    /// The version of Bedplate.
    pub bedplate: String,
    /// Seconds since 1970 at which this was written.
    pub unix_time: u64,
    /// The kernel's version.
    pub kernel: String,
    /// The processor's name.
    pub processor: String,
    /// Cores that this process may use.
    pub cores: u32,
    /// Bytes of memory.
    pub memory: u64,
    /// What sets the processor's frequency.
    pub governor: String,
    /// The kernel's clock.
    pub clock: String,
    /// The control group, when there is one.
    pub cgroup: String,
    /// What the targets lie on.
    pub places: Vec<Place>,
}

/// What a file or device lies on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The path asked about.
    pub path: String,
    /// The kernel's name of the block device.
    pub device: String,
    /// The I/O scheduler.
    pub scheduler: String,
    /// How far requests are merged (`nomerges`: 0 all, 1 simple ones, 2 none).
    pub no_merges: String,
    /// Bytes of a logical block.
    pub logical_block: String,
    /// The cache mode that the kernel believes in.
    pub write_cache: String,
    /// The file system, where the path is a file.
    pub file_system: String,
    /// Its mount options.
    pub mount_options: String,
}

fn text(path: impl AsRef<Path>) -> String {
    fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default()
}

impl Environment {
    /// This machine now, with what `paths` lie on.
    pub fn here<'a>(paths: impl IntoIterator<Item = &'a Path>) -> Self {
        let after = |file: &str, key: &str| {
            let all = text(file);
            let line = all.lines().find(|line| line.starts_with(key));
            let value = line.and_then(|line| line.split_once(':'));
            value.map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
        };
        let memory = after("/proc/meminfo", "MemTotal");
        let kib: u64 = memory.split(' ').next().and_then(|kib| kib.parse().ok()).unwrap_or(0);
        let mut places: Vec<Place> = paths.into_iter().map(Place::of).collect();
        places.dedup();
        Self {
            bedplate: env!("CARGO_PKG_VERSION").to_owned(),
            unix_time: std::time::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_secs()),
            kernel: text("/proc/sys/kernel/osrelease"),
            processor: after("/proc/cpuinfo", "model name"),
            cores: std::thread::available_parallelism().map_or(0, |n| n.get() as u32),
            memory: kib << 10,
            governor: text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
            clock: text("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
            cgroup: text("/proc/self/cgroup"),
            places,
        }
    }
}

impl Place {
    /// What `path` lies on.
    pub fn of(path: &Path) -> Self {
        let mut place = Self { path: path.display().to_string(), ..Self::default() };
        let Ok(found) = stat(path) else { return place };
        let is_device = FileType::from_raw_mode(found.st_mode) == FileType::BlockDevice;
        let number = if is_device { found.st_rdev } else { found.st_dev };
        let link = format!("/sys/dev/block/{}:{}", major(number), minor(number));
        if let Ok(folder) = fs::canonicalize(link) {
            place.device = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
            // A partition has its queue one folder up.
            let own = folder.join("queue");
            let queue = if own.is_dir() { own } else { folder.join("../queue") };
            place.scheduler = text(queue.join("scheduler"));
            place.no_merges = text(queue.join("nomerges"));
            place.logical_block = text(queue.join("logical_block_size"));
            place.write_cache = text(queue.join("write_cache"));
        }
        if !is_device {
            place.note_mount(&fs::canonicalize(path).unwrap_or_default());
        }
        place
    }

    /// Notes the file system with the longest mount point that leads to `path`.
    fn note_mount(&mut self, path: &Path) {
        let mounts = text("/proc/self/mounts");
        let best = mounts
            .lines()
            .filter_map(|line| {
                let mut words = line.split(' ').skip(1);
                Some((words.next()?, words.next()?, words.next()?))
            })
            .filter(|(place, _, _)| path.starts_with(place))
            .max_by_key(|(place, _, _)| place.len());
        if let Some((_, kind, options)) = best {
            (self.file_system, self.mount_options) = (kind.to_owned(), options.to_owned());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_is_described() {
        let here = Environment::here([Path::new("/proc/self/stat"), Path::new("/nowhere")]);
        assert!(!here.kernel.is_empty() && here.cores > 0 && here.memory > 1 << 20);
        assert_eq!(here.places[0].file_system, "proc");
        let nowhere = Place { path: "/nowhere".into(), ..Place::default() };
        assert_eq!(here.places[1], nowhere);
    }
}
