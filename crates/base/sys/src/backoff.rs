//! Pauses between attempts: each twice as long as the pause before, up to a limit. Pure: the caller waits.

use std::time::Duration;

/// The pauses of a sequence of attempts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    next: Duration,
}

impl Backoff {
    /// Pauses that grow from `first` to `longest`.
    pub const fn new(first: Duration, longest: Duration) -> Self {
        Backoff { first, longest, next: first }
    }

    /// The pause before the next attempt; the pause after that is twice as long.
    pub fn next_pause(&mut self) -> Duration {
        let pause = self.next;
        self.next = self.next.saturating_mul(2).min(self.longest);
        pause
    }

    /// The pause that [`Backoff::next_pause`] returns next.
    pub fn upcoming(&self) -> Duration {
        self.next
    }

    /// Begins again with the first pause, after a success.
    pub fn reset(&mut self) {
        self.next = self.first;
    }
}

/// The pause after this many failures before the last failure, from `first` for 0 up to `longest`.
pub fn backoff_pause(first: Duration, longest: Duration, failures: u32) -> Duration {
    first.saturating_mul(1 << failures.min(31)).min(longest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_limit() {
        let seconds = Duration::from_secs;
        let mut backoff = Backoff::new(seconds(1), seconds(5));
        for (failures, pause) in [1, 2, 4, 5, 5].into_iter().enumerate() {
            assert_eq!(backoff.upcoming(), seconds(pause));
            assert_eq!(backoff.next_pause(), seconds(pause));
            assert_eq!(backoff_pause(seconds(1), seconds(5), failures as u32), seconds(pause));
        }
        backoff.reset();
        assert_eq!(backoff.next_pause(), seconds(1));
        assert_eq!(backoff_pause(Duration::MAX, Duration::MAX, u32::MAX), Duration::MAX);
    }
}
