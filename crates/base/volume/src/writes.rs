//! The interface through which a mount changes files: names, attributes and bytes with all of POSIX, with the identity of the
//! calling process. Knows no inode table, no kernel and no cache.
//!
//! A call names an object by path and, where necessary, by [`FileIdentity`]: an object that another host has replaced is
//! `ESTALE`, and the name is looked up again. Every call can be sent over a wire: paths and numbers go in, plain values come out.
//!
//! Errors carry the errno of the source as [`spurline_types::ErrorKind::Io`], which callers see unchanged.

use crate::capabilities::WriteCapabilities;
use crate::hand_over::{HandOver, OpenHold};
pub use crate::locks::{FileLock, LockConflict, LockFamily, LockKind, LockRange};
use crate::repeated::{ChangeMark, ChangeOutcome, RepeatedChange};
use crate::whole_files::WholeFiles;
use serde::{Deserialize, Serialize};
use spurline_sys::join_path;
use spurline_types::open_flags::O_RDONLY;
use spurline_types::{FileKind, Result, Version};
use std::fs::File;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Weak;

/// The calling process. A source on another host trusts these numbers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Caller {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// The supplementary groups.
    pub groups: Vec<u32>,
    /// The thread, for messages; 0 for work of the kernel.
    pub pid: u32,
    /// The file mode creation mask, of no effect where the directory has a default ACL.
    pub umask: u32,
    /// The kernel has checked the caller's rights, by rules that the source can't see: the source refuses nothing for lack of
    /// rights. Objects still get the caller's owner and group.
    pub rights_checked: bool,
}

/// What makes an object of the source the same object under any name and on every host. Only the source knows what the bytes
/// mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileIdentity {
    bytes: [u8; FileIdentity::LEN],
    lasting: bool,
}

impl FileIdentity {
    /// The number of bytes.
    pub const LEN: usize = 32;

    /// An identity of a source's making; `lasting` as for [`FileIdentity::is_lasting`].
    pub const fn new(bytes: [u8; FileIdentity::LEN], lasting: bool) -> FileIdentity {
        FileIdentity { bytes, lasting }
    }

    /// The identity of an object that has this number in the source, for sources that number each object anew.
    pub fn from_number(number: u64) -> FileIdentity {
        let mut bytes = [0; FileIdentity::LEN];
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        FileIdentity::new(bytes, true)
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8; FileIdentity::LEN] {
        &self.bytes
    }

    /// Whether no later object gets this identity after the end of the object. Only such an identity alone is enough to look for
    /// an object.
    pub fn is_lasting(&self) -> bool {
        self.lasting
    }
}

/// A time of a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub struct FileTime {
    /// Seconds since 1970, negative before.
    pub seconds: i64,
    /// Nanoseconds, below a second.
    pub nanos: u32,
}

/// All attributes of an object, as in `statx(2)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeAttr {
    /// Which object.
    pub identity: FileIdentity,
    /// The inode number that programs see.
    pub inode: u64,
    /// File type and permission bits.
    pub mode: u32,
    /// Number of names.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number of a device node, as in `makedev(3)`.
    pub rdev: u64,
    /// Length in bytes.
    pub size: u64,
    /// Units of 512 bytes in use.
    pub blocks: u64,
    /// Preferred size of a read, in bytes.
    pub blksize: u32,
    /// Last access.
    pub atime: FileTime,
    /// Last change of the bytes.
    pub mtime: FileTime,
    /// Last change of the inode.
    pub ctime: FileTime,
}

impl NodeAttr {
    /// File, directory or symbolic link; `None` for a device, a pipe or a socket.
    pub fn kind(&self) -> Option<FileKind> {
        match self.mode & S_IFMT {
            S_IFREG => Some(FileKind::File),
            S_IFDIR => Some(FileKind::Directory),
            S_IFLNK => Some(FileKind::Symlink),
            _ => None,
        }
    }

