//! Which blocks many readers ask for at once. A table of fixed size whose counts begin anew with every window of time; it
//! takes no lock and does not know what is done about it.

use spurline_types::BlockId;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const SLOTS: usize = 1 << 12;

/// When a block is hot.
#[derive(Debug, Clone, Copy)]
pub struct HotRule {
    /// What is counted is what happens within this time.
    pub window: Duration,
    /// It was asked for more than so many times its length.
    pub times: u64,
    /// It is more than one in so many of all bytes asked for.
    pub share: u64,
    /// So many readers asked for it.
    pub readers: u32,
    /// A copy of another node's hot block is dropped when it was not asked for in so many windows.
    pub cools: u64,
}

impl Default for HotRule {
    fn default() -> Self {
        HotRule { window: Duration::from_secs(1), times: 16, share: 8, readers: 4, cools: 30 }
    }
}

#[derive(Default)]
struct Slot {
    /// The block; 0 is none.
    name: AtomicU64,
    /// The window that the counts are of.
    window: AtomicU64,
    bytes: AtomicU64,
    /// One bit for each reader, more or less.
    readers: AtomicU64,
    /// The last window it was hot in.
    hot: AtomicU64,
}

/// What is asked for now.
pub(crate) struct Hot {
    rule: HotRule,
    born: Instant,
    slots: Box<[Slot]>,
    window: AtomicU64,
    bytes: AtomicU64,
}

/// What one read changed.
pub(crate) struct Seen {
    /// The block is hot.
    pub hot: bool,
    /// A window has begun with it.
    pub begins: bool,
}

fn name(id: &BlockId) -> u64 {
    let folded = id.object.0 as u64 ^ (id.object.0 >> 64) as u64 ^ u64::from(id.index).rotate_left(40);
    folded.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
}

/// The bit of a reader.
fn bit(reader: &str) -> u64 {
    let mixed = reader
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    1 << (mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58)
}

impl Hot {
    pub fn new(rule: HotRule) -> Hot {
        Hot {
            rule,
            born: Instant::now(),
            slots: (0..SLOTS).map(|_| Slot::default()).collect(),
            window: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        }
    }

    /// The number of the window now, from 1 on.
    pub fn now(&self) -> u64 {
        (self.born.elapsed().as_micros() / self.rule.window.as_micros().max(1)) as u64 + 1
    }

    fn slot(&self, name: u64) -> &Slot {
        &self.slots[(name >> 52) as usize % SLOTS]
    }

    /// `reader` asks for `bytes` of a block of `len`, in window `now`.
    pub fn asked(&self, id: &BlockId, len: u64, bytes: u64, reader: &str, now: u64) -> Seen {
        let begins = self.window.load(Ordering::Relaxed) != now && self.window.swap(now, Ordering::Relaxed) != now;
        if begins {
            self.bytes.store(0, Ordering::Relaxed);
        }
        let total = self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let name = name(id);
        let slot = self.slot(name);
        // Two threads that find a slot out of date may lose a read to each other: a hot block is found one later.
        if slot.window.load(Ordering::Relaxed) != now {
            if slot.name.swap(name, Ordering::Relaxed) != name {
                slot.hot.store(0, Ordering::Relaxed);
            }
            slot.bytes.store(0, Ordering::Relaxed);
            slot.readers.store(0, Ordering::Relaxed);
            slot.window.store(now, Ordering::Relaxed);
        } else if slot.name.load(Ordering::Relaxed) != name {
            // Of two in one place the first is counted in this window.
            return Seen { hot: false, begins };
        }
        let asked = slot.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let bit = bit(reader);
        let readers = match slot.readers.load(Ordering::Relaxed) {
            known if known & bit != 0 => known,
            _ => slot.readers.fetch_or(bit, Ordering::Relaxed) | bit,
        };
        let rule = &self.rule;
        let hot = asked > rule.times * len && asked * rule.share > total && readers.count_ones() >= rule.readers;
        if hot {
            slot.hot.store(now, Ordering::Relaxed);
        }
        Seen { hot, begins }
    }

    /// Whether a block was hot in window `now` or in the one before.
    pub fn is_hot(&self, id: &BlockId, now: u64) -> bool {
        let name = name(id);
        let slot = self.slot(name);
        let last = slot.hot.load(Ordering::Relaxed);
        slot.name.load(Ordering::Relaxed) == name && last > 0 && last + 1 >= now
    }

    /// Whether a block was not asked for in the last windows, as far as is known.
    pub fn is_cool(&self, id: &BlockId, now: u64) -> bool {
        let name = name(id);
        let slot = self.slot(name);
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
        let hot = Hot::new(RULE);
        let ask = |index, reader: &str, now| hot.asked(&block(index), 100, 100, reader, now).hot;
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
        let hot = Hot::new(RULE);
        // Every one of many blocks goes to many readers.
        for round in 0..50 {
            for index in 0..40 {
                let seen = hot.asked(&block(index), 100, 100, ["a", "b", "c", "d"][round % 4], 1);
                assert!(!seen.hot || round < 10, "block {index} in round {round}");
                assert_eq!(seen.begins, round == 0 && index == 0);
            }
        }
    }
}
