//! The program is killed at any poll of random work, again and again: what had completed must be there, as the storage
//! and the journal's memory stay as they are. At the end the power may fail as well.

use crate::bed::{Bed, Open, check_image, is_dirty, read_all};
use crate::oracle::{Allowed, Oracle, Time};
use crate::spec::Spec;
use crate::workload::{Profile, Shared, random_limits, step};
use bedplate_qcow2::{JournalOwner, JournalStart, NewSnapshot, Qcow2, SnapshotRef, read_header};
use bedplate_sim::exec::{Pool, block_on};
use bedplate_sim::{DiscardMode, Image, Rng, SimOptions, SimStorage};
use bedplate_storage::{SharedWords, Storage};
use bedplate_types::{CacheMode, Error, ErrorKind};
use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// What came up in a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Kills {
    /// Kills.
    pub kills: u64,
    /// Kills after which the file alone did not hold everything that had completed.
    pub needed: u64,
    /// Kills while requests were under way.
    pub busy: u64,
    /// Times that a journal was refused after a power cut.
    pub refused: u64,
    /// Kills while an image was being opened or closed.
    pub between: u64,
    /// Snapshots made and deleted.
    pub snapshots: u64,
    /// Kills while one was made or deleted.
    pub within: u64,
}

const OWNER: JournalOwner = JournalOwner { boot: [1, 2], file: [3, 4, 5, 6] };
/// Autoclear bits that name a session; the others are the format's.
const SESSION: u64 = !0xff;
/// Words of a journal's header.
const HEADER: u64 = 512;
/// Words of a record in both halves.
const RECORDS: u64 = 4;

/// Memory for a journal, sometimes hardly enough.
fn memory(spec: &Spec, rng: &mut Rng) -> Arc<dyn SharedWords> {
    let slice = (spec.cluster() / 8).min(512);
    let room = slice + [0, slice / 4, 4096][rng.below(3) as usize];
    let words: Box<[AtomicU64]> = (0..HEADER + RECORDS * room).map(|_| AtomicU64::new(0)).collect();
    Arc::new(words)
}

/// Makes a snapshot, or deletes it.
async fn turn(open: &Open, create: bool) -> Result<(), Error> {
    if create {
        let new = NewSnapshot { name: b"s", date: Duration::ZERO };
        return open.qcow2.create_snapshot(&new).await.map(drop);
    }
    open.qcow2.delete_snapshot(SnapshotRef::Name(b"s")).await
}

/// One run: the storage and the memory that stay, and what is done with them.
struct Run {
    bed: Bed,
    profile: Profile,
    storage: SimStorage,
    memory: Arc<dyn SharedWords>,
    rng: Rng,
    stats: Kills,
}

/// What one process did before it was killed.
struct Life {
    oracle: Oracle,
    now: Time,
    log: Vec<String>,
}

impl Run {
    fn start(&mut self, owner: JournalOwner, discard: bool) -> JournalStart {
        JournalStart { memory: self.memory.clone(), owner, nonce: self.rng.next_u64(), discard }
    }

    /// Opens the disk; sometimes a process or two are killed over it.
    fn open(&mut self) -> Result<Open, String> {
        while self.rng.chance(25) {
            let start = self.start(OWNER, false);
            let options = self.bed.options(Some(start));
            let (image, data) = self.bed.parts(&self.storage);
            let opening = async move {
                // What is wrong comes up again in the opening that counts.
                drop(Qcow2::open_with_data(image, data, &options).await);
            };
            let polls = self.rng.below(60);
            self.kill_within(polls, opening)?;
        }
        let start = self.start(OWNER, false);
        let opened = self.bed.open_with(self.storage.clone(), CacheMode::None, Some(start));
        opened.map_err(|e| format!("can't be opened: {e:#}"))
    }

