//! The times that decide which mount has a lock after a loss, for mounts and nodes. It has no clock.
//!
//! ```text
//! mount                                             node
//! lock_renewal       1 s  ×4 ≤                    ≤ locks_idle      20 s
//! grace              5 s  <  grants_kept 15 s
//! cut_off_wait      30 s  >                         locks_idle + session_check
//! session_renewal   30 s  ×4 ≤                      session_idle   120 s
//! close_give_up    150 s  >                         session_idle + session_check
//! ```

use std::time::Duration;

/// Times of locks and sessions, each by the clock of the host that waits.
#[derive(Debug, Clone, Copy)]
pub struct LockTimes {
    /// Interval of a mount's requests for its files with locks: a loss is seen early enough to take them again within the grace period.
    pub lock_renewal: Duration,
    /// Grace period after a node is lost. New locks on its successor wait this long, and all new locks on a node that has just started. A mount
    /// may reclaim its locks only this soon after the lost node's last answer. The windows do not overlap, so no other mount held the lock in between.
    pub grace: Duration,
    /// How long a node remembers a lock that it granted, for mounts that reclaim locks.
    pub grants_kept: Duration,
    /// A node closes the locked files of a session without any request for this long, so that a mount that died keeps other mounts waiting
    /// for no longer. A mount that is back opens the files again, and reclaims its locks or learns that they are lost.
    pub locks_idle: Duration,
    /// How long a mount waits for a node that still has its locks and is only cut off.
    pub cut_off_wait: Duration,
    /// Interval of a mount's session renewals.
    pub session_renewal: Duration,
    /// A node ends a session without any request for this long, and closes its files.
    pub session_idle: Duration,
    /// Interval at which a node looks for idle sessions.
    pub session_check: Duration,
    /// A mount repeats a failed close for this long.
    pub close_give_up: Duration,
}

/// The times of this release.
pub const LOCK_TIMES: LockTimes = LockTimes {
    lock_renewal: Duration::from_secs(1),
    grace: Duration::from_secs(5),
    grants_kept: Duration::from_secs(15),
    locks_idle: Duration::from_secs(20),
    cut_off_wait: Duration::from_secs(30),
    session_renewal: Duration::from_secs(30),
    session_idle: Duration::from_secs(120),
    session_check: Duration::from_secs(5),
    close_give_up: Duration::from_secs(150),
};

const _: () = assert!(LOCK_TIMES.broken_rule().is_none(), "the lock times break a rule that exclusion rests on");

impl LockTimes {
    /// The first rule that these times break.
    pub const fn broken_rule(&self) -> Option<&'static str> {
        let LockTimes { lock_renewal, grace, grants_kept, locks_idle, cut_off_wait, .. } = self;
        let LockTimes { session_renewal, session_idle, session_check, close_give_up, .. } = self;
        if 4 * lock_renewal.as_millis() > grace.as_millis() {
            return Some("a mount sees a loss before the grace period ends");
        }
        if 2 * grace.as_millis() > grants_kept.as_millis() {
            return Some(
                "a node remembers its grants while mounts reclaim locks, and as long again for their requests",
            );
        }
        if 4 * lock_renewal.as_millis() > locks_idle.as_millis() {
            return Some("a node keeps the locks of a mount whose requests are late");
        }
        if grace.as_millis() >= locks_idle.as_millis() {
            return Some("a node that is only cut off has the locks longer than a mount may reclaim them elsewhere");
        }
        if cut_off_wait.as_millis() <= locks_idle.as_millis() + session_check.as_millis() {
            return Some("a mount waits until a node that is cut off has given up the locks");
        }
        if 4 * session_renewal.as_millis() > session_idle.as_millis() {
            return Some("a node keeps the session of a mount whose requests are late");
        }
        if locks_idle.as_millis() >= session_idle.as_millis() {
            return Some("an idle session loses the files with locks first");
        }
        if close_give_up.as_millis() <= session_idle.as_millis() + session_check.as_millis() {
            return Some("a mount repeats a close until the node has ended the session");
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_time_is_bounded_by_a_rule() {
        let seconds = Duration::from_secs;
        for (times, rule) in [
            (LockTimes { lock_renewal: seconds(2), ..LOCK_TIMES }, "sees a loss"),
            (LockTimes { grants_kept: seconds(9), ..LOCK_TIMES }, "remembers its grants"),
            (LockTimes { locks_idle: seconds(3), ..LOCK_TIMES }, "keeps the locks"),
            (LockTimes { locks_idle: seconds(5), ..LOCK_TIMES }, "only cut off"),
            (LockTimes { cut_off_wait: seconds(25), ..LOCK_TIMES }, "given up the locks"),
            (LockTimes { session_renewal: seconds(31), ..LOCK_TIMES }, "keeps the session"),
            (
                LockTimes { session_idle: seconds(20), session_renewal: seconds(5), ..LOCK_TIMES },
                "loses the files with locks first",
            ),
            (LockTimes { close_give_up: seconds(125), ..LOCK_TIMES }, "has ended the session"),
        ] {
            let broken = times.broken_rule();
            assert!(broken.is_some_and(|broken| broken.contains(rule)), "{rule}: {broken:?}");
        }
    }
}
