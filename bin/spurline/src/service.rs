//! What a mount and a node have in common around their work: logs, the admin socket, the metrics page.

use crate::report;
use serde_json::Value;
use spurline_config::{Fault, Host, LogConfig, LogFormat, MetricsConfig, checked};
use spurline_jobs::JobManager;
use spurline_observe::http::{Bind, MetricsServer};
use spurline_observe::log::{self, LogSettings};
use spurline_observe::place::{self, Owner};
use spurline_observe::server::AdminServer;
use spurline_observe::{AdminTarget, usage};
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// Where a background process logs when nobody said where.
///
/// # Errors
/// When this user has no directory of their own.
pub fn default_log(host: &Host) -> std::result::Result<PathBuf, Fault> {
    match (&host.home, host.root) {
        (Some(home), false) => Ok(home.join(".local/state/spurline/spurline.log")),
        // Not in /tmp itself, where others can put something of that name first.
        (None, false) => {
            let dir = place::make_runtime_dir();
            let dir = dir.map_err(|e| Fault { remedy: LOG_REMEDY.into(), ..Fault::from(e.context("the log")) })?;
            Ok(dir.join("spurline.log"))
        }
        (_, true) => Ok(PathBuf::from("/var/log/spurline.log")),
    }
}

const LOG_REMEDY: &str = "name a writable file with --log";

/// Takes as many open files as this process may have: the usual limit of 1024 is there for programs that use select(2), and
/// is few for connections and cached files.
pub fn raise_open_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
    {
        tracing::debug!("the limit of open files stays at {current:?}: {error}");
    }
}

/// The most connections of a node over TCP, where it may have files enough open.
const CONNECTIONS: usize = 65_536;

/// How many connections a node takes over TCP and over RDMA, as far as open files go: half of those it may have and an
/// eighth, as cached files take a quarter; and how there would be more over TCP.
pub fn connections() -> (usize, usize, String) {
    use rustix::process::{Resource, getrlimit};
    let files = getrlimit(Resource::Nofile).current.and_then(|files| usize::try_from(files).ok()).unwrap_or(usize::MAX);
    let tcp = (files / 2).clamp(16, CONNECTIONS);
    let fewer = "lower --nconnect of the mounts";
    let more = if tcp == CONNECTIONS {
        fewer.to_owned()
    } else {
        format!(
            "half of the {files} files that this process may have open are for connections: raise that (LimitNOFILE= in the \
             unit, ulimit -Hn), or {fewer}"
        )
    };
    (tcp, (files / 8).max(16), more)
}

/// Starts logging: to the file named, in the background to the default file, else to standard error.
///
/// # Errors
/// When the filter is wrong or the file can't be opened.
pub fn start_logging(config: &LogConfig, background: bool, host: &Host) -> std::result::Result<(), Fault> {
    let file = match &config.file {
        None if background => Some(default_log(host)?),
        named => named.clone(),
    };
    if let Some(dir) = file.as_ref().and_then(|f| f.parent())
        && config.file.is_none()
    {
        // What is wrong with it shows when the file is opened.
        let _ = std::fs::create_dir_all(dir);
    }
    let settings = LogSettings { file, filter: config.filter.clone(), json: config.format == LogFormat::Json };
    log::init(&settings).map_err(|e| {
        let remedy = if background { LOG_REMEDY } else { "" };
        Fault { remedy: remedy.into(), ..Fault::from(e) }
    })
}

/// The admin socket and the metrics page of this process, as long as it is kept.
#[derive(Debug)]
pub struct Outside {
    _admin: Option<AdminServer>,
    _metrics: Option<MetricsServer>,
}

impl Outside {
    /// Opens both. Without a place for the admin socket the service runs, and says that `stats` can't find it.
    ///
    /// # Errors
    /// When another process answers at the admin socket, or the metrics address asked for can't be had.
    pub fn open(
        owner: Owner<'_>,
        metrics: &MetricsConfig,
        target: &Arc<dyn AdminTarget>,
    ) -> std::result::Result<Self, Fault> {
        let start = |path: PathBuf| {
            if let Owner::Mount(at) = owner
                && place::is_detached(&path, at)
            {
                tracing::info!(socket = %path.display(), "a mount that was detached from here gives up its admin socket");
                let _ = std::fs::remove_file(&path);
            }
            AdminServer::start(&path, Arc::clone(target))
        };
        let admin = match place::make_socket_path(owner).and_then(start) {
            Ok(server) => {
                tracing::info!(socket = %server.path().display(), "admin socket");
                Some(server)
            }
            Err(error) if error.kind() == ErrorKind::Invalid => return Err(error.into()),
            Err(error) => {
                report::warnings(&[format!("no admin socket, so spurline stats can't ask this process: {error}")]);
                None
            }
        };
        let bind = match metrics {
            MetricsConfig::Off => None,
            MetricsConfig::At(address) => Some(Bind::Exactly(*address)),
            MetricsConfig::Default => checked::DEFAULT_METRICS.parse().ok().map(Bind::Near),
        };
        let metrics = match bind.map(|bind| MetricsServer::start(bind, Arc::clone(target))) {
            None => None,
            Some(Ok(server)) => {
                let address = server.address();
                if server.moved() {
                    tracing::info!(%address, "metrics page; {} was taken", checked::DEFAULT_METRICS);
                } else {
                    tracing::info!(%address, "metrics page");
                }
                Some(server)
            }
            Some(Err(error)) if matches!(metrics, MetricsConfig::At(_)) => {
                return Err(Fault::missing(error.message(), "give another address with --metrics, or --metrics none"));
            }
            Some(Err(error)) => {
                tracing::warn!(%error, "no metrics page");
                None
            }
        };
        Ok(Outside { _admin: admin, _metrics: metrics })
    }
}

/// What [`Target`] asks about a path.
type Info = Box<dyn Fn(&[u8]) -> Result<Value> + Send + Sync>;

/// An [`AdminTarget`] out of the counters and three questions.
pub struct Target {
    /// The counters of this process.
    pub stats: Arc<Stats>,
    /// When it started.
    pub started: Instant,
    /// Brings gauges up to date before they are shown.
    pub gauges: Box<dyn Fn(&Stats) + Send + Sync>,
    /// About one path.
    pub info: Info,
    /// About the process.
    pub status: Box<dyn Fn() -> Value + Send + Sync>,
    /// The jobs it does.
    pub jobs: Option<Arc<JobManager>>,
    /// Whether it can work.
    pub health: Box<dyn Fn() -> Result<()> + Send + Sync>,
}

impl AdminTarget for Target {
    fn stats(&self) -> Value {
        usage::refresh(&self.stats, self.started);
        (self.gauges)(&self.stats);
        self.stats.to_json()
    }
    fn prometheus(&self) -> String {
        usage::refresh(&self.stats, self.started);
        (self.gauges)(&self.stats);
        self.stats.to_prometheus()
    }
    fn info(&self, path: &[u8]) -> Result<Value> {
        (self.info)(path)
    }
    fn status(&self) -> Value {
        (self.status)()
    }
    fn jobs(&self, request: &Value) -> Result<Value> {
        let none = || {
            let why = "a node runs no jobs: it does what jobs ask of it; name a path in a mount";
            Error::new(ErrorKind::Unsupported, why)
        };
        self.jobs.as_ref().ok_or_else(none)?.answer_request(request)
    }
    fn health(&self) -> Result<()> {
        (self.health)()
    }
}