    /// Whether another observation shows the same bytes: only the times and the length say so.
    pub fn same_bytes(&self, other: &NodeAttr) -> bool {
        version_fields(self) == version_fields(other)
    }
}

fn version_fields(attr: &NodeAttr) -> (FileIdentity, u64, FileTime, FileTime) {
    (attr.identity, attr.size, attr.mtime, attr.ctime)
}

/// The version whose cached bytes an open file may be read from, or why there is none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CacheVersion {
    /// The bytes are final under this version, as [`crate::Volume::read`] has it.
    Settled(Version),
    /// A process has the file open for changes.
    OpenForChanges,
    /// The file was changed so recently that a further change could keep its times.
    JustChanged,
    /// The source's own file is as near as a cache.
    SourceIsNear,
    /// The source reads through its cache by itself.
    OwnCache,
}

/// The bits of a mode that hold the file type.
pub const S_IFMT: u32 = 0o170_000;
/// The file type of a directory.
pub const S_IFDIR: u32 = 0o040_000;
/// The file type of a file.
pub const S_IFREG: u32 = 0o100_000;
/// The file type of a symbolic link.
pub const S_IFLNK: u32 = 0o120_000;

/// An existing object: the path and, for a certain object, the identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodePath<'a> {
    /// The path below the source's root.
    pub path: &'a [u8],
    /// The object that the path has to lead to.
    pub expected: Option<FileIdentity>,
}

/// A name in a directory. The directory is a certain object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NamePath<'a> {
    /// The directory.
    pub directory: NodePath<'a>,
    /// The name there.
    pub name: &'a [u8],
}

impl NamePath<'_> {
    /// The path of the name below the source's root.
    pub fn path(&self) -> Vec<u8> {
        join_path(self.directory.path, self.name)
    }
}

/// A time to set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NewTime {
    /// The source's clock.
    Now,
    /// This time.
    At(FileTime),
}

/// Attributes to set; `None` keeps the attribute.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AttrChange {
    /// Permission bits.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Length in bytes.
    pub size: Option<u64>,
    /// Time of last access.
    pub atime: Option<NewTime>,
    /// Time of last change.
    pub mtime: Option<NewTime>,
}

/// A change of names or attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change<'a> {
    /// Makes a directory.
    Mkdir {
        /// The name.
        at: NamePath<'a>,
        /// The permission bits.
        mode: u32,
        /// The directory is only on the way to a new name below: a bucket, where folders follow from names, keeps nothing.
        implied: bool,
    },
    /// Makes a file, a device, a pipe or a socket.
    Mknod {
        /// The name.
        at: NamePath<'a>,
        /// The type and permission bits.
        mode: u32,
        /// The device number of a device node.
        rdev: u64,
    },
    /// Makes a symbolic link.
    Symlink {
        /// The name.
        at: NamePath<'a>,
        /// The target.
        target: &'a [u8],
    },
    /// Gives an object another name.
    Link {
        /// The object.
        from: NodePath<'a>,
        /// The new name.
        to: NamePath<'a>,
    },
    /// Removes a name of anything but a directory.
    Unlink {
        /// The name.
        at: NamePath<'a>,
    },
    /// Removes an empty directory.
    Rmdir {
        /// The name.
        at: NamePath<'a>,
    },
    /// Renames; `flags` as for `renameat2(2)`.
    Rename {
        /// The old name.
        from: NamePath<'a>,
        /// The new name.
        to: NamePath<'a>,
        /// `RENAME_NOREPLACE`, `RENAME_EXCHANGE`.
        flags: u32,
    },
    /// Sets attributes.
    SetAttr {
        /// The object.
        of: NodePath<'a>,
        /// The attributes and values.
        set: AttrChange,
    },
    /// Sets an extended attribute; `flags` as for `setxattr(2)`.
    SetXattr {
        /// The object.
        of: NodePath<'a>,
        /// The attribute's name.
        name: &'a [u8],
        /// The value.
        value: &'a [u8],
        /// `XATTR_CREATE`, `XATTR_REPLACE`.
        flags: u32,
    },
    /// Removes an extended attribute.
    RemoveXattr {
        /// The object.
        of: NodePath<'a>,
        /// The attribute's name.
        name: &'a [u8],
    },
}

