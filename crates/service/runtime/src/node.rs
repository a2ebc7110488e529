//! Starts a node: origins, cache disks, servers over RDMA and TCP, group and admin services. Knows no signal and no command line.

use crate::admin::{AdminServices, ProcessTarget};
use crate::group::NodeGroup;
use crate::rails::RailMemory;
use crate::recent_file::RecentObjectsFile;
use crate::s3_endpoint::{EndpointFiles, bucket_writes, log_endpoint, start_endpoint, stop_endpoint};
use crate::setup::MetadataLimits;
use crate::shared_folder::SharedCacheFolder;
use crate::stage::{NodeStage, RunningStage, has_kept_files, prepare_stage, start_stage, upload_memory};
use crate::writes::{bucket_options, open_node_directory, store_settings, unwritable, unwritable_bucket};
use crate::{group, limits, rails, settings, setup};
use spurline_cache::CacheContext;
use spurline_client::placement::PLACEMENT_RULE;
use spurline_config::{Fault, GroupConfig, IorpcMode, NodeConfig, WritesConfig};
use spurline_mem::{BufferPool, MemTier};
use spurline_membership::NodeAnnouncer;
use spurline_net_rdma::RdmaServer;
use spurline_net_tcp::{ServerConfig, SocketOptions, TcpServer, group_addresses};
use spurline_node::CacheNode;
use spurline_object_store::{OriginOptions, SharedBuckets, SourceLocation, SourceRequests, SourceScheme};
use spurline_objects::{BucketWriteOptions, PublishedBytes, PublishingOrigin, WritableBucket};
use spurline_observe::documents::{InfoDocument, NodeDescription, NodeStatus, NodeWrites, ProcessRole, RailStatus};
use spurline_observe::locate::SocketOwner;
use spurline_origin::OriginStore;
use spurline_proto::LOCK_TIMES;
use spurline_rails::LocalRail;
use spurline_s3::{S3Endpoint, SourceBucket};
use spurline_store::{FreshDirs, Store};
use spurline_trust::Trust;
use spurline_types::{Error, ErrorKind, Stats};
use spurline_volume::Volume;
use spurline_volume::writes::WritableVolume;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// How often a node looks for what mounts have left behind in buckets.
const LEFTOVERS_INTERVAL: Duration = Duration::from_secs(3600);

/// Time limit for storing another weight in the registry; the client waits a little longer.
const WEIGHT_STORE_TIMEOUT: Duration = Duration::from_secs(8);

/// A node that serves.
pub struct RunningNode {
    config: NodeConfig,
    /// Addresses over TCP and over RDMA.
    listening: Vec<String>,
    rdma_at: Vec<String>,
    /// Addresses and rails that other machines reach.
    reached: Vec<String>,
    announcer: Arc<Option<NodeAnnouncer>>,
    others: Option<NodeGroup>,
    tcp: TcpServer,
    rdma: Option<RdmaServer>,
    admin: AdminServices,
    /// Ends before the store, which the node keeps.
    _shared: Option<SharedCacheFolder>,
    /// Kept alive here: the node has a weak reference.
    _target: Arc<ProcessTarget>,
    s3: Option<S3Endpoint>,
    node: Arc<CacheNode>,
    stage: Option<RunningStage>,
    _staging: Option<NodeStage>,
    recent: Option<RecentObjectsFile>,
    /// Cache directories that this start made; last, because a drop removes the directories.
    fresh: FreshDirs,
}

