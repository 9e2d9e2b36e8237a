//! The journal: changes of the mapping that are only in memory, in words that outlive the process.
//!
//! Callers: [`crate::slice`] updates and new L2 tables append to it before a change can be seen, the write-back retires
//! what it has made durable, and opening an image takes up what a killed process left (`takeup.rs`).
//! `docs/on-disk-order.md`, "The daemon's own death", has the argument.
//!
//! Layout, in 64-bit words of the host's byte order: a header ([`HEADER`] words), then two halves of records. Changes go
//! to one half, that of the current *generation* (a number that counts up; its lowest bit names the half), while a
//! write-back makes those of the other durable. A record is two words: what changes and a checksum, and the new word.
//! Records that were appended together form a *group*, which counts only as a whole.
//!
//! Invariants: a record is complete before the change that it tells of can be seen by anybody; a generation is retired
//! only after all its changes are in the file; a half is used again only after its generation was retired. Nothing here
//! waits, except that the write-back waits for appenders that are between record and change, a few instructions.

use super::prim::{AtomicU64, Ordering, SharedWords, fence, spin_loop, yield_now};
use crate::slice::SliceId;
use std::sync::Arc;

/// Words of the header.
pub(crate) const HEADER: usize = 512;
/// Words of a record.
pub(crate) const RECORD: usize = 2;
/// Words that an image's journal has by default: two halves of half a million changes each, 16 MiB in all.
pub const JOURNAL_WORDS: usize = 2 << 20;

const MAGIC: u64 = u64::from_be_bytes(*b"bedplate");
const VERSION: u64 = 1;

// Words of the header. Those that appenders write are on cache lines of their own.
// The first are those of `header_fields`.
const AT_MAGIC: usize = 0;
const AT_TOKEN: usize = 3;
const AT_OWNER: usize = 4;
const OWNER: usize = 6;
const AT_CHECK: usize = 10;
/// Nonzero while a process that has not ended cleanly uses the journal.
pub(crate) const AT_LIVE: usize = 11;
/// The generation that changes go to, and the last one that is durable.
pub(crate) const AT_CURRENT: usize = 16;
const AT_RETIRED: usize = 17;
/// The halves: generation, and [`TAG`] of it with the number of records.
pub(crate) const AT_HALVES: [usize; 2] = [32, 48];

/// A tail word: set when no more records may be appended.
const CLOSED: u64 = 1 << 63;
/// Its bits for the number of records.
const COUNT_BITS: u32 = 23;
const COUNT: u64 = (1 << COUNT_BITS) - 1;
/// Its bits for the generation, so that a late appender can't take one for another.
const TAG: u64 = (1 << 40) - 1;

// The first word of a record, from the lowest bit: entry, L1 index, flags, checksum.
const ENTRY_BITS: u32 = 18;
const L1_BITS: u32 = 22;
const IS_L1: u64 = 1 << 40;
const IS_FIRST: u64 = 1 << 41;
const IS_LAST: u64 = 1 << 42;
const CHECK_SHIFT: u32 = 43;

/// Whose journal it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct JournalOwner {
    /// The host's boot: its file's page cache is only right until the host goes down.
    pub boot: [u64; 2],
    /// The image's file: its device, its number there, and when it was made (seconds and nanoseconds).
    pub file: [u64; 4],
}

impl JournalOwner {
    fn words(self) -> [u64; OWNER] {
        let ([a, b], [c, d, e, f]) = (self.boot, self.file);
        [a, b, c, d, e, f]
    }
}

/// Memory for the journal of one image, and what opening needs to know of it.
#[derive(Clone)]
pub struct JournalStart {
    /// The words; what is in them is judged before it is believed.
    pub memory: Arc<dyn SharedWords>,
    /// Whose it is to be.
    pub owner: JournalOwner,
    /// A random number.
    pub nonce: u64,
    /// Throw away what is there, also when it can't be taken up.
    pub discard: bool,
}

impl std::fmt::Debug for JournalStart {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "JournalStart({} words)", self.memory.words().len())
    }
}

