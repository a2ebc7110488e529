//! The read side of an origin: names, attributes, versions and bytes of a bucket or a directory, each call with a deadline. It
//! deliberately knows no change, no cache of blocks, no inode, no wire format and no FUSE.
//!
//! # Names
//! - **Object stores.** The key `prefix/a/b` is the file `b` in the folder `a`. A folder exists when a key starts
//!   with its path and `/`: a folder marker (`a/`, whatever its length) is an empty folder. When both the key `a` and
//!   keys below `a/` exist, *the folder has the name*: the keys below stay reachable, and the object `a` is left out
//!   and counted in `metadata.skipped_names`. Left out and counted likewise, since no file can have such a name: parts of
//!   a key that are empty (`a//b`), `.` or `..`, or contain NUL. Every other key is reachable, including control
//!   characters, `#?%*[]{}`, trailing spaces and non-ASCII. A request for a name that is not UTF-8 returns
//!   [`ErrorKind::NotFound`](spurline_types::ErrorKind::NotFound), because no key can be that.
//!   Over `gs://` and `az://`, names with control characters can't be requested, and one in a listing is an error that
//!   names it.
//! - **Directories.** Names are bytes. Symbolic links are shown as such and never followed, not even in the middle of
//!   a path, so that nothing outside the source is reachable. Sockets, pipes and devices are left out and counted. So is
//!   a mount with a dead server, as long as another name in its folder is readable.
//!
//! # Versions
//! - **Object stores:** the etag, sent as `If-Match` with every read and compared with that of the answer.
//! - **Directories:** inode, mtime, ctime and size, compared before and after each piece is read. A file changed less
//!   than a timestamp's granularity ago is not read before that has passed, so that a second change in the same tick
//!   is not missed. A file that was changed lately and is open for writing gets a new version on each lookup or listing
//!   ([`Version::with_unsettled_mark`](spurline_types::Version::with_unsettled_mark)), since its bytes may change after its times; a read
//!   compares the file's real times.
//!
//! A read of another version returns [`ErrorKind::Stale`](spurline_types::ErrorKind::Stale), a mix of two versions is
//! never returned, and no read blocks past its deadline.
#![deny(unsafe_code)]

mod cached;
mod directory;
pub mod faulty;
mod file_stat;
mod listing;
mod object_origin;
mod open;
mod open_writers;
mod snapshots;
mod store_outage;
mod validated;

pub use cached::{CachedOrigin, MetadataConfig};
pub use file_stat::{ClockLag, FileStat, own_clock, stat_on_server};
pub use object_origin::{ObjectOrigin, StoredNode, file_attr, folder_attr, object_attr};
pub use open::open;
pub use open_writers::WriterCheck;
pub use store_outage::OutageWatch;

use spurline_types::{ByteSink, Error, ListPage, ObjectAttr, ObjectHeaders, ObjectRef, Result};
use std::fs::File;
use std::time::{Duration, Instant};

/// Capacity of an origin, as `statfs` shows it; object stores return `None` instead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OriginCapacity {
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
}

/// Properties of an origin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OriginCapabilities {
    /// Symbolic links exist and can be read.
    pub symlinks: bool,
    /// Names are any bytes; otherwise UTF-8.
    pub byte_names: bool,
    /// Permission bits and directories' times are real; otherwise 0o444, 0o555 and the epoch.
    pub modes: bool,
    /// The server checks the etag of each read.
    pub etags: bool,
    /// One thread can have several reads in flight.
    pub concurrent_reads: bool,
}

/// One of several concurrent reads.
pub struct OriginRead<'a> {
    /// The object, at exactly this version.
    pub object: &'a ObjectRef,
    /// First byte to read.
    pub offset: u64,
    /// The destination.
    pub sink: &'a mut dyn ByteSink,
}

/// Methods of a wrapper that only call those of the wrapped object.
#[macro_export]
macro_rules! forward_to {
    ($wrapped:ident: $(fn $method:ident(&$self:ident $(, $name:ident: $type:ty)*) -> $result:ty;)+) => {
        $(fn $method(&$self $(, $name: $type)*) -> $result {
            $self.$wrapped.$method($($name),*)
        })+
    };
}
/// The read side of a bucket or a directory. All calls block, none past its deadline, and all may run concurrently on
/// many threads, but not inside an async runtime. Paths are relative to the source, without a leading or trailing
/// slash; `""` is the root.
pub trait OriginStore: Send + Sync {
    /// The source's normalised URL, without credentials: the same text for the same source, in any process.
    fn source_url(&self) -> &str;

    /// One line for messages: the source and how it is reached (endpoint, region, style), without credentials.
    fn describe(&self) -> String;

