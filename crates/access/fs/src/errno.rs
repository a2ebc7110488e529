//! Maps each failure to its errno; ARCHITECTURE.md lists the three exceptions. It sees the kind of a failure and not its cause.

use spurline_types::{Error, ErrorKind};

/// `std::result::Result` with [`FsError`].
pub type FsResult<T, E = FsError> = std::result::Result<T, E>;

/// Why a call of the file system fails: a POSIX rule, or an error of the volume.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FsError {
    /// The volume failed.
    #[error(transparent)]
    Volume(#[from] Error),
    /// The inode was forgotten, or its path now holds another version.
    #[error("inode {0} is stale: it was forgotten, or its path now holds another version; look it up again")]
    Stale(u64),
    /// A handle that is not open, or is of the other type.
    #[error("handle {0} is not open")]
    BadHandle(u64),
    /// Not a directory, where one is required.
    #[error("not a directory")]
    NotADirectory,
    /// A directory, where a file is required.
    #[error("is a directory")]
    IsADirectory,
    /// A change to a read-only file system.
    #[error("the file system is read-only")]
    ReadOnly,
    /// The mode bits do not allow it.
    #[error("the mode bits do not allow it")]
    AccessDenied,
    /// No such extended attribute.
    #[error("no such extended attribute")]
    NoData,
    /// An extended attribute namespace that this file system does not have.
    #[error("this file system has no extended attributes of that namespace")]
    NoNamespace,
    /// A name longer than [`crate::NAME_MAX`].
    #[error("a name is longer than {} bytes", crate::NAME_MAX)]
    NameTooLong,
    /// A call that this file system has no answer to.
    #[error("the file system does not serve this call")]
    NotServed,
    /// A malformed request.
    #[error("{0}")]
    Invalid(&'static str),
}

impl FsError {
    /// The errno a caller of the file system sees.
    pub fn errno(&self) -> i32 {
        match self {
            FsError::Volume(error) => errno_of(error.kind()),
            FsError::Stale(_) => libc::ESTALE,
            FsError::BadHandle(_) => libc::EBADF,
            FsError::NotADirectory => libc::ENOTDIR,
            FsError::IsADirectory => libc::EISDIR,
            FsError::ReadOnly => libc::EROFS,
            FsError::AccessDenied => libc::EACCES,
            FsError::NoData => libc::ENODATA,
            FsError::NoNamespace => libc::EOPNOTSUPP,
            FsError::NameTooLong => libc::ENAMETOOLONG,
            FsError::NotServed => libc::ENOSYS,
            FsError::Invalid(_) => libc::EINVAL,
        }
    }
}

/// The error of a call that ends with this errno.
pub(crate) fn errno_error(errno: i32, why: &'static str) -> FsError {
    Error::new(ErrorKind::Io(errno), why).into()
}

/// The errno of each kind. The match is exhaustive, so that a new kind requires a decision here.
fn errno_of(kind: ErrorKind) -> i32 {
    match kind {
        ErrorKind::NotFound => libc::ENOENT,
        ErrorKind::NotADirectory => libc::ENOTDIR,
        ErrorKind::IsADirectory => libc::EISDIR,
        ErrorKind::PermissionDenied => libc::EACCES,
        ErrorKind::Stale => libc::ESTALE,
        ErrorKind::Timeout | ErrorKind::OriginDown => libc::ETIMEDOUT,
        // "Host is down" is more specific than "Input/output error", and differs from ENOTCONN, the errno of a dead
        // FUSE process.
        ErrorKind::Unavailable => libc::EHOSTDOWN,
        ErrorKind::Throttled => libc::EBUSY,
        ErrorKind::NoSpace => libc::ENOSPC,
        ErrorKind::NoMemory => libc::ENOMEM,
        ErrorKind::Corrupt | ErrorKind::OriginFailed => libc::EIO,
        ErrorKind::Invalid => libc::EINVAL,
        ErrorKind::Unsupported => libc::EOPNOTSUPP,
        ErrorKind::ReadOnly => libc::EROFS,
        ErrorKind::Protocol => libc::EPROTO,
        // The kernel accepts errnos up to 511 in a FUSE reply and rejects the whole reply beyond.
        ErrorKind::Io(errno @ 1..=511) => errno,
        ErrorKind::Io(_) | ErrorKind::Unknown(_) => libc::EIO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_errno_is_one_the_kernel_takes() {
        for code in 0..0x3000u16 {
            let errno = errno_of(ErrorKind::from_code(code));
            assert!((1..512).contains(&errno), "code {code} became errno {errno}");
        }
        assert_eq!(errno_of(ErrorKind::Io(libc::EMFILE)), libc::EMFILE);
        assert_eq!(errno_of(ErrorKind::Io(100_000)), libc::EIO);
        assert_eq!(errno_of(ErrorKind::Io(-1)), libc::EIO);
    }
}