impl<'a> Change<'a> {
    /// The name of the new object, if the change makes an object.
    pub fn new_name(&self) -> Option<&NamePath<'a>> {
        match self {
            Change::Mkdir { at, .. } | Change::Mknod { at, .. } | Change::Symlink { at, .. } => Some(at),
            _ => None,
        }
    }
}

/// Sizes of the source's file system, as in `statvfs(3)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SourceSpace {
    /// Unit of the block counts, in bytes.
    pub block_size: u64,
    /// Blocks in all.
    pub blocks: u64,
    /// Blocks free.
    pub blocks_free: u64,
    /// Blocks free for unprivileged users.
    pub blocks_available: u64,
    /// Inodes in all.
    pub files: u64,
    /// Inodes free.
    pub files_free: u64,
    /// Longest name, in bytes.
    pub name_max: u32,
}

/// A name of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedName {
    /// The name, `.` and `..` included.
    pub name: Vec<u8>,
    /// The file type, as in a mode; 0 where not known.
    pub file_type: u32,
    /// The inode number of the name.
    pub inode: u64,
    /// The position after this name.
    pub next: u64,
    /// The attributes, if requested and if the name still existed.
    pub attr: Option<NodeAttr>,
}

/// A call about the rights or the extended attributes of an open object, which may have no name any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpenAttrCall<'a> {
    /// As [`WritableVolume::access`].
    Access(u32),
    /// The value of the extended attribute with this name.
    Get(&'a [u8]),
    /// The names of the extended attributes, each followed by a NUL.
    List,
    /// As [`Change::SetXattr`].
    Set {
        /// The attribute's name.
        name: &'a [u8],
        /// The value.
        value: &'a [u8],
        /// `XATTR_CREATE`, `XATTR_REPLACE`.
        flags: u32,
    },
    /// Removes the extended attribute with this name.
    Remove(&'a [u8]),
}

/// Where the bytes of a write go. A program can change the place of an open file at any time (`fcntl(2)`, `F_SETFL`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum WritePlace {
    /// To the end of a file that was opened with `O_APPEND`, else to the offset.
    #[default]
    AsOpened,
    /// To the end.
    End,
    /// To the offset.
    Offset,
    /// To the offset: changed pages of a memory map, from the kernel. No program waits for the result.
    MappedPages,
}

/// An open file or directory of the source, which may have no name any more.
pub trait WritableObject: Send + Sync {
    /// The attributes now.
    fn stat(&self) -> Result<NodeAttr>;

    /// Sets attributes.
    fn set_attr(&self, set: &AttrChange, caller: &Caller) -> Result<NodeAttr>;

    /// Answers a call about rights or extended attributes: a value or names, and nothing for the others.
    fn call_attr(&self, call: &OpenAttrCall<'_>, caller: &Caller) -> Result<Vec<u8>>;

    /// Makes all changes durable, or with `data_only` the bytes of a file only.
    ///
    /// # Errors
    /// The source's errno; a failed write-back is reported once.
    fn sync(&self, data_only: bool) -> Result<()>;
}

/// An open file of the source. A drop closes the file, and releases the locks.
pub trait WritableFile: WritableObject {
    /// Reads up to `dst.len()` bytes from `offset`; fewer mean the end of the file.
    fn read_at(&self, offset: u64, dst: &mut [u8]) -> Result<usize>;

    /// Writes `data` at `offset`, or at the end of a file that was opened with `O_APPEND`; as
    /// [`WritableFile::write_placed`].
    fn write_at(&self, offset: u64, data: &[u8], lose_privileges: Option<&Caller>) -> Result<usize> {
        self.write_placed(WritePlace::AsOpened, offset, data, lose_privileges)
    }