/// A change that a journal tells of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// A word of the L1 table.
    L1 { index: u32, word: u64 },
    /// A word of an L2 table: the index of the table, and of the word in it.
    L2 { l1: u32, entry: u32, word: u64 },
}

/// What a process that did not end cleanly left.
#[derive(Debug)]
pub(crate) struct Kept {
    pub(crate) owner: JournalOwner,
    pub(crate) token: u64,
    /// Changes that may not be in the file, oldest first.
    pub(crate) changes: Vec<Change>,
}

/// What is in the words.
#[derive(Debug)]
pub(crate) enum Found {
    /// Nothing that matters.
    Empty,
    /// Something else, or a journal of another version.
    Unknown,
    Kept(Kept),
}

fn mix(a: u64, b: u64) -> u64 {
    let x = (a ^ (a >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(b);
    let x = (x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^ (x >> 32)
}

/// The checksum of a record, in its place in the first word.
fn check(meta: u64, word: u64, generation: u64) -> u64 {
    let meta = meta & ((1 << CHECK_SHIFT) - 1);
    mix(mix(meta ^ generation.rotate_left(43), word), generation) >> CHECK_SHIFT << CHECK_SHIFT
}

fn encode(change: Change) -> (u64, u64) {
    match change {
        Change::L1 { index, word } => (IS_L1 | u64::from(index) << ENTRY_BITS, word),
        Change::L2 { l1, entry, word } => (u64::from(l1) << ENTRY_BITS | u64::from(entry), word),
    }
}

fn decode(meta: u64, word: u64) -> Change {
    let index = (meta >> ENTRY_BITS & ((1 << L1_BITS) - 1)) as u32;
    let entry = (meta & ((1 << ENTRY_BITS) - 1)) as u32;
    if meta & IS_L1 != 0 {
        Change::L1 { index, word }
    } else {
        Change::L2 { l1: index, entry, word }
    }
}

/// A counter on a cache line of its own.
#[repr(align(128))]
#[derive(Default)]
struct Alone(AtomicU64);

/// The journal of an open image.
pub(crate) struct Journal {
    memory: Arc<dyn SharedWords>,
    /// Records that fit in a half.
    room: u64,
    /// Records of each half whose changes were made.
    made: [Alone; 2],
}

/// Changes are in the journal, and are now made; dropped when they can be found by a write-back.
#[must_use]
pub(crate) struct Logged<'a> {
    made: &'a AtomicU64,
    records: u64,
}

impl Drop for Logged<'_> {
    fn drop(&mut self) {
        self.made.fetch_add(self.records, Ordering::Release);
    }
}

/// Records that fit in a half of so many words in all; none when there is no room for a journal.
fn room(words: usize) -> u64 {
    let records = words.saturating_sub(HEADER) / (2 * RECORD);
    (records as u64).min(COUNT)
}

pub(crate) fn half(generation: u64) -> usize {
    (generation & 1) as usize
}

fn tag(generation: u64) -> u64 {
    (generation & TAG) << COUNT_BITS
}

impl Journal {
    /// Prepares the words for an image whose header holds `token`. What was in them is gone.
    pub(crate) fn begin(start: &JournalStart, token: u64) -> Self {
        let words = start.memory.words();
        let set = |at: usize, value: u64| {
            if let Some(word) = words.get(at) {
                word.store(value, Ordering::Release);
            }
        };
        set(AT_LIVE, 0);
        // The old tails go first: nothing of before must count under the new header.
        AT_HALVES.into_iter().flat_map(|at| [at, at + 1]).for_each(|at| set(at, 0));
        let last = words.get(AT_CURRENT).map_or(0, |w| w.load(Ordering::Relaxed));
        let generation = last.wrapping_add(1).max(1);
        let fields = header_fields(words.len() as u64, token, start.owner);
        fields.iter().enumerate().for_each(|(at, value)| set(at, *value));
        set(AT_CHECK, header_check(&fields));
        let journal = Self {
            memory: start.memory.clone(),
            room: room(words.len()),
            made: Default::default(),
        };
        journal.open_half(generation);
        set(AT_RETIRED, generation.wrapping_sub(1));
        set(AT_LIVE, 1);
        journal
    }

    /// Goes on with words whose changes are all in the file now.
    pub(crate) fn go_on(memory: Arc<dyn SharedWords>) -> Self {
        let room = room(memory.words().len());
        let journal = Self { memory, room, made: Default::default() };
        let last = journal.word(AT_CURRENT).load(Ordering::Acquire);
        journal.retire(last);
        journal.open_half(last.wrapping_add(1));
        journal
    }

    /// Ends the use of the words: the image was closed and holds everything.
    pub(crate) fn end(&self) {
        self.word(AT_LIVE).store(0, Ordering::Release);
    }

    /// Records that fit in a half.
    pub(crate) fn room(&self) -> u64 {
        self.room
    }

    pub(crate) fn word(&self, at: usize) -> &AtomicU64 {
        static NONE: AtomicU64 = AtomicU64::new(0);
        // All places are inside, since `room` counts only what is; the static keeps this free of panics.
        self.memory.words().get(at).unwrap_or(&NONE)
    }

    fn tail(&self, generation: u64) -> &AtomicU64 {
        self.word(AT_HALVES[half(generation)] + 1)
    }

    /// Makes a generation the current one.
    fn open_half(&self, generation: u64) {
        self.made[half(generation)].0.store(0, Ordering::Relaxed);
        self.word(AT_HALVES[half(generation)]).store(generation, Ordering::Release);
        self.tail(generation).store(tag(generation), Ordering::Release);
        self.word(AT_CURRENT).store(generation, Ordering::Release);
    }

    /// Tells of changes, as one group. None when there is no room until a write-back has ended.
    pub(crate) fn append(
        &self,
        changes: impl ExactSizeIterator<Item = Change>,
    ) -> Option<Logged<'_>> {
        let records = changes.len() as u64;
        loop {
            let generation = self.word(AT_CURRENT).load(Ordering::Acquire);
            let tail = self.tail(generation);
            let old = tail.load(Ordering::Acquire);
            if old & !COUNT != tag(generation) {
                spin_loop(); // a write-back begins just now
                continue;
            }
            let first = old & COUNT;
            if first + records > self.room {
                return None;
            }
            let new = old + records;
            if tail.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                self.write(generation, first, changes);
                return Some(Logged { made: &self.made[half(generation)].0, records });
            }
        }
    }

    fn write(&self, generation: u64, first: u64, changes: impl ExactSizeIterator<Item = Change>) {
        let at = HEADER + (half(generation) as u64 * self.room + first) as usize * RECORD;
        let last = changes.len().saturating_sub(1);
        for (i, change) in changes.enumerate() {
            let (mut meta, word) = encode(change);
            if i == 0 {
                meta |= IS_FIRST;
            }
            if i == last {
                meta |= IS_LAST;
            }
            let at = at + i * RECORD;
            self.word(at + 1).store(word, Ordering::Release);
            self.word(at).store(meta | check(meta, word, generation), Ordering::Release);
        }
        // The changes themselves are stored with release, and so stay behind these stores.
        fence(Ordering::Release);
    }

    /// True when a write-back should begin before the half is full.
    pub(crate) fn wants_write_back(&self) -> bool {
        let generation = self.word(AT_CURRENT).load(Ordering::Relaxed);
        self.tail(generation).load(Ordering::Relaxed) & COUNT > self.room / 2
    }

    /// A write-back begins: later changes go to the other half. Returns the generation that may be retired when all
    /// that is dirty now is durable; None when it holds nothing.
    pub(crate) fn turn(&self) -> Option<u64> {
        let generation = self.word(AT_CURRENT).load(Ordering::Acquire);
        let retired = self.word(AT_RETIRED).load(Ordering::Acquire);
        let empty = self.tail(generation).load(Ordering::Acquire) & COUNT == 0;
        // Without the first, an earlier write-back was given up: what it left stays, and so does the other half.
        if retired.wrapping_add(1) != generation || empty {
            return None;
        }
        self.open_half(generation.wrapping_add(1));
        let records = self.tail(generation).fetch_or(CLOSED, Ordering::AcqRel) & COUNT;
        // Who has a record there is about to make its change, without waiting for anything.
        while self.made[half(generation)].0.load(Ordering::Acquire) != records {
            yield_now();
        }
        Some(generation)
    }

    /// All changes up to this generation are in the file.
    pub(crate) fn retire(&self, generation: u64) {
        self.word(AT_RETIRED).store(generation, Ordering::Release);
    }
}

