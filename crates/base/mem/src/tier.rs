//! Blocks held in memory: each filled once for all readers, readable up to its fill mark, and evicted in an order that a scan
//! can't spoil (S3-FIFO). Does not know how blocks are filled.

use crate::pool::{BufferPool, PoolBuf};
use crate::queues::{EvictionQueues, QueuedBlock};
use parking_lot::{Condvar, Mutex};
use spurline_types::id_hash::BuildObjectHasher;
use spurline_types::{BlockId, ByteSink, Error, ErrorKind, Result};
use std::collections::HashMap;
use std::ops::{Deref, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicUsize, Ordering};
use std::time::Instant;

/// Uses within this many milliseconds of each other count once: a sequential reader touches a block several times in a row, and
/// that must not make the block look popular.
const CORRELATED_MS: u32 = 500;
/// This long after the last counted use the next one counts, however short the pauses between uses: such a long run means several
/// readers, or a reader that returns. Equal to the disk policy's correlation time.
const SUSTAINED_MS: u32 = 4000;
const TIER_SHARDS: usize = 16;

/// A block in memory, being filled or complete.
pub struct MemBlock {
    pub(crate) buf: PoolBuf,
    /// Distinguishes the block in the queues from other blocks of the same id.
    pub(crate) stamp: u32,
    /// Where the fill has begun; set before the first byte. From the end of the block a fill goes on at its start.
    begin: AtomicUsize,
    /// Number of filled bytes.
    filled: AtomicUsize,
    status: Mutex<FillStatus>,
    changed: Condvar,
    /// Counted uses, at most 3.
    pub(crate) uses: AtomicU8,
    last_use: AtomicU32,
    /// Time of the last counted use, or of the block's arrival.
    last_counted: AtomicU32,
}

#[derive(Clone)]
enum FillStatus {
    Filling,
    Ready,
    Failed(Error),
}

impl MemBlock {
    /// Waits until `range` is filled, and pins the bytes.
    ///
    /// # Errors
    /// The fill's own error, `Timeout` when `deadline` passes first, `Invalid` past the block's end.
    pub fn wait_range(self: &Arc<Self>, range: Range<usize>, deadline: Instant) -> Result<BlockSlice> {
        if range.end > self.buf.len() || range.start > range.end {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!("bytes {}..{} of a block of {}", range.start, range.end, self.buf.len()),
            ));
        }
        if !self.is_filled(&range) {
            let mut status = self.status.lock();
            loop {
                if self.is_filled(&range) {
                    break;
                }
                if let FillStatus::Failed(error) = &*status {
                    return Err(error.clone());
                }
                if self.changed.wait_until(&mut status, deadline).timed_out() {
                    return Err(Error::new(
                        ErrorKind::Timeout,
                        "a block was not filled in time: its source is slow or stalled",
                    ));
                }
            }
        }
        Ok(BlockSlice { block: Arc::clone(self), range })
    }

    /// The block's length in bytes.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.buf.len()
    }

    /// Whether all bytes are filled.
    pub fn is_ready(&self) -> bool {
        self.filled.load(Ordering::Acquire) == self.buf.len()
    }

    /// Whether these bytes are filled, so that a reader of these does not wait.
    pub fn is_filled(&self, range: &Range<usize>) -> bool {
        // In this order: `begin` is set before the first byte is filled.
        let filled = self.filled.load(Ordering::Acquire);
        let begin = self.begin.load(Ordering::Relaxed);
        let reached = begin + filled;
        range.end <= reached.saturating_sub(self.buf.len())
            || (range.start >= begin && range.end <= reached.min(self.buf.len()))
            || filled == self.buf.len()
    }

    /// Notes a use at `now` milliseconds; returns whether the use was counted.
    fn touch(&self, now: u32) -> bool {
        // The later of two readers may get here first: signed, or the other's time would seem ages later.
        let since = |then: u32| now.wrapping_sub(then) as i32;
        let last = self.last_use.swap(now, Ordering::Relaxed);
        let counted = self.last_counted.load(Ordering::Relaxed);
        if since(last) < CORRELATED_MS as i32 && since(counted) < SUSTAINED_MS as i32 {
            return false;
        }
        // Only the first of concurrent uses counts.
        if self.last_counted.compare_exchange(counted, now, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return false;
        }
        let uses = self.uses.load(Ordering::Relaxed);
        if uses < 3 {
            self.uses.store(uses + 1, Ordering::Relaxed);
        }
        true
    }
}

