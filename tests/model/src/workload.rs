//! Random work on a disk, recorded with all that a power cut may bring at each moment of it.

use crate::bed::{Bed, Open};
use crate::oracle::{Oracle, Outcome, Time};
use crate::pattern::{tag, tagged};
use crate::plain::{discarded, empties};
use crate::spec::Spec;
use bedplate_qcow2::OrderRule;
use bedplate_runtime::buf::{AlignedBuf, IoVec, SharedBuf};
use bedplate_sim::exec::join_all;
use bedplate_sim::{DiscardMode, Fault, History, Image, Rng, SECTOR, SimOptions, SimStorage};
use bedplate_storage::{IoLimits, ZeroMode};
use bedplate_types::{ByteLen, CacheMode, Error, ErrorKind, GuestOffset};
use std::cell::{Cell, RefCell};

/// What a workload is made of. Weights of operations are shares of their sum.
#[derive(Clone, Copy, Debug)]
pub struct Profile {
    /// The image.
    pub spec: fn(&mut Rng) -> Spec,
    /// Tasks that work at once, at most.
    pub tasks: u64,
    /// Operations of all tasks together.
    pub operations: u64,
    /// Weight of writes, alone or in batches.
    pub write: u64,
    /// Weight of writes that are durable when they complete.
    pub fua: u64,
    /// Weight of writes of compressed clusters.
    pub compressed: u64,
    /// Weight of discards.
    pub discard: u64,
    /// Weight of writes of zeroes.
    pub zero: u64,
    /// Weight of flushes.
    pub flush: u64,
    /// Weight of background work.
    pub maintain: u64,
    /// Operations meet in a part of the disk of this many bytes.
    pub area: u64,
    /// Requests may take this many polls more than one.
    pub max_delay: u32,
    /// Every write is durable when it completes.
    pub writethrough: bool,
    /// The image lies on a device of a fixed length, where unused space holds anything.
    pub device: bool,
    /// A persistent bitmap records every change; not in version 2.
    pub bitmap: bool,
    /// An ordering rule that is broken on purpose.
    pub broken: Option<OrderRule>,
    /// Close the disk at the end.
    pub close: bool,
}

impl Profile {
    /// A bit of everything.
    pub const MIXED: Self = Self {
        spec: Spec::tiny,
        tasks: 4,
        operations: 40,
        write: 50,
        fua: 5,
        compressed: 5,
        discard: 15,
        zero: 10,
        flush: 15,
        maintain: 5,
        area: 1 << 17,
        max_delay: 5,
        writethrough: false,
        device: false,
        bitmap: false,
        broken: None,
        close: true,
    };
}

/// A request that failed, or what else went wrong.
#[derive(Clone, Debug)]
pub struct Trouble {
    /// What was asked.
    pub what: &'static str,
    /// The answer.
    pub error: Error,
    /// The image was poisoned when the request was made.
    pub poisoned_before: bool,
}

/// A run that is over.
pub struct Recorded {
    /// The image it began with.
    pub bed: Bed,
    /// What each sector may hold.
    pub oracle: Oracle,
    /// Every step on the storage.
    pub history: History,
    /// The storage.
    pub storage: SimStorage,
    /// The disk, still open unless it was closed.
    pub open: Open,
    /// Requests that failed, in order.
    pub troubles: Vec<Trouble>,
    /// Requests that succeeded although the image was poisoned before they were made.
    pub pretended: Vec<&'static str>,
    /// The disk was closed without a failure.
    pub closed: bool,
    /// The last mark.
    pub now: Time,
    /// Operations in words.
    pub log: Vec<String>,
}

/// What the tasks of a run share.
pub(crate) struct Shared<'a> {
    pub(crate) open: &'a Open,
    pub(crate) spec: &'a Spec,
    pub(crate) profile: Profile,
    pub(crate) oracle: RefCell<Oracle>,
    pub(crate) now: Cell<Time>,
    pub(crate) numbers: Cell<u64>,
    pub(crate) troubles: RefCell<Vec<Trouble>>,
    pub(crate) pretended: RefCell<Vec<&'static str>>,
    pub(crate) log: RefCell<Vec<String>>,
}

