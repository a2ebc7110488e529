//! Common setup of mounts and nodes from the configuration: trust, origin and cache disks.

use crate::cache_dirs;
use crate::shared_folder::SharedCacheFolder;
use spurline_config as config;
use spurline_config::{CacheSize, ExitKind, Fault, IorpcMode};
use spurline_mem::{BufferPool, MemTier};
use spurline_object_store::{OriginOptions, RequestOptions, SharedBuckets, SourceScheme};
use spurline_objects::BucketWriteOptions;
use spurline_observe::documents;
use spurline_origin::{CachedOrigin, MetadataConfig, OriginStore};
use spurline_store::{CacheCapacity, DiskState, DiskStatus, FreshDirs, IoMode, Store, StoreConfig};
use spurline_trust::{TlsFiles, Trust};
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The maximum age of metadata in a node; each mount requests another maximum.
pub const NODE_METADATA_TTL: Duration = Duration::from_secs(60);
/// Memory of a name with cached metadata.
const METADATA_NAME_BYTES: u64 = 300;

/// The authentication of this process, under a name; warnings about a token's file are logged.
///
/// # Errors
/// When a file can't be read, or holds no secret.
pub fn open_trust(config: &config::TrustConfig, name: &str) -> Result<Arc<Trust>> {
    let trust = Trust::new(name, config.token_file.as_deref())?;
    let trust = match config.tls.clone() {
        None => trust,
        Some(config::TlsConfig::Token) => trust.with_tls(None)?,
        Some(config::TlsConfig::Files { cert, key, ca }) => trust.with_tls(Some(TlsFiles { cert, key, ca }))?,
    };
    if let Some(warning) = trust.tokens().as_deref().and_then(|tokens| tokens.warning()) {
        tracing::warn!("{warning}");
    }
    Ok(trust)
}

/// The age and the memory of an origin's names and attributes.
#[derive(Debug, Clone, Copy)]
pub struct MetadataLimits {
    /// How long names and attributes are valid.
    pub ttl: Duration,
    /// Memory for names.
    pub name_bytes: u64,
}

/// Opens the origin of `source`, and sends no request yet. A source that a client chose has to lie in an entry of
/// `within`. Origins with the same `in_common` share the connections to a bucket and the memory for names.
///
/// # Errors
/// When the URL or the configuration is invalid.
pub fn open_under(
    source: &str,
    within: &[String],
    config: &config::OriginConfig,
    limits: MetadataLimits,
    stats: &Arc<Stats>,
    in_common: &SharedBuckets,
) -> Result<Arc<dyn OriginStore>> {
    let stale_if_error = config.stale_if_error;
    let options = OriginOptions { within: within.to_vec(), ..origin_options(config, in_common) };
    let under = spurline_origin::open(source, &options, Arc::clone(stats))?;
    let ttl = limits.ttl;
    let max_entries = (limits.name_bytes / METADATA_NAME_BYTES) as usize;
    let metadata = MetadataConfig { ttl, negative_ttl: ttl, max_entries, stale_if_error };
    Ok(Arc::new(CachedOrigin::with_shared(in_common, under, metadata, Arc::clone(stats))))
}

/// A changed bucket keeps names and listings, in so many bytes, for the time in which its store does not respond.
pub(crate) fn keep_known_names(options: &mut BucketWriteOptions, config: &config::OriginConfig, name_bytes: u64) {
    options.stale_if_error = config.stale_if_error;
    options.known_names_max = (name_bytes / METADATA_NAME_BYTES) as usize;
}

/// How the origins of this configuration are reached.
pub(crate) fn origin_options(config: &config::OriginConfig, in_common: &SharedBuckets) -> OriginOptions {
    let defaults = OriginOptions::default();
    OriginOptions {
        endpoint: config.endpoint_url.clone(),
        region: config.region.clone(),
        anonymous: config.anonymous,
        request_options: RequestOptions {
            request_payer: config.request_payer,
            expected_bucket_owner: config.expected_bucket_owner.clone(),
            sse: config.sse.clone(),
            sse_kms_key_id: config.sse_kms_key_id.clone(),
            storage_class: config.storage_class.clone(),
        },
        timeout: config.timeout,
        connect_timeout: defaults.connect_timeout.min(config.timeout),
        stall_timeout: config.stall_timeout,
        max_downloads: config.max_downloads as usize,
        shared_buckets: in_common.clone(),
        ..defaults
    }
}

