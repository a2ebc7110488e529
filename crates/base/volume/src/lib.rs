//! The interface that a mount reads from: names, attributes, and bytes at a version. A local cache and a remote cache group both
//! implement this interface; the file system and FUSE cannot distinguish between the two.
//!
//! Every call blocks and ends within a timeout of the implementation.
#![forbid(unsafe_code)]

pub mod capabilities;
pub mod delayed;
pub mod hand_over;
pub mod info;
pub mod kept_client;
pub mod kept_files;
pub mod locks;
pub mod path_locks;
pub mod repeated;
pub mod whole_files;
pub mod writes;

use info::FileInfo;
use spurline_mem::BlockSlice;
use spurline_types::{ByteSink, ListPage, ObjectAttr, ObjectHeaders, ObjectRef, Result};
use std::fs::File;
use std::ops::Range;
use std::time::Duration;

/// Location of the bytes of a read.
pub enum ReadData {
    /// In the caller's buffer; the number of bytes.
    Copied(usize),
    /// In pinned cache memory, for the lifetime of the slice.
    Shared(BlockSlice),
}

/// Answer of `statfs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VolumeSpace {
    /// Size in bytes; a very large number for an unbounded origin.
    pub total_bytes: u64,
    /// Free bytes.
    pub free_bytes: u64,
    /// Number of files the volume can hold.
    pub files: u64,
    /// Number of further files that the volume can hold.
    pub files_free: u64,
}

/// A local file that holds a whole object, protected from eviction while this value lives.
pub trait BackingFile: Send + Sync {
    /// The file, open for reading, as long as the object.
    fn file(&self) -> &File;
    /// Closes the file; the returned value still protects the file from eviction.
    fn close(self: Box<Self>) -> Box<dyn Send + Sync>;
}

/// Fetches blocks from other nodes before the origin.
pub trait PeerFetch: Send + Sync {
    /// Fills the empty `sink`, as long as the block, from a node that holds the block. Commits nothing if no node has the block
    /// or answers soon. `source` is the URL above the object's path.
    fn fetch_block(&self, source: &str, object: &ObjectRef, index: u32, sink: &mut dyn ByteSink) -> PeerFetched;

    /// Whether another node, not this process, fetches this block for all.
    fn has_other_owner(&self, source: &str, object: &ObjectRef, index: u32) -> bool;

    /// As [`PeerFetch::fetch_block`], from the owner only. An owner without the block starts a fetch, for which this call does
    /// not wait.
    fn fetch_from_owner(&self, source: &str, object: &ObjectRef, index: u32, sink: &mut dyn ByteSink) -> PeerFetched;

    /// As [`PeerFetch::fetch_block`], from the node with this name only.
    fn fetch_from(
        &self,
        source: &str,
        node: &str,
        object: &ObjectRef,
        index: u32,
        sink: &mut dyn ByteSink,
    ) -> PeerFetched;
}

/// Result of a peer fetch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerFetched {
    /// No node had the block.
    Missing,
    /// A node had the block.
    Found,
    /// A node had the block, which is hot: keep a copy only while that lasts.
    FoundHot,
}

/// A tree of files to read. Paths are relative, without a leading slash; the root is the empty path.
pub trait Volume: Send + Sync {
    /// The source's URL, without credentials.
    fn source(&self) -> &str;

    /// The unit of caching and prefetching, in bytes.
    fn block_size(&self) -> u64;

    /// Attributes of `path`, not older than the attribute cache time. A path with a slash at the end is the marker of a bucket's folder.
    ///
    /// # Errors
    /// `NotFound`, `NotADirectory`, or the origin's failure.
    fn lookup(&self, path: &[u8]) -> Result<ObjectAttr>;

    /// Up to `max` names of the directory `path`, after `cursor` (`next` of the previous page).
    ///
    /// # Errors
    /// `NotFound`, `NotADirectory`, or the origin's failure.
    fn list(&self, path: &[u8], cursor: Option<&[u8]>, max: usize) -> Result<ListPage>;

    /// As [`Volume::lookup`], and not older than `max_age`. A volume that keeps no attributes needs no method of its own.
    fn lookup_within(&self, path: &[u8], _max_age: Duration) -> Result<ObjectAttr> {
        self.lookup(path)
    }

    /// As [`Volume::list`], and not older than `max_age`. A volume that keeps no listings needs no method of its own.
    fn list_within(&self, path: &[u8], cursor: Option<&[u8]>, max: usize, _max_age: Duration) -> Result<ListPage> {
        self.list(path, cursor, max)
    }

    /// Target of the symbolic link `path`.
    ///
    /// # Errors
    /// `NotFound`; `Invalid` for anything but a symbolic link.
    fn readlink(&self, path: &[u8]) -> Result<Vec<u8>>;

    /// The headers that are stored with the object or the folder `path`, from the origin: one request. A volume without stored
    /// headers needs no method of its own.
    ///
    /// # Errors
    /// `NotFound`, or the origin's failure.
    fn object_headers(&self, path: &[u8]) -> Result<ObjectHeaders> {
        let _ = path;
        Ok(ObjectHeaders::default())
    }

    /// Reads from `offset`, up to the length of `dst` or the end of the object, at exactly the version in `object`.
    /// The bytes are copied to the start of `dst`, or a pinned slice of the cache is returned and `dst` is not
    /// touched. Cached bytes cost no allocation.
    ///
    /// # Errors
    /// `Stale` when that version is gone and not cached; `Timeout`, `Unavailable`, ….
    fn read(&self, object: &ObjectRef, offset: u64, dst: &mut [u8]) -> Result<ReadData>;

    /// Starts fetching `blocks` for a reader that reads `piece` bytes at a time, 0 for a reader that has not come yet. Returns at
    /// once; may do nothing when memory is short.
    fn prefetch(&self, object: &ObjectRef, blocks: Range<u32>, piece: usize);

    /// A local file with the whole object and verified checksums, if any.
    fn backing(&self, object: &ObjectRef) -> Option<Box<dyn BackingFile>> {
        let _ = object;
        None
    }

    /// Size and free space of the volume.
    fn capacity(&self) -> Result<VolumeSpace>;

    /// Information about `path` for people: version, length, and cached blocks with places.
    ///
    /// # Errors
    /// As for [`Volume::lookup`].
    fn info(&self, path: &[u8]) -> Result<FileInfo>;
}