    /// Writes `data`; returns the number of bytes written. With `lose_privileges`, the file loses the set-user-ID and
    /// set-group-ID bits as if this caller wrote.
    fn write_placed(
        &self,
        place: WritePlace,
        offset: u64,
        data: &[u8],
        lose_privileges: Option<&Caller>,
    ) -> Result<usize>;

    /// The number of bytes of an append at the end `at` that the source has, if another process may have made the append before
    /// that process was lost. A lost host can take the end of a file along. `None` if the file shows neither.
    fn find_appended(&self, at: u64, bytes: &[u8]) -> Result<Option<usize>> {
        let there = match self.stat()?.size.checked_sub(at) {
            None => return Ok(None),
            Some(0) => return Ok(Some(0)),
            Some(there) => usize::try_from(there).unwrap_or(usize::MAX).min(bytes.len()),
        };
        // The file may be open for writing only.
        let reader = self.reopen(O_RDONLY, &Caller::default())?;
        let mut found = vec![0; there];
        let same = reader.read_at(at, &mut found)? == there && found == bytes[..there];
        Ok(same.then_some(there))
    }

    /// Allocates or frees space; `mode` as for `fallocate(2)`.
    fn allocate(&self, mode: u32, offset: u64, len: u64, caller: &Caller) -> Result<()>;

    /// Copies up to `len` bytes to `to` of the same source; returns the number.
    ///
    /// # Errors
    /// `EXDEV` or `EOPNOTSUPP` where the caller has to read and write instead; the source's errno.
    fn copy_range(&self, offset: u64, to: &dyn WritableFile, to_offset: u64, len: u64, caller: &Caller) -> Result<u64>;

    /// The next data or hole from `offset`; `whence` is `SEEK_DATA` or `SEEK_HOLE`.
    ///
    /// # Errors
    /// `ENXIO` past the end; the source's errno.
    fn seek(&self, offset: u64, whence: u32) -> Result<u64>;

    /// Whether [`WritableFile::flush`] can report anything.
    fn needs_flush(&self) -> bool {
        true
    }

    /// Reports failures of earlier writes, as `close(2)` does.
    fn flush(&self) -> Result<()>;

    /// A lock of another owner that is in the way of this lock, which is of `fcntl(2)`.
    fn test_lock(&self, lock: &FileLock) -> Result<Option<LockConflict>>;

    /// Sets or removes a lock, without a wait. All locks of an owner go through the same open file.
    ///
    /// # Errors
    /// `EAGAIN` while another lock is in the way; the source's errno.
    fn set_lock(&self, lock: &FileLock, caller: &Caller) -> Result<()>;

    /// Releases all locks that were set through this open file, as the end of the file does, while other requests still use the
    /// file.
    fn release_locks(&self) {}

    /// The attributes at the open, or later attributes.
    fn attr_at_open(&self) -> Result<NodeAttr> {
        self.stat()
    }

    /// The version whose cached bytes may be read in place of this file's, as long as the file has the attributes `attr`.
    fn cache_version(&self, _attr: &NodeAttr) -> CacheVersion {
        CacheVersion::OwnCache
    }

    /// The open file of the source, for reads and writes by the kernel without this process.
    fn backing(&self) -> Option<&File> {
        None
    }

    /// The means by which the next process continues with the file.
    fn hold(&self) -> OpenHold<BorrowedFd<'_>> {
        OpenHold::Name
    }

    /// A descriptor of the locks of `fcntl(2)` that an owner has set through this file. While any duplicate of that is open, the
    /// locks last.
    fn lock_descriptor(&self, _owner: u64) -> Option<OwnedFd> {
        None
    }

    /// Continues with a lock that was set through the same file in a process that has ended; `descriptor` is that of
    /// [`WritableFile::lock_descriptor`].
    fn adopt_lock(&self, _lock: &FileLock, _descriptor: Option<OwnedFd>) {}

    /// A record shows where a node has the file, and follows its moves; 0 ends that.
    fn keep_record(&self, _record: u32) {}

