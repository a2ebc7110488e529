//! The arena and the buffers cut from it. The arena is mapped once and never moves or grows.

use crate::buddy::{Buddy, PAGE_SHIFT};
use parking_lot::{Condvar, Mutex};
use spurline_types::{Error, ErrorKind, Result, Size};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

/// Something that holds buffers it can do without.
pub trait Reclaim: Send + Sync {
    /// Lets go of at least one buffer of up to `len` bytes if it can; says whether it did.
    fn reclaim(&self, len: usize) -> bool;
}

/// An arena of fixed size: the budget of `--buffer-size`.
pub struct Pool {
    base: NonNull<u8>,
    len: usize,
    free: Mutex<Free>,
    freed: Condvar,
    reclaim: OnceLock<Weak<dyn Reclaim>>,
}

struct Free {
    buddy: Buddy,
    /// Threads waiting in `alloc`; while there is one, `give` wakes it.
    waiting: usize,
}

// SAFETY: the arena is plain memory; which part belongs to whom is decided under the `free` lock, and a
// part is reached only through the one `Buf` that owns it.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    /// Maps an arena of `budget` bytes (rounded down to 16 KiB) whose largest buffer is `largest` bytes
    /// (rounded up to a power of two). Pages are touched, and so resident, only when first used.
    ///
    /// # Errors
    /// `NoMemory` when the mapping is refused; `Invalid` when the budget holds not one largest buffer.
    pub fn new(budget: u64, largest: usize) -> Result<Arc<Pool>> {
        let page = 1usize << PAGE_SHIFT;
        let largest = largest.max(page).next_power_of_two();
        let len = usize::try_from(budget).unwrap_or(usize::MAX) & !(page - 1);
        if len < largest || len >> PAGE_SHIFT > u32::MAX as usize {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!("a memory budget of {} can't hold one buffer of {}", Size(budget), Size(largest as u64)),
            ));
        }
        // SAFETY: an anonymous private mapping at an address of the kernel's choice touches no other memory.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
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
                format!("mapping {} for buffers failed: {error}; give a smaller --buffer-size", Size(len as u64)),
            ));
        }
        // Huge pages halve the cost of registering and walking the arena; without them all works the same.
        // SAFETY: the range is the mapping just made.
        unsafe { libc::madvise(base, len, libc::MADV_HUGEPAGE) };
        let max_order = largest.trailing_zeros() - PAGE_SHIFT;
        let base = NonNull::new(base.cast::<u8>())
            .ok_or_else(|| Error::new(ErrorKind::NoMemory, "the kernel mapped the buffers at address 0"))?;
        Ok(Arc::new(Pool {
            base,
            len,
            free: Mutex::new(Free { buddy: Buddy::new(len >> PAGE_SHIFT, max_order), waiting: 0 }),
            freed: Condvar::new(),
            reclaim: OnceLock::new(),
        }))
    }

    /// Names the one holder of buffers that are given up when the pool runs dry. Later calls change nothing.
    pub fn set_reclaim(&self, holder: Weak<dyn Reclaim>) {
        let _ = self.reclaim.set(holder);
    }

    /// Address and length of the whole arena, for registering it with a device.
    pub fn arena(&self) -> (*const u8, usize) {
        (self.base.as_ptr(), self.len)
    }

    /// Bytes handed out now, rounded up as the arena rounds them.
    pub fn used_bytes(&self) -> u64 {
        (self.len - (self.free.lock().buddy.free_pages() << PAGE_SHIFT)) as u64
    }

    /// The budget in bytes.
    pub fn limit_bytes(&self) -> u64 {
        self.len as u64
    }

    /// A buffer of `len` bytes if one is free now, giving up blocks that can be had again if need be.
    /// Its start is aligned to its length rounded up to a power of two (at least 16 KiB); its bytes are
    /// whatever was there before.
    pub fn try_alloc(self: &Arc<Self>, len: usize) -> Option<Buf> {
        let order = order_of(len);
        loop {
            if let Some(page) = self.free.lock().buddy.take(order) {
                return Some(self.buf(page, order, len));
            }
            if !self.reclaim.get()?.upgrade()?.reclaim(len) {
                return None;
            }
        }
    }

    /// A buffer of `len` bytes, waiting for one until `deadline`.
    ///
    /// # Errors
    /// `NoMemory` when none came free in time; `Invalid` when no buffer is ever that large.
    pub fn alloc(self: &Arc<Self>, len: usize, deadline: Instant) -> Result<Buf> {
        if len > self.len {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!("a buffer of {} is more than the whole budget of {}", Size(len as u64), Size(self.len as u64)),
            ));
        }
        let order = order_of(len);
        loop {
            if let Some(buf) = self.try_alloc(len) {
                return Ok(buf);
            }
            let mut free = self.free.lock();
            if let Some(page) = free.buddy.take(order) {
                return Ok(self.buf(page, order, len));
            }
            free.waiting += 1;
            // Pins are let go without a word to the pool (a reader drops its slice), so look again at least
            // every few milliseconds.
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

    /// The most buffers there can be at once.
    pub(crate) fn pages(&self) -> usize {
        self.len >> PAGE_SHIFT
    }

    fn buf(self: &Arc<Self>, page: u32, order: u32, len: usize) -> Buf {
        // SAFETY: the allocator hands out page numbers inside the arena only.
        let ptr = unsafe { self.base.add((page as usize) << PAGE_SHIFT) };
        Buf { pool: Arc::clone(self), ptr, page, order, len }
    }

    fn give(&self, page: u32, order: u32) {
        let mut free = self.free.lock();
        free.buddy.give(page, order);
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

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: every `Buf` holds an `Arc<Pool>`, so none is left that points into the mapping.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// A buffer out of the arena, given back when dropped.
pub struct Buf {
    pool: Arc<Pool>,
    ptr: NonNull<u8>,
    page: u32,
    order: u32,
    len: usize,
}

// SAFETY: a `Buf` owns its part of the arena alone.
unsafe impl Send for Buf {}
// SAFETY: shared access gives only `&[u8]`, and `as_ptr` callers take on the rules themselves.
unsafe impl Sync for Buf {}

impl Buf {
    /// The first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// What the buffer takes from the budget.
    pub fn footprint(&self) -> usize {
        1 << (self.order + PAGE_SHIFT)
    }
}

impl Deref for Buf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping is initialised (zero or earlier bytes), `len` lies inside the run owned here,
        // and `&self` excludes a writer.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl DerefMut for Buf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` excludes every other user.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        self.pool.give(self.page, self.order);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn buffers_are_aligned_counted_and_come_back() {
        let pool = Pool::new(1 << 20, 256 << 10).unwrap();
        let mut a = pool.try_alloc(100_000).unwrap();
        assert_eq!(a.as_ptr() as usize % 4096, 0);
        a.fill(7);
        assert_eq!(pool.used_bytes(), 128 << 10);
        drop(a);
        assert_eq!(pool.used_bytes(), 0);
    }

    #[test]
    fn waits_and_gives_up_at_the_deadline() {
        let pool = Pool::new(64 << 10, 64 << 10).unwrap();
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
    fn too_small_a_budget_is_refused() {
        assert_eq!(Pool::new(1 << 20, 4 << 20).err().unwrap().kind(), ErrorKind::Invalid);
    }
}
