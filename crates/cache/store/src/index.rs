//! The in-memory index: which blocks exist, and where. Knows no files, no disk states and no policy; an entry names a disk and a
//! slot by number.
//!
//! An object with a single block (most files of most datasets) takes an entry of a hash map and nothing else.

use crate::block_state::BlockState;
use parking_lot::RwLock;
use spurline_types::id_hash::BuildObjectHasher;
use spurline_types::{BlockId, ObjectId};
use std::collections::HashSet;
use std::collections::hash_map::{Entry as Slot, HashMap};
use std::ops::Range;

/// Shards of the index, each under a lock.
pub const PARTS: usize = 64;

/// The block lies in the object's single file (else in an extent's).
pub const WHOLE: u8 = crate::log::WHOLE;
/// The block is in the main queue of the eviction policy (as last written to the log).
pub const MAIN: u8 = crate::log::MAIN;

/// All bytes of the block are zero; the file has a hole in place of all but the last page.
pub const HOLE: u8 = crate::log::HOLE;

/// Memory that the store takes per block of at most `block_size` bytes, outside of any buffer: the entry in the hash map, the
/// slot and the ghost in the eviction policy, the heap's overhead, and a checksum per granule.
pub const fn index_bytes_per_block(block_size: u32) -> u64 {
    const ENTRY_AND_SLOT: u64 = 288;
    ENTRY_AND_SLOT + 4 * (block_size as u64).div_ceil(crate::crc::GRANULE as u64)
}

/// Memory that the index of a disk cache of `size` bytes can need, with blocks of a page each.
pub const fn index_bytes_of_cache(size: u64) -> u64 {
    const LEAST_BLOCK_BYTES: u64 = 4096;
    size / LEAST_BLOCK_BYTES * index_bytes_per_block(LEAST_BLOCK_BYTES as u32)
}

/// Where a block is, and the checksums of the bytes.
#[derive(Debug)]
pub struct BlockEntry {
    /// CRC32C of every granule.
    pub crcs: Box<[u32]>,
    /// The slot of the disk's eviction policy.
    pub slot: u32,
    /// Length in bytes.
    pub len: u32,
    /// Distinguishes this entry from an earlier entry of the same block.
    pub generation: u16,
    /// The disk's number.
    pub disk: u8,
    /// [`WHOLE`], [`MAIN`], [`HOLE`], as in the log.
    pub flags: u8,
    /// Changed only by [`IndexShard`], which checks each transition.
    state: BlockState,
}

enum ObjectBlocks {
    One(u32, BlockEntry),
    Many(HashMap<u32, BlockEntry, BuildObjectHasher>),
}

/// Activity on an object; idle objects have none.
#[derive(Debug, Default, Clone, Copy)]
pub struct ObjectActivity {
    /// Blocks being written.
    pub writers: u32,
    /// Handles that hold a file of the object.
    pub pins: u32,
    /// Handles by which the kernel reads the whole file directly: the file must not be written to.
    pub whole: u32,
    /// Files being removed.
    pub unlinking: u32,
}

/// A shard of the index, under a lock.
#[derive(Default)]
pub struct IndexShard {
    objects: HashMap<ObjectId, ObjectBlocks, BuildObjectHasher>,
    active: HashMap<ObjectId, ObjectActivity, BuildObjectHasher>,
    /// Blocks in state [`BlockState::Writing`], which have no entry.
    writing: HashSet<BlockId, BuildObjectHasher>,
}

impl BlockEntry {
    /// An entry that is in no index yet.
    pub fn new(crcs: Box<[u32]>, len: u32, flags: u8, disk: u8, slot: u32, generation: u16) -> Self {
        BlockEntry { crcs, slot, len, generation, disk, flags, state: BlockState::Absent }
    }

    pub fn state(&self) -> BlockState {
        self.state
    }

    /// Whether readers may use the block, if the disk is usable.
    pub fn is_readable(&self) -> bool {
        self.state.is_readable()
    }

    /// Whether the block is to be removed from this disk now: no writer has the block any more.
    pub fn leaves_disk(&self, disk: u8) -> bool {
        self.state == BlockState::Leaving && self.disk == disk
    }
}

/// All blocks of all disks.
pub struct BlockIndex {
    shards: Box<[RwLock<IndexShard>]>,
}

impl Default for BlockIndex {
    fn default() -> Self {
        BlockIndex { shards: (0..PARTS).map(|_| RwLock::default()).collect() }
    }
}

