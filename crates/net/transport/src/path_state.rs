//! The life of one path: when it is tried, when it carries data, when it is left alone. Pure: time is passed in as
//! the time since a beginning of the caller's choice, and whatever happens is told to it.

use std::time::Duration;

/// An attempt to connect that failed is repeated after this, then after twice as long each time: a node that was busy for a
/// moment costs no more than a moment.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// The longest pause after a failure, and the longest time a link settles, where nothing else may carry the data.
const FORCED_RETRY: Duration = Duration::from_secs(4);
const FORCED_SETTLE: Duration = Duration::from_secs(1);

/// How patient a path is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathTiming {
    /// A path that failed while it carried data is tried again no sooner than this (`--rdma-retry`); the longest pause
    /// between attempts to connect.
    pub retry: Duration,
    /// A link that came back has to stay up this long before it carries data (`--rdma-settle`).
    pub settle: Duration,
}

impl Default for PathTiming {
    fn default() -> Self {
        PathTiming { retry: Duration::from_secs(300), settle: Duration::from_secs(10) }
    }
}

impl PathTiming {
    /// The same where nothing else may carry the data: waiting longer for a path than readers wait would be an error of
    /// theirs, and no other way is any better.
    pub fn forced(self) -> Self {
        PathTiming { retry: self.retry.min(FORCED_RETRY), settle: self.settle.min(FORCED_SETTLE) }
    }
}

/// What a path does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Not tried yet, or about to be tried again.
    Due,
    /// Being connected, in the background.
    Connecting,
    /// Carries data.
    Up,
    /// Failed; left alone until it is tried again.
    Failed,
    /// The local link is down.
    LinkDown,
    /// The local link came back and is not trusted yet.
    Settling,
}

impl Phase {
    /// The word in `status`.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Due => "due",
            Phase::Connecting => "connecting",
            Phase::Up => "up",
            Phase::Failed => "failed",
            Phase::LinkDown => "link down",
            Phase::Settling => "settling",
        }
    }
}

/// One path's state. Times are since the caller's beginning.
#[derive(Debug, Clone)]
pub struct PathState {
    timing: PathTiming,
    phase: Phase,
    since: Duration,
    /// Nothing is tried before this.
    not_before: Duration,
    link_up: bool,
    /// The present outage is the local link's, so its return ends it.
    link_fault: bool,
    /// When the link last brought the path down: one that does so again soon is flapping.
    last_link_fault: Option<Duration>,
    /// Attempts to connect that failed one after the other.
    refused: u32,
    reason: Option<String>,
    carried: bool,
    failovers: u64,
    failbacks: u64,
}

impl PathState {
    /// A path that is due, on a link that is up.
    pub fn new(timing: PathTiming, now: Duration) -> Self {
        PathState {
            timing,
            phase: Phase::Due,
            since: now,
            not_before: now,
            link_up: true,
            link_fault: false,
            last_link_fault: None,
            refused: 0,
            reason: None,
            carried: false,
            failovers: 0,
            failbacks: 0,
        }
    }

    /// What it does.
    pub fn phase(&self) -> Phase {
        self.phase
    }
    /// Since when.
    pub fn since(&self) -> Duration {
        self.since
    }
    /// Why it last failed.
    pub fn reason(&self) -> Option<&str> {
        self.reason.as_deref()
    }
    /// How often it failed while it carried data.
    pub fn failovers(&self) -> u64 {
        self.failovers
    }
    /// How often it carried data again after that.
    pub fn failbacks(&self) -> u64 {
        self.failbacks
    }

    /// When something is to be done without anything happening: a path to be tried, a link that has settled.
    pub fn due_at(&self) -> Option<Duration> {
        matches!(self.phase, Phase::Due | Phase::Failed | Phase::Settling).then_some(self.not_before)
    }

    /// Whether the path is to be connected now; it counts as being connected when this says so.
    pub fn begin(&mut self, now: Duration) -> bool {
        let due = self.due_at().is_some_and(|at| now >= at);
        if due {
            self.enter(Phase::Connecting, now);
        }
        due
    }

    /// It is connected. Says whether it carries data now: not when its link went down meanwhile.
    pub fn connected(&mut self, now: Duration) -> bool {
        if self.phase != Phase::Connecting {
            return false;
        }
        if self.carried && self.failovers > self.failbacks {
            self.failbacks += 1;
        }
        self.carried = true;
        self.link_fault = false;
        self.refused = 0;
        self.enter(Phase::Up, now);
        true
    }

