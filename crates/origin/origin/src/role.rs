//! A role's credentials: requested once at a time, and used while they are valid and newer ones fail or take long. It
//! deliberately knows no request to S3, nor the source of a role, which is the library's.

use crate::aws::{LOOKED_AT, require_graphic, root_cause};
use futures::FutureExt as _;
use futures::future::{BoxFuture, Shared};
use object_store::aws::{AwsCredential, AwsCredentialProvider};
use parking_lot::Mutex;
use spurline_types::{Error, ErrorKind, Result};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;

/// Credentials are not requested again sooner than this.
const RECENT: Duration = Duration::from_secs(1);
/// How long credentials stay valid after they were returned: the library returns cached ones only if they are valid
/// for five more minutes, and roles get new ones at least five minutes before the old expire. The rest allows for
/// clock differences.
const GOOD: Duration = Duration::from_secs(240);
/// Longest wait for new credentials while valid ones exist.
const PATIENCE: Duration = Duration::from_secs(2);
/// Pause after a failed request.
const PAUSE: Duration = Duration::from_secs(5);

type CredentialResult = Result<Arc<AwsCredential>>;

/// A request in flight, shared by all waiting callers.
type PendingCredential = Shared<BoxFuture<'static, CredentialResult>>;

#[derive(Default)]
struct CredentialState {
    /// The last credentials, and when they were requested.
    given: Option<(Arc<AwsCredential>, Instant)>,
    asking: Option<(Instant, PendingCredential)>,
    /// When the last request failed, if it did.
    failed: Option<Instant>,
}

/// The provider of a role's credentials, and the current ones.
pub(crate) struct RoleCredentials {
    provider: AwsCredentialProvider,
    /// Requests run on a runtime that lives as long as the store, so that they end neither with a transfer nor with a
    /// caller.
    runtime: OnceLock<Handle>,
    state: Arc<Mutex<CredentialState>>,
}

impl RoleCredentials {
    pub(crate) fn new(provider: AwsCredentialProvider) -> Self {
        RoleCredentials { provider, runtime: OnceLock::new(), state: Arc::default() }
    }

    /// Sets the runtime that lives as long as the store.
    pub(crate) fn attach(&self, shared: &Handle) {
        // Once, by the store that owns this.
        let _ = self.runtime.set(shared.clone());
    }

    /// The current credentials.
    ///
    /// # Errors
    /// `PermissionDenied` when there are none and none can be obtained.
    pub(crate) async fn credential(&self) -> CredentialResult {
        let (good, since, asking) = {
            let mut state = self.state.lock();
            let good = state.given.clone().filter(|(_, given)| given.elapsed() < GOOD);
            let failed = state.failed.is_some_and(|at| at.elapsed() < PAUSE);
            if let Some((credential, given)) = &good
                && (failed || given.elapsed() < RECENT)
            {
                return Ok(Arc::clone(credential));
            }
            let (since, asking) =
                state.asking.get_or_insert_with(|| (Instant::now(), self.request_credential())).clone();
            (good, since, asking)
        };
        let Some((credential, _)) = good else { return asking.await };
        let answer = tokio::time::timeout_at((since + PATIENCE).into(), asking).await;
        Ok(answer.ok().and_then(Result::ok).unwrap_or(credential))
    }

    fn request_credential(&self) -> PendingCredential {
        let (provider, state) = (Arc::clone(&self.provider), Arc::clone(&self.state));
        let runtime = self.runtime.get().cloned().unwrap_or_else(Handle::current);
        let task = runtime.spawn(async move {
            let asked = Instant::now();
            let answer = provider.get_credential().await.map_err(|e| missing_error(&root_cause(&e))).and_then(check_usable);
            let mut state = state.lock();
            state.asking = None;
            match &answer {
                Ok(credential) => (state.given, state.failed) = (Some((Arc::clone(credential), asked)), None),
                Err(error) => {
                    if state.failed.is_none() && state.given.is_some() {
                        tracing::warn!(%error, "a role's credentials can't be renewed; the current ones are used while they are valid");
                    }
                    state.failed = Some(Instant::now());
                }
            }
            answer
        });
        let state = Arc::clone(&self.state);
        let answer = async move {
            task.await.unwrap_or_else(|_| {
                state.lock().asking = None;
                Err(Error::new(ErrorKind::Unavailable, "the request for a role's credentials was cancelled"))
            })
        };
        answer.boxed().shared()
    }
}

fn missing_error(why: &str) -> Error {
    let message = format!(
        "no credentials for S3: checked {LOOKED_AT}; the last one failed: {why}; set one of them, or use anonymous access \
         to a public bucket"
    );
    Error::new(ErrorKind::PermissionDenied, message)
}

/// Refuses values at which the library's signer would panic.
fn check_usable(credential: Arc<AwsCredential>) -> CredentialResult {
    require_graphic("the role's access key", &credential.key_id)?;
    credential.token.as_deref().map(|token| require_graphic("the role's session token", token)).transpose()?;
    Ok(credential)
}

#[cfg(test)]
mod tests {
    use super::*;
    use object_store::CredentialProvider;

    /// Returns a configured answer and counts requests.
    #[derive(Debug, Default)]
    struct Told {
        asked: Mutex<u32>,
        /// `None`: fails.
        key: Mutex<Option<&'static str>>,
    }

    impl CredentialProvider for Told {
        type Credential = AwsCredential;
        fn get_credential<'a, 'b>(&'a self) -> BoxFuture<'b, object_store::Result<Arc<AwsCredential>>>
        where
            'a: 'b,
            Self: 'b,
        {
            *self.asked.lock() += 1;
            let answer = match *self.key.lock() {
                Some(key) => Ok(Arc::new(AwsCredential { key_id: key.into(), secret_key: "s".into(), token: None })),
                None => Err(object_store::Error::Generic { store: "S3", source: "no answer of STS".into() }),
            };
            async { answer }.boxed()
        }
    }

    #[test]
    fn credentials_serve_while_they_are_good() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let told = Arc::new(Told::default());
        let role = RoleCredentials::new(Arc::clone(&told) as AwsCredentialProvider);
        role.attach(runtime.handle());
        let key = || runtime.block_on(role.credential()).map(|c| c.key_id.clone());
        let later = |time: Duration| {
            let mut state = role.state.lock();
            let back = |at: Instant| at.checked_sub(time).unwrap();
            state.given = state.given.take().map(|(credential, at)| (credential, back(at)));
            state.failed = state.failed.map(back);
        };
        let error = key().unwrap_err();
        assert!(error.kind() == ErrorKind::PermissionDenied && error.message().contains("no answer of STS"), "{error}");
        *told.key.lock() = Some("A");
        assert_eq!(key().unwrap(), "A");
        later(Duration::from_secs(2));
        // Newer ones are requested, and not again and again where that fails.
        *told.key.lock() = None;
        let before = *told.asked.lock();
        for _ in 0..10 {
            assert_eq!(key().unwrap(), "A");
        }
        assert_eq!(*told.asked.lock(), before + 1);
        later(PAUSE);
        assert_eq!(key().unwrap(), "A");
        later(GOOD);
        assert!(key().is_err());
        *told.key.lock() = Some("with a space");
        assert!(key().unwrap_err().message().contains("the role's access key"));
        *told.key.lock() = Some("B");
        assert_eq!(key().unwrap(), "B");
    }
}
