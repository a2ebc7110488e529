//! Rebuilds the index from the disks' logs at start, which are read concurrently. A block may be in two logs: a disk took the
//! block while the other was not usable. Knows records and the index; opens no file.

use crate::classes::ClassTable;
use crate::disk::disk_footprint;
use crate::index::{BlockEntry, BlockIndex, HOLE, MAIN, WHOLE};
use crate::log::LogRecord;
use crate::policy::S3Fifo;
use spurline_types::BlockId;
use spurline_types::id_hash::BuildObjectHasher;
use std::collections::HashMap;

/// Blocks of a disk that another disk's log named first, each with class and time of arrival. The other log may still remove such
/// blocks.
pub type DuplicateBlocks = HashMap<BlockId, (BlockEntry, Option<(u64, u32)>), BuildObjectHasher>;

/// Applies the log of a disk to the index, record by record.
pub struct LogRestore<'a> {
    number: u8,
    block_size: u32,
    index: &'a BlockIndex,
    classes: &'a ClassTable,
    /// The disk's eviction policy.
    pub policy: S3Fifo<BlockId>,
    /// Bytes of the disk's blocks in the index.
    pub used: u64,
    /// Number of these blocks.
    pub blocks: u64,
    /// Blocks that are in the index for another disk.
    pub second: DuplicateBlocks,
}

impl<'a> LogRestore<'a> {
    /// The initial state of a disk's restore.
    pub fn new(number: u8, block_size: u32, index: &'a BlockIndex, classes: &'a ClassTable) -> Self {
        let policy = S3Fifo::default();
        let second = DuplicateBlocks::default();
        LogRestore { number, block_size, index, classes, policy, used: 0, blocks: 0, second }
    }

    /// Applies the next record.
    pub fn apply_record(&mut self, record: LogRecord<'_>) {
        match record {
            LogRecord::Put { len, .. } if len > self.block_size => {}
            LogRecord::Put { block, len, flags, crcs } => {
                let crcs = crcs.to_boxed();
                let flags = flags & (WHOLE | MAIN | HOLE);
                let mut entry = BlockEntry::new(crcs, len, flags, self.number, 0, 0);
                let mut shard = self.index.shard_of(&block.object).write();
                match shard.get(&block) {
                    // Written twice: the later record holds.
                    Some(old) if old.disk == self.number => {
                        self.used = self.used - disk_footprint(old.len, old.flags) + disk_footprint(len, flags);
                        entry.slot = old.slot;
                        shard.restore(block, entry);
                        self.classes.forget_block(&block);
                    }
                    // Which of the two holds is known only when both logs have been read to the end.
                    Some(_) => {
                        self.second.insert(block, (entry, None));
                    }
                    None => {
                        self.second.remove(&block);
                        // More blocks than a disk can have: the file is an orphan.
                        let Some(slot) =
                            self.policy.restore(block, disk_footprint(len, flags) as u32, flags & MAIN != 0)
                        else {
                            return;
                        };
                        entry.slot = slot;
                        shard.restore(block, entry);
                        self.used += disk_footprint(len, flags);
                        self.blocks += 1;
                    }
                }
            }
            LogRecord::Remove(block) => {
                self.second.remove(&block);
                let mut shard = self.index.shard_of(&block.object).write();
                if shard.get(&block).is_some_and(|e| e.disk == self.number)
                    && let Some(entry) = shard.remove(&block)
                {
                    self.classes.forget_block(&block);
                    self.policy.remove(entry.slot);
                    self.used -= disk_footprint(entry.len, entry.flags);
                    self.blocks -= 1;
                }
            }
            LogRecord::Class { block, class, came } => {
                let shard = self.index.shard_of(&block.object).read();
                if let Some(entry) = shard.get(&block).filter(|e| e.disk == self.number) {
                    self.classes.restore_block(block, class, came, disk_footprint(entry.len, entry.flags), self.number);
                } else if let Some((_, of)) = self.second.get_mut(&block) {
                    *of = Some((class, came));
                }
            }
            LogRecord::Promote(block) => {
                let mut shard = self.index.shard_of(&block.object).write();
                if let Some(entry) = shard.get_mut(&block).filter(|e| e.disk == self.number) {
                    entry.flags |= MAIN;
                    self.policy.promote(entry.slot);
                } else if let Some((entry, _)) = self.second.get_mut(&block) {
                    entry.flags |= MAIN;
                }
            }
        }
    }
}

