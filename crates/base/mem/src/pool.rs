//! The arena, and the buffers cut from there. The arena is mapped once and never moves or grows.

use crate::buddy::{BuddyAllocator, PAGE_SHIFT};
use crate::stripes::{self, NumaPlacement, NumaStripes};
use parking_lot::{Condvar, Mutex};
use spurline_types::{Error, ErrorKind, Result, Size};
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

/// A holder of buffers that can be released.
pub trait BufferReclaim: Send + Sync {
    /// A buffer of `len` bytes made of released and adjacent free memory, if possible.
    fn reclaim_buffer(&self, len: usize) -> Option<PoolBuf>;
}

/// An arena of fixed size: the budget of `--buffer-size`, or the part from which buffers are cut, with an annex for memory that
/// others manage in pieces of other lengths.
pub struct BufferPool {
    base: NonNull<u8>,
    len: usize,
    annex_len: usize,
    annex: Mutex<AnnexState>,
    free: Mutex<FreePages>,
    freed: Condvar,
    /// The NUMA node of each part of the arena, where there are several; read without a lock.
    stripes: OnceLock<NumaStripes>,
    reclaim: OnceLock<Weak<dyn BufferReclaim>>,
}

struct FreePages {
    buddy: BuddyAllocator,
    /// Threads waiting in `alloc`, which `give_back` wakes.
    waiting: usize,
}

/// The allocated part of the annex: all before `next` but the returned pieces.
#[derive(Default)]
struct AnnexState {
    next: usize,
    returned: Vec<(usize, usize)>,
}

// SAFETY: the arena is plain memory; the `free` lock decides the ownership of the parts, and a part is reached only through the
// `PoolBuf` that owns the part.
unsafe impl Send for BufferPool {}
// SAFETY: as above.
unsafe impl Sync for BufferPool {}

impl BufferPool {
    /// Maps an arena of `budget` bytes (rounded down to 16 KiB) whose largest buffer is `largest` bytes (rounded up
    /// to a power of two). Pages become resident when first used.
    ///
    /// # Errors
    /// `NoMemory` when the mapping is refused; `Invalid` when the budget is smaller than the largest buffer.
    pub fn new(budget: u64, largest: usize) -> Result<Arc<BufferPool>> {
        Self::with_annex(budget, largest, 0)
    }