/// Checks that the origin answers and can be listed.
///
/// # Errors
/// When the origin can't be reached within `limit`, or refuses; a usage error when the path is no directory. A directory or a bucket
/// that does not exist has the kind `NotFound`.
pub fn check_origin(under: &dyn OriginStore, limit: Duration) -> Result<(), Fault> {
    under.check(Instant::now() + limit).map_err(|error| match error.kind() {
        ErrorKind::NotADirectory => Fault { code: ExitKind::Usage, ..error.into() },
        // Later, when files are known, a source without its directory is unavailable: no file is reported as deleted.
        ErrorKind::Unavailable if is_absent_directory(under.source_url()) => {
            Fault { kind: Some(ErrorKind::NotFound), ..error.into() }
        }
        _ => error.into(),
    })
}

/// Whether the source is a directory whose path does not exist.
fn is_absent_directory(source: &str) -> bool {
    let Ok(location) = spurline_object_store::SourceLocation::parse(source) else { return false };
    location.scheme() == SourceScheme::Directory && matches!(location.path().try_exists(), Ok(false))
}

/// The state of a process by the origins: `up`, or the reason against.
pub fn origin_state(stats: &Stats) -> &'static str {
    if stats.metadata.silent_origins.get() > 0 { "origin does not respond" } else { documents::STATE_UP }
}

/// The buckets whose store refuses this process, each with the sentence for `status`.
pub(crate) fn origin_errors(buckets: &SharedBuckets) -> BTreeMap<String, String> {
    buckets.refusals().into_iter().map(|(source, error)| (source, error.message().to_owned())).collect()
}

/// Checks that no store refuses this process.
///
/// # Errors
/// The refusal of a store.
pub(crate) fn check_credentials(buckets: &SharedBuckets) -> Result<()> {
    match buckets.refusals().into_iter().next() {
        Some((source, error)) => Err(error.context(source)),
        None => Ok(()),
    }
}

/// Whether [`open_store`] opens any cache disk.
pub fn has_disks(config: &config::CacheConfig) -> bool {
    !matches!(config.size, CacheSize::None)
        && !matches!(config.iorpc_mode, IorpcMode::Disable)
        && !config.dirs.is_empty()
}

/// Warns of a cache directory that lies in a directory source: a read of the whole source would read the cache, and cache those
/// bytes again.
pub fn warn_of_cache_in_source(source: &str, config: &config::CacheConfig) {
    let Ok(source) = spurline_object_store::SourceLocation::parse(source) else { return };
    if source.scheme() != SourceScheme::Directory || !has_disks(config) {
        return;
    }
    let Ok(folder) = source.path().canonicalize() else { return };
    for dir in config.dirs.iter().filter(|dir| dir.canonicalize().is_ok_and(|dir| dir.starts_with(&folder))) {
        tracing::warn!(
            "cache directory {} lies in the source {}: reading all of the source reads the cache too, and caches it again; \
             give --cache-dir a place outside of it",
            dir.display(),
            folder.display()
        );
    }
}

/// The cache disks of a process, in the order in which the parts have to be dropped.
#[derive(Default)]
pub struct OpenCache {
    /// Set for the default directory.
    pub shared: Option<SharedCacheFolder>,
    /// `None` without a disk.
    pub store: Option<Arc<Store>>,
    /// Directories that this start made.
    pub fresh: FreshDirs,
}

/// Logs the shares of the memory; the index of cache disks only with disks, and at most what the size of the cache can need.
pub(crate) fn log_memory(budget: &config::MemoryBudget, size: CacheSize, has_disks: bool) {
    let index_bytes = match size {
        _ if !has_disks => u64::MAX,
        CacheSize::Bytes(size) => budget.index_bytes.min(spurline_store::index_bytes_of_cache(size)),
        CacheSize::None | CacheSize::All => budget.index_bytes,
    };
    tracing::info!("memory: {}", config::MemoryBudget { index_bytes, ..budget.clone() });
}

/// Opens the cache disks, with at most `index_bytes` of memory for the index.
///
/// # Errors
/// When a directory can't be used.
pub fn open_store(
    config: &config::CacheConfig,
    index_bytes: u64,
    pool: &Arc<BufferPool>,
    sources: &[&str],
    stats: &Arc<Stats>,
) -> Result<OpenCache, Fault> {
    let capacity = match config.size {
        CacheSize::None => return Ok(OpenCache::default()),
        CacheSize::Bytes(bytes) if config.is_default_size => CacheCapacity::Default(bytes),
        CacheSize::Bytes(bytes) => CacheCapacity::Bytes(bytes),
        CacheSize::All => CacheCapacity::All,
    };
    let io = match config.iorpc_mode {
        IorpcMode::Dio => IoMode::Dio,
        IorpcMode::Pagecache => IoMode::PageCache,
        IorpcMode::Splice => IoMode::Splice,
        IorpcMode::Disable => return Ok(OpenCache::default()),
    };
    let fresh = FreshDirs::create_missing(&config.dirs);
    let default_folder = config.dirs.first().filter(|_| config.is_default);
    let store_config = StoreConfig {
        free_space_ratio: config.free_space_ratio,
        block_size: config.block_size as u32,
        max_blocks: index_bytes / spurline_store::index_bytes_per_block(config.block_size as u32),
        io,
        read_timeout: config.disk_timeout,
        // Disks free space during writes, which may be slow; reads do not.
        write_timeout: 2 * config.disk_timeout,
        pool: Some(Arc::clone(pool)),
        ..StoreConfig::new(config.dirs.clone(), capacity)
    };
    let store = Store::open(store_config, Arc::clone(stats)).map_err(store_fault)?;
    config.dirs.iter().for_each(|dir| cache_dirs::note_sources(dir, sources));
    let shared = match (default_folder, config.size) {
        (Some(own), CacheSize::Bytes(size)) => Some(SharedCacheFolder::start(own, size, &store)?),
        _ => None,
    };
    Ok(OpenCache { shared, store: Some(store), fresh })
}

