//! The reference counts that an image stores.
//!
//! Callers: the census (which counts are 1, for the COPIED flags), the comparison, and the correction. Blocks that
//! several entries of the table name are kept, so that naming one block a million times costs no million reads.

use super::reader::Reader;
use crate::format::RefcountFormat;
use bedplate_runtime::buf::AlignedBuf;
use bedplate_storage::Storage;
use bedplate_types::Result;
use futures_util::future::join_all;
use std::collections::HashMap;
use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

/// Refcount table entries without their reserved bits.
const TABLE_OFFSET: u64 = !0x1ff;
/// Bytes of blocks kept that are named more than once.
const CACHE_BYTES: usize = 32 << 20;
/// Bytes of blocks read at once.
const READ_BYTES: u64 = 4 << 20;

/// A block of stored counts.
#[derive(Clone)]
pub(super) enum Block {
    /// There is no block: all counts are zero.
    Absent,
    /// The table's entry is unaligned or no file offset: the counts are not known.
    Unreadable,
    /// A block of zeroes.
    Zeroes,
    /// The block.
    Loaded(Arc<Loaded>),
}

/// A block's bytes and what is known of them.
pub(super) struct Loaded {
    pub(super) bytes: AlignedBuf,
    /// Counts that are not zero.
    pub(super) used: u64,
    /// The last of them.
    pub(super) last: u64,
}

/// Which counts of a block are as wanted, mostly: are 1.
#[derive(Clone)]
enum Ones {
    Unknown,
    None,
    All,
    Some(Arc<[u64]>),
}

/// The image's own reference counts.
pub(super) struct Stored {
    table: Vec<u64>,
    pub(super) format: RefcountFormat,
    cluster: u64,
    /// Blocks that are named more than once; those read are kept here.
    shared: HashMap<u64, Option<Block>>,
    kept: usize,
    /// So many blocks are named that holes are left out.
    careful: bool,
    ones: Vec<Ones>,
}

impl Stored {
    pub(super) fn new(table: Vec<u64>, format: RefcountFormat, cluster: u64) -> Self {
        let mut places: Vec<u64> = table.iter().map(|raw| raw & TABLE_OFFSET).collect();
        places.sort_unstable();
        let twice = places.windows(2).filter_map(|w| match w {
            [a, b] if a == b && *a != 0 => Some((*a, None)),
            _ => None,
        });
        let shared = twice.collect();
        let named = places.iter().filter(|p| **p != 0).count() as u64;
        let careful = named.saturating_mul(cluster) > 64 << 20;
        Self { table, format, cluster, shared, kept: 0, careful, ones: Vec::new() }
    }

    /// Entries of the table.
    pub(super) fn blocks(&self) -> u64 {
        self.table.len() as u64
    }

    /// The entries of the table that are not zero, with their indexes.
    pub(super) fn entries(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.table.iter().enumerate().filter(|(_, raw)| **raw != 0).map(|(i, raw)| (i as u64, *raw))
    }

    /// Where a block lies as the table has it, whatever is wrong with it; zero when there is none.
    pub(super) fn place(&self, index: u64) -> u64 {
        let raw = usize::try_from(index).ok().and_then(|i| self.table.get(i));
        raw.copied().unwrap_or(0) & TABLE_OFFSET
    }

    /// How many blocks are best read at once.
    pub(super) fn batch(&self) -> u64 {
        (READ_BYTES / self.cluster).clamp(2, 64)
    }

    /// The clusters that a block counts.
    pub(super) fn range(&self, index: u64) -> Range<u64> {
        let per = self.format.entries_per_block();
        let first = index.saturating_mul(per);
        first..first.saturating_add(per)
    }

    /// Some blocks, read at once.
    ///
    /// # Errors
    /// What the storage reported.
    pub(super) async fn read<S: Storage>(
        &mut self,
        reader: Reader<'_, S>,
        indexes: Range<u64>,
    ) -> Result<Vec<Block>> {
        let this = &*self;
        let blocks = join_all(indexes.clone().map(|i| this.read_one(reader, i))).await;
        let blocks: Vec<Block> = blocks.into_iter().collect::<Result<_>>()?;
        for (index, block) in indexes.zip(&blocks) {
            let place = self.place(index);
            let cluster = self.cluster as usize;
            if let Some(kept @ None) = self.shared.get_mut(&place)
                && self.kept + cluster <= CACHE_BYTES
            {
                *kept = Some(block.clone());
                self.kept += if matches!(block, Block::Loaded(_)) { cluster } else { 0 };
            }
        }
        Ok(blocks)
    }

