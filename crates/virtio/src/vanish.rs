//! Guest memory that vanishes: a front end may make the file shorter after it has shared it, and whoever touches what is
//! gone is sent SIGBUS, which would end this process with all its other exports.
//!
//! Callers: [`crate::memory::Region`] registers its mapping here. The handler of SIGBUS puts zero pages in the place of a
//! mapping that was touched in vain, and rings the [`Alarm`] that came with it; whoever serves that front end then
//! ends its connection. The kernel's own accesses (`io_uring`, `readv`) fail with EFAULT instead. A fault anywhere else ends
//! the process as before.
//!
//! Invariants: an alarm has rung before the first zero of the new pages can be read, so that what was read is right if the
//! alarm is silent afterwards. The handler only makes system calls and reads a list whose nodes are never freed. A
//! node does not change while its mapping may be accessed.

use bedplate_types::{Error, Result};
use std::ffi::c_int;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering, fence};
use std::sync::{Arc, OnceLock};

struct Bell {
    rang: AtomicBool,
    /// Readable when it has rung.
    event: OwnedFd,
}

/// Tells that guest memory is gone. One belongs to a front end, with all its memory.
#[derive(Clone)]
pub struct Alarm(Arc<Bell>);

impl Alarm {
    /// A silent one.
    ///
    /// # Errors
    /// `Io` when the system gives no eventfd.
    pub fn new() -> Result<Self> {
        // SAFETY: the call touches no memory of this process.
        let raw = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if raw < 0 {
            let e = std::io::Error::last_os_error();
            return Err(Error::io("cannot make an eventfd", e));
        }
        // SAFETY: a fresh descriptor that nobody else owns.
        let event = unsafe { OwnedFd::from_raw_fd(raw) };
        Ok(Self(Arc::new(Bell { rang: AtomicBool::new(false), event })))
    }

    /// True when memory is gone. What was read from it before this was asked is only right when it is false.
    #[inline]
    pub fn rang(&self) -> bool {
        self.0.rang.load(Ordering::Acquire)
    }
}

impl AsFd for Alarm {
    /// Readable once the alarm has rung.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.event.as_fd()
    }
}

/// A mapping that the handler knows.
struct Node {
    taken: AtomicBool,
    /// Odd while the fields below are changed.
    version: AtomicUsize,
    base: AtomicUsize,
    len: AtomicUsize,
    page: AtomicUsize,
    bell: AtomicPtr<Bell>,
    next: AtomicPtr<Node>,
}

/// All nodes there ever were.
static NODES: AtomicPtr<Node> = AtomicPtr::new(null_mut());

/// What SIGBUS did before.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

fn nodes() -> impl Iterator<Item = &'static Node> {
    let mut next = NODES.load(Ordering::Acquire);
    std::iter::from_fn(move || {
        // SAFETY: nodes are leaked boxes, so a pointer in the list stays valid.
        let node: &'static Node = unsafe { next.as_ref() }?;
        next = node.next.load(Ordering::Acquire);
        Some(node)
    })
}

impl Node {
    fn free() -> &'static Node {
        let take = |n: &&Node| !n.taken.swap(true, Ordering::AcqRel);
        if let Some(node) = nodes().find(take) {
            return node;
        }
        let node: &'static mut Node = Box::leak(Box::new(Node {
            taken: AtomicBool::new(true),
            version: AtomicUsize::new(0),
            base: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            page: AtomicUsize::new(0),
            bell: AtomicPtr::new(null_mut()),
            next: AtomicPtr::new(NODES.load(Ordering::Acquire)),
        }));
        let raw: *mut Node = node;
        loop {
            let head = node.next.load(Ordering::Relaxed);
            match NODES.compare_exchange(head, raw, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return node,
                Err(head) => node.next.store(head, Ordering::Relaxed),
            }
        }
    }

    /// Changes the fields; only who has taken the node does.
    fn set(&self, (base, len, page): (usize, usize, usize), bell: *const Bell) {
        self.version.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::Release);
        self.base.store(base, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        self.page.store(page, Ordering::Relaxed);
        self.bell.store(bell.cast_mut(), Ordering::Relaxed);
        self.version.fetch_add(1, Ordering::Release);
    }

    /// Its mapping (address, length, page size) and bell, when `at` lies in it.
    fn holds(&self, at: usize) -> Option<((usize, usize, usize), *const Bell)> {
        let version = self.version.load(Ordering::Acquire);
        let base = self.base.load(Ordering::Relaxed);
        let (len, page) = (self.len.load(Ordering::Relaxed), self.page.load(Ordering::Relaxed));
        let bell = self.bell.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        // One that changes now is that of another mapping than the one being accessed.
        let whole = version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version;
        (whole && at >= base && at - base < len).then_some(((base, len, page), bell.cast_const()))
    }
}

