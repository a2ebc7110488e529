//! Classes of blocks: which are never evicted, which go after a time, and how much room each class may have. It knows
//! blocks by name, length and disk; what makes a block one of a class whoever puts it says, by number.
//!
//! A block of no class, as all are where nobody gave rules, costs a writer one look at a flag. Readers never come here.

use crate::index::IdHash;
use parking_lot::Mutex;
use spurline_types::{BlockId, Stats};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The number of no class.
pub const PLAIN: u16 = 0;
/// The most of a disk that pinned blocks may take, in percent: the rest is for what others read.
pub const PINNED_PERCENT: u64 = 80;

/// Blocks that are brought under other rules without letting writers in between.
const STEP: usize = 1024;

/// How long the rules may take to be known after the start.
const HELD: Duration = Duration::from_secs(60);

/// What holds for the blocks of a class.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Class {
    /// They are never evicted for room.
    pub pinned: bool,
    /// They go this long after they came.
    pub ttl: Option<Duration>,
    /// The bytes that all of them may take on these disks; the oldest go first.
    pub quota_bytes: Option<u64>,
}

/// What a block that comes has to do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// It may come; room is taken for it.
    Comes,
    /// It may when this block has gone.
    After(BlockId),
    /// Not now: all the room of its class is taken by blocks that are being written, as new as it is.
    Full,
    /// Never: it is longer than all the room of its class.
    TooLong,
}

struct Placed {
    class: u16,
    disk: u8,
    /// Of a pinned class, and there was room for it among the pinned of its disk.
    pinned: bool,
    /// It is written, and so can be told to go.
    here: bool,
    /// In seconds since 1970, which a restart does not change.
    came: u32,
    number: u64,
    bytes: u64,
}

impl Placed {
    fn order(&self) -> (u16, u32, u64) {
        (self.class, self.came, self.number)
    }

    /// Pins it if that leaves what is pinned of its disk within `most`; whether it did.
    fn pin(&mut self, pinned: &mut BTreeMap<u8, u64>, most: &[u64]) -> bool {
        let taken = pinned.entry(self.disk).or_default();
        self.pinned = *taken + self.bytes <= most.get(usize::from(self.disk)).copied().unwrap_or(0);
        *taken += if self.pinned { self.bytes } else { 0 };
        self.pinned
    }
}

/// What other rules mean for a block, in the order in which it is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    Forget,
    Unpin,
    Pin,
}

#[derive(Default)]
struct Inner {
    /// Whether rules were given since the start, if only none.
    known: bool,
    rules: BTreeMap<u16, Class>,
    /// The bytes that pinned blocks may take, by disk.
    most: Vec<u64>,
    blocks: HashMap<BlockId, Placed, IdHash>,
    /// Those that are here, by class and the time at which they came.
    order: BTreeMap<(u16, u32, u64), BlockId>,
    used: BTreeMap<u16, u64>,
    /// By disk.
    pinned: BTreeMap<u8, u64>,
    /// Pinned classes that have blocks for which there was no room among the pinned.
    waiting: BTreeSet<u16>,
    numbered: u64,
}

/// All blocks that are of a class.
pub(crate) struct Classes {
    /// Whether there is any.
    any: AtomicBool,
    inner: Mutex<Inner>,
    /// Until when no block of a class is evicted while the rules are not known: a start must not cost pinned ones.
    held_until: Instant,
    stats: Arc<Stats>,
}

/// The time as blocks are dated by it.
pub(crate) fn now() -> u32 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs().min(u64::from(u32::MAX)) as u32)
}

impl Inner {
    fn rule(&self, class: u16) -> Class {
        self.rules.get(&class).copied().unwrap_or_default()
    }

    fn used(&self, class: u16) -> u64 {
        self.used.get(&class).copied().unwrap_or(0)
    }

    fn forget(&mut self, block: &BlockId) -> Option<Placed> {
        let placed = self.blocks.remove(block)?;
        self.order.remove(&placed.order());
        let used = self.used.entry(placed.class).or_default();
        *used = used.saturating_sub(placed.bytes);
        self.pin(placed.disk, placed.pinned, |pinned| pinned.saturating_sub(placed.bytes));
        Some(placed)
    }

