//! Evicts blocks from memory for a buffer: the block next in order, or, where blocks are shorter than the buffer, all blocks in
//! an aligned stretch of the same length. No more is evicted than the buffer needs, unless a block is longer. The queues own the
//! order.

use crate::pool::{BufferPool, BufferReclaim, PoolBuf};
use crate::queues::{EvictionQueues, QueuedBlock};
use crate::tier::{MemBlock, MemTier};
use spurline_types::BlockId;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Number of blocks, too short for the buffer, whose neighbours are examined before any stretch is taken.
const SHORT_BLOCKS_TRIED: usize = 16;

/// The outcome of trying to evict the next block.
enum EvictionAttempt {
    /// Removed already.
    Gone,
    /// Used since the last time at the head of the queue.
    Used,
    InUse,
    /// Shorter than the buffer; the first page.
    Short(u32),
    Evicted(PoolBuf),
}

/// A stretch of the arena as long as the largest buffer.
#[derive(Default)]
struct ArenaStretch {
    /// For each page: whether the page is free or belongs to an unused block.
    evictable: Vec<bool>,
    blocks: Vec<BlockId>,
}

impl BufferReclaim for MemTier {
    fn reclaim_buffer(&self, len: usize) -> Option<PoolBuf> {
        let need = (BufferPool::footprint(len) / BufferPool::footprint(1)) as u32;
        if need > self.stretch {
            return None;
        }
        let mut queues = self.queues.lock();
        let mut stretch = ArenaStretch::default();
        // Each name is tried a bounded number of times, so a pool of pinned blocks ends the search.
        let mut tries = 2 * queues.len() + 1;
        // Blocks in use: a queue full of such blocks must be passed over, or a queue full of fills would hide the other.
        let mut small_passed = 0;
        let mut main_passed = 0;
        let mut short = 0;
        while tries > 0 && short < SHORT_BLOCKS_TRIED {
            tries -= 1;
            let try_small = small_passed < queues.small.len();
            let try_main = main_passed < queues.main.len();
            let of_small = try_small && (queues.small_is_due() || !try_main);
            let name = match (of_small, try_main) {
                (true, _) => queues.small.pop(),
                (false, true) => queues.main.pop(),
                (false, false) => None,
            };
            let Some(name) = name else { break };
            match self.try_evict(&name, len) {
                EvictionAttempt::Gone => continue,
                EvictionAttempt::Used => {
                    // The block can be evicted in the next round, which tries blocks in use once more.
                    main_passed = 0;
                    queues.main.push(name);
                    continue;
                }
                EvictionAttempt::Evicted(buf) => {
                    if of_small {
                        queues.remember_ghost(name.id());
                    }
                    return Some(buf.cut_to(len));
                }
                EvictionAttempt::Short(page) => {
                    short += 1;
                    let first = page / need * need;
                    self.survey_stretch(page / self.stretch, &mut stretch);
                    if stretch.all_evictable(first % self.stretch, need)
                        && let Some(buf) = self.clear_pages(first..first + need, len, &stretch, &mut queues)
                    {
                        return Some(buf);
                    }
                }
                EvictionAttempt::InUse => {}
            }
            if of_small {
                small_passed += 1;
                queues.small.push(name);
            } else {
                main_passed += 1;
                queues.main.push(name);
            }
        }
        if short == 0 {
            return None;
        }
        // Each of these has a neighbour in use. Any stretch that is evictable as a whole will do.
        let stretches = self.stretches.len() as u32;
        let from = self.stamps.load(Ordering::Relaxed);
        (0..stretches).map(|n| (from.wrapping_add(n)) % stretches).find_map(|number| {
            self.survey_stretch(number, &mut stretch);
            let first = (0..self.stretch).step_by(need as usize).find(|first| stretch.all_evictable(*first, need))?;
            let first = number * self.stretch + first;
            self.clear_pages(first..first + need, len, &stretch, &mut queues)
        })
    }
}

