//! How an origin is reached: credentials, endpoint, deadlines and limits. It deliberately knows no command line; the
//! caller passes the environment, so that tests control it.

use crate::request_options::RequestOptions;
use crate::shared_buckets::SharedBuckets;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// An access key with its secret. `Debug` shows only the first letters of the key.
#[derive(Clone, PartialEq, Eq)]
pub struct AwsCredentials {
    /// The access key's id.
    pub access_key_id: String,
    /// The secret.
    pub secret_access_key: String,
    /// The session token of temporary credentials.
    pub session_token: Option<String>,
}

impl fmt::Debug for AwsCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown: String = self.access_key_id.chars().take(4).collect();
        write!(f, "Credentials({shown}…)")
    }
}

/// The source of environment variables: the process, or a fixed map in tests.
#[derive(Clone, Default)]
pub enum EnvironmentSource {
    /// The process environment.
    #[default]
    Process,
    /// These variables only.
    Fixed(Arc<HashMap<String, String>>),
}

impl EnvironmentSource {
    /// Only the given variables.
    pub fn fixed<const N: usize>(variables: [(&str, &str); N]) -> Self {
        EnvironmentSource::Fixed(Arc::new(variables.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()))
    }

    /// The value of `name`, if it is set and not empty.
    pub fn get(&self, name: &str) -> Option<String> {
        let value = match self {
            EnvironmentSource::Process => std::env::var(name).ok(),
            EnvironmentSource::Fixed(map) => map.get(name).cloned(),
        };
        value.filter(|v| !v.is_empty())
    }

    /// All variables with a name that starts with `prefix`.
    pub fn starting_with(&self, prefix: &str) -> Vec<(String, String)> {
        let mut found: Vec<(String, String)> = match self {
            EnvironmentSource::Process => std::env::vars_os()
                .filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)))
                .filter(|(k, _)| k.starts_with(prefix))
                .collect(),
            EnvironmentSource::Fixed(map) => {
                map.iter().filter(|(k, _)| k.starts_with(prefix)).map(|(k, v)| (k.clone(), v.clone())).collect()
            }
        };
        found.sort();
        found
    }
}

impl fmt::Debug for EnvironmentSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            EnvironmentSource::Process => "Process",
            EnvironmentSource::Fixed(_) => "Fixed(…)",
        })
    }
}

/// How an origin is reached. `OriginOptions::default()` fits most uses.
#[derive(Debug, Clone)]
pub struct OriginOptions {
    /// S3 endpoint; else `AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL`, `AWS_ENDPOINT`, the profile's, AWS itself.
    pub endpoint: Option<String>,
    /// S3 region; else `AWS_REGION`, `AWS_DEFAULT_REGION`, the profile's, `us-east-1`. When the server names another
    /// region, that one is used.
    pub region: Option<String>,
    /// S3 credentials; else the environment, the profile, the web identity, the container's or the instance's role.
    pub credentials: Option<AwsCredentials>,
    /// Send unsigned requests, for public buckets.
    pub anonymous: bool,
    /// What requests to S3 say of payment, owner and storage.
    pub request_options: RequestOptions,
    /// URLs of the directories that the operator allows. A directory below one of them is opened from there without
    /// following a link, because its name comes from another party.
    pub within: Vec<String>,
    /// Bucket in the host name (`true`) or in the path (`false`). The default is the path for a custom endpoint and
    /// the host name for AWS.
    pub virtual_hosted: Option<bool>,
    /// The environment variables.
    pub env: EnvironmentSource,
    /// Longest time to wait for an answer's first byte, and for the whole of a listing or lookup.
    pub timeout: Duration,
    /// Longest time to wait for a connection.
    pub connect_timeout: Duration,
    /// A transfer that receives no byte for this long is cancelled and its rest requested again. A request without an
    /// answer is repeated beside the first, at the latest after a third of `timeout`, and up to twice.
    pub stall_timeout: Duration,
    /// Concurrent requests, not counting repeated ones; further requests wait.
    pub max_downloads: usize,
    /// Threads for the system calls of directory origins. Each may hold two buffers of
    /// [`OriginOptions::DIR_CHUNK`] bytes.
    pub dir_threads: usize,
    /// Threads that drive connections to object stores; 0 derives the number from the CPUs.
    pub net_threads: usize,
    /// Origins opened with clones of one value share each bucket's threads, connections and permits
    /// (`max_downloads`).
    pub shared_buckets: SharedBuckets,
}

impl OriginOptions {
    /// Bytes that a directory origin reads at once.
    pub const DIR_CHUNK: usize = 256 << 10;

    /// Time after which a request without an answer is repeated beside the first.
    pub fn resend_after(&self) -> Duration {
        self.stall_timeout.min(self.timeout / 3)
    }

    /// Time for which an unused connection is kept. It is short, so that a repeated request does not use another
    /// connection that was idle since before, to the same dead server.
    pub(crate) fn idle_timeout(&self) -> Duration {
        self.resend_after().min(Duration::from_secs(20))
    }

    /// Buffer memory of a directory origin when all its threads are busy, in bytes.
    pub fn dir_buffer_bytes(&self) -> u64 {
        self.dir_threads as u64 * 2 * Self::DIR_CHUNK as u64
    }
}

impl Default for OriginOptions {
    fn default() -> Self {
        OriginOptions {
            endpoint: None,
            region: None,
            credentials: None,
            anonymous: false,
            request_options: RequestOptions::default(),
            within: Vec::new(),
            virtual_hosted: None,
            env: EnvironmentSource::Process,
            timeout: Duration::from_secs(60),
            connect_timeout: Duration::from_secs(5),
            stall_timeout: Duration::from_secs(10),
            max_downloads: 200,
            dir_threads: 16,
            net_threads: 0,
            shared_buckets: SharedBuckets::default(),
        }
    }
}
