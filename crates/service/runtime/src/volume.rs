//! Opens the volume that a mount, or any other program, reads from: an origin through a cache of this process, or the nodes of a
//! group. Knows neither FUSE nor mountpoints.

use crate::jobs::target;
use crate::peers::PeerConnector;
use crate::setup::MetadataLimits;
use crate::shared_folder::SharedCacheFolder;
use crate::{group, rails, setup};
use spurline_cache::{Cache, CacheContext};
use spurline_client::placement::{CopyCounts, ReaderLocation};
use spurline_client::{GroupMembers, GroupVolume, GroupVolumeConfig, PathMonitor, RequestPatience};
use spurline_config::{Fault, GroupConfig, VolumeConfig};
use spurline_directory::WritableSource;
use spurline_mem::{BufferPool, MemTier};
use spurline_membership::RegistryFollower;
use spurline_object_store::{SharedBuckets, SourceLocation, SourceScheme};
use spurline_objects::{PublishedBytes, PublishingOrigin};
use spurline_rails::LocalRail;
use spurline_store::{FreshDirs, Store};
use spurline_sys::random;
use spurline_types::{ErrorKind, FileKind, Stats};
use spurline_volume::Volume;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// An open volume with all services; reading ends with the drop.
pub struct OpenVolume {
    /// First, because the end needs the store.
    _shared: Option<SharedCacheFolder>,
    pub(crate) volume: Arc<dyn Volume>,
    pub(crate) pool: Arc<BufferPool>,
    pub(crate) tier: Arc<MemTier>,
    pub(crate) store: Option<Arc<Store>>,
    pub(crate) remote: Option<Arc<GroupVolume>>,
    /// What jobs work on.
    pub(crate) jobs: Arc<dyn spurline_jobs::JobTarget>,
    /// Follows the members of the group while the volume is open.
    pub(crate) follower: Option<Arc<RegistryFollower>>,
    /// The connections to the origin's bucket, for the changing side.
    pub(crate) buckets: SharedBuckets,
    /// What this process has published lately.
    pub(crate) published: Arc<PublishedBytes>,
    /// Files can be read through blocks.
    pub(crate) has_blocks: bool,
    /// Keeps the paths over rails while the volume is open.
    _keeper: Option<PathMonitor>,
    /// Cache directories that this start made; last, because a drop removes the directories.
    fresh: FreshDirs,
}

impl OpenVolume {
    /// Names, attributes and data.
    pub fn volume(&self) -> &Arc<dyn Volume> {
        &self.volume
    }

    /// What a load of files into the cache works on (`spurline_jobs::run_job`).
    pub fn job_target(&self) -> Arc<dyn spurline_jobs::JobTarget> {
        Arc::clone(&self.jobs)
    }

    /// Keeps the cache directories that were made for the volume. Without this call, the drop of the volume removes the
    /// directories, as after a failed start.
    pub fn keep_directories(&mut self) {
        std::mem::take(&mut self.fresh).keep();
    }
}

/// Opens the volume, and checks that the origin or the group answers.
///
/// # Errors
/// When an interface, a cache directory, the origin or the group can't be used.
pub fn open_volume(config: &VolumeConfig, stats: &Arc<Stats>) -> Result<OpenVolume, Fault> {
    // Configured rails have to be usable, even if none will be needed; this comes before any wait.
    let found = config.net.rdma.as_ref().map(|rdma| rails::find_rails(rdma, &config.budget, 0)).transpose()?;
    match &config.group {
        None => open_alone(config, stats),
        Some(group) => open_from_group(config, group, found, stats),
    }
}

/// The folder and the name of the object, if the source is an object.
fn named_object(config: &VolumeConfig, stats: &Arc<Stats>) -> Option<(String, String)> {
    let (parent, name) = config.source.as_str().trim_end_matches('/').rsplit_once('/')?;
    if parent.ends_with('/') {
        return None;
    }
    let under =
        setup::open_under(parent, &[], &config.under, metadata_limits(config), stats, &SharedBuckets::default())
            .ok()?;
    let found = under.lookup(name.as_bytes(), Instant::now() + config.under.timeout).ok()?;
    (found.kind == FileKind::File).then(|| (parent.to_owned(), name.to_owned()))
}

