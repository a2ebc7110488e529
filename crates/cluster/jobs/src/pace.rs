//! A limit on bytes per second that any number of threads share.

use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// Lets bytes pass at a rate, each once the time for it has gone by; what was not used in the last tenth of a second is
/// lost.
pub(crate) struct Pace {
    rate: f64,
    queue: Mutex<Queue>,
}

struct Queue {
    /// When the bytes let pass so far will have been paid for.
    paid: Instant,
    /// By how much all that wait have moved up since the start, for what those before them did not need.
    moved_up: Duration,
}

/// A place in the queue.
pub(crate) struct Place {
    at: Instant,
    moved_up: Duration,
}

impl Pace {
    /// `rate` bytes per second; 0 lets everything pass.
    pub(crate) fn new(rate: u64) -> Self {
        Pace { rate: rate as f64, queue: Mutex::new(Queue { paid: Instant::now(), moved_up: Duration::ZERO }) }
    }

    /// The place of `bytes` behind all that were let pass before.
    pub(crate) fn take(&self, bytes: u64) -> Place {
        let now = Instant::now();
        let mut queue = self.queue.lock();
        if self.rate > 0.0 {
            let from = queue.paid.max(now - Duration::from_millis(100));
            queue.paid = from + Duration::from_secs_f64(bytes as f64 / self.rate);
        } else {
            queue.paid = now;
        }
        Place { at: queue.paid, moved_up: queue.moved_up }
    }

    /// How long it is until a place's turn, if nobody gives back meanwhile.
    pub(crate) fn left(&self, place: &Place) -> Duration {
        let sooner = self.queue.lock().moved_up.saturating_sub(place.moved_up);
        place.at.saturating_duration_since(Instant::now()).saturating_sub(sooner)
    }

    /// Of what was let pass `bytes` were not needed after all: those who wait move up.
    pub(crate) fn give_back(&self, bytes: u64) {
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
        let pace = Pace::new(1000);
        for (bytes, most) in [(10_000, 10), (10_000, 20), (1, 21)] {
            let wait = pace.left(&pace.take(bytes));
            assert!(wait > Duration::from_secs(most - 2) && wait <= Duration::from_secs(most), "{wait:?}");
        }
        let free = Pace::new(0);
        assert_eq!(free.left(&free.take(u64::MAX)), Duration::ZERO);
    }

    #[test]
    fn what_was_not_needed_moves_all_up_that_wait_and_none_beside_another() {
        let pace = Pace::new(1000);
        let places: Vec<Place> = (0..4).map(|_| pace.take(10_000)).collect();
        let about = |place: &Place, seconds: u64| {
            let left = pace.left(place);
            left > Duration::from_secs(seconds - 2) && left <= Duration::from_secs(seconds)
        };
        assert!(places.iter().zip([10, 20, 30, 40]).all(|(place, seconds)| about(place, seconds)));
        pace.give_back(7_000);
        assert!(places.iter().zip([3, 13, 23, 33]).all(|(place, seconds)| about(place, seconds)));
        assert!(about(&pace.take(10_000), 43));
    }
}
