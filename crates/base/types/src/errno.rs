//! Errnos that hosts exchange: numbers of `asm-generic/errno-base.h` and `errno.h`, which amd64 and arm64 share. Which
//! errors a program sees is decided elsewhere.

/// Operation not permitted.
pub const EPERM: i32 = 1;
/// No such file or directory.
pub const ENOENT: i32 = 2;
/// Input or output error.
pub const EIO: i32 = 5;
/// Not an open file of the needed kind.
pub const EBADF: i32 = 9;
/// Another lock is in the way.
pub const EAGAIN: i32 = 11;
/// Permission denied.
pub const EACCES: i32 = 13;
/// The file exists.
pub const EEXIST: i32 = 17;
/// The files are on different devices.
pub const EXDEV: i32 = 18;
/// Not a directory.
pub const ENOTDIR: i32 = 20;
/// Is a directory.
pub const EISDIR: i32 = 21;
/// Invalid argument.
pub const EINVAL: i32 = 22;
/// Too many open files of the process.
pub const EMFILE: i32 = 24;
/// The file is too large.
pub const EFBIG: i32 = 27;
/// No room.
pub const ENOSPC: i32 = 28;
/// The call does not exist.
pub const ENOSYS: i32 = 38;
/// The directory has entries.
pub const ENOTEMPTY: i32 = 39;
/// No such attribute.
pub const ENODATA: i32 = 61;
/// The operation is not supported.
pub const EOPNOTSUPP: i32 = 95;
/// The object is no longer there.
pub const ESTALE: i32 = 116;