/// Whether the kernel gets the source's own files: those of a directory of this host that is changed.
fn reads_source_itself(config: &VolumeConfig) -> Result<bool, Fault> {
    if config.writes.is_none() {
        return Ok(false);
    }
    let location = SourceLocation::parse(config.source.as_str())?;
    Ok(location.scheme() == SourceScheme::Directory && WritableSource::is_near(location.path()))
}

fn open_alone(config: &VolumeConfig, stats: &Arc<Stats>) -> Result<OpenVolume, Fault> {
    let buckets = SharedBuckets::default();
    let source = config.source.as_str();
    let under = setup::open_under(source, &[], &config.under, metadata_limits(config), stats, &buckets)?;
    setup::check_origin(&*under, config.under.timeout)?;
    tracing::info!("source {}", under.describe());
    // A bucket has no folders that could be missing: a misspelt prefix is empty.
    let until = Instant::now() + config.under.timeout;
    if config.source.scheme() != "file"
        && under.list(b"", None, 1, until).is_ok_and(|page| page.entries.is_empty() && page.next.is_none())
    {
        if let Some((parent, name)) = named_object(config, stats) {
            return Err(Fault::usage(
                format!("{} is an object, and a folder is mounted", config.source),
                format!("mount {parent}, where it is the file {name}"),
            ));
        }
        tracing::warn!(
            "{} is empty: no object has this prefix now; check the spelling of bucket and prefix",
            config.source
        );
    }
    let pool = BufferPool::new(pool_bytes(config), config.cache.block_size as usize)?;
    let has_blocks = !reads_source_itself(config)?;
    let disks = if has_blocks { config.cache.clone() } else { config.cache.without_dirs() };
    if let Some(warning) = config.cache.near_source_warning.as_ref().filter(|_| !has_blocks) {
        tracing::warn!("{warning}");
    }
    // Locals are dropped in the reverse order.
    let setup::OpenCache { fresh, store, shared: folder } =
        setup::open_store(&disks, config.budget.index_bytes, &pool, &[source], stats)?;
    setup::warn_of_cache_in_source(config.source.as_str(), &disks);
    let tier = MemTier::new(Arc::clone(&pool));
    let shared = CacheContext::new(
        Arc::clone(&tier),
        store.clone(),
        config.cache.block_size,
        config.under.max_downloads as usize,
        config.under.timeout,
        // A mount serves no other process.
        false,
        Arc::clone(stats),
    );
    let published = Arc::<PublishedBytes>::default();
    let is_written = config.writes.is_some() && config.source.scheme() != "file";
    let under = if is_written { Arc::new(PublishingOrigin::new(under, Arc::clone(&published))) } else { under };
    let cache = Cache::new(shared, under);
    let jobs = Arc::new(target::LocalCacheTarget { cache: Arc::clone(&cache) });
    Ok(OpenVolume {
        _shared: folder,
        volume: cache,
        pool,
        tier,
        store,
        remote: None,
        jobs,
        follower: None,
        buckets,
        published,
        has_blocks,
        _keeper: None,
        fresh,
    })
}

/// Lifetime and memory of the origin's metadata.
fn metadata_limits(config: &VolumeConfig) -> MetadataLimits {
    MetadataLimits { ttl: metadata_age(config), name_bytes: config.budget.metadata_bytes }
}

/// The greatest age of names and attributes. Where programs of a writable mount get theirs from the source or its node, jobs and
/// `info` must not find the state before their changes.
fn metadata_age(config: &VolumeConfig) -> Duration {
    let is_looked_up_elsewhere = config.group.is_some() || config.source.scheme() == "file";
    if config.writes.is_some() && is_looked_up_elsewhere { Duration::ZERO } else { config.metadata_ttl }
}

