//! The parameters of a store, and the findings about them. Parses nothing and opens nothing.

use crate::io::DiskIo;
use spurline_mem::BufferPool;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// How much the cache disks may hold, over all directories.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheCapacity {
    /// At most this many bytes.
    Bytes(u64),
    /// The same by default: less room is no finding.
    Default(u64),
    /// All space, short of the free-space ratio.
    All,
    /// Nothing: no disk is used.
    None,
}

/// How cache disks are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum IoMode {
    /// io_uring with O_DIRECT: bypasses the page cache.
    #[default]
    Dio,
    /// Through the page cache.
    PageCache,
    /// Through the page cache; whole ranges are handed out as file and offset for `sendfile` and `splice`.
    Splice,
    /// No disk at all.
    Disable,
}

/// Wraps the raw operations of the disk at a path: a test inserts a [`crate::FaultyDisk`] here.
pub type DiskDecorator = Arc<dyn Fn(&Path, Arc<dyn DiskIo>) -> Arc<dyn DiskIo> + Send + Sync>;

/// The parameters of a store. [`StoreConfig::new`] fills in the defaults.
#[derive(Clone)]
pub struct StoreConfig {
    /// A directory for each disk; made if missing. Patterns are expanded by [`crate::expand_dirs`] before.
    pub dirs: Vec<PathBuf>,
    /// How much all directories together may hold.
    pub capacity: CacheCapacity,
    /// A disk is filled until less than this share of it is free.
    pub free_space_ratio: f64,
    /// Length of a block in bytes: a multiple of 64 KiB, at most 256 MiB.
    pub block_size: u32,
    /// Maximum number of blocks on all disks together, which bounds the memory of the index; see
    /// [`crate::index_bytes_per_block`].
    pub max_blocks: u64,
    /// How disks are read.
    pub io: IoMode,
    /// A longer read is a miss, and the disk is not used any more. When no write has ended for this long, no further write
    /// begins.
    pub read_timeout: Duration,
    /// A longer write has failed, and the disk is not used any more.
    pub write_timeout: Duration,
    /// How often a disk that is not normal is probed.
    pub probe_interval: Duration,
    /// A disk that was unstable for this long is down.
    pub down_after: Duration,
    /// The buffers that reads go to; registered with io_uring, which halves the CPU cost of a read.
    pub pool: Option<Arc<BufferPool>>,
    /// Wraps each disk's operations.
    pub decorate: Option<DiskDecorator>,
}

impl StoreConfig {
    /// The defaults for these directories and this capacity.
    pub fn new(dirs: Vec<PathBuf>, capacity: CacheCapacity) -> Self {
        StoreConfig {
            dirs,
            capacity,
            free_space_ratio: 0.1,
            block_size: 4 << 20,
            max_blocks: u64::MAX,
            io: IoMode::Dio,
            read_timeout: Duration::from_secs(5),
            write_timeout: Duration::from_secs(30),
            probe_interval: Duration::from_secs(1),
            down_after: Duration::from_secs(30),
            pool: None,
            decorate: None,
        }
    }
}

/// A condition that an operator should know and that prevents nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreFinding {
    /// A path or a flag.
    pub subject: String,
    /// The observation, and the consequence.
    pub evidence: String,
    /// What to do.
    pub remedy: String,
}
