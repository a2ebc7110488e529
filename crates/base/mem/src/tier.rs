//! Blocks held in memory, each filled once however many want it, readable up to where it is filled,
//! and given up in an order that a scan can't spoil (S3-FIFO). Who fills them is not known here.

use crate::pool::{Buf, Pool};
use crate::queues::{IdHash, Name, Queues};
use parking_lot::{Condvar, Mutex};
use spurline_types::{BlockId, Error, ErrorKind, Result, Sink};
use std::collections::HashMap;
use std::ops::{Deref, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicUsize, Ordering};
use std::time::Instant;

/// Accesses within so many milliseconds of each other count as one: a sequential reader touches a block several
/// times in a row, and that must not make the block look popular.
const CORRELATED: u32 = 500;
/// After so long since the last use that counted the next one counts however soon after another it comes: so many in a row
/// are of more than one reader, or of one that comes back. As long as the disks' policy takes uses for one.
const SUSTAINED: u32 = 4000;
const SHARDS: usize = 16;

/// One block in memory, being filled or complete.
pub struct MemBlock {
    pub(crate) buf: Buf,
    /// Tells it from others of its name in the queues.
    pub(crate) stamp: u32,
    filled: AtomicUsize,
    status: Mutex<Status>,
    changed: Condvar,
    /// Uses that count, up to 3.
    pub(crate) uses: AtomicU8,
    last_use: AtomicU32,
    /// When a use counted last, or the block came.
    last_counted: AtomicU32,
}

#[derive(Clone)]
enum Status {
    Filling,
    Ready,
    Failed(Error),
}