    /// As [`BufferPool::new`], with `annex` more bytes behind the arena (rounded down to 16 KiB) for [`BufferPool::annex`]. These
    /// bytes are registered with the arena, but no buffers are cut from there.
    pub fn with_annex(budget: u64, largest: usize, annex: u64) -> Result<Arc<BufferPool>> {
        let page = 1usize << PAGE_SHIFT;
        let annex_len = usize::try_from(annex).unwrap_or(0) & !(page - 1);
        let largest = largest.max(page).next_power_of_two();
        let len = usize::try_from(budget).unwrap_or(usize::MAX) & !(page - 1);
        if len < largest || len >> PAGE_SHIFT > u32::MAX as usize {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!("a memory budget of {} can't hold one buffer of {}", Size(budget), Size(largest as u64)),
            ));
        }
        let mapped = len.saturating_add(annex_len);
        // Huge pages are aligned to the length, and so are the stripes.
        let whole = mapped.saturating_add(stripes::HUGE_PAGE);
        // SAFETY: an anonymous private mapping at an address of the kernel's choice touches no other memory.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                whole,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            let error = std::io::Error::last_os_error();
            return Err(Error::new(
                ErrorKind::NoMemory,
                format!("mapping {} for buffers failed: {error}; give a smaller --buffer-size", Size(mapped as u64)),
            ));
        }
        let over = base.align_offset(stripes::HUGE_PAGE);
        // SAFETY: the memory before the aligned start and behind the arena belongs to the mapping, and no reference exists.
        let base = unsafe {
            let start = base.byte_add(over);
            if over > 0 {
                libc::munmap(base, over);
            }
            libc::munmap(start.byte_add(mapped), stripes::HUGE_PAGE - over);
            start
        };
        // Huge pages halve the cost of registering and walking the arena, and are optional. SAFETY: the range is the mapping just
        // made.
        unsafe { libc::madvise(base, mapped, libc::MADV_HUGEPAGE) };
        let max_order = largest.trailing_zeros() - PAGE_SHIFT;
        let base = NonNull::new(base.cast::<u8>())
            .ok_or_else(|| Error::new(ErrorKind::NoMemory, "the kernel mapped the buffers at address 0"))?;
        Ok(Arc::new(BufferPool {
            base,
            len,
            annex_len,
            annex: Mutex::default(),
            free: Mutex::new(FreePages { buddy: BuddyAllocator::new(len >> PAGE_SHIFT, max_order), waiting: 0 }),
            freed: Condvar::new(),
            stripes: OnceLock::new(),
            reclaim: OnceLock::new(),
        }))
    }

    /// Sets the holder that releases buffers when the pool runs dry. Later calls change nothing.
    pub fn set_reclaimer(&self, holder: Weak<dyn BufferReclaim>) {
        let _ = self.reclaim.set(holder);
    }

    /// Address and length of the whole arena, annex included, for the registration with a device.
    pub fn arena(&self) -> (*const u8, usize) {
        (self.base.as_ptr(), self.len + self.annex_len)
    }

    /// Allocates pages that are touched from here on on these NUMA nodes (bit n for node n) while they have free memory: all on a
    /// single node, or large aligned stripes of the arena on several in turn, so that each buffer is on one of these nodes.
    /// [`BufferPool::node_of`] returns the node from then on. For the nodes of the NICs that access the arena; the first call
    /// with several nodes decides.
    ///
    /// # Errors
    /// The kernel's error: no such node, or no NUMA at all.
    pub fn place_on_nodes(&self, nodes: u64) -> std::io::Result<()> {
        let (start, len) = self.arena();
        if nodes.count_ones() <= 1 {
            // SAFETY: the range is the arena's own.
            return unsafe { stripes::prefer_nodes(start, len, nodes) };
        }
        let mut free = self.free.lock();
        if self.stripes.get().is_some() {
            return Ok(());
        }
        let stripes = NumaStripes::for_arena(len, free.buddy.largest_run() << PAGE_SHIFT, nodes);
        for (at, len, node) in stripes.pieces(len) {
            // SAFETY: the piece lies inside the arena.
            unsafe { stripes::prefer_nodes(start.add(at), len, 1 << node)? };
        }
        free.buddy.divide_by_stripe(stripes.shift() - PAGE_SHIFT, stripes.nodes().len());
        let _ = self.stripes.set(stripes);
        Ok(())
    }

    /// The NUMA node of the arena's byte at address `at`; `None` elsewhere, and when the arena is not on several
    /// nodes.
    pub fn node_of(&self, at: usize) -> Option<u32> {
        let stripes = self.stripes.get()?;
        let at = at.wrapping_sub(self.base.as_ptr() as usize);
        (at < self.len + self.annex_len).then(|| stripes.node_of(at))
    }

    /// The actual placement of the pages of an arena on several nodes, sampled every two MiB; `None` for any other
    /// arena.
    pub fn numa_placement(&self) -> Option<std::io::Result<NumaPlacement>> {
        let (start, len) = self.arena();
        self.stripes.get().map(|stripes| stripes.measure_placement(start, len))
    }

    /// A piece of the annex, `len` bytes rounded up to 4 KiB and aligned to that; `None` when no such piece is left. Meant for
    /// pieces of the same length: a returned piece is reused for the same length only.
    pub fn annex(self: &Arc<Self>, len: usize) -> Option<AnnexPiece> {
        let len = len.max(1).checked_next_multiple_of(4096)?;
        let mut annex = self.annex.lock();
        let at = match annex.returned.iter().position(|(_, returned)| *returned == len) {
            Some(index) => annex.returned.swap_remove(index).0,
            None if len <= self.annex_len - annex.next => {
                annex.next += len;
                annex.next - len
            }
            None => return None,
        };
        // SAFETY: `at + len` lies inside the annex, which is mapped behind the arena's first `len` bytes.
        let start = unsafe { self.base.add(self.len + at) };
        Some(AnnexPiece { pool: Arc::clone(self), start, at, len })
    }

    /// Bytes allocated now, including the rounding.
    pub fn used_bytes(&self) -> u64 {
        (self.len - (self.free.lock().buddy.free_pages() << PAGE_SHIFT)) as u64
    }

    /// The budget in bytes.
    pub fn limit_bytes(&self) -> u64 {
        self.len as u64
    }

    /// The bytes that a buffer of `len` bytes takes from a budget: the length rounded up.
    pub fn footprint(len: usize) -> u64 {
        1 << (order_of(len) + PAGE_SHIFT)
    }

    /// A buffer of `len` bytes without waiting; evicts blocks if necessary. The start is aligned to the length rounded up to a
    /// power of two (at least 16 KiB). The contents are undefined.
    pub fn try_alloc(self: &Arc<Self>, len: usize) -> Option<PoolBuf> {
        self.try_alloc_near(len, None)
    }

    /// [`BufferPool::try_alloc`] that prefers a free buffer of this NUMA node.
    pub fn try_alloc_near(self: &Arc<Self>, len: usize, node: Option<u32>) -> Option<PoolBuf> {
        let order = order_of(len);
        let near = self.stripe_part(node);
        let page = self.free.lock().buddy.take_run(order, near);
        match page {
            Some(page) => Some(self.make_buf(page, order, len)),
            // Evicted and allocated in a single step: otherwise short allocations would take the memory freed for a long
            // allocation.
            None => self.reclaim.get()?.upgrade()?.reclaim_buffer(len),
        }
    }

    /// A buffer of `len` bytes, waiting until `deadline`.
    ///
    /// # Errors
    /// `NoMemory` when none was free in time; `Invalid` when the buffer is larger than the budget.
    pub fn alloc(self: &Arc<Self>, len: usize, deadline: Instant) -> Result<PoolBuf> {
        self.alloc_near(len, None, deadline)
    }

    /// [`BufferPool::alloc`] that prefers a free buffer of this NUMA node, without waiting for such a buffer.
    pub fn alloc_near(self: &Arc<Self>, len: usize, node: Option<u32>, deadline: Instant) -> Result<PoolBuf> {
        if len > self.len {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!("a buffer of {} is more than the whole budget of {}", Size(len as u64), Size(self.len as u64)),
            ));
        }
        let order = order_of(len);
        loop {
            if let Some(buf) = self.try_alloc_near(len, node) {
                return Ok(buf);
            }
            let mut free = self.free.lock();
            if let Some(page) = free.buddy.take_run(order, None) {
                return Ok(self.make_buf(page, order, len));
            }
            free.waiting += 1;
            // A reader that drops its slice does not notify the pool, so check again every few milliseconds.
            let slice = Instant::now() + std::time::Duration::from_millis(5);
            self.freed.wait_until(&mut free, slice.min(deadline));
            free.waiting -= 1;
            drop(free);
            if Instant::now() >= deadline {
                return Err(Error::new(
                    ErrorKind::NoMemory,
                    format!(
                        "no buffer of {} came free in time out of a budget of {}; give a larger --buffer-size",
                        Size(len as u64),
                        Size(self.len as u64)
                    ),
                ));
            }
        }
    }

    /// The length of the largest buffer.
    pub fn largest_bytes(&self) -> usize {
        self.free.lock().buddy.largest_run() << PAGE_SHIFT
    }

    /// Pages of the largest buffer.
    pub(crate) fn largest_pages(&self) -> u32 {
        self.free.lock().buddy.largest_run() as u32
    }

    /// The free pieces within `pages`, which begin and end between buffers: the first page of each, and the number of pages.
    pub(crate) fn free_in(&self, pages: Range<u32>) -> Vec<(u32, u32)> {
        self.free.lock().buddy.free_in(pages).map(|(page, order)| (page, 1 << order)).collect()
    }

    /// Buffers of all that is free within `pages`; pieces that extend beyond are left.
    pub(crate) fn take_free_in(self: &Arc<Self>, pages: Range<u32>) -> Vec<PoolBuf> {
        let mut free = self.free.lock();
        let runs: Vec<_> =
            free.buddy.free_in(pages.clone()).filter(|(page, order)| page + (1 << order) <= pages.end).collect();
        runs.iter().for_each(|(page, order)| free.buddy.take_free_run(*page, *order));
        drop(free);
        runs.into_iter().map(|(page, order)| self.make_buf(page, order, 1 << (order + PAGE_SHIFT))).collect()
    }

    fn stripe_part(&self, node: Option<u32>) -> Option<usize> {
        let stripes = self.stripes.get()?;
        let node = node?;
        stripes.nodes().iter().position(|of| *of == node)
    }

    /// The maximum number of buffers at once.
    pub(crate) fn pages(&self) -> usize {
        self.len >> PAGE_SHIFT
    }

    fn make_buf(self: &Arc<Self>, page: u32, order: u32, len: usize) -> PoolBuf {
        // SAFETY: the allocator hands out page numbers inside the arena only.
        let ptr = unsafe { self.base.add((page as usize) << PAGE_SHIFT) };
        PoolBuf { pool: Arc::clone(self), ptr, page, order, len }
    }

    fn give_back(&self, page: u32, order: u32) {
        let mut free = self.free.lock();
        free.buddy.give_back(page, order);
        let wake = free.waiting > 0;
        drop(free);
        if wake {
            self.freed.notify_all();
        }
    }
}

