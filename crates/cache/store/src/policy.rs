//! Chooses the next block to evict: S3-FIFO (Yang et al., SOSP 2023), three FIFO queues instead of an LRU list. New blocks pass
//! through a small queue, and are evicted from there without a further use, so a pass over a large dataset evicts only blocks of
//! that dataset. Knows nothing of blocks, disks or clocks: slots are numbers, weights are given, time is passed in.
//!
//! Three things differ from the paper. Uses closer together than [`CORRELATED`] ticks count once, since a pass reads a block of 4
//! MiB in several requests. A block that arrives while there is room goes to the main queue at once: when passes over a dataset
//! larger than the cache are repeated (training epochs), that first part stays and is hit in every pass, where FIFO, LRU and the
//! paper's rule hit nothing at all. And slots can be restored straight into the main queue when an index is replayed.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// Uses of a slot within this many ticks (seconds, in the store) count once.
pub const CORRELATED: u32 = 4;
/// The small queue's target share of the weight, in percent: the paper's value.
const SMALL_PERCENT: u64 = 10;
/// Ticks before a main queue full of pins is searched again: such a cache requests a victim for each arriving block.
const BARREN_TICKS: u32 = 2;
/// Maximum count of uses.
const MAX_USES: u32 = 3;
const NO_SLOT: u32 = u32::MAX;
const SEGMENT_SLOTS: usize = 1 << 12;
/// Maximum number of slots is this times [`SEGMENT_SLOTS`]: 64 million blocks on a disk (256 TiB of 4 MiB blocks), for 256 KiB of
/// pointers.
const MAX_SEGMENTS: usize = 1 << 14;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum QueueKind {
    Free,
    Small,
    Main,
}

/// A slot; the caller finds the entry by the key.
#[derive(Clone, Copy)]
struct SlotNode<K> {
    key: K,
    next: u32,
    prev: u32,
    weight: u32,
    queue: QueueKind,
}

#[derive(Clone, Copy)]
struct SlotList {
    head: u32,
    tail: u32,
    weight: u64,
    len: usize,
}

const EMPTY_LIST: SlotList = SlotList { head: NO_SLOT, tail: NO_SLOT, weight: 0, len: 0 };

struct SlotQueues<K> {
    nodes: Vec<SlotNode<K>>,
    free: Vec<u32>,
    small: SlotList,
    main: SlotList,
    /// Fingerprints of slots evicted from the small queue, each with the number of the departure.
    ghost: HashMap<u32, u64>,
    ghost_order: std::collections::VecDeque<u32>,
    departures: u64,
    /// Weight when a victim was last requested: below nine tenths of this weight there is room. 0 before the first.
    full_weight: u64,
    /// When all of the main queue was found pinned. Until [`BARREN_TICKS`] have passed, the queue is not searched again, and only
    /// pins enter.
    barren: Option<u32>,
}

/// The order of eviction of up to 64 million slots. `touch` takes no lock.
pub struct S3Fifo<K> {
    queues: Mutex<SlotQueues<K>>,
    /// Per slot: time of the last counted use (upper 30 bits) and uses (lower 2 bits).
    uses: Box<[OnceLock<Box<[AtomicU32; SEGMENT_SLOTS]>>]>,
}

impl<K: Copy> Default for S3Fifo<K> {
    fn default() -> Self {
        S3Fifo {
            queues: Mutex::new(SlotQueues {
                nodes: Vec::new(),
                free: Vec::new(),
                small: EMPTY_LIST,
                main: EMPTY_LIST,
                ghost: HashMap::new(),
                ghost_order: std::collections::VecDeque::new(),
                departures: 0,
                full_weight: 0,
                barren: None,
            }),
            uses: (0..MAX_SEGMENTS).map(|_| OnceLock::new()).collect(),
        }
    }
}

impl<K> SlotQueues<K> {
    fn list_mut(&mut self, queue: QueueKind) -> &mut SlotList {
        if queue == QueueKind::Small { &mut self.small } else { &mut self.main }
    }