/// Filled bytes of a block, which do not change as long as the slice exists.
#[derive(Clone)]
pub struct BlockSlice {
    block: Arc<MemBlock>,
    range: Range<usize>,
}

impl BlockSlice {
    /// A complete buffer that belongs to no tier, as a slice.
    pub fn from_buf(buf: PoolBuf) -> BlockSlice {
        let len = buf.len();
        let block = MemBlock {
            buf,
            stamp: 0,
            begin: AtomicUsize::new(0),
            filled: AtomicUsize::new(len),
            status: Mutex::new(FillStatus::Ready),
            changed: Condvar::new(),
            uses: AtomicU8::new(0),
            last_use: AtomicU32::new(0),
            last_counted: AtomicU32::new(0),
        };
        BlockSlice { block: Arc::new(block), range: 0..len }
    }

    /// A part of this slice.
    ///
    /// # Panics
    /// When `part` reaches past the end.
    pub fn subslice(&self, part: Range<usize>) -> BlockSlice {
        assert!(part.start <= part.end && part.end <= self.range.len(), "a subslice lies inside its slice");
        BlockSlice { block: Arc::clone(&self.block), range: self.range.start + part.start..self.range.start + part.end }
    }
}

impl Deref for BlockSlice {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: a slice is made only of filled bytes; such bytes are never written again (`BlockFill::spare` gives out only
        // others), and `block` keeps the buffer alive.
        unsafe { std::slice::from_raw_parts(self.block.buf.as_ptr().add(self.range.start), self.range.len()) }
    }
}

/// The exclusive right and duty to fill a block. A drop before the end fails the block for all waiters.
pub struct BlockFill {
    block: Arc<MemBlock>,
    id: BlockId,
    tier: Arc<MemTier>,
    /// The bytes from where the fill began to the end are filled, and the bytes before are filled now.
    at_start: bool,
    done: bool,
}

impl BlockFill {
    /// Which block this is.
    pub fn id(&self) -> BlockId {
        self.id
    }

    /// The block being filled, to wait on.
    pub fn block(&self) -> Arc<MemBlock> {
        Arc::clone(&self.block)
    }

    /// Address of [`ByteSink::spare`] of a fill from the start of the block, and the capacity including the buffer's padding, which
    /// a device that writes whole sectors may fill too.
    pub fn spare_parts(&mut self) -> (*mut u8, usize) {
        debug_assert_eq!(self.block.begin.load(Ordering::Relaxed), 0, "only sinks take the rest in two pieces");
        let filled = self.block.filled.load(Ordering::Relaxed);
        // SAFETY: the mark lies inside the buffer.
        (unsafe { self.block.buf.as_ptr().add(filled) }, self.block.buf.footprint() - filled)
    }

    /// Has the fill begin at this byte of the block: a reader waits for bytes from there. Returns where the fill begins: once bytes
    /// are filled, that does not change.
    pub fn begin_at(&mut self, at: usize) -> usize {
        if self.block.filled.load(Ordering::Relaxed) == 0 && at < self.block.buf.len() {
            self.block.begin.store(at, Ordering::Relaxed);
        }
        self.block.begin.load(Ordering::Relaxed)
    }

    /// Goes on at the start of the block, once the bytes from where the fill began are filled; false when no bytes are left there.
    pub fn go_to_start(&mut self) -> bool {
        let filled = self.block.filled.load(Ordering::Relaxed);
        let reached = self.block.begin.load(Ordering::Relaxed) + filled;
        self.at_start = filled < self.block.buf.len() && reached >= self.block.buf.len();
        self.at_start
    }