fn order_of(len: usize) -> u32 {
    len.next_power_of_two().trailing_zeros().saturating_sub(PAGE_SHIFT)
}

impl Drop for BufferPool {
    fn drop(&mut self) {
        // SAFETY: every `PoolBuf` and `AnnexPiece` holds an `Arc<BufferPool>`, so none is left that points into the
        // mapping.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len + self.annex_len) };
    }
}

/// The order of a buffer whose pages were transferred to another.
const TRANSFERRED_ORDER: u32 = u32::MAX;

/// A buffer of the arena, returned when dropped.
pub struct PoolBuf {
    pool: Arc<BufferPool>,
    ptr: NonNull<u8>,
    page: u32,
    order: u32,
    len: usize,
}

// SAFETY: a `PoolBuf` exclusively owns a part of the arena.
unsafe impl Send for PoolBuf {}
// SAFETY: shared access gives only `&[u8]`, and users of `as_ptr` take on the rules themselves.
unsafe impl Sync for PoolBuf {}

impl PoolBuf {
    /// The first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// The bytes that the buffer takes from the budget.
    pub fn footprint(&self) -> usize {
        1 << (self.order + PAGE_SHIFT)
    }

    /// The pages of the buffer.
    pub(crate) fn pages(&self) -> Range<u32> {
        self.page..self.page + (1 << self.order)
    }

