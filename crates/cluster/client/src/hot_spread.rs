//! Table of blocks that nodes reported as hot. A reader chooses among more nodes for them, twice as many each step
//! while reports continue, and among fewer when they stop. Fixed size; knows neither nodes nor reads.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Maximum blocks.
const SLOTS: usize = 512;
/// Minimum time between doublings: long enough for a node to see the effect of the last one.
const RISES: Duration = Duration::from_secs(1);
/// Time without a report after which the number of nodes halves.
const COOLS: Duration = Duration::from_secs(4);
/// 2^3 = 8 nodes: the number found by one lookup of holders.
const MOST: u64 = 3;

#[derive(Default)]
struct HotSpreadSlot {
    key: AtomicU64,
    /// Low 8 bits: level. Upper bits: time of the last report in milliseconds.
    state: AtomicU64,
}

/// The hot blocks.
pub(crate) struct HotSpread {
    slots: Box<[HotSpreadSlot]>,
    any: AtomicBool,
    born: Instant,
}

impl HotSpread {
    pub fn new() -> HotSpread {
        HotSpread {
            slots: (0..SLOTS).map(|_| HotSpreadSlot::default()).collect(),
            any: AtomicBool::new(false),
            born: Instant::now(),
        }
    }

    /// Number of nodes to choose among for the block `key`, at least `copies`.
    pub fn copies_for(&self, key: u64, copies: u32) -> u32 {
        if !self.any.load(Ordering::Relaxed) {
            return copies;
        }
        let slot = &self.slots[key as usize % SLOTS];
        if slot.key.load(Ordering::Relaxed) != key {
            return copies;
        }
        copies.max(1 << self.level_at(slot, self.now_ms()))
    }

    fn now_ms(&self) -> u64 {
        self.born.elapsed().as_millis() as u64
    }

    /// The level of a slot at `now`, after cooling.
    fn level_at(&self, slot: &HotSpreadSlot, now: u64) -> u64 {
        let state = slot.state.load(Ordering::Relaxed);
        let cooled = now.saturating_sub(state >> 8) / COOLS.as_millis() as u64;
        (state & 0xff).saturating_sub(cooled)
    }

    /// Records a report that the block `key` is hot.
    pub fn mark_hot(&self, key: u64) {
        self.mark_hot_at(key, self.now_ms());
    }

    fn mark_hot_at(&self, key: u64, now: u64) {
        let slot = &self.slots[key as usize % SLOTS];
        let level = self.level_at(slot, now);
        let since = slot.state.load(Ordering::Relaxed) >> 8;
        if slot.key.load(Ordering::Relaxed) != key {
            // A hot block keeps its slot against a colliding one.
            if level == 0 {
                // A race between two threads loses one block; its next report restores it.
                slot.state.store(now << 8 | 1, Ordering::Relaxed);
                slot.key.store(key, Ordering::Relaxed);
                self.any.store(true, Ordering::Relaxed);
            }
            return;
        }
        if level == 0 {
            slot.state.store(now << 8 | 1, Ordering::Relaxed);
        } else if now.saturating_sub(since) >= RISES.as_millis() as u64 {
            slot.state.store(now << 8 | (level + 1).min(MOST), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_has_more_nodes_while_it_is_hot_and_fewer_when_it_cools() {
        let spread = HotSpread::new();
        let at = |key: u64, now| {
            let slot = &spread.slots[key as usize % SLOTS];
            if slot.key.load(Ordering::Relaxed) == key { 1 << spread.level_at(slot, now) } else { 1 }
        };
        assert_eq!(spread.copies_for(5, 2), 2);
        spread.mark_hot_at(5, 1000);
        (0..50).for_each(|_| spread.mark_hot_at(5, 1500));
        assert_eq!((at(5, 1500), at(6, 1500)), (2, 1), "many words at once are one");
        spread.mark_hot_at(5, 2000);
        spread.mark_hot_at(5, 3000);
        spread.mark_hot_at(5, 4000);
        assert_eq!(at(5, 4000), 8, "and no more");
        // A colliding block must wait.
        spread.mark_hot_at(5 + SLOTS as u64, 4000);
        assert_eq!((at(5, 4000), at(5 + SLOTS as u64, 4000)), (8, 1));
        assert_eq!((at(5, 8000), at(5, 12_000), at(5, 16_000)), (4, 2, 1));
        spread.mark_hot_at(5 + SLOTS as u64, 17_000);
        assert_eq!((at(5, 17_000), at(5 + SLOTS as u64, 17_000)), (1, 2));
    }
}
