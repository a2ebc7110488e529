//! The interface of a file system: one typed method per read-side request. It knows neither descriptors nor rings nor
//! byte layouts.

use crate::abi::InHeader;
use crate::backing::{BackingId, BackingRegistrar};
use crate::errno::Errno;
use crate::notify::KernelNotifier;
use crate::reply::{DirPlusSink, DirSink, ReadReply, ReplyReceipt, XattrReply};
use crate::waiting::WaitingSlots;
use spurline_fs::writable::NewNode;
use spurline_volume::writes::{AttrChange, FileLock, LockConflict, WritePlace};
use std::time::{Duration, SystemTime};

/// The caller of a request, from its header.
#[derive(Debug, Clone, Copy)]
pub struct RequestCaller {
    /// The request's number, unique while it is in flight.
    pub unique: u64,
    /// User of the calling process.
    pub uid: u32,
    /// Group of the calling process.
    pub gid: u32,
    /// The calling thread; 0 for the kernel's own work such as read-ahead.
    pub pid: u32,
    /// Its file mode creation mask, where the request has it; 0 elsewhere.
    pub umask: u32,
    /// The group of the directory in which something is made, if it is one of the caller's supplementary groups and
    /// [`InitInfo::create_group`] is set.
    pub group: Option<u32>,
}

impl RequestCaller {
    pub(crate) fn of(header: &InHeader) -> Self {
        RequestCaller {
            unique: header.unique,
            uid: header.uid,
            gid: header.gid,
            pid: header.pid,
            umask: 0,
            group: None,
        }
    }
}

/// Attributes of an inode, as `stat(2)` shows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatAttr {
    /// Inode number.
    pub ino: u64,
    /// Length in bytes.
    pub size: u64,
    /// Units of 512 bytes.
    pub blocks: u64,
    /// Last access.
    pub atime: SystemTime,
    /// Last change of the bytes.
    pub mtime: SystemTime,
    /// Last change of the inode.
    pub ctime: SystemTime,
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
        let epoch = SystemTime::UNIX_EPOCH;
        StatAttr {
            ino,
            size,
            blocks: size.div_ceil(512),
            atime: epoch,
            mtime: epoch,
            ctime: epoch,
            mode,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
        }
    }
}

/// The reply to a lookup; each one raises the lookup count that [`FuseHandler::forget`] lowers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LookupReply {
    /// The inode's number; 0 means that the name does not exist, which is valid for `entry_ttl`.
    pub ino: u64,
    /// Unique together with `ino` for the life of the file system.
    pub generation: u64,
    /// The inode's attributes.
    pub attr: StatAttr,
    /// How long the kernel may cache the name.
    pub entry_ttl: Duration,
    /// How long the kernel may cache the attributes.
    pub attr_ttl: Duration,
}

impl LookupReply {
    /// "No such name", valid for `ttl`.
    pub fn negative(ttl: Duration) -> Self {
        LookupReply { ino: 0, generation: 0, attr: StatAttr::new(0, 0, 0), entry_ttl: ttl, attr_ttl: Duration::ZERO }
    }
}

/// The reply to open and opendir.
#[derive(Debug, Clone, Copy, Default)]
pub struct HandleReply {
    /// The handle's number, sent with every request on it.
    pub fh: u64,
    /// Keep the inode's cached pages (correct when an inode's bytes never change).
    pub keep_cache: bool,
    /// Bypass the page cache: each read(2) becomes its own requests.
    pub direct_io: bool,
    /// Writes that bypass the page cache may run at the same time, if they do not extend the file.
    pub parallel_direct_writes: bool,
    /// close(2) sends a FLUSH, whose error it returns.
    pub flush: bool,
    /// lseek fails on this handle.
    pub nonseekable: bool,
    /// opendir only: the kernel may cache the listing, and drops it at the next opendir without `keep_cache`.
    pub cache_dir: bool,
    /// open only: the kernel reads this registered file directly and sends no read requests for the handle.
    ///
    /// The handler must follow the kernel's rules: an inode open for passthrough may not at the same time be open
    /// through the page cache, nor with another backing file. An open that breaks the rule fails with EIO. The other
    /// flags (`direct_io` excepted) have no effect with it.
    pub backing: Option<BackingId>,
}

