//! A limit on bytes per second that any number of threads share.

use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// Passes bytes at a fixed rate. Allowance unused for more than a tenth of a second is lost.
pub(crate) struct JobRateLimit {
    rate: f64,
    queue: Mutex<RateQueue>,
}

struct RateQueue {
    /// When the bytes reserved so far are covered by the rate.
    paid: Instant,
    /// Total time that waiting reservations moved up because earlier reservations returned bytes.
    moved_up: Duration,
}

pub(crate) struct RateReservation {
    at: Instant,
    moved_up: Duration,
}

impl JobRateLimit {
    /// `rate` in bytes per second; 0 for no limit.
    pub(crate) fn new(rate: u64) -> Self {
        JobRateLimit {
            rate: rate as f64,
            queue: Mutex::new(RateQueue { paid: Instant::now(), moved_up: Duration::ZERO }),
        }
    }

    /// Reserves `bytes` after all earlier reservations.
    pub(crate) fn reserve_bytes(&self, bytes: u64) -> RateReservation {
        let now = Instant::now();
        let mut queue = self.queue.lock();
        if self.rate > 0.0 {
            let from = queue.paid.max(now - Duration::from_millis(100));
            queue.paid = from + Duration::from_secs_f64(bytes as f64 / self.rate);
        } else {
            queue.paid = now;
        }
        RateReservation { at: queue.paid, moved_up: queue.moved_up }
    }

    /// Time left until a reservation is due, unless earlier reservations return bytes.
    pub(crate) fn time_left(&self, place: &RateReservation) -> Duration {
        let sooner = self.queue.lock().moved_up.saturating_sub(place.moved_up);
        place.at.saturating_duration_since(Instant::now()).saturating_sub(sooner)
    }

    /// Returns `bytes` that were not needed: waiting reservations move up.
    pub(crate) fn return_bytes(&self, bytes: u64) {
        if self.rate > 0.0 && bytes > 0 {
            let time = Duration::from_secs_f64(bytes as f64 / self.rate);
            let mut queue = self.queue.lock();
            queue.moved_up += time;
            queue.paid = queue.paid.checked_sub(time).unwrap_or(queue.paid);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_wait_for_their_time_and_for_those_before_them() {
        let pace = JobRateLimit::new(1000);
        for (bytes, most) in [(10_000, 10), (10_000, 20), (1, 21)] {
            let wait = pace.time_left(&pace.reserve_bytes(bytes));
            assert!(wait > Duration::from_secs(most - 2) && wait <= Duration::from_secs(most), "{wait:?}");
        }
        let free = JobRateLimit::new(0);
        assert_eq!(free.time_left(&free.reserve_bytes(u64::MAX)), Duration::ZERO);
    }

    #[test]
    fn what_was_not_needed_moves_all_up_that_wait_and_none_beside_another() {
        let pace = JobRateLimit::new(1000);
        let places: Vec<RateReservation> = (0..4).map(|_| pace.reserve_bytes(10_000)).collect();
        let about = |place: &RateReservation, seconds: u64| {
            let left = pace.time_left(place);
            left > Duration::from_secs(seconds - 2) && left <= Duration::from_secs(seconds)
        };
        assert!(places.iter().zip([10, 20, 30, 40]).all(|(place, seconds)| about(place, seconds)));
        pace.return_bytes(7_000);
        assert!(places.iter().zip([3, 13, 23, 33]).all(|(place, seconds)| about(place, seconds)));
        assert!(about(&pace.reserve_bytes(10_000), 43));
    }
}
