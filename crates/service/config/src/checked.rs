//! The checked configuration: every value in range, every path absolute, every default applied. Facts about the
//! machine (processors, memory, root) come from [`HostLimits`], and globs are matched against the file system.

use crate::budget::{BudgetDemand, MemoryBudget};
use crate::cache::{CacheConfig, CachePlace, NODE_FOLDER, check_cache, reader_folder};
use crate::fuse::{self, FuseConfig, WritesConfig};
use crate::host::HostLimits;
use crate::raw::{
    RawBucketWrites, RawCache, RawCoordinator, RawGroup, RawLog, RawMount, RawNetwork, RawNode, RawOrigin, RawVolume,
};
use crate::s3::{GatewayConfig, RawGateway, S3Config};
use crate::trust::TrustConfig;
use crate::values::{LogFormat, ReplicaCounts, SourceUrl, TransportMode, absolute_path};
use spurline_membership::url::{EtcdUrl, RegistryUrl as Registry};
use spurline_types::fault::Fault;
use spurline_types::{Congestion, Size};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The default address of metrics.
pub const DEFAULT_METRICS: &str = "127.0.0.1:9567";

/// A volume, ready to be opened.
#[derive(Debug, Clone)]
pub struct VolumeConfig {
    /// The source of reads.
    pub source: SourceUrl,
    /// This reader's name in handshakes, behind the host's.
    pub reader: String,
    /// Set for a volume that is changed.
    pub writes: Option<WritesConfig>,
    /// The nodes to read from; `None` for a volume that is read alone.
    pub group: Option<GroupConfig>,
    /// The number of nodes per file (with a registry only).
    pub replicas: ReplicaCounts,
    /// Reads are hedged after this time at the earliest; zero for never.
    pub hedge_after: Duration,
    /// The block cache; without directories if nodes hold the cache.
    pub cache: CacheConfig,
    /// Access to the origin (lone mount only).
    pub under: OriginConfig,
    /// Access to nodes (with a registry only).
    pub net: NetConfig,
    /// Authentication and encryption.
    pub trust: TrustConfig,
    /// The shares of the memory budget.
    pub budget: MemoryBudget,
    /// How long metadata is valid.
    pub metadata_ttl: Duration,
    /// What to tell the person at start.
    pub warnings: Vec<String>,
}

/// A mount, ready to run.
#[derive(Debug, Clone)]
pub struct MountConfig {
    /// The volume of the mount.
    pub volume: VolumeConfig,
    /// The mountpoint, absolute; whether it exists is for the mount to find out.
    pub mountpoint: PathBuf,
    /// The FUSE session.
    pub fuse: FuseConfig,
    /// Logs.
    pub log: LogConfig,
    /// The metrics page.
    pub metrics: MetricsConfig,
    /// The file of the access log.
    pub access_log: Option<PathBuf>,
    /// Daemonise once the mount is ready.
    pub background: bool,
    /// Leave a keeper behind, which starts the mount's process again when that dies.
    pub recover: bool,
}

/// A cache node, ready to run.
#[derive(Debug, Clone)]
pub struct NodeConfig {
    /// The origins that the node may read: never empty, without duplicates.
    pub sources: Vec<SourceUrl>,
    /// Weight of the node: the share of the group's blocks.
    pub weight: u32,
    /// The name in the group; `None` for a name made of host name and port.
    pub name: Option<String>,
    /// `--yes`: settings that move blocks to other directories are accepted.
    pub accept: bool,
    /// The group to join; `None` for a node that clients list.
    pub group: Option<GroupConfig>,
    /// Fixed port, or 0 for a free port.
    pub port: u16,
    /// The block cache.
    pub cache: CacheConfig,
    /// Access to the origins.
    pub under: OriginConfig,
    /// Set for a node that takes changes.
    pub writes: Option<WritesConfig>,
    /// Set for a node with an S3 endpoint.
    pub s3: Option<S3Config>,
    /// Listening addresses and protocols.
    pub net: NetConfig,
    /// Authentication and encryption.
    pub trust: TrustConfig,
    /// The shares of the memory budget.
    pub budget: MemoryBudget,
    /// Logs.
    pub log: LogConfig,
    /// The metrics page.
    pub metrics: MetricsConfig,
    /// Daemonise once the node serves.
    pub background: bool,
    /// Warnings printed at start.
    pub warnings: Vec<String>,
}

