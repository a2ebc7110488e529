//! The policy of retries: pauses with jitter, counts, the deadline. It deliberately knows no request.

use crate::backend::{RequestFailure, RetryHint};
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::hash::{BuildHasher as _, Hasher as _};
use std::time::{Duration, Instant};

const FIRST: Duration = Duration::from_millis(50);
const FIRST_THROTTLED: Duration = Duration::from_millis(200);
const LONGEST: Duration = Duration::from_secs(5);
/// Longest pause for a server that does not listen, so that it is found soon after its start.
const LONGEST_WHEN_BACK: Duration = Duration::from_secs(1);
/// Total pauses for such a server, whatever the number of attempts: it may be restarting.
const RESTART: Duration = Duration::from_secs(10);
/// Longest pause that a store can request.
const LONGEST_ASKED: Duration = Duration::from_secs(20);

/// The attempts of one request.
pub(crate) struct RetryState<'a> {
    stats: &'a Stats,
    deadline: Instant,
    allowed: u32,
    /// Time for a server to restart.
    restart: Duration,
    /// Pauses for a restart since the last progress.
    paused: Duration,
    /// Refused attempts since the last progress.
    refused: u32,
    /// Other failures since the last progress or refused attempt: a server that has restarted starts at zero.
    failures: u32,
    /// All failures.
    total: u32,
}

impl<'a> RetryState<'a> {
    pub(crate) fn new(allowed: u32, deadline: Instant, stats: &'a Stats) -> Self {
        // A single attempt does not wait for a restart either.
        let restart = if allowed == 0 { Duration::ZERO } else { RESTART };
        RetryState { stats, deadline, allowed, restart, paused: Duration::ZERO, refused: 0, failures: 0, total: 0 }
    }

    /// Allows no time for a restart: the server has not been reached yet.
    pub(crate) fn at_start(mut self) -> Self {
        self.restart = Duration::ZERO;
        self
    }

    /// Allowed further attempts in a row.
    pub(crate) fn allowed(&self) -> u32 {
        self.allowed
    }

    /// Time left until the deadline.
    pub(crate) fn time_left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// Resets the pauses, because bytes have arrived.
    pub(crate) fn note_progress(&mut self) {
        self.failures = 0;
        self.refused = 0;
        self.paused = Duration::ZERO;
    }

    /// Waits before the next attempt.
    ///
    /// # Errors
    /// The failure itself, when no attempt is left, none can help, or the deadline is nearer than the pause.
    pub(crate) async fn pause(&mut self, failure: RequestFailure) -> Result<()> {
        let pause = self.next_pause(failure)?;
        self.stats.object.retries.add(1);
        tokio::time::sleep(pause).await;
        Ok(())
    }

    /// The pause before the next attempt.
    ///
    /// # Errors
    /// As with [`Retry::pause`].
    pub(crate) fn next_pause(&mut self, failure: RequestFailure) -> Result<Duration> {
        self.total += 1;
        let back = failure.advice == RetryHint::AfterRestart;
        if back {
            self.refused += 1;
            self.failures = 0;
        } else {
            self.failures += 1;
        }
        let in_a_row = if back { self.refused } else { self.failures };
        let exponent = (in_a_row - 1).min(10);
        let mut allowed = in_a_row <= self.allowed;
        let pause = match failure.advice {
            RetryHint::Never => return Err(failure.error),
            // Once only: two servers that redirect to each other must not cause a loop.
            RetryHint::AtOnce if self.total == 1 => Duration::ZERO,
            RetryHint::AtOnce | RetryHint::AfterPause => with_jitter(FIRST.saturating_mul(1 << exponent).min(LONGEST)),
            RetryHint::AfterRestart => {
                allowed |= self.paused < self.restart;
                with_jitter(FIRST.saturating_mul(1 << exponent).min(LONGEST_WHEN_BACK))
            }
            RetryHint::SlowDown(asked) => {
                self.stats.object.throttled.add(1);
                let ours = with_jitter(FIRST_THROTTLED.saturating_mul(1 << exponent).min(LONGEST));
                ours.max(asked.unwrap_or_default().min(LONGEST_ASKED))
            }
        };
        if !allowed || pause >= self.time_left() {
            return Err(exhausted_error(failure.error, self.total));
        }
        tracing::debug!(attempt = self.total, error = %failure.error, ?pause, "retrying a request to the origin");
        if back {
            self.paused += pause;
        }
        Ok(pause)
    }
}

fn exhausted_error(error: Error, attempts: u32) -> Error {
    // An answer that never arrived in time is reported as a timeout, whatever the last attempt returned.
    let kind = match error.kind() {
        ErrorKind::NotFound => ErrorKind::Unavailable,
        kind => kind,
    };
    match attempts {
        1 => Error::new(kind, error.message()),
        n => Error::new(kind, format!("{} (after {n} attempts)", error.message())),
    }
}

/// Between half of `pause` and all of it, so that many clients do not return at the same time.
fn with_jitter(pause: Duration) -> Duration {
    let random = std::collections::hash_map::RandomState::new().build_hasher().finish();
    pause.mul_f64(0.5 + 0.5 * (random as f64 / u64::MAX as f64))
}