    fn push(&mut self, queue: QueueKind, slot: u32) {
        let weight = u64::from(self.nodes[slot as usize].weight);
        let list = self.list_mut(queue);
        let tail = list.tail;
        list.tail = slot;
        list.weight += weight;
        list.len += 1;
        if tail == NO_SLOT {
            list.head = slot;
        } else {
            self.nodes[tail as usize].next = slot;
        }
        let node = &mut self.nodes[slot as usize];
        node.prev = tail;
        node.next = NO_SLOT;
        node.queue = queue;
    }

    fn unlink(&mut self, slot: u32) {
        let SlotNode { next, prev, weight, queue, .. } = self.nodes[slot as usize];
        if prev != NO_SLOT {
            self.nodes[prev as usize].next = next;
        }
        if next != NO_SLOT {
            self.nodes[next as usize].prev = prev;
        }
        let list = self.list_mut(queue);
        if prev == NO_SLOT {
            list.head = next;
        }
        if next == NO_SLOT {
            list.tail = prev;
        }
        list.weight -= u64::from(weight);
        list.len -= 1;
    }

    fn remember_ghost(&mut self, fingerprint: u32) {
        self.departures += 1;
        self.ghost.insert(fingerprint, self.departures);
        self.ghost_order.push_back(fingerprint);
        // As many ghosts as slots in use, as in the paper; at least 64.
        let keep = (self.small.len + self.main.len).max(64);
        while self.ghost_order.len() > keep {
            let Some(oldest) = self.ghost_order.pop_front() else { break };
            let number = self.departures - self.ghost_order.len() as u64;
            if self.ghost.get(&oldest).is_some_and(|&n| n <= number) {
                self.ghost.remove(&oldest);
            }
        }
    }
}

impl<K: Copy> S3Fifo<K> {
    fn use_cell(&self, slot: u32) -> &AtomicU32 {
        let segment = self.uses[slot as usize / SEGMENT_SLOTS]
            .get_or_init(|| Box::new([const { AtomicU32::new(0) }; SEGMENT_SLOTS]));
        &segment[slot as usize % SEGMENT_SLOTS]
    }

    /// Adds a new slot. Returns the number, and whether the slot went straight to the main queue, as a key does that left the
    /// small queue not long ago. `None` when all slots are in use. `fingerprint` is any hash of the key.
    pub fn insert(&self, key: K, fingerprint: u32, weight: u32, now: u32) -> Option<(u32, bool)> {
        self.add_slot(key, Some(fingerprint), weight, now, false)
    }

    /// Adds a slot from a replayed index, to the main queue if that was the place before.
    pub fn restore(&self, key: K, weight: u32, main: bool) -> Option<u32> {
        self.add_slot(key, None, weight, 0, main).map(|(slot, _)| slot)
    }

    /// Moves a slot to the main queue, as a replayed index says.
    pub fn promote(&self, slot: u32) {
        let mut q = self.queues.lock();
        if q.nodes.get(slot as usize).is_some_and(|n| n.queue == QueueKind::Small) {
            q.unlink(slot);
            q.push(QueueKind::Main, slot);
        }
    }

    /// Pins may have changed: the main queue is searched again.
    pub fn clear_barren(&self) {
        self.queues.lock().barren = None;
    }

    fn add_slot(&self, key: K, fingerprint: Option<u32>, weight: u32, now: u32, main: bool) -> Option<(u32, bool)> {
        let mut q = self.queues.lock();
        let known = fingerprint.is_some_and(|f| q.ghost.remove(&f).is_some());
        let node = SlotNode { key, next: NO_SLOT, prev: NO_SLOT, weight, queue: QueueKind::Free };
        let slot = match q.free.pop() {
            Some(slot) => {
                q.nodes[slot as usize] = node;
                slot
            }
            None => {
                if q.nodes.len() >= self.uses.len() * SEGMENT_SLOTS {
                    return None;
                }
                q.nodes.push(node);
                (q.nodes.len() - 1) as u32
            }
        };
        self.use_cell(slot).store(now << 2, Ordering::Relaxed);
        let total = q.small.weight + q.main.weight + u64::from(weight);
        let room = fingerprint.is_some() && (q.full_weight == 0 || total * 10 <= q.full_weight * 9);
        let main = (known || main || room) && q.barren.is_none();
        q.push(if main { QueueKind::Main } else { QueueKind::Small }, slot);
        Some((slot, main))
    }