impl Shared<'_> {
    /// Moves time on by one mark.
    fn tick(&self) -> Time {
        let now = self.now.get() + 1;
        self.now.set(now);
        self.open.storage.mark(now);
        now
    }

    fn note(&self, what: &'static str, result: Result<(), Error>, poisoned_before: bool) -> bool {
        match result {
            Ok(()) => {
                if poisoned_before {
                    self.pretended.borrow_mut().push(what);
                }
                true
            }
            Err(error) => {
                let mut troubles = self.troubles.borrow_mut();
                troubles.push(Trouble { what, error, poisoned_before });
                false
            }
        }
    }

    fn log(&self, text: impl FnOnce() -> String) {
        self.log.borrow_mut().push(format!("{}: {}", self.now.get(), text()));
    }
}

/// Runs the work of `seed`, on an image of `seed`; requests to the storage fail by `fault`.
///
/// # Errors
/// When it can't be set up or hangs. Requests that fail are in the result instead.
pub fn record(seed: u64, profile: Profile, fault: Option<Fault>) -> Result<Recorded, String> {
    let mut rng = Rng::new(seed);
    let mut spec = (profile.spec)(&mut rng);
    if let Some(below) = &mut spec.below {
        below.size = below.size.next_multiple_of(SECTOR);
    }
    let mut bed = Bed::new(spec, &mut rng);
    if profile.bitmap && bed.spec.version >= 3 {
        bed = bed.with_bitmap(512 << rng.below(4)).map_err(|e| format!("a bitmap: {e:#}"))?;
    }
    let options = SimOptions {
        seed: rng.next_u64(),
        max_delay: rng.below(u64::from(profile.max_delay) + 1) as u32,
        keep_history: true,
        fast_zero: rng.chance(80),
        limits: random_limits(&mut rng),
        discard: [DiscardMode::Zeroes, DiscardMode::Garbage][rng.below(2) as usize],
        ..SimOptions::default()
    };
    let mut image = bed.image.clone();
    let device = profile.device && bed.spec.data_file.is_none();
    let options = if device { on_device(&bed.spec, &mut image, options) } else { options };
    let storage = SimStorage::from_image(image, options);
    let cache = if profile.writethrough { CacheMode::Writethrough } else { CacheMode::None };
    let open = bed.open(storage.clone(), cache).map_err(|e| format!("can't open: {e:#}"))?;
    if let Some(rule) = profile.broken {
        open.qcow2.order_faults().break_rule(rule);
    }
    if let Some(fault) = fault {
        storage.inject(fault);
    }
    let shared = Shared {
        open: &open,
        spec: &bed.spec,
        profile,
        oracle: RefCell::new(Oracle::new(&bed.content)?),
        now: Cell::new(0),
        numbers: Cell::new(0),
        troubles: RefCell::default(),
        pretended: RefCell::default(),
        log: RefCell::default(),
    };
    let tasks = 1 + rng.below(profile.tasks);
    let rngs: Vec<Rng> = (0..tasks).map(|_| rng.fork()).collect();
    let shared_ref = &shared;
    let running = rngs.into_iter().map(|mut rng| async move {
        for _ in 0..profile.operations / tasks {
            step(shared_ref, &mut rng).await;
        }
    });
    join_all(rng.next_u64(), running)
        .map_err(|e| format!("{e}\n  {}", shared_ref.log.borrow().join("\n  ")))?;
    let closed = profile.close && close(&shared, rng.next_u64())?;
    let Shared { oracle, now, troubles, pretended, log, .. } = shared;
    let (oracle, now, log) = (oracle.into_inner(), now.get(), log.into_inner());
    let (troubles, pretended) = (troubles.into_inner(), pretended.into_inner());
    let history = storage.history();
    Ok(Recorded { bed, oracle, history, storage, open, troubles, pretended, closed, now, log })
}

/// Storages with small and large blocks.
pub(crate) fn random_limits(rng: &mut Rng) -> IoLimits {
    let align = [1, 512, 512, 4096][rng.below(4) as usize];
    IoLimits { align, ..SimOptions::default().limits }
}

/// Makes the storage a device that is longer than the image in it, with garbage behind the image.
pub(crate) fn on_device(spec: &Spec, image: &mut Image, options: SimOptions) -> SimOptions {
    let (end, cluster) = (image.len(), spec.cluster());
    image.write(end, &vec![0xa5; 1 << 20]);
    image.set_len(end + 3 * spec.size + cluster * (24 + (1 << 24) / cluster));
    SimOptions { device: true, ..options }
}

