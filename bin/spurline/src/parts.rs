//! The parts a mount and a node have in common, made from their configuration: under-store, cache disks,
//! memory, and the ways to look in from outside.

use serde_json::{Value, json};
use spurline_config as config;
use spurline_config::{CacheSize, Fault, IorpcMode, LogFormat, MetricsConfig};
use spurline_mem::Pool;
use spurline_observe::{AdminTarget, http, log, place, server, usage};
use spurline_store::{Capacity, IoMode, Store, StoreConfig};
use spurline_types::{Result, Stats};
use spurline_under::{UnderConfig, UnderStore};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Starts logging as configured.
///
/// # Errors
/// When the log file can't be opened or the filter does not parse.
pub fn start_log(config: &config::LogConfig) -> Result<(), Fault> {
    let json = config.format == LogFormat::Json;
    log::init(&log::LogSettings { file: config.file.clone(), filter: config.filter.clone(), json }).map_err(Fault::from)
}

/// Opens the under-store of `source` without asking it anything yet.
///
/// # Errors
/// When the URL or the configuration can't be right.
pub fn open_under(source: &str, config: &config::UnderConfig, stats: &Arc<Stats>) -> Result<Arc<dyn UnderStore>> {
    let defaults = UnderConfig::default();
    let config = UnderConfig {
        endpoint: config.endpoint_url.clone(),
        region: config.region.clone(),
        anonymous: config.anonymous,
        timeout: config.timeout,
        connect_timeout: defaults.connect_timeout.min(config.timeout),
        stall_timeout: config.stall_timeout,
        retries: config.retries,
        max_downloads: config.max_downloads as usize,
        ..defaults
    };
    spurline_under::open(source, &config, Arc::clone(stats))
}

/// Opens the cache disks; `None` when there are to be none.
///
/// # Errors
/// When a directory can't be used.
pub fn open_store(config: &config::CacheConfig, pool: &Arc<Pool>, stats: &Arc<Stats>) -> Result<Option<Arc<Store>>> {
    let capacity = match config.size {
        CacheSize::None => return Ok(None),
        CacheSize::Bytes(bytes) => Capacity::Bytes(bytes),
        CacheSize::All => Capacity::All,
    };
    let io = match config.iorpc_mode {
        IorpcMode::Dio => IoMode::Dio,
        IorpcMode::Pagecache => IoMode::PageCache,
        IorpcMode::Splice => IoMode::Splice,
        IorpcMode::Disable => return Ok(None),
    };
    let config = StoreConfig {
        free_space_ratio: config.free_space_ratio,
        block_size: config.block_size as u32,
        io,
        read_timeout: config.disk_timeout,
        pool: Some(Arc::clone(pool)),
        ..StoreConfig::new(config.dirs.clone(), capacity)
    };
    Store::open(config, Arc::clone(stats)).map(Some)
}

/// The cache disks as `status` shows them.
pub fn disks(store: Option<&Store>) -> Value {
    let disks = store.map(|store| store.disks()).unwrap_or_default();
    disks
        .iter()
        .map(|disk| {
            json!({
                "path": disk.path.display().to_string(),
                "state": disk.state.to_string(),
                "since": disk.since.duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs()),
                "reason": disk.reason,
                "used_bytes": disk.used,
                "capacity_bytes": disk.capacity,
                "free_bytes": disk.free,
                "blocks": disk.blocks,
            })
        })
        .collect()
}

/// What can be seen of this process from outside.
pub struct Look {
    /// Its counters.
    pub stats: Arc<Stats>,
    /// Its memory.
    pub pool: Arc<Pool>,
    /// When it started.
    pub started: Instant,
    /// Answers `info`.
    pub info: Box<dyn Fn(&[u8]) -> Result<Value> + Send + Sync>,
    /// Answers `status`.
    pub status: Box<dyn Fn() -> Value + Send + Sync>,
    /// Bytes of blocks in memory.
    pub held: Box<dyn Fn() -> u64 + Send + Sync>,
}

impl Look {
    fn refresh(&self) {
        usage::refresh(&self.stats, self.started);
        self.stats.usage.buffer_bytes.set(self.pool.used_bytes());
        self.stats.usage.buffer_limit_bytes.set(self.pool.limit_bytes());
        self.stats.blockcache.mem_bytes.set((self.held)());
    }
}

impl AdminTarget for Look {
    fn stats(&self) -> Value {
        self.refresh();
        self.stats.to_json()
    }
    fn prometheus(&self) -> String {
        self.refresh();
        self.stats.to_prometheus()
    }
    fn info(&self, path: &[u8]) -> Result<Value> {
        (self.info)(path)
    }
    fn status(&self) -> Value {
        (self.status)()
    }
}

/// The servers through which [`Look`] is reached; they end when this is dropped.
pub struct Windows {
    _admin: Option<server::AdminServer>,
    _metrics: Option<http::MetricsServer>,
}

/// Opens the admin socket of `owner` and the metrics page.
///
/// # Errors
/// When an address given on the command line can't be had. Without a place for the socket the process runs on,
/// and says so.
pub fn open_windows(owner: place::Owner<'_>, metrics: &MetricsConfig, look: Arc<Look>) -> Result<Windows, Fault> {
    let admin = place::make_socket_path(owner).and_then(|path| server::AdminServer::start(&path, look.clone()));
    let admin = admin
        .inspect_err(|error| tracing::warn!(%error, "no admin socket: `spurline stats` and `info` will not find this process"))
        .ok();
    let bind = match metrics {
        MetricsConfig::Off => None,
        MetricsConfig::At(address) => Some(http::Bind::Exactly(*address)),
        MetricsConfig::Default => config::checked::DEFAULT_METRICS.parse().ok().map(http::Bind::Near),
    };
    let server = bind.map(|bind| http::MetricsServer::start(bind, look)).transpose();
    let server = match server {
        // Nobody asked for this address by name, so not having it keeps nothing from working.
        Err(error) if *metrics == MetricsConfig::Default => {
            tracing::warn!(%error, "no metrics page");
            None
        }
        other => other?,
    };
    if let Some(server) = &server {
        tracing::info!(address = %server.address(), "metrics page at http://{}/", server.address());
    }
    Ok(Windows { _admin: admin, _metrics: server })
}

/// How long a mount or a node that is told to stop may take before it stops by force.
pub const STOP_PATIENCE: Duration = Duration::from_secs(10);
