//! Flags of `open(2)` by the numbers of this host's architecture, where architectures differ.

use rustix::fs::OFlags;

/// Reads and writes go past the page cache.
pub const O_DIRECT: u32 = OFlags::DIRECT.bits();

#[cfg(test)]
mod tests {
    use rustix::fs::OFlags;
    use rustix::io::Errno;
    use spurline_types::{errno, open_flags};

    #[test]
    fn numbers_that_hosts_exchange_are_those_of_this_host() {
        let errnos = [
            (errno::EPERM, Errno::PERM),
            (errno::ENOENT, Errno::NOENT),
            (errno::EIO, Errno::IO),
            (errno::EBADF, Errno::BADF),
            (errno::EAGAIN, Errno::AGAIN),
            (errno::EACCES, Errno::ACCESS),
            (errno::EEXIST, Errno::EXIST),
            (errno::EXDEV, Errno::XDEV),
            (errno::ENOTDIR, Errno::NOTDIR),
            (errno::EISDIR, Errno::ISDIR),
            (errno::EINVAL, Errno::INVAL),
            (errno::EMFILE, Errno::MFILE),
            (errno::EFBIG, Errno::FBIG),
            (errno::ENOSYS, Errno::NOSYS),
            (errno::ENODATA, Errno::NODATA),
            (errno::EOPNOTSUPP, Errno::OPNOTSUPP),
            (errno::ESTALE, Errno::STALE),
        ];
        for (number, host) in errnos {
            assert_eq!(number, host.raw_os_error(), "{host}");
        }
        let flags = [
            (open_flags::O_RDONLY, OFlags::RDONLY),
            (open_flags::O_RDWR, OFlags::RDWR),
            (open_flags::O_ACCMODE, OFlags::RDWR | OFlags::WRONLY),
            (open_flags::O_CREAT, OFlags::CREATE),
            (open_flags::O_EXCL, OFlags::EXCL),
            (open_flags::O_TRUNC, OFlags::TRUNC),
            (open_flags::O_APPEND, OFlags::APPEND),
            (open_flags::O_SYNC, OFlags::SYNC),
            (open_flags::O_NOATIME, OFlags::NOATIME),
        ];
        for (number, host) in flags {
            assert_eq!(number, host.bits(), "{host:?}");
        }
        // rustix gives the number of `O_SYNC` to `DSYNC`.
        const { assert!(open_flags::O_SYNC & open_flags::O_DSYNC == open_flags::O_DSYNC) };
    }
}
