//! The policy of retries: pauses with jitter, counts, the deadline. It deliberately knows no request.

use crate::backend::{RequestFailure, RetryHint};
use spurline_sys::{backoff_pause, random};
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::time::{Duration, Instant};

const FIRST: Duration = Duration::from_millis(50);
const FIRST_THROTTLED: Duration = Duration::from_millis(200);
const LONGEST: Duration = Duration::from_secs(5);
/// Longest pause for a server that does not listen, so that it is found soon after its start.
const LONGEST_WHEN_BACK: Duration = Duration::from_secs(1);
/// Longest pause that a store can request.
const LONGEST_ASKED: Duration = Duration::from_secs(20);
/// No attempt starts in the last part of the time: it would hardly end.
const LAST: Duration = Duration::from_millis(50);
/// Most attempts of a request that is redirected each time.
const REDIRECTS: u32 = 3;

/// The attempts of one request. Every transient failure is retried until the deadline.
pub struct RetryState<'a> {
    stats: &'a Stats,
    started: Instant,
    deadline: Instant,
    /// Most attempts; `None` until the deadline.
    most: Option<u32>,
    /// Refused attempts since the last progress.
    refused: u32,
    /// Other failures since the last progress or refused attempt: a server that has restarted starts at zero.
    failures: u32,
    /// All failures.
    total: u32,
}

impl<'a> RetryState<'a> {
    /// The attempts of a request that begins now.
    pub fn new(deadline: Instant, stats: &'a Stats) -> Self {
        RetryState { stats, started: Instant::now(), deadline, most: None, refused: 0, failures: 0, total: 0 }
    }

    /// Limits the number of attempts; the error then keeps the kind of the last failure.
    pub fn at_most(mut self, attempts: u32) -> Self {
        self.most = Some(attempts);
        self
    }

    /// Whether a further attempt is allowed after `sent` of them.
    pub fn allows(&self, sent: u32) -> bool {
        self.most.is_none_or(|most| sent < most)
    }

    /// Time left until the deadline.
    pub fn time_left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// Resets the pauses, because bytes have arrived.
    pub fn note_progress(&mut self) {
        self.failures = 0;
        self.refused = 0;
    }

    /// Waits before the next attempt.
    ///
    /// # Errors
    /// The failure itself when another attempt can't help; otherwise, when no time or attempt is left, `Timeout` if the
    /// server did not answer and `OriginFailed` if it failed.
    pub async fn pause(&mut self, failure: RequestFailure) -> Result<()> {
        let pause = self.next_pause(failure)?;
        self.stats.object.retries.add(1);
        tokio::time::sleep(pause).await;
        Ok(())
    }

    /// The pause before the next attempt.
    ///
    /// # Errors
    /// As with [`RetryState::pause`].
    pub fn next_pause(&mut self, failure: RequestFailure) -> Result<Duration> {
        self.total += 1;
        if failure.advice == RetryHint::AfterRestart {
            self.refused += 1;
            self.failures = 0;
        } else {
            self.failures += 1;
        }
        let failures_before = if self.failures == 0 { self.refused } else { self.failures } - 1;
        let grown = |first, longest| with_jitter(backoff_pause(first, longest, failures_before));
        let left = self.time_left();
        // Near the deadline attempts come sooner, rather than not at all.
        let pause = match failure.advice {
            RetryHint::Never => return Err(failure.error),
            // Two servers that redirect to each other must not cause a loop.
            RetryHint::AtOnce if self.total >= REDIRECTS => return Err(failure.error),
            RetryHint::AtOnce if self.total == 1 => Duration::ZERO,
            RetryHint::AtOnce | RetryHint::AfterPause => grown(FIRST, LONGEST).min(left / 2),
            RetryHint::AfterRestart => grown(FIRST, LONGEST_WHEN_BACK).min(left / 2),
            RetryHint::SlowDown(asked) => {
                self.stats.object.throttled.add(1);
                let ours = grown(FIRST_THROTTLED, LONGEST).min(left / 2);
                ours.max(asked.unwrap_or_default().min(LONGEST_ASKED))
            }
        };
        if !self.allows(self.total) || left < pause + LAST {
            return Err(self.exhausted_error(&failure));
        }
        tracing::debug!(attempt = self.total, error = %failure.error, ?pause, "retrying a request to the origin");
        Ok(pause)
    }

    fn exhausted_error(&self, failure: &RequestFailure) -> Error {
        let error = &failure.error;
        let kind = match error.kind() {
            kind if self.most.is_some() => kind,
            kind @ (ErrorKind::Timeout | ErrorKind::PermissionDenied) => kind,
            _ if failure.advice == RetryHint::AfterRestart => ErrorKind::Timeout,
            _ => ErrorKind::OriginFailed,
        };
        match self.total {
            1 => Error::new(kind, error.message()),
            n => {
                let seconds = self.started.elapsed().as_secs_f64();
                Error::new(kind, format!("{} (after {n} attempts in {seconds:.1} s)", error.message()))
            }
        }
    }
}

/// Between half of `pause` and all of it, so that many clients do not return at the same time.
fn with_jitter(pause: Duration) -> Duration {
    pause.mul_f64(0.5 + 0.5 * (random() as f64 / u64::MAX as f64))
}
