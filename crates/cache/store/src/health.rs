//! The state machine of a disk: normal, unstable, down, and back. Events and time are passed in; there is no operation and no
//! clock here.

use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// Whether a disk is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskState {
    /// Reads and writes use the disk.
    Normal,
    /// The disk failed or was too slow: reads and writes use other disks, and probes run in the background.
    Unstable,
    /// Unstable for longer than `down_after`.
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

/// This many errors within [`ERROR_WINDOW`] make a disk unstable. A single missed deadline does so alone, since every
/// further reader would wait as long.
const ERROR_LIMIT: u32 = 3;
const ERROR_WINDOW: Duration = Duration::from_secs(10);
/// This many successful probes in a row make a disk usable again.
const GOOD_PROBES: u32 = 3;

struct HealthState {
    state: DiskState,
    since: SystemTime,
    since_instant: Instant,
    reason: String,
    errors: u32,
    first_error: Instant,
    good_probes: u32,
}

pub struct DiskHealth {
    usable: AtomicBool,
    down_after: Duration,
    inner: Mutex<HealthState>,
}

impl DiskHealth {
    /// A disk in state normal.
    pub fn new(now: Instant, down_after: Duration) -> Self {
        DiskHealth {
            usable: AtomicBool::new(true),
            down_after,
            inner: Mutex::new(HealthState {
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

    /// Whether reads and writes may go to the disk. Costs a relaxed load.
    pub fn usable(&self) -> bool {
        self.usable.load(Ordering::Relaxed)
    }

    /// The state, since when, and the reason.
    pub fn current_state(&self) -> (DiskState, SystemTime, String) {
        let inner = self.inner.lock();
        (inner.state, inner.since, inner.reason.clone())
    }

    fn enter_state(inner: &mut HealthState, state: DiskState, now: Instant) {
        inner.state = state;
        inner.since = SystemTime::now();
        inner.since_instant = now;
        inner.errors = 0;
        inner.good_probes = 0;
    }

    /// An operation failed (`late`: missed its deadline). Returns the new state after a change.
    pub fn operation_failed(&self, now: Instant, late: bool, what: &dyn Fn() -> String) -> Option<DiskState> {
        let mut inner = self.inner.lock();
        if inner.state != DiskState::Normal {
            return None;
        }
        if inner.errors == 0 || now.duration_since(inner.first_error) > ERROR_WINDOW {
            inner.errors = 0;
            inner.first_error = now;
        }
        inner.errors += 1;
        if !late && inner.errors < ERROR_LIMIT {
            return None;
        }
        inner.reason = what();
        Self::enter_state(&mut inner, DiskState::Unstable, now);
        self.usable.store(false, Ordering::Relaxed);
        Some(DiskState::Unstable)
    }

    /// A probe of a disk that is not normal ended. Returns the new state after a change.
    pub fn probe_finished(&self, now: Instant, result: Result<(), String>) -> Option<DiskState> {
        let mut inner = self.inner.lock();
        match (inner.state, result) {
            (DiskState::Normal, _) => None,
            (_, Ok(())) => {
                inner.good_probes += 1;
                if inner.good_probes < GOOD_PROBES {
                    return None;
                }
                inner.reason.clear();
                Self::enter_state(&mut inner, DiskState::Normal, now);
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

    /// Turns an unstable disk down after `down_after`. Returns the new state after a change.
    pub fn tick(&self, now: Instant) -> Option<DiskState> {
        let mut inner = self.inner.lock();
        if inner.state == DiskState::Unstable && now.duration_since(inner.since_instant) >= self.down_after {
            Self::enter_state(&mut inner, DiskState::Down, now);
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
        let health = DiskHealth::new(t, Duration::from_secs(30));
        assert_eq!(health.operation_failed(s(0), false, &|| "EIO".into()), None);
        assert_eq!(health.operation_failed(s(1), false, &|| "EIO".into()), None);
        // Too far apart to count together.
        assert_eq!(health.operation_failed(s(20), false, &|| "EIO".into()), None);
        assert_eq!(health.operation_failed(s(21), false, &|| "EIO".into()), None);
        assert!(health.usable());
        assert_eq!(health.operation_failed(s(22), false, &|| "EIO".into()), Some(DiskState::Unstable));
        assert!(!health.usable());
        assert_eq!((health.current_state().0, health.current_state().2.as_str()), (DiskState::Unstable, "EIO"));
        assert_eq!(health.probe_finished(s(23), Err("still".into())), None);
        assert_eq!(health.tick(s(53)), Some(DiskState::Down));
        assert_eq!(health.probe_finished(s(54), Ok(())), None);
        assert_eq!(health.probe_finished(s(55), Err("again".into())), None);
        for n in 56..58 {
            assert_eq!(health.probe_finished(s(n), Ok(())), None);
        }
        assert_eq!(health.probe_finished(s(58), Ok(())), Some(DiskState::Normal));
        assert!(health.usable());
        assert_eq!(
            health.operation_failed(s(60), true, &|| "late".into()),
            Some(DiskState::Unstable),
            "one missed deadline"
        );
    }
}