    /// Polls something and kills its process.
    fn kill_within(&mut self, polls: u64, work: impl Future<Output = ()>) -> Result<(), String> {
        {
            let mut pool = Pool::new(self.rng.next_u64());
            pool.spawn(work);
            (0..polls).take_while(|_| pool.step()).for_each(drop);
            self.stats.between += pool.unfinished() as u64;
        }
        self.last_requests()
    }

    /// Makes or deletes a snapshot, which replaces much of the metadata; or one is there already.
    fn snapshot(&mut self, open: &Open, content: &[u8]) -> Result<(), String> {
        if !self.may_snapshot() || !self.rng.chance(25) {
            return Ok(());
        }
        match block_on(turn(open, self.bed.kept.is_empty())) {
            Ok(()) => self.stats.snapshots += 1,
            // Refcounts of one bit can't count them.
            Err(e) if e.kind() == ErrorKind::Limit => return Ok(()),
            Err(e) => return Err(format!("snapshot: {e:#}")),
        }
        self.find_snapshot(open, content)
    }

    /// Images have snapshots from the start, or one now and then, or none.
    fn may_snapshot(&self) -> bool {
        let spec = &self.bed.spec;
        spec.seeds.snapshots == 0 && spec.data_file.is_none()
    }

    /// Whether there is a snapshot now; one that was not there before was made when the disk held `content`.
    fn find_snapshot(&mut self, open: &Open, content: &[u8]) -> Result<(), String> {
        if !self.may_snapshot() {
            return Ok(());
        }
        let list = block_on(open.qcow2.snapshots()).map_err(|e| format!("{e:#}"))?;
        match (list.is_empty(), self.bed.kept.is_empty()) {
            (true, false) => self.bed.kept.clear(),
            (false, true) => self.bed.kept.push(("s".to_owned(), content.to_vec())),
            _ => {}
        }
        Ok(())
    }

    /// Works on an open disk until it is killed.
    fn live(&mut self, open: &Open, content: &[u8]) -> Result<Life, String> {
        if let Some(rule) = self.profile.broken {
            open.qcow2.order_faults().break_rule(rule);
        }
        let shared = Shared {
            open,
            spec: &self.bed.spec,
            profile: self.profile,
            oracle: RefCell::new(Oracle::new(content)?),
            now: Cell::new(0),
            numbers: Cell::new(self.stats.kills << 24),
            troubles: RefCell::default(),
            pretended: RefCell::default(),
            log: RefCell::default(),
        };
        let tasks = 1 + self.rng.below(self.profile.tasks);
        let rngs: Vec<Rng> = (0..tasks).map(|_| self.rng.fork()).collect();
        let mut polls = self.rng.below(self.profile.operations * 5);
        {
            let mut pool = Pool::new(self.rng.next_u64());
            for mut rng in rngs {
                let shared = &shared;
                pool.spawn(async move {
                    for _ in 0..shared.profile.operations / tasks {
                        step(shared, &mut rng).await;
                    }
                });
            }
            while polls > 0 && pool.step() {
                polls -= 1;
            }
            if polls > 0 && pool.unfinished() > 0 {
                return Err("deadlock".to_owned());
            }
            self.stats.busy += u64::from(pool.unfinished() > 0);
            if pool.unfinished() == 0 && self.may_snapshot() && self.rng.chance(50) {
                let create = self.bed.kept.is_empty();
                pool.spawn(async move {
                    // What became of it is seen when the image is opened again.
                    drop(turn(open, create).await);
                });
                let polls = self.rng.below(100);
                (0..polls).take_while(|_| pool.step()).for_each(drop);
                self.stats.within += pool.unfinished() as u64;
            }
        }
        if let Some(trouble) = shared.troubles.borrow().first() {
            return Err(format!("{} failed: {:#}", trouble.what, trouble.error));
        }
        let (now, log) = (shared.now.get(), shared.log.into_inner());
        Ok(Life { oracle: shared.oracle.into_inner(), now, log })
    }

