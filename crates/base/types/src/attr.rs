//! The results of a lookup or a listing of the origin.

use crate::Version;
use std::time::SystemTime;

/// The kind of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FileKind {
    /// A file, or an object.
    File,
    /// A folder, or a prefix that objects have in common.
    Directory,
    /// A symbolic link (directory sources only).
    Symlink,
}

/// The attributes of a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectAttr {
    /// File, directory or symbolic link.
    pub kind: FileKind,
    /// Length in bytes; 0 for a directory.
    pub size: u64,
    /// Time of last change; the epoch where the origin has none (a common prefix).
    pub mtime: SystemTime,
    /// Permission bits (07777); origins without any return 0o444 or 0o555.
    pub mode: u16,
    /// The version of the bytes; empty for directories.
    pub version: Version,
    /// The object store's etag, unmodified, if any.
    pub etag: Option<String>,
}

/// A name of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirEntry {
    /// The last part of the path: any byte but `/` and NUL.
    pub name: Vec<u8>,
    /// The attributes.
    pub attr: ObjectAttr,
}

/// A part of a directory, in an order that is stable from page to page.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ListPage {
    /// The names of this page, without duplicates.
    pub entries: Vec<DirEntry>,
    /// Where the next page starts; `None` on the last.
    pub next: Option<Vec<u8>>,
    /// The marker of the folder itself, on the first page of a bucket's folder. It stays within a process: nodes answer lookups of it.
    pub marker: Option<ObjectAttr>,
}

/// A time as seconds since the epoch, rounded down, and nanoseconds on top: a unique representation, also before
/// 1970.
pub fn unix_time(time: SystemTime) -> (i64, u32) {
    match time.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(after) => (i64::try_from(after.as_secs()).unwrap_or(i64::MAX), after.subsec_nanos()),
        Err(before) => {
            let before = before.duration();
            let secs = i64::try_from(before.as_secs()).unwrap_or(i64::MAX).saturating_neg();
            match before.subsec_nanos() {
                0 => (secs, 0),
                nanos => (secs.saturating_sub(1), 1_000_000_000 - nanos),
            }
        }
    }
}