fn header_fields(words: u64, token: u64, owner: JournalOwner) -> Vec<u64> {
    let mut fields = vec![MAGIC, VERSION, words, token];
    fields.extend(owner.words());
    fields
}

fn header_check(fields: &[u64]) -> u64 {
    fields.iter().fold(MAGIC, |sum, field| mix(sum, *field))
}

/// What a slice update changes, in words of its L2 table.
pub(crate) fn slice_changes(
    id: SliceId,
    slice_words: usize,
    changes: &[(usize, u64)],
) -> impl ExactSizeIterator<Item = Change> {
    let first = id.part as usize * slice_words;
    changes.iter().map(move |(index, word)| {
        // A table has at most 2^18 words.
        Change::L2 { l1: id.l1, entry: (first + index) as u32, word: *word }
    })
}

/// Looks at what is in the words.
pub(crate) fn examine(memory: &dyn SharedWords) -> Found {
    let words = memory.words();
    let get = |at: usize| words.get(at).map_or(0, |w| w.load(Ordering::Acquire));
    if get(AT_MAGIC) == 0 || get(AT_LIVE) == 0 && get(AT_MAGIC) == MAGIC {
        return Found::Empty;
    }
    let owner = JournalOwner {
        boot: [get(AT_OWNER), get(AT_OWNER + 1)],
        file: [get(AT_OWNER + 2), get(AT_OWNER + 3), get(AT_OWNER + 4), get(AT_OWNER + 5)],
    };
    let token = get(AT_TOKEN);
    let fields = header_fields(words.len() as u64, token, owner);
    let same = fields.iter().enumerate().all(|(at, value)| get(at) == *value);
    if !same || get(AT_CHECK) != header_check(&fields) {
        return Found::Unknown;
    }
    let (current, retired) = (get(AT_CURRENT), get(AT_RETIRED));
    let mut changes = Vec::new();
    for generation in [current.wrapping_sub(1), current] {
        if generation > retired {
            read_half(words, generation, &mut changes);
        }
    }
    Found::Kept(Kept { owner, token, changes })
}

