//! Detects blocks that many readers request at once. A lock-free table of fixed size; counts restart with each time
//! window. Does not know the reaction to a hot block.

use spurline_types::BlockId;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const SLOTS: usize = 1 << 12;

/// Definition of a hot block.
#[derive(Debug, Clone, Copy)]
pub struct HotRule {
    /// Length of a counting window.
    pub window: Duration,
    /// Minimum requested bytes, as a multiple of the block's length.
    pub times: u64,
    /// Minimum share of all requested bytes: one in this many.
    pub share: u64,
    /// Minimum number of readers.
    pub readers: u32,
    /// A copy of another node's hot block is dropped after this many windows without a request.
    pub cools: u64,
}

impl Default for HotRule {
    fn default() -> Self {
        HotRule { window: Duration::from_secs(1), times: 16, share: 8, readers: 4, cools: 30 }
    }
}

#[derive(Default)]
struct HotSlot {
    /// Hash of the block; 0 for none.
    name: AtomicU64,
    /// Window of the counts.
    window: AtomicU64,
    bytes: AtomicU64,
    /// One bit per reader, by hash.
    readers: AtomicU64,
    /// Last window in which it was hot.
    hot: AtomicU64,
}

/// Table of recently requested blocks.
pub(crate) struct HotBlocks {
    rule: HotRule,
    born: Instant,
    slots: Box<[HotSlot]>,
    window: AtomicU64,
    bytes: AtomicU64,
}

/// Effect of one read.
pub(crate) struct ReadHeat {
    /// The block is hot.
    pub hot: bool,
    /// It is the first read of a window.
    pub begins: bool,
}

fn slot_name(id: &BlockId) -> u64 {
    let folded = id.object.0 as u64 ^ (id.object.0 >> 64) as u64 ^ u64::from(id.index).rotate_left(40);
    folded.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
}

fn reader_bit(reader: &str) -> u64 {
    let mixed = reader
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    1 << (mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58)
}

impl HotBlocks {
    pub fn new(rule: HotRule) -> HotBlocks {
        HotBlocks {
            rule,
            born: Instant::now(),
            slots: (0..SLOTS).map(|_| HotSlot::default()).collect(),
            window: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        }
    }

    /// The number of the current window, from 1.
    pub fn current_window(&self) -> u64 {
        (self.born.elapsed().as_micros() / self.rule.window.as_micros().max(1)) as u64 + 1
    }

    fn slot_of(&self, name: u64) -> &HotSlot {
        &self.slots[(name >> 52) as usize % SLOTS]
    }

    /// Records that `reader` requested `bytes` of a block of `len` bytes in window `now`.
    pub fn note_read(&self, id: &BlockId, len: u64, bytes: u64, reader: &str, now: u64) -> ReadHeat {
        let begins = self.window.load(Ordering::Relaxed) != now && self.window.swap(now, Ordering::Relaxed) != now;
        if begins {
            self.bytes.store(0, Ordering::Relaxed);
        }
        let total = self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let name = slot_name(id);
        let slot = self.slot_of(name);
        // Two threads that reset a slot together may lose one read: the block is detected one read later.
        if slot.window.load(Ordering::Relaxed) != now {
            if slot.name.swap(name, Ordering::Relaxed) != name {
                slot.hot.store(0, Ordering::Relaxed);
            }
            slot.bytes.store(0, Ordering::Relaxed);
            slot.readers.store(0, Ordering::Relaxed);
            slot.window.store(now, Ordering::Relaxed);
        } else if slot.name.load(Ordering::Relaxed) != name {
            // Of two blocks in one slot, the first one is counted in this window.
            return ReadHeat { hot: false, begins };
        }
        let asked = slot.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let bit = reader_bit(reader);
        let readers = match slot.readers.load(Ordering::Relaxed) {
            known if known & bit != 0 => known,
            _ => slot.readers.fetch_or(bit, Ordering::Relaxed) | bit,
        };
        let rule = &self.rule;
        let hot = asked > rule.times * len && asked * rule.share > total && readers.count_ones() >= rule.readers;
        if hot {
            slot.hot.store(now, Ordering::Relaxed);
        }
        ReadHeat { hot, begins }
    }

    /// Whether a block was hot in window `now` or in the one before.
    pub fn is_hot(&self, id: &BlockId, now: u64) -> bool {
        let name = slot_name(id);
        let slot = self.slot_of(name);
        let last = slot.hot.load(Ordering::Relaxed);
        slot.name.load(Ordering::Relaxed) == name && last > 0 && last + 1 >= now
    }

    /// Whether a block had no request in the last windows, as far as the table knows.
    pub fn is_cool(&self, id: &BlockId, now: u64) -> bool {
        let name = slot_name(id);
        let slot = self.slot_of(name);
        slot.name.load(Ordering::Relaxed) != name || slot.window.load(Ordering::Relaxed) + self.rule.cools < now
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_types::ObjectId;

    const RULE: HotRule = HotRule { window: Duration::from_secs(1), times: 4, share: 8, readers: 3, cools: 10 };

    fn block(index: u32) -> BlockId {
        BlockId { object: ObjectId(77), index }
    }

    #[test]
    fn what_many_readers_ask_for_again_and_again_is_hot() {
        let hot = HotBlocks::new(RULE);
        let ask = |index, reader: &str, now| hot.note_read(&block(index), 100, 100, reader, now).hot;
        assert!((0..20).all(|_| !ask(1, "a", 1)), "one reader alone is not many");
        assert!((0..20).all(|n| !ask(2, ["a", "b"][n % 2], 1)));
        let found: Vec<bool> = (0..6).map(|n| ask(3, ["a", "b", "c"][n % 3], 2)).collect();
        assert_eq!(found, [false, false, false, false, true, true]);
        assert!(hot.is_hot(&block(3), 2) && hot.is_hot(&block(3), 3) && !hot.is_hot(&block(3), 4));
        assert!(!ask(3, "a", 3), "counted anew");
        assert!(!hot.is_cool(&block(3), 13) && hot.is_cool(&block(3), 14) && hot.is_cool(&block(9), 3));
    }

    #[test]
    fn what_is_asked_for_as_often_as_all_else_is_not() {
        let hot = HotBlocks::new(RULE);
        // Each of many blocks goes to many readers.
        for round in 0..50 {
            for index in 0..40 {
                let seen = hot.note_read(&block(index), 100, 100, ["a", "b", "c", "d"][round % 4], 1);
                assert!(!seen.hot || round < 10, "block {index} in round {round}");
                assert_eq!(seen.begins, round == 0 && index == 0);
            }
        }
    }
}
