//! The state of one disk: normal, unstable, down, and back. It is told what happened and when; it runs no
//! operation and holds no clock.

use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// Whether a disk is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskState {
    /// Reads and writes go to it.
    Normal,
    /// It failed or was too slow: reads and writes go round it while it is tried in the background.
    Unstable,
    /// It has been unstable for long.
    Down,
}

impl DiskState {
    /// The state's name as shown.
    pub fn name(self) -> &'static str {
        match self {
            DiskState::Normal => "normal",
            DiskState::Unstable => "unstable",
            DiskState::Down => "down",
        }
    }
}

/// This many errors within [`WINDOW`] make a disk unstable; a missed deadline does so alone, since every
/// further reader would wait as long.
const ERRORS: u32 = 3;
const WINDOW: Duration = Duration::from_secs(10);
/// This many probes in a row must go well before a disk is used again.
const PROBES: u32 = 3;

struct Inner {
    state: DiskState,
    since: SystemTime,
    since_instant: Instant,
    reason: String,
    errors: u32,
    first_error: Instant,
    good_probes: u32,
}

/// What is known of a disk's health.
pub struct Health {
    usable: AtomicBool,
    down_after: Duration,
    inner: Mutex<Inner>,
}

impl Health {
    /// A disk in state normal.
    pub fn new(now: Instant, down_after: Duration) -> Self {
        Health {
            usable: AtomicBool::new(true),
            down_after,
            inner: Mutex::new(Inner {
                state: DiskState::Normal,
                since: SystemTime::now(),
                since_instant: now,
                reason: String::new(),
                errors: 0,
                first_error: now,
                good_probes: 0,
            }),
        }
    }

    /// Whether reads and writes may go to the disk. One relaxed load.
    pub fn usable(&self) -> bool {
        self.usable.load(Ordering::Relaxed)
    }

    /// State, since when, and why.
    pub fn get(&self) -> (DiskState, SystemTime, String) {
        let inner = self.inner.lock();
        (inner.state, inner.since, inner.reason.clone())
    }

    fn enter(inner: &mut Inner, state: DiskState, now: Instant) {
        (inner.state, inner.since, inner.since_instant) = (state, SystemTime::now(), now);
        (inner.errors, inner.good_probes) = (0, 0);
    }

    /// An operation failed (or `late`: missed its deadline). The new state if it changed.
    pub fn failed(&self, now: Instant, late: bool, what: &dyn Fn() -> String) -> Option<DiskState> {
        let mut inner = self.inner.lock();
        if inner.state != DiskState::Normal {
            return None;
        }
        if inner.errors == 0 || now.duration_since(inner.first_error) > WINDOW {
            (inner.errors, inner.first_error) = (0, now);
        }
        inner.errors += 1;
        if !late && inner.errors < ERRORS {
            return None;
        }
        inner.reason = what();
        Self::enter(&mut inner, DiskState::Unstable, now);
        self.usable.store(false, Ordering::Relaxed);
        Some(DiskState::Unstable)
    }

    /// A probe of a disk that is not normal ended. The new state if it changed.
    pub fn probed(&self, now: Instant, result: Result<(), String>) -> Option<DiskState> {
        let mut inner = self.inner.lock();
        match (inner.state, result) {
            (DiskState::Normal, _) => None,
            (_, Ok(())) => {
                inner.good_probes += 1;
                if inner.good_probes < PROBES {
                    return None;
                }
                inner.reason.clear();
                Self::enter(&mut inner, DiskState::Normal, now);
                self.usable.store(true, Ordering::Relaxed);
                Some(DiskState::Normal)
            }
            (_, Err(why)) => {
                inner.reason = why;
                inner.good_probes = 0;
                drop(inner);
                self.tick(now)
            }
        }
    }

    /// Time has passed: an unstable disk may be down by now. The new state if it changed.
    pub fn tick(&self, now: Instant) -> Option<DiskState> {
        let mut inner = self.inner.lock();
        if inner.state == DiskState::Unstable && now.duration_since(inner.since_instant) >= self.down_after {
            Self::enter(&mut inner, DiskState::Down, now);
            return Some(DiskState::Down);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goes_down_and_comes_back() {
        let t = Instant::now();
        let s = |n| t + Duration::from_secs(n);
        let health = Health::new(t, Duration::from_secs(30));
        assert_eq!(health.failed(s(0), false, &|| "EIO".into()), None);
        assert_eq!(health.failed(s(1), false, &|| "EIO".into()), None);
        // Too far apart to count together.
        assert_eq!(health.failed(s(20), false, &|| "EIO".into()), None);
        assert_eq!(health.failed(s(21), false, &|| "EIO".into()), None);
        assert!(health.usable());
        assert_eq!(health.failed(s(22), false, &|| "EIO".into()), Some(DiskState::Unstable));
        assert!(!health.usable());
        assert_eq!((health.get().0, health.get().2.as_str()), (DiskState::Unstable, "EIO"));
        assert_eq!(health.probed(s(23), Err("still".into())), None);
        assert_eq!(health.tick(s(53)), Some(DiskState::Down));
        assert_eq!(health.probed(s(54), Ok(())), None);
        assert_eq!(health.probed(s(55), Err("again".into())), None);
        for n in 56..58 {
            assert_eq!(health.probed(s(n), Ok(())), None);
        }
        assert_eq!(health.probed(s(58), Ok(())), Some(DiskState::Normal));
        assert!(health.usable());
        assert_eq!(health.failed(s(60), true, &|| "late".into()), Some(DiskState::Unstable), "one missed deadline");
    }
}
