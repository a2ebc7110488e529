//! The mounted file system: inodes, handles, POSIX rules and read-ahead over any volume. It knows neither FUSE nor
//! sockets nor the volume's implementation, so that all of it is tested without a mount.
//!
//! A file's inode is bound to one version of its path. Its bytes never change, so the kernel's cached pages stay
//! valid. A lookup that finds another version returns another inode. Readers of the old inode get its bytes or
//! [`FsError::Stale`], never a mixture. [`writable`] is the other file system, of a source that is changed. Both are a
//! [`FileService`].
#![forbid(unsafe_code)]

mod attr;
mod block_reads;
mod dir;
mod errno;
mod fs;
mod growth;
mod handle;
mod held_inode;
mod inode;
mod inode_limit;
mod kept_records;
mod list;
mod name_records;
mod open_inodes;
mod page_starts;
mod passthrough;
mod read_only;
pub mod readahead;
mod service;
mod whole_file;
pub mod writable;
mod xattr;

pub use attr::{FileAttr, FsConfig, InodeEntry, LookupOutcome, VolumeStat};
pub use errno::{FsError, FsResult};
pub use fs::{FileSystem, FsClock};
pub use held_inode::{HeldInode, MissingFolders, find_folder};
pub use inode::ROOT;
pub use inode_limit::{ForgetCandidate, InodeLimiter, LimitAlarm, LimitedInodes, RequestForgets};
pub use kept_records::{
    KeptChange, KeptHandle, KeptInode, KeptLife, KeptLock, KeptName, KeptNode, KeptRecord, KeptRecords, KeptVersion,
    MadeChange, RecordSlot,
};
pub use list::DirItem;
pub use name_records::NameRecords;
pub use passthrough::{LiveBacking, RegisterBacking, RegisteredBacking};
pub use service::{
    BeginWait, CallerGroups, CreateMode, DirName, DirRead, FileEntry, FilePosition, FileService, FileWrite, FsCaller,
    HandleRef, KernelSide, KernelView, ListedEntry, LockRequest, NewNode, OpenedFile, RequestNumber, StatAttr,
};
pub use whole_file::{UNPUBLISHED_PREFIX, WholeFile};

/// The longest name a file can have, in bytes.
pub const NAME_MAX: usize = 255;
