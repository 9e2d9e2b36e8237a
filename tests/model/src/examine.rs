//! Goes through the crash states of a recorded run and says what is wrong with one, if anything is.

use crate::bed::{Open, check_image, is_dirty, read_all};
use crate::oracle::{Allowed, Time};
use crate::pattern::BYTES;
use crate::qemu;
use crate::workload::Recorded;
use bedplate_runtime::buf::{AlignedBuf, SharedBuf};
use bedplate_sim::exec::block_on;
use bedplate_sim::{CrashState, Event, Image, Rng, SECTOR, SimOptions, SimStorage};
use bedplate_types::{CacheMode, GuestOffset};
use std::fmt;

/// How much of a run is looked at.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// Moments at which the power fails.
    pub points: u64,
    /// States of each moment.
    pub states: usize,
    /// One state in this many is used further and looked at again.
    pub use_one_in: u64,
    /// One state in this many is also shown to `qemu-img check`; 0 for none.
    pub qemu_one_in: u64,
}

impl Budget {
    /// What a test spends on one run: up to 600 states.
    pub const USUAL: Self = Self { points: 60, states: 10, use_one_in: 20, qemu_one_in: 3000 };
}

/// A state after a crash that breaks a promise.
#[derive(Clone, Debug)]
pub struct Violation {
    /// What is wrong.
    pub what: String,
    /// When the power failed: the last mark, and the number of the storage's event.
    pub at: (Time, usize),
    /// What had arrived on the medium.
    pub state: String,
    /// What the run did up to then.
    pub log: Vec<String>,
}

impl Violation {
    fn at_the_end(run: &Recorded, what: String) -> Box<Self> {
        let events = run.history.events().len();
        Box::new(Self { what, at: (run.now, events), state: String::new(), log: run.log.clone() })
    }
}

/// Closed after work in which nothing failed, the bitmap can be trusted.
fn bitmap_is_whole(run: &Recorded) -> Result<(), String> {
    if run.bed.bitmap.is_none() || !run.closed || !run.troubles.is_empty() {
        return Ok(());
    }
    let medium = run.storage.image();
    let storage = SimStorage::from_image(medium.clone(), SimOptions::default());
    let open = run.bed.open(storage, CacheMode::None).map_err(|e| format!("{e:#}"))?;
    let content = read_all(&open.disk).map_err(|e| format!("{e:#}"))?;
    run.bed.check_bitmap(&medium, &content, true).map_err(|e| format!("after closing: {e}"))
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.what)?;
        writeln!(f, "  power cut after event {} (mark {})", self.at.1, self.at.0)?;
        writeln!(f, "  {}", self.state)?;
        for line in &self.log {
            writeln!(f, "  {line}")?;
        }
        Ok(())
    }
}

/// Looks at crash states of the run; returns how many they were.
///
/// # Errors
/// The first state that breaks a promise.
pub fn examine(run: &Recorded, seed: u64, budget: Budget) -> Result<u64, Box<Violation>> {
    bitmap_is_whole(run).map_err(|what| Violation::at_the_end(run, what))?;
    let mut rng = Rng::new(seed);
    let events = run.history.events().len() as u64;
    let every = (events / budget.points.max(1)).max(1);
    let mut replay = run.history.replay();
    let (mut now, mut index, mut seen) = (0, 0usize, 0);
    let mut next = rng.below(every);
    while let Some(event) = replay.step() {
        if let Event::Mark(mark) = event {
            now = *mark;
        }
        index += 1;
        if (index as u64) <= next {
            continue;
        }
        // Somewhere in each step of `every` events, so that all kinds of moments come up.
        next = (index as u64 / every) * every + every + rng.below(every);
        let point = replay.crash_point();
        let allowed = run.oracle.after_crash(now);
        for state in point.states(rng.next_u64(), budget.states) {
            seen += 1;
            let depth = Depth {
                further: rng.below(budget.use_one_in.max(1)) == 0,
                qemu: budget.qemu_one_in > 0 && rng.below(budget.qemu_one_in) == 0,
            };
            verify(run, &state.image, &allowed, depth, &mut rng)
                .map_err(|what| violation(run, what, (now, index), &state))?;
        }
    }
    Ok(seen)
}

fn violation(
    run: &Recorded,
    what: String,
    at: (Time, usize),
    state: &CrashState,
) -> Box<Violation> {
    let told = |line: &&String| {
        line.split(':').next().and_then(|n| n.parse::<Time>().ok()).is_some_and(|n| n <= at.0)
    };
    let mut log: Vec<String> = run.log.iter().filter(told).cloned().collect();
    log.drain(..log.len().saturating_sub(40));
    log.push(format!("on {:?}", run.bed.spec));
    Box::new(Violation { what, at, state: state.to_string(), log })
}