impl MemTier {
    /// Removes the next block if unused and long enough.
    fn try_evict(&self, name: &QueuedBlock, len: usize) -> EvictionAttempt {
        let id = name.id();
        let mut shard = self.shard_of(&id).lock();
        let Some(block) = shard.get(&id).filter(|block| block.stamp == name.stamp) else {
            return EvictionAttempt::Gone;
        };
        if block.uses.swap(0, Ordering::Relaxed) > 0 {
            return EvictionAttempt::Used;
        }
        if is_in_use(block) {
            return EvictionAttempt::InUse;
        }
        if (block.buf.footprint() as u64) < BufferPool::footprint(len) {
            return EvictionAttempt::Short(block.buf.pages().start);
        }
        self.remove_locked(&mut shard, &id)
            .and_then(Arc::into_inner)
            .map_or(EvictionAttempt::Gone, |block| EvictionAttempt::Evicted(block.buf))
    }

    /// Collects the free pages and the blocks of a stretch.
    fn survey_stretch(&self, number: u32, stretch: &mut ArenaStretch) {
        let ArenaStretch { evictable: can_go, blocks } = stretch;
        let first = number * self.stretch;
        can_go.clear();
        can_go.resize(self.stretch as usize, false);
        for (page, pages) in self.pool().free_in(first..first + self.stretch) {
            can_go[(page - first) as usize..][..pages as usize].fill(true);
        }
        blocks.clear();
        blocks.extend_from_slice(&self.stretches[number as usize].lock());
        for id in blocks.iter() {
            // A block of this id may be in another place by now.
            if let Some(block) = self.shard_of(id).lock().get(id)
                && !is_in_use(block)
                && (first..first + self.stretch).contains(&block.buf.pages().start)
            {
                let pages = block.buf.pages();
                can_go[(pages.start - first) as usize..][..pages.len()].fill(true);
            }
        }
    }

    /// Evicts all blocks in `pages` and joins the space with the free pages there to a single buffer; `None` when a block came
    /// into use meanwhile.
    fn clear_pages(
        &self,
        pages: Range<u32>,
        len: usize,
        stretch: &ArenaStretch,
        queues: &mut EvictionQueues,
    ) -> Option<PoolBuf> {
        // The free pages first, and nothing is returned to the pool on the way: other threads would take the space before the
        // last block is out.
        let mut parts = self.pool().take_free_in(pages.clone());
        for id in &stretch.blocks {
            let mut shard = self.shard_of(id).lock();
            let Some(block) = shard.get(id).filter(|block| pages.contains(&block.buf.pages().start)) else { continue };
            if is_in_use(block) {
                return None;
            }
            let block = self.remove_locked(&mut shard, id);
            drop(shard);
            parts.extend(block.and_then(Arc::into_inner).map(|block| block.buf));
            // Evicted out of order, after however many uses.
            queues.remember_ghost(*id);
        }
        PoolBuf::join_parts(parts, pages, len)
    }
}

impl ArenaStretch {
    fn all_evictable(&self, from: u32, pages: u32) -> bool {
        self.evictable[from as usize..][..pages as usize].iter().all(|can| *can)
    }
}