fn close(shared: &Shared<'_>, seed: u64) -> Result<bool, String> {
    let poisoned = shared.open.qcow2.is_poisoned();
    let start = shared.tick();
    let mut result =
        join_all(seed, [shared.open.disk.close()]).map_err(|e| format!("closing: {e}"))?;
    let end = shared.tick();
    let good = shared.note("close", result.pop().unwrap_or(Ok(())), poisoned);
    if good {
        shared.oracle.borrow_mut().flushed(start, end);
    }
    Ok(good)
}

/// A range of whole sectors in the busy part of the disk.
fn range(shared: &Shared<'_>, rng: &mut Rng, most: u64) -> (u64, u64) {
    let sectors = shared.spec.size.min(shared.profile.area) / SECTOR;
    let cluster = shared.spec.cluster() / SECTOR;
    let at = rng.below(sectors);
    let at = if rng.chance(40) { at - at % cluster } else { at };
    let len = match rng.below(3) {
        0 => 1 + rng.below(8),
        1 => cluster * (1 + rng.below(4)),
        _ => 1 + rng.below(most / SECTOR),
    };
    (at * SECTOR, len.min(sectors - at) * SECTOR)
}

pub(crate) async fn step(shared: &Shared<'_>, rng: &mut Rng) {
    let p = shared.profile;
    let mut pick =
        rng.below(p.write + p.fua + p.compressed + p.discard + p.zero + p.flush + p.maintain);
    let mut is = |weight: u64| match pick.checked_sub(weight) {
        Some(rest) => {
            pick = rest;
            false
        }
        None => {
            pick = u64::MAX;
            true
        }
    };
    if is(p.write) {
        if rng.chance(25) { batch(shared, rng).await } else { write(shared, rng, false).await }
    } else if is(p.fua) {
        write(shared, rng, true).await;
    } else if is(p.compressed) {
        compressed(shared, rng).await;
    } else if is(p.discard) {
        discard(shared, rng).await;
    } else if is(p.zero) {
        zero(shared, rng).await;
    } else if is(p.flush) {
        flush(shared).await;
    } else {
        let result = shared.open.disk.maintain().await;
        // It says nothing when there is nothing to say.
        shared.note("maintain", result, false);
    }
}

fn data(number: u64, at: u64, len: u64) -> Result<IoVec, Error> {
    let bytes = tagged(number, at / SECTOR, len / SECTOR);
    Ok(SharedBuf::new(AlignedBuf::from_slice(&bytes)?).iovec())
}

fn number(shared: &Shared<'_>) -> u64 {
    let n = shared.numbers.get() + 1;
    shared.numbers.set(n);
    n
}

fn outcome(shared: &Shared<'_>, good: bool, durable: bool) -> Outcome {
    match (good, durable || shared.profile.writethrough) {
        (false, _) => Outcome::Unknown,
        (true, true) => Outcome::Durable,
        (true, false) => Outcome::Done,
    }
}

async fn write(shared: &Shared<'_>, rng: &mut Rng, fua: bool) {
    let (at, len) = range(shared, rng, 16384);
    let number = number(shared);
    let Ok(buf) = data(number, at, len) else { return };
    let poisoned = shared.open.qcow2.is_poisoned();
    let start = shared.tick();
    shared.log(|| format!("write {number} {at:#x}+{len:#x} fua {fua}"));
    let pending = shared.oracle.borrow_mut().begin(start, at, len, |s| tag(number, s));
    let direct = if fua { None } else { shared.open.write_direct(at, &buf).await };
    let result = match direct {
        Some(result) => result,
        None => shared.open.disk.write(GuestOffset::new(at), buf, fua).await,
    };
    let end = shared.tick();
    shared.log(|| format!("end of write {number}: {result:?}"));
    let good = shared.note("write", result, poisoned);
    shared.oracle.borrow_mut().end(pending, end, outcome(shared, good, fua));
}

