//! Runs of blocks that nodes said are hot: this reader chooses among more nodes for them, the more the longer they stay
//! hot, and among fewer again when nobody says so any more. A table of fixed size; it knows neither nodes nor reads.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Runs remembered at one time.
const SLOTS: usize = 512;
/// Twice as many nodes once in this time at most: as long as a node needs to see what the last time brought.
const RISES: Duration = Duration::from_secs(1);
/// Half as many nodes after this time without a word.
const COOLS: Duration = Duration::from_secs(4);
/// Eight nodes: as many as a look for holders finds.
const MOST: u64 = 3;

#[derive(Default)]
struct Slot {
    key: AtomicU64,
    /// The level, and in the upper bits when it was last said that it is hot, in milliseconds.
    state: AtomicU64,
}

/// What is hot.
pub(crate) struct Spread {
    slots: Box<[Slot]>,
    any: AtomicBool,
    born: Instant,
}

impl Spread {
    pub fn new() -> Spread {
        Spread {
            slots: (0..SLOTS).map(|_| Slot::default()).collect(),
            any: AtomicBool::new(false),
            born: Instant::now(),
        }
    }

    /// How many nodes to choose among for the run of this key, where `copies` hold it in any case.
    pub fn copies(&self, key: u64, copies: u32) -> u32 {
        if !self.any.load(Ordering::Relaxed) {
            return copies;
        }
        let slot = &self.slots[key as usize % SLOTS];
        if slot.key.load(Ordering::Relaxed) != key {
            return copies;
        }
        copies.max(1 << self.level(slot, self.now()))
    }

    fn now(&self) -> u64 {
        self.born.elapsed().as_millis() as u64
    }

    /// What is left of a slot's level at `now`.
    fn level(&self, slot: &Slot, now: u64) -> u64 {
        let state = slot.state.load(Ordering::Relaxed);
        let cooled = now.saturating_sub(state >> 8) / COOLS.as_millis() as u64;
        (state & 0xff).saturating_sub(cooled)
    }

    /// A node said that the run of this key is hot.
    pub fn hot(&self, key: u64) {
        self.hot_at(key, self.now());
    }

    fn hot_at(&self, key: u64, now: u64) {
        let slot = &self.slots[key as usize % SLOTS];
        let (level, since) = (self.level(slot, now), slot.state.load(Ordering::Relaxed) >> 8);
        if slot.key.load(Ordering::Relaxed) != key {
            // What is hot stays; of two for one place the first.
            if level == 0 {
                // Two threads at once leave one of both: the other run is heard of again.
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
    fn a_run_has_more_nodes_while_it_is_hot_and_fewer_when_it_cools() {
        let spread = Spread::new();
        let at = |key: u64, now| {
            let slot = &spread.slots[key as usize % SLOTS];
            if slot.key.load(Ordering::Relaxed) == key { 1 << spread.level(slot, now) } else { 1 }
        };
        assert_eq!(spread.copies(5, 2), 2);
        spread.hot_at(5, 1000);
        (0..50).for_each(|_| spread.hot_at(5, 1500));
        assert_eq!((at(5, 1500), at(6, 1500)), (2, 1), "many words at once are one");
        spread.hot_at(5, 2000);
        spread.hot_at(5, 3000);
        spread.hot_at(5, 4000);
        assert_eq!(at(5, 4000), 8, "and no more");
        // Another run of the same place has to wait.
        spread.hot_at(5 + SLOTS as u64, 4000);
        assert_eq!((at(5, 4000), at(5 + SLOTS as u64, 4000)), (8, 1));
        assert_eq!((at(5, 8000), at(5, 12_000), at(5, 16_000)), (4, 2, 1));
        spread.hot_at(5 + SLOTS as u64, 17_000);
        assert_eq!((at(5, 17_000), at(5 + SLOTS as u64, 17_000)), (1, 2));
    }
}