impl BlockIndex {
    /// The shard that holds an object. A shard may be locked under the policy's lock, never the reverse.
    pub fn shard_of(&self, object: &ObjectId) -> &RwLock<IndexShard> {
        &self.shards[(object.0 >> 122) as usize % PARTS]
    }

    /// Calls `f` with every block, shard by shard; blocks that come or go meanwhile may be missed.
    pub fn for_each(&self, mut f: impl FnMut(BlockId, &BlockEntry)) {
        (0..PARTS).for_each(|part| self.for_each_in_part(part, &mut f));
    }

    /// Calls `f` with every block of a part (of [`PARTS`]), whose lock is held meanwhile.
    pub fn for_each_in_part(&self, part: usize, mut f: impl FnMut(BlockId, &BlockEntry)) {
        for (object, blocks) in &self.shards[part].read().objects {
            match blocks {
                ObjectBlocks::One(index, entry) => f(BlockId { object: *object, index: *index }, entry),
                ObjectBlocks::Many(map) => {
                    map.iter().for_each(|(i, e)| f(BlockId { object: *object, index: *i }, e));
                }
            }
        }
    }
}

impl IndexShard {
    /// The entry of a block, also when the block is being removed.
    pub fn get(&self, block: &BlockId) -> Option<&BlockEntry> {
        match self.objects.get(&block.object)? {
            ObjectBlocks::One(index, entry) => (*index == block.index).then_some(entry),
            ObjectBlocks::Many(map) => map.get(&block.index),
        }
    }

    /// As [`IndexShard::get`], to change anything but the state.
    pub fn get_mut(&mut self, block: &BlockId) -> Option<&mut BlockEntry> {
        match self.objects.get_mut(&block.object)? {
            ObjectBlocks::One(index, entry) => (*index == block.index).then_some(entry),
            ObjectBlocks::Many(map) => map.get_mut(&block.index),
        }
    }

    /// Adds a block, or replaces the entry and returns the old entry.
    fn insert(&mut self, block: BlockId, entry: BlockEntry) -> Option<BlockEntry> {
        match self.objects.entry(block.object) {
            Slot::Vacant(vacant) => {
                vacant.insert(ObjectBlocks::One(block.index, entry));
                None
            }
            Slot::Occupied(mut occupied) => match occupied.get_mut() {
                ObjectBlocks::One(index, old) if *index == block.index => Some(std::mem::replace(old, entry)),
                ObjectBlocks::Many(map) => map.insert(block.index, entry),
                ObjectBlocks::One(..) => {
                    let first = occupied.insert(ObjectBlocks::Many(HashMap::default()));
                    if let (ObjectBlocks::One(i, e), ObjectBlocks::Many(map)) = (first, occupied.get_mut()) {
                        map.extend([(i, e), (block.index, entry)]);
                    }
                    None
                }
            },
        }
    }

    /// Removes the entry of a block, whatever the state.
    fn take_entry(&mut self, block: &BlockId) -> Option<BlockEntry> {
        let Slot::Occupied(mut occupied) = self.objects.entry(block.object) else { return None };
        match occupied.get_mut() {
            ObjectBlocks::One(index, _) if *index != block.index => None,
            ObjectBlocks::One(..) => match occupied.remove() {
                ObjectBlocks::One(_, entry) => Some(entry),
                ObjectBlocks::Many(_) => None,
            },
            ObjectBlocks::Many(map) => {
                let entry = map.remove(&block.index);
                if map.is_empty() {
                    occupied.remove();
                }
                entry
            }
        }
    }

    /// Calls `f` with every block of an object until `f` returns false; returns whether `f` never did.
    pub fn all_blocks(&self, object: &ObjectId, mut f: impl FnMut(u32, &BlockEntry) -> bool) -> bool {
        match self.objects.get(object) {
            None => true,
            Some(ObjectBlocks::One(index, entry)) => f(*index, entry),
            Some(ObjectBlocks::Many(map)) => map.iter().all(|(i, e)| f(*i, e)),
        }
    }

    /// As [`IndexShard::all_blocks`] for the indexes in a range. Visits at most as many entries as the range is long.
    pub fn blocks_within(
        &self,
        object: &ObjectId,
        range: Range<u32>,
        mut f: impl FnMut(u32, &BlockEntry) -> bool,
    ) -> bool {
        match self.objects.get(object) {
            Some(ObjectBlocks::Many(map)) if range.len() < map.len() => {
                range.filter_map(|i| Some((i, map.get(&i)?))).all(|(i, e)| f(i, e))
            }
            _ => self.all_blocks(object, |i, e| !range.contains(&i) || f(i, e)),
        }
    }

