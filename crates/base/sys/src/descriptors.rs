//! Objects of a file system by open descriptors: the name in `/proc`, a path below a directory, values of unknown length. Knows no
//! rights and no callers.

use rustix::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::ops::Deref;

/// The name of an open descriptor in `/proc`, which leads to its object whatever its path is now.
pub fn proc_path(fd: BorrowedFd<'_>) -> ProcPath {
    let mut path = ProcPath { bytes: [0; 32], len: 0 };
    let mut rest = &mut path.bytes[..];
    // The longest number fits.
    let _ = std::io::Write::write_fmt(&mut rest, format_args!("/proc/self/fd/{}", fd.as_raw_fd()));
    let left = rest.len();
    path.len = path.bytes.len() - left;
    path
}

/// See [`proc_path`].
pub struct ProcPath {
    bytes: [u8; 32],
    len: usize,
}

impl Deref for ProcPath {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// Opens `path` below `dir` part by part, following no link, where `openat2` is missing.
///
/// # Errors
/// Those of `openat(2)` for the first part that can't be opened.
pub fn open_by_parts(dir: OwnedFd, path: &[u8], flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let mut at = dir;
    let mut parts = path.split(|b| *b == b'/').peekable();
    while let Some(part) = parts.next() {
        let flags = match parts.peek() {
            Some(_) => OFlags::PATH | OFlags::NOFOLLOW | OFlags::DIRECTORY,
            None => flags | OFlags::NOFOLLOW,
        };
        at = rustix::fs::openat(&at, part, flags | OFlags::CLOEXEC, Mode::empty())?;
    }
    Ok(at)
}

/// A value of unknown length: in a small buffer, or in one of the kernel's largest.
///
/// # Errors
/// Those of `read`, which fails with `ERANGE` for a buffer that is too small.
pub fn read_growing(read: impl Fn(&mut [u8]) -> rustix::io::Result<usize>) -> rustix::io::Result<Vec<u8>> {
    let mut small = [0u8; 256];
    match read(&mut small) {
        Ok(len) => Ok(small[..len].to_vec()),
        Err(Errno::RANGE) => {
            let mut large = vec![0u8; 64 << 10];
            let len = read(&mut large)?;
            large.truncate(len);
            Ok(large)
        }
        Err(errno) => Err(errno),
    }
}
