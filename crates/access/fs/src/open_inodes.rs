//! The inodes of files that are open in cached mode, by path. It knows neither handles nor versions.

use crate::inode::Inode;
use parking_lot::{Mutex, MutexGuard};
use spurline_types::ObjectId;
use std::collections::HashMap;
use std::sync::Arc;

const SHARDS: usize = 16;

/// The inodes of open files by path, so that a lookup of a longer version finds the open one.
pub struct OpenInodes {
    shards: [Mutex<HashMap<ObjectId, Arc<Inode>>>; SHARDS],
}

impl OpenInodes {
    pub fn new() -> Self {
        OpenInodes { shards: Default::default() }
    }

    fn shard(&self, path: ObjectId) -> MutexGuard<'_, HashMap<ObjectId, Arc<Inode>>> {
        self.shards[path.0 as usize & (SHARDS - 1)].lock()
    }

    /// Adds an inode that was just opened in cached mode; `path` is the hash of its path.
    pub fn add_open(&self, path: ObjectId, inode: &Arc<Inode>) {
        self.shard(path).insert(path, Arc::clone(inode));
    }

    /// Removes an inode that was just closed, unless another handle has it open.
    pub fn remove_closed(&self, path: ObjectId, inode: &Inode) {
        let mut shard = self.shard(path);
        let unused = shard.get(&path).is_some_and(|open| open.ino == inode.ino) && !inode.opens.lock().is_cached();
        let unused = if unused { shard.remove(&path) } else { None };
        // Freed after the lock is released.
        drop(shard);
        drop(unused);
    }

    /// The open inode of a path.
    pub fn find_open(&self, path: ObjectId) -> Option<Arc<Inode>> {
        self.shard(path).get(&path).cloned()
    }
}
