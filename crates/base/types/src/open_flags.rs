//! Flags of `open(2)`, and that of a kernel's open for execution, that hosts exchange: numbers of `asm-generic/fcntl.h`,
//! which amd64 and arm64 share. Flags whose numbers differ are not here.

/// For reading alone.
pub const O_RDONLY: u32 = 0;
/// For reading and writing.
pub const O_RDWR: u32 = 0o2;
/// The bits that say whether a file is read, written, or both.
pub const O_ACCMODE: u32 = 0o3;
/// A missing file is made.
pub const O_CREAT: u32 = 0o100;
/// The file must not exist.
pub const O_EXCL: u32 = 0o200;
/// The file is cut to no bytes.
pub const O_TRUNC: u32 = 0o1000;
/// Writes go to the end.
pub const O_APPEND: u32 = 0o2000;
/// Each write is durable before the call returns; a part of [`O_SYNC`].
pub const O_DSYNC: u32 = 0o10_000;
/// As [`O_DSYNC`], with the attributes of the file.
pub const O_SYNC: u32 = 0o4_010_000;
/// Reads leave the access time.
pub const O_NOATIME: u32 = 0o1_000_000;
/// The kernel opens a program to run it, and has checked the right to execute. The same number on all architectures; a
/// process can't set it.
pub const FMODE_EXEC: u32 = 0x20;