    /// Where [`ByteSink::spare`] begins and ends in the block.
    fn spare_range(&self) -> Range<usize> {
        let begin = self.block.begin.load(Ordering::Relaxed);
        let reached = begin + self.block.filled.load(Ordering::Relaxed);
        let len = self.block.buf.len();
        if self.at_start { reached - len..begin } else { reached.min(len)..len }
    }

    /// Ends an unfinished fill with an error that every waiting reader gets; the block is removed, so the next reader
    /// tries anew.
    pub fn fail(mut self, error: Error) {
        self.end_with(error);
    }

    /// The whole block, pinned, once filled.
    pub fn finished(&self) -> Option<BlockSlice> {
        self.block.is_ready().then(|| BlockSlice { range: 0..self.block.len(), block: Arc::clone(&self.block) })
    }

    fn end_with(&mut self, error: Error) {
        if !std::mem::replace(&mut self.done, true) {
            self.tier.forget_block(&self.id, &self.block);
            *self.block.status.lock() = FillStatus::Failed(error);
            self.block.changed.notify_all();
        }
    }
}

impl ByteSink for BlockFill {
    /// From the fill mark to the block's end; after [`BlockFill::go_to_start`], to where the fill began.
    fn spare(&mut self) -> &mut [u8] {
        let range = self.spare_range();
        // SAFETY: the range lies inside the buffer. Readers see only filled bytes; this is the only writer of others, for as
        // long as the borrow of `self` lasts.
        unsafe { std::slice::from_raw_parts_mut(self.block.buf.as_ptr().add(range.start), range.len()) }
    }

    /// Readers may see the committed bytes at once.
    fn commit(&mut self, n: usize) {
        let filled = self.block.filled.load(Ordering::Relaxed);
        let mark = (filled + n).min(self.block.buf.len());
        let mut status = self.block.status.lock();
        self.block.filled.store(mark, Ordering::Release);
        if mark == self.block.buf.len() {
            *status = FillStatus::Ready;
            self.done = true;
        }
        drop(status);
        self.block.changed.notify_all();
    }
}

impl Drop for BlockFill {
    fn drop(&mut self) {
        self.end_with(Error::new(ErrorKind::Unavailable, "the fill of a block was abandoned"));
    }
}

/// The result of [`MemTier::find_or_fill`].
pub enum TierLookup {
    /// The block is present or being filled: wait for the bytes.
    Here(Arc<MemBlock>),
    /// The block is absent: the caller fills the block.
    Vacant(BlockFill),
}

pub(crate) type BlockTable = HashMap<BlockId, Arc<MemBlock>, BuildObjectHasher>;

/// The blocks in memory, over a pool.
pub struct MemTier {
    pool: Arc<BufferPool>,
    shards: [Mutex<BlockTable>; TIER_SHARDS],
    /// The blocks in each stretch of the arena as long as the largest buffer; locked under a shard.
    pub(crate) stretches: Box<[Mutex<Vec<BlockId>>]>,
    /// Pages of such a stretch.
    pub(crate) stretch: u32,
    /// Locked before shards.
    pub(crate) queues: Mutex<EvictionQueues>,
    /// Number of blocks that ever came.
    pub(crate) stamps: AtomicU32,
    held: AtomicUsize,
    start: Instant,
}

impl MemTier {
    /// An empty tier over `pool`, which becomes the pool's holder of releasable buffers.
    pub fn new(pool: Arc<BufferPool>) -> Arc<MemTier> {
        let stretch = pool.largest_pages();
        let tier = Arc::new(MemTier {
            stretches: (0..pool.pages().div_ceil(stretch as usize)).map(|_| Mutex::default()).collect(),
            stretch,
            stamps: AtomicU32::new(0),
            pool,
            shards: std::array::from_fn(|_| Mutex::default()),
            queues: Mutex::default(),
            held: AtomicUsize::new(0),
            start: Instant::now(),
        });
        let weak: std::sync::Weak<MemTier> = Arc::downgrade(&tier);
        tier.pool.set_reclaimer(weak);
        tier
    }

