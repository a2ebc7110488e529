//! How fast a client has to take or send bytes: one that trickles would hold its connection for as long as it likes. Knows no socket and
//! no clock.

use std::time::Duration;

/// How long the endpoint waits for a client until it has moved [`LEAST_BYTES`].
const WAIT_MAX: Duration = Duration::from_secs(60);
/// The bytes that a client moves in this time at least: 1 KiB in a second.
const LEAST_BYTES: usize = 60 << 10;

/// The waits for a client since it has last moved enough bytes. The endpoint's own time does not count.
#[derive(Debug, Default)]
pub(crate) struct ClientPace {
    waited: Duration,
    moved: usize,
}

impl ClientPace {
    /// The longest wait from now on.
    pub fn wait_left(&self) -> Duration {
        WAIT_MAX.saturating_sub(self.waited)
    }

    /// The client has moved bytes, after a wait.
    pub fn note(&mut self, waited: Duration, bytes: usize) {
        self.waited += waited;
        self.moved = self.moved.saturating_add(bytes);
        if self.moved >= LEAST_BYTES {
            *self = ClientPace::default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_that_trickles_has_a_minute_and_others_have_all_time() {
        let mut pace = ClientPace::default();
        // A byte each second: the minute ends.
        for _ in 0..60 {
            assert!(!pace.wait_left().is_zero());
            pace.note(Duration::from_secs(1), 1);
        }
        assert!(pace.wait_left().is_zero());
        // Enough bytes in each minute, for an hour.
        let mut pace = ClientPace::default();
        for _ in 0..3600 {
            pace.note(Duration::from_secs(1), 1100);
            assert!(!pace.wait_left().is_zero());
        }
        // Small answers to quick clients.
        let mut pace = ClientPace::default();
        for _ in 0..1_000_000 {
            pace.note(Duration::from_micros(100), 300);
            assert!(pace.wait_left() > WAIT_MAX / 2);
        }
    }
}