/// A mapping that may be touched in vain, as long as this lives.
pub(crate) struct Guarded {
    node: &'static Node,
    /// The node points at what is in it.
    _alarm: Alarm,
}

impl Guarded {
    /// Guards the mapping of `len` bytes at `base`, which has pages of `page` bytes.
    ///
    /// # Errors
    /// `Io` when the system refuses the handler.
    pub(crate) fn new(base: *mut u8, len: usize, page: usize, alarm: &Alarm) -> Result<Self> {
        install()?;
        let node = Node::free();
        node.set((base.addr(), len, page), Arc::as_ptr(&alarm.0));
        Ok(Self { node, _alarm: alarm.clone() })
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        self.node.set((0, 0, 0), std::ptr::null());
        self.node.taken.store(false, Ordering::Release);
    }
}

fn install() -> Result<()> {
    static INSTALLED: OnceLock<std::result::Result<(), i32>> = OnceLock::new();
    let set = || {
        let errno = || std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
        // SAFETY: an all-zero sigaction is a valid value: the default action, no flags, an empty mask.
        let (mut before, mut action): (libc::sigaction, libc::sigaction) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        // SAFETY: `before` is valid for the call, which changes nothing.
        if unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &raw mut before) } != 0 {
            return Err(errno());
        }
        // Known to the handler before it may run.
        BEFORE.get_or_init(|| before);
        let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_bus_error;
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: `action` is whole, and its handler does only what a signal handler may.
        if unsafe { libc::sigaction(libc::SIGBUS, &raw const action, null_mut()) } != 0 {
            return Err(errno());
        }
        Ok(())
    };
    INSTALLED.get_or_init(set).map_err(|errno| Error::errno("cannot prepare for bus errors", errno))
}

/// The handler of SIGBUS.
extern "C" fn on_bus_error(_: c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo; `si_addr` is set for the positive codes, which are those of faults.
    let (code, at) = unsafe { ((*info).si_code, (*info).si_addr().addr()) };
    // SAFETY: errno is this thread's own, and is put back as the interrupted code left it.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let kept = unsafe { *errno };
    if code <= 0 || !replace(at) {
        give_up(code);
    }
    // SAFETY: as above.
    unsafe { *errno = kept };
}