/// The error of a cache disk: an unusable disk is a missing prerequisite; a wrong setting is a usage error.
fn store_fault(error: Error) -> Fault {
    match error.kind() {
        ErrorKind::Invalid | ErrorKind::Corrupt => error.into(),
        _ => Fault::missing(error.message(), ""),
    }
}

/// A folder that this start created; a drop removes the folder, if empty.
pub struct CreatedFolder(Option<PathBuf>);

impl CreatedFolder {
    /// Creates the folder if missing; errors are reported by the later write.
    pub fn create_missing(folder: Option<&Path>) -> Self {
        CreatedFolder(
            folder
                .filter(|folder| {
                    if let Some(parent) = folder.parent() {
                        let _ = std::fs::create_dir_all(parent);
                    }
                    std::fs::create_dir(folder).is_ok()
                })
                .map(Path::to_owned),
        )
    }

    /// The start succeeded: the folder stays.
    pub fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for CreatedFolder {
    fn drop(&mut self) {
        if let Some(folder) = &self.0 {
            let _ = std::fs::remove_dir(folder);
        }
    }
}

/// The cache disks, for `status`.
pub fn disk_status(store: Option<&Store>) -> Vec<documents::CacheDiskStatus> {
    let disks = store.map(|store| store.disks()).unwrap_or_default();
    disks
        .into_iter()
        .map(|disk| documents::CacheDiskStatus {
            path: disk.path.display().to_string(),
            state: disk.state.name().to_owned(),
            since: disk.since.duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            reason: disk.reason,
            used_bytes: disk.used,
            capacity_bytes: disk.capacity,
            free_bytes: disk.free,
            blocks: disk.blocks,
        })
        .collect()
}

/// Checks that at least a single cache disk works, if there are any.
///
/// # Errors
/// When all are down, with the reason of the first.
pub fn check_disks(disks: &[DiskStatus]) -> Result<()> {
    match disks.first() {
        Some(first) if disks.iter().all(|disk| disk.state == DiskState::Down) => {
            let why = format!("all cache disks are down; {}: {}", first.path.display(), first.reason);
            Err(Error::new(ErrorKind::Unavailable, why))
        }
        _ => Ok(()),
    }
}

/// Updates the gauges of memory.
pub fn set_memory_gauges(pool: &BufferPool, tier: &MemTier, stats: &Stats) {
    stats.usage.buffer_bytes.set(pool.used_bytes());
    stats.usage.buffer_limit_bytes.set(pool.limit_bytes());
    stats.blockcache.mem_bytes.set(tier.held_bytes());
}

/// The grace of a mount or a node that is stopped, before the stop by force.
pub const STOP_PATIENCE: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_directory_that_can_not_be_used_is_missing_for_whatever_reason() {
        let code = |kind| store_fault(Error::new(kind, "cache directory /d: why")).code as u8;
        let rofs = ErrorKind::Io(rustix::io::Errno::ROFS.raw_os_error());
        for kind in [ErrorKind::NotADirectory, ErrorKind::NoSpace, ErrorKind::PermissionDenied, rofs] {
            assert_eq!(code(kind), 3, "{kind:?}");
        }
        assert_eq!(code(ErrorKind::Invalid), 2, "it holds blocks of another size than the flag's");
    }

    #[test]
    fn one_disk_that_is_not_down_is_enough_and_none_is_no_fault() {
        let disk = |state| DiskStatus {
            path: "/d".into(),
            state,
            since: std::time::SystemTime::UNIX_EPOCH,
            reason: "EIO".to_owned(),
            used: 0,
            capacity: 0,
            free: 0,
            blocks: 0,
        };
        assert!(check_disks(&[]).is_ok() && check_disks(&[disk(DiskState::Down), disk(DiskState::Unstable)]).is_ok());
        let error = check_disks(&[disk(DiskState::Down), disk(DiskState::Down)]).unwrap_err();
        assert!(error.message().contains("all cache disks are down; /d: EIO"), "{error}");
    }
}