/// A cache group and the registry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupConfig {
    /// The group's name.
    pub name: String,
    /// The registry.
    pub registry: Registry,
    /// The zone that this machine shares with near machines; empty if not given.
    pub zone: String,
    /// How long the group waits for a node that left the registry before the node's blocks move.
    pub hold: Duration,
}

/// A coordinator, ready to run.
#[derive(Debug, Clone)]
pub struct CoordinatorConfig {
    /// Interface names, addresses or CIDRs; empty for loopback only.
    pub group_network: Vec<String>,
    /// Fixed port, or 0 for a free port.
    pub port: u16,
    /// The file with the list of nodes; `None` for memory only.
    pub state_file: Option<PathBuf>,
    /// The store of jobs shared with other coordinators; `None` for the state file.
    pub job_store: Option<EtcdUrl>,
    /// Authentication of nodes and mounts, and of jobs towards nodes.
    pub trust: TrustConfig,
    /// Logs.
    pub log: LogConfig,
    /// The metrics page.
    pub metrics: MetricsConfig,
    /// Daemonise once the coordinator serves.
    pub background: bool,
}

/// Access to the origin.
#[derive(Debug, Clone)]
pub struct OriginConfig {
    /// Address of an S3-compatible server; `None` for the provider's own or the AWS variables.
    pub endpoint_url: Option<String>,
    /// Region; `None` for the AWS variables.
    pub region: Option<String>,
    /// Send no credentials.
    pub anonymous: bool,
    /// Deadline of a request.
    pub timeout: Duration,
    /// Longest silence within a transfer.
    pub stall_timeout: Duration,
    /// Limit of concurrent requests.
    pub max_downloads: u32,
    /// How long last known metadata stays valid while the origin does not respond; zero for never.
    pub stale_if_error: Duration,
}

/// Access to nodes, or a node's listening addresses.
#[derive(Debug, Clone)]
pub struct NetConfig {
    /// Interface names, addresses or CIDRs; empty when not given (a node: loopback only).
    pub group_network: Vec<String>,
    /// The transports allowed for data.
    pub transport: TransportMode,
    /// The rails for RDMA; `None` if data may not use RDMA.
    pub rdma: Option<RdmaConfig>,
    /// TCP congestion control.
    pub tcp_congestion: Congestion,
    /// Connections per path, at least 1.
    pub nconnect: usize,
    /// Deadline of a request to a node.
    pub peer_timeout: Duration,
    /// A node that owes replies is abandoned after this long without a heartbeat, if there are other nodes.
    pub peer_silence: Duration,
}

/// The rails for RDMA data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RdmaConfig {
    /// Interface names: never empty, no duplicates. The devices are resolved later.
    pub interfaces: Vec<String>,
    /// Fixed port of a node, or 0 for a free port.
    pub port: u16,
    /// Retry interval of a failed path.
    pub retry: Duration,
    /// How long a restored link must be up before use.
    pub settle: Duration,
    /// A path without progress under load for this long is closed.
    pub silence: Duration,
}

/// Logs.
#[derive(Debug, Clone)]
pub struct LogConfig {
    /// The file; `None` for standard error.
    pub file: Option<PathBuf>,
    /// The filter; `None` for RUST_LOG or info.
    pub filter: Option<String>,
    /// The line format.
    pub format: LogFormat,
}

/// The metrics page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MetricsConfig {
    /// Disabled.
    Off,
    /// The default address, or another port if that is taken.
    Default,
    /// This address, else an error.
    At(SocketAddr),
}

/// The reader of a volume, perhaps also a writer.
struct VolumeReader<'a> {
    /// See [`VolumeConfig::reader`].
    name: String,
    /// The reader's cache is named by this word, if no directory is named.
    place: &'a str,
    metadata_ttl: Duration,
    /// The needs of a FUSE session, if any.
    kernel: Option<KernelNeeds<'a>>,
    /// The reader serves S3 clients.
    s3: bool,
}