    /// The properties of this origin.
    fn capabilities(&self) -> OriginCapabilities;

    /// Sends one cheap request for the source's root, so that a mount with wrong arguments, credentials or endpoint
    /// fails at once.
    ///
    /// # Errors
    /// `PermissionDenied`, `Unavailable`, `NotFound`, `NotADirectory`, `Timeout`: each with its evidence and remedy.
    fn check(&self, deadline: Instant) -> Result<()>;

    /// The attributes of the name at `path`. A path with a slash at the end is the marker of a folder: the object with this key in a
    /// bucket.
    ///
    /// # Errors
    /// `NotFound` and `NotADirectory` for absent names; otherwise the origin's error.
    fn lookup(&self, path: &[u8], deadline: Instant) -> Result<ObjectAttr>;

    /// Up to `max` names of the folder at `path`, or more where an object store returns more, and the cursor of the next
    /// page, in an order that stays the same between pages. `cursor` is the `next` of the page before. A page may be empty and still have a next one.
    ///
    /// # Errors
    /// `NotFound` when there is no such folder (an object store reports this on the first page only),
    /// `NotADirectory`, `Invalid` for a cursor that was not returned by this origin, `Io` when the pages of an object store
    /// do not move on.
    fn list(&self, path: &[u8], cursor: Option<&[u8]>, max: usize, deadline: Instant) -> Result<ListPage>;

    /// Why the origin refuses all requests of this process, after a refused request; `None` while it serves. Waits for a check that
    /// is under way, but not after `deadline`.
    fn refusal(&self, deadline: Instant) -> Option<Error> {
        let _ = deadline;
        None
    }

    /// Whether the last listing of the folder at `path` has all existing names, so that all others are absent.
    fn lists_all(&self, path: &[u8]) -> bool {
        let _ = path;
        true
    }

    /// As [`OriginStore::lookup`], with an answer at most `max_age` old.
    fn lookup_within(&self, path: &[u8], max_age: Duration, deadline: Instant) -> Result<ObjectAttr> {
        let _ = max_age;
        self.lookup(path, deadline)
    }

    /// As [`OriginStore::list`], with an answer at most `max_age` old.
    fn list_within(
        &self,
        path: &[u8],
        cursor: Option<&[u8]>,
        max: usize,
        max_age: Duration,
        deadline: Instant,
    ) -> Result<ListPage> {
        let _ = max_age;
        self.list(path, cursor, max, deadline)
    }

    /// The target of the symbolic link at `path`.
    ///
    /// # Errors
    /// `Invalid` when it is not a link, `Unsupported` where links do not exist.
    fn readlink(&self, path: &[u8], deadline: Instant) -> Result<Vec<u8>>;

    /// The headers that are stored with the object or the folder at `path`; none where the origin stores none. One request.
    ///
    /// # Errors
    /// `NotFound`; otherwise the origin's error.
    fn object_headers(&self, path: &[u8], deadline: Instant) -> Result<ObjectHeaders> {
        let _ = (path, deadline);
        Ok(ObjectHeaders::default())
    }

    /// Fills `sink` from `offset` of the object at exactly `object.version`, on this thread. Bytes committed before a
    /// failure are of the right version.
    ///
    /// # Errors
    /// `Stale` when the object has another version or is gone, `Invalid` past `object.size`, `Timeout` when the
    /// deadline passed (with the last failure in its message).
    fn read(&self, object: &ObjectRef, offset: u64, sink: &mut dyn ByteSink, deadline: Instant) -> Result<()>;

    /// As [`OriginStore::read`] for each of `reads`, on this thread. With [`OriginCapabilities::concurrent_reads`],
    /// up to `at_once` run at the same time, each for at most `time`. A read leaves the iterator when it begins. The
    /// results are in the order of the reads.
    fn read_many<'a>(
        &self,
        reads: &mut dyn Iterator<Item = OriginRead<'a>>,
        at_once: usize,
        time: Duration,
    ) -> Vec<Result<()>> {
        let _ = at_once;
        reads.map(|read| self.read(read.object, read.offset, read.sink, Instant::now() + time)).collect()
    }

    /// A local file with all bytes of an object, which the origin gives up to the caller.
    fn take_local_file(&self, object: &ObjectRef) -> Option<Box<dyn LocalFile>> {
        let _ = object;
        None
    }

    /// The capacity of the source, if it has one.
    fn statfs(&self, deadline: Instant) -> Result<Option<OriginCapacity>>;
}

/// A local file with all bytes of an object; until the drop, the origin reads the object from there.
pub trait LocalFile: Send {
    /// The file.
    fn file(&self) -> Option<&File>;
}
