//! The index out of the disks' logs at the start, which are read side by side. A block may stand in two of them: one
//! disk took it while the other was not in use. It knows records and the index; it opens no file.

use crate::classes::Classes;
use crate::disk::footprint;
use crate::index::{Entry, IdHash, Index, MAIN, WHOLE};
use crate::log::Record;
use crate::policy::S3Fifo;
use spurline_types::BlockId;
use std::collections::HashMap;

/// Blocks of one disk that another disk's log brought first, each with its class and when it came. The other log may still
/// take them back.
pub type Second = HashMap<BlockId, (Entry, Option<(u16, u32)>), IdHash>;

/// What the log of one disk says, record by record.
pub struct Restore<'a> {
    number: u8,
    block_size: u32,
    index: &'a Index,
    classes: &'a Classes,
    /// The disk's eviction policy.
    pub policy: S3Fifo<BlockId>,
    /// Bytes of the disk's blocks in the index.
    pub used: u64,
    /// How many these are.
    pub blocks: u64,
    /// Those that are in the index with another disk.
    pub second: Second,
}

impl<'a> Restore<'a> {
    /// A disk of which nothing was read yet.
    pub fn new(number: u8, block_size: u32, index: &'a Index, classes: &'a Classes) -> Self {
        let (policy, second) = (S3Fifo::default(), Second::default());
        Restore { number, block_size, index, classes, policy, used: 0, blocks: 0, second }
    }

    /// Takes the next record.
    pub fn take(&mut self, record: Record<'_>) {
        match record {
            Record::Put { len, .. } if len > self.block_size => {}
            Record::Put { block, len, flags, crcs } => {
                let (crcs, flags) = (crcs.to_boxed(), flags & (WHOLE | MAIN));
                let mut entry = Entry { crcs, slot: 0, len, generation: 0, disk: self.number, flags };
                let mut shard = self.index.shard(&block.object).write();
                match shard.get_mut(&block) {
                    // Written twice: the later record holds.
                    Some(old) if old.disk == self.number => {
                        self.used = self.used - footprint(old.len) + footprint(len);
                        entry.slot = old.slot;
                        *old = entry;
                        self.classes.gone(&block);
                    }
                    // Which of the two holds is known when both logs have been read to their ends.
                    Some(_) => {
                        self.second.insert(block, (entry, None));
                    }
                    None => {
                        self.second.remove(&block);
                        // More blocks than a disk can have: its file is an orphan.
                        let Some(slot) = self.policy.restore(block, footprint(len) as u32, flags & MAIN != 0) else {
                            return;
                        };
                        entry.slot = slot;
                        shard.insert(block, entry);
                        self.used += footprint(len);
                        self.blocks += 1;
                    }
                }
            }
            Record::Remove(block) => {
                self.second.remove(&block);
                let mut shard = self.index.shard(&block.object).write();
                if shard.get(&block).is_some_and(|e| e.disk == self.number)
                    && let Some(entry) = shard.remove(&block)
                {
                    self.classes.gone(&block);
                    self.policy.remove(entry.slot);
                    self.used -= footprint(entry.len);
                    self.blocks -= 1;
                }
            }
            Record::Class { block, class, came } => {
                let shard = self.index.shard(&block.object).read();
                if let Some(entry) = shard.get(&block).filter(|e| e.disk == self.number) {
                    self.classes.restore(block, class, came, footprint(entry.len), self.number);
                } else if let Some((_, of)) = self.second.get_mut(&block) {
                    *of = Some((class, came));
                }
            }
            Record::Promote(block) => {
                let mut shard = self.index.shard(&block.object).write();
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

/// Once all logs are read: a block that one log took back is on the disk that has it second, where `place` finds it a
/// slot, and of the class that it has there. One that two disks hold still, because a crash came before the first forgot it, stays with the one read first,
/// and the other is to `forget` it, as is a disk with no place for it.
pub fn settle(
    (index, classes): (&Index, &Classes),
    second: Second,
    place: impl Fn(&BlockId, &Entry) -> Option<u32>,
    forget: impl Fn(BlockId, u8),
) {
    for (block, (mut entry, class)) in second {
        let mut shard = index.shard(&block.object).write();
        if shard.get(&block).is_some() {
            forget(block, entry.flags & WHOLE);
        } else if let Some(slot) = place(&block, &entry) {
            entry.slot = slot;
            if let Some((class, came)) = class {
                classes.restore(block, class, came, footprint(entry.len), entry.disk);
            }
            shard.insert(block, entry);
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
    type There = BTreeMap<u8, (u32, Option<u16>)>;

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
                        *class = Some(1 + n as u16);
                        log::push_class(&mut out, &block, 1 + n as u16, 5);
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
        /// However the two logs are read side by side, what either disk holds in the end is found, once, and of its class.
        #[test]
        fn no_order_of_reading_loses_a_block(
            a in steps(),
            b in steps(),
            turns in proptest::collection::vec(proptest::bool::ANY, 24),
        ) {
            let index = Index::default();
            let classes = Classes::new(std::sync::Arc::default());
            let mut disks = [0, 1].map(|number| Restore::new(number, 4096, &index, &classes));
            let (logs, there): (Vec<_>, Vec<_>) = [written(&a), written(&b)].into_iter().unzip();
            let mut logs: Vec<_> = logs.iter().map(|log| log.iter()).collect();
            for turn in turns.into_iter().chain([false; 12]).chain([true; 12]) {
                let turn = usize::from(turn);
                if let Some(bytes) = logs[turn].next() {
                    log::replay(bytes, |record| disks[turn].take(record));
                }
            }
            let counted = disks.each_ref().map(|disk| disk.blocks);
            let mut placed = [0; 2];
            let forgotten = RefCell::new([0; 2]);
            for (n, disk) in disks.into_iter().enumerate() {
                let held = Cell::new(0);
                let place = |block: &BlockId, entry: &Entry| {
                    held.set(held.get() + 1);
                    disk.policy.restore(*block, footprint(entry.len) as u32, false)
                };
                settle((&index, &classes), disk.second, place, |_, _| forgotten.borrow_mut()[n] += 1);
                placed[n] = held.get();
            }
            let mut found = [BTreeMap::new(), BTreeMap::new()];
            index.for_each(|block, e| {
                let class = classes.of(&block).map(|(class, _)| class);
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
