//! Nothing is written to what the operator did not name as something to overwrite.
//!
//! Callers: [`crate::run()`], before any target is opened for writing.

use crate::job::Job;
use crate::target::Target;
use bedplate_types::{Error, ErrorKind, Result};
use rustix::fs::{FileType, stat};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// What keeps others from a target while it is overwritten; lasts until it is dropped.
#[derive(Debug)]
pub struct Permit {
    _claim: Option<File>,
}

/// Checks that `job` may run on `target`: either it changes nothing, or `destroy` has the target's exact name
/// ([`Target::name`]). A block device that is mounted, or that another program has claimed, is refused nonetheless.
///
/// # Errors
/// `Denied` when permission is missing; `Locked` for a device in use.
pub fn permit(target: &Target, job: &Job, destroy: &[String]) -> Result<Permit> {
    if !job.changes() {
        return Ok(Permit { _claim: None });
    }
    let name = target.name();
    if !destroy.contains(&name) {
        let text = format!(
            "this load overwrites '{name}'; nothing was written. If its content may be lost, say so with --destroy '{name}'"
        );
        return Err(Error::new(ErrorKind::Denied, text));
    }
    let claim = match target {
        Target::File { path, .. } if is_device(path) => Some(claim(path)?),
        _ => None,
    };
    Ok(Permit { _claim: claim })
}

fn is_device(path: &Path) -> bool {
    stat(path).is_ok_and(|s| FileType::from_raw_mode(s.st_mode) == FileType::BlockDevice)
}

/// Opens a device so that nobody can mount it meanwhile, and fails when somebody has.
fn claim(path: &Path) -> Result<File> {
    // On a block device this means exclusive use, also without O_CREAT.
    let flags = rustix::fs::OFlags::EXCL.bits() as i32;
    OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(|e| {
        let text = format!("cannot claim the device '{}'", path.display());
        match e.raw_os_error() {
            Some(errno) if errno == rustix::io::Errno::BUSY.raw_os_error() => Error::new(
                ErrorKind::Locked,
                format!(
                    "the device '{}' is in use (mounted, or part of another device); nothing was written",
                    path.display()
                ),
            ),
            _ => Error::io(text, e),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Mix;

    #[test]
    fn only_the_exact_name_permits_a_write() {
        let target = Target::parse("vhost-user-blk:/run/disk.sock").expect("a target");
        let writes = Job { mix: Mix::WRITE, ..Job::default() };
        let trims = Job { mix: Mix { read: 99, write: 0, trim: 1, flush: 0 }, ..Job::default() };
        let given = |names: &[&str], job: &Job| {
            let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
            permit(&target, job, &names)
        };
        for job in [&writes, &trims] {
            for names in
                [&[][..], &["/run/disk"], &["disk.sock"], &["vhost-user-blk:/run/disk.sock"]]
            {
                let refused = given(names, job).expect_err("refused");
                assert_eq!(refused.kind(), ErrorKind::Denied);
                assert!(refused.to_string().contains("--destroy '/run/disk.sock'"));
            }
            assert!(given(&["/other", "/run/disk.sock"], job).is_ok());
        }
        assert!(given(&[], &Job::default()).is_ok());
    }
}