    async fn read_one<S: Storage>(&self, reader: Reader<'_, S>, index: u64) -> Result<Block> {
        let at = self.place(index);
        if at == 0 {
            return Ok(Block::Absent);
        }
        let last = (i64::MAX as u64).saturating_sub(self.cluster);
        if !at.is_multiple_of(self.cluster) || at > last {
            return Ok(Block::Unreadable);
        }
        if let Some(Some(known)) = self.shared.get(&at) {
            return Ok(known.clone());
        }
        let range = at..at + self.cluster;
        if at >= reader.file_len {
            return Ok(Block::Zeroes);
        }
        let bytes = if self.careful {
            match reader.bytes_or_hole(range).await? {
                Some(bytes) => bytes,
                None => return Ok(Block::Zeroes),
            }
        } else {
            reader.bytes(range).await?
        };
        Ok(self.summarise(bytes))
    }

    fn summarise(&self, bytes: AlignedBuf) -> Block {
        let (mut used, mut last) = (0, 0);
        // Empty stretches are common and are skipped word by word.
        for (n, word) in bytes.as_chunks::<8>().0.iter().enumerate() {
            if *word == [0; 8] {
                continue;
            }
            let bits = self.format.bits() as usize;
            let (first, end) = (n * 64 / bits, ((n + 1) * 64).div_ceil(bits));
            for index in first..end {
                if self.format.get(&bytes, index).is_some_and(|v| v != 0) {
                    (used, last) = (used + 1, index as u64);
                }
            }
        }
        if used == 0 {
            Block::Zeroes
        } else {
            Block::Loaded(Arc::new(Loaded { bytes, used, last }))
        }
    }

    /// Learns which counts of the clusters below `end` are `wanted`: one value, or some from 1 on.
    ///
    /// # Errors
    /// What the storage reported.
    pub(super) async fn learn<S: Storage>(
        &mut self,
        reader: Reader<'_, S>,
        end: u64,
        wanted: RangeInclusive<u64>,
    ) -> Result<()> {
        let blocks = self.blocks().min(self.format.blocks_for(end));
        let mut known: HashMap<u64, Ones> = HashMap::new();
        let mut ones = Vec::new();
        let mut next = 0;
        while next < blocks {
            let batch = next..(next + self.batch()).min(blocks);
            for (index, block) in batch.clone().zip(self.read(reader, batch.clone()).await?) {
                let place = self.place(index);
                let twice = self.shared.contains_key(&place);
                let found = match known.get(&place) {
                    Some(found) => found.clone(),
                    None => self.ones_of(&block, &wanted),
                };
                if twice {
                    known.insert(place, found.clone());
                }
                ones.push(found);
            }
            next = batch.end;
        }
        self.ones = ones;
        Ok(())
    }

    fn ones_of(&self, block: &Block, wanted: &RangeInclusive<u64>) -> Ones {
        let loaded = match block {
            Block::Unreadable => return Ones::Unknown,
            Block::Absent | Block::Zeroes => return Ones::None,
            Block::Loaded(loaded) => loaded,
        };
        let entries = self.format.entries_per_block() as usize;
        let mut words = vec![0u64; entries.div_ceil(64)];
        let mut number = 0;
        for index in 0..=loaded.last as usize {
            if self.format.get(&loaded.bytes, index).is_some_and(|n| wanted.contains(&n))
                && let Some(word) = words.get_mut(index / 64)
            {
                *word |= 1 << (index % 64);
                number += 1;
            }
        }
        match number {
            0 => Ones::None,
            n if n == entries => Ones::All,
            _ => Ones::Some(words.into()),
        }
    }

    /// Whether the stored count of a cluster is as was wanted, or `None` when it is not known.
    pub(super) fn is_wanted(&self, cluster: u64) -> Option<bool> {
        let (block, index) = self.format.position(cluster);
        match usize::try_from(block).ok().and_then(|b| self.ones.get(b)) {
            Some(Ones::Unknown) => None,
            Some(Ones::None) | None => Some(false),
            Some(Ones::All) => Some(true),
            Some(Ones::Some(words)) => Some(words.get(index / 64)? >> (index % 64) & 1 != 0),
        }
    }

    /// The stored count of a cluster, or `None` when it isn't known.
    ///
    /// # Errors
    /// What the storage reported.
    pub(super) async fn get<S: Storage>(
        &mut self,
        reader: Reader<'_, S>,
        cluster: u64,
    ) -> Result<Option<u64>> {
        let (index, at) = self.format.position(cluster);
        let block = self.read(reader, index..index.saturating_add(1)).await?.pop();
        Ok(match block {
            None | Some(Block::Absent | Block::Zeroes) => Some(0),
            Some(Block::Unreadable) => None,
            Some(Block::Loaded(loaded)) => self.format.get(&loaded.bytes, at),
        })
    }
}
