//! Which blocks there are and where: the in-memory index. Knows no files, no disks' state and no policy; an
//! entry names a disk and a slot by number.
//!
//! An object with one block (most files of most datasets) takes one entry of a hash map and nothing else.

use parking_lot::RwLock;
use spurline_types::{BlockId, ObjectId};
use std::collections::HashSet;
use std::collections::hash_map::{Entry as Slot, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;

/// Parts of the index, each under a lock of its own.
pub const PARTS: usize = 64;

/// The block lies in the object's one file (else in its extent's).
pub const WHOLE: u8 = crate::log::WHOLE;
/// The block's place in the eviction policy is the main queue (as last written to the log).
pub const MAIN: u8 = crate::log::MAIN;
/// Every granule of the block was read and found right since the store opened.
pub const VERIFIED: u8 = 4;
/// The block is on its way out: readers miss it, writers leave it alone.
pub const LEAVING: u8 = 8;

/// Where a block is and what its bytes must be.
#[derive(Debug)]
pub struct Entry {
    /// CRC32C of every granule.
    pub crcs: Box<[u32]>,
    /// The slot of the disk's eviction policy.
    pub slot: u32,
    /// Length in bytes.
    pub len: u32,
    /// Tells this entry from an earlier one of the same block.
    pub generation: u16,
    /// The disk's number.
    pub disk: u8,
    /// [`WHOLE`], [`MAIN`], [`VERIFIED`], [`LEAVING`].
    pub flags: u8,
}

enum Blocks {
    One(u32, Entry),
    Many(HashMap<u32, Entry, IdHash>),
}

/// What is going on with an object just now; objects at rest have none.
#[derive(Debug, Default, Clone, Copy)]
pub struct Activity {
    /// Blocks being written.
    pub writers: u32,
    /// Handles that hold a file of the object.
    pub pins: u32,
    /// Those of them that have the whole file read past us: nobody may write to it.
    pub whole: u32,
    /// Files being removed.
    pub unlinking: u32,
}

/// Object names are hashes already.
#[derive(Default)]
pub struct IdHasher(u64);

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
        self.0 = (self.0.rotate_left(29) ^ n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
    fn write_u128(&mut self, n: u128) {
        self.write_u64(n as u64);
    }
}

/// A hasher for keys that hold an [`ObjectId`].
pub type IdHash = BuildHasherDefault<IdHasher>;

/// A part of the index under one lock.
#[derive(Default)]
pub struct Shard {
    objects: HashMap<ObjectId, Blocks, IdHash>,
    active: HashMap<ObjectId, Activity, IdHash>,
    writing: HashSet<BlockId, IdHash>,
}

impl Entry {
    /// Whether the block is on its way off this disk.
    pub fn leaves(&self, disk: u8) -> bool {
        self.flags & LEAVING != 0 && self.disk == disk
    }
}

/// All blocks of all disks.
pub struct Index {
    shards: Box<[RwLock<Shard>]>,
}

impl Default for Index {
    fn default() -> Self {
        Index { shards: (0..PARTS).map(|_| RwLock::default()).collect() }
    }
}

impl Index {
    /// The part that holds an object. The policy's lock may be held while taking it, never the reverse.
    pub fn shard(&self, object: &ObjectId) -> &RwLock<Shard> {
        &self.shards[(object.0 >> 122) as usize % PARTS]
    }

    /// Calls `f` with every block, part by part; blocks that come or go meanwhile may be missed.
    pub fn for_each(&self, mut f: impl FnMut(BlockId, &Entry)) {
        (0..PARTS).for_each(|part| self.for_each_of(part, &mut f));
    }

    /// Calls `f` with every block of one of the [`PARTS`], which is held meanwhile.
    pub fn for_each_of(&self, part: usize, mut f: impl FnMut(BlockId, &Entry)) {
        for (object, blocks) in &self.shards[part].read().objects {
            match blocks {
                Blocks::One(index, entry) => f(BlockId { object: *object, index: *index }, entry),
                Blocks::Many(map) => {
                    map.iter().for_each(|(i, e)| f(BlockId { object: *object, index: *i }, e));
                }
            }
        }
    }
}

impl Shard {
    /// The entry of a block, also of one that is leaving.
    pub fn get(&self, block: &BlockId) -> Option<&Entry> {
        match self.objects.get(&block.object)? {
            Blocks::One(index, entry) => (*index == block.index).then_some(entry),
            Blocks::Many(map) => map.get(&block.index),
        }
    }

    /// As [`Shard::get`], to change.
    pub fn get_mut(&mut self, block: &BlockId) -> Option<&mut Entry> {
        match self.objects.get_mut(&block.object)? {
            Blocks::One(index, entry) => (*index == block.index).then_some(entry),
            Blocks::Many(map) => map.get_mut(&block.index),
        }
    }

    /// Adds a block, or replaces its entry and gives back the old one.
    pub fn insert(&mut self, block: BlockId, entry: Entry) -> Option<Entry> {
        match self.objects.entry(block.object) {
            Slot::Vacant(vacant) => {
                vacant.insert(Blocks::One(block.index, entry));
                None
            }
            Slot::Occupied(mut occupied) => match occupied.get_mut() {
                Blocks::One(index, old) if *index == block.index => Some(std::mem::replace(old, entry)),
                Blocks::Many(map) => map.insert(block.index, entry),
                Blocks::One(..) => {
                    let first = occupied.insert(Blocks::Many(HashMap::default()));
                    if let (Blocks::One(i, e), Blocks::Many(map)) = (first, occupied.get_mut()) {
                        map.extend([(i, e), (block.index, entry)]);
                    }
                    None
                }
            },
        }
    }

    /// Takes a block out.
    pub fn remove(&mut self, block: &BlockId) -> Option<Entry> {
        let Slot::Occupied(mut occupied) = self.objects.entry(block.object) else { return None };
        match occupied.get_mut() {
            Blocks::One(index, _) if *index != block.index => None,
            Blocks::One(..) => match occupied.remove() {
                Blocks::One(_, entry) => Some(entry),
                Blocks::Many(_) => None,
            },
            Blocks::Many(map) => {
                let entry = map.remove(&block.index);
                if map.is_empty() {
                    occupied.remove();
                }
                entry
            }
        }
    }

    /// Calls `f` with every block of an object until it answers false; whether it never did.
    pub fn all(&self, object: &ObjectId, mut f: impl FnMut(u32, &Entry) -> bool) -> bool {
        match self.objects.get(object) {
            None => true,
            Some(Blocks::One(index, entry)) => f(*index, entry),
            Some(Blocks::Many(map)) => map.iter().all(|(i, e)| f(*i, e)),
        }
    }

    /// As [`Shard::all`] with those in a range, of whom it looks at no more than the range is long.
    pub fn within(&self, object: &ObjectId, range: Range<u32>, mut f: impl FnMut(u32, &Entry) -> bool) -> bool {
        match self.objects.get(object) {
            Some(Blocks::Many(map)) if range.len() < map.len() => {
                range.filter_map(|i| Some((i, map.get(&i)?))).all(|(i, e)| f(i, e))
            }
            _ => self.all(object, |i, e| !range.contains(&i) || f(i, e)),
        }
    }

    /// What goes on with an object.
    pub fn activity(&self, object: &ObjectId) -> Activity {
        self.active.get(object).copied().unwrap_or_default()
    }

    /// Changes what goes on with an object.
    pub fn act(&mut self, object: &ObjectId, f: impl FnOnce(&mut Activity)) {
        let activity = self.active.entry(*object).or_default();
        f(activity);
        if activity.writers == 0 && activity.pins == 0 && activity.unlinking == 0 {
            self.active.remove(object);
        }
    }

    /// Notes that a block is being written; false when it is already.
    pub fn begin_write(&mut self, block: &BlockId) -> bool {
        let new = self.writing.insert(*block);
        if new {
            self.act(&block.object, |a| a.writers += 1);
        }
        new
    }

    /// Whether a block is being written.
    pub fn is_written(&self, block: &BlockId) -> bool {
        self.writing.contains(block)
    }

    /// Ends what [`Shard::begin_write`] began.
    pub fn end_write(&mut self, block: &BlockId) {
        if self.writing.remove(block) {
            self.act(&block.object, |a| a.writers = a.writers.saturating_sub(1));
        }
    }
}

/// Which blocks of an object are there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockMap {
    words: Vec<u64>,
    blocks: u32,
}