/// What a FUSE session takes of the budget.
#[derive(Clone, Copy)]
struct KernelNeeds<'a> {
    fuse: &'a FuseConfig,
    /// How far blocks are read ahead, where that was said.
    readahead: Option<u64>,
}

/// What takes a share of the budget beside blocks.
struct BudgetNeeds<'a> {
    kernel: Option<KernelNeeds<'a>>,
    rdma: bool,
    origin: bool,
    writes: bool,
    s3: bool,
}

impl RawVolume {
    /// Checks everything that can be checked before the volume is opened.
    ///
    /// # Errors
    /// Wrong values with exit code 2, missing abilities with exit code 3.
    pub fn check(self, host: &HostLimits) -> Result<VolumeConfig, Fault> {
        let reader = format!("process {}", std::process::id());
        // A program finds its blocks again, whatever the process id.
        let reader = VolumeReader {
            name: reader,
            place: "volume",
            metadata_ttl: Duration::from_secs(1),
            kernel: None,
            s3: false,
        };
        self.check_for(reader, None, host)
    }

    /// As [`RawVolume::check`], for a volume that is changed: the budget has a term for bytes that were written through nodes
    /// and are not durable yet. Without a registry a directory of this host is not cached.
    ///
    /// # Errors
    /// As [`RawVolume::check`], and for a source that is not a directory.
    pub fn check_writable(self, writes: WritesConfig, host: &HostLimits) -> Result<VolumeConfig, Fault> {
        if self.source.scheme() != "file" {
            return Err(Fault::usage(
                format!("{} is not a directory, and only directories can be changed", self.source),
                "give a directory, or open the source for reading only",
            ));
        }
        let name = format!("process {}", std::process::id());
        let reader =
            VolumeReader { name, place: "volume", metadata_ttl: Duration::from_secs(1), kernel: None, s3: false };
        self.check_for(reader, Some(writes), host)
    }

    fn check_for(
        self,
        reader: VolumeReader<'_>,
        writes: Option<WritesConfig>,
        host: &HostLimits,
    ) -> Result<VolumeConfig, Fault> {
        let mut warnings = Vec::new();
        let group = check_group(self.group)?;
        let alone = group.is_none();
        let place = match (alone, writes) {
            (false, _) => CachePlace::Nodes,
            (true, Some(_)) if self.source.scheme() == "file" => {
                let writer = if reader.s3 { "a gateway with --writable" } else { "a mount with --rw" };
                CachePlace::HereForNetwork { writer }
            }
            (true, _) => CachePlace::Here,
        };
        let folder = reader_folder(&self.source, reader.place);
        let cache = check_cache(&self.cache, host, place, &folder, &mut warnings)?;
        if !alone {
            warnings.extend(unused_origin_flags(&self.under));
        }
        let rdma = !alone && wants_rdma(&self.net);
        let writes_behind = !alone && writes.is_some();
        let needs = BudgetNeeds { kernel: reader.kernel, rdma, origin: alone, writes: writes_behind, s3: reader.s3 };
        let budget = derive_budget(self.buffer_size, &self.cache, &self.under, needs, host, &mut warnings)?;
        if alone && self.net.rdma_network.is_some() {
            warnings.push("--rdma-network has no effect: without --registry nothing is read from nodes".to_owned());
        }
        let net = check_net(self.net, 0, host, &mut warnings)?;
        let trust = self.trust.check(false)?;
        warn_unencrypted(&net, &trust, &mut warnings);
        Ok(VolumeConfig {
            source: self.source,
            reader: reader.name,
            writes,
            group,
            replicas: self.replicas,
            hedge_after: check_hedge(self.hedge_after)?,
            cache,
            under: check_origin(self.under)?,
            net,
            trust,
            budget,
            metadata_ttl: reader.metadata_ttl,
            warnings,
        })
    }
}