    /// The pool the blocks live in.
    pub fn pool(&self) -> &Arc<BufferPool> {
        &self.pool
    }

    /// Bytes of the budget that blocks take.
    pub fn held_bytes(&self) -> u64 {
        self.held.load(Ordering::Relaxed) as u64
    }

    /// The block if present or being filled, without counting a use.
    pub fn peek(&self, id: &BlockId) -> Option<Arc<MemBlock>> {
        self.shard_of(id).lock().get(id).cloned()
    }

    /// The block if present or being filled. Allocates nothing.
    pub fn find(&self, id: &BlockId) -> Option<Arc<MemBlock>> {
        self.find_used(id).map(|(block, _)| block)
    }

    /// As [`MemTier::find`]; also returns whether the use was counted, and not taken for part of a run of reads.
    pub fn find_used(&self, id: &BlockId) -> Option<(Arc<MemBlock>, bool)> {
        let block = self.shard_of(id).lock().get(id).cloned()?;
        let counts = block.touch(self.now_ms());
        Some((block, counts))
    }

    /// The block, or the duty to fill `len` bytes; waits for memory until `deadline`.
    ///
    /// # Errors
    /// `NoMemory` when the budget stays full.
    pub fn find_or_fill(self: &Arc<Self>, id: BlockId, len: usize, deadline: Instant) -> Result<TierLookup> {
        if let Some(block) = self.find(&id) {
            return Ok(TierLookup::Here(block));
        }
        let buf = self.pool.alloc(len.max(1), deadline)?;
        Ok(self.insert_block(id, buf, len))
    }

    /// The duty to fill the block, if the block is absent and memory is free or can be freed now.
    pub fn try_fill(self: &Arc<Self>, id: BlockId, len: usize) -> Option<BlockFill> {
        if self.shard_of(&id).lock().contains_key(&id) {
            return None;
        }
        let buf = self.pool.try_alloc(len.max(1))?;
        match self.insert_block(id, buf, len) {
            TierLookup::Vacant(fill) => Some(fill),
            TierLookup::Here(_) => None,
        }
    }

    fn insert_block(self: &Arc<Self>, id: BlockId, buf: PoolBuf, len: usize) -> TierLookup {
        debug_assert!(buf.len() >= len);
        let footprint = buf.footprint();
        let now = self.now_ms();
        let stamp = self.stamps.fetch_add(1, Ordering::Relaxed);
        let name = QueuedBlock::new(id, stamp, buf.pages().len() as u32);
        let block = Arc::new(MemBlock {
            buf,
            stamp,
            begin: AtomicUsize::new(0),
            filled: AtomicUsize::new(0),
            status: Mutex::new(FillStatus::Filling),
            changed: Condvar::new(),
            uses: AtomicU8::new(0),
            last_use: AtomicU32::new(now),
            last_counted: AtomicU32::new(now),
        });
        {
            let mut shard = self.shard_of(&id).lock();
            if let Some(there) = shard.get(&id) {
                return TierLookup::Here(Arc::clone(there));
            }
            self.stretch_blocks(&block).lock().push(id);
            shard.insert(id, Arc::clone(&block));
        }
        self.held.fetch_add(footprint, Ordering::Relaxed);
        let mut queues = self.queues.lock();
        queues.push_new(name);
        // Blocks evicted out of order leave names behind; sweep before such names outnumber the blocks.
        if queues.len() > self.pool.pages() + 1024 {
            queues.retain_present(|name| {
                self.shard_of(&name.id()).lock().get(&name.id()).is_some_and(|b| b.stamp == name.stamp)
            });
        }
        drop(queues);
        TierLookup::Vacant(BlockFill { block, id, tier: Arc::clone(self), at_start: false, done: false })
    }

    /// Inserts a complete block of `len` bytes, the first of `buf`; `None`, without effect, when the block is present or being
    /// filled.
    pub fn insert_filled(self: &Arc<Self>, id: BlockId, buf: PoolBuf, len: usize) -> Option<BlockSlice> {
        let TierLookup::Vacant(mut fill) = self.insert_block(id, buf, len) else { return None };
        fill.commit(len);
        fill.finished()
    }

