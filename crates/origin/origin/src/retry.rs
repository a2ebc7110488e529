//! When a failed attempt is made again: pauses with jitter, counts, the deadline.
//! It deliberately knows no request.

use crate::backend::{Again, Failure};
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::hash::{BuildHasher as _, Hasher as _};
use std::time::{Duration, Instant};

const FIRST: Duration = Duration::from_millis(50);
const FIRST_THROTTLED: Duration = Duration::from_millis(200);
const LONGEST: Duration = Duration::from_secs(5);
/// Pauses for a server that nobody listens at are no longer than this: it is to be found soon after its start.
const LONGEST_WHEN_BACK: Duration = Duration::from_secs(1);
/// Pauses for such a server come to this much in all, whatever the count: it restarts.
const RESTART: Duration = Duration::from_secs(10);
/// A store that asks for more patience than this is asked again all the same.
const LONGEST_ASKED: Duration = Duration::from_secs(20);

/// The attempts of one request.
pub(crate) struct Retry<'a> {
    stats: &'a Stats,
    deadline: Instant,
    allowed: u32,
    /// Time that a server gets to come back.
    restart: Duration,
    /// Pauses for it since the last progress.
    paused: Duration,
    /// Attempts that found nobody, since the last progress.
    refused: u32,
    /// Other failures since the last progress, or since nobody was found: a server that has just come back is as new.
    failures: u32,
    /// Failures in all.
    total: u32,
}

impl<'a> Retry<'a> {
    pub(crate) fn new(allowed: u32, deadline: Instant, stats: &'a Stats) -> Self {
        // Who wants no second attempt wants none here.
        let restart = if allowed == 0 { Duration::ZERO } else { RESTART };
        Retry { stats, deadline, allowed, restart, paused: Duration::ZERO, refused: 0, failures: 0, total: 0 }
    }

    /// Gives a server that is not there no time to come back: nobody said yet that it ever was.
    pub(crate) fn at_start(mut self) -> Self {
        self.restart = Duration::ZERO;
        self
    }

    /// Further attempts in a row.
    pub(crate) fn allowed(&self) -> u32 {
        self.allowed
    }

    /// Time left until the deadline.
    pub(crate) fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// Bytes came before the failure: its pause starts small again.
    pub(crate) fn progressed(&mut self) {
        self.failures = 0;
        self.refused = 0;
        self.paused = Duration::ZERO;
    }

    /// Waits before the next attempt.
    ///
    /// # Errors
    /// The failure itself, when no attempt is left, none can help, or the deadline is nearer than the pause.
    pub(crate) async fn pause(&mut self, failure: Failure) -> Result<()> {
        let pause = self.next(failure)?;
        self.stats.object.retries.add(1);
        tokio::time::sleep(pause).await;
        Ok(())
    }

    /// The pause before the next attempt.
    ///
    /// # Errors
    /// As with [`Retry::pause`].
    pub(crate) fn next(&mut self, failure: Failure) -> Result<Duration> {
        self.total += 1;
        let back = failure.again == Again::WhenBack;
        if back {
            self.refused += 1;
            self.failures = 0;
        } else {
            self.failures += 1;
        }
        let in_a_row = if back { self.refused } else { self.failures };
        let exponent = (in_a_row - 1).min(10);
        let mut allowed = in_a_row <= self.allowed;
        let pause = match failure.again {
            Again::No => return Err(failure.error),
            // Once only: two servers that send each other's clients away must not make a loop.
            Again::Now if self.total == 1 => Duration::ZERO,
            Again::Now | Again::Yes => jitter(FIRST.saturating_mul(1 << exponent).min(LONGEST)),
            Again::WhenBack => {
                allowed |= self.paused < self.restart;
                jitter(FIRST.saturating_mul(1 << exponent).min(LONGEST_WHEN_BACK))
            }
            Again::SlowDown(asked) => {
                self.stats.object.throttled.add(1);
                let ours = jitter(FIRST_THROTTLED.saturating_mul(1 << exponent).min(LONGEST));
                ours.max(asked.unwrap_or_default().min(LONGEST_ASKED))
            }
        };
        if !allowed || pause >= self.left() {
            return Err(gave_up(failure.error, self.total));
        }
        tracing::debug!(attempt = self.total, error = %failure.error, ?pause, "asking the under-store again");
        if back {
            self.paused += pause;
        }
        Ok(pause)
    }
}

fn gave_up(error: Error, attempts: u32) -> Error {
    // An answer that never came in time is the caller's deadline passing, whatever the last attempt saw.
    let kind = match error.kind() {
        ErrorKind::NotFound => ErrorKind::Unavailable,
        kind => kind,
    };
    match attempts {
        1 => Error::new(kind, error.message()),
        n => Error::new(kind, format!("{} (given up after {n} attempts)", error.message())),
    }
}

/// Between half of `pause` and all of it, so that many clients do not come back together.
fn jitter(pause: Duration) -> Duration {
    let random = std::collections::hash_map::RandomState::new().build_hasher().finish();
    pause.mul_f64(0.5 + 0.5 * (random as f64 / u64::MAX as f64))
}