impl RawMount {
    /// Checks everything that can be checked before the mount starts.
    ///
    /// # Errors
    /// Wrong values with exit code 2, missing abilities with exit code 3.
    pub fn check(self, host: &HostLimits) -> Result<MountConfig, Fault> {
        let mountpoint = absolute_path(&self.mountpoint);
        let (fuse, readahead) = fuse::check_fuse(&self.fuse)?;
        let writes = fuse::check_writes(&self.fuse)?;
        if writes.is_some() {
            check_changed_source(&self.volume, self.fuse.bucket, "--rw")?;
        }
        fuse::check_recovery(&self.fuse)?;
        let name = mountpoint.display().to_string();
        let reader = VolumeReader {
            name: name.clone(),
            place: &name,
            metadata_ttl: fuse.cache_times().behind,
            kernel: Some(KernelNeeds { fuse: &fuse, readahead }),
            s3: false,
        };
        Ok(MountConfig {
            volume: self.volume.check_for(reader, writes, host)?,
            mountpoint,
            fuse,
            metrics: check_metrics(&self.log)?,
            log: check_log(self.log),
            access_log: self.fuse.access_log.as_deref().map(absolute_path),
            background: self.background,
            recover: self.fuse.recover,
        })
    }
}

/// Checks that the source of a process that makes changes can be changed; `flag` requests changes.
fn check_changed_source(volume: &RawVolume, bucket: RawBucketWrites, flag: &str) -> Result<(), Fault> {
    match volume.source.scheme() {
        "file" => Ok(()),
        "s3" if volume.group.registry.is_none() => Ok(()),
        "s3" if bucket == RawBucketWrites::default() => Ok(()),
        "s3" => Err(Fault::usage(
            "--object-attrs, --last-writer-wins, --allow-unguarded-writes, --rename-limit and --abort-uploads-after have no effect in a mount through nodes",
            "give them to the nodes, which change the bucket (spurline node --writable), and leave them out here",
        )),
        _ => Err(Fault::usage(
            format!("{flag}: {} is neither a directory nor an S3 bucket, and only those can be changed", volume.source),
            format!("leave {flag} out"),
        )),
    }
}

/// Checks that the sources of a node that takes changes can be changed.
fn check_node_writes(
    writable: bool,
    writes: WritesConfig,
    sources: &[SourceUrl],
) -> Result<Option<WritesConfig>, Fault> {
    if !writable {
        let given = [
            ("--squash", writes.squash.is_some()),
            ("--last-writer-wins", writes.bucket.last_writer_wins),
            ("--allow-unguarded-writes", writes.bucket.allow_unguarded_writes),
            ("--object-attrs", writes.bucket.object_attrs),
        ];
        return match given.iter().find(|(_, given)| *given) {
            None => Ok(None),
            Some((flag, _)) => Err(Fault::usage(
                format!("{flag} has no effect on a node that takes no changes"),
                "give --writable too, or leave it out",
            )),
        };
    }
    match sources.iter().find(|source| !matches!(source.scheme(), "file" | "s3")) {
        None => Ok(Some(writes)),
        Some(source) => Err(Fault::usage(
            format!("--writable: {source} is neither a directory nor an S3 bucket, and nodes change only those"),
            "leave --writable out, or serve that source from another node",
        )),
    }
}