    pub fn activity(&self, object: &ObjectId) -> ObjectActivity {
        self.active.get(object).copied().unwrap_or_default()
    }

    /// Updates the activity on an object.
    pub fn update_activity(&mut self, object: &ObjectId, f: impl FnOnce(&mut ObjectActivity)) {
        let activity = self.active.entry(*object).or_default();
        f(activity);
        if activity.writers == 0 && activity.pins == 0 && activity.unlinking == 0 {
            self.active.remove(object);
        }
    }

    pub fn state(&self, block: &BlockId) -> BlockState {
        match self.get(block) {
            Some(entry) => entry.state,
            None if self.writing.contains(block) => BlockState::Writing,
            None => BlockState::Absent,
        }
    }

    /// Moves a block that has an entry to another state; false, without effect, when the table does not allow that.
    fn step(&mut self, block: &BlockId, next: BlockState) -> bool {
        let Some(entry) = self.get_mut(block).filter(|entry| entry.state.may_become(next)) else { return false };
        entry.state = next;
        true
    }

    /// A writer claims a block; false when the block's state does not allow that.
    pub fn begin_write(&mut self, block: &BlockId) -> bool {
        let free = self.state(block).may_become(BlockState::Writing);
        if free {
            self.writing.insert(*block);
            self.update_activity(&block.object, |a| a.writers += 1);
        }
        free
    }

    /// Enters a claimed block, which readers may use from now on; false, without effect, when the block was not claimed.
    pub fn enter(&mut self, block: BlockId, mut entry: BlockEntry) -> bool {
        let claimed = self.state(&block).may_become(BlockState::Logging);
        if claimed {
            self.writing.remove(&block);
            entry.state = BlockState::Logging;
            self.insert(block, entry);
        }
        claimed
    }

    /// Ends a write that [`IndexShard::begin_write`] began. Returns whether the block must be removed from disk now.
    pub fn end_write(&mut self, block: &BlockId) -> bool {
        let state = self.state(block);
        if state.is_being_written() {
            self.update_activity(&block.object, |a| a.writers = a.writers.saturating_sub(1));
        }
        match state {
            BlockState::Writing => {
                self.writing.remove(block);
                false
            }
            BlockState::Logging => {
                self.step(block, BlockState::Stored);
                false
            }
            BlockState::Revoked => self.step(block, BlockState::Leaving),
            _ => false,
        }
    }

    /// Notes that a block was verified, unless the block is being written or removed.
    pub fn verified(&mut self, block: &BlockId) {
        self.step(block, BlockState::Verified);
    }

    /// Makes a block unreadable, to be removed from the disk: by the writer if there is one, else by the caller. Returns the
    /// disk; `None`, without effect, when the block is not readable.
    pub fn begin_removal(&mut self, block: &BlockId) -> Option<u8> {
        if !self.state(block).is_readable() {
            return None;
        }
        (self.step(block, BlockState::Revoked) || self.step(block, BlockState::Leaving))
            .then(|| self.get(block).map(|entry| entry.disk))?
    }

    /// Forgets a block; `None`, without effect, while a writer owns the block.
    pub fn remove(&mut self, block: &BlockId) -> Option<BlockEntry> {
        if !self.state(block).may_become(BlockState::Absent) {
            return None;
        }
        self.take_entry(block)
    }

    /// Enters a block that a log names at start, or replaces what an earlier record of the log said.
    pub fn restore(&mut self, block: BlockId, mut entry: BlockEntry) {
        if self.state(&block).may_become(BlockState::Stored) {
            entry.state = BlockState::Stored;
            self.insert(block, entry);
        }
    }
}

/// The set of present blocks of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockMap {
    words: Vec<u64>,
    blocks: u32,
}

