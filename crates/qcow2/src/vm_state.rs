//! The space for the state of a VM, behind the disk's end: QEMU's `savevm` keeps memory there before a snapshot takes it
//! over.
//!
//! Caller: the command line of qemu-io. It is mapped by the disk's own L1 table, which grows for it as one new generation
//! of the metadata ([`crate::generation`]); apart from that it is read and written as the disk is. A change of the disk's
//! size drops it.

use crate::below::Nothing;
use crate::format::ENTRY_BYTES;
use crate::generation::pad_table;
use crate::image::Qcow2;
use crate::mapping::Mapping;
use bedplate_runtime::buf::IoVec;
use bedplate_storage::Storage;
use bedplate_types::{ByteLen, Error, ErrorKind, GuestOffset, Result, limits};

impl<S: Storage> Qcow2<S> {
    /// Where the space for the state of a VM begins, as an address behind the disk's end: what the first L2 table
    /// behind it would map.
    pub fn vm_state_offset(&self) -> GuestOffset {
        let span = self.tables.geo.l2_coverage();
        GuestOffset::new(self.size().get().div_ceil(span).saturating_mul(span))
    }

    /// Fills `buf` from `at` bytes into the space for VM state; what was never written is zero.
    ///
    /// # Errors
    /// `Limit` beyond what an L1 table can map, or what the storage reports.
    pub async fn read_vm_state(&self, at: u64, buf: IoVec) -> Result<()> {
        let (start, _) = self.vm_state_range(at, buf.byte_len())?;
        let _inside = self.enter().await;
        let mut done = 0;
        while done < buf.len() {
            let here = GuestOffset::new(start + done as u64);
            let rest = buf.slice(done, buf.len() - done);
            done += match self.map(here, rest.byte_len()).await? {
                Mapping::Unallocated { len } | Mapping::Zero { len, .. } => {
                    rest.fill(0, len.get() as usize, 0);
                    len
                }
                Mapping::Data { host, len, .. } => {
                    self.read_data(host, rest.slice(0, len.get() as usize)).await?;
                    len
                }
                Mapping::Compressed { cluster, within, len } => {
                    let part = rest.slice(0, len.get() as usize);
                    self.read_compressed(&cluster, within, &part).await?;
                    len
                }
            }
            .get() as usize;
        }
        Ok(())
    }

    /// Writes `buf` at `at` bytes into the space for VM state. The first write there must not meet other requests.
    ///
    /// # Errors
    /// `Limit` beyond what an L1 table can map, `Unsupported` with an external data file, `ReadOnly`, `NoSpace`, or what the storage reports.
    pub async fn write_vm_state(&self, at: u64, buf: IoVec) -> Result<()> {
        self.check_writable()?;
        self.refuse_data_file("VM state")?;
        let (start, entries) = self.vm_state_range(at, buf.byte_len())?;
        if entries > self.header().l1_size {
            self.grow_l1(entries).await?;
        }
        let _inside = self.enter().await;
        let write = vec![(GuestOffset::new(start), buf)];
        self.write_inside(&Nothing, write).await.pop().unwrap_or(Ok(()))
    }

    /// Where a range of the space for VM state begins, and how many L1 entries it takes to map it.
    fn vm_state_range(&self, at: u64, len: ByteLen) -> Result<(u64, u32)> {
        let start = self.vm_state_offset().get().checked_add(at);
        let end = start.and_then(|start| start.checked_add(len.get()));
        let entries = end.map(|end| self.tables.geo.l1_entries(ByteLen::new(end)));
        match (start, entries) {
            (Some(start), Some(entries)) if entries <= limits::MAX_L1_BYTES / ENTRY_BYTES => {
                Ok((start, entries as u32))
            }
            _ => Err(Error::new(
                ErrorKind::Limit,
                format!(
                    "the state of a VM can't have {} bytes at {at} in image '{}': its L1 table would become too large",
                    len.get(),
                    self.storage.name()
                ),
            )),
        }
    }

    async fn grow_l1(&self, entries: u32) -> Result<()> {
        let _still = self.hold_still().await;
        let header = self.header();
        if header.l1_size >= entries {
            return Ok(());
        }
        self.next_generation(async |generation| {
            let mut l1 = generation.read_l1(header.l1_offset, header.l1_size).await?;
            l1.resize(entries as usize, 0);
            let bytes = l1.len() as u64 * ENTRY_BYTES;
            let at = generation.reserve(bytes).await?;
            let room = bytes.next_multiple_of(self.tables.cluster());
            self.write_all(vec![(at, pad_table(&l1, room))]).await?;
            generation.release(header.l1_offset, u64::from(header.l1_size) * ENTRY_BYTES).await?;
            let change = move |h: &mut crate::format::Header| {
                h.l1_offset = at;
                h.l1_size = entries;
            };
            Ok(((), change))
        })
        .await
    }
}
