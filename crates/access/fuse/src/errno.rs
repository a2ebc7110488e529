//! The errno of a failed request. The handler decides which.

use std::fmt;

/// A positive errno, returned to the calling process.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Errno(pub i32);

impl Errno {
    /// Operation not permitted.
    pub const EPERM: Errno = Errno(libc::EPERM);
    /// No such name.
    pub const ENOENT: Errno = Errno(libc::ENOENT);
    /// Input or output failed.
    pub const EIO: Errno = Errno(libc::EIO);
    /// A handle that is not open.
    pub const EBADF: Errno = Errno(libc::EBADF);
    /// Try again.
    pub const EAGAIN: Errno = Errno(libc::EAGAIN);
    /// No memory.
    pub const ENOMEM: Errno = Errno(libc::ENOMEM);
    /// Access refused.
    pub const EACCES: Errno = Errno(libc::EACCES);
    /// Not a directory.
    pub const ENOTDIR: Errno = Errno(libc::ENOTDIR);
    /// A directory where a file is required.
    pub const EISDIR: Errno = Errno(libc::EISDIR);
    /// An invalid argument.
    pub const EINVAL: Errno = Errno(libc::EINVAL);
    /// No such ioctl.
    pub const ENOTTY: Errno = Errno(libc::ENOTTY);
    /// The file system is read-only.
    pub const EROFS: Errno = Errno(libc::EROFS);
    /// The result does not fit into the caller's buffer.
    pub const ERANGE: Errno = Errno(libc::ERANGE);
    /// The name is too long.
    pub const ENAMETOOLONG: Errno = Errno(libc::ENAMETOOLONG);
    /// Not implemented; for many requests the kernel then stops sending them.
    pub const ENOSYS: Errno = Errno(libc::ENOSYS);
    /// No such extended attribute.
    pub const ENODATA: Errno = Errno(libc::ENODATA);
    /// Past the end (lseek).
    pub const ENXIO: Errno = Errno(libc::ENXIO);
    /// Not supported.
    pub const EOPNOTSUPP: Errno = Errno(libc::EOPNOTSUPP);
    /// A deadline passed.
    pub const ETIMEDOUT: Errno = Errno(libc::ETIMEDOUT);
    /// The file is no longer the one that was opened.
    pub const ESTALE: Errno = Errno(libc::ESTALE);

    /// The errno of an operating system error, or `EIO` if it has none.
    pub fn from_io(error: &std::io::Error) -> Errno {
        Errno(error.raw_os_error().unwrap_or(libc::EIO))
    }

    /// The code on the wire: always one of 1..=511. The kernel rejects any other, and the caller would wait for ever.
    pub(crate) fn wire_code(self) -> i32 {
        if (1..512).contains(&self.0) { self.0 } else { libc::EIO }
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&std::io::Error::from_raw_os_error(self.0), f)
    }
}