/// True when there are changes of `owner`'s image that wait to be taken up.
pub fn holds_changes(memory: &dyn SharedWords, owner: JournalOwner) -> bool {
    matches!(examine(memory), Found::Kept(kept) if kept.owner == owner && !kept.changes.is_empty())
}

/// Adds the changes of all whole groups of a generation.
fn read_half(words: &[AtomicU64], generation: u64, changes: &mut Vec<Change>) {
    let get = |at: usize| words.get(at).map_or(0, |w| w.load(Ordering::Acquire));
    let at = AT_HALVES[half(generation)];
    let tail = get(at + 1) & !CLOSED;
    if get(at) != generation || tail & !COUNT != tag(generation) {
        return; // it was just being opened
    }
    let room = room(words.len());
    let mut group: Option<Vec<Change>> = None;
    for record in 0..(tail & COUNT).min(room) {
        let at = HEADER + (half(generation) as u64 * room + record) as usize * RECORD;
        let (meta, word) = (get(at), get(at + 1));
        if check(meta, word, generation) != meta >> CHECK_SHIFT << CHECK_SHIFT {
            group = None; // its process was killed before it was whole, and so before its change was made
            continue;
        }
        if meta & IS_FIRST != 0 {
            group = Some(Vec::new());
        }
        let Some(list) = &mut group else { continue };
        list.push(decode(meta, word));
        if meta & IS_LAST != 0 {
            changes.extend(group.take().unwrap_or_default());
        }
    }
}
