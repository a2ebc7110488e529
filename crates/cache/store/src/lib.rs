//! The block store on cache disks. Keeps blocks of objects in files with checksums, finds the blocks again after a crash, evicts
//! blocks when space runs out, and stops using a disk that fails. Knows no origin, no network and no memory tier.
//!
//! [`Store`] is blocking and thread-safe. A read takes a shared lock, a system call and a pass over the bytes for the checksum;
//! nothing is allocated.

mod adopt;
mod block_state;
mod capacity;
mod classes;
pub mod config;
pub mod crc;
mod disk;
mod evict;
mod files;
mod fresh;
mod health;
mod index;
mod io;
mod janitor;
mod journal;
mod layout;
mod log;
mod policy;
mod read;
mod restore;
mod scratch;
mod store;
mod synth;
mod write;
mod write_permits;

pub use adopt::FileAdoption;
pub use classes::{BlockClass, PINNED_PERCENT, UNCLASSIFIED};
pub use config::{CacheCapacity, DiskDecorator, IoMode, StoreConfig, StoreFinding};
pub use crc::GRANULE;
pub use evict::RemovedBytes;
pub use fresh::FreshDirs;
pub use health::DiskState;
pub use index::{BlockMap, index_bytes_of_cache, index_bytes_per_block};
pub use io::{ALIGN, DataFile, DiskFault, DiskIo, DiskSpace, FaultyDisk, IoBuf, ReadTarget, RealDisk, RingSet};
pub use layout::{FORMAT_FILE, LOCK, expand_dirs, remove_contents, remove_if_there};
pub use read::{FileRange, PinnedFile, ReadOutcome};
pub use store::{DiskStatus, Store};
pub use synth::synthesise;
pub use write::PutOutcome;