/// Starts the node; which serves when this returns.
///
/// # Errors
/// When the node can't start.
pub fn start_node(mut config: NodeConfig) -> Result<RunningNode, Fault> {
    let started = Instant::now();
    let stats = Arc::new(Stats::default());
    let endpoint_files = config.s3.as_ref().map(EndpointFiles::read).transpose()?;
    // Cache disks register the same memory with io_uring first.
    let before = usize::from(setup::has_disks(&config.cache));
    let found = config.net.rdma.as_ref().map(|rdma| rails::find_rails(rdma, &config.budget, before)).transpose()?;
    config.cache.iorpc_mode = disk_mode(config.cache.iorpc_mode, found.as_ref().is_some_and(|rails| !rails.is_empty()));
    let addresses = listen_addresses(&config)?;
    let (far, rails) = reachable_at(&addresses, found.as_deref());
    config.trust.check_reach(&far, &rails, "read all this node may fetch")?;
    let host = group::hostname();
    let name = config.name.clone().unwrap_or_else(|| host.clone());
    let trust = setup::open_trust(&config.trust, &name)?;
    let block_size = config.cache.block_size as usize;
    let outside_arena = config.budget.name_table_bytes() + config.budget.s3_client_bytes() + upload_memory(&config);
    let pool = BufferPool::new(config.budget.total - outside_arena, block_size)?;
    rails::place_memory(found.as_deref().unwrap_or_default(), &pool);
    check_sources(&config, &stats)?;
    // Locals are dropped in the reverse order.
    let sources: Vec<&str> = config.sources.iter().map(|source| source.as_str()).collect();
    let setup::OpenCache { fresh, store, shared: folder } =
        setup::open_store(&config.cache, config.budget.index_bytes, &pool, &sources, &stats)?;
    config.sources.iter().for_each(|source| setup::warn_of_cache_in_source(source.as_str(), &config.cache));
    let marks = settings::compare_with_before(&config, store.is_some())?;
    let tier = MemTier::new(Arc::clone(&pool));
    let shared = cache_context(&config, &tier, store.as_ref(), &stats);
    let buckets = SharedBuckets::default();
    let staging = prepare_stage(&config, &buckets, &stats)?;
    let node = open_service(&config, &name, &shared, &buckets, &stats)?;
    staging.iter().for_each(|staging| staging.set_node(&node, &config));
    let recent = if store.is_some() { RecentObjectsFile::open(&config.cache.dirs, &node)? } else { None };
    // Rails come first: the handshake over TCP lists the rails.
    let (rdma, rails) = match (&config.net.rdma, &found) {
        (Some(rdma), Some(found)) => {
            let memory = RailMemory { budget: &config.budget, locked_times: before };
            let (server, rails) =
                rails::start_rdma_server(rdma, found, &pool, memory, Arc::clone(&node) as _, &trust, &stats)?;
            node.announce_rails(rails.clone());
            (Some(server), rails)
        }
        _ => (None, Vec::new()),
    };
    let tcp = start_tcp_server(&config, &addresses, &node, &trust, &pool, &stats)?;
    let s3 = start_s3(&config, endpoint_files, &node, &stats)?;
    let listening: Vec<String> = tcp.local_addrs().iter().map(ToString::to_string).collect();
    stats.group.weight.set(u64::from(config.weight));
    let own_name = group::name_in_group(&config, &host, &listening);
    node.set_name(own_name.clone());
    let others = group::join_group(&config, &own_name, &node, &shared, &trust, &stats)?;
    let stage = start_stage(staging.as_ref(), &config, &own_name, &node, others.as_ref(), &stats)?;
    // The node serves first, and then registers.
    let announcer =
        group::announce_node(&config, &host, &listening, node.instance(), others.as_ref(), marks.before(), &stats)?;
    let announcer = Arc::new(announcer);
    marks.write_marks();
    let found_rails = rails.iter().zip(found.iter().flatten());
    let view = NodeView {
        name,
        addresses: listening.clone(),
        rails: found_rails.map(|(rail, found)| rails::rail_status(rail, found)).collect(),
        sources: source_urls(&config),
        block_size: config.cache.block_size,
        group: config.group.clone(),
        store,
        buckets,
        node: Arc::clone(&node),
        announcer: Arc::clone(&announcer),
        stats: Arc::clone(&stats),
    };
    let target = admin_target(view, pool, tier, started);
    describe_to_others(&node, &target);
    accept_weights(&node, &announcer, &stats);
    let owner = listening.first().cloned().unwrap_or_default();
    let admin = AdminServices::open(SocketOwner::Node(&owner), &config.metrics, &target)?;
    let rdma_at: Vec<String> = rdma.iter().flat_map(|r| r.local_addrs().iter().map(ToString::to_string)).collect();
    let (reached, rails) = reachable_at(tcp.local_addrs(), found.as_deref());
    Ok(RunningNode {
        config,
        listening,
        rdma_at,
        reached: [reached, rails].concat(),
        announcer,
        others,
        tcp,
        rdma,
        admin,
        _shared: folder,
        _target: target,
        s3,
        node,
        stage,
        _staging: staging,
        recent,
        fresh,
    })
}

