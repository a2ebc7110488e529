//! The document of `info`: a file of a volume, with the cached blocks. Nodes send the document to mounts, which show it.

use serde::{Deserialize, Serialize};
use spurline_types::FileKind;

/// A file, with the cached blocks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileInfo {
    /// The source.
    pub source: String,
    /// The path below the source; bytes that are no text are replaced.
    pub path: String,
    /// The kind of the name.
    pub kind: FileKind,
    /// The length in bytes.
    pub length: u64,
    /// The version.
    pub version: String,
    /// The object store's etag.
    #[serde(default)]
    pub etag: Option<String>,
    /// Bytes of a block.
    pub block_size: u64,
    /// Numbers of blocks.
    #[serde(default)]
    pub blocks: BlockCounts,
    /// Runs of cached blocks.
    #[serde(default)]
    pub held: Vec<BlockRun>,
    /// The folder rule that covers the file.
    #[serde(default)]
    pub rule: Option<FolderRule>,
    /// The nodes that have answered; empty for the cache of a process.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<String>,
    /// The nodes that have not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub silent: Vec<String>,
}

/// Numbers of a file's blocks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BlockCounts {
    /// All of the file.
    pub total: u64,
    /// Cached, each node's copies counted.
    pub cached: u64,
    /// In memory.
    pub memory: u64,
    /// On cache disks.
    pub disk: u64,
}

/// Consecutive blocks in the same place.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BlockRun {
    /// The first block.
    pub first: u64,
    /// The last block.
    pub last: u64,
    /// `memory`, `disk`, or `memory and disk`.
    #[serde(rename = "where")]
    pub place: String,
    /// The node that holds the blocks; `None` for the cache of this process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub holder: Option<String>,
}

/// The rule for a folder and everything below, except deeper folders with a rule.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FolderRule {
    /// The folder: a source and a path below, without a trailing slash.
    pub url: String,
    /// Never evicted for room.
    pub pin: bool,
    /// How long the folder's blocks are kept.
    pub ttl_seconds: Option<u64>,
    /// The bytes that the group may store of the folder.
    pub quota_bytes: Option<u64>,
    /// New files are staged. Absent for `false`, so that older releases read the rule unchanged.
    #[serde(skip_serializing_if = "is_false")]
    pub stage: bool,
    /// New files are scratch data. Never beside `stage`; absent for `false`.
    #[serde(skip_serializing_if = "is_false")]
    pub scratch: bool,
}

/// Where the files of a bucket that mounts write through nodes go.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum WriteClass {
    /// To the store, before a close or an fsync ends.
    #[default]
    Direct,
    /// To disks of two nodes, and to the store later.
    Staged,
    /// To the disk of a node alone, never to the store.
    Scratch,
}

fn is_false(flag: &bool) -> bool {
    !flag
}

impl FolderRule {
    /// Whether the rule has no effect.
    pub fn is_empty(&self) -> bool {
        !self.pin
            && self.ttl_seconds.is_none()
            && self.quota_bytes.is_none()
            && self.write_class() == WriteClass::Direct
    }

    /// Where new files of the folder go.
    pub fn write_class(&self) -> WriteClass {
        if self.stage {
            WriteClass::Staged
        } else if self.scratch {
            WriteClass::Scratch
        } else {
            WriteClass::Direct
        }
    }

    /// Changes where new files of the folder go.
    pub fn set_write_class(&mut self, class: WriteClass) {
        self.stage = class == WriteClass::Staged;
        self.scratch = class == WriteClass::Scratch;
    }
}

impl BlockRun {
    /// Number of blocks.
    pub fn count(&self) -> u64 {
        self.last + 1 - self.first
    }

    /// Whether the blocks are in memory.
    pub fn is_in_memory(&self) -> bool {
        self.place.contains("memory")
    }

    /// Whether the blocks are on a cache disk.
    pub fn is_on_disk(&self) -> bool {
        self.place.contains("disk")
    }
}