    fn pin(&mut self, disk: u8, changes: bool, change: impl FnOnce(u64) -> u64) {
        if changes {
            let pinned = self.pinned.entry(disk).or_default();
            *pinned = change(*pinned);
        }
    }

    fn has_room(&self, disk: u8, bytes: u64, most: u64) -> bool {
        self.pinned.get(&disk).copied().unwrap_or(0) + bytes <= most
    }

    fn place(&mut self, block: BlockId, mut placed: Placed) {
        self.numbered += 1;
        placed.number = self.numbered;
        self.pin(placed.disk, placed.pinned, |pinned| pinned + placed.bytes);
        *self.used.entry(placed.class).or_default() += placed.bytes;
        if placed.here {
            self.order.insert(placed.order(), block);
        }
        self.blocks.insert(block, placed);
    }

    fn take(&mut self, step: Step, block: &BlockId) {
        if step == Step::Forget {
            self.forget(block);
            return;
        }
        let Inner { most, blocks, pinned, waiting, .. } = self;
        let Some(placed) = blocks.get_mut(block) else { return };
        if step == Step::Unpin && placed.pinned {
            placed.pinned = false;
            let taken = pinned.entry(placed.disk).or_default();
            *taken = taken.saturating_sub(placed.bytes);
        } else if step == Step::Pin && !placed.pinned && !placed.pin(pinned, most) {
            waiting.insert(placed.class);
        }
    }

    fn of_class(&self, class: u16) -> impl Iterator<Item = (&(u16, u32, u64), &BlockId)> {
        self.order.range((class, 0, 0)..=(class, u32::MAX, u64::MAX))
    }
}

impl Classes {
    pub fn new(stats: Arc<Stats>) -> Self {
        Classes { any: AtomicBool::new(false), inner: Mutex::default(), held_until: Instant::now() + HELD, stats }
    }

    fn changed<T>(&self, change: impl FnOnce(&mut Inner) -> T) -> T {
        let mut inner = self.inner.lock();
        let result = change(&mut inner);
        self.any.store(!inner.rules.is_empty() || !inner.blocks.is_empty(), Ordering::Release);
        self.stats.blockcache.pinned_bytes.set(inner.pinned.values().sum());
        result
    }

    fn none(&self) -> bool {
        !self.any.load(Ordering::Acquire)
    }

    /// Replaces the rules of all classes; pinned blocks may have `most` bytes of each disk. What is of a class that is no
    /// more is of none from now on. Answers how many blocks had to be looked at for it: those of classes that are pinned now
    /// and were not, or the other way round, some at a time. Called by one at a time.
    pub fn set(&self, rules: BTreeMap<u16, Class>, most: &[u64]) -> u64 {
        let mut steps = Vec::new();
        self.changed(|inner| {
            let other_room = !inner.known || inner.most != most;
            let mut next = inner.order.keys().next().map(|(class, ..)| *class);
            while let Some(class) = next {
                next = inner
                    .order
                    .range((class, u32::MAX, u64::MAX)..)
                    .map(|((class, ..), _)| *class)
                    .find(|n| *n > class);
                let (was, is) = (inner.rule(class).pinned, rules.get(&class).map(|rule| rule.pinned));
                match is {
                    None => steps.push((Step::Forget, class)),
                    Some(is) => {
                        if was && (!is || other_room) {
                            steps.push((Step::Unpin, class));
                        }
                        if is && (!was || other_room || inner.waiting.remove(&class)) {
                            steps.push((Step::Pin, class));
                        }
                    }
                }
            }
            (inner.known, inner.rules, inner.most) = (true, rules, most.to_vec());
        });
        // Room is made before it is given away, the oldest have it first.
        steps.sort_unstable();
        steps.into_iter().map(|(step, class)| self.go_over(step, class)).sum()
    }