/// The memory and the disks of all volumes.
fn cache_context(
    config: &NodeConfig,
    tier: &Arc<MemTier>,
    store: Option<&Arc<Store>>,
    stats: &Arc<Stats>,
) -> Arc<CacheContext> {
    CacheContext::new(
        Arc::clone(tier),
        store.cloned(),
        config.cache.block_size,
        config.under.max_downloads as usize,
        config.under.timeout,
        config.cache.iorpc_mode == IorpcMode::Splice,
        Arc::clone(stats),
    )
}

fn source_urls(config: &NodeConfig) -> Vec<String> {
    config.sources.iter().map(|source| source.as_str().to_owned()).collect()
}

/// The age of names and attributes at a node, and the memory for these.
fn metadata_limits(config: &NodeConfig) -> MetadataLimits {
    MetadataLimits { ttl: setup::NODE_METADATA_TTL, name_bytes: config.budget.metadata_bytes }
}

/// A node that has staged files waits this long for its store at the start.
const KEPT_CHECK_TIME: Duration = Duration::from_secs(5);

/// Whether the source gave no answer.
fn is_silence(fault: &Fault) -> bool {
    matches!(
        fault.kind,
        Some(ErrorKind::Timeout | ErrorKind::Unavailable | ErrorKind::OriginDown | ErrorKind::OriginFailed)
    )
}

/// A source that can't be reached is an error at the start, not at the first read; but for a node that has staged files.
fn check_sources(config: &NodeConfig, stats: &Arc<Stats>) -> Result<(), Fault> {
    for source in &config.sources {
        let limits = metadata_limits(config);
        let origin = setup::open_under(source.as_str(), &[], &config.under, limits, stats, &SharedBuckets::default())?;
        let has_kept_files = has_kept_files(config);
        let limit = if has_kept_files { KEPT_CHECK_TIME.min(config.under.timeout) } else { config.under.timeout };
        match setup::check_origin(&*origin, limit) {
            Err(fault) if has_kept_files && is_silence(&fault) => {
                tracing::warn!("source {} gives no answer: {}; staged files wait", origin.describe(), fault.what);
            }
            checked => {
                checked?;
                tracing::info!("source {}", origin.describe());
            }
        }
    }
    Ok(())
}

/// Makes the service that answers mounts, which takes changes where the configuration says so.
fn open_service(
    config: &NodeConfig,
    name: &str,
    shared: &Arc<CacheContext>,
    buckets: &SharedBuckets,
    stats: &Arc<Stats>,
) -> Result<Arc<CacheNode>, Fault> {
    let sources = source_urls(config);
    let within = sources.clone();
    let under = config.under.clone();
    let limits = metadata_limits(config);
    let origin_stats = Arc::clone(stats);
    let buckets = buckets.clone();
    let published = Arc::<PublishedBytes>::default();
    let of_requests = setup::origin_options(&under, &buckets);
    let changes = config.writes.map(|writes| {
        Arc::new(NodeChanges {
            options: {
                let mut options = bucket_options(&writes, config.cache.dirs.first().cloned(), config.budget.total);
                setup::keep_known_names(&mut options, &under, limits.name_bytes);
                options
            },
            origin: of_requests.clone(),
            published: Arc::clone(&published),
            stats: Arc::clone(stats),
            writes,
        })
    });
    let is_written = changes.is_some();
    let open = Box::new(move |source: &str| {
        let origin = setup::open_under(source, &within, &under, limits, &origin_stats, &buckets)?;
        if !is_written || is_directory(source) {
            return Ok(origin);
        }
        Ok(Arc::new(PublishingOrigin::new(origin, Arc::clone(&published))) as Arc<dyn OriginStore>)
    });
    let node = CacheNode::new(name, Arc::clone(shared), sources.clone(), open);
    let settings = changes.as_ref().map(|changes| store_settings(&changes.writes));
    let counted = Arc::clone(stats);
    let open_requests = move |source: &str| SourceRequests::open(source, &of_requests, Arc::clone(&counted));
    node.accept_store_requests(settings, Box::new(open_requests));
    if let Some(changes) = changes {
        // A source that can't be changed is an error at the start.
        sources.iter().try_for_each(|source| changes.check(source))?;
        remove_leftovers(&changes, sources)?;
        node.accept_writes(Box::new(move |volume| changes.open(volume)));
        expire_sessions(&node)?;
        tracing::info!("changes are taken from mounts with --rw");
    }
    node.set_placement_rule(PLACEMENT_RULE);
    Ok(node)
}

