//! Limits the bytes being written to a disk at a time, and stops writes when no write has ended for long. Knows lengths and
//! times, and no disk.

use parking_lot::{Condvar, Mutex};
use std::time::{Duration, Instant};

struct PermitState {
    writers: u32,
    bytes: u64,
    /// When the last writer ended, or the only writer began.
    since: Instant,
}

impl PermitState {
    fn stalled_for(&self) -> Duration {
        if self.writers == 0 { Duration::ZERO } else { self.since.elapsed() }
    }
}

/// The write permits of a disk. A waiting writer holds the block's memory and does not reach the disk: a hung disk holds at most
/// `most` bytes.
pub struct WritePermits {
    most: u64,
    inner: Mutex<PermitState>,
    ended: Condvar,
}

/// A permit to write, returned on drop.
pub struct WritePermit<'a> {
    permits: &'a WritePermits,
    bytes: u64,
}

impl WritePermits {
    /// Permits writes of `most` bytes at once, and a single write of any length.
    pub fn new(most: u64) -> Self {
        let inner = PermitState { writers: 0, bytes: 0, since: Instant::now() };
        WritePermits { most, inner: Mutex::new(inner), ended: Condvar::new() }
    }

    /// For how long no writer has ended, while there are writers.
    pub fn stalled_for(&self) -> Duration {
        self.inner.lock().stalled_for()
    }

    /// Waits for a permit to write this many bytes; `None` once no writer has ended for `patience`.
    pub fn acquire(&self, bytes: u64, patience: Duration) -> Option<WritePermit<'_>> {
        let mut inner = self.inner.lock();
        while inner.writers > 0 {
            let left = patience.checked_sub(inner.stalled_for()).filter(|left| !left.is_zero())?;
            if inner.bytes + bytes <= self.most {
                break;
            }
            self.ended.wait_for(&mut inner, left);
        }
        if inner.writers == 0 {
            inner.since = Instant::now();
        }
        inner.writers += 1;
        inner.bytes += bytes;
        Some(WritePermit { permits: self, bytes })
    }
}

impl Drop for WritePermit<'_> {
    fn drop(&mut self) {
        let mut inner = self.permits.inner.lock();
        inner.writers -= 1;
        inner.bytes -= self.bytes;
        inner.since = Instant::now();
        drop(inner);
        self.permits.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(600);

    #[test]
    fn so_many_bytes_at_a_time_and_one_of_any_length() {
        let permits = WritePermits::new(10);
        let first = permits.acquire(100, LONG).unwrap();
        std::thread::scope(|scope| {
            let second = scope.spawn(|| permits.acquire(8, LONG).map(drop).is_some());
            drop(first);
            assert!(second.join().unwrap());
        });
        let both = (permits.acquire(4, LONG).unwrap(), permits.acquire(6, LONG).unwrap());
        assert!(permits.stalled_for() < LONG);
        drop(both);
        assert_eq!(permits.stalled_for(), Duration::ZERO);
    }

    #[test]
    fn nobody_goes_where_nothing_ends() {
        let permits = WritePermits::new(10);
        let stuck = permits.acquire(1, Duration::ZERO).unwrap();
        assert!(permits.acquire(1, Duration::ZERO).is_none(), "though there is room");
        assert!(permits.acquire(10, Duration::from_millis(1)).is_none());
        drop(stuck);
        assert!(permits.acquire(1, Duration::ZERO).is_some());
    }
}
