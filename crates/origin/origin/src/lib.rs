//! The under-store's read side: what a bucket or a directory can be asked, with versions and deadlines.
//! It deliberately knows no cache of blocks, no inode, no wire format and no FUSE.
//!
//! # What a name is
//! - **Object stores.** The key `prefix/a/b` is the file `b` in the folder `a`. A folder is there when a key starts
//!   with its path and `/`: a folder marker (`a/`, whatever its length) is an empty folder. When both the key `a` and
//!   keys below `a/` exist, *the folder has the name*: the keys below stay reachable, and the object `a` is left out
//!   and counted in `metadata.skipped_names`. Left out and counted likewise, since no file can be called so: parts of
//!   a key that are empty (`a//b`), `.` or `..`, or hold NUL. Every other key is reachable, control characters,
//!   `#?%*[]{}`, trailing spaces and non-ASCII included; a request for a name that is not UTF-8 answers
//!   [`ErrorKind::NotFound`](spurline_types::ErrorKind::NotFound), because no key can be that.
//!   Over `gs://` and `az://` names with control characters can't be asked for, and one in a listing is an error that
//!   names it.
//! - **Directories.** Names are bytes. Symbolic links are shown as such and never followed, not even in the middle of
//!   a path, so that nothing outside the source is reachable through it. Sockets, pipes and devices are left out and
//!   counted, and so is a mount in it whose server is gone, while anything else in its folder can be looked at.
//!
//! # What a version is
//! - **Object stores:** the etag, sent as `If-Match` with every read and compared with the answer's.
//! - **Directories:** inode, mtime, ctime and size, compared before and after each piece is read. A file changed less
//!   than a timestamp's granularity ago is not read before that has passed, so that a second change in the same tick
//!   can't hide behind the first. A file that was changed lately and that somebody has open for writing has a version of
//!   its own each time it is looked up or listed ([`Version::unsettled`](spurline_types::Version::unsettled)), since its
//!   bytes may come later than its times; a read goes by what the file says.
//!
//! A read of another version answers [`ErrorKind::Stale`](spurline_types::ErrorKind::Stale), a mix of two is never
//! handed out, and no call blocks past its deadline.
#![deny(unsafe_code)]

mod aws;
mod backend;
mod cached;
mod client;
mod config;
mod dir;
pub mod faulty;
mod in_common;
mod lanes;
mod library;
mod object;
mod pool;
mod retry;
mod role;
mod roots;
mod s3;
mod s3_wire;
mod seen;
mod snapshots;
mod source;
mod writers;

pub use cached::{Cached, MetadataConfig};
pub use config::{Credentials, Environment, UnderConfig};
pub use in_common::InCommon;
pub use source::{Scheme, Source, normal};

use in_common::Bucket;
use spurline_types::{Attr, ListPage, ObjectRef, Result, Sink, Stats};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Capacity of an under-store, as `statfs` shows it; object stores have none and answer `None` in its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatFs {
    /// Unit of the block counts, in bytes.
    pub block_size: u64,
    /// Blocks in all.
    pub blocks: u64,
    /// Blocks free.
    pub blocks_free: u64,
    /// Blocks free for others than root.
    pub blocks_available: u64,
    /// Inodes in all.
    pub files: u64,
    /// Inodes free.
    pub files_free: u64,
}

/// What an under-store has and has not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// Symbolic links exist and can be read.
    pub symlinks: bool,
    /// Names are any bytes; otherwise UTF-8.
    pub byte_names: bool,
    /// Permission bits and directories' times are real; otherwise 0o444, 0o555 and the epoch.
    pub modes: bool,
    /// Reads are guarded by etags on the server's side.
    pub etags: bool,
    /// One thread can have several reads under way.
    pub together: bool,
}

/// One of several reads that are made together.
pub struct Read<'a> {
    /// What is read, at exactly this version.
    pub object: &'a ObjectRef,
    /// Where in it.
    pub offset: u64,
    /// What is filled.
    pub sink: &'a mut dyn Sink,
}

/// The read side of a bucket or a directory. All calls block, none past its deadline, and all may be made from many
/// threads at once; not from inside an async runtime. Paths are relative to the source, without a leading or trailing
/// slash; `""` is the root.
pub trait UnderStore: Send + Sync {
    /// The source's normalised URL, without credentials: the same text for the same place, in any process.
    fn source(&self) -> &str;

    /// One line for a person: the source and how it is reached (endpoint, region, style), without credentials.
    fn describe(&self) -> String;

