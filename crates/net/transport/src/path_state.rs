//! The state machine of a rail path: when to connect, when to carry data, when to leave the path alone. Pure: the caller passes
//! in the time, counted from any start, and every event.

use spurline_sys::backoff_pause;
use spurline_types::{Error, ErrorKind};
use std::time::Duration;

/// Pause after the first failed attempt to connect; the pause doubles with each further attempt. A node that was busy for a
/// moment therefore costs only a moment.
const FIRST_CONNECT_PAUSE: Duration = Duration::from_secs(1);
/// The longest pause after a failure, and the longest settling time of a link, where no other transport may carry the
/// data.
const FORCED_RETRY: Duration = Duration::from_secs(4);
const FORCED_SETTLE: Duration = Duration::from_secs(1);

/// Retry and settling times of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathTiming {
    /// Pause before a path that failed while carrying data is tried again (`--rdma-retry`); also the longest pause between
    /// attempts to connect.
    pub retry: Duration,
    /// How long a link that came back must stay up before the path carries data (`--rdma-settle`).
    pub settle: Duration,
}

impl Default for PathTiming {
    fn default() -> Self {
        PathTiming { retry: Duration::from_secs(300), settle: Duration::from_secs(10) }
    }
}

impl PathTiming {
    /// The same with short pauses, for a mount without an alternative transport: a pause longer than readers wait would become an
    /// error for readers.
    pub fn without_alternative(self) -> Self {
        PathTiming { retry: self.retry.min(FORCED_RETRY), settle: self.settle.min(FORCED_SETTLE) }
    }
}

/// What a path is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathPhase {
    /// Not tried yet, or to be tried again now.
    Due,
    /// Connecting, in the background.
    Connecting,
    /// Carries data.
    Up,
    /// Failed; the next attempt is due later.
    Failed,
    /// The local link is down.
    LinkDown,
    /// The local link came back and must settle first.
    Settling,
}

impl PathPhase {
    /// The name shown by `status`.
    pub fn name(self) -> &'static str {
        match self {
            PathPhase::Due => "due",
            PathPhase::Connecting => "connecting",
            PathPhase::Up => "up",
            PathPhase::Failed => "failed",
            PathPhase::LinkDown => "link down",
            PathPhase::Settling => "settling",
        }
    }
}

/// The state of a path. All times count from the caller's start.
#[derive(Debug, Clone)]
pub struct PathState {
    timing: PathTiming,
    phase: PathPhase,
    since: Duration,
    /// No attempt is made before this.
    not_before: Duration,
    link_up: bool,
    /// The current outage is due to the local link, so the link's return ends it.
    link_fault: bool,
    /// When the link last took the path down; a second time within the retry period counts as flapping.
    last_link_fault: Option<Duration>,
    /// Consecutive failed attempts to connect.
    failures: u32,
    reason: Option<Error>,
    carried: bool,
    failovers: u64,
    failbacks: u64,
}

impl PathState {
    /// A path that is due, on a link that is up.
    pub fn new(timing: PathTiming, now: Duration) -> Self {
        PathState {
            timing,
            phase: PathPhase::Due,
            since: now,
            not_before: now,
            link_up: true,
            link_fault: false,
            last_link_fault: None,
            failures: 0,
            reason: None,
            carried: false,
            failovers: 0,
            failbacks: 0,
        }
    }

    /// The current phase.
    pub fn phase(&self) -> PathPhase {
        self.phase
    }
    /// When the phase began.
    pub fn since(&self) -> Duration {
        self.since
    }
    /// The reason of the last failure.
    pub fn reason(&self) -> Option<&str> {
        self.reason.as_ref().map(Error::message)
    }
    /// Failures while carrying data.
    pub fn failovers(&self) -> u64 {
        self.failovers
    }
    /// Recoveries after such a failure.
    pub fn failbacks(&self) -> u64 {
        self.failbacks
    }

    /// The time of the next scheduled action: an attempt to connect, or the end of settling.
    pub fn due_at(&self) -> Option<Duration> {
        matches!(self.phase, PathPhase::Due | PathPhase::Failed | PathPhase::Settling).then_some(self.not_before)
    }

    /// Whether to connect now. If so, the path counts as connecting from here on.
    pub fn begin_connect(&mut self, now: Duration) -> bool {
        let due = self.due_at().is_some_and(|at| now >= at);
        if due {
            self.enter_phase(PathPhase::Connecting, now);
        }
        due
    }

    /// The attempt succeeded. Returns whether the path carries data now, false when the link went down meanwhile.
    pub fn connect_succeeded(&mut self, now: Duration) -> bool {
        if self.phase != PathPhase::Connecting {
            return false;
        }
        if self.carried && self.failovers > self.failbacks {
            self.failbacks += 1;
        }
        self.carried = true;
        self.link_fault = false;
        self.failures = 0;
        self.enter_phase(PathPhase::Up, now);
        true
    }