    /// Shortens the buffer to `len` bytes; returns the rest to the pool, except rounding.
    pub(crate) fn cut_to(mut self, len: usize) -> PoolBuf {
        while self.order > order_of(len) {
            self.order -= 1;
            self.pool.give_back(self.page + (1 << self.order), self.order);
        }
        self.len = len;
        self
    }

    /// Joins `parts` to a single buffer of `len` bytes that takes exactly `pages`, if they cover these. A single longer part that
    /// begins with these pages is cut.
    pub(crate) fn join_parts(mut parts: Vec<PoolBuf>, pages: Range<u32>, len: usize) -> Option<PoolBuf> {
        if let [only] = &parts[..]
            && only.page == pages.start
            && only.pages().end > pages.end
        {
            return parts.pop().map(|longer| longer.cut_to(len));
        }
        let order = order_of(len);
        let inside = |part: &PoolBuf| pages.contains(&part.page) && part.pages().end <= pages.end;
        let all: usize = parts.iter().filter(|part| inside(part)).map(|part| part.pages().len()).sum();
        if all != pages.len() || pages.len() != 1 << order || parts.iter().any(|part| !inside(part)) {
            return None;
        }
        let pool = Arc::clone(&parts.first()?.pool);
        for mut part in parts {
            part.order = TRANSFERRED_ORDER;
            drop(part);
        }
        Some(pool.make_buf(pages.start, order, len))
    }
}

impl Deref for PoolBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping is initialised (zero or earlier bytes), `len` lies inside the run owned here,
        // and `&self` excludes a writer.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl DerefMut for PoolBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` excludes every other user.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl Drop for PoolBuf {
    fn drop(&mut self) {
        if self.order != TRANSFERRED_ORDER {
            self.pool.give_back(self.page, self.order);
        }
    }
}

/// A piece of the annex, returned when dropped. The bytes are initialised and reached by address only: the owner synchronises
/// access.
pub struct AnnexPiece {
    pool: Arc<BufferPool>,
    start: NonNull<u8>,
    at: usize,
    len: usize,
}

// SAFETY: an `AnnexPiece` exclusively owns a part of the arena.
unsafe impl Send for AnnexPiece {}