    /// Drops a block if complete and present; returns whether that was so. Readers' slices stay valid.
    pub fn remove(&self, id: &BlockId) -> bool {
        let found = self.shard_of(id).lock().get(id).cloned().filter(|block| block.is_ready());
        if let Some(block) = &found {
            self.forget_block(id, block);
        }
        found.is_some()
    }

    /// Drops the complete blocks that `wanted` chooses; returns the bytes of those that `counts` chooses, too.
    pub fn remove_where(&self, wanted: impl Fn(&BlockId) -> bool, counts: impl Fn(&BlockId) -> bool) -> u64 {
        let mut bytes = 0;
        for shard in &self.shards {
            let found: Vec<BlockId> = shard.lock().keys().filter(|id| wanted(id)).copied().collect();
            for id in found {
                let len = self.peek(&id).map_or(0, |block| block.len() as u64);
                let counted = counts(&id);
                if self.remove(&id) && counted {
                    bytes += len;
                }
            }
        }
        bytes
    }

    fn forget_block(&self, id: &BlockId, block: &Arc<MemBlock>) {
        let mut shard = self.shard_of(id).lock();
        if shard.get(id).is_some_and(|there| Arc::ptr_eq(there, block)) {
            self.remove_locked(&mut shard, id);
        }
    }

    pub(crate) fn shard_of(&self, id: &BlockId) -> &Mutex<BlockTable> {
        let hash = (id.object.0 as u64) ^ ((id.object.0 >> 64) as u64) ^ u64::from(id.index).wrapping_mul(0x9e37_79b9);
        &self.shards[(hash % TIER_SHARDS as u64) as usize]
    }

    fn now_ms(&self) -> u32 {
        self.start.elapsed().as_millis() as u32
    }

    /// Removes a block from the locked shard, and from the count.
    pub(crate) fn remove_locked(&self, shard: &mut BlockTable, id: &BlockId) -> Option<Arc<MemBlock>> {
        let block = shard.remove(id)?;
        self.held.fetch_sub(block.buf.footprint(), Ordering::Relaxed);
        let mut beside = self.stretch_blocks(&block).lock();
        if let Some(at) = beside.iter().position(|there| there == id) {
            beside.swap_remove(at);
        }
        Some(block)
    }