/// Checks what is visible on the storage now, as after a crash of the program but not of the host.
///
/// # Errors
/// What is wrong.
pub fn verify_now(run: &Recorded, seed: u64) -> Result<(), String> {
    let allowed = run.oracle.after_crash(run.now);
    let depth = Depth { further: true, qemu: false };
    verify(run, &run.storage.image(), &allowed, depth, &mut Rng::new(seed))
}

struct Depth {
    further: bool,
    qemu: bool,
}

fn verify(
    run: &Recorded,
    image: &Image,
    allowed: &Allowed,
    depth: Depth,
    rng: &mut Rng,
) -> Result<(), String> {
    let metadata = run.bed.metadata(image);
    let dirty = is_dirty(&metadata);
    if !dirty {
        check_image(&metadata, true)?;
        if depth.qemu && qemu::installed() {
            qemu::check(&run.bed, image, true)?;
        }
    }
    let keep_history = dirty && depth.further;
    let options = SimOptions { keep_history, ..SimOptions::default() };
    let storage = SimStorage::from_image(image.clone(), options);
    let open = open_and_compare(run, &storage, allowed)?;
    if keep_history {
        repair_again(run, &storage, allowed, rng)?;
    }
    if depth.further {
        run.bed.check_snapshots(&storage.image())?;
        let content = read_all(&open.disk).map_err(|e| format!("can't be read again: {e:#}"))?;
        use_further(run, &open, content, rng)?;
    }
    Ok(())
}

/// Opens the image for writing, which repairs it if it must be, and compares what it holds.
fn open_and_compare(
    run: &Recorded,
    storage: &SimStorage,
    allowed: &Allowed,
) -> Result<Open, String> {
    let metadata = || run.bed.metadata(&storage.image());
    let dirty = is_dirty(&metadata());
    let open = run
        .bed
        .open(storage.clone(), CacheMode::None)
        .map_err(|e| format!("the image can't be opened: {e:#}"))?;
    if dirty {
        if is_dirty(&metadata()) {
            return Err("the dirty bit is still set after opening".to_owned());
        }
        check_image(&metadata(), true).map_err(|e| format!("after the repair: {e}"))?;
    }
    let content = read_all(&open.disk).map_err(|e| format!("the disk can't be read: {e:#}"))?;
    let Some((sector, value)) = allowed.wrong(&content) else {
        run.bed.check_bitmap(&storage.image(), &content, false)?;
        return Ok(open);
    };
    let value = value.map_or("a mixture".to_owned(), |v| format!("{v:#x}"));
    let story = run.oracle.story(sector);
    Err(format!("sector {sector:#x} holds {value}, which it may not:{story}"))
}

/// The power fails again, at any moment of the repair that opening made.
fn repair_again(
    run: &Recorded,
    storage: &SimStorage,
    allowed: &Allowed,
    rng: &mut Rng,
) -> Result<(), String> {
    let history = storage.history();
    let mut replay = history.replay();
    while replay.step().is_some() {
        if !rng.chance(40) {
            continue;
        }
        for state in replay.crash_point().states(rng.next_u64(), 3) {
            let metadata = run.bed.metadata(&state.image);
            if !is_dirty(&metadata) {
                check_image(&metadata, true)
                    .map_err(|e| format!("power cut while it was repaired: {e}\n  {state}"))?;
            }
            let again = SimStorage::from_image(state.image.clone(), SimOptions::default());
            open_and_compare(run, &again, allowed)
                .map_err(|e| format!("power cut while it was repaired: {e}\n  {state}"))?;
        }
    }
    Ok(())
}

/// The image must be as good as any other: some sectors are written, then all is compared.
fn use_further(
    run: &Recorded,
    open: &Open,
    mut content: Vec<u8>,
    rng: &mut Rng,
) -> Result<(), String> {
    let failed = |e| format!("after the crash, work on the image fails: {e:#}");
    for _ in 0..12 {
        let sectors = run.oracle.sectors();
        let at = rng.below(sectors);
        let len = (1 + rng.below(8)).min(sectors - at) as usize * BYTES;
        let bytes = vec![rng.next_u64() as u8; len];
        let buf = SharedBuf::new(AlignedBuf::from_slice(&bytes).map_err(failed)?).iovec();
        let start = (at * SECTOR) as usize;
        block_on(open.disk.write(GuestOffset::new(at * SECTOR), buf, false)).map_err(failed)?;
        content[start..start + len].copy_from_slice(&bytes);
    }
    block_on(open.disk.close()).map_err(failed)?;
    let metadata = run.bed.metadata(&open.storage.image());
    check_image(&metadata, true).map_err(|e| format!("after more work: {e}"))?;
    run.bed.check_snapshots(&open.storage.image())?;
    let storage = SimStorage::from_image(open.storage.image(), SimOptions::default());
    let open = run.bed.open(storage, CacheMode::None).map_err(failed)?;
    let seen = read_all(&open.disk).map_err(failed)?;
    match seen.iter().zip(&content).position(|(a, b)| a != b) {
        Some(at) => Err(format!("after more work on the image, byte {at:#x} is wrong")),
        None => Ok(()),
    }
}
