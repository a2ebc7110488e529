//! What a caller is told of an inode, and what the mount's options make of the under-store's attributes.
//! It asks nobody anything.

use spurline_types::FileKind;
use std::time::{Duration, SystemTime};

/// What `stat` answers; access and change time are the modification time.
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
    /// The read size programs are advised to use.
    pub blksize: u32,
}

/// An inode with how long the kernel may believe it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The attributes; their `ino` was counted as looked up once.
    pub attr: FileAttr,
    /// How long the name stands for this inode.
    pub entry_ttl: Duration,
    /// How long the attributes hold.
    pub attr_ttl: Duration,
}

/// What a lookup found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lookup {
    /// An inode, counted as looked up once.
    Found(Entry),
    /// No such name, and how long that may be believed.
    Absent {
        /// How long.
        ttl: Duration,
    },
}

/// What `statfs` answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatFs {
    /// Unit of `blocks` and `free`, in bytes.
    pub block_size: u32,
    /// Size of the volume.
    pub blocks: u64,
    /// What is free of it.
    pub free: u64,
    /// Number of files it can hold.
    pub files: u64,
    /// How many more it can take.
    pub files_free: u64,
    /// Longest name, in bytes.
    pub name_max: u32,
}

/// What the mount's options decide.
#[derive(Debug, Clone)]
pub struct Config {
    /// `--attr-cache`: how long attributes hold, and how long after a file's version was last seen an open
    /// does not ask for it again.
    pub attr_ttl: Duration,
    /// `--entry-cache`: how long a file's name holds; never longer than `attr_ttl`, because a changed file
    /// is noticed by looking its name up.
    pub entry_ttl: Duration,
    /// `--dir-entry-cache`: how long a directory's name holds.
    pub dir_entry_ttl: Duration,
    /// How long the absence of a name holds. One second by default, as for names that are there: programs
    /// that search paths ask for absent names again and again.
    pub negative_ttl: Duration,
    /// How long the answer of `statfs` holds.
    pub statfs_ttl: Duration,
    /// Owner of everything.
    pub uid: u32,
    /// Group of everything.
    pub gid: u32,
    /// Permission bits of files instead of the under-store's.
    pub file_mode: Option<u16>,
    /// Permission bits of directories instead of the under-store's.
    pub dir_mode: Option<u16>,
    /// Bits taken from all permission bits.
    pub umask: u16,
    /// The `st_blksize` of every file. Programs size their buffers by it: with 1 MiB a C or Python program
    /// that reads small records at random would read 1 MiB for each, and `cat` and `cp` use 128 KiB anyway.
    pub blksize: u32,
    /// `--max-readahead`: the most one reader is read ahead, in bytes; 0 switches read-ahead off.
    pub max_readahead: u64,
    /// What all readers together may be read ahead, in bytes: a share of the memory budget.
    pub readahead_budget: u64,
    /// The smallest file handed to the kernel for passthrough, in bytes. Registering one costs about 15 us at
    /// each first open, and saves half the time of a file of 64 KiB that the kernel has no pages of (103
    /// against 189 us for lookup, open, read and close over io_uring; the same at 4 KiB; a fifth at 1 MiB).
    pub passthrough_min: u64,
    /// Names asked of the volume at a time, and so the names an open directory holds in memory.
    pub list_page: usize,
}

impl Default for Config {
    fn default() -> Self {
        let second = Duration::from_secs(1);
        Config {
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
            blksize: 128 << 10,
            max_readahead: 64 << 20,
            readahead_budget: 128 << 20,
            passthrough_min: 64 << 10,
            list_page: 1000,
        }
    }
}

impl Config {
    /// The permission bits shown for a node whose under-store says `mode`.
    pub(crate) fn mode(&self, kind: FileKind, mode: u16) -> u16 {
        let mode = match kind {
            FileKind::File => self.file_mode.unwrap_or(mode),
            FileKind::Directory => self.dir_mode.unwrap_or(mode),
            FileKind::Symlink => return 0o777,
        };
        // The owner shown is not the file's: its set-user-ID and set-group-ID bits would lend another's rights.
        mode & 0o1777 & !self.umask
    }

    /// How long a name of this kind holds.
    pub(crate) fn name_ttl(&self, kind: FileKind) -> Duration {
        match kind {
            FileKind::Directory => self.dir_entry_ttl,
            FileKind::File | FileKind::Symlink => self.entry_ttl.min(self.attr_ttl),
        }
    }
}