impl RawNode {
    /// Checks everything that can be checked before the node starts.
    ///
    /// # Errors
    /// Exit code 2 for wrong values, 3 for a missing prerequisite.
    pub fn check(self, host: &HostLimits) -> Result<NodeConfig, Fault> {
        let mut warnings = Vec::new();
        let mut sources: Vec<SourceUrl> = Vec::new();
        for source in self.source {
            if !sources.contains(&source) {
                sources.push(source);
            }
        }
        let group = check_group(self.group)?;
        let (group, untold) = match group {
            Some(group) if !group.registry.takes_registrations() => (None, Some(group.registry)),
            group => (group, None),
        };
        if let Some(registry) = untold {
            warnings.push(format!("--registry {registry} does not register nodes: it is for mounts"));
        }
        if let Some(name) = &self.name {
            check_name("--name", name)?;
        } else if group.is_some() && self.group_port == 0 {
            let text = "this node's name in the group changes with its port at every start, and its blocks \
                        move: give --name, or a fixed --group-port";
            warnings.push(text.to_owned());
        }
        let writes = WritesConfig { squash: self.squash, bucket: self.bucket };
        let writes = check_node_writes(self.writable, writes, &sources)?;
        let cache = check_cache(&self.cache, host, CachePlace::Here, NODE_FOLDER, &mut warnings)?;
        let rdma = wants_rdma(&self.net);
        let s3 = self.s3.check(&sources)?;
        let needs = BudgetNeeds { kernel: None, rdma, origin: true, writes: false, s3: s3.is_some() };
        let budget = derive_budget(self.buffer_size, &self.cache, &self.under, needs, host, &mut warnings)?;
        let net = check_net(self.net, self.rdma_port, host, &mut warnings)?;
        let trust = self.trust.check(self.allow_anyone)?;
        warn_unencrypted(&net, &trust, &mut warnings);
        if net.transport == TransportMode::Rdma {
            let text = "--transport rdma applies to mounts, not nodes: this node also serves over TCP, and reads blocks \
                        from other nodes over TCP";
            warnings.push(text.to_owned());
        }
        Ok(NodeConfig {
            writes,
            s3,
            sources,
            weight: self.weight,
            name: self.name,
            accept: self.yes,
            group,
            port: self.group_port,
            cache,
            under: check_origin(self.under)?,
            net,
            trust,
            budget,
            metrics: check_metrics(&self.log)?,
            log: check_log(self.log),
            background: self.background,
            warnings,
        })
    }
}

impl RawGateway {
    /// Checks everything that can be checked before the gateway starts.
    ///
    /// # Errors
    /// Wrong values with exit code 2, missing abilities with exit code 3.
    pub fn check(self, host: &HostLimits) -> Result<GatewayConfig, Fault> {
        let source = self.volume.source.clone();
        let Some(s3) = self.s3.check(std::slice::from_ref(&source))? else {
            return Err(Fault::usage(
                "a gateway needs an address to listen at",
                "give --s3-listen ADDRESS:PORT, such as 127.0.0.1:9000",
            ));
        };
        let writes = WritesConfig { squash: self.squash, bucket: self.bucket };
        let writes = check_node_writes(self.writable, writes, std::slice::from_ref(&source))?;
        if writes.is_some() {
            check_changed_source(&self.volume, self.bucket, "--writable")?;
        }
        let name = format!("gateway {}", s3.listen);
        let place = "gateway";
        let reader = VolumeReader { name, place, metadata_ttl: Duration::from_secs(1), kernel: None, s3: true };
        Ok(GatewayConfig {
            volume: self.volume.check_for(reader, writes, host)?,
            s3,
            metrics: check_metrics(&self.log)?,
            log: check_log(self.log),
            background: self.background,
        })
    }
}

/// Warns about connections that --tls does not cover.
fn warn_unencrypted(net: &NetConfig, trust: &TrustConfig, warnings: &mut Vec<String>) {
    if trust.tls.is_some() && net.rdma.is_some() {
        warnings
            .push("--tls does not cover RDMA: data over --rdma-network is not encrypted (docs/trust.md)".to_owned());
    }
}

impl RawCoordinator {
    /// Checks everything that can be checked before the coordinator starts.
    ///
    /// # Errors
    /// Exit code 2 for wrong values, 3 for a missing directory.
    pub fn check(self, host: &HostLimits) -> Result<CoordinatorConfig, Fault> {
        let state_file = match self.state_file {
            Some(file) if file.as_os_str() == "none" => None,
            Some(file) => Some(in_a_directory("--state-file", &absolute_path(&file))?),
            None if host.root => Some(PathBuf::from("/var/lib/spurline/coordinator.json")),
            None => host.home.as_ref().map(|home| home.join(".local/state/spurline/coordinator.json")),
        };
        Ok(CoordinatorConfig {
            group_network: self.group_network.as_deref().map(split_networks).transpose()?.unwrap_or_default(),
            port: self.group_port,
            state_file,
            job_store: match self.job_store {
                None => None,
                Some(Registry::Etcd(url)) => Some(url),
                Some(other) => {
                    return Err(Fault::usage(
                        format!("--job-store {other} cannot store jobs"),
                        "give etcd://HOST:PORT, or leave it out: then jobs are kept beside --state-file",
                    ));
                }
            },
            trust: self.trust.check(self.allow_anyone)?,
            metrics: check_metrics(&self.log)?,
            log: check_log(self.log),
            background: self.background,
        })
    }
}