/// Puts zero pages where the memory at `at` is gone. False when that is no guarded mapping, or can't be done.
fn replace(at: usize) -> bool {
    let Some(((base, len, page), bell)) = nodes().find_map(|node| node.holds(at)) else {
        return false;
    };
    // SAFETY: this thread is accessing the mapping, so its owner keeps its guard, and that the bell.
    let bell = unsafe { &*bell };
    bell.rang.store(true, Ordering::SeqCst);
    let first = base + (at - base) / page * page;
    // Some systems promise no more memory than they have; a page they will.
    let done = [(base, len), (first, page)].into_iter().any(|(base, len)| zero_pages(base, len));
    let one = 1_u64.to_ne_bytes();
    // SAFETY: eight bytes are valid for the call. It fails only when the counter is full, so when it can be read.
    unsafe { libc::write(bell.event.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    done
}

fn zero_pages(base: usize, len: usize) -> bool {
    let place = std::ptr::with_exposed_provenance_mut(base);
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    // SAFETY: the range lies in a mapping of guest memory, which is only accessed by raw reads and writes that expect any
    // change at any time.
    let mapped = unsafe { libc::mmap(place, len, prot, flags, -1, 0) };
    mapped != libc::MAP_FAILED
}

/// Leaves the fault to what was there before: it happens again as soon as the handler returns.
fn give_up(code: c_int) {
    if let Some(before) = BEFORE.get() {
        // SAFETY: `before` is what the kernel gave.
        unsafe { libc::sigaction(libc::SIGBUS, before, null_mut()) };
    }
    if code <= 0 {
        // SAFETY: the signal was sent by a process, and is sent again, since nothing repeats it.
        unsafe { libc::raise(libc::SIGBUS) };
    }
}

#[cfg(test)]
mod tests {
    use crate::driver::SharedMemory;
    use crate::memory::{GuestMemory, Region};
    use crate::vanish::Alarm;
    use std::os::fd::{AsFd, AsRawFd};
    use std::os::unix::process::ExitStatusExt;

    const CHILD: &str = "BEDPLATE_TEST_BUS_ERROR";

    fn truncate(fd: &impl AsRawFd, len: i64) {
        // SAFETY: the descriptor is open.
        assert_eq!(unsafe { libc::ftruncate(fd.as_raw_fd(), len) }, 0);
    }

    #[test]
    fn memory_that_is_gone_reads_as_zeroes_and_rings_the_alarm_of_its_front_end_only() {
        let (a, b) = (SharedMemory::new(0, 0x4000), SharedMemory::new(0, 0x4000));
        let (a, b) = (a.expect("memory"), b.expect("memory"));
        let (ring, silent) = (Alarm::new().expect("alarm"), Alarm::new().expect("alarm"));
        let map = |from: &SharedMemory, alarm| {
            let region = Region::map(from.fd().as_fd(), 0x1000, 0, 0, 0x3000, alarm).expect("map");
            GuestMemory::new(vec![region]).expect("memory")
        };
        let (mine, other) = (map(&a, &ring), map(&b, &silent));
        b.fill(0, 0x4000, 7);
        a.fill(0, 0x4000, 7);
        // SAFETY: the addresses lie in the mappings.
        let read = |m: &GuestMemory, at| unsafe { m.contiguous(at, 1).expect("there").read() };
        assert_eq!((read(&mine, 0x2fff), mine.is_gone()), (7, false));
        truncate(a.fd(), 0x2000);
        assert_eq!((read(&mine, 0xfff), mine.is_gone()), (7, false), "this is still there");
        assert_eq!((read(&mine, 0x1000), mine.is_gone()), (0, true));
        let place = mine.contiguous(0x2000, 1).expect("there");
        // SAFETY: the address lies in the mapping.
        unsafe { place.write(9) };
        assert_eq!((read(&mine, 0x2000), read(&mine, 0)), (9, 0));
        let mut count = [0_u8; 8];
        let fd = ring.as_fd().as_raw_fd();
        // SAFETY: the buffer has room for the bytes asked for.
        assert_eq!(unsafe { libc::read(fd, count.as_mut_ptr().cast(), 8) }, 8);
        assert!(other.regions().len() == 1 && !other.is_gone() && read(&other, 0x2fff) == 7);
        // A place in the list is used again, for memory of another front end.
        drop(mine);
        let again = map(&b, &silent);
        truncate(b.fd(), 0);
        assert_eq!((read(&again, 0), other.is_gone()), (0, true));
    }

    #[test]
    fn a_bus_error_elsewhere_still_ends_the_process() {
        if std::env::var_os(CHILD).is_some() {
            let guarded = SharedMemory::new(0, 0x1000).expect("memory");
            truncate(guarded.fd(), 0);
            assert_eq!(guarded.read(0, 1), [0]);
            truncate(guarded.fd(), 0x1000);
            let (prot, fd) = (libc::PROT_READ, guarded.fd().as_raw_fd());
            // SAFETY: a new mapping; what is read of it is gone, which ends the process.
            unsafe {
                let map = libc::mmap(std::ptr::null_mut(), 0x1000, prot, libc::MAP_SHARED, fd, 0);
                assert_ne!(map, libc::MAP_FAILED);
                truncate(guarded.fd(), 0);
                std::hint::black_box(map.cast::<u8>().read_volatile());
            }
            return;
        }
        let name = "vanish::tests::a_bus_error_elsewhere_still_ends_the_process";
        let me = std::env::current_exe().expect("a path");
        let child = std::process::Command::new(me).args(["--exact", name]).env(CHILD, "1").output();
        let child = child.expect("started");
        assert_eq!(child.status.signal(), Some(libc::SIGBUS), "{child:?}");
    }
}
