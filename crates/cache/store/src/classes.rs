//! Classes of blocks: which are pinned, which expire, and the quota of each class. Knows blocks by name, length and disk; the
//! caller chooses the class, by number.
//!
//! A block without a class (every block, when there are no rules) costs a writer the load of a flag. Readers never call this
//! module.

use parking_lot::Mutex;
use spurline_types::id_hash::BuildObjectHasher;
use spurline_types::{BlockId, Stats};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The number that stands for no class.
pub const UNCLASSIFIED: u64 = 0;
/// Maximum share of a disk that pinned blocks may take, in percent: the rest serves other reads.
pub const PINNED_PERCENT: u64 = 80;

/// Blocks brought under changed rules per lock, so that writers get in between.
const BLOCKS_PER_STEP: usize = 1024;

/// How long after start the rules may remain unknown.
const RULES_GRACE: Duration = Duration::from_secs(60);

/// The rules of a class.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BlockClass {
    /// The blocks are never evicted for room.
    pub pinned: bool,
    /// The blocks expire this long after arrival.
    pub ttl: Option<Duration>,
    /// The bytes that the blocks may take on these disks; the oldest are removed first.
    pub quota_bytes: Option<u64>,
}

/// Whether an arriving block is admitted to the class.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ClassAdmission {
    /// Admitted; the room is taken.
    Admitted,
    /// Admitted once this block has been removed.
    EvictFirst(BlockId),
    /// Not now: blocks that are being written, and as new, take all of the class's quota.
    Full,
    /// Never: the block is longer than the class's whole quota.
    TooLong,
}

struct ClassedBlock {
    class: u64,
    disk: u8,
    /// The class is pinned, and the block fits into the pinned share of the disk.
    pinned: bool,
    /// Written, and so removable.
    stored: bool,
    /// In seconds since 1970, which a restart does not change.
    came: u32,
    number: u64,
    bytes: u64,
}

impl ClassedBlock {
    fn order_key(&self) -> (u64, u32, u64) {
        (self.class, self.came, self.number)
    }

    /// Pins the block if the pinned bytes of the disk stay within `most`; returns whether that was so.
    fn try_pin(&mut self, pinned: &mut BTreeMap<u8, u64>, most: &[u64]) -> bool {
        let taken = pinned.entry(self.disk).or_default();
        self.pinned = *taken + self.bytes <= most.get(usize::from(self.disk)).copied().unwrap_or(0);
        *taken += if self.pinned { self.bytes } else { 0 };
        self.pinned
    }
}

/// A change for a block under changed rules, in the order of execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum ClassStep {
    Forget,
    Unpin,
    Pin,
}

#[derive(Default)]
struct ClassState {
    /// Whether rules were set since start, even an empty set.
    known: bool,
    rules: BTreeMap<u64, BlockClass>,
    /// The bytes that pinned blocks may take, by disk.
    most: Vec<u64>,
    blocks: HashMap<BlockId, ClassedBlock, BuildObjectHasher>,
    /// Stored blocks by class and time of arrival.
    order: BTreeMap<(u64, u32, u64), BlockId>,
    used: BTreeMap<u64, u64>,
    /// By disk.
    pinned: BTreeMap<u8, u64>,
    /// Pinned classes with blocks that do not fit into the pinned share.
    waiting: BTreeSet<u64>,
    numbered: u64,
}

/// All classified blocks.
pub(crate) struct ClassTable {
    /// Whether there are any rules or classified blocks.
    any: AtomicBool,
    inner: Mutex<ClassState>,
    /// Until then, blocks of any class are not evicted while the rules are unknown: a start must not evict pinned blocks.
    held_until: Instant,
    stats: Arc<Stats>,
}

/// The time by which blocks are dated.
pub(crate) fn unix_seconds() -> u32 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs().min(u64::from(u32::MAX)) as u32)
}

impl ClassState {
    fn class_rule(&self, class: u64) -> BlockClass {
        self.rules.get(&class).copied().unwrap_or_default()
    }

    fn used(&self, class: u64) -> u64 {
        self.used.get(&class).copied().unwrap_or(0)
    }