/// A file whose directory must exist: a misspelt directory is not created.
fn in_a_directory(flag: &str, file: &Path) -> Result<PathBuf, Fault> {
    match file.parent() {
        Some(dir) if !dir.is_dir() => Err(Fault::missing(
            format!("{flag} {}: there is no directory {}", file.display(), dir.display()),
            format!("make it (mkdir -p {}), or name another file", dir.display()),
        )),
        _ => Ok(file.to_owned()),
    }
}

/// The name of a group, node or zone: a word that fits in a line and in an etcd path.
fn check_name(flag: &str, name: &str) -> Result<(), Fault> {
    if name.is_empty() || name.len() > 255 || name.contains(is_odd_character) {
        return Err(Fault::usage(
            format!("{flag} '{}' is not a valid name", name.escape_debug()),
            "give a word of at most 255 bytes without blanks and slashes",
        ));
    }
    Ok(())
}

fn is_odd_character(c: char) -> bool {
    c.is_control() || c.is_whitespace() || c == '/'
}

/// The default group.
pub const DEFAULT_GROUP: &str = "default";

fn check_group(args: RawGroup) -> Result<Option<GroupConfig>, Fault> {
    if let Some(name) = &args.cache_group {
        check_name("--cache-group", name)?;
        if args.registry.is_none() {
            return Err(Fault::usage(
                format!("--cache-group {name} without --registry: the addresses of its nodes are unknown"),
                "give --registry coordinator://HOST:PORT, or leave --cache-group out",
            ));
        }
    }
    if !args.zone.is_empty() {
        check_name("--zone", &args.zone)?;
    }
    let name = args.cache_group.unwrap_or_else(|| DEFAULT_GROUP.to_owned());
    let zone = args.zone;
    let hold = args.member_hold;
    Ok(args.registry.map(|registry| GroupConfig { name, registry, zone, hold }))
}

/// A warning that names the given flags which have no effect, and why.
pub(crate) fn unused_flags(flags: &[(&str, bool)], why: &str) -> Option<String> {
    let given: Vec<&str> = flags.iter().filter(|(_, given)| *given).map(|(flag, _)| *flag).collect();
    let verb = match given.len() {
        0 => return None,
        1 => "is",
        _ => "are",
    };
    Some(format!("{} {verb} not used: {why}", given.join(", ")))
}

/// The flags of the origin that a mount of a group does not use.
fn unused_origin_flags(args: &RawOrigin) -> Option<String> {
    let own = RawOrigin::default();
    let unused = [
        ("--endpoint-url", args.endpoint_url.is_some()),
        ("--region", args.region.is_some()),
        ("--anonymous", args.anonymous),
        ("--max-downloads", args.max_downloads != own.max_downloads),
    ];
    unused_flags(&unused, "with --registry the nodes read the source")
}

fn check_origin(args: RawOrigin) -> Result<OriginConfig, Fault> {
    if let Some(url) = &args.endpoint_url
        && !(url.starts_with("http://") || url.starts_with("https://"))
    {
        return Err(Fault::usage(
            format!("--endpoint-url '{url}' does not start with http:// or https://"),
            "write http://HOST:PORT or https://HOST",
        ));
    }
    check_positive("--origin-timeout", args.timeout)?;
    check_positive("--origin-stall-timeout", args.stall_timeout)?;
    if args.max_downloads == 0 {
        return Err(Fault::usage("--max-downloads 0 leaves no way to fetch anything", "give 1 or more"));
    }
    Ok(OriginConfig {
        endpoint_url: args.endpoint_url,
        region: args.region,
        anonymous: args.anonymous,
        timeout: args.timeout,
        stall_timeout: args.stall_timeout,
        max_downloads: args.max_downloads,
        stale_if_error: args.stale_if_error,
    })
}

