//! When new locks are set after the loss of a process. It knows no files.

use parking_lot::Mutex;
use spurline_proto::LOCK_TIMES;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Lost processes that are remembered.
const LOST_PROCESSES_MAX: usize = 16;

struct LostProcess {
    instance: u64,
    seen: Instant,
}

/// The grace period of a mount.
pub(crate) struct LockGrace {
    new_after_ms: AtomicU64,
    again_within_ms: AtomicU64,
    /// The lost processes, and when that was seen first.
    lost: Mutex<VecDeque<LostProcess>>,
}

impl Default for LockGrace {
    fn default() -> Self {
        let grace_ms = LOCK_TIMES.grace.as_millis() as u64;
        LockGrace {
            new_after_ms: AtomicU64::new(grace_ms),
            again_within_ms: AtomicU64::new(grace_ms),
            lost: Mutex::default(),
        }
    }
}

impl LockGrace {
    /// Other times than [`LOCK_TIMES`], for tests.
    pub fn set(&self, new_after: Duration, again_within: Duration) {
        self.new_after_ms.store(new_after.as_millis() as u64, Ordering::Relaxed);
        self.again_within_ms.store(again_within.as_millis() as u64, Ordering::Relaxed);
    }

    /// How long new locks wait after a loss.
    pub fn new_after(&self) -> Duration {
        Duration::from_millis(self.new_after_ms.load(Ordering::Relaxed))
    }

    /// How soon after the last answer of a lost process its locks are reclaimed.
    pub fn again_within(&self) -> Duration {
        Duration::from_millis(self.again_within_ms.load(Ordering::Relaxed))
    }

    /// From when on new locks may be set in the place of a lost process.
    pub fn note_lost(&self, instance: u64) -> Instant {
        let mut lost = self.lost.lock();
        let now = Instant::now();
        // A process that was found again may be lost a second time.
        lost.retain(|known| now - known.seen < self.new_after());
        let known = lost.iter().find(|known| known.instance == instance).map(|known| known.seen);
        let seen = known.unwrap_or_else(|| {
            lost.push_back(LostProcess { instance, seen: now });
            now
        });
        if lost.len() > LOST_PROCESSES_MAX {
            lost.pop_front();
        }
        seen + self.new_after()
    }
}
