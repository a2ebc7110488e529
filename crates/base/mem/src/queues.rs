//! In which order blocks in memory are given up: S3-FIFO. New blocks wait in `small`; those used again move to `main`; those
//! thrown out of `small` leave their name in `ghost` and go to `main` at once when they come back. It holds names only, and
//! does not know which of the blocks are still there.

use spurline_types::{BlockId, ObjectId};
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

#[derive(Default)]
pub(crate) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }
    fn write_u32(&mut self, n: u32) {
        self.write_u64(u64::from(n));
    }
    fn write_u64(&mut self, n: u64) {
        // Object ids are hashes already; the block number only has to be spread.
        self.0 = (self.0 ^ n).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    }
    fn write_u128(&mut self, n: u128) {
        self.0 ^= (n as u64) ^ ((n >> 64) as u64);
    }
}

pub(crate) type IdHash = BuildHasherDefault<IdHasher>;

/// A block as it stands in a queue.
#[derive(Clone, Copy)]
pub(crate) struct Name {
    // Not as a `BlockId`, beside which there would be no room for the rest.
    object: ObjectId,
    index: u32,
    /// Tells the block from one of the same id that was given up before.
    pub(crate) stamp: u32,
    pages: u32,
}

impl Name {
    pub(crate) fn new(id: BlockId, stamp: u32, pages: u32) -> Self {
        Name { object: id.object, index: id.index, stamp, pages }
    }

    pub(crate) fn id(&self) -> BlockId {
        BlockId { object: self.object, index: self.index }
    }
}

/// One of the queues, and how many pages the blocks in it take.
#[derive(Default)]
pub(crate) struct Queue {
    names: VecDeque<Name>,
    pages: u64,
}

impl Queue {
    pub(crate) fn push(&mut self, name: Name) {
        self.pages += u64::from(name.pages);
        self.names.push_back(name);
    }

    pub(crate) fn pop(&mut self) -> Option<Name> {
        let name = self.names.pop_front()?;
        self.pages -= u64::from(name.pages);
        Some(name)
    }

    pub(crate) fn len(&self) -> usize {
        self.names.len()
    }

    fn retain(&mut self, mut here: impl FnMut(&Name) -> bool) {
        self.names.retain(&mut here);
        self.pages = self.names.iter().map(|name| u64::from(name.pages)).sum();
    }
}

#[derive(Default)]
pub(crate) struct Queues {
    pub(crate) small: Queue,
    pub(crate) main: Queue,
    ghost: VecDeque<BlockId>,
    ghosts: HashMap<BlockId, (), IdHash>,
}

impl Queues {
    /// A block that came.
    pub(crate) fn push(&mut self, name: Name) {
        let queue = if self.ghosts.remove(&name.id()).is_some() { &mut self.main } else { &mut self.small };
        queue.push(name);
    }

    pub(crate) fn len(&self) -> usize {
        self.small.len() + self.main.len()
    }

    /// Whether it is the turn of `small`: while its blocks take more than a tenth of the memory. Counted by names, a few
    /// large files of a scan would be nothing beside many small ones.
    pub(crate) fn small_is_due(&self) -> bool {
        self.small.pages * 10 > self.small.pages + self.main.pages
    }

    /// Has a block that was given up go to `main` when it comes back before long.
    pub(crate) fn remember(&mut self, id: BlockId) {
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

    /// Forgets the names of blocks that are gone.
    pub(crate) fn sweep(&mut self, here: impl Fn(&Name) -> bool) {
        self.main.retain(&here);
        self.small.retain(&here);
    }
}
