//! The options of a changed bucket. Knows no request.

use crate::part_upload::{FIRST_PART, PartLengths};
use spurline_types::{Error, Result};
use std::fs::File;
use std::path::PathBuf;
use std::time::Duration;

/// How objects are copied and removed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RenameRules {
    /// Copies keep the time of their source.
    pub keeps_mtime: bool,
    /// Under the condition that no other writer has changed anything.
    pub guarded: bool,
}

/// How a bucket is changed, and how its files look.
#[derive(Debug, Clone)]
pub struct BucketWriteOptions {
    /// The owner of all files and folders.
    pub uid: u32,
    /// Their group.
    pub gid: u32,
    /// New files belong to `uid` and `gid`, in place of the caller.
    pub squashes: bool,
    /// Owner, mode, times, symbolic links and extended attributes are in the metadata of the objects.
    pub object_attrs: bool,
    /// The permission bits of files.
    pub file_mode: u32,
    /// The permission bits of folders.
    pub folder_mode: u32,
    /// Changes replace those that another writer has made since the file was opened.
    pub last_writer_wins: bool,
    /// A store that keeps no conditions is changed without them.
    pub allow_unguarded_writes: bool,
    /// An earlier process of the mount has found that the store keeps the conditions of writes.
    pub conditions_known: bool,
    /// Uploads that mounts have left behind are aborted when they are this old.
    pub abort_uploads_after: Duration,
    /// Most objects of a folder that is renamed; programs copy larger ones.
    pub rename_limit: u64,
    /// While the store does not respond, the last known names, attributes and listings stay valid for this long; zero for never.
    pub stale_if_error: Duration,
    /// The most names that are kept for that.
    pub known_names_max: usize,
    /// How long a listing of a folder in which the mount makes files excludes names; zero for never.
    pub listings_exclude_for: Duration,
    /// The folder of local files with bytes that are not published; `None` keeps those in memory.
    pub staging_dir: Option<PathBuf>,
    /// Most bytes of these files together.
    pub staging_max: u64,
    /// Length of the first parts of an upload.
    pub part_len: u64,
    /// The cache fills blocks of new objects from these files ([`crate::PublishingOrigin`]).
    pub fills_cache: bool,
    /// Nodes keep new objects, and upload these later. Only for a store behind nodes.
    pub stage: bool,
    /// The source's prefix with a trailing slash, or empty.
    pub(crate) root: String,
}

impl BucketWriteOptions {
    /// Options for the owner of all files.
    pub fn new(uid: u32, gid: u32) -> BucketWriteOptions {
        BucketWriteOptions {
            uid,
            gid,
            squashes: false,
            object_attrs: false,
            file_mode: 0o644,
            folder_mode: 0o755,
            last_writer_wins: false,
            allow_unguarded_writes: false,
            conditions_known: false,
            abort_uploads_after: Duration::from_secs(24 * 3600),
            rename_limit: 10_000,
            stale_if_error: Duration::ZERO,
            known_names_max: 0,
            listings_exclude_for: Duration::ZERO,
            staging_dir: None,
            staging_max: u64::MAX,
            part_len: FIRST_PART,
            fills_cache: true,
            stage: false,
            root: String::new(),
        }
    }

    pub(crate) fn part_lengths(&self) -> PartLengths {
        PartLengths { first: self.part_len }
    }

    /// How folders are renamed.
    pub(crate) fn rename_rules(&self) -> RenameRules {
        RenameRules { keeps_mtime: self.object_attrs, guarded: !self.last_writer_wins }
    }

    /// A local file without a name.
    pub(crate) fn new_staging_file(&self) -> Result<File> {
        let made = match &self.staging_dir {
            Some(dir) => {
                use std::os::unix::fs::OpenOptionsExt as _;
                File::options().read(true).write(true).mode(0o600).custom_flags(libc::O_TMPFILE).open(dir)
            }
            None => {
                let flags = rustix::fs::MemfdFlags::CLOEXEC;
                rustix::fs::memfd_create("spurline-written", flags).map(File::from).map_err(Into::into)
            }
        };
        made.map_err(|e| Error::io("making a local file for the bytes of a written one", &e))
    }
}
