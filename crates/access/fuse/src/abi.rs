//! The kernel's FUSE protocol, version 7: numbers and memory layouts from `include/uapi/linux/fuse.h`. The only behaviour is to
//! copy plain structs from and to bytes.
#![allow(missing_docs, reason = "field names are the protocol's own")]

/// The protocol's major version.
pub const MAJOR: u32 = 7;
/// The newest minor version with layouts defined here (io_uring came with 7.42).
pub const MINOR: u32 = 42;
/// The inode number of the root directory.
pub const ROOT_ID: u64 = 1;

pub mod opcode {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const SETXATTR: u32 = 21;
    pub const GETXATTR: u32 = 22;
    pub const LISTXATTR: u32 = 23;
    pub const REMOVEXATTR: u32 = 24;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const GETLK: u32 = 31;
    pub const SETLK: u32 = 32;
    pub const SETLKW: u32 = 33;
    pub const ACCESS: u32 = 34;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const IOCTL: u32 = 39;
    pub const NOTIFY_REPLY: u32 = 41;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const READDIRPLUS: u32 = 44;
    pub const RENAME2: u32 = 45;
    pub const LSEEK: u32 = 46;
    pub const COPY_FILE_RANGE: u32 = 47;
    pub const TMPFILE: u32 = 51;
}

/// Flags of INIT; bits from 32 are in `flags2`.
pub mod init {
    pub const ASYNC_READ: u64 = 1 << 0;
    pub const POSIX_LOCKS: u64 = 1 << 1;
    pub const EXPORT_SUPPORT: u64 = 1 << 4;
    pub const BIG_WRITES: u64 = 1 << 5;
    pub const DONT_MASK: u64 = 1 << 6;
    pub const FLOCK_LOCKS: u64 = 1 << 10;
    pub const AUTO_INVAL_DATA: u64 = 1 << 12;
    pub const DO_READDIRPLUS: u64 = 1 << 13;
    pub const ASYNC_DIO: u64 = 1 << 15;
    pub const PARALLEL_DIROPS: u64 = 1 << 18;
    pub const POSIX_ACL: u64 = 1 << 20;
    pub const ABORT_ERROR: u64 = 1 << 21;
    pub const MAX_PAGES: u64 = 1 << 22;
    pub const CACHE_SYMLINKS: u64 = 1 << 23;
    pub const HANDLE_KILLPRIV_V2: u64 = 1 << 28;
    pub const INIT_EXT: u64 = 1 << 30;
    pub const CREATE_SUPP_GROUP: u64 = 1 << 34;
    pub const DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
    pub const PASSTHROUGH: u64 = 1 << 37;
    pub const OVER_IO_URING: u64 = 1 << 41;
}

/// Flags of the reply to OPEN and OPENDIR.
pub mod fopen {
    pub const DIRECT_IO: u32 = 1 << 0;
    pub const KEEP_CACHE: u32 = 1 << 1;
    pub const NOFLUSH: u32 = 1 << 5;
    pub const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
    pub const PASSTHROUGH: u32 = 1 << 7;
}

/// Codes of notifications to the kernel, in place of a reply's error.
pub mod notify {
    pub const INVAL_INODE: i32 = 2;
    pub const INVAL_ENTRY: i32 = 3;
    pub const STORE: i32 = 4;
    /// 7.40, Linux 6.9.
    pub const RESEND: i32 = 7;
    /// 7.45, Linux 6.18.
    pub const PRUNE: i32 = 9;
}

/// GETATTR carries a file handle.
pub const GETATTR_FH: u32 = 1;
/// `FUSE_READ_LOCKOWNER`.
pub const READ_LOCKOWNER: u32 = 1 << 1;
/// WRITE: changed pages of a memory map, through any handle that writes; the flags of the file are not sent.
pub const WRITE_CACHE: u32 = 1 << 0;
/// WRITE: the file loses the set-user-ID and set-group-ID bits.
pub const WRITE_KILL_SUIDGID: u32 = 1 << 2;
/// In the number of a request: it is sent again, after the end of a process that had taken it.
pub const UNIQUE_RESENT: u64 = 1 << 63;
/// FSYNC and FSYNCDIR: the bytes only.
pub const FSYNC_FDATASYNC: u32 = 1;