impl BlockMap {
    /// An empty set for `blocks` blocks.
    pub fn new(blocks: u32) -> Self {
        BlockMap { words: vec![0; (blocks as usize).div_ceil(64)], blocks }
    }
    /// Marks block `index` as present.
    pub fn set(&mut self, index: u32) {
        if let Some(word) = self.words.get_mut(index as usize / 64).filter(|_| index < self.blocks) {
            *word |= 1 << (index % 64);
        }
    }
    /// Whether block `index` is present.
    pub fn contains(&self, index: u32) -> bool {
        self.words.get(index as usize / 64).is_some_and(|w| w >> (index % 64) & 1 == 1)
    }
    /// Number of present blocks.
    pub fn count(&self) -> u32 {
        self.words.iter().map(|w| w.count_ones()).sum()
    }
    /// Number of blocks of the object.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(slot: u32) -> BlockEntry {
        BlockEntry::new(Box::new([slot]), 1, 0, 0, slot, 0)
    }

    #[test]
    fn the_index_of_a_small_cache_is_small() {
        assert_eq!(index_bytes_of_cache(1 << 30), 73 << 20);
    }

    #[test]
    fn entries_are_as_small_as_claimed() {
        assert_eq!(std::mem::size_of::<BlockEntry>(), 32);
        assert!(std::mem::size_of::<(ObjectId, ObjectBlocks)>() <= 64);
    }

    proptest::proptest! {
        #[test]
        fn behaves_as_a_map(ops in proptest::collection::vec((0u8..3, 0u128..3, 0u32..4), 1..200)) {
            let mut shard = IndexShard::default();
            let mut model: HashMap<BlockId, u32> = HashMap::new();
            for (n, (op, object, index)) in ops.into_iter().enumerate() {
                let block = BlockId { object: ObjectId(object), index };
                let n = n as u32;
                match op {
                    0 => proptest::prop_assert_eq!(
                        shard.insert(block, entry(n)).map(|e| e.slot), model.insert(block, n)),
                    1 => proptest::prop_assert_eq!(shard.take_entry(&block).map(|e| e.slot), model.remove(&block)),
                    _ => proptest::prop_assert_eq!(shard.get(&block).map(|e| e.slot), model.get(&block).copied()),
                }
                let mut seen = 0;
                shard.all_blocks(&block.object, |i, e| {
                    seen += 1;
                    model.get(&BlockId { object: block.object, index: i }) == Some(&e.slot)
                });
                proptest::prop_assert_eq!(seen, model.keys().filter(|b| b.object == block.object).count());
                for range in [0..index, index..index + 1, index..u32::MAX] {
                    let mut seen = 0;
                    shard.blocks_within(&block.object, range.clone(), |i, e| {
                        seen += 1;
                        range.contains(&i) && model.get(&BlockId { object: block.object, index: i }) == Some(&e.slot)
                    });
                    let there = model.keys().filter(|b| b.object == block.object && range.contains(&b.index));
                    proptest::prop_assert_eq!(seen, there.count());
                }
            }
            proptest::prop_assert_eq!(shard.objects.is_empty(), model.is_empty());
        }
    }

    #[test]
    fn a_block_removed_while_it_is_written_is_passed_on_by_its_writer() {
        let (mut shard, block) = (IndexShard::default(), BlockId { object: ObjectId(1), index: 0 });
        assert!(!shard.enter(block, entry(0)) && shard.begin_removal(&block).is_none(), "nothing was claimed");
        assert!(shard.begin_write(&block) && !shard.begin_write(&block));
        assert!(shard.enter(block, entry(0)) && shard.state(&block) == BlockState::Logging);
        shard.verified(&block);
        assert_eq!(shard.state(&block), BlockState::Logging, "its record is not in the log yet");
        assert_eq!(shard.begin_removal(&block), Some(0));
        assert!(shard.begin_removal(&block).is_none() && shard.remove(&block).is_none());
        assert!(!shard.get(&block).unwrap().leaves_disk(0));
        assert!(shard.end_write(&block) && shard.get(&block).unwrap().leaves_disk(0));
        assert!(!shard.end_write(&block) && !shard.begin_write(&block));
        assert!(shard.remove(&block).is_some() && shard.state(&block) == BlockState::Absent);
        assert_eq!(shard.activity(&block.object).writers, 0);
        // One that was written and logged, and one whose write failed.
        assert!(shard.begin_write(&block) && shard.enter(block, entry(1)) && !shard.end_write(&block));
        shard.verified(&block);
        assert_eq!(shard.state(&block), BlockState::Verified);
        assert!(shard.begin_removal(&block).is_some() && shard.remove(&block).is_some());
        assert!(shard.begin_write(&block) && !shard.end_write(&block));
        assert_eq!((shard.state(&block), shard.active.len()), (BlockState::Absent, 0));
    }

    #[test]
    fn block_maps() {
        let mut map = BlockMap::new(70);
        map.set(69);
        map.set(70);
        assert!(map.contains(69) && !map.contains(70) && !map.contains(3));
        assert_eq!((map.count(), map.blocks()), (1, 70));
    }
}
