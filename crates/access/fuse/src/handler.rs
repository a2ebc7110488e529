//! What a file system answers: one typed method for each read-side request. It deliberately knows neither
//! descriptors nor rings nor byte layouts.

use crate::backing::{BackingId, Backings};
use crate::errno::Errno;
use crate::reply::{DirPlusSink, DirSink, ReadReply, Replied, XattrReply};
use crate::request::ModifyOp;
use std::time::{Duration, SystemTime};

/// What a request's header says of its caller.
#[derive(Debug, Clone, Copy)]
pub struct Caller {
    /// The request's number, unique while it is under way.
    pub unique: u64,
    /// User of the calling process.
    pub uid: u32,
    /// Group of the calling process.
    pub gid: u32,
    /// The calling process; 0 for work of the kernel's own such as read-ahead.
    pub pid: u32,
}

/// Attributes of an inode, as `stat(2)` shows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attr {
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
    /// Preferred size of a read, in bytes.
    pub blksize: u32,
}

impl Attr {
    /// Attributes of inode `ino` with file type and permission bits `mode` and `size` bytes: owner root,
    /// one name, all times the epoch.
    pub fn new(ino: u64, mode: u32, size: u64) -> Self {
        let epoch = SystemTime::UNIX_EPOCH;
        Attr {
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
            blksize: 4096,
        }
    }
}

/// The answer to a lookup; each one given counts once towards a later [`Handler::forget`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The inode's number; 0 says the name does not exist and may be remembered as such for `entry_ttl`.
    pub ino: u64,
    /// With `ino` unique for the life of the file system.
    pub generation: u64,
    /// The inode's attributes.
    pub attr: Attr,
    /// How long the kernel may believe the name.
    pub entry_ttl: Duration,
    /// How long the kernel may believe the attributes.
    pub attr_ttl: Duration,
}

impl Entry {
    /// "No such name", to be remembered for `ttl`.
    pub fn negative(ttl: Duration) -> Self {
        Entry { ino: 0, generation: 0, attr: Attr::new(0, 0, 0), entry_ttl: ttl, attr_ttl: Duration::ZERO }
    }
}

/// The answer to open and opendir.
#[derive(Debug, Clone, Copy, Default)]
pub struct Opened {
    /// The handle's number, given back with every request on it.
    pub fh: u64,
    /// Keep what the page cache holds of this inode (right when an inode's bytes never change).
    pub keep_cache: bool,
    /// Bypass the page cache: each read(2) becomes requests of its own.
    pub direct_io: bool,
    /// lseek fails on this handle.
    pub nonseekable: bool,
    /// opendir only: the kernel may remember the listing, and forgets it at the next opendir without `keep_cache`.
    pub cache_dir: bool,
    /// open only: the kernel reads this registered file itself and never asks for the handle's data again.
    ///
    /// The kernel's rules, which are the handler's to keep: an inode open for passthrough may not at the
    /// same time be open through the page cache, nor with another backing file; an open that breaks
    /// the rule fails with EIO. The other flags (`direct_io` excepted) are left out beside it.
    pub backing: Option<BackingId>,
}

/// Sizes of the file system.
#[derive(Debug, Clone, Copy)]
pub struct Statfs {
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

impl Default for Statfs {
    fn default() -> Self {
        Statfs { blocks: 0, bfree: 0, bavail: 0, files: 0, ffree: 0, bsize: 4096, namelen: 255 }
    }
}

/// What the kernel and the session agreed on.
#[derive(Debug, Clone)]
pub struct InitInfo {
    /// The kernel's minor version of the protocol.
    pub minor: u32,
    /// Longest read the kernel will ask for, in bytes.
    pub max_read: u32,
    /// Where files are registered for passthrough; `None` when it was not asked for or the kernel has it not.
    pub backings: Option<Backings>,
}

/// A file system. Methods are called from many threads at once and may block: each blocks one slot.
/// A panic in a method answers its request with EIO.
///
/// Threads that are stuck in a method keep a session from ending, so every wait inside needs a deadline.
#[allow(unused_variables, reason = "the default answers use no arguments")]
pub trait Handler: Send + Sync + 'static {
    /// Called once, before the first request.
    fn init(&self, info: &InitInfo) {}