/// Default connections per path: two per processor within these bounds. A request holds a connection until the reply, so this is
/// also the limit of requests in flight.
const AUTO_NCONNECT: (usize, usize) = (8, 16);

fn check_net(
    args: RawNetwork,
    rdma_port: u16,
    host: &HostLimits,
    warnings: &mut Vec<String>,
) -> Result<NetConfig, Fault> {
    let rdma = check_rdma(&args, rdma_port, warnings)?;
    check_positive("--peer-timeout", args.peer_timeout)?;
    if args.peer_silence < LEAST_SILENCE {
        return Err(Fault::usage(
            format!("--peer-silence {:?} would take a busy node for a dead one", args.peer_silence),
            "give 100ms or more; 2s is the default",
        ));
    }
    let nconnect = match args.nconnect {
        0 => (2 * host.processors).clamp(AUTO_NCONNECT.0, AUTO_NCONNECT.1),
        n @ 1..=64 => usize::from(n),
        n => return Err(Fault::usage(format!("--nconnect {n} is above 64"), "8 fill most networks; 0 chooses")),
    };
    Ok(NetConfig {
        group_network: args.group_network.as_deref().map(split_networks).transpose()?.unwrap_or_default(),
        transport: args.transport,
        tcp_congestion: args.tcp_congestion,
        rdma,
        nconnect,
        peer_timeout: args.peer_timeout,
        peer_silence: args.peer_silence,
    })
}

/// Minimum hedge delay: below, a busy processor looks like a late reply.
const LEAST_HEDGE: Duration = Duration::from_millis(1);

fn check_hedge(after: Duration) -> Result<Duration, Fault> {
    if !after.is_zero() && after < LEAST_HEDGE {
        return Err(Fault::usage(
            format!("--hedge-after {after:?} would send nearly every read to a second node as well"),
            "give 1ms or more, or 0 for never; 50ms is the default",
        ));
    }
    Ok(after)
}

/// Minimum silence: below, a busy processor looks like a dead rail.
const LEAST_SILENCE: Duration = Duration::from_millis(100);

fn check_rdma(args: &RawNetwork, port: u16, warnings: &mut Vec<String>) -> Result<Option<RdmaConfig>, Fault> {
    let Some(text) = args.rdma_network.as_deref() else {
        if args.transport == TransportMode::Rdma {
            return Err(Fault::usage(
                "--transport rdma without --rdma-network leaves nothing to carry the data",
                "name the rails: --rdma-network ib0:ib1 ('spurline net list' shows which interfaces have RDMA)",
            ));
        }
        if port != 0 {
            warnings.push("--rdma-port is not used: there is no --rdma-network".to_owned());
        }
        return Ok(None);
    };
    let mut interfaces: Vec<String> = Vec::new();
    for name in text.split([':', ',']).map(str::trim) {
        // The kernel's rule for interface names.
        let wrong = match name {
            "" => "a part is empty",
            "." | ".." => "that is no interface",
            _ if name.parse::<std::net::IpAddr>().is_ok() => "that is an address, not an interface",
            _ if name.len() > 15 => "the name of an interface has at most 15 characters",
            _ if name.contains(['/', '[', ']']) || name.contains(char::is_whitespace) => "that is no interface",
            _ => {
                if !interfaces.iter().any(|known| known == name) {
                    interfaces.push(name.to_owned());
                }
                continue;
            }
        };
        return Err(Fault::usage(
            format!("--rdma-network '{text}': '{name}': {wrong}"),
            "write names of interfaces with colons between, ib0:ib1; 'spurline net list' shows them",
        ));
    }
    check_positive("--rdma-retry", args.rdma_retry)?;
    if args.rdma_silence < LEAST_SILENCE {
        return Err(Fault::usage(
            format!("--rdma-silence {:?} would take a busy node for a dead rail", args.rdma_silence),
            "give 100ms or more; 2s is the default",
        ));
    }
    if args.transport == TransportMode::Tcp {
        warnings.push("--rdma-network is not used: --transport tcp rules out RDMA".to_owned());
        return Ok(None);
    }
    let retry = args.rdma_retry;
    let settle = args.rdma_settle;
    let silence = args.rdma_silence;
    Ok(Some(RdmaConfig { interfaces, port, retry, settle, silence }))
}

