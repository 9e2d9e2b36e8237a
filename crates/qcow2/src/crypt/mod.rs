//! Encryption of guest data: what lies between an image's data and its file.
//!
//! Callers: opening (`unlock`), [`crate::data`], and `create` in the crate `image` ([`new_luks_area`]). Only the data of
//! clusters is encrypted, never metadata, and compressed clusters are not (as QEMU has it). The unit is a sector of 512
//! bytes, whose number is that of its place in the file; so data that moves is encrypted anew. Own buffers are encrypted
//! and decrypted, never memory of the guest, which could change or see them meanwhile.

mod keys;
mod xts;

use crate::format::{
    Geometry, Header, LUKS_HEADER_BYTES, LuksArea, LuksHeader, LuksSuite, luks_place,
};
use crate::open::read_bytes;
use bedplate_runtime::buf::{AlignedBuf, IoVec, SharedBuf};
use bedplate_runtime::sync::RangeLock;
use bedplate_storage::Storage;
use bedplate_types::{ByteLen, Error, ErrorKind, HostOffset, Result, limits};
use std::fmt;
use std::io::Read;
use std::sync::Arc;
use std::time::Duration;
use xts::{SECTOR, Xts};
use zeroize::Zeroizing;

/// The value of the header's encryption field that means LUKS.
pub(crate) const CRYPT_LUKS: u32 = 2;
/// Bytes that are encrypted or decrypted in one buffer.
const PIECE: u64 = 4 << 20;

/// A passphrase. Its memory is overwritten when the last copy goes.
#[derive(Clone, PartialEq, Eq)]
pub struct Passphrase(Arc<Zeroizing<Vec<u8>>>);

impl fmt::Debug for Passphrase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Passphrase")
    }
}

impl Passphrase {
    /// A passphrase of these bytes, as they are.
    ///
    /// # Errors
    /// `InvalidInput` when there is no byte, or more than [`limits::MAX_PASSPHRASE_BYTES`].
    pub fn new(bytes: Vec<u8>) -> Result<Self> {
        let bytes = Zeroizing::new(bytes);
        if bytes.is_empty() || bytes.len() > limits::MAX_PASSPHRASE_BYTES {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!(
                    "a passphrase has 1 to {} bytes, not {}",
                    limits::MAX_PASSPHRASE_BYTES,
                    bytes.len()
                ),
            ));
        }
        Ok(Self(Arc::new(bytes)))
    }

    /// The passphrase that `from` gives up to its end.
    ///
    /// # Errors
    /// As [`Self::new`], or what reading reports.
    pub fn read(from: &mut impl Read) -> Result<Self> {
        let most = limits::MAX_PASSPHRASE_BYTES;
        // With all its room from the start it is never moved, which would leave copies behind.
        let mut bytes = Zeroizing::new(Vec::with_capacity(2 * most));
        from.take(most as u64 + 1)
            .read_to_end(&mut bytes)
            .map_err(|e| Error::io("cannot read the passphrase", e))?;
        Self::new(std::mem::take(&mut *bytes))
    }
}

/// Whether and how the data of an open image is encrypted.
pub(crate) enum Protection {
    /// Not at all.
    None,
    /// It is, and the image was opened for its metadata alone.
    Locked,
    /// It is, with this.
    Cipher(Box<Cipher>),
}

/// The cipher of an open image.
pub(crate) struct Cipher {
    xts: Xts,
    /// Lock order: engine 8, see `docs/locks.md`. Sectors being written: in part (exclusive), which reads them first, or
    /// as a whole (shared).
    sectors: RangeLock,
}

/// Makes the encryption of a new image: its header with one key, under `passphrase`.
///
/// `time` is how long the derivation of that key shall take on this host.
///
/// # Errors
/// When the system gives no random numbers.
pub fn new_luks_area(
    suite: LuksSuite,
    time: Duration,
    passphrase: &Passphrase,
) -> Result<LuksArea> {
    let (header, material) = keys::new_header(suite, time, &passphrase.0)?;
    let mut bytes = header.encode();
    if let Some(slot) = header.slots.first() {
        bytes.resize(usize::try_from(slot.offset).unwrap_or(bytes.len()), 0);
    }
    bytes.extend_from_slice(&material);
    Ok(LuksArea { bytes, len: ByteLen::new(header.payload_offset) })
}

/// Reads the encryption's header of an image whose header says that it has one.
///
/// # Errors
/// `BadImage` or `Unsupported` when it is wrong, or what the storage reports.
pub async fn read_luks_header<S: Storage>(storage: &S, header: &Header) -> Result<LuksHeader> {
    let (at, _) = luks_place(header, header.geometry()?)?;
    LuksHeader::parse(&read_bytes(storage, at, LUKS_HEADER_BYTES).await?)
}