impl BlockMap {
    /// No block of `blocks`.
    pub fn new(blocks: u32) -> Self {
        BlockMap { words: vec![0; (blocks as usize).div_ceil(64)], blocks }
    }
    /// Notes that block `index` is there.
    pub fn set(&mut self, index: u32) {
        if let Some(word) = self.words.get_mut(index as usize / 64).filter(|_| index < self.blocks) {
            *word |= 1 << (index % 64);
        }
    }
    /// Whether block `index` is there.
    pub fn contains(&self, index: u32) -> bool {
        self.words.get(index as usize / 64).is_some_and(|w| w >> (index % 64) & 1 == 1)
    }
    /// How many are there.
    pub fn count(&self) -> u32 {
        self.words.iter().map(|w| w.count_ones()).sum()
    }
    /// How many the object has.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(slot: u32) -> Entry {
        Entry { crcs: Box::new([slot]), slot, len: 1, generation: 0, disk: 0, flags: 0 }
    }

    #[test]
    fn entries_are_as_small_as_claimed() {
        assert_eq!(std::mem::size_of::<Entry>(), 32);
        assert!(std::mem::size_of::<(ObjectId, Blocks)>() <= 64);
    }

    proptest::proptest! {
        #[test]
        fn behaves_as_a_map(ops in proptest::collection::vec((0u8..3, 0u128..3, 0u32..4), 1..200)) {
            let mut shard = Shard::default();
            let mut model: HashMap<BlockId, u32> = HashMap::new();
            for (n, (op, object, index)) in ops.into_iter().enumerate() {
                let block = BlockId { object: ObjectId(object), index };
                let n = n as u32;
                match op {
                    0 => proptest::prop_assert_eq!(
                        shard.insert(block, entry(n)).map(|e| e.slot), model.insert(block, n)),
                    1 => proptest::prop_assert_eq!(shard.remove(&block).map(|e| e.slot), model.remove(&block)),
                    _ => proptest::prop_assert_eq!(shard.get(&block).map(|e| e.slot), model.get(&block).copied()),
                }
                let mut seen = 0;
                shard.all(&block.object, |i, e| {
                    seen += 1;
                    model.get(&BlockId { object: block.object, index: i }) == Some(&e.slot)
                });
                proptest::prop_assert_eq!(seen, model.keys().filter(|b| b.object == block.object).count());
                for range in [0..index, index..index + 1, index..u32::MAX] {
                    let mut seen = 0;
                    shard.within(&block.object, range.clone(), |i, e| {
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
    fn block_maps() {
        let mut map = BlockMap::new(70);
        map.set(69);
        map.set(70);
        assert!(map.contains(69) && !map.contains(70) && !map.contains(3));
        assert_eq!((map.count(), map.blocks()), (1, 70));
    }
}
