//! Contents that can be told apart: a sector that repeats one number, and bytes that depend on a seed.

use bedplate_sim::{Rng, SECTOR};

/// Bytes of a sector.
pub(crate) const BYTES: usize = SECTOR as usize;

/// Fills a whole number of sectors from `sector` on with the tags of write `number`.
pub(crate) fn tagged(number: u64, sector: u64, sectors: u64) -> Vec<u8> {
    let mut bytes = vec![0; sectors as usize * BYTES];
    for (place, sector) in bytes.chunks_mut(BYTES).zip(sector..) {
        let word = tag(number, sector).to_be_bytes();
        place.as_chunks_mut::<8>().0.fill(word);
    }
    bytes
}

/// The number that a sector holds after write `number`. Never zero.
pub(crate) fn tag(number: u64, sector: u64) -> u64 {
    (number + 1) << 32 | sector
}

/// The number that a sector repeats, zero for zeroes; `None` when it is no such sector.
pub(crate) fn tag_of(sector: &[u8]) -> Option<u64> {
    let (words, _) = sector.as_chunks::<8>();
    let first = words.first()?;
    words.iter().all(|w| w == first).then(|| u64::from_be_bytes(*first))
}

/// Random bytes.
pub(crate) fn random(rng: &mut Rng, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len.next_multiple_of(8)];
    bytes.as_chunks_mut::<8>().0.iter_mut().for_each(|w| *w = rng.next_u64().to_le_bytes());
    bytes.truncate(len);
    bytes
}

/// Bytes of which some sectors are random and the others are one byte each.
pub(crate) fn squeezable(rng: &mut Rng, len: usize) -> Vec<u8> {
    let share = [0, 10, 50, 100][rng.below(4) as usize];
    let mut bytes = Vec::with_capacity(len.next_multiple_of(BYTES));
    while bytes.len() < len {
        if rng.chance(share) {
            bytes.extend(random(rng, BYTES));
        } else {
            bytes.resize(bytes.len() + BYTES, rng.below(256) as u8);
        }
    }
    bytes.truncate(len);
    bytes
}