/// Starts the S3 endpoint over the node's own volumes, if there is one.
fn start_s3(
    config: &NodeConfig,
    endpoint_files: Option<EndpointFiles>,
    node: &Arc<CacheNode>,
    stats: &Arc<Stats>,
) -> Result<Option<S3Endpoint>, Fault> {
    let (Some(s3), Some(endpoint_files)) = (&config.s3, endpoint_files) else { return Ok(None) };
    let mut buckets = Vec::new();
    for bucket in &s3.buckets {
        let opened = node.open_source(bucket.source.as_str())?;
        let volume: Arc<dyn Volume> = opened.volume;
        let writes = match (opened.writes, &config.writes) {
            (Some(source), Some(writes)) => Some(bucket_writes(&volume, source, writes, stats)?),
            _ => None,
        };
        buckets.push(SourceBucket { name: bucket.name.clone(), volume, writes });
    }
    let upload_dir = config.cache.dirs.first().filter(|_| setup::has_disks(&config.cache)).cloned();
    start_endpoint(s3, endpoint_files, buckets, &config.budget, config.cache.block_size, upload_dir, stats).map(Some)
}

fn is_directory(source: &str) -> bool {
    SourceLocation::parse(source).is_ok_and(|location| location.scheme() == SourceScheme::Directory)
}

/// The settings of a node that changes sources.
struct NodeChanges {
    writes: WritesConfig,
    options: BucketWriteOptions,
    origin: OriginOptions,
    published: Arc<PublishedBytes>,
    stats: Arc<Stats>,
}

impl NodeChanges {
    /// Checks that a source can be changed.
    fn check(&self, source: &str) -> Result<(), Fault> {
        if is_directory(source) {
            let opened = open_node_directory(source, &self.writes);
            return opened.map(drop).map_err(|error| unwritable(error, "leave --writable out"));
        }
        let checked = WritableBucket::check(source, &self.origin, &self.options, Arc::clone(&self.stats));
        checked.map_err(|error| unwritable_bucket(error, "--writable"))
    }

    /// Opens a source for changes, which is read through `volume`.
    fn open(&self, volume: &Arc<dyn Volume>) -> spurline_types::Result<Arc<dyn WritableVolume>> {
        let source = volume.source();
        if is_directory(source) {
            return Ok(open_node_directory(source, &self.writes)?);
        }
        let options = self.options.clone();
        let published = Arc::clone(&self.published);
        Ok(WritableBucket::open(source, &self.origin, options, Arc::clone(volume), published, Arc::clone(&self.stats))?)
    }
}

fn start_tcp_server(
    config: &NodeConfig,
    addresses: &[SocketAddr],
    node: &Arc<CacheNode>,
    trust: &Arc<Trust>,
    pool: &Arc<BufferPool>,
    stats: &Arc<Stats>,
) -> Result<TcpServer, Fault> {
    let (max_connections, _, more_connections) = limits::connection_limits();
    let server_config = ServerConfig {
        max_connections,
        more_connections,
        max_pending_handshakes: (max_connections / 8).min(1024),
        max_workers: (config.budget.serve_slots as usize).max(16),
        socket: SocketOptions { congestion: config.net.tcp_congestion, ..SocketOptions::default() },
        trust: Arc::clone(trust),
        payload_pool: Some(Arc::clone(pool)),
        ..ServerConfig::default()
    };
    Ok(TcpServer::bind(addresses, Arc::clone(node) as _, server_config, Arc::clone(stats))?)
}

/// The parts of a running node from which the status is read.
struct NodeView {
    name: String,
    addresses: Vec<String>,
    rails: Vec<RailStatus>,
    sources: Vec<String>,
    block_size: u64,
    group: Option<GroupConfig>,
    store: Option<Arc<Store>>,
    buckets: SharedBuckets,
    node: Arc<CacheNode>,
    announcer: Arc<Option<NodeAnnouncer>>,
    stats: Arc<Stats>,
}