    /// Called once, when the session has ended.
    fn destroy(&self) {}

    /// Finds `name` in directory `parent`. Names of `.` and `..` arrive when the file system is exported by NFS.
    ///
    /// # Errors
    /// ENOENT and what else the file system has.
    fn lookup(&self, parent: u64, name: &[u8]) -> Result<Entry, Errno>;

    /// Takes back `nlookup` of the lookups that answered `ino`.
    fn forget(&self, ino: u64, nlookup: u64) {}

    /// Attributes, and how long the kernel may believe them. `fh`: the handle they are asked through.
    ///
    /// # Errors
    /// As the file system has.
    fn getattr(&self, ino: u64, fh: Option<u64>) -> Result<(Attr, Duration), Errno>;

    /// Writes the link's target into `target` and returns its length.
    ///
    /// # Errors
    /// EINVAL when `ino` is no link.
    fn readlink(&self, ino: u64, target: &mut [u8]) -> Result<usize, Errno> {
        Err(Errno::EINVAL)
    }

    /// Opens a file. ENOSYS says that opens need no answer at all; the kernel then never sends one again.
    ///
    /// # Errors
    /// As the file system has.
    fn open(&self, ino: u64, flags: u32) -> Result<Opened, Errno>;

    /// Reads up to `len` bytes at `offset`; fewer mean the end of the file.
    fn read(&self, ino: u64, fh: u64, offset: u64, len: u32, reply: ReadReply<'_>) -> Replied;

    /// The last user of handle `fh` is gone.
    fn release(&self, ino: u64, fh: u64) {}

    /// Opens a directory. ENOSYS says that the kernel may do without, and may remember listings.
    ///
    /// # Errors
    /// As the file system has.
    fn opendir(&self, ino: u64, flags: u32) -> Result<Opened, Errno> {
        Ok(Opened::default())
    }

    /// Adds entries from `cookie` on (0 is the start) until the sink is full or the directory ends.
    ///
    /// # Errors
    /// As the file system has.
    fn readdir(&self, ino: u64, fh: u64, cookie: u64, sink: &mut DirSink<'_>) -> Result<(), Errno>;

    /// The same with attributes; each entry added but `.` and `..` counts as a lookup.
    /// Asked only when [`crate::SessionConfig::readdirplus`] is set.
    ///
    /// # Errors
    /// As the file system has.
    fn readdirplus(&self, ino: u64, fh: u64, cookie: u64, sink: &mut DirPlusSink<'_>) -> Result<(), Errno> {
        Err(Errno::ENOSYS)
    }

    /// The last user of directory handle `fh` is gone.
    fn releasedir(&self, ino: u64, fh: u64) {}

    /// Sizes of the file system.
    ///
    /// # Errors
    /// As the file system has.
    fn statfs(&self, ino: u64) -> Result<Statfs, Errno> {
        Ok(Statfs::default())
    }

    /// access(2). The default, ENOSYS, allows everything and is asked once.
    ///
    /// # Errors
    /// EACCES when refused.
    fn access(&self, ino: u64, mask: u32, caller: &Caller) -> Result<(), Errno> {
        Err(Errno::ENOSYS)
    }

    /// An extended attribute's value.
    fn getxattr(&self, ino: u64, name: &[u8], reply: XattrReply<'_>) -> Replied {
        reply.error(Errno::ENOSYS)
    }

    /// The names of the extended attributes, each followed by a NUL.
    fn listxattr(&self, ino: u64, reply: XattrReply<'_>) -> Replied {
        reply.error(Errno::ENOSYS)
    }

    /// SEEK_DATA and SEEK_HOLE. The default, ENOSYS, makes the kernel treat a file as one piece of data.
    ///
    /// # Errors
    /// ENXIO past the end.
    fn lseek(&self, ino: u64, fh: u64, offset: u64, whence: u32) -> Result<u64, Errno> {
        Err(Errno::ENOSYS)
    }

    /// The process that waits for request `unique` was interrupted. Answering early is allowed, not needed.
    fn interrupt(&self, unique: u64) {}

    /// A request that would change something; what it is refused with.
    fn modify(&self, op: ModifyOp, ino: u64, caller: &Caller) -> Errno {
        Errno::EROFS
    }
}