async fn compressed(shared: &Shared<'_>, rng: &mut Rng) {
    if shared.spec.unpacked {
        return;
    }
    let (at, len) = range(shared, rng, 16384);
    let cluster = shared.spec.cluster();
    let at = at - at % cluster;
    let len = len.next_multiple_of(cluster).min(shared.spec.size - at);
    let number = number(shared);
    let Ok(buf) = data(number, at, len) else { return };
    let poisoned = shared.open.qcow2.is_poisoned();
    let start = shared.tick();
    shared.log(|| format!("write compressed {number} {at:#x}+{len:#x}"));
    let pending = shared.oracle.borrow_mut().begin(start, at, len, |s| tag(number, s));
    let result = shared.open.disk.write_compressed(GuestOffset::new(at), buf).await;
    let end = shared.tick();
    shared.log(|| format!("end of write compressed {number}: {result:?}"));
    // Only clusters that hold nothing can be written so, and none of a data file or an encrypted image.
    let none = shared.spec.data_file.is_some() || shared.spec.luks;
    let refused = matches!(
        &result,
        Err(e) if e.kind() == ErrorKind::InvalidInput || none && e.kind() == ErrorKind::Unsupported
    );
    let good = refused || shared.note("write compressed", result, poisoned);
    shared.oracle.borrow_mut().end(pending, end, outcome(shared, good && !refused, false));
}

async fn batch(shared: &Shared<'_>, rng: &mut Rng) {
    let mut writes = Vec::new();
    let mut pending = Vec::new();
    let poisoned = shared.open.qcow2.is_poisoned();
    let start = shared.tick();
    let mut next = 0;
    for _ in 0..2 + rng.below(5) {
        let (at, len) = range(shared, rng, 4096);
        let sectors = shared.spec.size.min(shared.profile.area);
        let at = if rng.chance(50) && next != 0 && next < sectors { next } else { at };
        let len = len.min(sectors - sectors % SECTOR - at);
        next = at + len;
        let number = number(shared);
        let Ok(buf) = data(number, at, len) else { continue };
        shared.log(|| format!("batch write {number} {at:#x}+{len:#x}"));
        writes.push((GuestOffset::new(at), buf));
        pending.push(shared.oracle.borrow_mut().begin(start, at, len, |s| tag(number, s)));
    }
    let results = shared.open.disk.write_batch(writes).await;
    let end = shared.tick();
    shared.log(|| format!("end of batch of {start}: {results:?}"));
    for (pending, result) in pending.into_iter().zip(results) {
        let good = shared.note("write", result, poisoned);
        shared.oracle.borrow_mut().end(pending, end, outcome(shared, good, false));
    }
}

async fn discard(shared: &Shared<'_>, rng: &mut Rng) {
    let (at, len) = range(shared, rng, 65536);
    let (from, to) = discarded(shared.spec, at, len);
    let poisoned = shared.open.qcow2.is_poisoned();
    let start = shared.tick();
    shared.log(|| format!("discard {at:#x}+{len:#x}"));
    let pending = shared.oracle.borrow_mut().begin(start, from, to - from, |_| 0);
    let result = shared.open.disk.discard(GuestOffset::new(at), ByteLen::new(len)).await;
    let end = shared.tick();
    shared.log(|| format!("end of discard of {start}: {result:?}"));
    let good = shared.note("discard", result, poisoned);
    let sure = good && empties(shared.spec);
    shared.oracle.borrow_mut().end(pending, end, outcome(shared, sure, false));
}

async fn zero(shared: &Shared<'_>, rng: &mut Rng) {
    let (at, len) = range(shared, rng, 65536);
    let mode = ZeroMode { unmap: rng.chance(50), fast_only: rng.chance(20) };
    let poisoned = shared.open.qcow2.is_poisoned();
    let start = shared.tick();
    shared.log(|| format!("zero {at:#x}+{len:#x} {mode:?}"));
    let pending = shared.oracle.borrow_mut().begin(start, at, len, |_| 0);
    let result = shared.open.disk.write_zeroes(GuestOffset::new(at), ByteLen::new(len), mode).await;
    let end = shared.tick();
    shared.log(|| format!("end of zero of {start}: {result:?}"));
    let refused = matches!(&result, Err(e) if e.kind() == ErrorKind::Unsupported && mode.fast_only);
    let good = refused || shared.note("zero", result, poisoned);
    shared.oracle.borrow_mut().end(pending, end, outcome(shared, good && !refused, false));
}

async fn flush(shared: &Shared<'_>) {
    let poisoned = shared.open.qcow2.is_poisoned();
    let start = shared.tick();
    shared.log(|| "flush".to_owned());
    let result = shared.open.disk.flush().await;
    let end = shared.tick();
    shared.log(|| format!("end of flush of {start}: {result:?}"));
    if shared.note("flush", result, poisoned) {
        shared.oracle.borrow_mut().flushed(start, end);
    }
}
