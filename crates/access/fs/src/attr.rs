//! What `stat`, `lookup` and `statfs` return, and how the mount's options change the origin's attributes. It calls
//! neither the volume nor the kernel.

use spurline_types::FileKind;
use std::time::{Duration, SystemTime};

/// The result of `stat`; access and change time equal the modification time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileAttr {
    /// Inode number.
    pub ino: u64,
    /// File, directory or symbolic link.
    pub kind: FileKind,
    /// Length in bytes.
    pub size: u64,
    /// Length in units of 512 bytes.
    pub blocks: u64,
    /// Time of last change.
    pub mtime: SystemTime,
    /// Permission bits (07777), without the file type.
    pub mode: u16,
    /// 2 for a directory, else 1.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// The read size recommended to programs, in bytes.
    pub blksize: u32,
}

/// An inode's attributes, and how long the kernel may cache its name and attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InodeEntry {
    /// The attributes. The lookup count of their `ino` was raised by one.
    pub attr: FileAttr,
    /// Distinguishes inodes that have the same number in different mounts.
    pub generation: u64,
    /// How long the name is valid for this inode.
    pub entry_ttl: Duration,
    /// How long the attributes are valid.
    pub attr_ttl: Duration,
}

/// The result of a lookup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LookupOutcome<Entry = InodeEntry> {
    /// An inode; its lookup count was raised by one.
    Found(Entry),
    /// No such name.
    Absent {
        /// How long the kernel may cache the absence.
        ttl: Duration,
    },
}

impl<Entry> LookupOutcome<Entry> {
    /// The outcome with another form of the entry.
    pub fn map<Other>(self, change: impl FnOnce(Entry) -> Other) -> LookupOutcome<Other> {
        match self {
            LookupOutcome::Found(entry) => LookupOutcome::Found(change(entry)),
            LookupOutcome::Absent { ttl } => LookupOutcome::Absent { ttl },
        }
    }
}

/// The result of `statfs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VolumeStat {
    /// Unit of `blocks` and `free`, in bytes.
    pub block_size: u32,
    /// Size of the volume.
    pub blocks: u64,
    /// Free space.
    pub free: u64,
    /// Number of files it can hold.
    pub files: u64,
    /// How many more it can take.
    pub files_free: u64,
    /// Longest name, in bytes.
    pub name_max: u32,
}

/// The file system's options.
#[derive(Debug, Clone)]
pub struct FsConfig {
    /// `--attr-cache`: how long attributes are valid, and how long an open uses the version last seen without a new
    /// lookup.
    pub attr_ttl: Duration,
    /// `--entry-cache`: how long a file's name is valid. Never longer than `attr_ttl`, because a lookup of the name
    /// is what detects a changed file.
    pub entry_ttl: Duration,
    /// `--dir-entry-cache`: how long a directory's name is valid.
    pub dir_entry_ttl: Duration,
    /// How long the absence of a name is valid. One second by default, as for existing names: programs that search
    /// paths look up the same absent names many times.
    pub negative_ttl: Duration,
    /// How long the result of `statfs` is valid.
    pub statfs_ttl: Duration,
    /// Owner of all files.
    pub uid: u32,
    /// Group of all files.
    pub gid: u32,
    /// Permission bits of files, in place of the origin's.
    pub file_mode: Option<u16>,
    /// Permission bits of directories, in place of the origin's.
    pub dir_mode: Option<u16>,
    /// Bits removed from all permission bits.
    pub umask: u16,
    /// Whether the mode bits decide about access(2) and `cd`. False where the kernel does not check them either
    /// (without `default_permissions`): then all users have the rights of root.
    pub check_modes: bool,
    /// The `st_blksize` of every file. Programs size their buffers by it. With 1 MiB, a C or Python program that
    /// reads small records at random would read 1 MiB for each; `cat` and `cp` use 128 KiB in any case.
    pub blksize: u32,
    /// `--max-readahead`: the read-ahead limit of one reader, in bytes; 0 disables read-ahead.
    pub max_readahead: u64,
    /// The read-ahead limit of all readers together, in bytes: a share of the memory budget.
    pub readahead_budget: u64,
    /// The smallest file used for passthrough, in bytes. A registration costs about 15 us at each first open. It
    /// saves half the time of a 64 KiB file without cached pages (103 against 189 us for lookup, open, read and close
    /// over io_uring; the same at 4 KiB; a fifth at 1 MiB).
    pub passthrough_min: u64,
    /// The memory for inodes that the kernel references: a share of the memory budget. Above, the kernel is requested to
    /// forget those that it has not used for longest.
    pub inode_bytes: u64,
    /// The time of folders that their source has no time of, such as that of the mount. `None` shows 1970.
    pub folder_time: Option<SystemTime>,
    /// Names listed from the volume per call, and so the names that an open directory holds in memory.
    pub list_page: usize,
}

impl Default for FsConfig {
    fn default() -> Self {
        let second = Duration::from_secs(1);
        FsConfig {
            attr_ttl: second,
            entry_ttl: second,
            dir_entry_ttl: second,
            negative_ttl: second,
            statfs_ttl: second,
            uid: 0,
            gid: 0,
            file_mode: None,
            dir_mode: None,
            umask: 0,
            check_modes: true,
            blksize: 128 << 10,
            max_readahead: 64 << 20,
            readahead_budget: 128 << 20,
            passthrough_min: 64 << 10,
            inode_bytes: u64::MAX,
            folder_time: None,
            list_page: 1000,
        }
    }
}

impl FsConfig {
    /// The permission bits shown for a node whose origin reports `mode`.
    pub(crate) fn shown_mode(&self, kind: FileKind, mode: u16) -> u16 {
        let mode = match kind {
            FileKind::File => self.file_mode.unwrap_or(mode),
            FileKind::Directory => self.dir_mode.unwrap_or(mode),
            FileKind::Symlink => return 0o777,
        };
        // Without set-user-ID and set-group-ID bits: the owner shown is not the file's owner.
        mode & 0o1777 & !self.umask
    }

    /// The time shown for a node whose origin reports `mtime`.
    pub(crate) fn shown_time(&self, kind: FileKind, mtime: SystemTime) -> SystemTime {
        let is_unknown = kind == FileKind::Directory && mtime == SystemTime::UNIX_EPOCH;
        self.folder_time.filter(|_| is_unknown).unwrap_or(mtime)
    }

    /// How long a name of this kind is valid.
    pub(crate) fn name_ttl(&self, kind: FileKind) -> Duration {
        match kind {
            FileKind::Directory => self.dir_entry_ttl,
            FileKind::File | FileKind::Symlink => self.entry_ttl.min(self.attr_ttl),
        }
    }
}