impl NodeView {
    fn status(&self) -> NodeStatus {
        let transports: &[&str] = if self.rails.is_empty() { &["tcp"] } else { &["rdma", "tcp"] };
        let writes = self.node.writes_in_use();
        let mut origin_errors = setup::origin_errors(&self.buckets);
        origin_errors.extend(self.node.origin_errors());
        NodeStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            name: self.name.clone(),
            addresses: self.addresses.clone(),
            transports: transports.iter().map(ToString::to_string).collect(),
            rails: self.rails.clone(),
            weight: self.stats.group.weight.get(),
            group: group::registration_status(self.group.as_ref(), self.announcer.as_ref().as_ref()),
            sources: self.sources.clone(),
            volumes: self.node.volumes().iter().map(|volume| volume.source().to_owned()).collect(),
            block_size: self.block_size,
            writes: NodeWrites {
                writable: writes.writable,
                sessions: writes.sessions as u64,
                open_files: writes.open_files as u64,
            },
            disks: setup::disk_status(self.store.as_deref()),
            origin_errors,
        }
    }

    /// The cached blocks of a file of the source that was opened first.
    fn file_info(&self, path: &[u8]) -> spurline_types::Result<InfoDocument> {
        let volumes = self.node.volumes();
        Ok(InfoDocument {
            file: volumes
                .first()
                .ok_or_else(|| Error::new(ErrorKind::NotFound, "no mount has asked this node for anything yet"))?
                .info(path)?,
            writes: None,
            reads: None,
        })
    }

    fn check_health(&self) -> spurline_types::Result<()> {
        setup::check_disks(&self.store.as_deref().map(|store| store.disks()).unwrap_or_default())?;
        setup::check_credentials(&self.buckets)
    }
}

fn admin_target(view: NodeView, pool: Arc<BufferPool>, tier: Arc<MemTier>, started: Instant) -> Arc<ProcessTarget> {
    let view = Arc::new(view);
    let status = Arc::clone(&view);
    let info = Arc::clone(&view);
    let health = Arc::clone(&view);
    Arc::new(ProcessTarget {
        stats: Arc::clone(&view.stats),
        started,
        gauges: Box::new(move |stats| setup::set_memory_gauges(&pool, &tier, stats)),
        info: Box::new(move |path| info.file_info(path)),
        role: Box::new(move || ProcessRole::Node(status.status())),
        jobs: Err("a node runs no jobs, but executes their requests; name a path in a mount"),
        export: None,
        upgrade: None,
        health: Box::new(move || health.check_health()),
        metrics_address: OnceLock::new(),
    })
}

/// Makes the node answer the processes that query over the group port.
fn describe_to_others(node: &Arc<CacheNode>, target: &Arc<ProcessTarget>) {
    let target = Arc::downgrade(target);
    node.set_describe(Box::new(move || {
        let Some(target) = target.upgrade() else { return NodeDescription::write(None) };
        NodeDescription::write(Some((&target.process_status(), target.current_stats())))
    }));
}

/// Makes the node take another weight, which the registry stores.
fn accept_weights(node: &Arc<CacheNode>, announcer: &Arc<Option<NodeAnnouncer>>, stats: &Arc<Stats>) {
    let announcer = Arc::clone(announcer);
    let stats = Arc::clone(stats);
    node.set_weigh(Box::new(move |weight| {
        let Some(announcer) = announcer.as_ref() else {
            let why = "its registry stores no weights: remove the node from the list";
            return Err(Error::new(ErrorKind::Unsupported, why));
        };
        // The client continues when the registry has stored the weight.
        announcer.update_member_by(Instant::now() + WEIGHT_STORE_TIMEOUT, |member| member.weight = weight)?;
        stats.group.weight.set(u64::from(weight));
        tracing::info!("this node's weight is {weight} from now on, until it is started again");
        Ok(())
    }));
}

impl RunningNode {
    /// Addresses of the service over TCP.
    pub fn addresses(&self) -> &[String] {
        &self.listening
    }

    /// Logs the lines that people and scripts wait for. To be called when signals are handled: a script may send a signal right
    /// after these lines.
    pub fn log_start(&self) {
        if !self.config.trust.requires_proof() && !self.reached.is_empty() {
            tracing::warn!(
                "--allow-anyone: whoever reaches {} can read all this node may fetch",
                self.reached.join(" or ")
            );
        }
        setup::log_memory(&self.config.budget, self.config.cache.size, setup::has_disks(&self.config.cache));
        if !self.rdma_at.is_empty() {
            tracing::info!("serving on {} over rdma", self.rdma_at.join(", "));
        }
        if let (Some(endpoint), Some(s3)) = (&self.s3, &self.config.s3) {
            log_endpoint(endpoint, s3);
        }
        tracing::info!("serving on {} over tcp", self.listening.join(", "));
    }

