//! What a store is told when it opens, and what it found out about that. Parses nothing and opens nothing.

use crate::io::DiskIo;
use spurline_mem::Pool;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// How much the cache disks may hold, over all directories.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Capacity {
    /// At most this many bytes.
    Bytes(u64),
    /// All the space there is, short of the free-space ratio.
    All,
    /// Nothing: no disk is touched.
    None,
}

/// How cache disks are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum IoMode {
    /// io_uring with O_DIRECT: the page cache is left alone.
    #[default]
    Dio,
    /// Through the page cache.
    PageCache,
    /// Through the page cache, and whole ranges handed out as file and offset for `sendfile` and `splice`.
    Splice,
    /// No disk at all.
    Disable,
}

/// Wraps the raw operations of the disk at a path: where a test puts a [`crate::FaultyDisk`].
pub type Decorate = Arc<dyn Fn(&Path, Arc<dyn DiskIo>) -> Arc<dyn DiskIo> + Send + Sync>;

/// What a store needs to know. [`StoreConfig::new`] fills in the defaults.
#[derive(Clone)]
pub struct StoreConfig {
    /// One directory per disk; made if missing. Patterns are expanded by [`crate::expand_dirs`] before.
    pub dirs: Vec<PathBuf>,
    /// How much they may hold together.
    pub capacity: Capacity,
    /// A disk is filled no further once less than this share of it is free.
    pub free_space_ratio: f64,
    /// Length of a block in bytes: a multiple of 64 KiB, at most 256 MiB.
    pub block_size: u32,
    /// How disks are read.
    pub io: IoMode,
    /// A read not answered after this long is a miss, and its disk is gone round. Where no write has ended for this long, no
    /// more is begun.
    pub read_timeout: Duration,
    /// A write not answered after this long failed, and its disk is gone round.
    pub write_timeout: Duration,
    /// How often a disk that is not normal is tried.
    pub probe_interval: Duration,
    /// A disk that was unstable for this long is down.
    pub down_after: Duration,
    /// Buffers that reads go to; registered with io_uring, which halves the CPU a read costs.
    pub pool: Option<Arc<Pool>>,
    /// Wraps each disk's operations.
    pub decorate: Option<Decorate>,
}

impl StoreConfig {
    /// The defaults for these directories and this capacity.
    pub fn new(dirs: Vec<PathBuf>, capacity: Capacity) -> Self {
        StoreConfig {
            dirs,
            capacity,
            free_space_ratio: 0.1,
            block_size: 4 << 20,
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

/// Something an operator should hear about that keeps nothing from working.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// What it is about: a path or a flag.
    pub subject: String,
    /// What is so, and what follows from it.
    pub evidence: String,
    /// What to do.
    pub remedy: String,
}
