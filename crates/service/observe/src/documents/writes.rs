//! The writing side of a mount or a node in the documents of `status` and `info`, and the report of a mount at the end.

use serde::{Deserialize, Serialize};

/// The writing side of a mount.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct MountWrites {
    /// Whether the mount takes changes.
    pub writable: bool,
    /// Whether changes go to cache nodes instead of the source.
    pub through_nodes: bool,
    /// [`LOCKS_OF_MOUNT`], [`LOCKS_OF_GROUP`] or [`LOCKS_OF_SOURCE`]; `None` where the mount is read-only.
    pub locks: Option<String>,
    /// Written bytes that are not in the source yet; `None` where every change is in the source when its call returns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub behind: Option<WritesBehind>,
}

/// Locks hold between the programs of a mount.
pub const LOCKS_OF_MOUNT: &str = "mount";
/// Locks hold between the programs of all mounts that use the same nodes.
pub const LOCKS_OF_GROUP: &str = "group";
/// Locks hold between all users of the source.
pub const LOCKS_OF_SOURCE: &str = "source";

/// The writing side of a node.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeWrites {
    /// Whether the node takes changes.
    pub writable: bool,
    /// Sessions of writing mounts.
    pub sessions: u64,
    /// Files that these mounts have open.
    pub open_files: u64,
}

/// Written bytes that no node has yet, or that are not published yet, and lost bytes: in the status of a mount, and in the report
/// at the end.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct WritesBehind {
    /// Whether the bytes are in the source when they are published, as objects of a bucket. Else nodes take them.
    pub publishes: bool,
    /// Bytes that no node has yet; with `publishes`, those that are not published.
    pub unsent_bytes: u64,
    /// Files with such bytes.
    pub unsent_files: u64,
    /// The files with most of these bytes.
    pub unsent: Vec<FileByteCount>,
    /// Bytes that no node took, or that were not published, before the file was closed for good.
    pub lost_bytes: u64,
    /// Files with such bytes.
    pub lost_files: u64,
    /// The first of these files.
    pub lost: Vec<FileByteCount>,
    /// Why the source made changes not durable at the end of the mount.
    pub not_durable: Option<String>,
    /// Why the mount does not know at the end whether all changes are durable.
    pub maybe_not_durable: Option<String>,
    /// Whether the mount has ended for programs, and waits until nodes have made the changes durable.
    pub finishing: bool,
}

/// A file with some of the bytes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct FileByteCount {
    /// The path below the source.
    pub path: String,
    /// The bytes.
    pub bytes: u64,
}

/// The abilities of a writable source, for programs of a mount.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SourceAbilities {
    /// How a directory is renamed: `atomic`, `each, up to N`, or `no`.
    pub rename_directory: String,
    /// Hard links.
    pub hard_links: bool,
    /// Symbolic links.
    pub symlinks: bool,
    /// Modes and owners.
    pub modes: bool,
    /// Extended attributes.
    pub xattrs: bool,
    /// Access control lists.
    pub acls: bool,
    /// Writes at any offset.
    pub random_write: bool,
    /// Appends of several writers that do not overwrite each other.
    pub atomic_append: bool,
    /// [`LOCKS_OF_MOUNT`], [`LOCKS_OF_GROUP`] or [`LOCKS_OF_SOURCE`].
    pub locks: String,
    /// Holes in files.
    pub holes: bool,
    /// Copies within the source.
    pub copy: bool,
}
