//! The one interface of both file systems, the read-only and the writable one. FUSE is an adapter of it, and a server of
//! another protocol stands beside FUSE. It knows no protocol, no kernel and no volume.
//!
//! An inode has a number while its lookup count is above zero: each entry raises the count, and [`FileService::forget`]
//! lowers it. Number and generation are the same in every mount of a source, so they are a file handle that outlives both:
//! with the names kept ([`FileService::keep_names`]), a lookup of `.` finds a forgotten number again.

use crate::attr::LookupOutcome;
use crate::errno::{FsError, FsResult};
use crate::inode_limit::LimitedInodes;
use crate::kept_records::KeptLife;
use crate::name_records::NameRecords;
use crate::passthrough::{LiveBacking, RegisterBacking};
use spurline_volume::ReadData;
use spurline_volume::whole_files::WholeFiles;
use spurline_volume::writes::{AttrChange, FileLock, FileTime, LockConflict, SourceSpace, WritePlace};
use std::any::Any;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// The user and the process that a call is made for.
#[derive(Debug, Clone, Copy, Default)]
pub struct FsCaller<'a> {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// The supplementary groups, as far as they are known.
    pub groups: CallerGroups<'a>,
    /// The thread on this host; 0 for a caller on another host, for work of the kernel, or a process of another namespace.
    pub pid: u32,
    /// The file mode creation mask, for calls that make something.
    pub umask: u32,
    /// The request.
    pub request: RequestNumber,
}

/// Distinguishes a request from all others of a mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RequestNumber {
    /// The number; 0 where there is none.
    pub number: u64,
    /// A process before, which has ended, has perhaps served the request without an answer.
    pub repeated: bool,
}

impl RequestNumber {
    /// A request without a number, which is never repeated.
    pub const NONE: RequestNumber = RequestNumber { number: 0, repeated: false };
}

/// The supplementary groups of a caller. Only a kernel has checked the caller's rights before the call, by all groups; the
/// first three variants are a kernel's.
///
/// The group of a directory counts when something is made in it: the new object gets the directory's group if that has the
/// set-group-ID bit, and only a member keeps such a bit of its own.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CallerGroups<'a> {
    /// Not known: they are read from the system by [`FsCaller::pid`] where they matter.
    #[default]
    Unknown,
    /// The directory's group is not among them, or is the caller's own group.
    NotOfDirectory,
    /// The directory's group, this one, is among them.
    OfDirectory(u32),
    /// All of them, from the caller's own host: the file system checks the rights.
    All(&'a [u32]),
}

impl FsCaller<'_> {
    /// Whether the caller is known to be a member of a group.
    pub fn is_member(&self, group: u32) -> bool {
        self.gid == group || matches!(self.groups, CallerGroups::All(groups) if groups.contains(&group))
    }
}

/// Attributes of an inode, as `stat(2)` shows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatAttr {
    /// The inode number that programs see.
    pub ino: u64,
    /// Length in bytes.
    pub size: u64,
    /// Units of 512 bytes.
    pub blocks: u64,
    /// Last access.
    pub atime: FileTime,
    /// Last change of the bytes.
    pub mtime: FileTime,
    /// Last change of the inode.
    pub ctime: FileTime,
    /// File type and permission bits (`S_IFREG | 0o444`).
    pub mode: u32,
    /// Number of names.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number of a device node, as makedev(3) has it.
    pub rdev: u64,
    /// Preferred size of a read, in bytes.
    pub blksize: u32,
}

impl StatAttr {
    /// Attributes of inode `ino` with file type and permission bits `mode` and `size` bytes: owner root, one name,
    /// all times the epoch.
    pub fn new(ino: u64, mode: u32, size: u64) -> Self {
        StatAttr {
            ino,
            size,
            blocks: size.div_ceil(512),
            atime: FileTime::default(),
            mtime: FileTime::default(),
            ctime: FileTime::default(),
            mode,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
        }
    }
}

/// An inode that was found or made; its lookup count was raised by one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileEntry {
    /// The inode's number in calls of the service. Programs see that of `attr`.
    pub ino: u64,
    /// Distinguishes inodes with the same number; 32 bits.
    pub generation: u64,
    /// The attributes.
    pub attr: StatAttr,
    /// How long the name may be kept.
    pub entry_ttl: Duration,
    /// How long the attributes may be kept.
    pub attr_ttl: Duration,
}

