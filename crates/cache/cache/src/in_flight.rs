//! Limits the memory being filled: ahead of readers at most a third, for waiting readers at most half. The rest keeps cached data
//! readable while the origin is slow. The unit is the footprint of buffers, which may be twice the fetched bytes, or far more
//! with short files. Filling is the caller's part.

use crate::CacheContext;
use parking_lot::{Condvar, Mutex};
use spurline_mem::BufferPool;
use spurline_types::{Error, ErrorKind, Result, units::human_bytes};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Footprint of this process's buffers that are being filled.
#[derive(Default)]
pub(crate) struct FillBudget {
    ahead: AtomicU64,
    wanted: Mutex<u64>,
    released: Condvar,
}

/// A permit to fill ahead of readers; returned when its job has run or was dropped.
pub(crate) struct PrefetchPermit {
    shared: Arc<CacheContext>,
    bytes: u64,
}

impl PrefetchPermit {
    /// Takes a permit for a buffer of `len` bytes, if another may be filled ahead.
    pub(crate) fn try_acquire(shared: &Arc<CacheContext>, len: usize) -> Option<PrefetchPermit> {
        let bytes = BufferPool::footprint(len);
        let ahead = &shared.in_flight.ahead;
        if len == 0 || ahead.load(Ordering::Relaxed) + bytes > shared.tier.pool().limit_bytes() / 3 {
            return None;
        }
        ahead.fetch_add(bytes, Ordering::Relaxed);
        Some(PrefetchPermit { shared: Arc::clone(shared), bytes })
    }
}

impl Drop for PrefetchPermit {
    fn drop(&mut self) {
        self.shared.in_flight.ahead.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// A permit to fill a block that a reader waits for.
pub(crate) struct FetchPermit {
    shared: Arc<CacheContext>,
    bytes: u64,
}

impl FetchPermit {
    /// Waits for a permit for a buffer of `len` bytes; a single block is always permitted.
    ///
    /// # Errors
    /// `Timeout` when there is none before `deadline`.
    pub(crate) fn acquire(shared: &Arc<CacheContext>, len: usize, deadline: Instant) -> Result<FetchPermit> {
        let bytes = BufferPool::footprint(len);
        let most = shared.tier.pool().limit_bytes() / 2;
        let mut wanted = shared.in_flight.wanted.lock();
        while *wanted > 0 && *wanted + bytes > most {
            if shared.in_flight.released.wait_until(&mut wanted, deadline).timed_out() {
                let why = format!(
                    "{} of buffers are being filled, as much as --buffer-size allows, and none came free in time: the \
                     source is slow or stalled",
                    human_bytes(*wanted)
                );
                return Err(Error::new(ErrorKind::Timeout, why));
            }
        }
        *wanted += bytes;
        Ok(FetchPermit { shared: Arc::clone(shared), bytes })
    }
}

impl Drop for FetchPermit {
    fn drop(&mut self) {
        *self.shared.in_flight.wanted.lock() -= self.bytes;
        // Blocks differ in length: all waiters check whether theirs fits.
        self.shared.in_flight.released.notify_all();
    }
}