    /// Takes a step with all blocks of a class that are here, and lets others in between.
    fn go_over(&self, step: Step, class: u16) -> u64 {
        let (mut seen, mut from) = (0, (class, 0, 0));
        loop {
            let more = self.changed(|inner| {
                let keys: Vec<_> = inner.order.range(from..=(class, u32::MAX, u64::MAX)).take(STEP).collect();
                let blocks: Vec<BlockId> = keys.iter().map(|(_, block)| **block).collect();
                let last = keys.last().map(|(key, _)| **key);
                for block in &blocks {
                    inner.take(step, block);
                }
                seen += blocks.len() as u64;
                last.filter(|_| blocks.len() == STEP)
            });
            let Some((class, came, number)) = more else { return seen };
            from = (class, came, number + 1);
        }
    }

    /// The class of a block, and when it came.
    pub fn of(&self, block: &BlockId) -> Option<(u16, u32)> {
        if self.none() {
            return None;
        }
        self.inner.lock().blocks.get(block).map(|placed| (placed.class, placed.came))
    }

    /// Whether a block is of `class`, and pinned if that is.
    pub fn is_settled(&self, block: &BlockId, class: u16) -> bool {
        if self.none() {
            return class == PLAIN;
        }
        let inner = self.inner.lock();
        match inner.blocks.get(block) {
            Some(placed) => placed.class == class && placed.pinned == inner.rule(class).pinned,
            None => class == PLAIN,
        }
    }

    /// Whether a block must not be evicted.
    pub fn is_pinned(&self, block: &BlockId) -> bool {
        if self.none() {
            return false;
        }
        let inner = self.inner.lock();
        let held = !inner.known && Instant::now() < self.held_until;
        inner.blocks.get(block).is_some_and(|placed| placed.pinned && inner.rule(placed.class).pinned || held)
    }

    /// Takes the room for a block that comes to a disk; it is given back by [`Classes::gone`]. Pinned blocks may have
    /// `most` bytes of the disk: one that would be more is of its class and not pinned.
    pub fn admit(&self, block: BlockId, class: u16, bytes: u64, disk: u8, most: u64) -> Admission {
        if class == PLAIN || self.none() {
            return Admission::Comes;
        }
        self.changed(|inner| {
            // Whose rule was taken away while it was fetched is of no class.
            let Some(rule) = inner.rules.get(&class).copied() else {
                inner.forget(&block);
                return Admission::Comes;
            };
            // One that is of the class already takes its own room only.
            let before = inner.blocks.get(&block).filter(|placed| placed.class == class);
            let (own, came) = before.map_or((0, now()), |placed| (placed.bytes, placed.came));
            if let Some(quota) = rule.quota_bytes
                && inner.used(class) - own + bytes > quota
            {
                if bytes > quota {
                    return Admission::TooLong;
                }
                let oldest = inner.of_class(class).map(|(_, other)| *other).find(|other| *other != block);
                return oldest.map_or(Admission::Full, Admission::After);
            }
            inner.forget(&block);
            let pinned = rule.pinned && inner.has_room(disk, bytes, most);
            if rule.pinned && !pinned {
                inner.waiting.insert(class);
                self.stats.blockcache.pins_refused.add(1);
            }
            inner.place(block, Placed { class, disk, pinned, here: false, came, number: 0, bytes });
            Admission::Comes
        })
    }

    /// A block that was admitted is here.
    pub fn arrived(&self, block: &BlockId) {
        if !self.none() {
            self.changed(|inner| {
                let Some(placed) = inner.blocks.get_mut(block) else { return };
                placed.here = true;
                let (class, order) = (placed.class, placed.order());
                inner.order.insert(order, *block);
                // Rules that were set while it was written were for what was here.
                inner.take(
                    match inner.rules.get(&class) {
                        None => Step::Forget,
                        Some(rule) if rule.pinned => Step::Pin,
                        Some(_) => Step::Unpin,
                    },
                    block,
                );
            });
        }
    }

    /// A block was here when the store opened, of a class since `came`; what is pinned is known when the rules are.
    pub fn restore(&self, block: BlockId, class: u16, came: u32, bytes: u64, disk: u8) {
        self.changed(|inner| {
            inner.forget(&block);
            if class != PLAIN {
                inner.place(block, Placed { class, disk, pinned: false, here: true, came, number: 0, bytes });
            }
        });
    }

