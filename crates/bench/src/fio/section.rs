//! One section of a job file, made into a job.

use super::bad;
use crate::job::{Arrival, Extent, FlushEvery, Job, Mix, Pattern, Share, SizeShare, Sizes, Verify};
use crate::target::{Engine, Target};
use bedplate_types::{Result, parse_size};

/// What the options so far say.
pub(super) struct Section {
    job: Job,
    engine: String,
    filename: Option<String>,
    uri: Option<String>,
    direct: bool,
    random: bool,
    mixed: bool,
    read_percent: u8,
    size: Option<u64>,
    runtime: Option<f64>,
    time_based: bool,
    random_map: bool,
    rate: Option<f64>,
    poisson: bool,
    think: f64,
    depth: u32,
    distribution: Option<Pattern>,
    verify: bool,
    do_verify: bool,
    new_group: bool,
}

/// A switch: nothing or 1 is on.
fn switch(value: Option<&str>) -> Result<bool> {
    match value {
        None | Some("1" | "true") => Ok(true),
        Some("0" | "false") => Ok(false),
        Some(other) => Err(bad(format!("'{other}' is neither 0 nor 1"))),
    }
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T> {
    text.parse().map_err(|_| bad(format!("'{text}' is not such a number")))
}

/// Sizes as fio writes them: powers of 1024, with or without `b` and `ib` behind.
fn size(text: &str) -> Result<u64> {
    let short = text.to_ascii_lowercase();
    let short = short.trim_end_matches("ib").trim_end_matches('b');
    Ok(parse_size(short)?.get())
}

/// A time; `unit` is what a bare number counts, in seconds.
fn time(text: &str, unit: f64) -> Result<f64> {
    let at = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (count, suffix) = text.split_at(at);
    let unit = match suffix {
        "" => unit,
        "us" | "usec" => 1e-6,
        "ms" | "msec" => 1e-3,
        "s" | "sec" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        "d" => 86400.0,
        _ => return Err(bad(format!("'{text}' is not a time"))),
    };
    Ok(number::<f64>(count)? * unit)
}

impl Section {
    pub fn new(name: &str) -> Self {
        // fio's defaults.
        let job =
            Job { name: name.to_owned(), share: Share::Whole, batch: 1, reap: 1, ..Job::default() };
        Self {
            job,
            engine: "psync".to_owned(),
            filename: None,
            uri: None,
            direct: false,
            random: false,
            mixed: false,
            read_percent: 50,
            size: None,
            runtime: None,
            time_based: false,
            random_map: true,
            rate: None,
            poisson: false,
            think: 0.0,
            depth: 1,
            distribution: None,
            verify: false,
            do_verify: true,
            new_group: false,
        }
    }

    /// Takes one option; gives a sentence when it is lacking.
    pub fn set(&mut self, key: &str, value: Option<&str>) -> Result<Option<String>> {
        let lack = || {
            let value = value.map_or(String::new(), |value| format!("={value}"));
            Ok(Some(format!("'{key}{value}' is lacking")))
        };
        let text = value.unwrap_or_default();
        if text.contains("${") {
            return Ok(Some(format!("variables as in '{key}={text}' are lacking")));
        }
        match key {
            "name" => self.job.name = text.to_owned(),
            // They change reports or processes, not the load.
            "description" | "group_reporting" | "thread" | "randrepeat" | "allrandrepeat"
            | "verify_fatal" => {}
            // What is written is random, and the same for each slot.
            "scramble_buffers" | "refill_buffers" | "zero_buffers" if !switch(value)? => {}
            "stonewall" | "wait_for_previous" | "new_group" => self.new_group = true,
            "filename" if text.contains(':') => return lack(),
            "filename" => self.filename = Some(text.to_owned()),
            "uri" => self.uri = Some(text.to_owned()),
            "ioengine" if matches!(text, "io_uring" | "psync" | "nbd") => {
                self.engine = text.to_owned();
            }
            "ioengine" => {
                return Ok(Some(format!(
                    "'ioengine={text}' is lacking (there are io_uring, psync and nbd)"
                )));
            }
            "direct" => self.direct = switch(value)?,
            "buffered" => self.direct = !switch(value)?,
            "iodepth" => self.depth = number(text)?,
            "iodepth_batch" | "iodepth_batch_submit" => self.job.batch = number(text)?,
            // One is always waited for.
            "iodepth_batch_complete" | "iodepth_batch_complete_min" if text == "1" => {}
            "iodepth_batch_complete_max" => self.job.reap = number(text)?,
            "numjobs" => self.job.threads = number(text)?,
            "size" if text.ends_with('%') => return lack(),
            "size" => self.size = Some(size(text)?),
            "offset" if text.ends_with('%') => return lack(),
            "offset" => self.job.offset = size(text)?,
            "runtime" | "timeout" => self.runtime = Some(time(text, 1.0)?),
            "time_based" => self.time_based = switch(value)?,
            "ramp_time" => self.job.warm_up = time(text, 1.0)?,
            "randseed" => self.job.seed = number(text)?,
            "norandommap" => self.random_map = !switch(value)?,
            "rate_process" if text == "poisson" => self.poisson = true,
            "rate_process" if text == "linear" => {}
            "rate_iops" if text.contains(',') => return lack(),
            "rate_iops" => self.rate = Some(size(text)? as f64),
            "thinktime" => self.think = time(text, 1e-6)?,
            "thinktime_blocks" if text == "1" => {}
            "fsync" | "fdatasync" => {
                self.job.flush.requests = Some(number::<u64>(text)?).filter(|n| *n > 0);
            }
            "end_fsync" => self.job.final_flush = switch(value)?,
            "verify" => self.verify = text != "0" && text != "none",
            "do_verify" => self.do_verify = switch(value)?,
            "rw" | "readwrite" => return self.set_rw(text),
            "rwmixread" => self.read_percent = number(text)?,
            "rwmixwrite" => self.read_percent = 100_u8.saturating_sub(number(text)?),
            "bs" | "blocksize" | "bsrange" | "blocksize_range" | "bssplit" => {
                return self.set_sizes(key, text);
            }
            "random_distribution" => return self.set_distribution(text),
            _ => return lack(),
        }
        Ok(None)
    }

    fn set_rw(&mut self, text: &str) -> Result<Option<String>> {
        self.random = text.starts_with("rand");
        let trim = Mix { read: 0, write: 0, trim: 100, flush: 0 };
        self.mixed = false;
        self.job.mix = match text.strip_prefix("rand").unwrap_or(text) {
            "read" => Mix::READ,
            "write" => Mix::WRITE,
            "trim" => trim,
            "rw" | "readwrite" => {
                self.mixed = true;
                Mix::READ
            }
            _ => return Ok(Some(format!("'rw={text}' is lacking"))),
        };
        Ok(None)
    }

    fn set_sizes(&mut self, key: &str, text: &str) -> Result<Option<String>> {
        let mut alike = text.split(',');
        let first = alike.next().unwrap_or_default();
        if alike.any(|other| other != first) {
            return Ok(Some(format!("'{key}={text}' is lacking (sizes of one kind each)")));
        }
        self.job.sizes = match key {
            "bssplit" => split(first)?,
            "bs" | "blocksize" => Sizes::Fixed { bytes: size(first)? },
            _ => {
                let (min, max) = first
                    .split_once('-')
                    .ok_or_else(|| bad(format!("'{first}' is not a range as 4k-64k")))?;
                Sizes::Range { min: size(min)?, max: size(max)? }
            }
        };
        Ok(None)
    }

    fn set_distribution(&mut self, text: &str) -> Result<Option<String>> {
        let lack = Ok(Some(format!("'random_distribution={text}' is lacking")));
        let (kind, rest) = text.split_once(':').unwrap_or((text, ""));
        let pair = |zone: &str| -> Option<(u8, u8)> {
            let (load, space) = zone.split_once('/')?;
            Some((load.parse().ok()?, space.parse().ok()?))
        };
        match kind {
            "random" => self.distribution = None,
            "zipf" => {
                let theta = if rest.is_empty() { 1.2 } else { number(rest)? };
                self.distribution = Some(Pattern::Zipf { theta });
            }
            "zoned" => {
                let zones: Option<Vec<_>> = rest.split(':').map(pair).collect();
                // Two zones, the first of which is the hot one.
                let Some(&[(load, space), (cold, others)]) = zones.as_deref() else { return lack };
                if u32::from(load) + u32::from(cold) != 100
                    || u32::from(space) + u32::from(others) != 100
                {
                    return lack;
                }
                self.distribution = Some(Pattern::HotCold { space, load });
            }
            _ => return lack,
        }
        Ok(None)
    }

    /// The target and the job, and whether it waits for those before it.
    pub fn finish(
        mut self,
        target: Option<&Target>,
        lacking: &mut Vec<String>,
    ) -> Result<((Target, Job), bool)> {
        let name = self.job.name.clone();
        let mut lack = |text: &str| lacking.push(format!("[{name}]: {text}"));
        if self.mixed {
            let write = 100_u8.saturating_sub(self.read_percent);
            self.job.mix = Mix { read: 100 - write, write, trim: 0, flush: 0 };
        }
        self.job.pattern = match (self.random, self.distribution) {
            (false, _) => Pattern::Sequential,
            (true, None) => Pattern::Random,
            (true, Some(pattern)) => pattern,
        };
        // fio's psync ignores the depth.
        self.job.depth = if self.engine == "psync" && target.is_none() { 1 } else { self.depth };
        self.job.region = self.size;
        self.job.extent = match (self.time_based, self.runtime) {
            (true, Some(seconds)) => Extent::Time { seconds: seconds + self.job.warm_up },
            (_, limit) => {
                let fixed = matches!(self.job.sizes, Sizes::Fixed { .. });
                let map = !self.random || (self.random_map && self.distribution.is_none());
                if !fixed || !map {
                    lack("sizes or places that are not each used once need time_based and runtime");
                    self.job.sizes = Sizes::Fixed { bytes: self.job.sizes.unit() };
                    self.job.pattern = Pattern::Random;
                }
                Extent::Pass { limit }
            }
        };
        if let Some(rate) = self.rate {
            let rate = rate * f64::from(self.job.threads);
            self.job.arrival = Arrival::Open { rate, poisson: self.poisson };
        } else if self.think > 0.0 {
            if self.job.depth > 1 {
                lack("thinktime with more than one request in flight stalls all of them in fio");
            }
            self.job.arrival = Arrival::Closed { think: self.think };
        }
        if !self.job.mix.changes() {
            (self.job.flush, self.job.final_flush) = (FlushEvery::default(), false);
            if self.verify {
                lack("verifying what an earlier job wrote");
            }
        } else if self.verify && self.do_verify {
            self.job.verify = Verify { reads: true, afterwards: true };
        }
        let target = match target {
            Some(target) => target.clone(),
            None => self.target()?,
        };
        Ok(((target, self.job), self.new_group))
    }

    fn target(&self) -> Result<Target> {
        let name = &self.job.name;
        if self.engine == "nbd" {
            let uri = self.uri.as_deref();
            return Target::parse(uri.ok_or_else(|| bad(format!("[{name}] has no uri")))?);
        }
        let path = self.filename.as_deref();
        let path = path.ok_or_else(|| bad(format!("[{name}] has no filename")))?;
        let engine = if self.engine == "psync" { Engine::Psync } else { Engine::IoUring };
        Ok(Target::File { path: path.into(), engine, direct: self.direct })
    }
}

/// `4k/70:64k/30`; sizes without a share get equal parts of what is left.
fn split(text: &str) -> Result<Sizes> {
    let mut parts = Vec::new();
    for word in text.split(':') {
        let (bytes, share) = word.split_once('/').unwrap_or((word, ""));
        let share = if share.is_empty() { None } else { Some(number::<u8>(share)?) };
        parts.push((size(bytes)?, share));
    }
    let given: u32 = parts.iter().filter_map(|part| part.1).map(u32::from).sum();
    let open = parts.iter().filter(|part| part.1.is_none()).count() as u32;
    let mut left = 100_u32.saturating_sub(given);
    let mut open = open;
    let mut all = Vec::new();
    for (bytes, share) in parts {
        let percent = share.unwrap_or_else(|| {
            // What does not divide goes to the first ones.
            let part = left.div_ceil(open.max(1));
            left -= part;
            open -= 1;
            part as u8
        });
        all.push(SizeShare { bytes, percent });
    }
    Ok(Sizes::Split { parts: all })
}