    fn forget_block(&mut self, block: &BlockId) -> Option<ClassedBlock> {
        let placed = self.blocks.remove(block)?;
        self.order.remove(&placed.order_key());
        let used = self.used.entry(placed.class).or_default();
        *used = used.saturating_sub(placed.bytes);
        self.adjust_pinned(placed.disk, placed.pinned, |pinned| pinned.saturating_sub(placed.bytes));
        Some(placed)
    }

    fn adjust_pinned(&mut self, disk: u8, changes: bool, change: impl FnOnce(u64) -> u64) {
        if changes {
            let pinned = self.pinned.entry(disk).or_default();
            *pinned = change(*pinned);
        }
    }

    fn has_room(&self, disk: u8, bytes: u64, most: u64) -> bool {
        self.pinned.get(&disk).copied().unwrap_or(0) + bytes <= most
    }

    fn add_block(&mut self, block: BlockId, mut placed: ClassedBlock) {
        self.numbered += 1;
        placed.number = self.numbered;
        self.adjust_pinned(placed.disk, placed.pinned, |pinned| pinned + placed.bytes);
        *self.used.entry(placed.class).or_default() += placed.bytes;
        if placed.stored {
            self.order.insert(placed.order_key(), block);
        }
        self.blocks.insert(block, placed);
    }

    fn apply_step(&mut self, step: ClassStep, block: &BlockId) {
        if step == ClassStep::Forget {
            self.forget_block(block);
            return;
        }
        let ClassState { most, blocks, pinned, waiting, .. } = self;
        let Some(placed) = blocks.get_mut(block) else { return };
        if step == ClassStep::Unpin && placed.pinned {
            placed.pinned = false;
            let taken = pinned.entry(placed.disk).or_default();
            *taken = taken.saturating_sub(placed.bytes);
        } else if step == ClassStep::Pin && !placed.pinned && !placed.try_pin(pinned, most) {
            waiting.insert(placed.class);
        }
    }

    fn blocks_of_class(&self, class: u64) -> impl Iterator<Item = (&(u64, u32, u64), &BlockId)> {
        self.order.range((class, 0, 0)..=(class, u32::MAX, u64::MAX))
    }
}

impl ClassTable {
    pub fn new(stats: Arc<Stats>) -> Self {
        ClassTable {
            any: AtomicBool::new(false),
            inner: Mutex::default(),
            held_until: Instant::now() + RULES_GRACE,
            stats,
        }
    }

    fn update<T>(&self, change: impl FnOnce(&mut ClassState) -> T) -> T {
        let mut inner = self.inner.lock();
        let result = change(&mut inner);
        self.any.store(!inner.rules.is_empty() || !inner.blocks.is_empty(), Ordering::Release);
        self.stats.blockcache.pinned_bytes.set(inner.pinned.values().sum());
        result
    }

    fn is_unused(&self) -> bool {
        !self.any.load(Ordering::Acquire)
    }

    /// Replaces the rules of all classes; pinned blocks may take `most` bytes of each disk. Blocks of a removed class become
    /// unclassified. Visits the blocks of classes that became pinned or unpinned, and returns how many. Works in batches; callers
    /// must serialise.
    pub fn set_rules(&self, rules: BTreeMap<u64, BlockClass>, most: &[u64]) -> u64 {
        let mut steps = Vec::new();
        self.update(|inner| {
            let other_room = !inner.known || inner.most != most;
            let mut next = inner.order.keys().next().map(|(class, ..)| *class);
            while let Some(class) = next {
                next = inner
                    .order
                    .range((class, u32::MAX, u64::MAX)..)
                    .map(|((class, ..), _)| *class)
                    .find(|n| *n > class);
                let was = inner.class_rule(class).pinned;
                let is = rules.get(&class).map(|rule| rule.pinned);
                match is {
                    None => steps.push((ClassStep::Forget, class)),
                    Some(is) => {
                        if was && (!is || other_room) {
                            steps.push((ClassStep::Unpin, class));
                        }
                        if is && (!was || other_room || inner.waiting.remove(&class)) {
                            steps.push((ClassStep::Pin, class));
                        }
                    }
                }
            }
            inner.known = true;
            inner.rules = rules;
            inner.most = most.to_vec();
        });
        // Room is freed before room is given away, to the oldest blocks first.
        steps.sort_unstable();
        steps.into_iter().map(|(step, class)| self.apply_to_class(step, class)).sum()
    }