    /// A block is not here any more, or of no class.
    pub fn gone(&self, block: &BlockId) {
        if !self.none() {
            self.changed(|inner| inner.forget(block));
        }
    }

    /// Blocks that have to go now, for their time or for their class's room, at most `most`.
    pub fn due(&self, now: u32, most: usize) -> Vec<BlockId> {
        if self.none() {
            return Vec::new();
        }
        let inner = self.inner.lock();
        let mut due = Vec::new();
        for (class, rule) in &inner.rules {
            let mut used = inner.used(*class);
            for ((_, came, _), block) in inner.of_class(*class) {
                let late = rule.ttl.is_some_and(|ttl| u64::from(now.saturating_sub(*came)) >= ttl.as_secs());
                let over = rule.quota_bytes.is_some_and(|quota| used > quota);
                if !late && !over || due.len() == most {
                    break;
                }
                used = used.saturating_sub(inner.blocks.get(block).map_or(0, |placed| placed.bytes));
                due.push(*block);
            }
        }
        due
    }

    /// How many blocks are of a class.
    pub fn count(&self) -> u64 {
        if self.none() { 0 } else { self.inner.lock().blocks.len() as u64 }
    }

    /// The bytes that the blocks of a class may take on these disks, where one that takes `bytes` is more than that.
    pub fn quota_below(&self, class: u16, bytes: u64) -> Option<u64> {
        if class == PLAIN || self.none() {
            return None;
        }
        self.inner.lock().rule(class).quota_bytes.filter(|quota| *quota < bytes)
    }