/// Sizes of the file system.
#[derive(Debug, Clone, Copy)]
pub struct StatfsReply {
    /// Total, in units of `bsize`.
    pub blocks: u64,
    /// Free, in units of `bsize`.
    pub bfree: u64,
    /// Free for users, in units of `bsize`.
    pub bavail: u64,
    /// Inodes.
    pub files: u64,
    /// Free inodes.
    pub ffree: u64,
    /// The unit, in bytes.
    pub bsize: u32,
    /// The longest name.
    pub namelen: u32,
}

impl Default for StatfsReply {
    fn default() -> Self {
        StatfsReply { blocks: 0, bfree: 0, bavail: 0, files: 0, ffree: 0, bsize: 4096, namelen: 255 }
    }
}

/// The result of INIT.
#[derive(Debug, Clone)]
pub struct InitInfo {
    /// The kernel's minor version of the protocol.
    pub minor: u32,
    /// Longest read request, in bytes.
    pub max_read: u32,
    /// Registers files for passthrough; `None` when it was not requested or the kernel has no support.
    pub backings: Option<BackingRegistrar>,
    /// Requests that make something have [`RequestCaller::group`].
    pub create_group: bool,
    /// Files that bypass the page cache can be mapped.
    pub direct_mmap: bool,
    /// Sends notifications to the kernel.
    pub notifier: KernelNotifier,
    /// Keeps the session able to serve while requests wait for others.
    pub waiting: WaitingSlots,
}