/// Resolves duplicates once all logs are read. A block that a log removed is on the disk of the other log, in the slot that
/// `place` returns, with the class there. A block on two disks (a crash came before the first disk forgot the block) stays with
/// the log that was read first; the other disk must `forget` the block. So must a disk without a slot.
pub fn settle_duplicates(
    index: &BlockIndex,
    classes: &ClassTable,
    second: DuplicateBlocks,
    place: impl Fn(&BlockId, &BlockEntry) -> Option<u32>,
    forget: impl Fn(BlockId, u8),
) {
    for (block, (mut entry, class)) in second {
        let mut shard = index.shard_of(&block.object).write();
        if shard.get(&block).is_some() {
            forget(block, entry.flags & WHOLE);
        } else if let Some(slot) = place(&block, &entry) {
            entry.slot = slot;
            if let Some((class, came)) = class {
                classes.restore_block(block, class, came, disk_footprint(entry.len, entry.flags), entry.disk);
            }
            shard.restore(block, entry);
        } else {
            forget(block, entry.flags & WHOLE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log;
    use spurline_types::ObjectId;
    use std::cell::{Cell, RefCell};
    use std::collections::BTreeMap;

    #[derive(Debug, Clone, Copy)]
    enum Step {
        Put,
        Class,
        Remove,
    }

    fn steps() -> impl proptest::strategy::Strategy<Value = Vec<(Step, u8)>> {
        let step = proptest::sample::select(&[Step::Put, Step::Class, Step::Remove][..]);
        proptest::collection::vec((step, 0u8..4), 0..12)
    }

    /// Blocks of a disk by name, with their length and class.
    type There = BTreeMap<u8, (u32, Option<u64>)>;

    /// What one log says, and which blocks are on its disk in the end.
    fn written(steps: &[(Step, u8)]) -> (Vec<Vec<u8>>, There) {
        let mut there = BTreeMap::new();
        let record = |(n, (step, name)): (usize, &(Step, u8))| {
            let block = BlockId { object: ObjectId(u128::from(*name)), index: 0 };
            let mut out = Vec::new();
            let len = 1 + n as u32;
            match step {
                Step::Put => {
                    there.insert(*name, (len, None));
                    log::push_put(&mut out, &block, len, WHOLE, &[7]);
                }
                Step::Class => {
                    if let Some((_, class)) = there.get_mut(name) {
                        *class = Some(1 + n as u64);
                        log::push_class(&mut out, &block, 1 + n as u64, 5);
                    }
                }
                Step::Remove => {
                    there.remove(name);
                    log::push_remove(&mut out, &block);
                }
            }
            out
        };
        (steps.iter().enumerate().map(record).collect(), there)
    }

    proptest::proptest! {
        /// However the two logs are read side by side, each block that either disk holds in the end is found, once, and of the right class.
        #[test]
        fn no_order_of_reading_loses_a_block(
            a in steps(),
            b in steps(),
            turns in proptest::collection::vec(proptest::bool::ANY, 24),
        ) {
            let index = BlockIndex::default();
            let classes = ClassTable::new(std::sync::Arc::default());
            let mut disks = [0, 1].map(|number| LogRestore::new(number, 4096, &index, &classes));
            let (logs, there): (Vec<_>, Vec<_>) = [written(&a), written(&b)].into_iter().unzip();
            let mut logs: Vec<_> = logs.iter().map(|log| log.iter()).collect();
            for turn in turns.into_iter().chain([false; 12]).chain([true; 12]) {
                let turn = usize::from(turn);
                if let Some(bytes) = logs[turn].next() {
                    log::replay_records(bytes, |record| disks[turn].apply_record(record));
                }
            }
            let counted = disks.each_ref().map(|disk| disk.blocks);
            let mut placed = [0; 2];
            let forgotten = RefCell::new([0; 2]);
            for (n, disk) in disks.into_iter().enumerate() {
                let held = Cell::new(0);
                let place = |block: &BlockId, entry: &BlockEntry| {
                    held.set(held.get() + 1);
                    disk.policy.restore(*block, disk_footprint(entry.len, entry.flags) as u32, false)
                };
                settle_duplicates(&index, &classes, disk.second, place, |_, _| forgotten.borrow_mut()[n] += 1);
                placed[n] = held.get();
            }
            let mut found = [BTreeMap::new(), BTreeMap::new()];
            index.for_each(|block, e| {
                let class = classes.class_of(&block).map(|(class, _)| class);
                found[usize::from(e.disk)].insert(block.object.0 as u8, (e.len, class));
            });
            for name in 0..4u8 {
                let holds = [0, 1].map(|n| there[n].get(&name));
                let has = [0, 1].map(|n| found[n].get(&name));
                let right = match has {
                    [Some(block), None] => holds[0] == Some(block),
                    [None, Some(block)] => holds[1] == Some(block),
                    [None, None] => holds == [None, None],
                    _ => false,
                };
                proptest::prop_assert!(right, "block {name}: the disks hold {holds:?}, found is {has:?}");
            }
            for n in 0..2 {
                proptest::prop_assert_eq!(found[n].len() as u64, counted[n] + placed[n]);
                proptest::prop_assert_eq!(found[n].len() + forgotten.borrow()[n], there[n].len());
            }
        }
    }
}