impl AnnexPiece {
    /// The first byte; the same for the value's whole life.
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.start
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Always false.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for AnnexPiece {
    fn drop(&mut self) {
        self.pool.annex.lock().returned.push((self.at, self.len));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn buffers_are_aligned_counted_and_come_back() {
        let pool = BufferPool::new(1 << 20, 256 << 10).unwrap();
        let mut a = pool.try_alloc(100_000).unwrap();
        assert_eq!(a.as_ptr() as usize % 4096, 0);
        a.fill(7);
        assert_eq!(pool.used_bytes(), 128 << 10);
        drop(a);
        assert_eq!(pool.used_bytes(), 0);
    }

    #[test]
    fn waits_and_gives_up_at_the_deadline() {
        let pool = BufferPool::new(64 << 10, 64 << 10).unwrap();
        let held = pool.try_alloc(64 << 10).unwrap();
        let error = pool.alloc(16 << 10, Instant::now() + Duration::from_millis(20)).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::NoMemory);
        assert!(error.message().contains("--buffer-size"));
        let other = Arc::clone(&pool);
        let waiter =
            std::thread::spawn(move || other.alloc(16 << 10, Instant::now() + Duration::from_secs(10)).is_ok());
        std::thread::sleep(Duration::from_millis(20));
        drop(held);
        assert!(waiter.join().unwrap());
    }

    #[test]
    fn the_annex_is_part_of_the_arena_and_of_no_buffer() {
        let pool = BufferPool::with_annex(1 << 20, 1 << 20, 64 << 10).unwrap();
        let (start, len) = pool.arena();
        assert_eq!((len, pool.limit_bytes()), ((1 << 20) + (64 << 10), 1 << 20));
        let all = pool.try_alloc(1 << 20).unwrap();
        let pieces: Vec<AnnexPiece> = std::iter::from_fn(|| pool.annex(20_000)).collect();
        assert_eq!((pieces.len(), pieces[0].len()), (3, 20_480));
        for (i, piece) in pieces.iter().enumerate() {
            let at = piece.as_ptr().as_ptr() as usize;
            assert_eq!((at - start as usize, at % 4096), ((1 << 20) + i * 20_480, 0));
            assert!(at >= all.as_ptr() as usize + all.len());
            // SAFETY: the piece's own bytes, which have no other user.
            unsafe { std::ptr::write_bytes(piece.as_ptr().as_ptr(), i as u8, piece.len()) };
        }
        drop(pieces);
        // What came back is had again, and what is left over beside it.
        let again: Vec<AnnexPiece> = std::iter::from_fn(|| pool.annex(20_000)).collect();
        assert_eq!((again.len(), pool.annex(4096).map(|rest| rest.len())), (3, Some(4096)));
        drop(all);
        assert!(BufferPool::new(1 << 20, 1 << 20).unwrap().annex(1).is_none());
    }

    #[test]
    fn pages_come_from_a_numa_node_that_is_there() {
        let pool = BufferPool::new(1 << 20, 1 << 20).unwrap();
        match pool.place_on_nodes(1) {
            Ok(()) => pool.try_alloc(1 << 20).unwrap().fill(1),
            // A kernel without NUMA, or a container that may not choose.
            Err(e) => assert!(matches!(e.raw_os_error(), Some(libc::ENOSYS | libc::EPERM)), "{e}"),
        }
        assert!(pool.place_on_nodes(1 << 63).is_err());
    }

    #[test]
    fn an_arena_on_several_nodes_knows_each_buffers() {
        let pool = BufferPool::with_annex(16 << 20, 1 << 20, 6 << 20).unwrap();
        let (start, len) = pool.arena();
        assert_eq!((start as usize % stripes::HUGE_PAGE, pool.node_of(start as usize)), (0, None));
        // Before the arena has parts, and given back after.
        let early = pool.try_alloc(1 << 20).unwrap();
        // As on a machine that has the nodes 0 and 3.
        let stripes = NumaStripes::for_arena(len, 1 << 20, 0b1001);
        assert_eq!((stripes.shift(), stripes.nodes()), (21, &[0, 3][..]));
        pool.free.lock().buddy.divide_by_stripe(stripes.shift() - PAGE_SHIFT, 2);
        assert!(pool.stripes.set(stripes).is_ok());
        drop(early);
        let node = |buf: &PoolBuf| pool.node_of(buf.as_ptr() as usize + buf.len() / 2);
        for wish in [0, 3] {
            let bufs: Vec<PoolBuf> = (0..8).map(|_| pool.try_alloc_near(1 << 20, Some(wish)).unwrap()).collect();
            for buf in &bufs {
                assert_eq!((node(buf), pool.node_of(buf.as_ptr() as usize)), (Some(wish), Some(wish)));
            }
            // None of it is left, so one of the other, at once.
            let other = pool.alloc_near(1 << 20, Some(wish), Instant::now() + Duration::from_secs(60)).unwrap();
            assert_eq!(node(&other), Some(3 - wish));
        }
        // Without a wish, or with one for a node that has no part, in turn.
        for wish in [None, Some(7)] {
            let bufs: Vec<PoolBuf> = (0..16).map(|_| pool.try_alloc_near(1 << 20, wish).unwrap()).collect();
            assert_eq!(bufs.iter().filter(|buf| node(buf) == Some(0)).count(), 8);
            assert_ne!(node(&bufs[0]), node(&bufs[1]));
        }
        let annex = pool.annex(4096).unwrap();
        assert_eq!(pool.node_of(annex.as_ptr().as_ptr() as usize), Some(0));
        assert_eq!((pool.node_of(start as usize + len), pool.node_of(0)), (None, None));
        assert_eq!(pool.used_bytes(), 0);
    }

    #[test]
    fn too_small_a_budget_is_refused() {
        assert_eq!(BufferPool::new(1 << 20, 4 << 20).err().unwrap().kind(), ErrorKind::Invalid);
    }
}
