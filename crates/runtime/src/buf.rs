//! Memory that I/O runs on: owned aligned buffers, and lists of segments that keep their memory alive.
//!
//! Callers: every crate that reads or writes. An [`IoVec`] may name guest memory, which the guest can
//! change at any moment; so it never hands out references to bytes, it only copies them in and out.

use bedplate_types::{ByteLen, Error, ErrorKind, Result};
use smallvec::SmallVec;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::any::Any;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Arc, LazyLock};

/// Alignment of every [`AlignedBuf`]: enough for direct I/O on any block device.
pub const BUF_ALIGN: usize = 4096;

/// A zeroed buffer on the heap, aligned for direct I/O.
pub struct AlignedBuf {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: the buffer is owned memory without interior sharing, as `Vec<u8>` is.
unsafe impl Send for AlignedBuf {}
// SAFETY: shared access only reads.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// A buffer of `len` zero bytes.
    ///
    /// # Errors
    /// `Limit` when the memory can't be had.
    pub fn zeroed(len: usize) -> Result<Self> {
        if len == 0 {
            return Ok(Self { ptr: NonNull::dangling(), len: 0 });
        }
        let no_memory = || {
            Error::new(ErrorKind::Limit, format!("cannot get {len} bytes of memory for a buffer"))
        };
        let layout = Layout::from_size_align(len, BUF_ALIGN).map_err(|_| no_memory())?;
        // SAFETY: the layout's size is not zero.
        let ptr = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(no_memory)?;
        Ok(Self { ptr, len })
    }

    /// A buffer that holds a copy of `bytes`.
    ///
    /// # Errors
    /// As [`Self::zeroed`].
    pub fn from_slice(bytes: &[u8]) -> Result<Self> {
        let mut buf = Self::zeroed(bytes.len())?;
        buf.copy_from_slice(bytes);
        Ok(buf)
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        if self.len != 0 {
            // SAFETY: made by `alloc_zeroed` with this very layout.
            unsafe {
                dealloc(self.ptr.as_ptr(), Layout::from_size_align_unchecked(self.len, BUF_ALIGN));
            }
        }
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `ptr` is valid for `len` initialised bytes and borrowed with `self`.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl std::fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AlignedBuf({} bytes)", self.len)
    }
}

/// A buffer that several [`IoVec`]s may name while I/O runs on it, and that can be taken back after.
#[derive(Clone)]
pub struct SharedBuf(Arc<AlignedBuf>);

impl SharedBuf {
    /// Shares `buf`.
    pub fn new(buf: AlignedBuf) -> Self {
        Self(Arc::new(buf))
    }

    /// A shared buffer of `len` zero bytes.
    ///
    /// # Errors
    /// As [`AlignedBuf::zeroed`].
    pub fn zeroed(len: usize) -> Result<Self> {
        Ok(Self::new(AlignedBuf::zeroed(len)?))
    }

    /// The whole buffer as one segment.
    pub fn iovec(&self) -> IoVec {
        let seg = Seg { ptr: self.0.ptr.as_ptr(), len: self.0.len };
        let owner: Owner = self.0.clone();
        IoVec::one(seg, Some(owner))
    }

    /// The buffer itself, once no [`IoVec`] names it any more; else a copy of it.
    ///
    /// # Errors
    /// As [`AlignedBuf::zeroed`], when a copy is needed.
    pub fn into_buf(self) -> Result<AlignedBuf> {
        match Arc::try_unwrap(self.0) {
            Ok(buf) => Ok(buf),
            Err(shared) => {
                let mut buf = AlignedBuf::zeroed(shared.len)?;
                // SAFETY: both are valid for `len` bytes; volatile-free copy of memory no I/O writes any more.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        shared.ptr.as_ptr(),
                        buf.as_mut_ptr(),
                        shared.len,
                    );
                }
                Ok(buf)
            }
        }
    }
}

/// What keeps the memory of a segment alive.
pub type Owner = Arc<dyn Any + Send + Sync>;

#[derive(Clone, Copy)]
#[repr(C)]
struct Seg {
    ptr: *mut u8,
    len: usize,
}