/// An open file or directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HandleRef {
    /// Its inode.
    pub ino: u64,
    /// The number that the open returned.
    pub fh: u64,
}

/// A name in a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirName<'a> {
    /// The directory's inode.
    pub parent: u64,
    /// The name.
    pub name: &'a [u8],
}

/// What [`FileService::make`] makes.
#[derive(Debug, Clone, Copy)]
pub enum NewNode<'a> {
    /// A directory.
    Directory {
        /// Its permission bits.
        mode: u32,
    },
    /// A directory that is only on the way to a new file: a bucket keeps nothing of it.
    ImpliedDirectory {
        /// Its permission bits.
        mode: u32,
    },
    /// A file, a device, a pipe or a socket.
    Node {
        /// Its type and permission bits.
        mode: u32,
        /// Its device number, as `makedev(3)` has it.
        rdev: u64,
    },
    /// A symbolic link.
    Symlink {
        /// Where it leads.
        target: &'a [u8],
    },
}

/// A position in an open file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FilePosition {
    /// The file.
    pub file: HandleRef,
    /// Bytes from its start.
    pub offset: u64,
}

/// How a file is made and opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CreateMode {
    /// The flags of `open(2)`; with `O_EXCL` the name must not exist.
    pub flags: u32,
    /// File type and permission bits.
    pub mode: u32,
}

/// A file that was opened, and how a kernel is to use it.
#[derive(Default)]
pub struct OpenedFile {
    /// The handle's number.
    pub fh: u64,
    /// Pages of the inode that the kernel kept are valid.
    pub keep_cache: bool,
    /// Every read and write becomes a request.
    pub direct_io: bool,
    /// Writes that bypass the kernel's pages may be made at once, if they do not extend the file.
    pub parallel_direct_writes: bool,
    /// A close has something to report: see [`FileService::flush`].
    pub flush: bool,
    /// The file that the kernel reads and writes directly. The handle keeps a reference too.
    pub backing: Option<Arc<LiveBacking>>,
}

/// Bytes to write.
#[derive(Debug, Clone, Copy)]
pub struct FileWrite<'a> {
    /// Where they go, with `place`.
    pub offset: u64,
    /// Whether the offset counts.
    pub place: WritePlace,
    /// The bytes.
    pub data: &'a [u8],
    /// The caller has no right to keep the file's set-user-ID and set-group-ID bits.
    pub lose_privileges: bool,
}

/// A part of a listing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirRead {
    /// The directory.
    pub directory: HandleRef,
    /// Where to begin: 0, or [`ListedEntry::next`] of the last name that was taken, also through another handle.
    pub from: u64,
    /// The most names that the caller has room for; more may be offered.
    pub names_max: usize,
    /// With an entry for each name, as [`FileService::lookup`] returns.
    pub plus: bool,
}

/// One name of a listing.
#[derive(Debug, Clone, Copy)]
pub struct ListedEntry<'a> {
    /// The name, `.` and `..` included.
    pub name: &'a [u8],
    /// The position after this name.
    pub next: u64,
    /// The inode number that programs see.
    pub ino: u64,
    /// The file type, as in a mode; 0 where it is not known.
    pub file_type: u32,
    /// The inode, if entries were requested; never of `.` and `..`. A name that is not taken does not count as a lookup.
    pub entry: Option<FileEntry>,
}

/// A lock as a program requests it.
#[derive(Debug, Clone, Copy)]
pub struct LockRequest {
    /// The lock, or the range to unlock.
    pub lock: FileLock,
    /// The process.
    pub pid: u32,
    /// The number of the request, for [`FileService::interrupt`].
    pub number: u64,
}

/// What a request for a lock needs of the session that it came through.
pub trait BeginWait {
    /// Lets other requests be served meanwhile. Dropping the result ends that.
    ///
    /// # Errors
    /// `ENOLCK` when too many requests wait.
    fn begin_wait(&self) -> FsResult<Box<dyn Any>>;

    /// Whether it is certain that the end of the open file `fh` is not on its way: if the program that requests the lock has
    /// closed the last descriptor before, [`FileService::release`] was called.
    fn has_all_closes(&self, fh: u64) -> bool;
}

/// The kernel's view of files.
pub trait KernelView {
    /// Makes the kernel get the attributes again.
    fn forget_attr(&self, ino: u64) -> io::Result<()>;

    /// Makes the kernel drop the pages, and get the attributes again.
    fn drop_pages(&self, ino: u64) -> io::Result<()>;

