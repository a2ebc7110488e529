//! A limit on bytes per second that any number of threads share.

use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// Lets bytes pass at a rate, each once the time for it has gone by; what was not used in the last tenth of a second is
/// lost.
pub(crate) struct Pace {
    rate: f64,
    /// When the bytes let pass so far will have been paid for.
    paid: Mutex<Instant>,
}

impl Pace {
    /// `rate` bytes per second; 0 lets everything pass.
    pub(crate) fn new(rate: u64) -> Self {
        Pace { rate: rate as f64, paid: Mutex::new(Instant::now()) }
    }

    /// How long to wait before `bytes` may go.
    pub(crate) fn take(&self, bytes: u64) -> Duration {
        if self.rate <= 0.0 {
            return Duration::ZERO;
        }
        let now = Instant::now();
        let mut paid = self.paid.lock();
        let from = (*paid).max(now - Duration::from_millis(100));
        *paid = from + Duration::from_secs_f64(bytes as f64 / self.rate);
        paid.saturating_duration_since(now)
    }

    /// Of what was let pass `bytes` were not needed after all.
    pub(crate) fn give_back(&self, bytes: u64) {
        if self.rate > 0.0 {
            let mut paid = self.paid.lock();
            *paid = paid.checked_sub(Duration::from_secs_f64(bytes as f64 / self.rate)).unwrap_or(*paid);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_wait_for_their_time_and_for_those_before_them() {
        let pace = Pace::new(1000);
        for (bytes, most) in [(10_000, 10), (10_000, 20), (1, 21)] {
            let wait = pace.take(bytes);
            assert!(wait > Duration::from_secs(most - 2) && wait <= Duration::from_secs(most), "{wait:?}");
        }
        assert_eq!(Pace::new(0).take(u64::MAX), Duration::ZERO);
        pace.give_back(20_000);
        assert!(pace.take(1) < Duration::from_secs(2), "what was not needed is not waited for");
    }
}