    /// Whether a flush shows the bytes to others. Then only a close by the process that opened the file counts: every program
    /// that this process starts closes copies too.
    fn publishes_at_flush(&self) -> bool {
        false
    }

    /// The identity of the file now, where a change of the bytes is another object for the source; `None` where the identity
    /// stays.
    fn new_identity(&self) -> Option<FileIdentity> {
        None
    }

    /// Opens the same file once more, even without a name.
    fn reopen(&self, flags: u32, caller: &Caller) -> Result<Box<dyn WritableFile>>;

    /// This value, for [`WritableFile::copy_range`] of the same implementation.
    fn as_any(&self) -> &dyn std::any::Any;
}

/// An open directory of the source. A drop closes the directory.
pub trait WritableDirectory: WritableObject {
    /// Up to `max` names from position `from` on; 0 is the start, and no name is the end. With `attrs`, each name that `caller`
    /// may look up has attributes.
    fn read(&self, from: u64, max: usize, attrs: bool, caller: &Caller) -> Result<Vec<ListedName>>;

    /// The means by which the next process continues with the directory.
    fn hold(&self) -> OpenHold<BorrowedFd<'_>> {
        OpenHold::Name
    }
}

/// The names that a file system knows.
pub trait KnownNames: Send + Sync {
    /// The paths that lead to an object, as far as known.
    fn paths_of(&self, identity: FileIdentity) -> Vec<Vec<u8>>;

    /// The object that a path leads to, as far as known.
    fn object_at(&self, path: &[u8]) -> Option<FileIdentity>;
}

/// What [`WritableVolume::create`] made or opened.
pub struct CreatedFile {
    /// The file's attributes.
    pub attr: NodeAttr,
    /// The open file.
    pub file: Box<dyn WritableFile>,
    /// The directory's attributes after that, if the source has these without a further request: the kernel requests the same
    /// next.
    pub directory: Option<NodeAttr>,
}

/// A source that answers a lookup and an open with one request.
pub trait OpeningLookups: Send + Sync {
    /// As [`WritableVolume::lookup`], and opens the file for reading with `flags`, if the file can be opened.
    ///
    /// # Errors
    /// As [`WritableVolume::lookup`].
    fn lookup_open(
        &self,
        at: NamePath<'_>,
        flags: u32,
        caller: &Caller,
    ) -> Result<(NodeAttr, Option<Box<dyn WritableFile>>)>;
}

/// A tree of files to change. Paths are as for [`crate::Volume`]. A call may block as long as the source does.
pub trait WritableVolume: Send + Sync {
    /// What the source can do. The file system makes no other calls ([`WriteCapabilities::check`]).
    fn capabilities(&self) -> WriteCapabilities;

    /// From now on, open files without a path are looked for under `names`. Of no meaning for a volume that never opens a file
    /// again.
    fn use_names(&self, _names: Weak<dyn KnownNames>) {}