impl MemBlock {
    /// Waits until `range` is there and pins it.
    ///
    /// # Errors
    /// The fill's own error, `Timeout` when `deadline` passes first, `Invalid` past the block's end.
    pub fn wait(self: &Arc<Self>, range: Range<usize>, deadline: Instant) -> Result<Slice> {
        if range.end > self.buf.len() || range.start > range.end {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!("bytes {}..{} of a block of {}", range.start, range.end, self.buf.len()),
            ));
        }
        if self.filled.load(Ordering::Acquire) < range.end {
            let mut status = self.status.lock();
            loop {
                if self.filled.load(Ordering::Acquire) >= range.end {
                    break;
                }
                if let Status::Failed(error) = &*status {
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
        Ok(Slice { block: Arc::clone(self), range })
    }

    /// The block's length in bytes.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.buf.len()
    }

    /// Whether all bytes are there.
    pub fn is_ready(&self) -> bool {
        self.filled.load(Ordering::Acquire) == self.buf.len()
    }

    /// Whether so many bytes from its beginning are there, so that nobody waits for them.
    pub fn has(&self, end: usize) -> bool {
        self.filled.load(Ordering::Acquire) >= end
    }

    /// Notes a use at `now` milliseconds; true when it counts as one of its own.
    fn touch(&self, now: u32) -> bool {
        // Of two readers the later one may come here first: signed, or the other would seem to come after ages.
        let since = |then: u32| now.wrapping_sub(then) as i32;
        let (last, counted) = (self.last_use.swap(now, Ordering::Relaxed), self.last_counted.load(Ordering::Relaxed));
        if since(last) < CORRELATED as i32 && since(counted) < SUSTAINED as i32 {
            return false;
        }
        // Of those that come at once one counts.
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

/// Filled bytes of a block; they stay as they are for as long as this lives.
#[derive(Clone)]
pub struct Slice {
    block: Arc<MemBlock>,
    range: Range<usize>,
}

impl Slice {
    /// A buffer that is whole and belongs to no tier, to be passed on like any other.
    pub fn owned(buf: Buf) -> Slice {
        let len = buf.len();
        let block = MemBlock {
            buf,
            stamp: 0,
            filled: AtomicUsize::new(len),
            status: Mutex::new(Status::Ready),
            changed: Condvar::new(),
            uses: AtomicU8::new(0),
            last_use: AtomicU32::new(0),
            last_counted: AtomicU32::new(0),
        };
        Slice { block: Arc::new(block), range: 0..len }
    }

    /// A part of this slice.
    ///
    /// # Panics
    /// When `part` reaches past the end.
    pub fn part(&self, part: Range<usize>) -> Slice {
        assert!(part.start <= part.end && part.end <= self.range.len(), "a part of a slice lies inside it");
        Slice { block: Arc::clone(&self.block), range: self.range.start + part.start..self.range.start + part.end }
    }
}

impl Deref for Slice {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: a slice is made only of bytes below the block's fill mark; those are never written again
        // (`Fill::spare` gives out only what is above it), and `block` keeps the buffer alive.
        unsafe { std::slice::from_raw_parts(self.block.buf.as_ptr().add(self.range.start), self.range.len()) }
    }
}

/// The right and the duty to fill one block. Dropping it unfinished fails the block for all who wait.
pub struct Fill {
    block: Arc<MemBlock>,
    id: BlockId,
    tier: Arc<Tier>,
    done: bool,
}

impl Fill {
    /// Which block this is.
    pub fn id(&self) -> BlockId {
        self.id
    }

    /// The block being filled, to wait on.
    pub fn block(&self) -> Arc<MemBlock> {
        Arc::clone(&self.block)
    }

    /// Address of [`Sink::spare`], and its capacity with the bytes that pad the buffer to its size in the arena,
    /// which a device that writes whole sectors may fill too.
    pub fn spare_parts(&mut self) -> (*mut u8, usize) {
        let filled = self.block.filled.load(Ordering::Relaxed);
        // SAFETY: the mark lies inside the buffer.
        (unsafe { self.block.buf.as_ptr().add(filled) }, self.block.buf.footprint() - filled)
    }

    /// Ends an unfinished fill with an error that every waiting reader gets; the block is forgotten, so the
    /// next reader tries anew.
    pub fn fail(mut self, error: Error) {
        self.end(error);
    }

    /// The whole block, pinned, once it is filled.
    pub fn finished(&self) -> Option<Slice> {
        self.block.is_ready().then(|| Slice { range: 0..self.block.len(), block: Arc::clone(&self.block) })
    }

    fn end(&mut self, error: Error) {
        if !std::mem::replace(&mut self.done, true) {
            self.tier.forget(&self.id, &self.block);
            *self.block.status.lock() = Status::Failed(error);
            self.block.changed.notify_all();
        }
    }
}

impl Sink for Fill {
    /// From the fill mark to the block's end.
    fn spare(&mut self) -> &mut [u8] {
        let filled = self.block.filled.load(Ordering::Relaxed);
        // SAFETY: readers see only bytes below the mark; this is the one writer above it, for as long as the
        // borrow of `self` lasts.
        unsafe { std::slice::from_raw_parts_mut(self.block.buf.as_ptr().add(filled), self.block.buf.len() - filled) }
    }

    /// Readers may see the committed bytes at once.
    fn commit(&mut self, n: usize) {
        let filled = self.block.filled.load(Ordering::Relaxed);
        let mark = (filled + n).min(self.block.buf.len());
        let mut status = self.block.status.lock();
        self.block.filled.store(mark, Ordering::Release);
        if mark == self.block.buf.len() {
            *status = Status::Ready;
            self.done = true;
        }
        drop(status);
        self.block.changed.notify_all();
    }
}

impl Drop for Fill {
    fn drop(&mut self) {
        self.end(Error::new(ErrorKind::Unavailable, "the fill of a block was given up"));
    }
}

/// What [`Tier::find_or_fill`] found.
pub enum Found {
    /// The block is here or on its way: wait for the bytes on it.
    Here(Arc<MemBlock>),
    /// Nobody has it: the caller fills it.
    Vacant(Fill),
}

pub(crate) type Map = HashMap<BlockId, Arc<MemBlock>, IdHash>;

/// The blocks in memory, over one pool.
pub struct Tier {
    pool: Arc<Pool>,
    shards: [Mutex<Map>; SHARDS],
    /// The blocks in each stretch of the arena of the largest buffer's length; locked under a shard.
    pub(crate) stretches: Box<[Mutex<Vec<BlockId>>]>,
    /// Pages of such a stretch.
    pub(crate) stretch: u32,
    /// Locked before shards.
    pub(crate) queues: Mutex<Queues>,
    /// Blocks that came, all told.
    pub(crate) stamps: AtomicU32,
    held: AtomicUsize,
    start: Instant,
}

impl Tier {
    /// An empty tier over `pool`, and the pool's holder of buffers that can be given up.
    pub fn new(pool: Arc<Pool>) -> Arc<Tier> {
        let stretch = pool.largest();
        let tier = Arc::new(Tier {
            stretches: (0..pool.pages().div_ceil(stretch as usize)).map(|_| Mutex::default()).collect(),
            stretch,
            stamps: AtomicU32::new(0),
            pool,
            shards: std::array::from_fn(|_| Mutex::default()),
            queues: Mutex::default(),
            held: AtomicUsize::new(0),
            start: Instant::now(),
        });
        let weak: std::sync::Weak<Tier> = Arc::downgrade(&tier);
        tier.pool.set_reclaim(weak);
        tier
    }

    /// The pool the blocks live in.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Bytes of budget that blocks take.
    pub fn held_bytes(&self) -> u64 {
        self.held.load(Ordering::Relaxed) as u64
    }

    /// The block if it is here or being filled, without this being a use of it.
    pub fn peek(&self, id: &BlockId) -> Option<Arc<MemBlock>> {
        self.shard(id).lock().get(id).cloned()
    }

    /// The block if it is here or being filled. Allocates nothing.
    pub fn find(&self, id: &BlockId) -> Option<Arc<MemBlock>> {
        self.find_used(id).map(|(block, _)| block)
    }

    /// As [`Tier::find`], and whether this counts as a use of its own: not one of a row of reads of one pass.
    pub fn find_used(&self, id: &BlockId) -> Option<(Arc<MemBlock>, bool)> {
        let block = self.shard(id).lock().get(id).cloned()?;
        let counts = block.touch(self.now());
        Some((block, counts))
    }

    /// The block, or the duty to fill it with `len` bytes; waits for memory until `deadline`.
    ///
    /// # Errors
    /// `NoMemory` when the budget stays full.
    pub fn find_or_fill(self: &Arc<Self>, id: BlockId, len: usize, deadline: Instant) -> Result<Found> {
        if let Some(block) = self.find(&id) {
            return Ok(Found::Here(block));
        }
        let buf = self.pool.alloc(len.max(1), deadline)?;
        Ok(self.insert(id, buf, len))
    }

    /// The duty to fill the block if it is not here and memory is free or can be freed now.
    pub fn try_fill(self: &Arc<Self>, id: BlockId, len: usize) -> Option<Fill> {
        if self.shard(&id).lock().contains_key(&id) {
            return None;
        }
        let buf = self.pool.try_alloc(len.max(1))?;
        match self.insert(id, buf, len) {
            Found::Vacant(fill) => Some(fill),
            Found::Here(_) => None,
        }
    }

    fn insert(self: &Arc<Self>, id: BlockId, buf: Buf, len: usize) -> Found {
        debug_assert!(buf.len() >= len);
        let (footprint, now) = (buf.footprint(), self.now());
        let stamp = self.stamps.fetch_add(1, Ordering::Relaxed);
        let name = Name::new(id, stamp, buf.pages().len() as u32);
        let block = Arc::new(MemBlock {
            buf,
            stamp,
            filled: AtomicUsize::new(0),
            status: Mutex::new(Status::Filling),
            changed: Condvar::new(),
            uses: AtomicU8::new(0),
            last_use: AtomicU32::new(now),
            last_counted: AtomicU32::new(now),
        });
        {
            let mut shard = self.shard(&id).lock();
            if let Some(there) = shard.get(&id) {
                return Found::Here(Arc::clone(there));
            }
            self.stretch_of(&block).lock().push(id);
            shard.insert(id, Arc::clone(&block));
        }
        self.held.fetch_add(footprint, Ordering::Relaxed);
        let mut queues = self.queues.lock();
        queues.push(name);
        // Blocks that go out of their turn leave their name behind; sweep before such names outnumber the blocks.
        if queues.len() > self.pool.pages() + 1024 {
            let is_here =
                |name: &Name| self.shard(&name.id()).lock().get(&name.id()).is_some_and(|b| b.stamp == name.stamp);
            queues.sweep(is_here);
        }
        drop(queues);
        Found::Vacant(Fill { block, id, tier: Arc::clone(self), done: false })
    }

    /// Takes in a whole block of `len` bytes, the first of `buf`; `None`, and nothing happens, when it is here or being
    /// filled already.
    pub fn take_in(self: &Arc<Self>, id: BlockId, buf: Buf, len: usize) -> Option<Slice> {
        let Found::Vacant(mut fill) = self.insert(id, buf, len) else { return None };
        fill.commit(len);
        fill.finished()
    }

    /// Drops a block if it is complete and here, and says whether it was; readers that hold slices keep them.
    pub fn remove(&self, id: &BlockId) -> bool {
        let found = self.shard(id).lock().get(id).cloned().filter(|block| block.is_ready());
        if let Some(block) = &found {
            self.forget(id, block);
        }
        found.is_some()
    }

    fn forget(&self, id: &BlockId, block: &Arc<MemBlock>) {
        let mut shard = self.shard(id).lock();
        if shard.get(id).is_some_and(|there| Arc::ptr_eq(there, block)) {
            self.take_out(&mut shard, id);
        }
    }

    pub(crate) fn shard(&self, id: &BlockId) -> &Mutex<Map> {
        let hash = (id.object.0 as u64) ^ ((id.object.0 >> 64) as u64) ^ u64::from(id.index).wrapping_mul(0x9e37_79b9);
        &self.shards[(hash % SHARDS as u64) as usize]
    }

    fn now(&self) -> u32 {
        self.start.elapsed().as_millis() as u32
    }

    /// Takes a block out of its shard, which is locked, and off the count.
    pub(crate) fn take_out(&self, shard: &mut Map, id: &BlockId) -> Option<Arc<MemBlock>> {
        let block = shard.remove(id)?;
        self.held.fetch_sub(block.buf.footprint(), Ordering::Relaxed);
        let mut beside = self.stretch_of(&block).lock();
        if let Some(at) = beside.iter().position(|there| there == id) {
            beside.swap_remove(at);
        }
        Some(block)
    }

    fn stretch_of(&self, block: &MemBlock) -> &Mutex<Vec<BlockId>> {
        &self.stretches[(block.buf.pages().start / self.stretch) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Reclaim as _;
    use spurline_types::ObjectId;
    use std::time::Duration;

    fn id(n: u32) -> BlockId {
        BlockId { object: ObjectId(9), index: n }
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(5)
    }

    fn fill(tier: &Arc<Tier>, n: u32, len: usize) {
        match tier.find_or_fill(id(n), len, soon()).unwrap() {
            Found::Vacant(mut f) => {
                f.spare().fill(n as u8);
                f.commit(len);
            }
            Found::Here(_) => panic!("block {n} was here already"),
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
        let held = |tier: &Arc<Tier>| (0..20).filter(|n| tier.peek(&id(*n)).is_some()).count();
        let mut fills: Vec<Fill> = (100..104).map(|n| tier.try_fill(id(n), 64 << 10).unwrap()).collect();
        for n in 104..114 {
            fills.push(tier.try_fill(id(n), 64 << 10).expect("others can go for this one"));
        }
        assert_eq!(held(&tier), 10);
        // One that was used is passed by once, and goes before it is said that none can.
        for n in 0..2 {
            fill(&second, n, 64 << 10);
            second.peek(&id(n)).unwrap().uses.store(1, Ordering::Relaxed);
        }
        assert!(second.reclaim(64 << 10).is_some() && second.held_bytes() == 64 << 10);
        fill(&second, 2, 64 << 10);
        let (kept, other) = if second.peek(&id(0)).is_some() { (0, 2) } else { (1, 2) };
        second.peek(&id(other)).unwrap().uses.store(1, Ordering::Relaxed);
        let in_use = second.peek(&id(kept));
        assert!(second.reclaim(64 << 10).is_some(), "the other one is idle");
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

    fn tier(blocks: usize) -> Arc<Tier> {
        Tier::new(Pool::new((blocks * (64 << 10)) as u64, 64 << 10).unwrap())
    }

    #[test]
    fn one_fill_for_many_readers_and_bytes_before_the_end() {
        let tier = tier(4);
        let Found::Vacant(mut f) = tier.find_or_fill(id(1), 40_000, soon()).unwrap() else { panic!() };
        let readers: Vec<_> = (0..8)
            .map(|_| {
                let Found::Here(block) = tier.find_or_fill(id(1), 40_000, soon()).unwrap() else { panic!() };
                std::thread::spawn(move || block.wait(10..20, soon()).map(|s| s.to_vec()))
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
    fn a_failed_fill_reaches_the_waiting_and_is_forgotten() {
        let tier = tier(4);
        let Found::Vacant(f) = tier.find_or_fill(id(1), 100, soon()).unwrap() else { panic!() };
        let Found::Here(block) = tier.find_or_fill(id(1), 100, soon()).unwrap() else { panic!() };
        f.fail(Error::new(ErrorKind::Throttled, "slow down"));
        assert_eq!(block.wait(0..1, soon()).err().unwrap().kind(), ErrorKind::Throttled);
        assert!(matches!(tier.find_or_fill(id(1), 100, soon()).unwrap(), Found::Vacant(_)));
        assert_eq!(tier.held_bytes(), 0, "the vacant fill was dropped at the end of the line above");
    }

    #[test]
    fn a_waiter_gives_up_at_its_deadline() {
        let tier = tier(4);
        let Found::Vacant(_f) = tier.find_or_fill(id(1), 100, soon()).unwrap() else { panic!() };
        let Found::Here(block) = tier.find_or_fill(id(1), 100, soon()).unwrap() else { panic!() };
        let error = block.wait(0..1, Instant::now() + Duration::from_millis(10)).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Timeout);
    }

    #[test]
    fn pinned_blocks_stay_and_others_make_room() {
        let tier = tier(4);
        fill(&tier, 0, 64 << 10);
        let pin = tier.find(&id(0)).unwrap().wait(0..100, soon()).unwrap();
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
        std::thread::sleep(Duration::from_millis(u64::from(CORRELATED) + 50));
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
        assert!(passed.touch(7 + 3200 + CORRELATED), "it is come back to");
        // A reader that looked at the clock before another one and comes here after it.
        assert!(!passed.touch(7 + 3200 + CORRELATED - 1) && uses(&passed) == 1);
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
