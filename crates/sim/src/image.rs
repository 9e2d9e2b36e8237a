//! Sparse contents of a simulated file. Clones share their pages, so that hundreds of thousands of crash
//! states can be built from one base.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

const PAGE: u64 = 4096;
/// Pages in one leaf; a change copies one leaf of pointers, not the whole map of pages.
const LEAF: u64 = 64;

type Page = [u8; PAGE as usize];

#[derive(Clone)]
struct Leaf([Option<Arc<Page>>; LEAF as usize]);

impl Leaf {
    fn empty() -> Self {
        Self([const { None }; LEAF as usize])
    }
}

/// A sparse byte array with a length. What was never written reads as zeroes.
#[derive(Clone, Default)]
pub struct Image {
    len: u64,
    leaves: Arc<BTreeMap<u64, Arc<Leaf>>>,
}

impl Image {
    /// An image of `len` bytes that is all hole.
    pub fn new(len: u64) -> Self {
        Self { len, leaves: Arc::default() }
    }

    /// An image that holds `bytes`; pages of zeroes become holes.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let mut image = Self::new(bytes.len() as u64);
        for (i, page) in bytes.chunks(PAGE as usize).enumerate() {
            if page.iter().any(|b| *b != 0) {
                image.poke(i as u64 * PAGE, page);
            }
        }
        image
    }

    /// The contents of a file of the host.
    ///
    /// # Errors
    /// What reading the file reported.
    pub fn load(path: &Path) -> io::Result<Self> {
        Ok(Self::from_bytes(&std::fs::read(path)?))
    }

    /// Writes the contents to a sparse file of the host, for other programs to look at.
    ///
    /// # Errors
    /// What writing the file reported.
    pub fn save(&self, path: &Path) -> io::Result<()> {
        let file = File::create(path)?;
        file.set_len(self.len)?;
        for (at, page) in self.pages() {
            let n = self.len.saturating_sub(at).min(PAGE) as usize;
            file.write_all_at(page.get(..n).unwrap_or_default(), at)?;
        }
        Ok(())
    }

    /// The length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True when the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All bytes as one vector.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut all = vec![0; self.len as usize];
        self.read(0, &mut all);
        all
    }

    /// The pages that hold data, with their offsets.
    pub fn pages(&self) -> impl Iterator<Item = (u64, &[u8])> + '_ {
        self.leaves.iter().flat_map(|(n, leaf)| {
            let base = n * LEAF * PAGE;
            leaf.0
                .iter()
                .enumerate()
                .filter_map(move |(i, p)| Some((base + i as u64 * PAGE, &p.as_ref()?[..])))
        })
    }

    /// Sets the length; what lies beyond a smaller one is gone.
    pub fn set_len(&mut self, len: u64) {
        if len < self.len {
            self.clear(len, u64::MAX - len);
        }
        self.len = len;
    }

    /// Fills `out` from `at`; beyond the end there are zeroes.
    pub fn read(&self, at: u64, out: &mut [u8]) {
        let valid = (self.len.saturating_sub(at)).min(out.len() as u64) as usize;
        let (inside, beyond) = out.split_at_mut(valid);
        beyond.fill(0);
        for (page, off, range) in pieces(at, inside.len()) {
            let to = &mut inside[range];
            match self.page(page) {
                Some(p) => to.copy_from_slice(&p[off..off + to.len()]),
                None => to.fill(0),
            }
        }
    }

    /// Writes `data` at `at` and grows the length to hold it.
    pub fn write(&mut self, at: u64, data: &[u8]) {
        self.poke(at, data);
        self.len = self.len.max(at.saturating_add(data.len() as u64));
    }

    /// Writes `data` without changing the length: beyond the end it shows up once the length grows over it.
    pub(crate) fn poke(&mut self, at: u64, data: &[u8]) {
        for (page, off, range) in pieces(at, data.len()) {
            let from = &data[range];
            let slot = self.slot(page);
            if let Ok(whole) = <&Page>::try_from(from) {
                *slot = Some(Arc::new(*whole));
            } else {
                let p = slot.get_or_insert_with(|| Arc::new([0; PAGE as usize]));
                Arc::make_mut(p)[off..off + from.len()].copy_from_slice(from);
            }
        }
    }

    /// Makes the length larger without hiding what was poked beyond the old one.
    pub(crate) fn reveal(&mut self, len: u64) {
        self.len = self.len.max(len);
    }

    /// Forgets everything beyond the end.
    pub(crate) fn trim(&mut self) {
        let over = self.leaves.last_key_value().is_some_and(|(n, leaf)| {
            let last = leaf.0.iter().rposition(Option::is_some).unwrap_or(0) as u64;
            (n * LEAF + last + 1) * PAGE > self.len
        });
        if over {
            self.clear(self.len, u64::MAX - self.len);
        }
    }

    /// Makes the range a hole; pages that it covers only in part keep their other bytes.
    pub fn clear(&mut self, at: u64, len: u64) {
        let end = at.saturating_add(len);
        if at >= end {
            return;
        }
        let (first, last) = (at / PAGE / LEAF, (end - 1) / PAGE / LEAF);
        let touched: Vec<u64> = self.leaves.range(first..=last).map(|(n, _)| *n).collect();
        for n in touched {
            let start = n * LEAF * PAGE;
            if at <= start && end - start >= LEAF * PAGE {
                Arc::make_mut(&mut self.leaves).remove(&n);
                continue;
            }
            for i in 0..LEAF {
                let from = start + i * PAGE;
                if from >= end || from + PAGE <= at || self.page(from / PAGE).is_none() {
                    continue;
                }
                let slot = self.slot(from / PAGE);
                if at <= from && end - from >= PAGE {
                    *slot = None;
                } else if let Some(p) = slot {
                    let range = at.saturating_sub(from)..(end - from).min(PAGE);
                    Arc::make_mut(p)[range.start as usize..range.end as usize].fill(0);
                }
            }
        }
    }

    /// Length of the run of data (true) or hole (false) that starts at `at`, at most `len` bytes. Space beyond
    /// the end is hole.
    pub fn extent(&self, at: u64, len: u64) -> (u64, bool) {
        let end = at.saturating_add(len);
        let is_data = |at: u64| at < self.len && self.page(at / PAGE).is_some();
        let data = is_data(at);
        let mut to = at;
        while to < end && is_data(to) == data {
            if to >= self.len {
                return (end - at, false);
            }
            // A leaf that is missing is skipped at once.
            let step =
                if self.leaves.contains_key(&(to / PAGE / LEAF)) { PAGE } else { PAGE * LEAF };
            to = (to - to % step).saturating_add(step);
            if data {
                to = to.min(self.len);
            }
        }
        (to.min(end) - at, data)
    }

    fn page(&self, page: u64) -> Option<&Arc<Page>> {
        self.leaves.get(&(page / LEAF))?.0[(page % LEAF) as usize].as_ref()
    }

    fn slot(&mut self, page: u64) -> &mut Option<Arc<Page>> {
        let leaf = Arc::make_mut(&mut self.leaves)
            .entry(page / LEAF)
            .or_insert_with(|| Arc::new(Leaf::empty()));
        &mut Arc::make_mut(leaf).0[(page % LEAF) as usize]
    }
}

