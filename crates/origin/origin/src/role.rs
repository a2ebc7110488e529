//! A role's credentials: asked for by one question at a time, and used for as long as they are good while asking for newer
//! ones fails or takes long. It deliberately knows no request to S3, nor where a role comes from, which is the library's.

use crate::aws::{LOOKED_AT, plain, root_cause};
use futures::FutureExt as _;
use futures::future::{BoxFuture, Shared};
use object_store::aws::{AwsCredential, AwsCredentialProvider};
use parking_lot::Mutex;
use spurline_types::{Error, ErrorKind, Result};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;

/// A credential is not asked for again sooner than this.
const RECENT: Duration = Duration::from_secs(1);
/// How long a credential is good after it was given: the library gives one that it has only if it is valid for five minutes
/// more, and roles have a new one at least five minutes before the end of the old. The rest is for clocks that differ.
const GOOD: Duration = Duration::from_secs(240);
/// An answer that takes longer than this is not waited for where there is a good credential.
const PATIENCE: Duration = Duration::from_secs(2);
/// Nor is the question asked again sooner than this where it failed.
const PAUSE: Duration = Duration::from_secs(5);

type Answer = Result<Arc<AwsCredential>>;

/// A question under way, for all who wait for it.
type Asking = Shared<BoxFuture<'static, Answer>>;

#[derive(Default)]
struct State {
    /// The one given last, and when it was asked for.
    given: Option<(Arc<AwsCredential>, Instant)>,
    asking: Option<(Instant, Asking)>,
    /// When asking failed, if it did last time.
    failed: Option<Instant>,
}

/// Where a role's credentials come from, and those there are.
pub(crate) struct Role {
    provider: AwsCredentialProvider,
    /// What asks lives as long as the store: its connections must not be a lane's, nor end with a reader's patience.
    runtime: OnceLock<Handle>,
    state: Arc<Mutex<State>>,
}

impl Role {
    pub(crate) fn new(provider: AwsCredentialProvider) -> Self {
        Role { provider, runtime: OnceLock::new(), state: Arc::default() }
    }

    /// Tells the runtime that lives as long as the store.
    pub(crate) fn attach(&self, shared: &Handle) {
        // Once, by the store that owns this.
        let _ = self.runtime.set(shared.clone());
    }

    /// The credentials now.
    ///
    /// # Errors
    /// `PermissionDenied` when none can be had and there are no good ones.
    pub(crate) async fn credential(&self) -> Answer {
        let (good, since, asking) = {
            let mut state = self.state.lock();
            let good = state.given.clone().filter(|(_, given)| given.elapsed() < GOOD);
            let failed = state.failed.is_some_and(|at| at.elapsed() < PAUSE);
            if let Some((credential, given)) = &good
                && (failed || given.elapsed() < RECENT)
            {
                return Ok(Arc::clone(credential));
            }
            let (since, asking) = state.asking.get_or_insert_with(|| (Instant::now(), self.ask())).clone();
            (good, since, asking)
        };
        let Some((credential, _)) = good else { return asking.await };
        let answer = tokio::time::timeout_at((since + PATIENCE).into(), asking).await;
        Ok(answer.ok().and_then(Result::ok).unwrap_or(credential))
    }

    fn ask(&self) -> Asking {
        let (provider, state) = (Arc::clone(&self.provider), Arc::clone(&self.state));
        let runtime = self.runtime.get().cloned().unwrap_or_else(Handle::current);
        let task = runtime.spawn(async move {
            let asked = Instant::now();
            let answer = provider.get_credential().await.map_err(|e| missing(&root_cause(&e))).and_then(usable);
            let mut state = state.lock();
            state.asking = None;
            match &answer {
                Ok(credential) => (state.given, state.failed) = (Some((Arc::clone(credential), asked)), None),
                Err(error) => {
                    if state.failed.is_none() && state.given.is_some() {
                        tracing::warn!(%error, "a role's credentials can't be renewed; those in hand are used while they are good");
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
                Err(Error::new(ErrorKind::Unavailable, "asking for a role's credentials was broken off"))
            })
        };
        answer.boxed().shared()
    }
}

fn missing(why: &str) -> Error {
    let message = format!(
        "no credentials for S3: looked at {LOOKED_AT}; the last said: {why}; set one of them, or ask for anonymous access \
         to a public bucket"
    );
    Error::new(ErrorKind::PermissionDenied, message)
}

/// Refuses what the library's signer would panic at.
fn usable(credential: Arc<AwsCredential>) -> Answer {
    plain("the role's access key", &credential.key_id)?;
    credential.token.as_deref().map(|token| plain("the role's session token", token)).transpose()?;
    Ok(credential)
}

#[cfg(test)]
mod tests {
    use super::*;
    use object_store::CredentialProvider;

    /// Answers what it is told to, and counts.
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
        let role = Role::new(Arc::clone(&told) as AwsCredentialProvider);
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
        // Newer ones are asked for, and not again and again where that fails.
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
