//! Whether a path with requests in flight still delivers bytes, and which heartbeat is in progress. Pure: the caller passes in
//! the time, counted from any start. Knows no channel and no thread.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// When bytes last arrived; unequal after any further arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LastHeard(u64);

/// The liveness of a path. Requests update the values without a lock.
#[derive(Debug, Default)]
pub(crate) struct PathLiveness {
    in_flight: AtomicUsize,
    /// When bytes last arrived, or the first pending request was sent, in microseconds since the caller's start.
    last_heard: AtomicU64,
    heartbeat_running: AtomicBool,
}

impl PathLiveness {
    /// A request starts waiting.
    pub fn request_began(&self, now: impl FnOnce() -> Duration) {
        if self.in_flight.fetch_add(1, Ordering::AcqRel) == 0 {
            // Silence counts from the first pending request.
            self.bytes_arrived(now());
        }
    }

    /// A request stops waiting.
    pub fn request_ended(&self) {
        self.in_flight.fetch_sub(1, Ordering::AcqRel);
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Acquire)
    }

    /// Bytes arrived from the peer.
    pub fn bytes_arrived(&self, now: Duration) {
        self.last_heard.store(now.as_micros() as u64, Ordering::Release);
    }

    /// When bytes last arrived.
    pub fn last_heard(&self) -> LastHeard {
        LastHeard(self.last_heard.load(Ordering::Acquire))
    }

    /// Time since bytes last arrived.
    pub fn silent_for(&self, now: Duration) -> Duration {
        now.saturating_sub(Duration::from_micros(self.last_heard.load(Ordering::Acquire)))
    }

    /// Claims the heartbeat if requests are in flight, no bytes arrived for `silence`, and none is in progress.
    pub fn claim_overdue(&self, now: Duration, silence: Duration) -> Option<LastHeard> {
        // Before the number of requests: the first request sets the time after the count.
        let heard = self.last_heard();
        let overdue = self.in_flight() > 0 && now.saturating_sub(Duration::from_micros(heard.0)) >= silence;
        (overdue && self.claim_heartbeat()).then_some(heard)
    }

    /// Claims the heartbeat; false while a heartbeat is in progress.
    pub fn claim_heartbeat(&self) -> bool {
        !self.heartbeat_running.swap(true, Ordering::AcqRel)
    }

    /// The heartbeat ended.
    pub fn release_heartbeat(&self) {
        self.heartbeat_running.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn silence_counts_while_requests_are_in_flight_and_is_reported_once() {
        let path = PathLiveness::default();
        assert_eq!(path.claim_overdue(at(100), at(1)), None, "no request is in flight");
        path.request_began(|| at(100));
        path.request_began(|| at(105));
        assert_eq!((path.silent_for(at(106)), path.claim_overdue(at(106), at(7))), (at(6), None));
        let heard = path.claim_overdue(at(107), at(7)).expect("silent since the first request");
        assert_eq!(
            (path.claim_overdue(at(200), at(7)), path.claim_heartbeat()),
            (None, false),
            "one heartbeat at a time"
        );
        assert_eq!(path.last_heard(), heard);
        path.bytes_arrived(at(201));
        assert_ne!(path.last_heard(), heard);
        path.release_heartbeat();
        path.request_ended();
        assert!(path.claim_overdue(at(208), at(7)).is_some());
        path.release_heartbeat();
        path.request_ended();
        assert_eq!((path.in_flight(), path.claim_overdue(at(500), at(7))), (0, None));
    }
}
