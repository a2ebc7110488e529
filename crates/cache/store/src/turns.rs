//! Whose turn it is to write to a disk: so many bytes at a time, and nobody's once none of them has ended for long. It knows
//! lengths and times, and no disk.

use parking_lot::{Condvar, Mutex};
use std::time::{Duration, Instant};

struct Inner {
    writers: u32,
    bytes: u64,
    /// When the last one ended, or the only one began.
    since: Instant,
}

impl Inner {
    fn stalled(&self) -> Duration {
        if self.writers == 0 { Duration::ZERO } else { self.since.elapsed() }
    }
}

/// The turns of one disk. What waits for one holds the block's memory, but does not come to the disk: one that hangs has no
/// more than `most` bytes.
pub struct Turns {
    most: u64,
    inner: Mutex<Inner>,
    ended: Condvar,
}

/// A turn, until it is dropped.
pub struct Turn<'a> {
    turns: &'a Turns,
    bytes: u64,
}

impl Turns {
    /// Lets writers of `most` bytes in at once, and a single one of any length.
    pub fn new(most: u64) -> Self {
        let inner = Inner { writers: 0, bytes: 0, since: Instant::now() };
        Turns { most, inner: Mutex::new(inner), ended: Condvar::new() }
    }

    /// For how long no writer has ended, while there is one.
    pub fn stalled(&self) -> Duration {
        self.inner.lock().stalled()
    }

    /// A turn to write so many bytes, as soon as there is room for them; `None` once no writer has ended for `patience`.
    pub fn take(&self, bytes: u64, patience: Duration) -> Option<Turn<'_>> {
        let mut inner = self.inner.lock();
        while inner.writers > 0 {
            let left = patience.checked_sub(inner.stalled()).filter(|left| !left.is_zero())?;
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
        Some(Turn { turns: self, bytes })
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut inner = self.turns.inner.lock();
        inner.writers -= 1;
        inner.bytes -= self.bytes;
        inner.since = Instant::now();
        drop(inner);
        self.turns.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(600);

    #[test]
    fn so_many_bytes_at_a_time_and_one_of_any_length() {
        let turns = Turns::new(10);
        let first = turns.take(100, LONG).unwrap();
        std::thread::scope(|scope| {
            let second = scope.spawn(|| turns.take(8, LONG).map(drop).is_some());
            drop(first);
            assert!(second.join().unwrap());
        });
        let both = (turns.take(4, LONG).unwrap(), turns.take(6, LONG).unwrap());
        assert!(turns.stalled() < LONG);
        drop(both);
        assert_eq!(turns.stalled(), Duration::ZERO);
    }

    #[test]
    fn nobody_goes_where_nothing_ends() {
        let turns = Turns::new(10);
        let stuck = turns.take(1, Duration::ZERO).unwrap();
        assert!(turns.take(1, Duration::ZERO).is_none(), "though there is room");
        assert!(turns.take(10, Duration::from_millis(1)).is_none());
        drop(stuck);
        assert!(turns.take(1, Duration::ZERO).is_some());
    }
}
