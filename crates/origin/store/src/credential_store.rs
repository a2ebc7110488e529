//! The credentials in use for one bucket: loaded once at a time, renewed before they expire, and loaded again when their
//! file changes or the server refuses them. While a new load fails or takes long, valid ones stay in use.
//! It deliberately knows no request to S3, and no kind of source.

use crate::messages::{require_graphic, root_cause};
use futures::FutureExt as _;
use futures::future::{BoxFuture, Shared};
use parking_lot::Mutex;
use reqsign_aws_v4::Credential;
use reqsign_core::{Context, ProvideCredentialDyn};
use spurline_types::{Error, ErrorKind, Result};
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};
use tokio::runtime::Handle;

/// The sources that are checked, for messages.
const LOOKED_AT: &str = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (AWS_SESSION_TOKEN), AWS_PROFILE in \
     ~/.aws/credentials (AWS_SHARED_CREDENTIALS_FILE) and ~/.aws/config (AWS_CONFIG_FILE), AWS_WEB_IDENTITY_TOKEN_FILE \
     with AWS_ROLE_ARN, AWS_CONTAINER_CREDENTIALS_RELATIVE_URI and the instance's role";

/// The source of credentials: one of the library's providers, or a chain of them.
pub(crate) type CredentialSource = Arc<dyn ProvideCredentialDyn<Credential = Credential>>;

/// Files are checked for changes, and refused credentials loaded again, at most this often.
const RECENT: Duration = Duration::from_secs(1);
/// Credentials are renewed when they expire within this time. Roles get new ones at least this long before.
const RENEW_BEFORE: Duration = Duration::from_secs(300);
/// Credentials that expire within this time are no longer used.
const EXPIRY_MARGIN: Duration = Duration::from_secs(10);
/// Longest wait for new credentials while valid ones exist.
const PATIENCE: Duration = Duration::from_secs(2);
/// Pause after a failed load.
const PAUSE: Duration = Duration::from_secs(5);

type CredentialResult = Result<Arc<Credential>>;

/// A load in flight, shared by all waiting callers.
type PendingCredential = Shared<BoxFuture<'static, CredentialResult>>;

/// Inode, length and times of a file; `None` when it is absent.
type FileStamp = Option<(u64, u64, i64, i64, i64, i64)>;

#[derive(Default)]
struct CredentialState {
    current: Option<Arc<Credential>>,
    /// The state of the files before the current ones were loaded.
    stamps: Vec<FileStamp>,
    /// When the files were last checked, or the source was last asked.
    checked: Option<Instant>,
    pending: Option<(Instant, PendingCredential)>,
    /// When the last load failed, if it did.
    failed: Option<Instant>,
    /// When the source last had the same credentials as those refused.
    confirmed: Option<Instant>,
}

/// A source of credentials, and those in use.
pub(crate) struct CredentialStore {
    source: CredentialSource,
    context: Context,
    /// Files that the source reads.
    files: Arc<[PathBuf]>,
    /// Loads run on a runtime that lives as long as the bucket, so that they end neither with a transfer nor with a caller.
    runtime: OnceLock<Handle>,
    state: Arc<Mutex<CredentialState>>,
}

impl CredentialStore {
    pub(crate) fn new(source: CredentialSource, context: Context, files: Vec<PathBuf>) -> Self {
        CredentialStore { source, context, files: files.into(), runtime: OnceLock::new(), state: Arc::default() }
    }

    /// Sets the runtime that lives as long as the bucket.
    pub(crate) fn attach_runtime(&self, shared: &Handle) {
        // Once, by the bucket that owns this.
        let _ = self.runtime.set(shared.clone());
    }

    /// The credentials to sign with now.
    ///
    /// # Errors
    /// When there are none and none can be loaded: `PermissionDenied`, or `Unavailable` where the source did not answer.
    pub(crate) async fn current(&self) -> CredentialResult {
        let (valid, since, pending) = {
            let mut state = self.state.lock();
            let valid = state.current.clone().filter(|current| !expires_within(current, EXPIRY_MARGIN));
            if let Some(current) = &valid {
                let recent = state.checked.is_some_and(|at| at.elapsed() < RECENT);
                let failed = state.failed.is_some_and(|at| at.elapsed() < PAUSE);
                let due = !self.files.is_empty() || expires_within(current, RENEW_BEFORE);
                if recent || failed || !due {
                    return Ok(Arc::clone(current));
                }
            }
            let (since, pending) = self.pending_load(&mut state, false);
            (valid, since, pending)
        };
        let Some(current) = valid else { return pending.await };
        let answer = tokio::time::timeout_at((since + PATIENCE).into(), pending).await;
        Ok(answer.ok().and_then(Result::ok).unwrap_or(current))
    }