    /// Connecting failed. Up to a quarter of the pause is left out, as `random` says, so that many mounts do not come back
    /// at the same moment.
    pub fn connect_failed(&mut self, now: Duration, why: &str, random: u64) {
        if self.phase == Phase::Connecting {
            self.reason = Some(why.to_owned());
            let pause = FIRST_PAUSE.saturating_mul(1 << self.refused.min(16)).min(self.timing.retry);
            self.refused = self.refused.saturating_add(1);
            self.not_before = now + pause - pause / 1024 * (random % 256) as u32;
            self.enter(Phase::Failed, now);
        }
    }

    /// A channel failed, or the path was found silent. Says whether it carried data until now.
    pub fn failed(&mut self, now: Duration, why: &str) -> bool {
        if self.phase != Phase::Up {
            return false;
        }
        self.reason = Some(why.to_owned());
        self.failovers += 1;
        self.not_before = now + self.timing.retry;
        self.enter(Phase::Failed, now);
        true
    }

    /// The local link is up or down. Says whether the path carried data until now.
    pub fn link(&mut self, now: Duration, up: bool) -> bool {
        if up == self.link_up {
            return false;
        }
        self.link_up = up;
        if !up {
            // Flapping: the link was the cause before, so long ago that a failure would just be tried again.
            let flapping = self.last_link_fault.is_some_and(|at| now < at + self.timing.retry);
            let carried = self.failed(now, "the local link went down");
            // A failure of a moment ago was this one, seen first by the requests under way.
            self.link_fault = !flapping;
            self.last_link_fault = Some(now);
            self.enter(Phase::LinkDown, now);
            return carried;
        }
        let settled = now + self.timing.settle;
        // The cause is known and gone, so there is nothing to wait for but a settled link. A link that flaps is left
        // alone as long as any failure.
        self.not_before = if self.link_fault { settled } else { settled.max(self.not_before) };
        self.enter(Phase::Settling, now);
        false
    }

    /// The peer is another process than before: what failed with the old one says nothing of this one.
    pub fn renewed(&mut self, now: Duration) {
        if self.phase == Phase::Failed {
            self.refused = 0;
            self.not_before = now;
            self.enter(Phase::Due, now);
        }
    }