    fn stretch_blocks(&self, block: &MemBlock) -> &Mutex<Vec<BlockId>> {
        &self.stretches[(block.buf.pages().start / self.stretch) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::BufferReclaim as _;
    use spurline_types::ObjectId;
    use std::time::Duration;

    fn id(n: u32) -> BlockId {
        BlockId { object: ObjectId(9), index: n }
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(5)
    }

    fn fill(tier: &Arc<MemTier>, n: u32, len: usize) {
        match tier.find_or_fill(id(n), len, soon()).unwrap() {
            TierLookup::Vacant(mut f) => {
                f.spare().fill(n as u8);
                f.commit(len);
            }
            TierLookup::Here(_) => panic!("block {n} was here already"),
        }
    }

    #[test]
    fn fills_under_way_do_not_hide_what_can_be_given_up() {
        let (tier, second) = (tier(24), tier(2));
        // Twenty that were used again, and four that are being filled: a sixth of all.
        for n in 0..20 {
            fill(&tier, n, 64 << 10);
            tier.peek(&id(n)).unwrap().uses.store(1, Ordering::Relaxed);
        }
        let held = |tier: &Arc<MemTier>| (0..20).filter(|n| tier.peek(&id(*n)).is_some()).count();
        let mut fills: Vec<BlockFill> = (100..104).map(|n| tier.try_fill(id(n), 64 << 10).unwrap()).collect();
        for n in 104..114 {
            fills.push(tier.try_fill(id(n), 64 << 10).expect("others can go for this one"));
        }
        assert_eq!(held(&tier), 10);
        // One that was used is passed by once, and goes before it is said that none can.
        for n in 0..2 {
            fill(&second, n, 64 << 10);
            second.peek(&id(n)).unwrap().uses.store(1, Ordering::Relaxed);
        }
        assert!(second.reclaim_buffer(64 << 10).is_some() && second.held_bytes() == 64 << 10);
        fill(&second, 2, 64 << 10);
        let (kept, other) = if second.peek(&id(0)).is_some() { (0, 2) } else { (1, 2) };
        second.peek(&id(other)).unwrap().uses.store(1, Ordering::Relaxed);
        let in_use = second.peek(&id(kept));
        assert!(second.reclaim_buffer(64 << 10).is_some(), "the other one is idle");
        drop(in_use);
        // The same the other way round: all that was used again is in use, what is new is not.
        let used: Vec<_> = (0..20).filter_map(|n| tier.peek(&id(n))).collect();
        fills.truncate(4);
        for n in 200..210 {
            fills.push(tier.try_fill(id(n), 64 << 10).expect("what failed has left its room"));
        }
        assert!(tier.try_fill(id(300), 64 << 10).is_none(), "all are in use");
        drop(used);
        assert!(tier.try_fill(id(300), 64 << 10).is_some());
    }

    fn tier(blocks: usize) -> Arc<MemTier> {
        MemTier::new(BufferPool::new((blocks * (64 << 10)) as u64, 64 << 10).unwrap())
    }

    #[test]
    fn one_fill_for_many_readers_and_bytes_before_the_end() {
        let tier = tier(4);
        let TierLookup::Vacant(mut f) = tier.find_or_fill(id(1), 40_000, soon()).unwrap() else { panic!() };
        let readers: Vec<_> = (0..8)
            .map(|_| {
                let TierLookup::Here(block) = tier.find_or_fill(id(1), 40_000, soon()).unwrap() else { panic!() };
                std::thread::spawn(move || block.wait_range(10..20, soon()).map(|s| s.to_vec()))
            })
            .collect();
        f.spare()[..1000].fill(5);
        f.commit(1000);
        for reader in readers {
            assert_eq!(reader.join().unwrap().unwrap(), vec![5; 10]);
        }
        assert!(f.finished().is_none());
        let rest = f.spare().len();
        f.spare().fill(6);
        f.commit(rest);
        assert_eq!(f.finished().unwrap()[39_999], 6);
    }

    #[test]
    fn a_fill_begins_where_a_reader_waits_and_goes_on_at_the_start() {
        let tier = tier(4);
        let mut f = tier.try_fill(id(1), 40_000).unwrap();
        let block = f.block();
        assert_eq!(f.begin_at(30_000), 30_000);
        assert!(f.spare().len() == 10_000 && f.spare_range() == (30_000..40_000));
        f.spare()[..4_000].fill(1);
        f.commit(4_000);
        assert_eq!(f.begin_at(0), 30_000);
        let here = |range: Range<usize>| block.is_filled(&range);
        assert!(here(30_000..34_000) && !here(30_000..34_001) && !here(29_999..30_001) && !here(0..1));
        f.spare().fill(1);
        f.commit(6_000);
        assert!(here(30_000..40_000) && !here(0..1) && f.spare().is_empty());
        assert!(f.go_to_start() && f.spare_range() == (0..30_000));
        f.spare()[..10_000].fill(2);
        f.commit(10_000);
        assert!(here(0..10_000) && !here(0..10_001) && !here(9_999..30_001) && here(30_000..40_000));
        assert!(!block.is_ready() && f.finished().is_none());
        f.spare().fill(3);
        f.commit(20_000);
        let whole = f.finished().unwrap();
        assert!(here(0..40_000) && f.spare().is_empty() && !f.go_to_start());
        assert_eq!([whole[9_999], whole[10_000], whole[29_999], whole[30_000]], [2, 3, 3, 1]);
    }

    #[test]
    fn a_failed_fill_reaches_the_waiting_and_is_forgotten() {
        let tier = tier(4);
        let TierLookup::Vacant(f) = tier.find_or_fill(id(1), 100, soon()).unwrap() else { panic!() };
        let TierLookup::Here(block) = tier.find_or_fill(id(1), 100, soon()).unwrap() else { panic!() };
        f.fail(Error::new(ErrorKind::Throttled, "slow down"));
        assert_eq!(block.wait_range(0..1, soon()).err().unwrap().kind(), ErrorKind::Throttled);
        assert!(matches!(tier.find_or_fill(id(1), 100, soon()).unwrap(), TierLookup::Vacant(_)));
        assert_eq!(tier.held_bytes(), 0, "the vacant fill was dropped at the end of the line above");
    }

    #[test]
    fn a_waiter_gives_up_at_its_deadline() {
        let tier = tier(4);
        let TierLookup::Vacant(_f) = tier.find_or_fill(id(1), 100, soon()).unwrap() else { panic!() };
        let TierLookup::Here(block) = tier.find_or_fill(id(1), 100, soon()).unwrap() else { panic!() };
        let error = block.wait_range(0..1, Instant::now() + Duration::from_millis(10)).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Timeout);
    }

    #[test]
    fn pinned_blocks_stay_and_others_make_room() {
        let tier = tier(4);
        fill(&tier, 0, 64 << 10);
        let pin = tier.find(&id(0)).unwrap().wait_range(0..100, soon()).unwrap();
        for n in 1..40 {
            fill(&tier, n, 64 << 10);
        }
        assert!(pin.iter().all(|b| *b == 0));
        assert!(tier.find(&id(0)).is_some());
        assert!(tier.held_bytes() <= 4 * (64 << 10));
    }

    #[test]
    fn a_scan_leaves_the_hot_set() {
        let tier = tier(32);
        for n in 0..16 {
            fill(&tier, n, 64 << 10);
        }
        std::thread::sleep(Duration::from_millis(u64::from(CORRELATED_MS) + 50));
        for n in 0..16 {
            tier.find(&id(n)).unwrap();
        }
        for n in 1000..1400 {
            fill(&tier, n, 64 << 10);
        }
        let left = (0..16).filter(|n| tier.find(&id(*n)).is_some()).count();
        assert!(left >= 14, "{left} of 16 hot blocks survived a scan of 12 times the memory");
    }

    #[test]
    fn what_is_always_read_counts_and_one_slow_pass_does_not() {
        let tier = tier(4);
        let came = |n: u32, at: u32| {
            fill(&tier, n, 64 << 10);
            let block = tier.peek(&id(n)).unwrap();
            block.last_use.store(at, Ordering::Relaxed);
            block.last_counted.store(at, Ordering::Relaxed);
            block
        };
        let touches = |block: &MemBlock, from: u32, apart: u32, times: u32| -> u32 {
            (1..=times).map(|n| u32::from(block.touch(from.wrapping_add(n * apart)))).sum()
        };
        let uses = |block: &MemBlock| block.uses.load(Ordering::Relaxed);
        // Ten seconds long without half a second's pause, also where the clock begins anew.
        for (n, from) in [(0, 7), (1, u32::MAX - 2000)] {
            let hot = came(n, from);
            assert_eq!((touches(&hot, from, 100, 100), uses(&hot)), (2, 2));
        }
        // Of 4 MiB in pieces of 128 KiB.
        let passed = came(2, 7);
        assert_eq!((touches(&passed, 7, 100, 32), uses(&passed)), (0, 0));
        assert!(passed.touch(7 + 3200 + CORRELATED_MS), "it is come back to");
        // A reader that looked at the clock before another one and comes here after it.
        assert!(!passed.touch(7 + 3200 + CORRELATED_MS - 1) && uses(&passed) == 1);
    }

    #[test]
    fn all_pinned_is_an_error_in_time_not_a_hang() {
        let tier = tier(2);
        fill(&tier, 0, 64 << 10);
        fill(&tier, 1, 64 << 10);
        let _a = tier.find(&id(0)).unwrap();
        let _b = tier.find(&id(1)).unwrap();
        let error = tier.find_or_fill(id(2), 64 << 10, Instant::now() + Duration::from_millis(30)).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::NoMemory);
    }
}
