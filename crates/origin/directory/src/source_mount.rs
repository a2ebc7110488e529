//! A mount of the source that only this process has, with a rule for access times. Knows no file of the source.
//!
//! The kernel decides about access times by the mount that a file was opened through, also for files that the kernel reads itself
//! (passthrough), and `O_NOATIME` is for the owner of a file only.
#![allow(unsafe_code, reason = "mount_setattr, which rustix does not have")]

use rustix::fd::{AsRawFd as _, OwnedFd};
use rustix::fs::CWD;
use rustix::mount::OpenTreeFlags;
use spurline_types::AccessTimes;
use std::io::Error;
use std::path::Path;

/// The mount of `path`, and the mounts below, as a copy with this rule; `None` for the rule of the source. File systems that are
/// mounted below the source later are not seen through the copy.
///
/// # Errors
/// `EPERM` without `CAP_SYS_ADMIN`; `ENOSYS` before Linux 5.12.
pub(crate) fn open_tree_with_times(path: &Path, times: AccessTimes) -> rustix::io::Result<Option<OwnedFd>> {
    let rule = match times {
        AccessTimes::OfSource => return Ok(None),
        AccessTimes::Never => libc::MOUNT_ATTR_NOATIME,
        AccessTimes::Relative => libc::MOUNT_ATTR_RELATIME,
        AccessTimes::Always => libc::MOUNT_ATTR_STRICTATIME,
    };
    let copy = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE;
    let tree = rustix::mount::open_tree(CWD, path, copy)?;
    let attr = libc::mount_attr {
        attr_set: rule,
        attr_clr: libc::MOUNT_ATTR__ATIME,
        propagation: libc::MS_PRIVATE,
        userns_fd: 0,
    };
    let flags = libc::AT_EMPTY_PATH | libc::AT_RECURSIVE;
    let len = size_of::<libc::mount_attr>();
    // SAFETY: the path is a string, and the attributes are read during the call.
    let answer =
        unsafe { libc::syscall(libc::SYS_mount_setattr, tree.as_raw_fd(), c"".as_ptr(), flags, &raw const attr, len) };
    if answer == 0 {
        return Ok(Some(tree));
    }
    Err(rustix::io::Errno::from_io_error(&Error::last_os_error()).unwrap_or(rustix::io::Errno::INVAL))
}