/// Splits `ib0:10.0.0.0/8:[fe80::1]` at the colons outside brackets.
fn split_networks(text: &str) -> Result<Vec<String>, Fault> {
    let wrong = |why: &str| {
        Fault::usage(
            format!("--group-network '{text}': {why}"),
            "write interface names, addresses or CIDRs with colons between, IPv6 in brackets: ib0:10.0.0.0/24:[fd00::1]",
        )
    };
    let mut parts = Vec::new();
    let mut part = String::new();
    let mut inside = false;
    for c in text.chars() {
        match c {
            '[' if !inside => inside = true,
            ']' if inside => inside = false,
            ':' if !inside => parts.push(std::mem::take(&mut part)),
            c => part.push(c),
        }
    }
    parts.push(part);
    if inside {
        return Err(wrong("a bracket is not closed"));
    }
    if parts.iter().any(String::is_empty) {
        return Err(wrong("a part is empty"));
    }
    Ok(parts)
}

/// Whether the configuration requires rails.
fn wants_rdma(net: &RawNetwork) -> bool {
    net.rdma_network.is_some() && net.transport != TransportMode::Tcp
}

fn derive_budget(
    total: Size,
    cache: &RawCache,
    under: &RawOrigin,
    needs: BudgetNeeds<'_>,
    host: &HostLimits,
    warnings: &mut Vec<String>,
) -> Result<MemoryBudget, Fault> {
    let mut budget = MemoryBudget::divide(BudgetDemand {
        total: total.bytes(),
        block: cache.block_size().bytes(),
        max_write: needs.kernel.map(|kernel| u64::from(kernel.fuse.max_write)),
        fuse_threads: needs.kernel.and_then(|kernel| kernel.fuse.threads).map(|n| n as u64),
        max_downloads: u64::from(under.max_downloads),
        readahead: needs.kernel.and_then(|kernel| kernel.readahead),
        processors: host.processors as u64,
        rdma: needs.rdma,
        origin: needs.origin,
        writes: needs.writes,
        s3: needs.s3,
    })?;
    warnings.extend(budget.check_host(host)?);
    Ok(budget)
}

impl RawLog {
    /// Checks the flags of logs and metrics alone, for services without others.
    ///
    /// # Errors
    /// Exit code 2 for wrong values.
    pub fn check(self) -> Result<(LogConfig, MetricsConfig), Fault> {
        let metrics = check_metrics(&self)?;
        Ok((check_log(self), metrics))
    }
}

fn check_metrics(args: &RawLog) -> Result<MetricsConfig, Fault> {
    let Some(text) = args.metrics.as_deref() else { return Ok(MetricsConfig::Default) };
    if matches!(text, "none" | "off" | "") {
        return Ok(MetricsConfig::Off);
    }
    let full = match text.strip_prefix(':') {
        Some(port) => format!("127.0.0.1:{port}"),
        None if text.parse::<u16>().is_ok() => format!("127.0.0.1:{text}"),
        None => text.replacen("localhost:", "127.0.0.1:", 1),
    };
    match full.parse() {
        Ok(address) => Ok(MetricsConfig::At(address)),
        Err(_) => Err(Fault::usage(
            format!("--metrics '{text}' is not an address and port"),
            format!("write {DEFAULT_METRICS}, [::1]:9567, :9567 or none"),
        )),
    }
}

fn check_log(args: RawLog) -> LogConfig {
    LogConfig { file: args.log.as_deref().map(absolute_path), filter: args.log_filter, format: args.log_format }
}

pub(crate) fn check_positive(flag: &str, time: Duration) -> Result<(), Fault> {
    if time.is_zero() {
        return Err(Fault::usage(format!("{flag} 0 would fail every request"), "give a time such as 10s"));
    }
    Ok(())
}
