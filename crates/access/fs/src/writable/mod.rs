//! The file system of a writable mount: inodes that keep their number while their bytes change, handles, and the
//! operations of POSIX, over a [`WritableVolume`]. It knows neither FUSE nor the source.
//!
//! Four owners share the work, and [`WritableFileSystem`] answers calls by them. Each names only those above it in this table:
//!
//! | owner | has | over the tables |
//! |---|---|---|
//! | `life` | what a process keeps for the next, and requests that come again | |
//! | `names` | names, inodes and attributes, and changes of them | `nodes`, `directory_attrs`, `open_nodes` |
//! | `locks` | the locks of open files | `lock_table`, `open_nodes` |
//! | `opens` | open files and directories | `open_nodes` |
//!
//! A table knows neither the source nor an owner. The service beside the owners keeps in step what a kernel has (`kernel_view`).

mod change;
mod directory_attrs;
mod groups;
mod kernel_inode;
mod kernel_view;
mod life;
mod limit;
mod lock_table;
mod locks;
mod names;
mod nodes;
mod open_nodes;
mod opener;
mod opens;
mod recall;
mod removed;
mod service;
mod version_reads;

pub use names::WritableConfig;

use crate::errno::FsResult;
use kernel_view::KernelRefreshes;
use life::MountRecords;
use locks::MountLocks;
use names::MountNames;
use opens::MountOpens;
use spurline_types::Stats;
use spurline_volume::Volume;
use spurline_volume::writes::WritableVolume;
use std::sync::Arc;

/// A volume mounted for changes. Every call may be made from any thread.
pub struct WritableFileSystem {
    opens: MountOpens,
    locks: Arc<MountLocks>,
    life: Arc<MountRecords>,
    names: Arc<MountNames>,
    refreshes: KernelRefreshes,
}

impl WritableFileSystem {
    /// A file system over the changing side of `volume`.
    pub fn new(
        volume: Arc<dyn Volume>,
        source: Arc<dyn WritableVolume>,
        config: WritableConfig,
        stats: Arc<Stats>,
    ) -> FsResult<Self> {
        let names = Arc::new(MountNames::new(source, config, stats)?);
        let locks = Arc::new(MountLocks::new(&names));
        let opens = MountOpens::new(volume, &names, &locks);
        let life = Arc::clone(&names.life);
        Ok(WritableFileSystem { opens, locks, life, names, refreshes: KernelRefreshes::default() })
    }

    /// The number of inodes referenced by the kernel, the root included.
    pub fn known_inodes(&self) -> usize {
        self.names.nodes.len()
    }
}
