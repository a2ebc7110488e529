//! The order in which blocks in memory are evicted: S3-FIFO. New blocks enter `small`; blocks that are used again move to `main`.
//! A block evicted from `small` leaves an id in `ghost`, and enters `main` directly on return. Holds names only, and does not
//! know which of the blocks still exist.

use spurline_types::id_hash::BuildObjectHasher;
use spurline_types::{BlockId, ObjectId};
use std::collections::{HashMap, VecDeque};

/// A block's entry in a queue.
#[derive(Clone, Copy)]
pub(crate) struct QueuedBlock {
    // Not a `BlockId`, whose padding would leave no room for the rest.
    object: ObjectId,
    index: u32,
    /// Distinguishes the block from an evicted block of the same id.
    pub(crate) stamp: u32,
    pages: u32,
}

impl QueuedBlock {
    pub(crate) fn new(id: BlockId, stamp: u32, pages: u32) -> Self {
        QueuedBlock { object: id.object, index: id.index, stamp, pages }
    }

    pub(crate) fn id(&self) -> BlockId {
        BlockId { object: self.object, index: self.index }
    }
}

/// A queue, and the pages that the blocks there take.
#[derive(Default)]
pub(crate) struct BlockQueue {
    names: VecDeque<QueuedBlock>,
    pages: u64,
}

impl BlockQueue {
    pub(crate) fn push(&mut self, name: QueuedBlock) {
        self.pages += u64::from(name.pages);
        self.names.push_back(name);
    }

    pub(crate) fn pop(&mut self) -> Option<QueuedBlock> {
        let name = self.names.pop_front()?;
        self.pages -= u64::from(name.pages);
        Some(name)
    }

    pub(crate) fn len(&self) -> usize {
        self.names.len()
    }

    fn retain(&mut self, mut here: impl FnMut(&QueuedBlock) -> bool) {
        self.names.retain(&mut here);
        self.pages = self.names.iter().map(|name| u64::from(name.pages)).sum();
    }
}

#[derive(Default)]
pub(crate) struct EvictionQueues {
    pub(crate) small: BlockQueue,
    pub(crate) main: BlockQueue,
    ghost: VecDeque<BlockId>,
    ghosts: HashMap<BlockId, (), BuildObjectHasher>,
}

impl EvictionQueues {
    /// Adds a new block.
    pub(crate) fn push_new(&mut self, name: QueuedBlock) {
        let queue = if self.ghosts.remove(&name.id()).is_some() { &mut self.main } else { &mut self.small };
        queue.push(name);
    }

    pub(crate) fn len(&self) -> usize {
        self.small.len() + self.main.len()
    }

    /// Whether to evict from `small`: while the blocks there take more than a tenth of the memory. Counted by names, a few large
    /// files of a scan would vanish beside many small files.
    pub(crate) fn small_is_due(&self) -> bool {
        self.small.pages * 10 > self.small.pages + self.main.pages
    }

    /// Makes an evicted block enter `main` if the block comes back soon.
    pub(crate) fn remember_ghost(&mut self, id: BlockId) {
        if self.ghosts.insert(id, ()).is_none() {
            self.ghost.push_back(id);
        }
        let room = self.len().max(64);
        while self.ghost.len() > room {
            if let Some(old) = self.ghost.pop_front() {
                self.ghosts.remove(&old);
            }
        }
    }

    /// Removes the names of blocks that no longer exist.
    pub(crate) fn retain_present(&mut self, here: impl Fn(&QueuedBlock) -> bool) {
        self.main.retain(&here);
        self.small.retain(&here);
    }
}