    /// Loads the credentials again after the server refused `refused`. `None` when the source still has the same ones.
    pub(crate) async fn replace(&self, refused: &Arc<Credential>) -> Option<Arc<Credential>> {
        let pending = {
            let mut state = self.state.lock();
            match &state.current {
                // Another request has replaced them.
                Some(current) if !same_keys(current, refused) => return Some(Arc::clone(current)),
                _ if state.confirmed.is_some_and(|at| at.elapsed() < PAUSE) => return None,
                _ => {}
            }
            self.pending_load(&mut state, true).1
        };
        let loaded = tokio::time::timeout(PATIENCE, pending).await.ok()?.ok()?;
        if same_keys(&loaded, refused) {
            self.state.lock().confirmed = Some(Instant::now());
            return None;
        }
        Some(loaded)
    }

    /// The load in flight, or a new one. It returns the current credentials if their files are unchanged, unless `forced`.
    fn pending_load(&self, state: &mut CredentialState, forced: bool) -> (Instant, PendingCredential) {
        state.pending.get_or_insert_with(|| (Instant::now(), self.load(forced))).clone()
    }

    fn load(&self, forced: bool) -> PendingCredential {
        let source = Arc::clone(&self.source);
        let context = self.context.clone();
        let files = Arc::clone(&self.files);
        let state = Arc::clone(&self.state);
        let runtime = self.runtime.get().cloned().unwrap_or_else(Handle::current);
        let task = runtime.spawn(async move {
            // Before the load: a change during it is noticed at the next check.
            let stamps = tokio::task::spawn_blocking(move || files.iter().map(file_stamp).collect::<Vec<_>>());
            let stamps = stamps.await.unwrap_or_default();
            let unchanged = {
                let mut state = state.lock();
                state.checked = Some(Instant::now());
                let keep = state.current.clone().filter(|current| {
                    !forced && state.stamps == stamps && !expires_within(current, RENEW_BEFORE)
                });
                keep.inspect(|_| state.pending = None)
            };
            if let Some(current) = unchanged {
                return Ok(current);
            }
            let answer = source.provide_credential_dyn(&context).await;
            let answer = match answer {
                Ok(Some(credential)) => check_usable(credential),
                Ok(None) => Err(missing_error(ErrorKind::PermissionDenied, "no source has any")),
                // The source may answer later.
                Err(error) if error.is_retryable() || error.kind() == reqsign_core::ErrorKind::Unexpected => {
                    Err(missing_error(ErrorKind::Unavailable, &root_cause(&error)))
                }
                Err(error) => Err(missing_error(ErrorKind::PermissionDenied, &root_cause(&error))),
            };
            let mut state = state.lock();
            state.pending = None;
            match &answer {
                Ok(credential) => {
                    if state.current.as_ref().is_some_and(|old| !same_keys(old, credential)) {
                        let key = shown_key(&credential.access_key_id);
                        tracing::info!("using new credentials for S3: access key {key}");
                    }
                    state.current = Some(Arc::clone(credential));
                    state.stamps = stamps;
                    state.failed = None;
                }
                Err(error) => {
                    if state.failed.is_none() && state.current.is_some() {
                        tracing::warn!(%error, "the credentials can't be renewed; the current ones are used while they are valid");
                    }
                    state.failed = Some(Instant::now());
                }
            }
            answer
        });
        let state = Arc::clone(&self.state);
        let answer = async move {
            task.await.unwrap_or_else(|_| {
                state.lock().pending = None;
                Err(Error::new(ErrorKind::Unavailable, "the load of credentials was cancelled"))
            })
        };
        answer.boxed().shared()
    }
}

/// The start of an access key's id, for messages.
pub(crate) fn shown_key(id: &str) -> String {
    id.trim().chars().take(4).chain(['…']).collect()
}

fn file_stamp(path: &PathBuf) -> FileStamp {
    std::fs::metadata(path).ok().map(|m| (m.ino(), m.len(), m.mtime(), m.mtime_nsec(), m.ctime(), m.ctime_nsec()))
}

fn expires_within(credential: &Credential, time: Duration) -> bool {
    credential.expires_in.is_some_and(|at| at.as_system_time() < SystemTime::now() + time)
}

fn same_keys(a: &Credential, b: &Credential) -> bool {
    a.access_key_id == b.access_key_id
        && a.secret_access_key == b.secret_access_key
        && a.session_token == b.session_token
}

fn missing_error(kind: ErrorKind, why: &str) -> Error {
    let message = format!(
        "no credentials for S3: checked {LOOKED_AT}; the last one failed: {why}; set one of them, or read a public bucket \
         with --anonymous"
    );
    Error::new(kind, message)
}