/// An extension of a request with supplementary groups.
pub const EXT_GROUPS: u32 = 32;
/// GETLK, SETLK and SETLKW: a lock of flock(2).
pub const LK_FLOCK: u32 = 1;

/// Which attributes a SETATTR sets.
pub mod fattr {
    pub const MODE: u32 = 1 << 0;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    pub const FH: u32 = 1 << 6;
    pub const ATIME_NOW: u32 = 1 << 7;
    pub const MTIME_NOW: u32 = 1 << 8;
}

/// `_IOR(229, 0, u32)`: makes a new descriptor of /dev/fuse another channel of a session.
pub const DEV_IOC_CLONE: libc::c_ulong = 0x8004_e500;
/// `_IOW(229, 1, struct fuse_backing_map)`: registers a file for passthrough.
pub const DEV_IOC_BACKING_OPEN: libc::c_ulong = 0x4010_e501;
/// `_IOW(229, 2, u32)`: withdraws a registered file.
pub const DEV_IOC_BACKING_CLOSE: libc::c_ulong = 0x4004_e502;

/// io_uring command: registers an entry and waits for the first request.
pub const URING_CMD_REGISTER: u32 = 1;
/// io_uring command: replies to an entry's request and waits for the next.
pub const URING_CMD_COMMIT_AND_FETCH: u32 = 2;

/// A struct without padding or invalid bit patterns.
///
/// # Safety
/// `repr(C)`, no padding, every bit pattern valid.
pub unsafe trait PlainBytes: Copy + 'static {}