    /// The attempt failed. `random` shortens the pause by up to a quarter, so that many mounts do not reconnect at
    /// the same moment.
    pub fn connect_failed(&mut self, now: Duration, error: &Error, random: u64) {
        if self.phase != PathPhase::Connecting {
            return;
        }
        self.reason = Some(error.clone());
        let pause = backoff_pause(FIRST_CONNECT_PAUSE, self.timing.retry, self.failures);
        self.failures = self.failures.saturating_add(1);
        self.not_before = now + pause - pause / 1024 * (random % 256) as u32;
        self.enter_phase(PathPhase::Failed, now);
    }

    /// A channel failed, or the path stopped answering. Returns whether the path carried data until now.
    pub fn path_failed(&mut self, now: Duration, why: &str) -> bool {
        if self.phase != PathPhase::Up {
            return false;
        }
        self.reason = Some(Error::new(ErrorKind::Unavailable, why));
        self.failovers += 1;
        self.not_before = now + self.timing.retry;
        self.enter_phase(PathPhase::Failed, now);
        true
    }

    /// The local link went up or down. Returns whether the path carried data until now.
    pub fn link_changed(&mut self, now: Duration, up: bool) -> bool {
        if up == self.link_up {
            return false;
        }
        self.link_up = up;
        if !up {
            // Flapping: the link already failed within the retry period.
            let flapping = self.last_link_fault.is_some_and(|at| now < at + self.timing.retry);
            let carried = self.path_failed(now, "the local link went down");
            // Requests may have seen this same failure a moment earlier.
            self.link_fault = !flapping;
            self.last_link_fault = Some(now);
            self.enter_phase(PathPhase::LinkDown, now);
            return carried;
        }
        let settled = now + self.timing.settle;
        // The cause is known and gone, so only settling is needed. A flapping link waits as long as after any
        // failure.
        self.not_before = if self.link_fault { settled } else { settled.max(self.not_before) };
        self.enter_phase(PathPhase::Settling, now);
        false
    }

    /// The peer is a new process: failures of the old process do not count.
    pub fn peer_restarted(&mut self, now: Duration) {
        if self.phase == PathPhase::Failed {
            self.failures = 0;
            self.not_before = now;
            self.enter_phase(PathPhase::Due, now);
        }
    }

