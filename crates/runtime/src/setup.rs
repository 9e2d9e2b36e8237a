//! Opening a ring with the best flags the kernel accepts, and saying in a sentence why that failed.

use bedplate_types::{Error, ErrorKind, Result};
use io_uring::{Builder, IoUring};
use std::io;

/// The completion ring is this much larger than the submission ring, so that it rarely overflows.
const CQ_FACTOR: u32 = 4;
/// Bounds of the submission ring that a configuration can ask for.
const ENTRIES: std::ops::RangeInclusive<u32> = 2..=8192;

/// Flag sets, the best first. Kernels before 5.19 and 6.1 don't know all of them.
const FLAG_SETS: [fn(&mut Builder); 3] = [
    |b| {
        b.setup_single_issuer().setup_defer_taskrun().setup_coop_taskrun();
        b.setup_taskrun_flag().setup_submit_all();
    },
    |b| {
        b.setup_coop_taskrun().setup_taskrun_flag().setup_submit_all();
    },
    |_| {},
];

/// Opens a ring of about `entries` submission entries.
pub(crate) fn open_ring(entries: u32) -> Result<IoUring> {
    let entries = entries.clamp(*ENTRIES.start(), *ENTRIES.end());
    let mut last = io::Error::from_raw_os_error(libc::EINVAL);
    for set in FLAG_SETS {
        let mut builder = IoUring::builder();
        builder.setup_clamp().setup_cqsize(entries * CQ_FACTOR).dontfork();
        set(&mut builder);
        match builder.build(entries) {
            Ok(ring) => return check_features(ring),
            // An unknown flag; a smaller set may do.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => last = e,
            Err(e) => return Err(setup_error(&e, disabled_setting().as_deref())),
        }
    }
    Err(setup_error(&last, None))
}

fn check_features(ring: IoUring) -> Result<IoUring> {
    let p = ring.params();
    if p.is_feature_ext_arg() && p.is_feature_nodrop() && p.is_feature_submit_stable() {
        return Ok(ring);
    }
    Err(Error::new(
        ErrorKind::Unsupported,
        "this kernel's io_uring is too old: Linux 5.11 or newer is needed for it; \
         the thread backend works on any kernel",
    ))
}

fn disabled_setting() -> Option<String> {
    let text = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").ok()?;
    Some(text.trim().to_owned())
}

/// The error for a failed io_uring_setup. `disabled` is the value of the sysctl `kernel.io_uring_disabled`.
pub(crate) fn setup_error(cause: &io::Error, disabled: Option<&str>) -> Error {
    let errno = cause.raw_os_error().unwrap_or(0);
    let (kind, text) = match (errno, disabled) {
        (libc::ENOSYS, _) => (
            ErrorKind::Unsupported,
            "this system has no io_uring: the kernel is older than 5.11 or was built without it, or a seccomp \
             filter hides it; update or allow it, or use the thread backend",
        ),
        (libc::EPERM, Some("2")) => (
            ErrorKind::Denied,
            "io_uring is switched off for everybody on this system (sysctl kernel.io_uring_disabled is 2); \
             set it to 0, or use the thread backend",
        ),
        (libc::EPERM, Some("1")) => (
            ErrorKind::Denied,
            "io_uring is allowed only to privileged processes and to the group in the sysctl \
             kernel.io_uring_group on this system (kernel.io_uring_disabled is 1); set that to 0 or join the \
             group, or use the thread backend",
        ),
        (libc::EPERM | libc::EACCES, _) => (
            ErrorKind::Denied,
            "io_uring is not permitted here, most likely by the seccomp filter of a container or a service; \
             allow the system calls io_uring_setup, io_uring_enter and io_uring_register, or use the thread backend",
        ),
        (libc::ENOMEM, _) => (
            ErrorKind::Limit,
            "there is not enough memory for an io_uring: kernels before 5.12 count it as locked memory, so raise \
             the limit (ulimit -l, LimitMEMLOCK=), or use fewer queues",
        ),
        (libc::EMFILE, _) => (
            ErrorKind::Limit,
            "cannot open an io_uring because this process has too many open files; raise the limit \
             (ulimit -n, LimitNOFILE=)",
        ),
        (libc::ENFILE, _) => (
            ErrorKind::Limit,
            "cannot open an io_uring because the system has too many open files; raise the sysctl fs.file-max",
        ),
        (libc::EINVAL, _) => (
            ErrorKind::Unsupported,
            "the kernel does not accept an io_uring of the kind that is needed; use the thread backend",
        ),
        _ => (ErrorKind::Io, "cannot open an io_uring"),
    };
    if errno == 0 {
        return Error::new(kind, text);
    }
    Error::errno(text, errno).with_kind(kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(errno: i32, disabled: Option<&str>) -> Error {
        setup_error(&io::Error::from_raw_os_error(errno), disabled)
    }

    #[test]
    fn each_cause_of_a_refused_ring_has_its_kind_and_its_remedy() {
        let cases = [
            (libc::ENOSYS, None, ErrorKind::Unsupported, "older than 5.11"),
            (libc::EPERM, Some("2"), ErrorKind::Denied, "io_uring_disabled is 2"),
            (libc::EPERM, Some("1"), ErrorKind::Denied, "kernel.io_uring_group"),
            (libc::EPERM, Some("0"), ErrorKind::Denied, "seccomp"),
            (libc::EPERM, None, ErrorKind::Denied, "seccomp"),
            (libc::ENOMEM, None, ErrorKind::Limit, "ulimit -l"),
            (libc::EMFILE, None, ErrorKind::Limit, "ulimit -n"),
            (libc::ENFILE, None, ErrorKind::Limit, "fs.file-max"),
            (libc::EINVAL, None, ErrorKind::Unsupported, "thread backend"),
            (libc::EIO, None, ErrorKind::Io, "cannot open"),
        ];
        for (errno, disabled, kind, part) in cases {
            let e = said(errno, disabled);
            assert_eq!(e.kind(), kind, "{e}");
            assert_eq!(e.raw_errno(), Some(errno));
            assert!(e.to_string().contains(part), "{e}");
        }
    }

    #[test]
    fn a_ring_of_any_size_opens_where_io_uring_works() {
        for entries in [0, 1, 100, u32::MAX] {
            match open_ring(entries) {
                Ok(ring) => assert!(ring.params().sq_entries() >= 2),
                Err(e) => assert_ne!(e.kind(), ErrorKind::Io, "{e:#}"),
            }
        }
    }
}