/// A list of memory segments for one transfer, with owners that keep the memory valid.
///
/// Cloning and slicing share the memory. The layout of a segment is that of `struct iovec`.
#[derive(Clone, Default)]
pub struct IoVec {
    segs: SmallVec<[Seg; 4]>,
    owners: SmallVec<[Owner; 2]>,
    len: usize,
}

// SAFETY: segments are plain addresses whose owners are Send + Sync; bytes are only copied, never referenced.
unsafe impl Send for IoVec {}
// SAFETY: as above.
unsafe impl Sync for IoVec {}

/// A shared source of zero bytes for writes; mapped read-only in effect, since nothing reads into it.
static ZEROES: LazyLock<Option<SharedBuf>> = LazyLock::new(|| SharedBuf::zeroed(ZEROES_LEN).ok());
const ZEROES_LEN: usize = 1 << 20;

impl IoVec {
    fn one(seg: Seg, owner: Option<Owner>) -> Self {
        let mut v = Self { len: seg.len, ..Self::default() };
        if seg.len != 0 {
            v.segs.push(seg);
            v.owners.extend(owner);
        }
        v
    }

    /// Makes a list from raw segments.
    ///
    /// # Safety
    /// Each `(address, length)` must stay valid for reads and writes for as long as `owner` lives (or, without
    /// an owner, for as long as this list, everything cloned from it, and any I/O on it live).
    pub unsafe fn from_raw(
        segs: impl IntoIterator<Item = (*mut u8, usize)>,
        owner: Option<Owner>,
    ) -> Self {
        let mut v = Self::default();
        for (ptr, len) in segs {
            if len != 0 {
                v.segs.push(Seg { ptr, len });
                v.len = v.len.saturating_add(len);
            }
        }
        v.owners.extend(owner);
        v
    }

    /// A source of `len` zero bytes; it must only be written from, never read into.
    ///
    /// # Errors
    /// `Limit` when the shared zero page can't be had.
    pub fn zeroes(len: usize) -> Result<Self> {
        let shared = ZEROES
            .as_ref()
            .ok_or_else(|| Error::new(ErrorKind::Limit, "cannot get memory for the zero buffer"))?;
        let mut v = Self::default();
        let mut left = len;
        while left > 0 {
            let n = left.min(ZEROES_LEN);
            v.segs.push(Seg { ptr: shared.0.ptr.as_ptr(), len: n });
            left -= n;
        }
        v.len = len;
        let owner: Owner = shared.0.clone();
        v.owners.push(owner);
        Ok(v)
    }

    /// Total bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Total bytes as a [`ByteLen`].
    pub fn byte_len(&self) -> ByteLen {
        ByteLen::from(self.len)
    }

    /// True when there is no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of segments.
    pub fn segments(&self) -> usize {
        self.segs.len()
    }

