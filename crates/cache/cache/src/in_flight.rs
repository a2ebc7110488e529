//! How much memory is being filled: ahead of readers at most a third, for readers that wait at most half, so that what is
//! on disk can be read, and what is in memory stays there, while the under-store is slow. What counts is what the buffers
//! take, which may be twice what is fetched into them, or far more of short files. It fills nothing itself.

use crate::Shared;
use parking_lot::{Condvar, Mutex};
use spurline_mem::Pool;
use spurline_types::{Error, ErrorKind, Result, units::human_bytes};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Bytes of the buffers that are being filled, of a process.
#[derive(Default)]
pub(crate) struct InFlight {
    ahead: AtomicU64,
    wanted: Mutex<u64>,
    less: Condvar,
}

/// Takes its bytes off the count when the job that carries it has run or was dropped.
pub(crate) struct AheadBytes {
    shared: Arc<Shared>,
    bytes: u64,
}

impl AheadBytes {
    /// Counts a buffer of `len` bytes, if one more may be filled ahead.
    pub(crate) fn take(shared: &Arc<Shared>, len: usize) -> Option<AheadBytes> {
        let (bytes, ahead) = (Pool::footprint(len), &shared.in_flight.ahead);
        if len == 0 || ahead.load(Ordering::Relaxed) + bytes > shared.tier.pool().limit_bytes() / 3 {
            return None;
        }
        ahead.fetch_add(bytes, Ordering::Relaxed);
        Some(AheadBytes { shared: Arc::clone(shared), bytes })
    }
}

impl Drop for AheadBytes {
    fn drop(&mut self) {
        self.shared.in_flight.ahead.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// The same of a block that a reader waits for.
pub(crate) struct WantedBytes {
    shared: Arc<Shared>,
    bytes: u64,
}

impl WantedBytes {
    /// Counts a buffer of `len` bytes as soon as one more may be under way; one block always may.
    ///
    /// # Errors
    /// `Timeout` when that is not before `deadline`.
    pub(crate) fn take(shared: &Arc<Shared>, len: usize, deadline: Instant) -> Result<WantedBytes> {
        let (bytes, most) = (Pool::footprint(len), shared.tier.pool().limit_bytes() / 2);
        let mut wanted = shared.in_flight.wanted.lock();
        while *wanted > 0 && *wanted + bytes > most {
            if shared.in_flight.less.wait_until(&mut wanted, deadline).timed_out() {
                let why = format!(
                    "{} of buffers are being filled, as much as --buffer-size allows, and none came free in time: the \
                     source is slow or stalled",
                    human_bytes(*wanted)
                );
                return Err(Error::new(ErrorKind::Timeout, why));
            }
        }
        *wanted += bytes;
        Ok(WantedBytes { shared: Arc::clone(shared), bytes })
    }
}

impl Drop for WantedBytes {
    fn drop(&mut self) {
        *self.shared.in_flight.wanted.lock() -= self.bytes;
        // Blocks differ in length: whoever fits goes on.
        self.shared.in_flight.less.notify_all();
    }
}