/// Removes white space, such as a line break at the end of a file, and refuses what no header can carry.
fn check_usable(mut credential: Credential) -> CredentialResult {
    credential.access_key_id = require_graphic("the access key", &credential.access_key_id)?;
    credential.secret_access_key = require_graphic("the secret of the access key", &credential.secret_access_key)?;
    credential.session_token =
        credential.session_token.map(|token| require_graphic("the session token", &token)).transpose()?;
    Ok(Arc::new(credential))
}

#[cfg(test)]
mod tests {
    use super::*;
    use reqsign_core::ProvideCredential;

    /// Returns configured credentials and counts requests.
    #[derive(Debug, Default)]
    struct FakeSource {
        requests: Mutex<u32>,
        /// `None`: fails.
        key: Mutex<Option<&'static str>>,
        /// Seconds until they expire.
        lifetime: Option<u64>,
    }

    impl ProvideCredential for FakeSource {
        type Credential = Credential;
        async fn provide_credential(&self, _: &Context) -> reqsign_core::Result<Option<Credential>> {
            *self.requests.lock() += 1;
            let key = *self.key.lock();
            let key = key.ok_or_else(|| reqsign_core::Error::unexpected("no answer of STS"))?;
            let now = reqsign_core::time::Timestamp::now();
            Ok(Some(Credential {
                access_key_id: key.into(),
                secret_access_key: "s".into(),
                session_token: None,
                expires_in: self.lifetime.map(|seconds| now + Duration::from_secs(seconds)),
            }))
        }
    }

    fn rig(lifetime: Option<u64>, files: Vec<PathBuf>) -> (tokio::runtime::Runtime, Arc<FakeSource>, CredentialStore) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let source = Arc::new(FakeSource { lifetime, ..FakeSource::default() });
        let store = CredentialStore::new(Arc::clone(&source) as CredentialSource, Context::new(), files);
        store.attach_runtime(runtime.handle());
        (runtime, source, store)
    }

    fn age(store: &CredentialStore, time: Duration) {
        let mut state = store.state.lock();
        let back = |at: Instant| at.checked_sub(time).unwrap();
        state.checked = state.checked.map(back);
        state.failed = state.failed.map(back);
        state.confirmed = state.confirmed.map(back);
    }

    #[test]
    fn credentials_are_used_while_they_are_valid() {
        // Within the time before they expire in which they are renewed.
        let (runtime, source, store) = rig(Some(100), Vec::new());
        let key = || runtime.block_on(store.current()).map(|c| c.access_key_id.clone());
        let error = key().unwrap_err();
        assert!(error.kind() == ErrorKind::Unavailable && error.message().contains("no answer of STS"), "{error}");
        *source.key.lock() = Some("A");
        assert_eq!(key().unwrap(), "A");
        age(&store, RECENT);
        // Newer ones are requested, and not again and again where that fails.
        *source.key.lock() = None;
        let before = *source.requests.lock();
        for _ in 0..10 {
            assert_eq!(key().unwrap(), "A");
        }
        assert_eq!(*source.requests.lock(), before + 1);
        age(&store, PAUSE);
        *source.key.lock() = Some("with a space");
        assert_eq!(key().unwrap(), "A");
        age(&store, PAUSE);
        *source.key.lock() = Some("B");
        assert_eq!(key().unwrap(), "B");
    }

    #[test]
    fn expired_credentials_are_not_used() {
        let (runtime, source, store) = rig(Some(5), Vec::new());
        *source.key.lock() = Some("A");
        assert!(runtime.block_on(store.current()).is_ok());
        *source.key.lock() = None;
        assert!(runtime.block_on(store.current()).is_err());
    }

    #[test]
    fn a_changed_file_and_a_refusal_load_them_again() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("credentials");
        std::fs::write(&file, "1").unwrap();
        let (runtime, source, store) = rig(None, vec![file.clone()]);
        *source.key.lock() = Some("A");
        let current = || runtime.block_on(store.current()).unwrap();
        let first = current();
        age(&store, RECENT);
        current();
        assert_eq!(*source.requests.lock(), 1, "an unchanged file is not loaded again");
        *source.key.lock() = Some("B");
        std::fs::write(&file, "22").unwrap();
        age(&store, RECENT);
        assert_eq!(current().access_key_id, "B");
        // The refusal of earlier credentials needs no load.
        assert_eq!(runtime.block_on(store.replace(&first)).unwrap().access_key_id, "B");
        assert_eq!(*source.requests.lock(), 2);
        let second = current();
        assert!(runtime.block_on(store.replace(&second)).is_none(), "the source has the same");
        assert!(runtime.block_on(store.replace(&second)).is_none());
        assert_eq!(*source.requests.lock(), 3, "not again at once");
        *source.key.lock() = Some("C");
        age(&store, PAUSE);
        assert_eq!(runtime.block_on(store.replace(&second)).unwrap().access_key_id, "C");
        assert_eq!(current().access_key_id, "C");
    }
}
