//! Whether a peer can be reached by connections on demand, and when to try again. Pure: the caller passes in the time, counted
//! from any start, and every event. Knows no channel and no thread.

use spurline_sys::backoff_pause;
use spurline_types::Error;
use std::time::Duration;

/// Whether a peer can be reached on demand, as far as is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PeerReach {
    /// Not tried yet, or a channel broke and no new channel was made since.
    Unknown,
    /// The last attempt to connect succeeded.
    Up,
    /// Connecting failed `failures` times in a row, last with this error.
    Down {
        /// Failed attempts in a row.
        failures: u32,
        /// The last error.
        error: Error,
    },
}

/// [`PeerReach`] with retry times.
///
/// | event | Unknown | Up | Down |
/// |---|---|---|---|
/// | `mark_up` | Up | Up | Up |
/// | `mark_unknown` | Unknown | Unknown | Down |
/// | `mark_failed` | Down, first pause | Down, first pause | Down, twice the last pause |
/// | `revived` | Unknown | Unknown | Unknown |
#[derive(Debug)]
pub(crate) struct ReachState {
    reach: PeerReach,
    first_pause: Duration,
    longest_pause: Duration,
    /// No attempt is made before this.
    not_before: Duration,
    /// When the last attempt failed.
    failed_at: Duration,
    /// The peer is silent: attempts are left to the path monitor.
    held_down: bool,
}

impl ReachState {
    /// A peer that was not tried yet. The pauses between attempts grow from `first_pause` to `longest_pause`.
    pub fn new(first_pause: Duration, longest_pause: Duration) -> Self {
        ReachState {
            reach: PeerReach::Unknown,
            first_pause,
            longest_pause,
            not_before: Duration::ZERO,
            failed_at: Duration::ZERO,
            held_down: false,
        }
    }

    pub fn reach(&self) -> &PeerReach {
        &self.reach
    }

    /// A request connected.
    pub fn mark_up(&mut self) {
        self.held_down = false;
        self.reach = PeerReach::Up;
    }

    /// A channel is gone. The next connection shows whether the peer is reachable.
    pub fn mark_unknown(&mut self) {
        if self.reach == PeerReach::Up {
            self.reach = PeerReach::Unknown;
        }
    }

    /// An attempt failed, or the peer is silent.
    pub fn mark_failed(&mut self, now: Duration, error: &Error) {
        let before = if let PeerReach::Down { failures, .. } = self.reach { failures } else { 0 };
        self.failed_at = now;
        self.not_before = now + backoff_pause(self.first_pause, self.longest_pause, before);
        self.reach = PeerReach::Down { failures: before.saturating_add(1), error: error.clone() };
    }

    /// The time since the last failed attempt, for a peer that is down.
    pub fn since_failure(&self, now: Duration) -> Option<Duration> {
        matches!(self.reach, PeerReach::Down { .. }).then(|| now.saturating_sub(self.failed_at))
    }

    /// Leaves further attempts to the path monitor, or no longer.
    pub fn hold_down(&mut self, held: bool) {
        self.held_down = held;
    }

    /// Whether a request may try a peer that is down.
    pub fn retry_due(&self, now: Duration) -> bool {
        !self.held_down && now >= self.not_before
    }

    /// Whether the path monitor is to send a heartbeat to a peer that is held down.
    pub fn revival_due(&self, now: Duration) -> bool {
        self.held_down && now >= self.not_before
    }

    /// A peer that was held down answered a heartbeat.
    pub fn revived(&mut self, now: Duration) {
        self.held_down = false;
        self.not_before = now;
        self.reach = PeerReach::Unknown;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_types::ErrorKind;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_path_on_demand_backs_off_and_leaves_a_silent_peer_to_the_monitor() {
        let refused = Error::new(ErrorKind::Unavailable, "no listener");
        let down = |failures| PeerReach::Down { failures, error: refused.clone() };
        let mut state = ReachState::new(at(1), at(4));
        assert_eq!(state.reach(), &PeerReach::Unknown);
        for (now, pause) in [(0, 1), (10, 2), (20, 4), (30, 4)] {
            state.mark_failed(at(now), &refused);
            let due = [at(now + pause) - Duration::from_millis(1), at(now + pause)].map(|now| state.retry_due(now));
            assert_eq!((due, state.revival_due(at(100))), ([false, true], false), "{now}");
        }
        assert_eq!(state.reach(), &down(4));
        // The first pause again after a success.
        state.mark_up();
        assert_eq!(state.reach(), &PeerReach::Up);
        state.mark_unknown();
        assert_eq!(state.reach(), &PeerReach::Unknown);
        state.mark_failed(at(42), &refused);
        state.hold_down(true);
        assert!(!state.retry_due(at(100)) && state.revival_due(at(100)) && !state.revival_due(at(42)));
        state.revived(at(50));
        assert_eq!(state.reach(), &PeerReach::Unknown);
        assert!(state.retry_due(at(50)) && !state.revival_due(at(100)));
        // A channel that is lost changes nothing about a peer that is down.
        state.mark_failed(at(51), &refused);
        state.mark_unknown();
        assert_eq!(state.reach(), &down(1));
    }
}
