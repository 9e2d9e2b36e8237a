//! A switch, for tests only, that breaks one ordering rule: the crash tests must then fail.

use std::sync::atomic::{AtomicU8, Ordering};

/// A rule of the on-disk order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum OrderRule {
    /// I1: refcounts are durable before the mappings that they cover.
    RefcountsFirst = 1,
    /// I2: data is durable before the mappings that show it.
    DataFirst = 2,
    /// I3: freed space is not used again before its removal is durable.
    FreeLater = 4,
    /// I4: a flush ends only when the mappings are durable.
    FlushWaits = 8,
    /// I6: a new generation of the metadata is durable before the header names it.
    GenerationFirst = 16,
    /// I11: what is only in memory stays in the journal until it is in the file.
    JournalLasts = 32,
}

/// The rules that are switched off; none, but in tests.
#[derive(Debug, Default)]
pub struct OrderFaults(AtomicU8);

impl OrderFaults {
    /// Stops following `rule`.
    pub fn break_rule(&self, rule: OrderRule) {
        self.0.fetch_or(rule as u8, Ordering::Relaxed);
    }

    /// True while `rule` is followed.
    pub(crate) fn keeps(&self, rule: OrderRule) -> bool {
        self.0.load(Ordering::Relaxed) & rule as u8 == 0
    }
}
