//! The block store on cache disks: blocks of objects kept in files, checksummed, found again after a crash, evicted
//! when space runs out, and gone round when a disk fails. It knows no under-store, no network and no memory tier.
//!
//! [`Store`] is blocking and thread-safe. A read takes one lock for reading, one system call and one pass over the
//! bytes for their checksum; nothing is allocated.

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
mod turns;
mod write;

pub use classes::{Class, PINNED_PERCENT, PLAIN};
pub use config::{Capacity, Decorate, Finding, IoMode, StoreConfig};
pub use crc::GRANULE;
pub use fresh::Fresh;
pub use health::DiskState;
pub use index::BlockMap;
pub use io::{ALIGN, DiskIo, Fault, FaultyDisk, IoBuf, OpenFile, RealDisk, Rings, Space, Target};
pub use layout::expand_dirs;
pub use read::{FileRange, Outcome, PinnedFile};
pub use store::{DiskStatus, Store};
pub use synth::synthesise;
pub use write::Kept;