/// The budget without the slots of the FUSE session and the tables of names.
fn pool_bytes(config: &VolumeConfig) -> u64 {
    config.budget.total
        - config.budget.fuse_bytes()
        - config.budget.name_table_bytes()
        - config.budget.s3_client_bytes()
}

/// Something listens there and says nothing.
const SILENT_NODES_REMEDY: &str =
    "look at the node's log, and whether another program or a proxy listens at its address";

fn open_from_group(
    config: &VolumeConfig,
    group: &GroupConfig,
    found: Option<Vec<LocalRail>>,
    stats: &Arc<Stats>,
) -> Result<OpenVolume, Fault> {
    let name = format!("{}:{}", group::hostname(), config.reader);
    let trust = setup::open_trust(&config.trust, &name)?;
    let registry = spurline_membership::open_registry(&group.registry, &group.name, &trust)?;
    let (follower, members) = group::follow_group(&registry, &group.name, group.hold, stats)?;
    let reach = PeerConnector::from_config(&config.net, &name, config.source.as_str(), &trust, stats)?;
    let members = GroupMembers::new(&members, move |member| reach.peer(member));
    group::update_members_from(&follower, &members);
    let remote_config = GroupVolumeConfig {
        patience: RequestPatience::new(config.net.peer_timeout),
        fetchers: (config.net.nconnect / 2).max(2),
        metadata_age: metadata_age(config),
        copies: CopyCounts::new(config.reads.replicas.all, config.reads.replicas.below.clone()),
        // A random seed, as processes in containers may have the same PID: readers share copies evenly.
        standpoint: ReaderLocation { zone: group.zone.clone(), seed: random() },
        silence: config.net.peer_silence,
        hedge_after: config.reads.hedge_after,
    };
    let mut memory = None;
    let mut monitor = Ok(None);
    let remote = GroupVolume::connect(
        config.source.as_str(),
        Arc::clone(&members),
        remote_config,
        Arc::clone(stats),
        |block_size| {
            // With rails, the slots are part of the registered arena, so that answers arrive there without a copy.
            let slots = if found.is_some() { config.budget.fuse_bytes() } else { 0 };
            let pool = BufferPool::with_annex(pool_bytes(config), block_size as usize, slots)?;
            let tier = MemTier::new(Arc::clone(&pool));
            if let (Some(rdma), Some(found)) = (&config.net.rdma, found) {
                monitor = rails::start_path_monitor(config, rdma, found, &pool, &trust, &members, stats).map(Some);
            }
            memory = Some((pool, Arc::clone(&tier)));
            Ok(tier)
        },
    )
    .map_err(|error| {
        let remedy = if error.kind() == ErrorKind::Timeout { SILENT_NODES_REMEDY } else { "" };
        Fault { remedy: remedy.to_owned(), ..Fault::from(error) }
    })?;
    let (pool, tier) = memory.ok_or_else(|| Fault::failed("the node named no block size", ""))?;
    // An error of the source now is the error of every read, unless transient.
    match remote.lookup(b"") {
        Err(e)
            if matches!(
                e.kind(),
                ErrorKind::Timeout
                    | ErrorKind::Throttled
                    | ErrorKind::OriginFailed
                    | ErrorKind::OriginDown
                    | ErrorKind::Io(_)
            ) =>
        {
            tracing::warn!("{}: {e}", config.source);
        }
        looked_up => drop(looked_up?),
    }
    let jobs = Arc::new(target::GroupTarget::from_volume(Arc::clone(&remote)));
    Ok(OpenVolume {
        _shared: None,
        volume: Arc::clone(&remote) as _,
        pool,
        tier,
        store: None,
        remote: Some(remote),
        jobs,
        follower: Some(Arc::new(follower)),
        _keeper: monitor?,
        buckets: SharedBuckets::default(),
        published: Arc::default(),
        has_blocks: true,
        fresh: FreshDirs::default(),
    })
}
