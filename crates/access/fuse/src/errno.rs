//! The errno of a failed request. The file system decides which.

use std::fmt;

/// A positive errno, returned to the calling process.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Errno(pub(crate) i32);

impl Errno {
    /// Input or output failed.
    pub(crate) const EIO: Errno = Errno(libc::EIO);
    /// An invalid argument.
    pub(crate) const EINVAL: Errno = Errno(libc::EINVAL);
    /// No such ioctl.
    pub(crate) const ENOTTY: Errno = Errno(libc::ENOTTY);
    /// The result does not fit into the caller's buffer.
    pub(crate) const ERANGE: Errno = Errno(libc::ERANGE);
    /// Not implemented; many kinds of requests are then sent no more.
    pub(crate) const ENOSYS: Errno = Errno(libc::ENOSYS);

    /// The code on the wire: always in 1..=511. The kernel rejects any other, and the caller would wait for ever.
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