    /// The killed process's last requests end, or never reached the storage. No other process begins before that.
    fn last_requests(&mut self) -> Result<(), String> {
        if self.rng.chance(50) {
            for _ in 0..64 {
                block_on(self.storage.sync()).map_err(|e| format!("{e:#}"))?;
            }
        } else {
            let options = self.options();
            self.storage = SimStorage::from_image(self.storage.image(), options);
        }
        Ok(())
    }

    fn options(&mut self) -> SimOptions {
        let rng = &mut self.rng;
        SimOptions {
            seed: rng.next_u64(),
            max_delay: rng.below(u64::from(self.profile.max_delay) + 1) as u32,
            fast_zero: rng.chance(80),
            limits: random_limits(rng),
            discard: [DiscardMode::Zeroes, DiscardMode::Garbage][rng.below(2) as usize],
            ..SimOptions::default()
        }
    }

    /// Compares what the disk holds.
    fn compare(life: &Life, allowed: &Allowed, content: &[u8]) -> Result<(), String> {
        let Some((sector, value)) = allowed.wrong(content) else { return Ok(()) };
        let value = value.map_or("a mixture".to_owned(), |v| format!("{v:#x}"));
        let mut text = format!(
            "sector {sector:#x} holds {value}, which it may not:{}",
            life.oracle.story(sector)
        );
        for line in life.log.iter().rev().take(40).rev() {
            text += &format!("\n  {line}");
        }
        Err(text)
    }

    /// Whether the file, without the journal, lacks something that had completed.
    fn lacks(&self, life: &Life) -> bool {
        let storage = SimStorage::from_image(self.storage.image(), SimOptions::default());
        let open = self.bed.open(storage, CacheMode::None);
        let content = open.and_then(|o| read_all(&o.disk));
        content.is_ok_and(|c| life.oracle.at_rest(life.now).wrong(&c).is_some())
    }

    /// The power fails instead: another boot finds the medium, and perhaps (were it not lost) the memory.
    fn power_cut(&mut self, life: &Life) -> Result<(), String> {
        let states = self.storage.crash_point().states(self.rng.next_u64(), 6);
        for state in states {
            let boot = [7, 7];
            let memory = self
                .memory
                .words()
                .iter()
                .map(|w| AtomicU64::new(w.load(std::sync::atomic::Ordering::Relaxed)));
            let memory: Arc<dyn SharedWords> = Arc::new(memory.collect::<Box<[AtomicU64]>>());
            let mut start = JournalStart {
                memory,
                owner: JournalOwner { boot, ..OWNER },
                nonce: 9,
                discard: false,
            };
            let storage = SimStorage::from_image(state.image.clone(), SimOptions::default());
            let open = |start: &JournalStart| {
                self.bed.open_with(storage.clone(), CacheMode::None, Some(start.clone()))
            };
            let open = match open(&start) {
                Err(e) if e.kind() == ErrorKind::Stale => {
                    if !same(&storage.image(), &state.image) {
                        return Err("an image with a stale journal was changed".to_owned());
                    }
                    self.stats.refused += 1;
                    start.discard = true;
                    open(&start)
                }
                other => other,
            };
            let open = open.map_err(|e| format!("after a power cut: {e:#}"))?;
            let content = read_all(&open.disk).map_err(|e| format!("after a power cut: {e:#}"))?;
            Self::compare(life, &life.oracle.after_crash(life.now), &content)
                .map_err(|e| format!("after a power cut: {e}"))?;
            let medium = storage.image();
            check_image(&self.bed.metadata(&medium), true)
                .and_then(|()| self.bed.check_bitmap(&medium, &content, false))
                .map_err(|e| format!("after a power cut: {e}"))?;
        }
        Ok(())
    }
}

/// Compares images piece by piece: files are long where space was taken ahead.
fn same(a: &Image, b: &Image) -> bool {
    const PIECE: usize = 64 << 10;
    let (mut one, mut other) = (vec![0; PIECE], vec![0; PIECE]);
    a.len() == b.len()
        && (0..a.len()).step_by(PIECE).all(|at| {
            a.read(at, &mut one);
            b.read(at, &mut other);
            one == other
        })
}

