//! How an under-store is reached: credentials, endpoint, deadlines and limits.
//! It deliberately knows no command line; the environment is handed in so that tests own it.

use crate::InCommon;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// An access key with its secret. Never shown by `Debug` beyond the key's first letters.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// The access key's id.
    pub access_key_id: String,
    /// The secret.
    pub secret_access_key: String,
    /// The session token of temporary credentials.
    pub session_token: Option<String>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown: String = self.access_key_id.chars().take(4).collect();
        write!(f, "Credentials({shown}…)")
    }
}

/// Where environment variables come from: the process, or a map of a test's own.
#[derive(Clone, Default)]
pub enum Environment {
    /// The process environment.
    #[default]
    Process,
    /// These and no others.
    Fixed(Arc<HashMap<String, String>>),
}

impl Environment {
    /// Only the variables given.
    pub fn fixed<const N: usize>(variables: [(&str, &str); N]) -> Self {
        Environment::Fixed(Arc::new(variables.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()))
    }

    /// The value of `name`, if it is set and not empty.
    pub fn get(&self, name: &str) -> Option<String> {
        let value = match self {
            Environment::Process => std::env::var(name).ok(),
            Environment::Fixed(map) => map.get(name).cloned(),
        };
        value.filter(|v| !v.is_empty())
    }

    /// All variables whose name starts with `prefix`.
    pub fn starting_with(&self, prefix: &str) -> Vec<(String, String)> {
        let mut found: Vec<(String, String)> = match self {
            Environment::Process => std::env::vars_os()
                .filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)))
                .filter(|(k, _)| k.starts_with(prefix))
                .collect(),
            Environment::Fixed(map) => {
                map.iter().filter(|(k, _)| k.starts_with(prefix)).map(|(k, v)| (k.clone(), v.clone())).collect()
            }
        };
        found.sort();
        found
    }
}

impl fmt::Debug for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Environment::Process => "Process",
            Environment::Fixed(_) => "Fixed(…)",
        })
    }
}

/// How an under-store is reached. `UnderConfig::default()` is right for most.
#[derive(Debug, Clone)]
pub struct UnderConfig {
    /// S3 endpoint; else `AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL`, `AWS_ENDPOINT`, the profile's, AWS itself.
    pub endpoint: Option<String>,
    /// S3 region; else `AWS_REGION`, `AWS_DEFAULT_REGION`, the profile's, `us-east-1`. A server that names another
    /// is followed.
    pub region: Option<String>,
    /// S3 credentials; else the environment, the profile, the web identity, the container's or the instance's role.
    pub credentials: Option<Credentials>,
    /// Sign nothing: public buckets.
    pub anonymous: bool,
    /// The sources that the one who chose them may go below, as URLs. A directory below one of them is reached from there
    /// without following a link: what is opened was asked for by somebody else.
    pub within: Vec<String>,
    /// Bucket in the host name (`true`) or in the path (`false`); by default in the path for an endpoint of one's own
    /// and in the host name for AWS.
    pub virtual_hosted: Option<bool>,
    /// The environment to look at.
    pub env: Environment,
    /// Longest time to wait for an answer's first byte, and for the whole of a listing or lookup.
    pub timeout: Duration,
    /// Longest time to wait for a connection.
    pub connect_timeout: Duration,
    /// A transfer without a byte for this long is cut and its rest asked for again; a request without an answer is sent
    /// again beside the first, at the latest after a third of `timeout`, and up to twice.
    pub stall_timeout: Duration,
    /// How many times in a row a request without progress is sent again.
    pub retries: u32,
    /// Requests under way at once, those sent again beside one without an answer not counted; further ones wait their turn.
    pub max_downloads: usize,
    /// Threads that wait for the operating system on behalf of directory sources (`--under-threads`). Each may hold
    /// two buffers of [`UnderConfig::DIR_CHUNK`] bytes.
    pub dir_threads: usize,
    /// Threads that drive connections to object stores; 0 chooses by the CPUs.
    pub net_threads: usize,
    /// What is opened with clones of one shares the threads, connections and places (`max_downloads`) of each bucket.
    pub in_common: InCommon,
}

impl UnderConfig {
    /// How much of a file a directory source reads at once.
    pub const DIR_CHUNK: usize = 256 << 10;

    /// How long a request is waited for alone.
    pub(crate) fn patience(&self) -> Duration {
        self.stall_timeout.min(self.timeout / 3)
    }

    /// How long a connection is kept unused: what is sent again must not go to where the first attempt went, over
    /// another connection that has been idle since before.
    pub(crate) fn idle_timeout(&self) -> Duration {
        self.patience().min(Duration::from_secs(20))
    }

    /// Memory a directory source may use for its buffers when all its threads are busy, in bytes.
    pub fn dir_buffer_bytes(&self) -> u64 {
        self.dir_threads as u64 * 2 * Self::DIR_CHUNK as u64
    }
}

impl Default for UnderConfig {
    fn default() -> Self {
        UnderConfig {
            endpoint: None,
            region: None,
            credentials: None,
            anonymous: false,
            within: Vec::new(),
            virtual_hosted: None,
            env: Environment::Process,
            timeout: Duration::from_secs(30),
            connect_timeout: Duration::from_secs(5),
            stall_timeout: Duration::from_secs(10),
            retries: 8,
            max_downloads: 200,
            dir_threads: 16,
            net_threads: 0,
            in_common: InCommon::default(),
        }
    }
}