/// A reference belongs to the table; the others belong to readers, fillers or waiters.
fn is_in_use(block: &Arc<MemBlock>) -> bool {
    Arc::strong_count(block) > 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tier::{BlockSlice, TierLookup};
    use spurline_types::{ByteSink, ObjectId};
    use std::time::{Duration, Instant};

    const PAGE: usize = 16 << 10;
    const LARGE: usize = 1 << 20;

    fn id(n: u32) -> BlockId {
        BlockId { object: ObjectId(9), index: n }
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    fn fill(tier: &Arc<MemTier>, n: u32, len: usize) {
        let TierLookup::Vacant(mut fill) = tier.find_or_fill(id(n), len, soon()).unwrap() else {
            panic!("{n} is here")
        };
        fill.spare().fill(n as u8);
        fill.commit(len);
    }

    fn pin(tier: &Arc<MemTier>, n: u32) -> BlockSlice {
        tier.find(&id(n)).unwrap().wait_range(0..PAGE, soon()).unwrap()
    }

    fn held(tier: &Arc<MemTier>, blocks: Range<u32>) -> usize {
        blocks.filter(|n| tier.peek(&id(*n)).is_some()).count()
    }

    fn shuffled(seed: &mut u64, mut what: Vec<u32>) -> Vec<u32> {
        for i in (1..what.len()).rev() {
            *seed ^= *seed << 13;
            *seed ^= *seed >> 7;
            *seed ^= *seed << 17;
            what.swap(i, (*seed % (i as u64 + 1)) as usize);
        }
        what
    }

    /// A memory of `mib` MiB full of blocks of one page, those that follow on one another lying anywhere; the blocks.
    fn full_of_short_blocks(mib: usize, seed: u64) -> (Arc<MemTier>, Vec<u32>) {
        let tier = MemTier::new(BufferPool::new((mib << 20) as u64, LARGE).unwrap());
        let (mut seed, all) = (seed, (mib << 20) / PAGE);
        let first = shuffled(&mut seed, (0..all as u32).collect());
        first.iter().for_each(|n| fill(&tier, *n, PAGE));
        let mut first = shuffled(&mut seed, first);
        for n in first.drain(..all / 2) {
            assert!(tier.remove(&id(n)));
        }
        let second: Vec<u32> = (0..all as u32 / 2).map(|n| 1_000_000 + n).collect();
        second.iter().for_each(|n| fill(&tier, *n, PAGE));
        first.extend(second);
        assert_eq!((tier.pool().used_bytes(), tier.pool().limit_bytes()), (tier.held_bytes(), tier.held_bytes()));
        (tier, shuffled(&mut seed, first))
    }

    fn left(tier: &Arc<MemTier>, blocks: &[u32]) -> usize {
        blocks.iter().filter(|n| tier.peek(&id(**n)).is_some()).count()
    }

    #[test]
    fn a_large_buffer_costs_no_more_short_blocks_than_it_takes() {
        let (tier, blocks) = full_of_short_blocks(16, 7);
        let bufs: Vec<PoolBuf> = (0..4).map(|_| tier.pool().try_alloc(LARGE).expect("blocks can go for it")).collect();
        assert_eq!(left(&tier, &blocks), blocks.len() - 4 * LARGE / PAGE);
        // And what is shorter than the largest, beside readers.
        let pins: Vec<BlockSlice> =
            blocks.iter().filter(|n| tier.peek(&id(**n)).is_some()).take(40).map(|n| pin(&tier, *n)).collect();
        let before = left(&tier, &blocks);
        let part = tier.pool().try_alloc(LARGE / 4).expect("blocks can go for it");
        assert_eq!(left(&tier, &blocks), before - LARGE / 4 / PAGE);
        assert_eq!(tier.pool().used_bytes(), tier.pool().limit_bytes());
        drop((bufs, part, pins));
        assert_eq!(tier.pool().used_bytes(), tier.held_bytes());
    }

    #[test]
    fn a_large_buffer_is_had_wherever_one_stretch_can_go_and_else_nothing_goes() {
        for seed in 1..20 {
            let (tier, blocks) = full_of_short_blocks(8, seed);
            let start = tier.pool().arena().0 as usize;
            let stretch_of = |slice: &BlockSlice| (slice.as_ptr() as usize - start) / LARGE;
            // One reader in each stretch but one: far more than are looked at in turn are beside one.
            let mut pinned: [Option<BlockSlice>; 8] = Default::default();
            for n in &blocks {
                let slice = pin(&tier, *n);
                let at = stretch_of(&slice);
                pinned[at].get_or_insert(slice);
            }
            assert!(pinned.iter().all(Option::is_some));
            assert!(tier.pool().try_alloc(LARGE).is_none(), "something is in use everywhere");
            assert_eq!(left(&tier, &blocks), blocks.len(), "so nothing is evicted without effect");
            assert!(tier.pool().try_alloc(2 * LARGE).is_none() && left(&tier, &blocks) == blocks.len());
            let free = seed as usize % 8;
            pinned[free] = None;
            let buf = tier.pool().alloc(LARGE, Instant::now()).unwrap();
            assert_eq!(((buf.as_ptr() as usize - start) / LARGE, buf.len()), (free, LARGE));
            assert_eq!(left(&tier, &blocks), blocks.len() - LARGE / PAGE);
        }
    }

    /// Where short ones have neighbours in use, a long one is cut, and no other goes.
    #[test]
    fn a_buffer_of_middling_length_costs_one_long_block() {
        let tier = MemTier::new(BufferPool::new(8 * LARGE as u64, LARGE).unwrap());
        let short = (4 * LARGE / PAGE) as u32;
        let start = tier.pool().arena().0 as usize;
        let mut pins: std::collections::HashMap<usize, BlockSlice> = Default::default();
        for n in 0..short {
            fill(&tier, n, PAGE);
            let slice = pin(&tier, n);
            pins.entry((slice.as_ptr() as usize - start) / (LARGE / 4)).or_insert(slice);
        }
        (short..short + 4).for_each(|n| fill(&tier, n, LARGE));
        let buf = tier.pool().try_alloc(LARGE / 4).expect("a long one can go for it");
        assert_eq!((buf.len(), held(&tier, short..short + 4), held(&tier, 0..short)), (LARGE / 4, 3, short as usize));
    }

    #[test]
    fn a_scan_of_large_files_leaves_short_ones_that_are_hot() {
        let tier = MemTier::new(BufferPool::new(16 << 20, LARGE).unwrap());
        for n in 0..768 {
            fill(&tier, n, PAGE);
            tier.peek(&id(n)).unwrap().uses.store(1, Ordering::Relaxed);
        }
        for n in 1000..1400 {
            fill(&tier, n, LARGE);
        }
        let left = held(&tier, 0..768);
        assert!(left >= 600, "{left} of 768 hot blocks survived a scan of 25 times the memory");
    }

    #[test]
    fn a_block_that_came_back_does_not_go_for_its_old_name() {
        let tier = MemTier::new(BufferPool::new(2 * PAGE as u64, PAGE).unwrap());
        fill(&tier, 0, PAGE);
        assert!(tier.remove(&id(0)));
        for n in [1, 0, 2] {
            fill(&tier, n, PAGE);
        }
        assert_eq!([0, 1, 2].map(|n| tier.peek(&id(n)).is_some()), [true, false, true]);
    }

    #[test]
    fn short_and_large_ones_at_one_time_keep_out_of_each_others_memory() {
        let tier = MemTier::new(BufferPool::new(8 << 20, LARGE).unwrap());
        std::thread::scope(|scope| {
            for thread in 0..4u32 {
                let tier = &tier;
                scope.spawn(move || {
                    for n in 0..300u32 {
                        let (n, len) = (thread << 20 | n, if thread == 0 { LARGE } else { PAGE << (n % 3) });
                        fill(tier, n, len);
                        if thread == 1 && n % 8 == 0 {
                            let mut buf = tier.pool().alloc(LARGE, soon()).unwrap();
                            buf.fill(0xee);
                            std::thread::yield_now();
                            assert!(buf.iter().step_by(512).all(|b| *b == 0xee));
                        }
                        for m in n.saturating_sub(20)..=n {
                            let Some(block) = tier.find(&id(m)) else { continue };
                            let bytes = block.wait_range(0..block.len(), soon()).unwrap();
                            assert!(bytes.iter().step_by(512).all(|b| *b == m as u8), "block {m}");
                        }
                    }
                });
            }
        });
        assert_eq!(tier.pool().used_bytes(), tier.held_bytes());
    }
}