    /// Applies a step to all stored blocks of a class, in batches.
    fn apply_to_class(&self, step: ClassStep, class: u64) -> u64 {
        let mut seen = 0;
        let mut from = (class, 0, 0);
        loop {
            let more = self.update(|inner| {
                let keys: Vec<_> =
                    inner.order.range(from..=(class, u32::MAX, u64::MAX)).take(BLOCKS_PER_STEP).collect();
                let blocks: Vec<BlockId> = keys.iter().map(|(_, block)| **block).collect();
                let last = keys.last().map(|(key, _)| **key);
                for block in &blocks {
                    inner.apply_step(step, block);
                }
                seen += blocks.len() as u64;
                last.filter(|_| blocks.len() == BLOCKS_PER_STEP)
            });
            let Some((class, came, number)) = more else { return seen };
            from = (class, came, number + 1);
        }
    }

    /// The class of a block, and the time of arrival.
    pub fn class_of(&self, block: &BlockId) -> Option<(u64, u32)> {
        if self.is_unused() {
            return None;
        }
        self.inner.lock().blocks.get(block).map(|placed| (placed.class, placed.came))
    }

    /// Whether a block is of `class`, and pinned if the class is.
    pub fn has_class(&self, block: &BlockId, class: u64) -> bool {
        if self.is_unused() {
            return class == UNCLASSIFIED;
        }
        let inner = self.inner.lock();
        match inner.blocks.get(block) {
            Some(placed) => placed.class == class && placed.pinned == inner.class_rule(class).pinned,
            None => class == UNCLASSIFIED,
        }
    }

    /// Whether a block must not be evicted.
    pub fn is_pinned(&self, block: &BlockId) -> bool {
        if self.is_unused() {
            return false;
        }
        let inner = self.inner.lock();
        let held = !inner.known && Instant::now() < self.held_until;
        inner.blocks.get(block).is_some_and(|placed| placed.pinned && inner.class_rule(placed.class).pinned || held)
    }

    /// Takes the room for an arriving block; [`ClassTable::forget_block`] returns it. Pinned blocks may take `most`
    /// bytes of the disk: a block beyond that is classified but not pinned.
    pub fn admit(&self, block: BlockId, class: u64, bytes: u64, disk: u8, most: u64) -> ClassAdmission {
        if class == UNCLASSIFIED || self.is_unused() {
            return ClassAdmission::Admitted;
        }
        self.update(|inner| {
            // The rule was removed during the fetch: the block is unclassified.
            let Some(rule) = inner.rules.get(&class).copied() else {
                inner.forget_block(&block);
                return ClassAdmission::Admitted;
            };
            // A block that is in the class already has room.
            let before = inner.blocks.get(&block).filter(|placed| placed.class == class);
            let (own, came) = before.map_or((0, unix_seconds()), |placed| (placed.bytes, placed.came));
            if let Some(quota) = rule.quota_bytes
                && inner.used(class) - own + bytes > quota
            {
                if bytes > quota {
                    return ClassAdmission::TooLong;
                }
                let oldest = inner.blocks_of_class(class).map(|(_, other)| *other).find(|other| *other != block);
                return oldest.map_or(ClassAdmission::Full, ClassAdmission::EvictFirst);
            }
            inner.forget_block(&block);
            let pinned = rule.pinned && inner.has_room(disk, bytes, most);
            if rule.pinned && !pinned {
                inner.waiting.insert(class);
                self.stats.blockcache.pins_refused.add(1);
            }
            inner.add_block(block, ClassedBlock { class, disk, pinned, stored: false, came, number: 0, bytes });
            ClassAdmission::Admitted
        })
    }

    /// Marks an admitted block as stored.
    pub fn mark_stored(&self, block: &BlockId) {
        if !self.is_unused() {
            self.update(|inner| {
                let Some(placed) = inner.blocks.get_mut(block) else { return };
                placed.stored = true;
                let class = placed.class;
                let order = placed.order_key();
                inner.order.insert(order, *block);
                // Rules that were set during the write applied to stored blocks only.
                inner.apply_step(
                    match inner.rules.get(&class) {
                        None => ClassStep::Forget,
                        Some(rule) if rule.pinned => ClassStep::Pin,
                        Some(_) => ClassStep::Unpin,
                    },
                    block,
                );
            });
        }
    }