/// A file system. Methods are called from many threads at once and may block: each call blocks one slot. A panic in a
/// method fails its request with EIO.
///
/// A thread stuck in a method keeps the session from ending, so every wait inside needs a deadline.
#[allow(unused_variables, reason = "the default methods use no arguments")]
pub trait FuseHandler: Send + Sync + 'static {
    /// Called once, before the first request.
    fn init(&self, info: &InitInfo) {}

    /// Called once, when the session has ended.
    fn destroy(&self) {}

    /// Finds `name` in directory `parent`. The names `.` and `..` occur when NFS exports the file system.
    ///
    /// # Errors
    /// ENOENT, and others of the file system.
    fn lookup(&self, parent: u64, name: &[u8], caller: &RequestCaller) -> Result<LookupReply, Errno>;

    /// Lowers the lookup count of `ino` by `nlookup`.
    fn forget(&self, ino: u64, nlookup: u64) {}

    /// Attributes, and how long the kernel may cache them. `fh`: the open handle of the request, if any.
    ///
    /// # Errors
    /// Those of the file system.
    fn getattr(&self, ino: u64, fh: Option<u64>, caller: &RequestCaller) -> Result<(StatAttr, Duration), Errno>;

    /// Writes the link's target into `target` and returns its length.
    ///
    /// # Errors
    /// EINVAL when `ino` is no link.
    fn readlink(&self, ino: u64, target: &mut [u8], caller: &RequestCaller) -> Result<usize, Errno> {
        Err(Errno::EINVAL)
    }

    /// Opens a file. After ENOSYS the kernel opens files without a request.
    ///
    /// # Errors
    /// Those of the file system.
    fn open(&self, ino: u64, flags: u32, caller: &RequestCaller) -> Result<HandleReply, Errno>;

    /// Reads up to `len` bytes at `offset`; fewer mean the end of the file.
    fn read(&self, ino: u64, fh: u64, offset: u64, len: u32, reply: ReadReply<'_>) -> ReplyReceipt;

    /// The last reference to handle `fh` is gone.
    fn release(&self, ino: u64, fh: u64) {}

    /// Opens a directory. After ENOSYS the kernel opens directories without a request, and may cache listings.
    ///
    /// # Errors
    /// Those of the file system.
    fn opendir(&self, ino: u64, flags: u32, caller: &RequestCaller) -> Result<HandleReply, Errno> {
        Ok(HandleReply::default())
    }

    /// Adds entries from `cookie` on (0 is the start) until the sink is full or the directory ends.
    ///
    /// # Errors
    /// Those of the file system.
    fn readdir(
        &self,
        ino: u64,
        fh: u64,
        cookie: u64,
        sink: &mut DirSink<'_>,
        caller: &RequestCaller,
    ) -> Result<(), Errno>;

    /// As `readdir`, with attributes; each entry but `.` and `..` counts as a lookup. Sent only when
    /// [`crate::SessionConfig::readdirplus`] is set.
    ///
    /// # Errors
    /// Those of the file system.
    fn readdirplus(
        &self,
        ino: u64,
        fh: u64,
        cookie: u64,
        sink: &mut DirPlusSink<'_>,
        caller: &RequestCaller,
    ) -> Result<(), Errno> {
        Err(Errno::ENOSYS)
    }

    /// The last reference to directory handle `fh` is gone.
    fn releasedir(&self, ino: u64, fh: u64) {}

    /// Sizes of the file system.
    ///
    /// # Errors
    /// Those of the file system.
    fn statfs(&self, ino: u64) -> Result<StatfsReply, Errno> {
        Ok(StatfsReply::default())
    }

    /// access(2). After ENOSYS, the default, the kernel grants everything without a request.
    ///
    /// # Errors
    /// EACCES when denied.
    fn access(&self, ino: u64, mask: u32, caller: &RequestCaller) -> Result<(), Errno> {
        Err(Errno::ENOSYS)
    }

    /// An extended attribute's value.
    fn getxattr(&self, ino: u64, name: &[u8], reply: XattrReply<'_>, caller: &RequestCaller) -> ReplyReceipt {
        reply.reply_error(Errno::ENOSYS)
    }

    /// The names of the extended attributes, each followed by a NUL.
    fn listxattr(&self, ino: u64, reply: XattrReply<'_>, caller: &RequestCaller) -> ReplyReceipt {
        reply.reply_error(Errno::ENOSYS)
    }

    /// SEEK_DATA and SEEK_HOLE. After ENOSYS, the default, the kernel treats a file as one extent of data.
    ///
    /// # Errors
    /// ENXIO past the end.
    fn lseek(&self, ino: u64, fh: u64, offset: u64, whence: u32) -> Result<u64, Errno> {
        Err(Errno::ENOSYS)
    }

    /// The process that waits for request `unique` was interrupted. An early reply is optional. The call may come
    /// before the request itself.
    fn interrupt(&self, unique: u64) {}

    /// The connection to the kernel ended: waits that only a further request would end have to end now.
    fn disconnect(&self) {}

    // Changes. A handler without them refuses each with EROFS. After ENOSYS, the answer of such a handler to FLUSH and
    // FSYNC, the kernel stops sending those.

    /// Sets attributes; `fh`: the open handle of the request, if any. Returns the new ones, and how long the kernel may
    /// cache them.
    ///
    /// # Errors
    /// Those of the file system.
    fn setattr(
        &self,
        ino: u64,
        fh: Option<u64>,
        set: &AttrChange,
        caller: &RequestCaller,
    ) -> Result<(StatAttr, Duration), Errno> {
        Err(Errno::EROFS)
    }

    /// Makes `new` as `name` in `parent`.
    ///
    /// # Errors
    /// Those of the file system.
    fn make(&self, parent: u64, name: &[u8], new: NewNode<'_>, caller: &RequestCaller) -> Result<LookupReply, Errno> {
        Err(Errno::EROFS)
    }

    /// Gives inode `ino` the name `name` in `parent`.
    ///
    /// # Errors
    /// Those of the file system.
    fn link(&self, ino: u64, parent: u64, name: &[u8], caller: &RequestCaller) -> Result<LookupReply, Errno> {
        Err(Errno::EROFS)
    }

    /// Removes a name: of an empty directory, or of anything else.
    ///
    /// # Errors
    /// Those of the file system.
    fn remove(&self, parent: u64, name: &[u8], directory: bool, caller: &RequestCaller) -> Result<(), Errno> {
        Err(Errno::EROFS)
    }

    /// Renames from a name in a directory to another; `flags` as for renameat2(2).
    ///
    /// # Errors
    /// Those of the file system.
    fn rename(&self, from: (u64, &[u8]), to: (u64, &[u8]), flags: u32, caller: &RequestCaller) -> Result<(), Errno> {
        Err(Errno::EROFS)
    }

    /// Makes and opens a file; `flags` as for open(2).
    ///
    /// # Errors
    /// Those of the file system.
    fn create(
        &self,
        parent: u64,
        name: &[u8],
        flags: u32,
        mode: u32,
        caller: &RequestCaller,
    ) -> Result<(LookupReply, HandleReply), Errno> {
        Err(Errno::EROFS)
    }

    /// Makes and opens a file without a name in the directory `parent`.
    ///
    /// # Errors
    /// Those of the file system.
    fn tmpfile(
        &self,
        parent: u64,
        flags: u32,
        mode: u32,
        caller: &RequestCaller,
    ) -> Result<(LookupReply, HandleReply), Errno> {
        Err(Errno::EROFS)
    }

    /// Writes to the handle `(ino, fh)`, at `(offset, place)`; returns the number of bytes. `lose_privileges`: the caller has no right to
    /// keep the file's set-user-ID and set-group-ID bits.
    ///
    /// # Errors
    /// Those of the file system.
    fn write(
        &self,
        (ino, fh): (u64, u64),
        (offset, place): (u64, WritePlace),
        data: &[u8],
        lose_privileges: bool,
        caller: &RequestCaller,
    ) -> Result<usize, Errno> {
        Err(Errno::EROFS)
    }

    /// The process `lock_owner` closed a descriptor of the handle; sent if [`HandleReply::flush`] is set.
    ///
    /// # Errors
    /// The failure of an earlier write.
    fn flush(&self, ino: u64, fh: u64, lock_owner: u64) -> Result<(), Errno> {
        Err(Errno::ENOSYS)
    }

    /// A lock of another owner that is in the way of `lock`. Locks become requests if [`crate::SessionWrites::locks`] is
    /// set.
    ///
    /// # Errors
    /// Those of the file system.
    fn test_lock(
        &self,
        (ino, fh): (u64, u64),
        lock: &FileLock,
        caller: &RequestCaller,
    ) -> Result<Option<LockConflict>, Errno> {
        Err(Errno::ENOSYS)
    }

    /// Sets or removes a lock for the process `pid`; with `wait`, as soon as no other is in the way, or until the request
    /// is interrupted. A wait begins with [`WaitingSlots::begin_wait`].
    ///
    /// # Errors
    /// EAGAIN without `wait`; EINTR after an interruption.
    fn set_lock(
        &self,
        (ino, fh): (u64, u64),
        lock: &FileLock,
        pid: u32,
        wait: bool,
        caller: &RequestCaller,
    ) -> Result<(), Errno> {
        Err(Errno::ENOSYS)
    }

    /// Makes a file's changes durable, or its bytes only.
    ///
    /// # Errors
    /// Those of the file system.
    fn fsync(&self, ino: u64, fh: u64, data_only: bool) -> Result<(), Errno> {
        Err(Errno::ENOSYS)
    }

    /// Makes changes of a directory's names durable.
    ///
    /// # Errors
    /// Those of the file system.
    fn fsyncdir(&self, ino: u64, fh: u64, data_only: bool) -> Result<(), Errno> {
        Err(Errno::ENOSYS)
    }

    /// Allocates or frees space of the handle `(ino, fh)`; `mode` as for fallocate(2).
    ///
    /// # Errors
    /// Those of the file system.
    fn fallocate(
        &self,
        (ino, fh): (u64, u64),
        mode: u32,
        offset: u64,
        len: u64,
        caller: &RequestCaller,
    ) -> Result<(), Errno> {
        Err(Errno::EROFS)
    }

    /// Copies bytes between two handles, each with its inode, number and offset; returns their number.
    ///
    /// # Errors
    /// EXDEV and EOPNOTSUPP make the kernel read and write instead.
    fn copy_file_range(
        &self,
        from: (u64, u64, u64),
        to: (u64, u64, u64),
        len: u64,
        caller: &RequestCaller,
    ) -> Result<u64, Errno> {
        Err(Errno::EROFS)
    }

    /// Sets an extended attribute; `flags` as for setxattr(2).
    ///
    /// # Errors
    /// Those of the file system.
    fn setxattr(&self, ino: u64, name: &[u8], value: &[u8], flags: u32, caller: &RequestCaller) -> Result<(), Errno> {
        Err(Errno::EROFS)
    }

    /// Removes an extended attribute.
    ///
    /// # Errors
    /// Those of the file system.
    fn removexattr(&self, ino: u64, name: &[u8], caller: &RequestCaller) -> Result<(), Errno> {
        Err(Errno::EROFS)
    }
}