    fn enter(&mut self, phase: Phase, now: Duration) {
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

    fn run(name: &str, table: &[(u64, Event, Phase, Option<u64>)]) -> PathState {
        let mut path = PathState::new(TIMING, at(0));
        for (line, (second, event, phase, due)) in table.iter().enumerate() {
            let now = at(*second);
            let right = match *event {
                Begin(expected) => path.begin(now) == expected,
                Connected(expected) => path.connected(now) == expected,
                ConnectFailed => {
                    path.connect_failed(now, "no listener", 0);
                    true
                }
                Failed(expected) => path.failed(now, "retries exceeded") == expected,
                Link(up, expected) => path.link(now, up) == expected,
                Renewed => {
                    path.renewed(now);
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
                (0, Begin(true), Phase::Connecting, None),
                (0, Begin(false), Phase::Connecting, None),
                (1, Connected(true), Phase::Up, None),
                (1, Connected(false), Phase::Up, None),
                (50, Failed(true), Phase::Failed, Some(350)),
                // The other requests that were under way on it.
                (50, Failed(false), Phase::Failed, Some(350)),
                (349, Begin(false), Phase::Failed, Some(350)),
                (350, Begin(true), Phase::Connecting, None),
                (351, ConnectFailed, Phase::Failed, Some(352)),
                (352, Begin(true), Phase::Connecting, None),
                (353, Connected(true), Phase::Up, None),
            ],
        );
        assert_eq!((path.failovers(), path.failbacks(), path.reason()), (1, 1, Some("no listener")));
    }

    #[test]
    fn attempts_to_connect_are_repeated_soon_and_ever_more_seldom() {
        run(
            "attempts",
            &[
                (0, Begin(true), Phase::Connecting, None),
                (3, ConnectFailed, Phase::Failed, Some(4)),
                (4, Begin(true), Phase::Connecting, None),
                (7, ConnectFailed, Phase::Failed, Some(9)),
                (9, Begin(true), Phase::Connecting, None),
                (9, ConnectFailed, Phase::Failed, Some(13)),
                (13, Begin(true), Phase::Connecting, None),
                (14, Connected(true), Phase::Up, None),
                // It carried data: it is left alone, and what failed before is forgotten.
                (20, Failed(true), Phase::Failed, Some(320)),
                (320, Begin(true), Phase::Connecting, None),
                (320, ConnectFailed, Phase::Failed, Some(321)),
            ],
        );
        let mut path = PathState::new(TIMING, at(0));
        for random in [0, 255, 1000, u64::MAX, 4, 5, 6, 7, 8, 9, 10, 255] {
            let due = path.due_at().unwrap();
            assert!(path.begin(due));
            path.connect_failed(due, "no listener", random);
        }
        let pause = path.due_at().unwrap() - path.since();
        assert!(pause <= TIMING.retry && pause >= TIMING.retry * 3 / 4, "{pause:?}");
    }

    #[test]
    fn where_nothing_else_may_carry_the_data_pauses_are_short() {
        let timing = TIMING.forced();
        assert!(timing.retry < at(10) && timing.settle < timing.retry, "{timing:?}");
        let hasty = PathTiming { retry: Duration::from_millis(5), settle: Duration::ZERO };
        assert_eq!(hasty.forced(), hasty);
    }

    #[test]
    fn a_link_that_comes_back_settles_and_is_trusted_then() {
        let path = run(
            "link",
            &[
                (0, Begin(true), Phase::Connecting, None),
                (1, Connected(true), Phase::Up, None),
                (5, Link(true, false), Phase::Up, None),
                (60, Link(false, true), Phase::LinkDown, None),
                (61, Begin(false), Phase::LinkDown, None),
                (61, Failed(false), Phase::LinkDown, None),
                (70, Link(true, false), Phase::Settling, Some(80)),
                (75, Link(false, false), Phase::LinkDown, None),
            ],
        );
        assert_eq!(path.failovers(), 1);
        run(
            "requests saw it first",
            &[
                (0, Begin(true), Phase::Connecting, None),
                (1, Connected(true), Phase::Up, None),
                (60, Failed(true), Phase::Failed, Some(360)),
                (61, Link(false, false), Phase::LinkDown, None),
                (70, Link(true, false), Phase::Settling, Some(80)),
                (79, Begin(false), Phase::Settling, Some(80)),
                (80, Begin(true), Phase::Connecting, None),
                (81, Connected(true), Phase::Up, None),
            ],
        );
    }

    #[test]
    fn a_link_that_flaps_waits_like_any_failure() {
        run(
            "flapping",
            &[
                (0, Begin(true), Phase::Connecting, None),
                (1, Connected(true), Phase::Up, None),
                (60, Link(false, true), Phase::LinkDown, None),
                (70, Link(true, false), Phase::Settling, Some(80)),
                (80, Begin(true), Phase::Connecting, None),
                (80, Connected(true), Phase::Up, None),
                (90, Link(false, true), Phase::LinkDown, None),
                (95, Link(true, false), Phase::Settling, Some(390)),
                (390, Begin(true), Phase::Connecting, None),
                (390, Connected(true), Phase::Up, None),
                // Long quiet: a single loss of the link is a single loss again.
                (1000, Link(false, true), Phase::LinkDown, None),
                (1001, Link(true, false), Phase::Settling, Some(1011)),
            ],
        );
    }

    #[test]
    fn a_link_lost_while_connecting_leaves_the_path_down() {
        run(
            "connecting",
            &[
                (0, Begin(true), Phase::Connecting, None),
                (1, Link(false, false), Phase::LinkDown, None),
                (2, Connected(false), Phase::LinkDown, None),
                (2, ConnectFailed, Phase::LinkDown, None),
                (3, Link(true, false), Phase::Settling, Some(13)),
                (13, Begin(true), Phase::Connecting, None),
            ],
        );
    }

    #[test]
    fn a_new_process_on_the_other_side_is_tried_at_once() {
        run(
            "restart",
            &[
                (0, Begin(true), Phase::Connecting, None),
                (1, Connected(true), Phase::Up, None),
                (2, Renewed, Phase::Up, None),
                (60, Failed(true), Phase::Failed, Some(360)),
                (65, Renewed, Phase::Due, Some(65)),
                (65, Begin(true), Phase::Connecting, None),
                (66, Link(false, false), Phase::LinkDown, None),
                (67, Renewed, Phase::LinkDown, None),
                (68, Link(true, false), Phase::Settling, Some(78)),
                (69, Renewed, Phase::Settling, Some(78)),
            ],
        );
    }
}
