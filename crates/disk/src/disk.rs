//! The disk itself: its limits, and the requests that may wait.

use crate::chain::{Chain, Under, sector_end};
use crate::layer::Layer;
use bedplate_qcow2::BitmapView;
use bedplate_qcow2::Qcow2;
use bedplate_runtime::buf::IoVec;
use bedplate_runtime::sync::PinGuard;
use bedplate_storage::{Storage, ZeroMode, take_space};
use bedplate_types::{
    ByteLen, CacheMode, Error, ErrorKind, GuestOffset, GuestRange, HostOffset, Preallocation,
    Result,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What requests to a disk should look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskLimits {
    /// Requests aligned to this many bytes need no read-modify-write.
    pub align: u32,
    /// Memory aligned to this many bytes needs no copy.
    pub mem_align: u32,
    /// The physical block in bytes.
    pub physical_block: u32,
    /// Discards of this many bytes, aligned to it, free space.
    pub discard_align: u32,
}

/// A virtual disk, used through an `Arc` by any number of threads.
pub struct Disk<S: Storage> {
    chain: Arc<Chain<S>>,
    under: Under<S>,
    name: String,
    /// In bytes.
    size: AtomicU64,
    read_only: bool,
    cache: CacheMode,
}

impl<S: Storage> Disk<S> {
    /// A disk over `layers`, top first. It is read-only when asked, or when its top layer is.
    ///
    /// # Errors
    /// `InvalidInput` without a layer.
    pub fn new(
        name: impl Into<String>,
        layers: Vec<Layer<S>>,
        read_only: bool,
        cache: CacheMode,
    ) -> Result<Self> {
        let Some(top) = layers.first() else {
            return Err(Error::new(ErrorKind::InvalidInput, "a disk needs at least one layer"));
        };
        let size = top.size();
        let read_only = read_only || top.read_only();
        let chain = Arc::new(Chain { layers });
        let under = Under(chain.clone());
        Ok(Self {
            chain,
            under,
            name: name.into(),
            size: AtomicU64::new(size.get()),
            read_only,
            cache,
        })
    }

    /// The disk's name in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The size in bytes. Requests may reach the end of the last 512-byte sector that it starts.
    pub fn size(&self) -> ByteLen {
        ByteLen::new(self.size.load(Ordering::Acquire))
    }

    /// Changes the disk's size: growth reads as zeroes, and its space is taken as `fill` says. One resize at a time.
    /// Requests may be under way, but on a raw disk none beyond a smaller new end.
    ///
    /// # Errors
    /// `ReadOnly`, `InvalidInput` for a size that can't be or for `fill` when the disk does not grow, `Unsupported`
    /// for what can't change its size, `NoSpace`, or what else the storage reports. The disk keeps its size then.
    pub async fn resize(&self, size: ByteLen, fill: Preallocation) -> Result<()> {
        self.check_write(GuestOffset::ZERO, ByteLen::ZERO)?;
        match self.top() {
            Some(Layer::Qcow2(image)) => image.resize(&self.under, size, fill).await?,
            Some(Layer::Raw(storage)) => resize_raw(storage.as_ref(), size, fill).await?,
            _ => {
                let text = format!("disk '{}' can't change its size", self.name);
                return Err(Error::new(ErrorKind::Unsupported, text));
            }
        }
        self.size.store(size.get(), Ordering::Release);
        Ok(())
    }

    /// True when every change is refused.
    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// True when completed writes are volatile until a flush.
    pub fn write_cache(&self) -> bool {
        self.cache.write_cache()
    }

    /// What the persistent bitmap `name` of the top image says.
    ///
    /// # Errors
    /// `NotFound` when there is none, `Unsupported` for one that can't be trusted and for disks that can have none, or what
    /// reading it gives.
    pub async fn bitmap(&self, name: &str) -> Result<BitmapView> {
        match self.top() {
            Some(Layer::Qcow2(image)) => image.bitmap(name.as_bytes()).await,
            _ => {
                let text = format!("disk '{}' can't have persistent bitmaps; qcow2 can", self.name);
                Err(Error::new(ErrorKind::Unsupported, text))
            }
        }
    }

    /// Number of layers.
    pub fn depth(&self) -> usize {
        self.chain.layers.len()
    }

    /// What requests should look like.
    pub fn limits(&self) -> DiskLimits {
        let (cluster, storage) = match self.top() {
            Some(Layer::Qcow2(image)) => {
                (image.cluster_size().get() as u32, Some(image.data_storage()))
            }
            Some(layer) => (512, layer.storage()),
            None => (512, None),
        };
        match storage.map(Storage::limits) {
            Some(l) => DiskLimits {
                align: l.align.max(1),
                mem_align: l.mem_align.max(1),
                physical_block: l.physical_block.max(512),
                discard_align: l.discard_align.max(cluster),
            },
            None => DiskLimits { align: 1, mem_align: 1, physical_block: 512, discard_align: 512 },
        }
    }

    /// The file or device under the top layer.
    pub fn storage(&self) -> Option<&S> {
        self.top()?.storage()
    }

    /// The top image, where it is a qcow2 image.
    pub fn qcow2(&self) -> Option<&Qcow2<S>> {
        match self.top() {
            Some(Layer::Qcow2(image)) => Some(image),
            _ => None,
        }
    }

    pub(crate) fn top(&self) -> Option<&Layer<S>> {
        self.chain.layers.first()
    }

    pub(crate) fn chain(&self) -> &Chain<S> {
        &self.chain
    }

    /// Enters the top layer to read it: mapped space stays in place until the guard is dropped.
    pub(crate) async fn enter(&self) -> Option<PinGuard<'_>> {
        match self.top() {
            Some(Layer::Qcow2(image)) => Some(image.enter().await),
            _ => None,
        }
    }

    /// Refuses a range that leaves the disk.
    pub(crate) fn check(&self, at: GuestOffset, len: ByteLen) -> Result<()> {
        match GuestRange::new(at, len) {
            Some(range) if range.end().get() <= sector_end(self.size()).get() => Ok(()),
            _ => Err(Error::new(
                ErrorKind::OutOfRange,
                format!(
                    "a request of {} bytes at {} lies beyond the end of disk '{}' ({} bytes)",
                    len.get(),
                    at.get(),
                    self.name,
                    self.size().get()
                ),
            )),
        }
    }

    fn check_write(&self, at: GuestOffset, len: ByteLen) -> Result<()> {
        if self.read_only {
            return Err(Error::new(
                ErrorKind::ReadOnly,
                format!("disk '{}' is read-only", self.name),
            ));
        }
        self.check(at, len)
    }

    /// Fills `buf` from `at`.
    ///
    /// # Errors
    /// `OutOfRange`, or what the storage reports.
    pub async fn read(&self, at: GuestOffset, buf: IoVec) -> Result<()> {
        let _inside = self.enter().await;
        self.check(at, buf.byte_len())?;
        self.chain.read(0, at, buf).await
    }

    /// Writes `buf` at `at`; with `fua` it is durable when this returns.
    ///
    /// # Errors
    /// `OutOfRange`, `ReadOnly`, `NoSpace`, `Poisoned`, or what the storage reports.
    pub async fn write(&self, at: GuestOffset, buf: IoVec, fua: bool) -> Result<()> {
        match self.write_batch(vec![(at, buf)]).await.pop() {
            Some(result) => result?,
            None => return Ok(()),
        }
        if fua && self.write_cache() { self.flush().await } else { Ok(()) }
    }

    /// Writes several requests that are under way at once; they are planned together, so that neighbours are
    /// placed together. The results are in the order of the requests.
    pub async fn write_batch(&self, writes: Vec<(GuestOffset, IoVec)>) -> Vec<Result<()>> {
        let mut results: Vec<Result<()>> =
            writes.iter().map(|(at, buf)| self.check_write(*at, buf.byte_len())).collect();
        let good = results.iter().map(Result::is_ok).collect::<Vec<_>>();
        let mut accepted = writes.into_iter().zip(&good).filter(|(_, ok)| **ok).map(|(w, _)| w);
        let done: Vec<Result<()>> = match self.top() {
            Some(Layer::Raw(storage)) => {
                let all = accepted.map(|(at, buf)| storage.write(HostOffset::new(at.get()), buf));
                futures_util::future::join_all(all).await
            }
            Some(Layer::Qcow2(image)) => {
                let mut done = image.write_batch(&self.under, accepted.collect()).await;
                if !self.write_cache()
                    && let Err(e) = image.flush().await
                {
                    done.iter_mut().filter(|r| r.is_ok()).for_each(|r| *r = Err(e.clone()));
                }
                done
            }
            _ => accepted.by_ref().map(|_| Ok(())).collect(),
        };
        let places = good.iter().enumerate().filter(|(_, ok)| **ok).map(|(i, _)| i);
        for (place, result) in places.zip(done) {
            if let Some(slot) = results.get_mut(place) {
                *slot = result;
            }
        }
        results
    }

    /// Writes whole clusters, or those up to the disk's end, compressed: for filling images with data that is seldom
    /// written again. Clusters that would not become smaller are written as they are.
    ///
    /// # Errors
    /// `Unsupported` where the top layer has no compression; `InvalidInput` for other ranges, and where a cluster already
    /// holds something; else as [`Self::write`].
    pub async fn write_compressed(&self, at: GuestOffset, buf: IoVec) -> Result<()> {
        self.check_write(at, buf.byte_len())?;
        match self.top() {
            Some(Layer::Qcow2(image)) => {
                image.write_compressed(&self.under, at, buf).await?;
                if self.write_cache() { Ok(()) } else { image.flush().await }
            }
            _ => Err(Error::new(
                ErrorKind::Unsupported,
                format!("disk '{}' is in a format without compression", self.name),
            )),
        }
    }

    /// Makes every write that completed before this call durable.
    ///
    /// # Errors
    /// What the storage reports; the image is poisoned then.
    pub async fn flush(&self) -> Result<()> {
        match self.top() {
            Some(top) if !self.read_only => top.flush().await,
            _ => Ok(()),
        }
    }

    /// Tells the disk that the range's content is not needed; whole clusters give their space back.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub async fn discard(&self, at: GuestOffset, len: ByteLen) -> Result<()> {
        self.check_write(at, len)?;
        match self.top() {
            Some(Layer::Raw(storage)) => storage.discard(HostOffset::new(at.get()), len).await,
            Some(Layer::Qcow2(image)) => {
                image.discard(&self.under, at, len).await?;
                if self.write_cache() { Ok(()) } else { image.flush().await }
            }
            _ => Ok(()),
        }
    }

    /// Makes the range read as zeroes.
    ///
    /// # Errors
    /// As [`Self::write`]; `Unsupported` when `mode.fast_only` is set and zeroes would have to be written.
    pub async fn write_zeroes(&self, at: GuestOffset, len: ByteLen, mode: ZeroMode) -> Result<()> {
        self.check_write(at, len)?;
        match self.top() {
            Some(Layer::Raw(storage)) => {
                storage.write_zeroes(HostOffset::new(at.get()), len, mode).await
            }
            Some(Layer::Qcow2(image)) => {
                image.write_zeroes(&self.under, at, len, mode).await?;
                if self.write_cache() { Ok(()) } else { image.flush().await }
            }
            _ => Ok(()),
        }
    }

    /// Background work, to be called about once a second while the disk is open: old metadata is written back,
    /// freed space is given back to the host, space for growth is prepared.
    ///
    /// # Errors
    /// What the storage reports.
    pub async fn maintain(&self) -> Result<()> {
        match self.top() {
            Some(Layer::Qcow2(image)) if !self.read_only => image.maintain().await,
            _ => Ok(()),
        }
    }

    /// Makes everything durable and leaves the image as one that was closed cleanly. No request may be under
    /// way, and none may follow.
    ///
    /// # Errors
    /// What the storage reports.
    pub async fn close(&self) -> Result<()> {
        match self.top() {
            Some(Layer::Qcow2(image)) if !self.read_only => image.close().await,
            _ => self.flush().await,
        }
    }
}

async fn resize_raw<S: Storage>(storage: &S, size: ByteLen, fill: Preallocation) -> Result<()> {
    let old = storage.len();
    let invalid = |text: &str| Err(Error::new(ErrorKind::InvalidInput, text));
    if fill == Preallocation::Metadata {
        return invalid("raw images have no metadata; use preallocation=off, falloc or full");
    }
    if size <= old && fill != Preallocation::Off {
        return invalid("space can only be taken ahead for what a disk grows by");
    }
    storage.set_len(size).await?;
    if size > old {
        let len = ByteLen::new(size.get() - old.get());
        let taken = take_space(storage, HostOffset::new(old.get()), len, fill).await;
        if let Err(e) = taken {
            // As it was before; that it can't be cut again would hide why it could not grow.
            let _ = storage.set_len(old).await;
            return Err(e);
        }
    }
    storage.sync().await
}
