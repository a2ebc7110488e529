//! Owns whether the store refuses all requests for a bucket: the credentials were revoked or rotated, or have lost their rights. A
//! refused request starts a check, which lists one key; a refused check is repeated until the store accepts one. Knows no names and
//! no caches.

use crate::backend::{RequestFailure, RetryHint};
use crate::shared_buckets::SharedBucket;
use parking_lot::{Condvar, Mutex};
use spurline_types::{Error, ErrorKind, Result};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Deadline of a check, and the longest wait for its result.
const CHECK_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause between checks, and the time for which an accepted check counts.
const CHECK_PAUSE: Duration = Duration::from_secs(1);
/// Attempts of a check that are refused with credentials which were replaced meanwhile.
const CHECK_ATTEMPTS: u32 = 3;

/// What the store makes of the credentials of this process.
enum CredentialState {
    /// It accepts them, as far as is known; with the time of the last check.
    Accepted(Option<Instant>),
    /// A request was refused, and the check is under way.
    Checked,
    /// It refuses every request, with the error of the last check.
    Refused(Error),
}

/// Whether the store of a bucket refuses all requests.
pub(crate) struct RefusalWatch {
    state: Mutex<CredentialState>,
    decided: Condvar,
}

impl Default for RefusalWatch {
    fn default() -> Self {
        RefusalWatch { state: Mutex::new(CredentialState::Accepted(None)), decided: Condvar::new() }
    }
}

impl RefusalWatch {
    /// Whether the caller has to check: no check is under way, refused, or just done.
    fn begin_check(&self) -> bool {
        let mut state = self.state.lock();
        let CredentialState::Accepted(checked_at) = &*state else { return false };
        if checked_at.is_some_and(|at| at.elapsed() < CHECK_PAUSE) {
            return false;
        }
        *state = CredentialState::Checked;
        true
    }

    /// Takes the new state, and returns the error of the earlier one, if that was a refusal.
    fn decide(&self, decided: CredentialState) -> Option<Error> {
        let before = std::mem::replace(&mut *self.state.lock(), decided);
        self.decided.notify_all();
        if let CredentialState::Refused(error) = before { Some(error) } else { None }
    }

    /// Why the store refuses all requests; `None` while it serves.
    pub(crate) fn refusal(&self) -> Option<Error> {
        if let CredentialState::Refused(error) = &*self.state.lock() { Some(error.clone()) } else { None }
    }

    /// As [`Self::refusal`], after the check that is under way, but not after `deadline`.
    fn await_refusal(&self, deadline: Instant) -> Option<Error> {
        let until = deadline.min(Instant::now() + CHECK_TIMEOUT);
        let mut state = self.state.lock();
        while matches!(*state, CredentialState::Checked) && !self.decided.wait_until(&mut state, until).timed_out() {}
        if let CredentialState::Refused(error) = &*state { Some(error.clone()) } else { None }
    }
}

impl SharedBucket {
    /// Why the store refuses all requests; `None` while it serves. Waits for the check that is under way, but not after `deadline`.
    pub fn await_refusal(&self, deadline: Instant) -> Option<Error> {
        self.refusals.await_refusal(deadline)
    }

    /// Notes the failure of a request for names below `prefix`: after a refusal, a check shows whether the store refuses everything.
    pub fn note_failure(self: &Arc<Self>, prefix: &str, error: &Error) {
        let Some(runtime) = self.runtime.as_ref().filter(|_| error.kind() == ErrorKind::PermissionDenied) else {
            return;
        };
        if self.refusals.begin_check() {
            runtime.spawn(check_until_accepted(Arc::downgrade(self), prefix.to_owned()));
        }
    }

    /// Lists one key.
    async fn check_credentials(&self, prefix: &str) -> Result<(), RequestFailure> {
        let mut attempts = 1;
        loop {
            match self.backend.list(prefix, None, 1).await {
                Err(failure) if failure.advice == RetryHint::AtOnce && attempts < CHECK_ATTEMPTS => attempts += 1,
                answer => return answer.map(drop),
            }
        }
    }

    /// Takes the result of a check; whether another check has to follow.
    fn take_check(&self, answer: Result<(), RequestFailure>) -> bool {
        let place = self.backend.describe();
        match answer {
            Err(failure) if failure.error.kind() == ErrorKind::PermissionDenied => {
                if self.refusals.decide(CredentialState::Refused(failure.error.clone())).is_none() {
                    self.stats.object.refused_buckets.add(1);
                    tracing::warn!(error = %failure.error, "{place} refuses all requests of this process");
                }
                true
            }
            // Without an answer, an earlier refusal stands.
            Err(_) if self.refusals.refusal().is_some() => true,
            _ => {
                if self.refusals.decide(CredentialState::Accepted(Some(Instant::now()))).is_some() {
                    self.stats.object.refused_buckets.sub(1);
                    tracing::info!("{place} accepts the requests of this process again");
                }
                false
            }
        }
    }
}

/// Checks the credentials of a bucket, and again while they are refused.
async fn check_until_accepted(bucket: Weak<SharedBucket>, prefix: String) {
    loop {
        let Some(bucket) = bucket.upgrade() else { return };
        let checked = tokio::time::timeout(CHECK_TIMEOUT, bucket.check_credentials(&prefix)).await;
        let answer = checked.unwrap_or_else(|_| {
            Err(RequestFailure::transient(ErrorKind::Timeout, format!("{} does not answer", bucket.backend.describe())))
        });
        if !bucket.take_check(answer) {
            return;
        }
        drop(bucket);
        tokio::time::sleep(CHECK_PAUSE).await;
    }
}
