//! What the kernel refers to, kept where it outlives this process: a successor answers for the same inodes and handles. Where the
//! records are is the business of who implements the trait.

use crate::passthrough::RegisterBacking;
use spurline_types::FileKind;
use spurline_volume::kept_client::{HeldFile, SentChange};
use spurline_volume::kept_files::KeptFiles;
use spurline_volume::writes::{FileIdentity, FileLock};
use std::sync::Arc;
use std::time::SystemTime;

/// The place of a record; 0 for none.
pub type RecordSlot = u32;

/// A version of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeptVersion<'a> {
    /// Length in bytes.
    pub size: u64,
    /// The version.
    pub version: &'a str,
    /// The etag, if the origin has one.
    pub etag: Option<&'a str>,
}

/// An inode that the kernel refers to.
#[derive(Debug, Clone, Copy)]
pub struct KeptInode<'a> {
    /// The number.
    pub ino: u64,
    /// File, directory or symbolic link.
    pub kind: FileKind,
    /// References of the kernel.
    pub lookups: u64,
    /// Time of last change.
    pub mtime: SystemTime,
    /// Permission bits.
    pub mode: u16,
    /// The path below the source.
    pub path: &'a [u8],
    /// The version at the first lookup.
    pub first: KeptVersion<'a>,
    /// The present version of a file that grew while it was open.
    pub grown: Option<KeptVersion<'a>>,
}

/// An open file or directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KeptHandle {
    /// The handle's number.
    pub fh: u64,
    /// The inode.
    pub ino: u64,
    /// The kernel's number of the file that it reads directly; 0 for none.
    pub backing_id: i32,
    /// The number of the request that opened it; 0 where that is of no meaning.
    pub request: u64,
    /// The flags of the open, of a file that may be changed.
    pub flags: i32,
    /// It is an open directory of a writable mount.
    pub directory: bool,
    /// It was opened to be written past the kernel's pages.
    pub direct_writer: bool,
    /// The process whose close publishes the changes; 0 for any process.
    pub opener: u32,
    /// The user and the group that opened it, where a node has the file.
    pub owner: [u32; 2],
    /// Where a node has the file.
    pub held: Option<HeldFile>,
}

/// An inode of a writable mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeptNode {
    /// The number.
    pub ino: u64,
    /// References of the kernel.
    pub lookups: u64,
    /// The object of the source.
    pub identity: FileIdentity,
    /// The generation that the kernel knows, where the identity has changed since.
    pub known_generation: Option<u64>,
    /// It is a directory.
    pub directory: bool,
    /// Mode, user and group of a directory that this mount has removed.
    pub removed: Option<[u32; 3]>,
}

/// A name of an inode of a writable mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeptName<'a> {
    /// The inode.
    pub ino: u64,
    /// The directory's inode.
    pub parent: u64,
    /// The name there.
    pub name: &'a [u8],
}

/// A lock of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeptLock {
    /// The inode.
    pub ino: u64,
    /// The open file that the locks of the owner go through.
    pub fh: u64,
    /// The lock.
    pub lock: FileLock,
    /// The process.
    pub pid: u32,
}

/// How far a request for a change has come. Another request of the same thread replaces the record: by then, the kernel has the
/// answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KeptChange {
    /// The number of the request.
    pub request: u64,
    /// A fact of the time before the change, by which a successor recognises the change.
    pub before: u64,
    /// The result; `None` while the change is not known to be made.
    pub made: Option<MadeChange>,
    /// What was sent to a node. It is noted by [`KeptClient::note_sending`], and stays for the time of the request.
    ///
    /// [`KeptClient::note_sending`]: spurline_volume::kept_client::KeptClient::note_sending
    pub sent: SentChange,
}

/// The result of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MadeChange {
    /// The number of bytes of a write.
    pub count: u64,
    /// The new object, if the change has made an object.
    pub object: Option<FileIdentity>,
}

/// A record.
#[derive(Debug, Clone, Copy)]
pub enum KeptRecord<'a> {
    /// An inode of a read-only mount.
    Inode(KeptInode<'a>),
    /// An inode of a writable mount.
    Node(KeptNode),
    /// A name of a [`KeptRecord::Node`].
    Name(KeptName<'a>),
    /// An open file or directory.
    Handle(KeptHandle),
    /// A lock.
    Lock(KeptLock),
    /// A change under way. Such records are made by [`KeptRecords::note_change`] alone.
    Change(KeptChange),
}

/// Keeps records that are valid after the end of this process at any instruction.
pub trait KeptRecords: Send + Sync {
    /// Keeps a record; 0 if there is no room.
    fn keep(&self, record: &KeptRecord<'_>) -> RecordSlot;

    /// The kernel has one more reference to a kept inode.
    fn add_lookup(&self, slot: RecordSlot);

    /// The kernel has so many references less.
    fn sub_lookups(&self, slot: RecordSlot, n: u64);

    /// The file of this handle, which a node has, is being closed.
    fn note_closing(&self, slot: RecordSlot);

    /// Removes a record.
    fn remove_record(&self, slot: RecordSlot);

    /// Calls `visit` with every record: inodes first, then names, handles, locks and changes.
    fn for_each(&self, visit: &mut dyn FnMut(RecordSlot, &KeptRecord<'_>));

    /// Keeps how far the request of this thread has come, in place of the thread's former request.
    fn note_change(&self, change: &KeptChange);
}

/// What a file system continues with, and keeps for its successor.
#[derive(Clone)]
pub struct KeptLife<'a> {
    /// Inodes, handles, locks and changes.
    pub records: Arc<dyn KeptRecords>,
    /// Descriptors, for a writable mount.
    pub files: Option<Arc<dyn KeptFiles>>,
    /// Processes that have served the mount before.
    pub takeovers: u64,
    /// When the process before ended; 1970 for the first.
    pub ended_at: SystemTime,
    /// Registers files that the kernel reads itself.
    pub register: Option<&'a dyn RegisterBacking>,
}