    /// The segments as `(address, length)`, for submitting I/O.
    pub fn raw(&self) -> impl Iterator<Item = (*mut u8, usize)> + '_ {
        self.segs.iter().map(|s| (s.ptr, s.len))
    }

    /// Pointer to the segments in the layout of `struct iovec`, valid while `self` is neither moved nor changed.
    pub fn as_iovecs(&self) -> (*const libc::iovec, usize) {
        (self.segs.as_ptr().cast(), self.segs.len())
    }

    /// True when every segment's address and length is a multiple of `align`.
    pub fn is_aligned(&self, align: usize) -> bool {
        self.segs
            .iter()
            .all(|s| (s.ptr as usize).is_multiple_of(align) && s.len.is_multiple_of(align))
    }

    /// The part of `len` bytes from `start`; parts beyond the end are cut off.
    #[must_use]
    pub fn slice(&self, start: usize, len: usize) -> Self {
        let mut v = Self { owners: self.owners.clone(), ..Self::default() };
        v.len = self.pieces(start, len, |ptr, len| v.segs.push(Seg { ptr, len }));
        v
    }

    /// Adds the segments of `other` behind these.
    pub fn append(&mut self, other: Self) {
        self.segs.extend(other.segs);
        for owner in other.owners {
            // Requests of one guest share its memory: one reference is enough.
            if self.owners.last().is_none_or(|last| !Arc::ptr_eq(last, &owner)) {
                self.owners.push(owner);
            }
        }
        self.len = self.len.saturating_add(other.len);
    }

    /// Calls `f` with the address and length of each piece of `len` bytes from `start`.
    fn pieces(&self, start: usize, len: usize, mut f: impl FnMut(*mut u8, usize)) -> usize {
        let mut skip = start;
        let mut left = len;
        for s in &self.segs {
            if left == 0 {
                break;
            }
            if skip >= s.len {
                skip -= s.len;
                continue;
            }
            let n = (s.len - skip).min(left);
            // SAFETY: `skip` is below the segment's length.
            f(unsafe { s.ptr.add(skip) }, n);
            left -= n;
            skip = 0;
        }
        len - left
    }

    /// Copies bytes from `start` into `out`; returns how many there were.
    pub fn copy_to(&self, start: usize, out: &mut [u8]) -> usize {
        let mut at = 0;
        let base = out.as_mut_ptr();
        self.pieces(start, out.len(), |ptr, n| {
            // SAFETY: the segment is valid for n bytes (owner), and `out` has room: pieces never exceed its length.
            unsafe { std::ptr::copy(ptr, base.add(at), n) };
            at += n;
        })
    }

    /// Copies `bytes` over the memory from `start`; returns how many fitted.
    pub fn copy_from(&self, start: usize, bytes: &[u8]) -> usize {
        let mut at = 0;
        let base = bytes.as_ptr();
        self.pieces(start, bytes.len(), |ptr, n| {
            // SAFETY: as in `copy_to`, the other way round.
            unsafe { std::ptr::copy(base.add(at), ptr, n) };
            at += n;
        })
    }

    /// Sets `len` bytes from `start` to `byte`.
    pub fn fill(&self, start: usize, len: usize, byte: u8) {
        self.pieces(start, len, |ptr, n| {
            // SAFETY: the segment is valid for n bytes.
            unsafe { std::ptr::write_bytes(ptr, byte, n) };
        });
    }

    /// Copies `len` bytes from `src` (at `src_start`) over this list (at `start`).
    pub fn copy_between(&self, start: usize, src: &Self, src_start: usize, len: usize) -> usize {
        let mut done = 0;
        src.pieces(src_start, len, |from, n| {
            let mut at = 0;
            done += self.pieces(start + done, n, |to, m| {
                // SAFETY: both pieces are valid for m bytes; they may overlap, so `copy` it is.
                unsafe { std::ptr::copy(from.add(at), to, m) };
                at += m;
            });
        });
        done
    }
}

impl std::fmt::Debug for IoVec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "IoVec({} bytes in {} segments)", self.len, self.segs.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(len: usize) -> SharedBuf {
        let mut b = AlignedBuf::zeroed(len).expect("memory");
        for (i, x) in b.iter_mut().enumerate() {
            *x = i as u8;
        }
        SharedBuf::new(b)
    }

    #[test]
    fn slices_cross_segments_and_keep_their_memory_alive() {
        let mut v = filled(10).iovec();
        v.append(filled(10).iovec());
        let s = v.slice(8, 4);
        drop(v);
        let mut out = [0; 4];
        assert_eq!(s.copy_to(0, &mut out), 4);
        assert_eq!(out, [8, 9, 0, 1]);
        assert_eq!(s.segments(), 2);
        assert_eq!(s.slice(3, 100).len(), 1);
    }

    #[test]
    fn copies_stop_at_the_end() {
        let b = SharedBuf::zeroed(4).expect("memory");
        assert_eq!(b.iovec().copy_from(2, &[7, 7, 7]), 2);
        assert_eq!(&b.into_buf().expect("buffer")[..], &[0, 0, 7, 7]);
        let src = filled(6).iovec();
        let dst = SharedBuf::zeroed(6).expect("memory");
        assert_eq!(dst.iovec().copy_between(1, &src, 3, 100), 3);
        assert_eq!(&dst.into_buf().expect("buffer")[..], &[0, 3, 4, 5, 0, 0]);
    }

    #[test]
    fn zeroes_are_longer_than_their_backing_buffer() {
        let z = IoVec::zeroes(ZEROES_LEN * 2 + 512).expect("memory");
        assert_eq!(z.len(), ZEROES_LEN * 2 + 512);
        assert_eq!(z.segments(), 3);
        assert!(z.is_aligned(512));
    }
}