    /// Attributes of the object at `at`; a symbolic link is not followed.
    ///
    /// # Errors
    /// `ESTALE` when the object is not the expected object; the source's errno.
    fn stat(&self, at: NodePath<'_>, caller: &Caller) -> Result<NodeAttr>;

    /// Attributes of `name`.
    ///
    /// # Errors
    /// `ESTALE` when the directory is not the expected directory; the source's errno.
    fn lookup(&self, at: NamePath<'_>, caller: &Caller) -> Result<NodeAttr>;

    /// Lookups that open the file, where the source does both with one request.
    fn opening_lookups(&self) -> Option<&dyn OpeningLookups> {
        None
    }

    /// Target of a symbolic link.
    ///
    /// # Errors
    /// As [`WritableVolume::stat`].
    fn readlink(&self, at: NodePath<'_>, caller: &Caller) -> Result<Vec<u8>>;

    /// Whether `caller` may read, write or execute: `mask` as for `access(2)`.
    ///
    /// # Errors
    /// `EACCES` if not; as [`WritableVolume::stat`].
    fn access(&self, at: NodePath<'_>, mask: u32, caller: &Caller) -> Result<()>;

    /// New files that are seen whole only, where all files are published.
    fn whole_files(&self) -> Option<&dyn WholeFiles> {
        None
    }

    /// Opens an existing file; `flags` as for `open(2)`, `O_TRUNC` included.
    ///
    /// # Errors
    /// As [`WritableVolume::stat`].
    fn open(&self, at: NodePath<'_>, flags: u32, caller: &Caller) -> Result<Box<dyn WritableFile>>;

    /// How open files outlive this process; `None` where open files end with the process.
    fn hand_over(&self) -> Option<&dyn HandOver> {
        None
    }

    /// As [`WritableVolume::create_marked`], without a mark.
    ///
    /// # Errors
    /// As [`WritableVolume::lookup`].
    fn create(&self, at: NamePath<'_>, flags: u32, mode: u32, caller: &Caller) -> Result<CreatedFile> {
        self.create_marked(at, flags, mode, caller, None)
    }

    /// Opens a file, and makes a missing file; with `O_EXCL` the file must be missing. The new file gets `mark`.
    ///
    /// # Errors
    /// As [`WritableVolume::lookup`].
    fn create_marked(
        &self,
        at: NamePath<'_>,
        flags: u32,
        mode: u32,
        caller: &Caller,
        mark: Option<ChangeMark>,
    ) -> Result<CreatedFile>;

    /// Makes a file without a name in a directory (`O_TMPFILE`).
    ///
    /// # Errors
    /// As [`WritableVolume::stat`].
    fn create_unnamed(
        &self,
        directory: NodePath<'_>,
        flags: u32,
        mode: u32,
        caller: &Caller,
    ) -> Result<(NodeAttr, Box<dyn WritableFile>)>;

    /// Gives an open file a name, also a file without a name (`linkat` with `AT_EMPTY_PATH`).
    ///
    /// # Errors
    /// As [`WritableVolume::lookup`].
    fn link_open(&self, file: &dyn WritableFile, to: NamePath<'_>, caller: &Caller) -> Result<NodeAttr>;

    /// Opens a directory for listing.
    ///
    /// # Errors
    /// As [`WritableVolume::stat`].
    fn open_directory(&self, at: NodePath<'_>, caller: &Caller) -> Result<Box<dyn WritableDirectory>>;

    /// As [`WritableVolume::change_marked`], without a mark.
    ///
    /// # Errors
    /// As [`WritableVolume::lookup`].
    fn change(&self, change: &Change<'_>, caller: &Caller) -> Result<Option<NodeAttr>> {
        self.change_marked(change, caller, None)
    }

    /// Makes a change; a new object gets `mark`. The attributes are those of the object that was made or changed. There are none
    /// after a removal, and only those of a source that makes another object of it after a rename and for extended attributes.
    ///
    /// # Errors
    /// As [`WritableVolume::lookup`].
    fn change_marked(&self, change: &Change<'_>, caller: &Caller, mark: Option<ChangeMark>)
    -> Result<Option<NodeAttr>>;

    /// Whether a change was made that another process of the source got before that process was lost. Open files follow such a change.
    fn outcome_of(&self, repeated: &RepeatedChange<'_>) -> Result<ChangeOutcome>;

    /// The value of an extended attribute.
    ///
    /// # Errors
    /// `ENODATA` if there is none; as [`WritableVolume::stat`].
    fn get_xattr(&self, at: NodePath<'_>, name: &[u8], caller: &Caller) -> Result<Vec<u8>>;

    /// The names of the extended attributes, each followed by a NUL.
    ///
    /// # Errors
    /// As [`WritableVolume::stat`].
    fn list_xattr(&self, at: NodePath<'_>, caller: &Caller) -> Result<Vec<u8>>;

    /// Sizes of the file system.
    fn space(&self) -> Result<SourceSpace>;

    /// Makes all changes of the source durable.
    fn sync_all(&self) -> Result<()>;
}