/// Reads a `T` from the start of `bytes`; `None` when the bytes are too few.
pub fn read_plain<T: PlainBytes>(bytes: &[u8]) -> Option<T> {
    if bytes.len() < size_of::<T>() {
        return None;
    }
    // SAFETY: the length was checked, T is plain, and the read needs no alignment.
    Some(unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
}

/// The bytes of `value`.
pub fn bytes_of<T: PlainBytes>(value: &T) -> &[u8] {
    // SAFETY: T is plain, so all bytes are initialised; the lifetime is the reference's.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast::<u8>(), size_of::<T>()) }
}

macro_rules! plain {
    ($( $Name:ident $size:literal { $( $field:ident : $ty:ty ),+ $(,)? } )+) => { $(
        #[repr(C)]
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct $Name { $( pub $field: $ty ),+ }
        // SAFETY: repr(C), integers only, and the assertion below leaves no room for padding.
        unsafe impl PlainBytes for $Name {}
        const _: () = assert!(size_of::<$Name>() == $size && $size == 0 $( + size_of::<$ty>() )+);
    )+ };
}

plain! {
    InHeader 40 { len: u32, opcode: u32, unique: u64, nodeid: u64, uid: u32, gid: u32, pid: u32, total_extlen: u16, padding: u16 }
    OutHeader 16 { len: u32, error: i32, unique: u64 }
    Attr 88 { ino: u64, size: u64, blocks: u64, atime: u64, mtime: u64, ctime: u64, atimensec: u32, mtimensec: u32, ctimensec: u32,
        mode: u32, nlink: u32, uid: u32, gid: u32, rdev: u32, blksize: u32, flags: u32 }
    EntryOut 128 { nodeid: u64, generation: u64, entry_valid: u64, attr_valid: u64, entry_valid_nsec: u32, attr_valid_nsec: u32, attr: Attr }
    AttrOut 104 { attr_valid: u64, attr_valid_nsec: u32, dummy: u32, attr: Attr }
    ForgetIn 8 { nlookup: u64 }
    ForgetOne 16 { nodeid: u64, nlookup: u64 }
    BatchForgetIn 8 { count: u32, dummy: u32 }
    GetattrIn 16 { flags: u32, dummy: u32, fh: u64 }
    OpenIn 8 { flags: u32, open_flags: u32 }
    OpenOut 16 { fh: u64, open_flags: u32, backing_id: i32 }
    ReadIn 40 { fh: u64, offset: u64, size: u32, read_flags: u32, lock_owner: u64, flags: u32, padding: u32 }
    ReleaseIn 24 { fh: u64, flags: u32, release_flags: u32, lock_owner: u64 }
    SetattrIn 88 { valid: u32, padding: u32, fh: u64, size: u64, lock_owner: u64, atime: u64, mtime: u64, ctime: u64, atimensec: u32,
        mtimensec: u32, ctimensec: u32, mode: u32, unused4: u32, uid: u32, gid: u32, unused5: u32 }
    MknodIn 16 { mode: u32, rdev: u32, umask: u32, padding: u32 }
    MkdirIn 8 { mode: u32, umask: u32 }
    RenameIn 8 { newdir: u64 }
    Rename2In 16 { newdir: u64, flags: u32, padding: u32 }
    NotifyInvalInodeOut 24 { ino: u64, off: i64, len: i64 }
    NotifyStoreOut 24 { nodeid: u64, offset: u64, size: u32, padding: u32 }
    LinkIn 8 { oldnodeid: u64 }
    CreateIn 16 { flags: u32, mode: u32, umask: u32, open_flags: u32 }
    WriteIn 40 { fh: u64, offset: u64, size: u32, write_flags: u32, lock_owner: u64, flags: u32, padding: u32 }
    WriteOut 8 { size: u32, padding: u32 }
    FsyncIn 16 { fh: u64, fsync_flags: u32, padding: u32 }
    SetxattrIn 8 { size: u32, flags: u32 }
    FlushIn 24 { fh: u64, unused: u32, padding: u32, lock_owner: u64 }
    FallocateIn 32 { fh: u64, offset: u64, length: u64, mode: u32, padding: u32 }
    CopyFileRangeIn 56 { fh_in: u64, off_in: u64, nodeid_out: u64, fh_out: u64, off_out: u64, len: u64, flags: u64 }
    LkIn 48 { fh: u64, owner: u64, start: u64, end: u64, kind: u32, pid: u32, lk_flags: u32, padding: u32 }
    LkOut 24 { start: u64, end: u64, kind: u32, pid: u32 }
    AccessIn 8 { mask: u32, padding: u32 }
    GetxattrIn 8 { size: u32, padding: u32 }
    GetxattrOut 8 { size: u32, padding: u32 }
    LseekIn 24 { fh: u64, offset: u64, whence: u32, padding: u32 }
    LseekOut 8 { offset: u64 }
    InterruptIn 8 { unique: u64 }
    StatfsOut 80 { blocks: u64, bfree: u64, bavail: u64, files: u64, ffree: u64, bsize: u32, namelen: u32, frsize: u32, padding: u32, spare: [u32; 6] }
    InitIn 16 { major: u32, minor: u32, max_readahead: u32, flags: u32 }
    InitOut 64 { major: u32, minor: u32, max_readahead: u32, flags: u32, max_background: u16, congestion_threshold: u16, max_write: u32,
        time_gran: u32, max_pages: u16, map_alignment: u16, flags2: u32, max_stack_depth: u32, request_timeout: u16, unused: [u16; 11] }
    Dirent 24 { ino: u64, off: u64, namelen: u32, kind: u32 }
    ExtHeader 8 { size: u32, kind: u32 }
    SuppGroups 8 { count: u32, first: u32 }
    BackingMap 16 { fd: i32, flags: u32, padding: u64 }
    NotifyInvalEntryOut 16 { parent: u64, namelen: u32, flags: u32 }
    NotifyPruneOut 16 { count: u32, padding: u32, spare: u64 }
    UringEntInOut 32 { flags: u64, commit_id: u64, payload_sz: u32, padding: u32, reserved: u64 }
    UringReqHeader 288 { in_out: [u64; 16], op_in: [u64; 16], ent: UringEntInOut }
    UringCmdReq 24 { flags: u64, commit_id: u64, qid: u16, padding: [u8; 6] }
}
