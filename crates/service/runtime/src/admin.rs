//! The admin socket and the metrics page of a mount, a node or a coordinator, and the answers. Knows no service.

use serde_json::Value;
use spurline_config::{DEFAULT_METRICS, Fault, MetricsConfig};
use spurline_jobs::JobManager;
use spurline_observe::documents::{InfoDocument, ProcessRole, ProcessStatus, WritesBehind};
use spurline_observe::http::{MetricsBind, MetricsServer};
use spurline_observe::locate::{self, SocketOwner};
use spurline_observe::server::AdminServer;
use spurline_observe::{AdminTarget, usage};
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// The admin socket and the metrics page of this process; a drop closes both.
#[derive(Debug)]
pub struct AdminServices {
    admin: Option<AdminServer>,
    _metrics: Option<MetricsServer>,
}

impl AdminServices {
    /// Opens both. Without an admin socket the service runs, and logs that `stats` can't find it.
    ///
    /// # Errors
    /// When another process answers at the admin socket, or the metrics address is not available.
    pub fn open(
        owner: SocketOwner<'_>,
        metrics: &MetricsConfig,
        target: &Arc<ProcessTarget>,
    ) -> std::result::Result<Self, Fault> {
        let answers: Arc<dyn AdminTarget> = Arc::clone(target) as _;
        let admin = match locate::make_socket_path(owner).and_then(|path| {
            if let SocketOwner::Mount(at) = owner
                && locate::is_detached(&path, at)
            {
                tracing::info!(socket = %path.display(), "a mount that was detached from here gives up its admin socket");
                let _ = std::fs::remove_file(&path);
            }
            AdminServer::start(&path, Arc::clone(&answers))
        }) {
            Ok(server) => {
                tracing::info!(socket = %server.path().display(), "admin socket");
                Some(server)
            }
            Err(error) if error.kind() == ErrorKind::Invalid => return Err(error.into()),
            Err(error) => {
                tracing::warn!("no admin socket, so spurline stats can't ask this process: {error}");
                None
            }
        };
        let metrics = open_metrics(metrics, &answers)?;
        if let Some(metrics) = &metrics {
            // Only a single page is opened.
            let _ = target.metrics_address.set(metrics.address());
        }
        Ok(AdminServices { admin, _metrics: metrics })
    }

    /// As [`AdminServer::report_end`].
    pub fn report_end(&self, report: Option<&WritesBehind>) {
        if let Some(admin) = &self.admin {
            admin.report_end(report);
        }
    }
}

/// Opens the metrics page alone; `None` where disabled, or the default address is not available.
///
/// # Errors
/// When the given address is not available.
pub fn open_metrics(
    metrics: &MetricsConfig,
    target: &Arc<dyn AdminTarget>,
) -> std::result::Result<Option<MetricsServer>, Fault> {
    let bind = match metrics {
        MetricsConfig::Off => None,
        MetricsConfig::At(address) => Some(MetricsBind::Exactly(*address)),
        MetricsConfig::Default => DEFAULT_METRICS.parse().ok().map(MetricsBind::Near),
    };
    match bind.map(|bind| MetricsServer::start(bind, Arc::clone(target))) {
        None => Ok(None),
        Some(Ok(server)) => {
            tracing::info!(address = %server.address(), "metrics page");
            Ok(Some(server))
        }
        Some(Err(error)) if matches!(metrics, MetricsConfig::At(_)) => {
            Err(Fault::missing(error.message(), "give another address with --metrics, or --metrics none"))
        }
        Some(Err(error)) => {
            tracing::warn!(%error, "no metrics page");
            Ok(None)
        }
    }
}

/// Answers a [`ProcessTarget`]'s query about a path.
type PathInfo = Box<dyn Fn(&[u8]) -> Result<InfoDocument> + Send + Sync>;

/// Makes a mount continue with the program at a path.
type UpgradeRequest = Box<dyn Fn(&Path) -> Result<()> + Send + Sync>;

/// An [`AdminTarget`] made of counters and closures.
pub struct ProcessTarget {
    /// The counters of this process.
    pub stats: Arc<Stats>,
    /// The start time.
    pub started: Instant,
    /// Updates gauges before use.
    pub gauges: Box<dyn Fn(&Stats) + Send + Sync>,
    /// Describes a path.
    pub info: PathInfo,
    /// Describes the process, with the details of the kind.
    pub role: Box<dyn Fn() -> ProcessRole + Send + Sync>,
    /// The jobs of this process, or why there are none.
    pub jobs: std::result::Result<Arc<JobManager>, &'static str>,
    /// Prepares a mount for an NFS server.
    pub export: Option<Box<dyn Fn() -> Result<()> + Send + Sync>>,
    /// Makes the mount continue with another program, where a keeper holds the mount.
    pub upgrade: Option<UpgradeRequest>,
    /// Whether the service works.
    pub health: Box<dyn Fn() -> Result<()> + Send + Sync>,
    /// The address of the metrics page, once open.
    pub metrics_address: OnceLock<SocketAddr>,
}

impl ProcessTarget {
    /// The counters, with gauges as of now.
    pub fn current_stats(&self) -> &Stats {
        usage::refresh_usage(&self.stats, self.started);
        (self.gauges)(&self.stats);
        &self.stats
    }

    /// Identity and state.
    pub fn process_status(&self) -> ProcessStatus {
        ProcessStatus {
            role: (self.role)(),
            pid: Some(std::process::id()),
            metrics: self.metrics_address.get().map(ToString::to_string),
        }
    }
}

impl AdminTarget for ProcessTarget {
    fn stats(&self) -> Value {
        self.current_stats().to_json()
    }
    fn prometheus(&self) -> String {
        self.current_stats().to_prometheus()
    }
    fn info(&self, path: &[u8]) -> Result<Value> {
        Ok((self.info)(path)?.to_json())
    }
    fn status(&self) -> Value {
        self.process_status().to_json()
    }
    fn jobs(&self, request: &Value) -> Result<Value> {
        match &self.jobs {
            Ok(jobs) => jobs.answer_request(request),
            Err(why) => Err(Error::new(ErrorKind::Unsupported, *why)),
        }
    }
    fn prepare_export(&self) -> Result<()> {
        self.export.as_ref().ok_or_else(|| Error::new(ErrorKind::Unsupported, "this process has no mount"))?()
    }
    fn upgrade(&self, program: &Path) -> Result<()> {
        let upgrade = self.upgrade.as_ref();
        let missing = "the process has no keeper: only a mount with --recover can continue with another program";
        upgrade.ok_or_else(|| Error::new(ErrorKind::Unsupported, missing))?(program)
    }
    fn health(&self) -> Result<()> {
        (self.health)()
    }
}
