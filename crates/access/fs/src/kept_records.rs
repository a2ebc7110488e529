//! What the kernel refers to, kept where it outlives this process: a successor answers for the same inodes and handles. Where the
//! records are is the business of who implements the trait.

use spurline_types::FileKind;
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeptHandle {
    /// The handle's number.
    pub fh: u64,
    /// The inode.
    pub ino: u64,
    /// The kernel's number of the file that it reads directly; 0 for none.
    pub backing_id: i32,
}

/// Keeps records that are valid after the end of this process at any instruction.
pub trait KeptRecords: Send + Sync {
    /// Keeps an inode; 0 if there is no room.
    fn keep_inode(&self, inode: &KeptInode<'_>) -> RecordSlot;

    /// The kernel has one more reference to a kept inode.
    fn add_lookup(&self, slot: RecordSlot);

    /// The kernel has so many references less.
    fn sub_lookups(&self, slot: RecordSlot, n: u64);

    /// Keeps a handle; 0 if there is no room.
    fn keep_handle(&self, handle: &KeptHandle) -> RecordSlot;

    /// Removes a record.
    fn remove_record(&self, slot: RecordSlot);

    /// Calls `inode` with every kept inode, then `handle` with every kept handle.
    fn for_each(
        &self,
        inode: &mut dyn FnMut(RecordSlot, &KeptInode<'_>),
        handle: &mut dyn FnMut(RecordSlot, &KeptHandle),
    );
}