    /// Restores a block's class and time of arrival at start. Pinning follows when the rules are set.
    pub fn restore_block(&self, block: BlockId, class: u64, came: u32, bytes: u64, disk: u8) {
        self.update(|inner| {
            inner.forget_block(&block);
            if class != UNCLASSIFIED {
                inner.add_block(
                    block,
                    ClassedBlock { class, disk, pinned: false, stored: true, came, number: 0, bytes },
                );
            }
        });
    }

    /// Removes a block that is gone or has become unclassified.
    pub fn forget_block(&self, block: &BlockId) {
        if !self.is_unused() {
            self.update(|inner| inner.forget_block(block));
        }
    }

    /// Blocks to remove now because of age or of the class's quota, at most `most`.
    pub fn due_blocks(&self, now: u32, most: usize) -> Vec<BlockId> {
        if self.is_unused() {
            return Vec::new();
        }
        let inner = self.inner.lock();
        let mut due = Vec::new();
        for (class, rule) in &inner.rules {
            let mut used = inner.used(*class);
            for ((_, came, _), block) in inner.blocks_of_class(*class) {
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

    /// Number of classified blocks.
    pub fn block_count(&self) -> u64 {
        if self.is_unused() { 0 } else { self.inner.lock().blocks.len() as u64 }
    }

    /// The quota of a class on these disks, when below `bytes`.
    pub fn quota_below(&self, class: u64, bytes: u64) -> Option<u64> {
        if class == UNCLASSIFIED || self.is_unused() {
            return None;
        }
        self.inner.lock().class_rule(class).quota_bytes.filter(|quota| *quota < bytes)
    }

    /// Bytes of the blocks of a class.
    pub fn used_bytes(&self, class: u64) -> u64 {
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

    fn pinned(pinned: bool) -> BTreeMap<u64, BlockClass> {
        BTreeMap::from([(1, BlockClass { pinned, ..BlockClass::default() })])
    }

    fn quota(bytes: u64) -> BTreeMap<u64, BlockClass> {
        BTreeMap::from([(1, BlockClass { quota_bytes: Some(bytes), ..BlockClass::default() })])
    }

    fn classes(rules: BTreeMap<u64, BlockClass>) -> ClassTable {
        let classes = ClassTable::new(Arc::default());
        classes.set_rules(rules, &[100, 100]);
        classes
    }

    fn comes(classes: &ClassTable, n: u32, class: u64, bytes: u64, disk: u8) {
        assert_eq!(classes.admit(block(n), class, bytes, disk, 100), ClassAdmission::Admitted);
        classes.mark_stored(&block(n));
    }

    #[test]
    fn what_has_no_class_is_let_through() {
        let none = classes(BTreeMap::new());
        comes(&none, 1, 3, 10, 0);
        assert!(none.class_of(&block(1)).is_none(), "there are no rules");
        assert!(!none.is_pinned(&block(1)) && none.due_blocks(u32::MAX, 9).is_empty());
        let some = classes(pinned(true));
        comes(&some, 1, UNCLASSIFIED, 10, 0);
        assert!(
            some.class_of(&block(1)).is_none()
                && some.has_class(&block(1), UNCLASSIFIED)
                && !some.has_class(&block(1), 1)
        );
    }

    #[test]
    fn pins_are_bounded_on_each_disk_and_what_is_more_is_as_others_are() {
        let pins = classes(pinned(true));
        (1..=2).for_each(|n| comes(&pins, n, 1, 60, 0));
        comes(&pins, 3, 1, 60, 1);
        assert_eq!([1, 2, 3].map(|n| pins.is_pinned(&block(n))), [true, false, true]);
        assert_eq!((pins.stats.blockcache.pinned_bytes.get(), pins.stats.blockcache.pins_refused.get()), (120, 1));
        assert!(pins.has_class(&block(1), 1) && !pins.has_class(&block(2), 1));
        // There is room now, which is looked at when the block comes again and when rules are given.
        pins.forget_block(&block(1));
        comes(&pins, 2, 1, 60, 0);
        assert!(pins.is_pinned(&block(2)));
        comes(&pins, 4, 1, 60, 0);
        pins.forget_block(&block(2));
        pins.set_rules(pinned(true), &[100, 10]);
        assert_eq!([3, 4].map(|n| pins.is_pinned(&block(n))), [false, true]);
        // Unpinned: of the same class still, and evicted as others are.
        pins.set_rules(pinned(false), &[100, 100]);
        assert!(!pins.is_pinned(&block(4)) && pins.used_bytes(1) == 120);
        assert_eq!(pins.stats.blockcache.pinned_bytes.get(), 0);
        // And of none when there is no such class.
        pins.set_rules(BTreeMap::new(), &[]);
        assert!(pins.class_of(&block(4)).is_none() && pins.used_bytes(1) == 0 && pins.is_unused());
    }

    #[test]
    fn other_rules_are_taken_in_steps_and_only_by_those_they_mean_something_to() {
        let many = 3 * BLOCKS_PER_STEP as u32 + 7;
        let rule = |pinned, quota_bytes| BlockClass { pinned, ttl: None, quota_bytes };
        let rules = |first, second, quota| BTreeMap::from([(1, rule(first, None)), (2, rule(second, Some(quota)))]);
        let most = [u64::from(many), 0];
        let classes = ClassTable::new(Arc::default());
        (0..many).for_each(|n| classes.restore_block(block(n), 1, n, 1, 0));
        (0..many).for_each(|n| classes.restore_block(block(many + n), 2, n, 1, 0));
        let pinned = || classes.stats.blockcache.pinned_bytes.get();
        assert_eq!(
            (classes.set_rules(rules(true, false, 1 << 20), &most), pinned()),
            (u64::from(many), u64::from(many))
        );
        // Another share of the group: quotas only.
        assert_eq!(classes.set_rules(rules(true, false, 1 << 19), &most), 0);
        // There is no room for the other class, and now the block waits for room.
        assert_eq!(
            (classes.set_rules(rules(true, true, 1 << 20), &most), pinned()),
            (u64::from(many), u64::from(many))
        );
        assert!(classes.is_pinned(&block(0)) && !classes.is_pinned(&block(many)));
        let both = 2 * u64::from(many);
        assert_eq!((classes.set_rules(rules(false, true, 1 << 20), &most), pinned()), (both, u64::from(many)));
        assert!(!classes.is_pinned(&block(0)) && classes.is_pinned(&block(many)) && classes.has_class(&block(0), 1));
        // No rule any more, and none of a class.
        assert_eq!((classes.set_rules(BTreeMap::new(), &most), pinned(), classes.block_count()), (both, 0, 0));
    }

    #[test]
    fn writers_come_in_between_the_steps() {
        let classes = classes(pinned(false));
        let names = 4 * BLOCKS_PER_STEP as u32;
        (0..names).for_each(|n| classes.restore_block(block(n), 1, n, 1, 0));
        std::thread::scope(|scope| {
            let setter = scope.spawn(|| {
                for n in 0..20 {
                    classes.set_rules(pinned(n % 2 == 0), &[u64::from(names) / 2, 0]);
                }
            });
            let mut n = 0;
            while !setter.is_finished() {
                n = (n + 1) % names;
                classes.forget_block(&block(n));
                comes(&classes, n, 1, 1, 0);
            }
        });
        classes.set_rules(pinned(true), &[u64::from(names) / 2, 0]);
        let inner = classes.inner.lock();
        assert_eq!((inner.order.len(), inner.used(1)), (names as usize, u64::from(names)));
        let pinned = inner.blocks.values().filter(|placed| placed.pinned).count();
        assert_eq!((pinned as u64, inner.pinned[&0]), (u64::from(names) / 2, u64::from(names) / 2));
    }

    #[test]
    fn a_quota_lets_the_oldest_go_first() {
        let full = classes(quota(100));
        (0..2).for_each(|n| comes(&full, n, 1, 50, 0));
        assert_eq!(full.admit(block(2), 1, 50, 0, 0), ClassAdmission::EvictFirst(block(0)));
        assert_eq!(full.admit(block(0), 1, 50, 0, 0), ClassAdmission::Admitted, "it is of the class already");
        full.mark_stored(&block(0));
        full.forget_block(&block(0));
        comes(&full, 2, 1, 50, 0);
        assert_eq!(full.admit(block(3), 1, 101, 0, 0), ClassAdmission::TooLong);
        assert_eq!(
            (full.quota_below(1, 101), full.quota_below(1, 100), full.quota_below(7, 101)),
            (Some(100), None, None)
        );
        // Smaller than the present limit.
        full.set_rules(quota(60), &[]);
        assert_eq!(full.due_blocks(unix_seconds(), 9), [block(1)]);
        full.set_rules(quota(0), &[]);
        assert_eq!(full.due_blocks(unix_seconds(), 9), [block(1), block(2)]);
    }

    #[test]
    fn a_block_that_is_being_written_is_told_to_go_by_nobody() {
        let full = classes(quota(100));
        assert_eq!(full.admit(block(1), 1, 100, 0, 0), ClassAdmission::Admitted);
        assert_eq!(full.admit(block(2), 1, 50, 0, 0), ClassAdmission::Full);
        full.set_rules(quota(10), &[]);
        assert!(full.due_blocks(unix_seconds(), 9).is_empty());
        full.mark_stored(&block(1));
        assert_eq!(full.due_blocks(unix_seconds(), 9), [block(1)]);
    }

    #[test]
    fn blocks_whose_time_is_up_are_due_the_oldest_first() {
        let ttl = BlockClass { ttl: Some(Duration::from_secs(100)), ..BlockClass::default() };
        let timed = classes(BTreeMap::from([(1, ttl), (2, BlockClass::default())]));
        // As in a log that was rewritten: in no order.
        for (n, class, came) in [(1, 1, 50), (2, 2, 0), (3, 1, 10), (4, 1, 30)] {
            timed.restore_block(block(n), class, came, 10, 0);
        }
        assert!(timed.due_blocks(109, 9).is_empty());
        assert_eq!(timed.due_blocks(110, 9), [block(3)]);
        assert_eq!(timed.due_blocks(150, 9), [block(3), block(4), block(1)]);
        assert_eq!(timed.due_blocks(150, 1), [block(3)]);
        assert!(!timed.is_pinned(&block(1)), "the rules are known");
        let starting = ClassTable::new(Arc::default());
        starting.restore_block(block(1), 7, 0, 10, 0);
        assert!(starting.is_pinned(&block(1)) && !starting.is_pinned(&block(2)), "they are not yet");
        timed.forget_block(&block(1));
        timed.restore_block(block(3), UNCLASSIFIED, 0, 10, 0);
        timed.restore_block(block(4), 2, 0, 10, 0);
        assert!(timed.due_blocks(u32::MAX, 9).is_empty() && timed.used_bytes(1) == 0 && timed.used_bytes(2) == 20);
    }

    proptest::proptest! {
        #[test]
        fn the_books_agree_with_what_is_here(
            ops in proptest::collection::vec((0u8..6, 0u32..8, 1u64..4, 1u64..40, 0u8..2), 1..200),
        ) {
            let rule = |pinned, quota_bytes| BlockClass { pinned, ttl: None, quota_bytes };
            let rules = BTreeMap::from([(1, rule(true, None)), (2, rule(false, Some(60))), (3, rule(true, Some(90)))]);
            let classes = classes(rules.clone());
            for (op, n, class, bytes, disk) in ops {
                match op {
                    0..=2 => while let ClassAdmission::EvictFirst(other) = classes.admit(block(n), class, bytes, disk, 100) {
                        proptest::prop_assert!(other != block(n));
                        classes.forget_block(&other);
                    },
                    3 => classes.mark_stored(&block(n)),
                    4 => classes.forget_block(&block(n)),
                    _ => {
                        classes.set_rules(rules.clone(), &[100, 100]);
                    }
                }
                let inner = classes.inner.lock();
                let sum = |of: &dyn Fn(&ClassedBlock) -> bool| inner.blocks.values().filter(|p| of(p)).map(|p| p.bytes).sum::<u64>();
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
                proptest::prop_assert_eq!(inner.order.len(), inner.blocks.values().filter(|p| p.stored).count());
            }
        }
    }
}