    /// Bytes of the blocks of a class.
    pub fn used(&self, class: u16) -> u64 {
        self.inner.lock().used(class)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_types::ObjectId;

    fn block(n: u32) -> BlockId {
        BlockId { object: ObjectId(u128::from(n) << 64), index: n }
    }

    fn pinned(pinned: bool) -> BTreeMap<u16, Class> {
        BTreeMap::from([(1, Class { pinned, ..Class::default() })])
    }

    fn quota(bytes: u64) -> BTreeMap<u16, Class> {
        BTreeMap::from([(1, Class { quota_bytes: Some(bytes), ..Class::default() })])
    }

    fn classes(rules: BTreeMap<u16, Class>) -> Classes {
        let classes = Classes::new(Arc::default());
        classes.set(rules, &[100, 100]);
        classes
    }

    fn comes(classes: &Classes, n: u32, class: u16, bytes: u64, disk: u8) {
        assert_eq!(classes.admit(block(n), class, bytes, disk, 100), Admission::Comes);
        classes.arrived(&block(n));
    }

    #[test]
    fn what_has_no_class_is_let_through() {
        let none = classes(BTreeMap::new());
        comes(&none, 1, 3, 10, 0);
        assert!(none.of(&block(1)).is_none(), "nobody gave a rule");
        assert!(!none.is_pinned(&block(1)) && none.due(u32::MAX, 9).is_empty());
        let some = classes(pinned(true));
        comes(&some, 1, PLAIN, 10, 0);
        assert!(some.of(&block(1)).is_none() && some.is_settled(&block(1), PLAIN) && !some.is_settled(&block(1), 1));
    }

    #[test]
    fn pins_are_bounded_on_each_disk_and_what_is_more_is_as_others_are() {
        let pins = classes(pinned(true));
        (1..=2).for_each(|n| comes(&pins, n, 1, 60, 0));
        comes(&pins, 3, 1, 60, 1);
        assert_eq!([1, 2, 3].map(|n| pins.is_pinned(&block(n))), [true, false, true]);
        assert_eq!((pins.stats.blockcache.pinned_bytes.get(), pins.stats.blockcache.pins_refused.get()), (120, 1));
        assert!(pins.is_settled(&block(1), 1) && !pins.is_settled(&block(2), 1));
        // There is room for it now, which is looked at when it comes again and when rules are given.
        pins.gone(&block(1));
        comes(&pins, 2, 1, 60, 0);
        assert!(pins.is_pinned(&block(2)));
        comes(&pins, 4, 1, 60, 0);
        pins.gone(&block(2));
        pins.set(pinned(true), &[100, 10]);
        assert_eq!([3, 4].map(|n| pins.is_pinned(&block(n))), [false, true]);
        // Unpinned: of the same class still, and evicted as others are.
        pins.set(pinned(false), &[100, 100]);
        assert!(!pins.is_pinned(&block(4)) && pins.used(1) == 120);
        assert_eq!(pins.stats.blockcache.pinned_bytes.get(), 0);
        // And of none when there is no such class.
        pins.set(BTreeMap::new(), &[]);
        assert!(pins.of(&block(4)).is_none() && pins.used(1) == 0 && pins.none());
    }

    #[test]
    fn other_rules_are_taken_in_steps_and_only_by_those_they_mean_something_to() {
        let many = 3 * STEP as u32 + 7;
        let rule = |pinned, quota_bytes| Class { pinned, ttl: None, quota_bytes };
        let rules = |first, second, quota| BTreeMap::from([(1, rule(first, None)), (2, rule(second, Some(quota)))]);
        let most = [u64::from(many), 0];
        let classes = Classes::new(Arc::default());
        (0..many).for_each(|n| classes.restore(block(n), 1, n, 1, 0));
        (0..many).for_each(|n| classes.restore(block(many + n), 2, n, 1, 0));
        let pinned = || classes.stats.blockcache.pinned_bytes.get();
        assert_eq!((classes.set(rules(true, false, 1 << 20), &most), pinned()), (u64::from(many), u64::from(many)));
        // Another share of the group: quotas only.
        assert_eq!(classes.set(rules(true, false, 1 << 19), &most), 0);
        // There is no room for the other class, and now it waits for it.
        assert_eq!((classes.set(rules(true, true, 1 << 20), &most), pinned()), (u64::from(many), u64::from(many)));
        assert!(classes.is_pinned(&block(0)) && !classes.is_pinned(&block(many)));
        let both = 2 * u64::from(many);
        assert_eq!((classes.set(rules(false, true, 1 << 20), &most), pinned()), (both, u64::from(many)));
        assert!(!classes.is_pinned(&block(0)) && classes.is_pinned(&block(many)) && classes.is_settled(&block(0), 1));
        // No rule any more, and none of a class.
        assert_eq!((classes.set(BTreeMap::new(), &most), pinned(), classes.count()), (both, 0, 0));
    }

    #[test]
    fn writers_come_in_between_the_steps() {
        let classes = classes(pinned(false));
        let names = 4 * STEP as u32;
        (0..names).for_each(|n| classes.restore(block(n), 1, n, 1, 0));
        std::thread::scope(|scope| {
            let setter = scope.spawn(|| {
                for n in 0..20 {
                    classes.set(pinned(n % 2 == 0), &[u64::from(names) / 2, 0]);
                }
            });
            let mut n = 0;
            while !setter.is_finished() {
                n = (n + 1) % names;
                classes.gone(&block(n));
                comes(&classes, n, 1, 1, 0);
            }
        });
        classes.set(pinned(true), &[u64::from(names) / 2, 0]);
        let inner = classes.inner.lock();
        assert_eq!((inner.order.len(), inner.used(1)), (names as usize, u64::from(names)));
        let pinned = inner.blocks.values().filter(|placed| placed.pinned).count();
        assert_eq!((pinned as u64, inner.pinned[&0]), (u64::from(names) / 2, u64::from(names) / 2));
    }

    #[test]
    fn a_quota_lets_the_oldest_go_first() {
        let full = classes(quota(100));
        (0..2).for_each(|n| comes(&full, n, 1, 50, 0));
        assert_eq!(full.admit(block(2), 1, 50, 0, 0), Admission::After(block(0)));
        assert_eq!(full.admit(block(0), 1, 50, 0, 0), Admission::Comes, "it is of the class already");
        full.arrived(&block(0));
        full.gone(&block(0));
        comes(&full, 2, 1, 50, 0);
        assert_eq!(full.admit(block(3), 1, 101, 0, 0), Admission::TooLong);
        assert_eq!(
            (full.quota_below(1, 101), full.quota_below(1, 100), full.quota_below(7, 101)),
            (Some(100), None, None)
        );
        // A smaller one than what is here.
        full.set(quota(60), &[]);
        assert_eq!(full.due(now(), 9), [block(1)]);
        full.set(quota(0), &[]);
        assert_eq!(full.due(now(), 9), [block(1), block(2)]);
    }

    #[test]
    fn a_block_that_is_being_written_is_told_to_go_by_nobody() {
        let full = classes(quota(100));
        assert_eq!(full.admit(block(1), 1, 100, 0, 0), Admission::Comes);
        assert_eq!(full.admit(block(2), 1, 50, 0, 0), Admission::Full);
        full.set(quota(10), &[]);
        assert!(full.due(now(), 9).is_empty());
        full.arrived(&block(1));
        assert_eq!(full.due(now(), 9), [block(1)]);
    }

    #[test]
    fn blocks_whose_time_is_up_are_due_the_oldest_first() {
        let ttl = Class { ttl: Some(Duration::from_secs(100)), ..Class::default() };
        let timed = classes(BTreeMap::from([(1, ttl), (2, Class::default())]));
        // As a log says it that was rewritten: in no order.
        for (n, class, came) in [(1, 1, 50), (2, 2, 0), (3, 1, 10), (4, 1, 30)] {
            timed.restore(block(n), class, came, 10, 0);
        }
        assert!(timed.due(109, 9).is_empty());
        assert_eq!(timed.due(110, 9), [block(3)]);
        assert_eq!(timed.due(150, 9), [block(3), block(4), block(1)]);
        assert_eq!(timed.due(150, 1), [block(3)]);
        assert!(!timed.is_pinned(&block(1)), "the rules are known");
        let starting = Classes::new(Arc::default());
        starting.restore(block(1), 7, 0, 10, 0);
        assert!(starting.is_pinned(&block(1)) && !starting.is_pinned(&block(2)), "they are not yet");
        timed.gone(&block(1));
        timed.restore(block(3), PLAIN, 0, 10, 0);
        timed.restore(block(4), 2, 0, 10, 0);
        assert!(timed.due(u32::MAX, 9).is_empty() && timed.used(1) == 0 && timed.used(2) == 20);
    }

    proptest::proptest! {
        #[test]
        fn the_books_agree_with_what_is_here(
            ops in proptest::collection::vec((0u8..6, 0u32..8, 1u16..4, 1u64..40, 0u8..2), 1..200),
        ) {
            let rule = |pinned, quota_bytes| Class { pinned, ttl: None, quota_bytes };
            let rules = BTreeMap::from([(1, rule(true, None)), (2, rule(false, Some(60))), (3, rule(true, Some(90)))]);
            let classes = classes(rules.clone());
            for (op, n, class, bytes, disk) in ops {
                match op {
                    0..=2 => while let Admission::After(other) = classes.admit(block(n), class, bytes, disk, 100) {
                        proptest::prop_assert!(other != block(n));
                        classes.gone(&other);
                    },
                    3 => classes.arrived(&block(n)),
                    4 => classes.gone(&block(n)),
                    _ => {
                        classes.set(rules.clone(), &[100, 100]);
                    }
                }
                let inner = classes.inner.lock();
                let sum = |of: &dyn Fn(&Placed) -> bool| inner.blocks.values().filter(|p| of(p)).map(|p| p.bytes).sum::<u64>();
                for class in 1..4 {
                    proptest::prop_assert_eq!(inner.used(class), sum(&|p| p.class == class));
                    let most = rules[&class].quota_bytes.unwrap_or(u64::MAX);
                    proptest::prop_assert!(inner.used(class) <= most);
                }
                for disk in 0..2 {
                    let pinned = inner.pinned.get(&disk).copied().unwrap_or(0);
                    proptest::prop_assert_eq!(pinned, sum(&|p| p.pinned && p.disk == disk));
                    proptest::prop_assert!(pinned <= 100);
                }
                proptest::prop_assert_eq!(inner.order.len(), inner.blocks.values().filter(|p| p.here).count());
            }
        }
    }
}
