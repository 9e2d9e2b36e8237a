//! The reference counts that an image stores, read block by block through a bounded cache.
//!
//! Callers: the checker.

use crate::format::RefcountFormat;
use crate::open::read_bytes;
use bedplate_storage::Storage;
use bedplate_types::{HostOffset, Result};
use std::collections::HashMap;
use std::rc::Rc;

/// Refcount table entries without their reserved bits.
const TABLE_OFFSET: u64 = !0x1ff;
/// Bytes of blocks kept.
const CACHE_BYTES: usize = 64 << 20;

/// A block of stored counts.
#[derive(Clone)]
pub(super) enum Block {
    /// There is no block: all counts are zero.
    Absent,
    /// The table's entry is unaligned or no file offset: the counts are not known.
    Unreadable,
    /// The block.
    Loaded(Rc<Vec<u8>>),
}

impl Block {
    /// The count at `index`, or `None` when it isn't known.
    pub(super) fn get(&self, format: RefcountFormat, index: usize) -> Option<u64> {
        match self {
            Self::Absent => Some(0),
            Self::Unreadable => None,
            Self::Loaded(bytes) => format.get(bytes, index),
        }
    }
}

/// The image's own reference counts.
pub(super) struct Stored {
    pub(super) table: Vec<u64>,
    format: RefcountFormat,
    cluster: usize,
    blocks: HashMap<u64, (Block, u64)>,
    clock: u64,
    last: Option<(u64, Block)>,
}

impl Stored {
    pub(super) fn new(table: Vec<u64>, format: RefcountFormat, cluster: usize) -> Self {
        Self { table, format, cluster, blocks: HashMap::new(), clock: 0, last: None }
    }

    /// The block's place as the table has it, whatever is wrong with it; zero when there is none.
    fn entry(&self, block: u64) -> u64 {
        let raw = usize::try_from(block).ok().and_then(|i| self.table.get(i));
        raw.copied().unwrap_or(0) & TABLE_OFFSET
    }

    /// Block `index` of the table.
    ///
    /// # Errors
    /// What the storage reported.
    pub(super) async fn block<S: Storage>(&mut self, storage: &S, index: u64) -> Result<Block> {
        let at = self.entry(index);
        if at == 0 {
            return Ok(Block::Absent);
        }
        let last = (i64::MAX as u64).saturating_sub(self.cluster as u64);
        if !at.is_multiple_of(self.cluster as u64) || at > last {
            return Ok(Block::Unreadable);
        }
        if let Some((known, block)) = &self.last
            && *known == index
        {
            return Ok(block.clone());
        }
        self.clock += 1;
        let clock = self.clock;
        let block = match self.blocks.get_mut(&index) {
            Some((block, used)) => {
                *used = clock;
                block.clone()
            }
            None => {
                let bytes = read_bytes(storage, HostOffset::new(at), self.cluster).await?;
                let block = Block::Loaded(Rc::new(bytes));
                self.make_room();
                self.blocks.insert(index, (block.clone(), clock));
                block
            }
        };
        self.last = Some((index, block.clone()));
        Ok(block)
    }

    /// Drops the older half when the cache is full; scanning is rare because half of it goes at once.
    fn make_room(&mut self) {
        let room = (CACHE_BYTES / self.cluster).max(8);
        if self.blocks.len() < room {
            return;
        }
        let mut ages: Vec<u64> = self.blocks.values().map(|(_, used)| *used).collect();
        let middle = ages.len() / 2;
        let (_, median, _) = ages.select_nth_unstable(middle);
        let limit = *median;
        self.blocks.retain(|_, (_, used)| *used > limit);
    }

    /// The stored count of a cluster, or `None` when it isn't known.
    ///
    /// # Errors
    /// What the storage reported.
    pub(super) async fn get<S: Storage>(
        &mut self,
        storage: &S,
        cluster: u64,
    ) -> Result<Option<u64>> {
        let (block, index) = self.format.position(cluster);
        Ok(self.block(storage, block).await?.get(self.format, index))
    }
}