    /// Notes a use of `slot` at time `now` (any monotonic tick of about a second).
    pub fn touch(&self, slot: u32, now: u32) {
        let cell = self.use_cell(slot);
        let seen = cell.load(Ordering::Relaxed);
        let last = seen >> 2;
        let uses = seen & MAX_USES;
        // A race between two readers loses a count, which is harmless.
        if (now & (u32::MAX >> 2)).wrapping_sub(last) >= CORRELATED {
            cell.store(now << 2 | (uses + 1).min(MAX_USES), Ordering::Relaxed);
        }
    }

    /// How many slots there are.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        let q = self.queues.lock();
        q.small.len + q.main.len
    }

    /// Whether there is no slot.
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Removes a slot.
    pub fn remove(&self, slot: u32) {
        let mut q = self.queues.lock();
        if q.nodes.get(slot as usize).is_none_or(|n| n.queue == QueueKind::Free) {
            return;
        }
        q.unlink(slot);
        q.nodes[slot as usize].queue = QueueKind::Free;
        q.free.push(slot);
    }

    /// Chooses the slot to evict; the caller calls [`S3Fifo::remove`] once the block is gone. `pinned` decides which slots can't
    /// be evicted; such slots and the returned slot move to the back of the main queue, so that two callers never choose the
    /// same. `promoted` is called with every slot that moves from the small to the main queue. `None` when all are pinned; that
    /// result is cached for [`BARREN_TICKS`] from `now`, unless [`S3Fifo::clear_barren`] is called. Amortised O(1): every step
    /// lowers a use count or ends.
    pub fn victim(
        &self,
        now: u32,
        fingerprint: impl Fn(&K) -> u32,
        mut pinned: impl FnMut(&K, u32) -> bool,
        mut promoted: impl FnMut(&K),
    ) -> Option<(K, u32)> {
        let mut q = self.queues.lock();
        // Consecutive pins of the main queue: as many as the queue's length means that all are pinned.
        let mut pins = 0;
        q.barren = q.barren.filter(|since| now.wrapping_sub(*since) < BARREN_TICKS);
        q.full_weight = q.small.weight + q.main.weight;
        while q.small.len + q.main.len > 0 {
            let total = q.small.weight + q.main.weight;
            if pins > 0 && pins >= q.main.len {
                q.barren.get_or_insert(now);
            }
            // Also when the main queue has nothing to evict.
            let due = q.small.weight * 100 >= total * SMALL_PERCENT || q.barren.is_some();
            let from_small = q.small.len > 0 && (q.main.len == 0 || due);
            if !from_small && q.barren.is_some() {
                return None;
            }
            let slot = if from_small { q.small.head } else { q.main.head };
            let key = q.nodes[slot as usize].key;
            let cell = self.use_cell(slot);
            let seen = cell.load(Ordering::Relaxed);
            let uses = seen & MAX_USES;
            q.unlink(slot);
            if uses > 0 && from_small && q.barren.is_some() {
                // Among the pins the slot would not be found again.
                q.push(QueueKind::Small, slot);
                cell.store(seen & !MAX_USES, Ordering::Relaxed);
                continue;
            }
            q.push(QueueKind::Main, slot);
            if uses > 0 {
                cell.store(if from_small { seen & !MAX_USES } else { seen - 1 }, Ordering::Relaxed);
                if from_small {
                    promoted(&key);
                }
                pins = 0;
                continue;
            }
            if pinned(&key, slot) {
                pins += usize::from(!from_small);
                continue;
            }
            if from_small {
                q.remember_ghost(fingerprint(&key));
            }
            return Some((key, slot));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn what_may_go_is_found_behind_a_main_queue_full_of_pins() {
        let policy = S3Fifo::<u32>::default();
        let insert = |key| policy.insert(key, key, 1, 0).unwrap();
        let _: Vec<_> = (0..40).map(insert).collect();
        assert_eq!(
            policy.victim(0, |key| *key, |_, _| true, |_| {}),
            None,
            "all are pinned, and in the main queue now"
        );
        let (slot, main) = insert(100);
        assert!(!main);
        assert_eq!(policy.victim(0, |key| *key, |key, _| *key < 40, |_| {}), Some((100, slot)));
    }

    #[test]
    fn more_than_there_can_be_are_refused() {
        let policy = S3Fifo::<u32> { uses: (0..1).map(|_| OnceLock::new()).collect(), ..S3Fifo::default() };
        let most = SEGMENT_SLOTS as u32;
        assert!((0..most).all(|key| policy.insert(key, key, 1, 0).is_some()));
        assert_eq!((policy.insert(most, most, 1, 0), policy.restore(most, 1, true)), (None, None));
        policy.remove(7);
        assert_eq!(policy.restore(most, 1, true), Some(7));
    }

    /// A cache of `capacity` equal blocks run by the policy; time moves by `CORRELATED` with each request,
    /// so every request counts.
    struct Model {
        policy: S3Fifo<u32>,
        slots: HashMap<u32, u32>,
        capacity: usize,
        now: u32,
    }

    impl Model {
        fn new(capacity: usize) -> Self {
            Model { policy: S3Fifo::default(), slots: HashMap::new(), capacity, now: 0 }
        }
        fn request(&mut self, key: u32) -> bool {
            self.now += CORRELATED;
            if let Some(&slot) = self.slots.get(&key) {
                self.policy.touch(slot, self.now);
                return true;
            }
            while self.slots.len() >= self.capacity {
                let (old, slot) = self.policy.victim(self.now, |k| *k, |_, _| false, |_| {}).unwrap();
                assert_eq!(self.slots.remove(&old), Some(slot));
                self.policy.remove(slot);
            }
            self.slots.insert(key, self.policy.insert(key, key, 1, self.now).unwrap().0);
            false
        }
    }

    fn random(state: &mut u64) -> u64 {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *state >> 33
    }

    #[test]
    fn a_scan_leaves_the_hot_set() {
        let mut cache = Model::new(1000);
        for _ in 0..5 {
            for k in 0..500 {
                cache.request(k);
            }
        }
        // A pass over ten times the cache, then the hot set again.
        for k in 10_000..20_000 {
            cache.request(k);
        }
        let hits = (0..500).filter(|k| cache.request(*k)).count();
        assert!(hits >= 450, "only {hits} of 500 hot blocks outlived a scan");
    }

    #[test]
    fn a_scan_mixed_with_use_leaves_the_hot_set() {
        let mut cache = Model::new(1000);
        let mut seed = 7;
        let (mut hits, mut asked) = (0, 0);
        for i in 0..100_000u32 {
            if i % 2 == 0 {
                let hot = (random(&mut seed) % 600) as u32;
                let hit = cache.request(hot);
                if i > 20_000 {
                    asked += 1;
                    hits += u32::from(hit);
                }
            } else {
                cache.request(1_000_000 + i);
            }
        }
        assert!(hits * 100 >= asked * 90, "{hits} of {asked}");
    }

    #[test]
    fn a_repeated_pass_over_too_much_still_hits_something() {
        // Every pass over twice the cache: LRU would hit nothing at all.
        let mut cache = Model::new(1000);
        let mut hits = 0;
        for pass in 0..20 {
            for k in 0..2000 {
                hits += u32::from(cache.request(k) && pass > 2);
            }
        }
        assert!(hits > 17 * 2000 * 4 / 10, "only {hits} of {} requests hit", 17 * 2000);
    }

    #[test]
    fn passes_over_a_little_too_much_hit_most() {
        for blocks in [1100u32, 1300, 1600, 4000] {
            let mut cache = Model::new(1000);
            let mut hits = 0;
            for pass in 0..20 {
                for k in 0..blocks {
                    hits += u32::from(cache.request(k) && pass >= 10);
                }
            }
            let best = 1000 * 10;
            assert!(hits * 100 > best * 50, "{hits} hits of {best} possible with {blocks} blocks");
        }
    }

    #[test]
    fn a_new_hot_set_takes_over() {
        let mut cache = Model::new(1000);
        for k in 0..1000 {
            cache.request(k);
        }
        let mut hits = 0;
        for round in 0..20 {
            for k in 5000..5500 {
                hits += u32::from(cache.request(k) && round >= 10);
            }
        }
        assert!(hits > 4500, "{hits} of 5000");
    }

    #[test]
    fn uses_close_together_count_once() {
        let policy = S3Fifo::<u32>::default();
        let a = policy.insert(1, 1, 1, 100).unwrap().0;
        let b = policy.insert(2, 2, 1, 100).unwrap().0;
        for _ in 0..8 {
            policy.touch(a, 101);
        }
        policy.touch(b, 100 + CORRELATED);
        assert_eq!(policy.victim(0, |k| *k, |_, _| false, |_| {}), Some((1, a)));
    }

    #[test]
    fn pins_are_never_chosen() {
        let policy = S3Fifo::<u32>::default();
        for k in 0..10 {
            policy.insert(k, k, 1, 0).unwrap();
        }
        for _ in 0..20 {
            let (key, slot) = policy.victim(0, |k| *k, |k, _| *k != 3, |_| {}).unwrap();
            assert_eq!((key, slot), (3, 3));
        }
        assert_eq!(policy.victim(0, |k| *k, |_, _| true, |_| {}), None);
        policy.remove(3);
        policy.remove(3);
        assert_eq!(policy.len(), 9);
        assert!(!policy.is_empty());
    }

    #[test]
    fn that_all_is_pinned_is_remembered_for_a_while() {
        const PINS: u32 = 1000;
        let policy = S3Fifo::<u32>::default();
        let _: Vec<_> = (0..PINS).map(|key| policy.insert(key, key, 1, 0).unwrap()).collect();
        (0..PINS / 2).for_each(|slot| policy.touch(slot, CORRELATED));
        let asked = |now| {
            let mut looks = 0;
            let pinned = |key: &u32, _| {
                looks += 1;
                *key < PINS
            };
            (policy.victim(now, |key| *key, pinned, |_| {}).map(|(key, _)| key), looks)
        };
        let (none, looks) = asked(10);
        assert!(none.is_none() && looks >= PINS);
        assert_eq!([asked(10), asked(10 + BARREN_TICKS - 1)], [(None, 0), (None, 0)]);
        // What comes meanwhile may go, also when it was used or is known from before, and is found at once.
        let slot = policy.insert(PINS, 7, 1, 10).unwrap().0;
        assert_eq!(asked(10), (Some(PINS), 1));
        policy.remove(slot);
        let (slot, main) = policy.insert(PINS + 1, 7, 1, 10).unwrap();
        policy.touch(slot, 10 + CORRELATED);
        assert_eq!((asked(11), main), ((Some(PINS + 1), 1), false));
        policy.remove(slot);
        assert_eq!(asked(11), (None, 0));
        let (none, looks) = asked(10 + BARREN_TICKS);
        assert!(none.is_none() && looks >= PINS, "after a while it is looked at again");
        policy.clear_barren();
        let (none, looks) = asked(10 + BARREN_TICKS);
        assert!(none.is_none() && looks >= PINS, "and when something is not pinned any more");
    }

    proptest::proptest! {
        #[test]
        fn never_loses_a_slot(ops in proptest::collection::vec((0u8..4, 0u32..50), 1..400)) {
            let policy = S3Fifo::<u32>::default();
            let mut live: HashMap<u32, u32> = HashMap::new();
            let mut now = 0;
            for (op, key) in ops {
                now += 1;
                match op {
                    0 => { live.entry(key).or_insert_with(|| policy.insert(key, key, key + 1, now).unwrap().0); }
                    1 => if let Some(&slot) = live.get(&key) { policy.touch(slot, now) },
                    2 => if let Some(slot) = live.remove(&key) { policy.remove(slot) },
                    _ => match policy.victim(now, |k| *k, |_, _| false, |_| {}) {
                        Some((key, slot)) => {
                            proptest::prop_assert_eq!(live.remove(&key), Some(slot));
                            policy.remove(slot);
                        }
                        None => proptest::prop_assert!(live.is_empty()),
                    },
                }
                proptest::prop_assert_eq!(policy.len(), live.len());
            }
        }
    }
}
