//! Two files on one medium, so that a power cut meets both: an image and its data file.
//!
//! Callers: tests of engines that keep two files. The first file has room for a number of bytes; its length lies in the sector
//! behind them, so the length arrives on the medium, or not, as other writes do. The second file is what follows. Contents,
//! history, faults and holds are those of the whole.

use crate::{Change, Event, OpKind, SECTOR, SimStorage};
use bedplate_storage::Storage;
use bedplate_types::{Error, Result};
use std::ops::Range;

/// No space left on device, as Linux numbers it.
const ENOSPC: i32 = 28;

/// The part of the contents that a storage is a handle on.
#[derive(Clone, Copy)]
pub(crate) struct Window {
    /// Its first byte.
    pub(crate) start: u64,
    /// Where a file whose length lies behind it must end.
    pub(crate) room: Option<u64>,
}

impl Window {
    /// All of it.
    pub(crate) const WHOLE: Self = Self { start: 0, room: None };

    /// What a sync makes durable.
    pub(crate) fn synced(self) -> Range<u64> {
        self.start..self.room.map_or(u64::MAX, |room| room + SECTOR)
    }
}

impl SimStorage {
    /// Bytes between the room of the first file and the second file.
    pub const BETWEEN: u64 = 4096;

    /// Two files: the first has room for `room` bytes, a multiple of 4096, behind which its length lies as a big-endian number;
    /// the second begins [`Self::BETWEEN`] bytes later. A sync makes durable what lies in its own file.
    pub fn split(&self, room: u64) -> (Self, Self) {
        let first = Window { start: 0, room: Some(room) };
        (self.part(first), self.part(Window { start: room + Self::BETWEEN, room: None }))
    }

    /// The length of a file that lies in `room` bytes.
    pub(crate) fn stored_len(&self, room: u64) -> u64 {
        let mut word = [0; 8];
        self.lock().ledger.visible().read(room, &mut word);
        u64::from_be_bytes(word).min(room)
    }

    fn len_change(room: u64, len: u64) -> Change {
        let mut sector = vec![0; SECTOR as usize];
        sector[..8].copy_from_slice(&len.to_be_bytes());
        Change::Write { at: room, data: sector.into() }
    }

    /// Sets the length of a file that lies in `room` bytes; what is cut off is gone before the length changes.
    pub(crate) async fn set_stored_len(&self, room: u64, len: u64, kind: OpKind) -> Result<()> {
        if len > room {
            let name = self.name();
            return Err(Error::errno(format!("cannot grow '{name}' to {len} bytes"), ENOSPC));
        }
        let old = self.len().get();
        if len >= old {
            let (touched, change) = (room..room + SECTOR, Self::len_change(room, len));
            return self.run(kind, touched, Some(change), None).await.map(drop);
        }
        let cut = len..old;
        let fill = Change::Fill { at: len, len: old - len, byte: 0, grow: false };
        self.run(kind, cut.clone(), Some(fill), None).await?;
        // No file system shows what was cut off once it has the new length.
        let mut state = self.lock();
        let id = state.new_id();
        state.event(Event::SyncStart { id, range: cut });
        state.event(Event::SyncEnd { id, ok: true });
        let id = state.new_id();
        state.event(Event::Start { id, change: Self::len_change(room, len) });
        state.event(Event::Apply { id, only: None });
        state.event(Event::End { id, ok: true });
        Ok(())
    }

    /// A write to a file that lies in `room` bytes has ended at `end`.
    pub(crate) async fn extend_stored(&self, room: u64, end: u64, kind: OpKind) -> Result<()> {
        if end <= self.len().get() {
            return Ok(());
        }
        self.set_stored_len(room, end, kind).await
    }

    /// Bytes of `range` that lie before the end of the file, where it has one.
    pub(crate) fn inside(&self, range: &Range<u64>) -> Option<u64> {
        let end = self.window.room.map(|_| self.len().get())?;
        (end < range.end).then(|| end.saturating_sub(range.start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::block_on;
    use crate::{Image, SimOptions};
    use bedplate_runtime::buf::{AlignedBuf, SharedBuf};
    use bedplate_types::{ByteLen, HostOffset};

    fn write(file: &SimStorage, at: u64, byte: u8) {
        let buf = AlignedBuf::from_slice(&[byte; 512]).expect("memory");
        let buf = SharedBuf::new(buf).iovec();
        block_on(file.write(HostOffset::new(at), buf)).expect("space");
    }

    fn first(file: &SimStorage, at: u64) -> u8 {
        let buf = SharedBuf::zeroed(512).expect("memory").iovec();
        block_on(file.read(HostOffset::new(at), buf.clone())).expect("it can be read");
        let mut out = [0; 512];
        buf.copy_to(0, &mut out);
        out[0]
    }

    #[test]
    fn two_files_grow_and_shrink_on_their_own() {
        let whole = SimStorage::from_image(Image::new(16384), SimOptions::seeded(1));
        let (one, two) = whole.split(8192);
        assert_eq!((one.len().get(), two.len().get()), (0, 16384 - 8192 - 4096));
        write(&one, 512, 7);
        write(&two, 8192, 8);
        assert_eq!((one.len().get(), two.len().get()), (1024, 8704));
        block_on(one.set_len(ByteLen::new(600))).expect("it can be cut");
        block_on(one.grow(ByteLen::new(4096))).expect("there is room");
        assert_eq!((one.len().get(), first(&one, 512), first(&two, 8192)), (4096, 7, 8));
        block_on(one.set_len(ByteLen::new(512))).expect("it can be cut");
        assert_eq!(first(&one, 512), 0);
        assert!(block_on(one.grow(ByteLen::new(8193))).is_err());
    }

    #[test]
    fn a_power_cut_leaves_the_old_length_or_the_new_one_and_never_what_was_cut_off() {
        let whole = SimStorage::from_image(Image::new(16384), SimOptions::seeded(1));
        let (one, _) = whole.split(8192);
        write(&one, 512, 7);
        block_on(one.sync()).expect("a sync");
        block_on(one.set_len(ByteLen::new(512))).expect("it can be cut");
        let mut lengths = Vec::new();
        for state in whole.crash_point().states(1, 20) {
            let after = SimStorage::from_image(state.image.clone(), SimOptions::default());
            let (one, _) = after.split(8192);
            lengths.push(one.len().get());
            block_on(one.grow(ByteLen::new(4096))).expect("there is room");
            assert_eq!(first(&one, 512), 0);
        }
        lengths.sort_unstable();
        lengths.dedup();
        assert_eq!(lengths, [512, 1024]);
    }
}
