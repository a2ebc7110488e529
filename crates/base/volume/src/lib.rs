//! What a mount reads from: names, attributes, and bytes at one version. A cache in this process and a
//! cache node far away both are volumes; neither the file system nor FUSE can tell which.
//!
//! Every call blocks, and every implementation ends it within a time of its own configuration.
#![forbid(unsafe_code)]

mod cpus;
mod workers;

pub use cpus::Cpus;
pub use workers::Workers;

use spurline_mem::Slice;
use spurline_types::{Attr, ListPage, ObjectRef, Result, Sink};
use std::fs::File;
use std::ops::Range;

/// Where the bytes of a read are.
pub enum Data {
    /// In the caller's buffer, this many of them.
    Copied(usize),
    /// In memory of the cache, pinned for as long as the slice lives.
    Shared(Slice),
}

/// What `statfs` answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Size in bytes; a very large number where the under-store has no end.
    pub total_bytes: u64,
    /// Bytes that may still be written.
    pub free_bytes: u64,
    /// Number of files the volume can hold.
    pub files: u64,
    /// How many more it can take.
    pub files_free: u64,
}

/// A file of this host that holds a whole object, kept from eviction for as long as this lives.
pub trait Backing: Send + Sync {
    /// The file, open for reading, as long as the object.
    fn file(&self) -> &File;
    /// Closes the file; for as long as the answer lives it is still kept from eviction.
    fn close(self: Box<Self>) -> Box<dyn Send + Sync>;
}

/// Other places that may hold a block which this process would have to fetch from the under-store.
pub trait Elsewhere: Send + Sync {
    /// Fills `sink`, which is empty and as long as the block, from one of them; nothing is committed when none has it or
    /// none answers soon. `source` is the URL that the object's path is below.
    fn fetch(&self, source: &str, object: &ObjectRef, index: u32, sink: &mut dyn Sink) -> Fetched;

    /// Whether it is one of the other places, and not this process, that fetches this block for all.
    fn fetches(&self, source: &str, object: &ObjectRef, index: u32) -> bool;

    /// As [`Elsewhere::fetch`] of that place alone. When it has not got the block it begins to fetch it, and is not waited
    /// for.
    fn seek(&self, source: &str, object: &ObjectRef, index: u32, sink: &mut dyn Sink) -> Fetched;
}

/// Where a block was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fetched {
    /// In none of the other places.
    Nowhere,
    /// In one of them.
    There,
    /// The same, and it is asked for so much that it is to be held here only for as long as that lasts.
    Hot,
}

/// A tree of files to read. Paths are relative, without a leading slash; the root is the empty path.
pub trait Volume: Send + Sync {
    /// The source's URL, without credentials.
    fn source(&self) -> &str;

    /// The unit of caching and prefetching, in bytes.
    fn block_size(&self) -> u64;

    /// Attributes of `path`, not older than the attribute cache time.
    ///
    /// # Errors
    /// `NotFound`, `NotADirectory`, or what kept the under-store from answering.
    fn lookup(&self, path: &[u8]) -> Result<Attr>;

    /// Up to `max` names of the directory `path`, after `cursor` (the `next` of the page before).
    ///
    /// # Errors
    /// `NotFound`, `NotADirectory`, or what kept the under-store from answering.
    fn list(&self, path: &[u8], cursor: Option<&[u8]>, max: usize) -> Result<ListPage>;

    /// Target of the symbolic link `path`.
    ///
    /// # Errors
    /// `NotFound`; `Invalid` for anything that is no symbolic link.
    fn readlink(&self, path: &[u8]) -> Result<Vec<u8>>;

    /// Bytes from `offset`, as many as `dst` is long unless the object ends before. They are at exactly the
    /// version `object` names. Either they are copied to the start of `dst`, or a pinned slice of the cache
    /// is returned and `dst` is not touched. Nothing is allocated when the bytes are near.
    ///
    /// # Errors
    /// `Stale` when that version is gone and its bytes are not in the cache; `Timeout`, `Unavailable`, ….
    fn read(&self, object: &ObjectRef, offset: u64, dst: &mut [u8]) -> Result<Data>;

    /// Asks for `blocks` to be brought near, for a reader that reads `piece` bytes at a time; returns at once, and may
    /// do nothing when memory is short.
    fn prefetch(&self, object: &ObjectRef, blocks: Range<u32>, piece: usize);

    /// A file of this host with the whole object, its checksums checked, if there is one.
    fn backing(&self, object: &ObjectRef) -> Option<Box<dyn Backing>> {
        let _ = object;
        None
    }

    /// How large the volume is.
    ///
    /// # Errors
    /// What kept the under-store from answering.
    fn capacity(&self) -> Result<Capacity>;

    /// What is known of `path`, for people: version, length, which blocks are cached and where.
    ///
    /// # Errors
    /// As for [`Volume::lookup`].
    fn info(&self, path: &[u8]) -> Result<serde_json::Value>;
}
