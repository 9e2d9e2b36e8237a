//! Contents that can be told apart: a sector that repeats one number, and bytes that depend on a seed.

use bedplate_sim::{Rng, SECTOR};

/// Bytes of a sector.
pub(crate) const BYTES: usize = SECTOR as usize;

/// Fills a whole number of sectors from `sector` on with the tags of write `number`.
pub(crate) fn tagged(number: u64, sector: u64, sectors: u64) -> Vec<u8> {
    (sector..sector + sectors)
        .flat_map(|s| tag(number, s).to_be_bytes().repeat(BYTES / 8))
        .collect()
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
    let mut bytes: Vec<u8> =
        (0..len.div_ceil(8)).flat_map(|_| rng.next_u64().to_le_bytes()).collect();
    bytes.truncate(len);
    bytes
}