    fn enter_phase(&mut self, phase: PathPhase, now: Duration) {
        self.phase = phase;
        self.since = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMING: PathTiming = PathTiming { retry: Duration::from_secs(300), settle: Duration::from_secs(10) };

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn refused() -> Error {
        Error::new(ErrorKind::Unavailable, "no listener")
    }

    /// What happens to a path, at which second, and what must be true then: its phase and when something is due.
    #[derive(Clone, Copy)]
    enum Event {
        Begin(bool),
        Connected(bool),
        ConnectFailed,
        Failed(bool),
        Link(bool, bool),
        Renewed,
    }
    use Event::*;

    fn run(name: &str, table: &[(u64, Event, PathPhase, Option<u64>)]) -> PathState {
        let mut path = PathState::new(TIMING, at(0));
        for (line, (second, event, phase, due)) in table.iter().enumerate() {
            let now = at(*second);
            let right = match *event {
                Begin(expected) => path.begin_connect(now) == expected,
                Connected(expected) => path.connect_succeeded(now) == expected,
                ConnectFailed => {
                    path.connect_failed(now, &refused(), 0);
                    true
                }
                Failed(expected) => path.path_failed(now, "retries exceeded") == expected,
                Link(up, expected) => path.link_changed(now, up) == expected,
                Renewed => {
                    path.peer_restarted(now);
                    true
                }
            };
            assert!(right, "{name}: line {line} answered otherwise");
            assert_eq!((path.phase(), path.due_at()), (*phase, due.map(at)), "{name}: after line {line}");
        }
        path
    }

    #[test]
    fn a_failed_path_is_tried_again_after_the_retry_time() {
        let path = run(
            "failure",
            &[
                (0, Begin(true), PathPhase::Connecting, None),
                (0, Begin(false), PathPhase::Connecting, None),
                (1, Connected(true), PathPhase::Up, None),
                (1, Connected(false), PathPhase::Up, None),
                (50, Failed(true), PathPhase::Failed, Some(350)),
                // The other requests that were under way on it.
                (50, Failed(false), PathPhase::Failed, Some(350)),
                (349, Begin(false), PathPhase::Failed, Some(350)),
                (350, Begin(true), PathPhase::Connecting, None),
                (351, ConnectFailed, PathPhase::Failed, Some(352)),
                (352, Begin(true), PathPhase::Connecting, None),
                (353, Connected(true), PathPhase::Up, None),
            ],
        );
        assert_eq!((path.failovers(), path.failbacks(), path.reason()), (1, 1, Some("no listener")));
    }

    #[test]
    fn attempts_to_connect_are_repeated_soon_and_ever_more_seldom() {
        run(
            "attempts",
            &[
                (0, Begin(true), PathPhase::Connecting, None),
                (3, ConnectFailed, PathPhase::Failed, Some(4)),
                (4, Begin(true), PathPhase::Connecting, None),
                (7, ConnectFailed, PathPhase::Failed, Some(9)),
                (9, Begin(true), PathPhase::Connecting, None),
                (9, ConnectFailed, PathPhase::Failed, Some(13)),
                (13, Begin(true), PathPhase::Connecting, None),
                (14, Connected(true), PathPhase::Up, None),
                // It carried data: it is left alone, and what failed before is forgotten.
                (20, Failed(true), PathPhase::Failed, Some(320)),
                (320, Begin(true), PathPhase::Connecting, None),
                (320, ConnectFailed, PathPhase::Failed, Some(321)),
            ],
        );
        let mut path = PathState::new(TIMING, at(0));
        for random in [0, 255, 1000, u64::MAX, 4, 5, 6, 7, 8, 9, 10, 255] {
            let due = path.due_at().unwrap();
            assert!(path.begin_connect(due));
            path.connect_failed(due, &refused(), random);
        }
        let pause = path.due_at().unwrap() - path.since();
        assert!(pause <= TIMING.retry && pause >= TIMING.retry * 3 / 4, "{pause:?}");
    }

    #[test]
    fn where_nothing_else_may_carry_the_data_pauses_are_short() {
        let timing = TIMING.without_alternative();
        assert!(timing.retry < at(10) && timing.settle < timing.retry, "{timing:?}");
        let hasty = PathTiming { retry: Duration::from_millis(5), settle: Duration::ZERO };
        assert_eq!(hasty.without_alternative(), hasty);
    }

    #[test]
    fn a_link_that_comes_back_settles_and_is_trusted_then() {
        let path = run(
            "link",
            &[
                (0, Begin(true), PathPhase::Connecting, None),
                (1, Connected(true), PathPhase::Up, None),
                (5, Link(true, false), PathPhase::Up, None),
                (60, Link(false, true), PathPhase::LinkDown, None),
                (61, Begin(false), PathPhase::LinkDown, None),
                (61, Failed(false), PathPhase::LinkDown, None),
                (70, Link(true, false), PathPhase::Settling, Some(80)),
                (75, Link(false, false), PathPhase::LinkDown, None),
            ],
        );
        assert_eq!(path.failovers(), 1);
        run(
            "requests saw it first",
            &[
                (0, Begin(true), PathPhase::Connecting, None),
                (1, Connected(true), PathPhase::Up, None),
                (60, Failed(true), PathPhase::Failed, Some(360)),
                (61, Link(false, false), PathPhase::LinkDown, None),
                (70, Link(true, false), PathPhase::Settling, Some(80)),
                (79, Begin(false), PathPhase::Settling, Some(80)),
                (80, Begin(true), PathPhase::Connecting, None),
                (81, Connected(true), PathPhase::Up, None),
            ],
        );
    }

    #[test]
    fn a_link_that_flaps_waits_like_any_failure() {
        run(
            "flapping",
            &[
                (0, Begin(true), PathPhase::Connecting, None),
                (1, Connected(true), PathPhase::Up, None),
                (60, Link(false, true), PathPhase::LinkDown, None),
                (70, Link(true, false), PathPhase::Settling, Some(80)),
                (80, Begin(true), PathPhase::Connecting, None),
                (80, Connected(true), PathPhase::Up, None),
                (90, Link(false, true), PathPhase::LinkDown, None),
                (95, Link(true, false), PathPhase::Settling, Some(390)),
                (390, Begin(true), PathPhase::Connecting, None),
                (390, Connected(true), PathPhase::Up, None),
                // Long quiet: a single loss of the link is a single loss again.
                (1000, Link(false, true), PathPhase::LinkDown, None),
                (1001, Link(true, false), PathPhase::Settling, Some(1011)),
            ],
        );
    }

    #[test]
    fn a_link_lost_while_connecting_leaves_the_path_down() {
        run(
            "connecting",
            &[
                (0, Begin(true), PathPhase::Connecting, None),
                (1, Link(false, false), PathPhase::LinkDown, None),
                (2, Connected(false), PathPhase::LinkDown, None),
                (2, ConnectFailed, PathPhase::LinkDown, None),
                (3, Link(true, false), PathPhase::Settling, Some(13)),
                (13, Begin(true), PathPhase::Connecting, None),
            ],
        );
    }

    #[test]
    fn a_new_process_on_the_other_side_is_tried_at_once() {
        run(
            "restart",
            &[
                (0, Begin(true), PathPhase::Connecting, None),
                (1, Connected(true), PathPhase::Up, None),
                (2, Renewed, PathPhase::Up, None),
                (60, Failed(true), PathPhase::Failed, Some(360)),
                (65, Renewed, PathPhase::Due, Some(65)),
                (65, Begin(true), PathPhase::Connecting, None),
                (66, Link(false, false), PathPhase::LinkDown, None),
                (67, Renewed, PathPhase::LinkDown, None),
                (68, Link(true, false), PathPhase::Settling, Some(78)),
                (69, Renewed, PathPhase::Settling, Some(78)),
            ],
        );
    }
}