    /// Puts a byte into the kernel's pages, whose file then has at least that length.
    fn store_byte(&self, ino: u64, offset: u64, byte: u8) -> io::Result<()>;
}

/// What a kernel offers to the file system that it mounts: it reads files itself, keeps pages and attributes, and sends
/// other requests while one waits. The default is a client that does none of this.
#[derive(Clone, Copy, Default)]
pub struct KernelSide<'a> {
    /// Registers files that the kernel reads and writes itself.
    pub backings: Option<&'a dyn RegisterBacking>,
    /// Changes the kernel's view of a file.
    pub view: Option<&'a dyn KernelView>,
    /// Lets a request wait for others.
    pub waits: Option<&'a dyn BeginWait>,
}

/// A file system. Every call may be made from any thread, and blocks as long as the volume or source does. A request that
/// hangs holds up only its own thread.
///
/// Cost: a call is direct where the type is known, as in a FUSE session. A read allocates nothing, nor does a write of a
/// caller that keeps its privileges.
#[allow(unused_variables, reason = "the default methods use no arguments")]
pub trait FileService: Send + Sync + 'static {
    /// Finds `name` in the directory `parent`. `.` and `..` of any inode lead to itself and to its directory, also of a
    /// forgotten one; no rights are needed for them.
    ///
    /// # Errors
    /// `ESTALE` for a number that leads to nothing; `EACCES`; those of the volume.
    fn lookup(&self, parent: u64, name: &[u8], caller: &FsCaller<'_>) -> FsResult<LookupOutcome<FileEntry>>;

    /// Lowers the lookup count of `ino` by `n`. Open handles stay valid.
    fn forget(&self, ino: u64, n: u64) {}

    /// Attributes, and how long they may be kept; `fh`: an open handle of the inode, if any.
    ///
    /// # Errors
    /// `ESTALE` for a forgotten inode; those of the volume.
    fn getattr(&self, ino: u64, fh: Option<u64>, caller: &FsCaller<'_>) -> FsResult<(StatAttr, Duration)>;

    /// The target of a symbolic link.
    ///
    /// # Errors
    /// `EINVAL` for anything else; those of the volume.
    fn readlink(&self, ino: u64, caller: &FsCaller<'_>) -> FsResult<Vec<u8>> {
        Err(FsError::Invalid("not a symbolic link"))
    }

    /// Whether the caller may read, write or execute: `mask` as for `access(2)`.
    ///
    /// # Errors
    /// `EACCES` if not, `EROFS` for a write that none may make.
    fn access(&self, ino: u64, mask: u32, caller: &FsCaller<'_>) -> FsResult<()> {
        Err(FsError::NotServed)
    }

    /// Opens a file with the flags of `open(2)`.
    ///
    /// # Errors
    /// `EROFS` for write access that none has; `ESTALE` when the path leads to another file; those of the volume.
    fn open(&self, ino: u64, flags: u32, caller: &FsCaller<'_>, kernel: &KernelSide<'_>) -> FsResult<OpenedFile>;

    /// Reads up to `dst.len()` bytes from `offset`, into `dst` or as memory of the cache; fewer mean the end of the file.
    ///
    /// # Errors
    /// `EBADF`; `ESTALE` when the version is gone; those of the volume.
    fn read(&self, file: HandleRef, offset: u64, dst: &mut [u8]) -> FsResult<ReadData>;

    /// Closes a file.
    ///
    /// # Errors
    /// `EBADF` when it is not open.
    fn release(&self, fh: u64) -> FsResult<()> {
        Ok(())
    }

    /// New files that are seen whole only, where all files are published: for callers without a kernel.
    fn whole_files(&self) -> Option<&dyn WholeFiles> {
        None
    }

    /// Opens a directory.
    ///
    /// # Errors
    /// `ENOTDIR`; as [`FileService::open`].
    fn opendir(&self, ino: u64, caller: &FsCaller<'_>) -> FsResult<u64> {
        Ok(0)
    }

    /// Passes names to `take` until it returns false, or a part of the directory was passed. A name that was not taken
    /// comes first in the next call. The directory ends where a call passes no name.
    ///
    /// # Errors
    /// `EBADF`; those of the volume, if no name was passed.
    fn readdir(
        &self,
        read: &DirRead,
        caller: &FsCaller<'_>,
        take: &mut dyn FnMut(&ListedEntry<'_>) -> bool,
    ) -> FsResult<()>;

    /// Closes a directory.
    ///
    /// # Errors
    /// `EBADF` when it is not open.
    fn releasedir(&self, fh: u64) -> FsResult<()> {
        Ok(())
    }

    /// Sizes of the file system.
    fn statfs(&self) -> FsResult<SourceSpace>;

    /// The value of an extended attribute.
    ///
    /// # Errors
    /// `ENODATA` if there is none; those of the volume.
    fn getxattr(&self, ino: u64, name: &[u8], caller: &FsCaller<'_>) -> FsResult<Vec<u8>> {
        Err(FsError::NotServed)
    }

    /// The names of the extended attributes, each followed by a NUL.
    fn listxattr(&self, ino: u64, caller: &FsCaller<'_>) -> FsResult<Vec<u8>> {
        Err(FsError::NotServed)
    }

    /// The next data or hole from `offset`; `whence` is `SEEK_DATA` or `SEEK_HOLE`.
    ///
    /// # Errors
    /// `ENOSYS` where a file is one extent of data; `ENXIO` past the end.
    fn lseek(&self, file: HandleRef, offset: u64, whence: u32) -> FsResult<u64> {
        Err(FsError::NotServed)
    }

    // Changes. A file system without them refuses each with EROFS.

    /// Sets attributes; `fh`: an open handle of the inode, if any. Returns the new ones, and how long they may be kept.
    fn setattr(
        &self,
        ino: u64,
        fh: Option<u64>,
        set: &AttrChange,
        caller: &FsCaller<'_>,
    ) -> FsResult<(StatAttr, Duration)> {
        Err(FsError::ReadOnly)
    }

    /// Makes `new` as `name` in `parent`.
    ///
    /// # Errors
    /// `EEXIST`; those of the source.
    fn make(&self, parent: u64, name: &[u8], new: NewNode<'_>, caller: &FsCaller<'_>) -> FsResult<FileEntry> {
        Err(FsError::ReadOnly)
    }

    /// Gives inode `ino` the name `name` in `parent`.
    ///
    /// # Errors
    /// `EEXIST`; those of the source.
    fn link(&self, ino: u64, parent: u64, name: &[u8], caller: &FsCaller<'_>) -> FsResult<FileEntry> {
        Err(FsError::ReadOnly)
    }

    /// Removes a name: of an empty directory, or of anything else.
    fn remove(&self, parent: u64, name: &[u8], directory: bool, caller: &FsCaller<'_>) -> FsResult<()> {
        Err(FsError::ReadOnly)
    }

    /// Renames; `flags` as for renameat2(2).
    fn rename(&self, from: DirName<'_>, to: DirName<'_>, flags: u32, caller: &FsCaller<'_>) -> FsResult<()> {
        Err(FsError::ReadOnly)
    }

    /// Makes and opens a file as `name` in `parent`; without `O_EXCL`, opens one that exists.
    ///
    /// # Errors
    /// `EEXIST`; those of the source.
    fn create(
        &self,
        parent: u64,
        name: &[u8],
        how: CreateMode,
        caller: &FsCaller<'_>,
        kernel: &KernelSide<'_>,
    ) -> FsResult<(FileEntry, OpenedFile)> {
        Err(FsError::ReadOnly)
    }

    /// Makes and opens a file without a name in the directory `parent`.
    fn tmpfile(
        &self,
        parent: u64,
        how: CreateMode,
        caller: &FsCaller<'_>,
        kernel: &KernelSide<'_>,
    ) -> FsResult<(FileEntry, OpenedFile)> {
        Err(FsError::ReadOnly)
    }

    /// Writes; returns the number of bytes.
    ///
    /// # Errors
    /// `EBADF`; those of the source.
    fn write(&self, file: HandleRef, write: &FileWrite<'_>, caller: &FsCaller<'_>) -> FsResult<usize> {
        Err(FsError::ReadOnly)
    }

    /// A process closed a descriptor of the file: its locks with the number `lock_owner` end.
    ///
    /// # Errors
    /// The failure of an earlier write; `ENOSYS` where a close has nothing to report.
    fn flush(&self, file: HandleRef, lock_owner: u64, caller: &FsCaller<'_>) -> FsResult<()> {
        Err(FsError::NotServed)
    }

    /// Makes a file's changes durable, or its bytes only.
    ///
    /// # Errors
    /// `EBADF`; those of the source; `ENOSYS` where there is nothing to make durable.
    fn fsync(&self, file: HandleRef, data_only: bool) -> FsResult<()> {
        Err(FsError::NotServed)
    }

    /// Makes changes of a directory's names durable.
    ///
    /// # Errors
    /// As [`FileService::fsync`].
    fn fsyncdir(&self, directory: HandleRef, data_only: bool) -> FsResult<()> {
        Err(FsError::NotServed)
    }

    /// Allocates or frees space; `mode` as for fallocate(2).
    ///
    /// # Errors
    /// `EBADF`; those of the source.
    fn fallocate(&self, at: FilePosition, len: u64, mode: u32, caller: &FsCaller<'_>) -> FsResult<()> {
        Err(FsError::ReadOnly)
    }

    /// A caller has changed bytes of an open file, which takes set-user-ID and set-group-ID bits away: the kernel gets the
    /// attributes again if it may have such bits.
    fn refresh_privileges(&self, file: HandleRef, view: &dyn KernelView) {}

    /// Copies up to `len` bytes between two open files; returns their number.
    ///
    /// # Errors
    /// `EBADF`; `EXDEV` and `EOPNOTSUPP` where the caller has to read and write; those of the source.
    fn copy_file_range(&self, from: FilePosition, to: FilePosition, len: u64, caller: &FsCaller<'_>) -> FsResult<u64> {
        Err(FsError::ReadOnly)
    }

    /// Sets an extended attribute; `flags` as for setxattr(2).
    fn setxattr(&self, ino: u64, name: &[u8], value: &[u8], flags: u32, caller: &FsCaller<'_>) -> FsResult<()> {
        Err(FsError::ReadOnly)
    }

    /// Removes an extended attribute.
    ///
    /// # Errors
    /// `ENODATA` if there is none; those of the source.
    fn removexattr(&self, ino: u64, name: &[u8], caller: &FsCaller<'_>) -> FsResult<()> {
        Err(FsError::ReadOnly)
    }

    // Locks. Without them, a kernel keeps the locks of its own programs.

    /// A lock of another owner that is in the way of `lock`. `number`: the request, for [`FileService::interrupt`].
    ///
    /// # Errors
    /// `EBADF`; `EINTR` after an interruption; those of the source.
    fn test_lock(
        &self,
        file: HandleRef,
        lock: &FileLock,
        number: u64,
        kernel: &KernelSide<'_>,
    ) -> FsResult<Option<LockConflict>> {
        Err(FsError::NotServed)
    }

    /// Sets or removes a lock; with `wait`, as soon as no other is in the way.
    ///
    /// # Errors
    /// `EAGAIN` while another lock is in the way and there is no `wait`; `EINTR` after an interruption; `ENOLCK` when too
    /// many requests wait; those of the source.
    fn set_lock(
        &self,
        file: HandleRef,
        request: &LockRequest,
        wait: bool,
        caller: &FsCaller<'_>,
        kernel: &KernelSide<'_>,
    ) -> FsResult<()> {
        Err(FsError::NotServed)
    }

    /// The program that made request `number` got a signal: if the request waits for a lock, the wait ends. The call may
    /// come before the request.
    fn interrupt(&self, number: u64) {}

    /// Ends all waits: no answer can be sent any more.
    fn end_waits(&self) {}

    // The life of a service.

    /// The kernel can map files that bypass its pages: files that are only written may do that.
    fn allow_direct_writes(&self) {}

    /// Closes everything that is open, after the last call.
    fn close_all(&self) {}

    /// Its inodes, if their memory has a limit: a client that keeps lookup counts is requested to lower them.
    fn limited_inodes(self: Arc<Self>) -> Option<Arc<dyn LimitedInodes>> {
        None
    }

    /// Keeps the names of all inodes in `records` from now on, those of the present ones included. Only the first call has
    /// an effect.
    fn keep_names(&self, records: Arc<dyn NameRecords>) {}

    /// Keeps inodes and handles from now on, and continues with those of the processes before; false where that is not supported.
    /// Called before the first request.
    fn keep_life(&self, life: &KeptLife<'_>) -> bool {
        false
    }

    /// The present path of an inode below the source, for logs; `None` if it has no name, or was forgotten.
    fn path_of(&self, ino: u64) -> Option<Vec<u8>> {
        None
    }

    /// Logs the failure of the call `op` on `ino`, where it is more than what any program may run into.
    fn log_failure(&self, op: &'static str, ino: u64, error: &FsError) {}
}