    /// Keeps the cache directories that were made for the node. Without this call, the end of the node removes the directories,
    /// as after a failed start.
    pub fn keep_directories(&mut self) {
        std::mem::take(&mut self.fresh).keep();
    }

    /// Leaves the group, answers the requests under way within [`setup::STOP_PATIENCE`], and ends.
    pub fn stop(self) {
        tracing::info!("stopping");
        if let Some(stage) = self.stage {
            stage.stop();
        }
        if let Some(announcer) = self.announcer.as_ref() {
            announcer.stop_announcing();
        }
        if let Some(endpoint) = self.s3 {
            stop_endpoint(endpoint);
        }
        drop(self.others);
        self.tcp.shutdown();
        let deadline = Instant::now() + setup::STOP_PATIENCE;
        let rdma_ended = self.rdma.is_none_or(|rdma| rdma.join(deadline));
        if !self.tcp.join(deadline) || !rdma_ended {
            tracing::warn!("requests were still being answered after {} s", setup::STOP_PATIENCE.as_secs());
        }
        if let Some(recent) = self.recent {
            recent.close(&self.node);
        }
        drop(self.admin);
    }
}

/// Ends the sessions of mounts that are gone, while the node runs.
fn expire_sessions(node: &Arc<CacheNode>) -> Result<(), Fault> {
    let node = Arc::downgrade(node);
    let spawned = std::thread::Builder::new().name("write-sessions".into()).spawn(move || {
        while let Some(node) = node.upgrade() {
            node.expire_write_sessions();
            drop(node);
            std::thread::sleep(LOCK_TIMES.session_check);
        }
    });
    spawned.map(drop).map_err(|e| Error::io("can't start a thread", &e).into())
}

/// Completes renames and removes uploads that mounts have left behind in buckets, also while no mount writes. The start has done so.
fn remove_leftovers(changes: &Arc<NodeChanges>, sources: Vec<String>) -> Result<(), Fault> {
    let mut options = changes.options.clone();
    options.conditions_known = true;
    let changes = Arc::downgrade(changes);
    let spawned = std::thread::Builder::new().name("leftovers".into()).spawn(move || {
        loop {
            std::thread::sleep(LEFTOVERS_INTERVAL);
            let Some(changes) = changes.upgrade() else { return };
            for source in sources.iter().filter(|source| !is_directory(source)) {
                let checked = WritableBucket::check(source, &changes.origin, &options, Arc::clone(&changes.stats));
                if let Err(error) = checked {
                    tracing::warn!("{source}: what mounts have left behind stays: {error}");
                }
            }
        }
    });
    spawned.map(drop).map_err(|e| Error::io("can't start a thread", &e).into())
}

/// How cache disks are read. Data sent over rails leaves from registered memory, never from a file: splice would only
/// add a copy in the page cache.
fn disk_mode(asked: IorpcMode, rails: bool) -> IorpcMode {
    match asked {
        IorpcMode::Splice if rails => {
            tracing::warn!("--iorpc-mode splice: over RDMA nothing is sent from a file, so dio is taken");
            IorpcMode::Dio
        }
        _ => asked,
    }
}

fn listen_addresses(config: &NodeConfig) -> Result<Vec<SocketAddr>, Fault> {
    let ips = if config.net.group_network.is_empty() {
        vec![IpAddr::V4(Ipv4Addr::LOCALHOST)]
    } else {
        group_addresses(&config.net.group_network.join(","))?
    };
    Ok(ips.into_iter().map(|ip| SocketAddr::new(ip, config.port)).collect())
}

/// The TCP addresses and the rails at which other machines reach the node.
fn reachable_at(addresses: &[SocketAddr], rails: Option<&[LocalRail]>) -> (Vec<String>, Vec<String>) {
    let far = addresses.iter().filter(|at| !at.ip().is_loopback()).map(ToString::to_string);
    (far.collect(), rails.into_iter().flatten().map(|found| format!("rail {}", found.rail.name)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splice_is_for_nodes_without_rails() {
        assert_eq!(disk_mode(IorpcMode::Splice, true), IorpcMode::Dio);
        assert_eq!(disk_mode(IorpcMode::Splice, false), IorpcMode::Splice);
        for other in [IorpcMode::Dio, IorpcMode::Pagecache, IorpcMode::Disable] {
            assert_eq!(disk_mode(other, true), other);
        }
    }
}
