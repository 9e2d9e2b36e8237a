//! `Disk` as a device.

use crate::device::{Device, Run};
use bedplate_disk::Disk;
use bedplate_runtime::buf::IoVec;
use bedplate_storage::{Storage, ZeroMode};
use bedplate_types::{ByteLen, GuestOffset, Result};

impl<S: Storage> Device for Disk<S> {
    fn size(&self) -> u64 {
        Disk::size(self).get()
    }

    fn read_only(&self) -> bool {
        Disk::read_only(self)
    }

    fn align(&self) -> u32 {
        self.limits().align
    }

    async fn read(&self, at: GuestOffset, buf: IoVec) -> Result<()> {
        Disk::read(self, at, buf).await
    }

    async fn write(&self, at: GuestOffset, buf: IoVec, fua: bool) -> Result<()> {
        Disk::write(self, at, buf, fua).await
    }

    async fn write_batch(&self, writes: Vec<(GuestOffset, IoVec)>) -> Vec<Result<()>> {
        Disk::write_batch(self, writes).await
    }

    async fn flush(&self) -> Result<()> {
        Disk::flush(self).await
    }

    async fn discard(&self, at: GuestOffset, len: ByteLen) -> Result<()> {
        Disk::discard(self, at, len).await
    }

    async fn write_zeroes(&self, at: GuestOffset, len: ByteLen, mode: ZeroMode) -> Result<()> {
        Disk::write_zeroes(self, at, len, mode).await
    }

    async fn block_status(&self, at: GuestOffset, len: ByteLen, max: usize) -> Result<Vec<Run>> {
        let found = Disk::block_status(self, at, len, max).await?;
        let run =
            |s: &bedplate_disk::BlockStatus| Run { len: s.len.get(), hole: s.hole, zero: s.zero };
        Ok(found.iter().map(run).collect())
    }
}