/// Runs work of `profile` through up to `kills` kills, then closes the image.
///
/// # Errors
/// What is wrong.
pub fn survive_kills(seed: u64, profile: Profile, kills: u64) -> Result<Kills, String> {
    let mut rng = Rng::new(seed);
    let mut spec = Spec { version: 3, ..(profile.spec)(&mut rng) };
    if let Some(below) = &mut spec.below {
        below.size = below.size.next_multiple_of(bedplate_sim::SECTOR);
    }
    let mut bed = Bed::new(spec, &mut rng);
    if profile.bitmap {
        bed = bed.with_bitmap(512 << rng.below(4)).map_err(|e| format!("a bitmap: {e:#}"))?;
    }
    let memory = memory(&bed.spec, &mut rng);
    let storage = SimStorage::from_image(bed.image.clone(), SimOptions::default());
    let mut run = Run { bed, profile, storage, memory, rng, stats: Kills::default() };
    let options = run.options();
    run.storage = SimStorage::from_image(run.bed.image.clone(), options);
    let mut content = run.bed.content.clone();
    for _ in 0..1 + run.rng.below(kills) {
        let open = run.open()?;
        run.snapshot(&open, &content)?;
        let life = run.live(&open, &content)?;
        drop(open);
        run.stats.kills += 1;
        if run.rng.chance(10) {
            run.power_cut(&life)?;
        }
        run.last_requests()?;
        run.stats.needed += u64::from(run.lacks(&life));
        let open = run.open().map_err(|e| format!("after kill {}: {e}", run.stats.kills))?;
        content = read_all(&open.disk).map_err(|e| format!("{e:#}"))?;
        Run::compare(&life, &life.oracle.at_rest(life.now), &content)
            .map_err(|e| format!("after kill {}: {e}\n  on {:?}", run.stats.kills, run.bed.spec))?;
        run.find_snapshot(&open, &content)?;
        let medium = run.storage.image();
        let image = run.bed.metadata(&medium);
        if !is_dirty(&image) {
            check_image(&image, true)
                .map_err(|e| format!("after kill {}: {e}", run.stats.kills))?;
        }
        run.bed.check_snapshots(&medium)?;
        run.bed
            .check_bitmap(&medium, &content, false)
            .map_err(|e| format!("after kill {}: {e}", run.stats.kills))?;
    }
    finish(run, &content)
}

/// The image is closed: clean, without leaks, and as any other image.
fn finish(mut run: Run, content: &[u8]) -> Result<Kills, String> {
    while run.rng.chance(40) {
        let open = run.open()?;
        let polls = run.rng.below(60);
        run.kill_within(polls, async { drop(open.disk.close().await) })?;
    }
    let open = run.open()?;
    block_on(open.disk.close()).map_err(|e| format!("closing: {e:#}"))?;
    let medium = run.storage.image();
    check_image(&run.bed.metadata(&medium), false)
        .and_then(|()| run.bed.check_bitmap(&medium, content, false))
        .map_err(|e| format!("at the end: {e}"))?;
    let image = run.bed.parts(&run.storage).0;
    let header = block_on(read_header(&image)).map_err(|e| format!("{e:#}"))?;
    if header.autoclear & SESSION != 0 {
        return Err("the mark of a session is left in the header".to_owned());
    }
    drop(open);
    let other = JournalOwner { boot: [8, 8], ..OWNER };
    let start = run.start(other, false);
    let storage = SimStorage::from_image(run.storage.image(), SimOptions::default());
    let open = run.bed.open_with(storage, CacheMode::None, Some(start));
    let open = open.map_err(|e| format!("after it was closed: {e:#}"))?;
    let read = read_all(&open.disk).map_err(|e| format!("{e:#}"))?;
    if read != content {
        return Err("closing has changed what the disk holds".to_owned());
    }
    Ok(run.stats)
}