impl PartialEq for Image {
    /// Equal length and equal bytes; holes equal zeroes.
    fn eq(&self, other: &Self) -> bool {
        let covered = |a: &Self, b: &Self| {
            a.pages().all(|(at, p)| {
                let n = a.len.saturating_sub(at).min(PAGE) as usize;
                match b.page(at / PAGE) {
                    Some(q) => p[..n] == q[..n],
                    None => p[..n].iter().all(|x| *x == 0),
                }
            })
        };
        self.len == other.len && covered(self, other) && covered(other, self)
    }
}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Image({} bytes, {} pages)", self.len, self.pages().count())
    }
}

/// Splits a range at page boundaries: page number, offset in the page, range in the buffer.
fn pieces(at: u64, len: usize) -> impl Iterator<Item = (u64, usize, std::ops::Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let now = at.checked_add(done as u64)?;
        let off = (now % PAGE) as usize;
        let n = (PAGE as usize - off).min(len - done);
        (n != 0).then(|| {
            let range = done..done + n;
            done += n;
            (now / PAGE, off, range)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Rng;

    #[test]
    fn random_changes_match_a_plain_vector() {
        let mut rng = Rng::new(7);
        let (mut image, mut plain) = (Image::new(0), Vec::<u8>::new());
        for round in 0..2000u64 {
            let at = rng.below(600_000);
            let n = rng.below(20_000) as usize;
            match rng.below(4) {
                0 => {
                    image.set_len(at);
                    plain.resize(at as usize, 0);
                }
                1 => {
                    image.clear(at, n as u64);
                    let end = (at as usize + n).min(plain.len());
                    if (at as usize) < end {
                        plain[at as usize..end].fill(0);
                    }
                }
                _ => {
                    let data = vec![round as u8; n];
                    image.write(at, &data);
                    plain.resize(plain.len().max(at as usize + n), 0);
                    plain[at as usize..at as usize + n].copy_from_slice(&data);
                }
            }
            if round % 50 == 0 {
                assert!(image.to_vec() == plain, "differs after round {round}");
                assert_eq!(image, Image::from_bytes(&plain));
            }
        }
    }

    #[test]
    fn extents_alternate_and_end_with_a_hole_beyond_the_end() {
        let mut image = Image::new(10 << 20);
        image.write(1 << 20, &[1; 4096]);
        assert_eq!(image.extent(0, 10 << 20), (1 << 20, false));
        assert_eq!(image.extent(1 << 20, 10 << 20), (4096, true));
        assert_eq!(image.extent((1 << 20) + 4096, 1 << 40), ((1 << 40), false));
        assert_eq!(image.extent(u64::MAX - 5, 5), (5, false));
    }

    #[test]
    fn a_clone_does_not_see_later_changes() {
        let mut image = Image::from_bytes(&[1; 8192]);
        let before = image.clone();
        image.write(0, &[2; 5000]);
        image.set_len(6000);
        assert_eq!(before.to_vec(), vec![1; 8192]);
    }
}
