//! Starting over from what the file holds, after its metadata was replaced as a whole.
//!
//! Caller: [`crate::generation`]. No lease is out and nothing is on its way to being free then.

use super::{Found, FreeMap, Space};
use std::sync::PoisonError;

impl Space {
    /// Takes over what was found in the file; all else that was known is forgotten.
    pub(crate) fn reset(&self, found: Found) {
        let end = self.geo.clusters(found.file_len).max(1);
        let mut state = self.state();
        state.table = found.table;
        state.table_at = found.table_at;
        state.table_clusters = found.table_clusters;
        state.blocks.clear();
        state.dirty.clear();
        state.drops += 1;
        state.free = FreeMap::default();
        state.scan = 0;
        state.scan_end = end;
        state.prepared = end;
        state.packing = None;
        self.set_end(&mut state, end);
        drop(state);
        *self.metadata.write().unwrap_or_else(PoisonError::into_inner) = found.metadata;
    }

    /// True when two structures of the image lie in one cluster, so that a change of one damages the other.
    pub(crate) fn has_contested(&self) -> bool {
        !self.contested.is_empty()
    }
}