/// Finds the key of an encrypted image by these passphrases, each tried on each of its key slots.
///
/// # Errors
/// `Denied` when no passphrase is the right one; `BadImage`, `Unsupported` or `Limit` for a header that can't be used.
pub(crate) async fn unlock<S: Storage>(
    storage: &S,
    header: &Header,
    geometry: Geometry,
    passphrases: &[Passphrase],
) -> Result<Box<Cipher>> {
    let luks = read_luks_header(storage, header).await?;
    let (at, room) = luks_place(header, geometry)?;
    let suite = luks.suite()?;
    luks.check_iterations(suite)?;
    let denied = |text: &str| Err(Error::new(ErrorKind::Denied, text));
    if passphrases.is_empty() {
        return denied(
            "the image is encrypted; give its passphrase in a file with --key-file, or on an open descriptor with \
             --key-fd",
        );
    }
    for slot in luks.slots.iter().filter(|slot| slot.active) {
        let len = luks.material(slot, room)?;
        let place = at.checked_add(ByteLen::new(slot.offset)).unwrap_or(at);
        let material = read_bytes(storage, place, len.to_usize().unwrap_or(0)).await?;
        for passphrase in passphrases {
            if let Some(key) = keys::open_slot(&luks, suite, slot, &material, &passphrase.0)? {
                let xts = Xts::new(&key, suite.iv)?;
                return Ok(Box::new(Cipher { xts, sectors: RangeLock::new() }));
            }
        }
    }
    denied(
        "the passphrase is not that of any of the image's keys; every byte of the file or descriptor counts, a newline \
         at its end too",
    )
}

/// The sectors that a range touches, as bytes.
fn touched(at: HostOffset, len: usize) -> Result<(u64, u64)> {
    let start = at.get() - at.get() % SECTOR as u64;
    let end = at
        .get()
        .checked_add(len as u64)
        .and_then(|end| end.checked_next_multiple_of(SECTOR as u64));
    match end {
        Some(end) => Ok((start, end)),
        None => {
            Err(Error::new(ErrorKind::OutOfRange, "an access to encrypted data leaves the file"))
        }
    }
}

/// Copies `from` to place `at` of `bytes`, as far as it fits.
fn put(bytes: &mut [u8], at: usize, from: &[u8]) {
    for (to, from) in bytes.get_mut(at..).unwrap_or_default().iter_mut().zip(from) {
        *to = *from;
    }
}

impl Cipher {
    fn decrypt(&self, at: u64, bytes: &mut [u8]) {
        self.xts.decrypt(at / SECTOR as u64, bytes);
    }

    /// The plain content of whole sectors.
    async fn sectors<S: Storage>(&self, storage: &S, start: u64, end: u64) -> Result<AlignedBuf> {
        let buf = SharedBuf::zeroed((end - start) as usize)?;
        storage.read(HostOffset::new(start), buf.iovec()).await?;
        let mut bytes = buf.into_buf()?;
        self.decrypt(start, &mut bytes);
        Ok(bytes)
    }

    /// Fills `buf` with the plain content of `at`.
    ///
    /// # Errors
    /// What the storage reports.
    pub(crate) async fn read<S: Storage>(
        &self,
        storage: &S,
        at: HostOffset,
        buf: &IoVec,
    ) -> Result<()> {
        let (start, end) = touched(at, buf.len())?;
        let mut from = start;
        while from < end {
            let to = end.min(from.saturating_add(PIECE));
            let bytes = self.sectors(storage, from, to).await?;
            let skip = at.get().saturating_sub(from) as usize;
            let done = from.saturating_sub(at.get()) as usize;
            buf.copy_from(done, bytes.get(skip..).unwrap_or_default());
            from = to;
        }
        Ok(())
    }

    /// Writes `buf` to `at`, encrypted. Sectors that it covers in part keep the rest of their content.
    ///
    /// # Errors
    /// What the storage reports.
    pub(crate) async fn write<S: Storage>(
        &self,
        storage: &S,
        at: HostOffset,
        buf: &IoVec,
    ) -> Result<()> {
        let (start, end) = touched(at, buf.len())?;
        let stop = at.get() + buf.len() as u64;
        let (head, tail) = (start != at.get(), end != stop);
        let _sectors = if head || tail {
            self.sectors.exclusive(start, end - start).await
        } else {
            self.sectors.shared(start, end - start).await
        };
        let mut from = start;
        while from < end {
            let to = end.min(from.saturating_add(PIECE));
            let mut bytes = AlignedBuf::zeroed((to - from) as usize)?;
            if head && from == start {
                let old = self.sectors(storage, from, from + SECTOR as u64).await?;
                put(&mut bytes, 0, &old);
            }
            // Where both ends lie in one sector, it was read already.
            if tail && to == end && !(head && end - start == SECTOR as u64) {
                let last = to - SECTOR as u64;
                let old = self.sectors(storage, last, to).await?;
                put(&mut bytes, (last - from) as usize, &old);
            }
            let skip = at.get().saturating_sub(from) as usize;
            let done = from.saturating_sub(at.get()) as usize;
            let until = (stop.min(to) - from) as usize;
            buf.copy_to(done, bytes.get_mut(skip..until).unwrap_or_default());
            self.xts.encrypt(from / SECTOR as u64, &mut bytes);
            storage.write(HostOffset::new(from), SharedBuf::new(bytes).iovec()).await?;
            from = to;
        }
        Ok(())
    }
}