    /// What this under-store has and has not.
    fn capabilities(&self) -> Capabilities;

    /// Asks one cheap question of the source's root, so that a mount with wrong words, credentials or endpoint ends
    /// at once.
    ///
    /// # Errors
    /// `PermissionDenied`, `Unavailable`, `NotFound`, `NotADirectory`, `Timeout`: each with its evidence and remedy.
    fn check(&self, deadline: Instant) -> Result<()>;

    /// The attributes of the name at `path`.
    ///
    /// # Errors
    /// `NotFound` and `NotADirectory` for names that are not there; what the under-store answered otherwise.
    fn lookup(&self, path: &[u8], deadline: Instant) -> Result<Attr>;

    /// Up to `max` names of the folder at `path` and where to go on, in an order that stays the same from page to
    /// page. `cursor` is the `next` of the page before. A page may be empty and still have a next one.
    ///
    /// # Errors
    /// `NotFound` when there is no such folder (an object store tells this on the first page only), `NotADirectory`,
    /// `Invalid` for a cursor that is none.
    fn list(&self, path: &[u8], cursor: Option<&[u8]>, max: usize, deadline: Instant) -> Result<ListPage>;

    /// Whether the listing of the folder at `path` that was made last has all names that are there: others are absent.
    fn lists_all(&self, path: &[u8]) -> bool {
        let _ = path;
        true
    }

    /// As [`UnderStore::lookup`], with an answer asked for no longer than `max_age` ago.
    ///
    /// # Errors
    /// As [`UnderStore::lookup`].
    fn lookup_within(&self, path: &[u8], max_age: Duration, deadline: Instant) -> Result<Attr> {
        let _ = max_age;
        self.lookup(path, deadline)
    }

    /// As [`UnderStore::list`], with an answer asked for no longer than `max_age` ago.
    ///
    /// # Errors
    /// As [`UnderStore::list`].
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

    /// What the symbolic link at `path` points to.
    ///
    /// # Errors
    /// `Invalid` when it is none, `Unsupported` where there are none.
    fn readlink(&self, path: &[u8], deadline: Instant) -> Result<Vec<u8>>;

    /// Fills `sink` from `offset` of the object at exactly `object.version`, on this thread. Bytes committed before a
    /// failure are of the right version.
    ///
    /// # Errors
    /// `Stale` when the object has another version by now or is gone, `Invalid` past `object.size`, `Timeout` when the
    /// deadline passed (with the last failure in its sentence).
    fn read(&self, object: &ObjectRef, offset: u64, sink: &mut dyn Sink, deadline: Instant) -> Result<()>;

    /// As [`UnderStore::read`] for each of `reads`, on this thread, where [`Capabilities::together`] up to `at_once` under
    /// way at the same time, and each for no longer than `time`. A read is taken when it begins. The outcomes are in the
    /// order of the reads.
    fn read_many<'a>(
        &self,
        reads: &mut dyn Iterator<Item = Read<'a>>,
        at_once: usize,
        time: Duration,
    ) -> Vec<Result<()>> {
        let _ = at_once;
        reads.map(|read| self.read(read.object, read.offset, read.sink, Instant::now() + time)).collect()
    }

    /// The capacity behind the source, where it has one.
    ///
    /// # Errors
    /// What the operating system answered.
    fn statfs(&self, deadline: Instant) -> Result<Option<StatFs>>;
}

/// Opens the under-store that `url` names. Asks nothing of it yet (see [`UnderStore::check`]).
///
/// # Errors
/// `Invalid` or `Unsupported` for a URL or a configuration that can't be right.
pub fn open(url: &str, config: &UnderConfig, stats: Arc<Stats>) -> Result<Arc<dyn UnderStore>> {
    let source = Source::parse(url)?;
    match source.scheme() {
        Scheme::Directory => Ok(Arc::new(dir::DirUnder::new(source, config, stats))),
        Scheme::S3 => {
            let bucket = config.in_common.bucket(&source, || {
                let backend = s3::S3Backend::new(&source, config, Arc::clone(&stats))?;
                Bucket::new(config, stats, Box::new(backend))
            })?;
            Ok(Arc::new(object::ObjectUnder::new(source, bucket)))
        }
        Scheme::Gcs | Scheme::Azure => {
            let bucket = config.in_common.bucket(&source, || {
                Bucket::new(config, stats, Box::new(library::LibraryBackend::new(&source, config)?))
            })?;
            Ok(Arc::new(object::ObjectUnder::new(source, bucket)))
        }
    }
}
