//! Settings as a front end gives them: plain values with defaults, nothing checked yet. [`crate::checked`] turns these into a
//! configuration. Knows no command line, environment variable or file.

use crate::s3::RawS3;
use crate::values::{CacheSize, FuseIo, IorpcMode, LogFormat, ReplicaCounts, SourceUrl, TransportMode};
use spurline_membership::url::RegistryUrl as Registry;
use spurline_types::{Congestion, Size};
use std::path::PathBuf;
use std::time::Duration;

/// The source of reads, and the way: through a cache of this process, or from the nodes of a group.
#[derive(Debug, Clone, PartialEq)]
pub struct RawVolume {
    /// The origin's URL or directory.
    pub source: SourceUrl,
    /// The cache group; without a registry the volume is read alone.
    pub group: RawGroup,
    /// Nodes that hold each file.
    pub replicas: ReplicaCounts,
    /// A read that takes longer is sent to a second node; zero for never.
    pub hedge_after: Duration,
    /// The network.
    pub net: RawNetwork,
    /// Proofs between peers.
    pub trust: RawTrust,
    /// The cache.
    pub cache: RawCache,
    /// The origin.
    pub under: RawOrigin,
    /// The memory budget.
    pub buffer_size: Size,
}

impl RawVolume {
    /// The defaults, for `source`.
    pub fn new(source: SourceUrl) -> Self {
        RawVolume {
            source,
            group: RawGroup::default(),
            replicas: ReplicaCounts { all: 1, below: Vec::new() },
            hedge_after: Duration::from_millis(50),
            net: RawNetwork::default(),
            trust: RawTrust::default(),
            cache: RawCache::default(),
            under: RawOrigin::default(),
            buffer_size: DEFAULT_BUFFER,
        }
    }
}

/// The memory budget of a process that names none.
pub const DEFAULT_BUFFER: Size = Size(300 << 20);

/// A mount.
#[derive(Debug, Clone, PartialEq)]
pub struct RawMount {
    /// The volume of the mount.
    pub volume: RawVolume,
    /// Where.
    pub mountpoint: PathBuf,
    /// The FUSE session.
    pub fuse: RawFuse,
    /// Logs and metrics.
    pub log: RawLog,
    /// Run in the background.
    pub background: bool,
}

impl RawMount {
    /// The defaults, for `source` at `mountpoint`.
    pub fn new(source: SourceUrl, mountpoint: PathBuf) -> Self {
        RawMount {
            volume: RawVolume::new(source),
            mountpoint,
            fuse: RawFuse::default(),
            log: RawLog::default(),
            background: false,
        }
    }
}

/// A node.
#[derive(Debug, Clone, PartialEq)]
pub struct RawNode {
    /// Origins that the node may fetch from and serve.
    pub source: Vec<SourceUrl>,
    /// Share of the group's blocks; 0 drains the node.
    pub weight: u32,
    /// Name in the group; `None` for HOSTNAME:PORT.
    pub name: Option<String>,
    /// Accept settings that place blocks elsewhere than before.
    pub yes: bool,
    /// Take changes.
    pub writable: bool,
    /// User and group of all changes; `None` for the users of the calling processes.
    pub squash: Option<(u32, u32)>,
    /// How buckets are changed.
    pub bucket: RawBucketWrites,
    /// The cache group.
    pub group: RawGroup,
    /// Fixed TCP port, or 0.
    pub group_port: u16,
    /// Fixed RDMA port, or 0.
    pub rdma_port: u16,
    /// The memory budget.
    pub buffer_size: Size,
    /// The network.
    pub net: RawNetwork,
    /// Proofs between peers.
    pub trust: RawTrust,
    /// Serve peers without a proof.
    pub allow_anyone: bool,
    /// The cache.
    pub cache: RawCache,
    /// The origin.
    pub under: RawOrigin,
    /// The S3 endpoint.
    pub s3: RawS3,
    /// Logs and metrics.
    pub log: RawLog,
    /// Run in the background.
    pub background: bool,
}

impl RawNode {
    /// The defaults, for `sources`.
    pub fn new(source: Vec<SourceUrl>) -> Self {
        RawNode {
            source,
            weight: 100,
            name: None,
            yes: false,
            writable: false,
            squash: None,
            bucket: RawBucketWrites::default(),
            group: RawGroup::default(),
            group_port: 0,
            rdma_port: 0,
            buffer_size: DEFAULT_BUFFER,
            net: RawNetwork::default(),
            trust: RawTrust::default(),
            allow_anyone: false,
            cache: RawCache::default(),
            under: RawOrigin::default(),
            s3: RawS3::default(),
            log: RawLog::default(),
            background: false,
        }
    }
}

/// A coordinator.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RawCoordinator {
    /// Interface names, addresses or CIDRs to listen at, with colons between; `None` for loopback only.
    pub group_network: Option<String>,
    /// Fixed port, or 0.
    pub group_port: u16,
    /// Serve peers without a proof.
    pub allow_anyone: bool,
    /// Proofs between peers.
    pub trust: RawTrust,
    /// File that keeps the list of nodes; the word `none` keeps the list in memory.
    pub state_file: Option<PathBuf>,
    /// An etcd that keeps jobs for several coordinators.
    pub job_store: Option<Registry>,
    /// Logs and metrics.
    pub log: RawLog,
    /// Run in the background.
    pub background: bool,
}

/// The block cache.
#[derive(Debug, Clone, PartialEq)]
pub struct RawCache {
    /// Cache directories, globs allowed; empty for the default.
    pub cache_dir: Vec<PathBuf>,
    /// Capacity over all directories.
    pub cache_size: CacheSize,
    /// Part of each disk that stays free.
    pub free_space_ratio: f64,
    /// Bytes of a block; `None` for the default.
    pub block_size: Option<Size>,
    /// How disks are read.
    pub iorpc_mode: IorpcMode,
    /// Deadline of a disk read.
    pub disk_timeout: Duration,
}

impl Default for RawCache {
    fn default() -> Self {
        RawCache {
            cache_dir: Vec::new(),
            cache_size: CacheSize::Bytes(100 << 30),
            free_space_ratio: 0.1,
            block_size: None,
            iorpc_mode: IorpcMode::Dio,
            disk_timeout: Duration::from_secs(5),
        }
    }
}

impl RawCache {
    /// The block size given, or the default.
    pub fn block_size(&self) -> Size {
        self.block_size.unwrap_or(Size(4 << 20))
    }
}

/// The origin.
#[derive(Debug, Clone, PartialEq)]
pub struct RawOrigin {
    /// Address of an S3-compatible server.
    pub endpoint_url: Option<String>,
    /// Region of the bucket.
    pub region: Option<String>,
    /// Send no credentials.
    pub anonymous: bool,
    /// Deadline of a request.
    pub timeout: Duration,
    /// Longest silence within a transfer.
    pub stall_timeout: Duration,
    /// Requests at the same time.
    pub max_downloads: u32,
    /// How long last known metadata stays valid while the origin does not respond; zero for never.
    pub stale_if_error: Duration,
}

impl Default for RawOrigin {
    fn default() -> Self {
        RawOrigin {
            endpoint_url: None,
            region: None,
            anonymous: false,
            timeout: Duration::from_secs(60),
            stall_timeout: Duration::from_secs(10),
            max_downloads: 200,
            stale_if_error: Duration::from_secs(300),
        }
    }
}

/// The cache group.
#[derive(Debug, Clone, PartialEq)]
pub struct RawGroup {
    /// The registry that lists the nodes; `None` for no group.
    pub registry: Option<Registry>,
    /// The group's name; `None` for the default.
    pub cache_group: Option<String>,
    /// The zone that this machine shares with near machines; may be empty.
    pub zone: String,
    /// How long a node that left the registry keeps a share.
    pub member_hold: Duration,
}

impl Default for RawGroup {
    fn default() -> Self {
        RawGroup { registry: None, cache_group: None, zone: String::new(), member_hold: Duration::from_secs(60) }
    }
}

/// The network.
#[derive(Debug, Clone, PartialEq)]
pub struct RawNetwork {
    /// Interface names, addresses or CIDRs, with colons between.
    pub group_network: Option<String>,
    /// Interfaces for RDMA data, with colons between.
    pub rdma_network: Option<String>,
    /// What may carry the data.
    pub transport: TransportMode,
    /// When RDMA is tried again after a failure.
    pub rdma_retry: Duration,
    /// How long a link that came back has to stay up.
    pub rdma_settle: Duration,
    /// Silence that ends an RDMA path.
    pub rdma_silence: Duration,
    /// TCP congestion control.
    pub tcp_congestion: Congestion,
    /// Connections per path; 0 for a number by processors.
    pub nconnect: u16,
    /// Deadline of a request to a node.
    pub peer_timeout: Duration,
    /// Silence after which a node that owes answers is abandoned.
    pub peer_silence: Duration,
}

impl Default for RawNetwork {
    fn default() -> Self {
        RawNetwork {
            group_network: None,
            rdma_network: None,
            transport: TransportMode::Auto,
            rdma_retry: Duration::from_secs(300),
            rdma_settle: Duration::from_secs(10),
            rdma_silence: Duration::from_secs(2),
            tcp_congestion: Congestion::default(),
            nconnect: 0,
            peer_timeout: Duration::from_secs(75),
            peer_silence: Duration::from_secs(2),
        }
    }
}

/// Proofs between peers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RawTrust {
    /// File with the secret of the group.
    pub group_token_file: Option<PathBuf>,
    /// Encrypt TCP with TLS 1.3.
    pub tls: bool,
    /// This process's certificate in PEM.
    pub tls_cert: Option<PathBuf>,
    /// The key in PEM.
    pub tls_key: Option<PathBuf>,
    /// Certificates of the authorities in PEM.
    pub tls_ca: Option<PathBuf>,
}

/// How buckets are changed, by this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RawBucketWrites {
    /// Changes of a bucket replace changes of others.
    pub last_writer_wins: bool,
    /// A store that keeps no conditions is changed without conditions.
    pub allow_unguarded_writes: bool,
    /// Most objects of a folder of a bucket that is renamed.
    pub rename_limit: u64,
    /// Uploads that mounts of a bucket have left behind are aborted at this age.
    pub abort_uploads_after: Duration,
    /// Owner, mode, times, symbolic links and extended attributes are in the metadata of objects.
    pub object_attrs: bool,
}

impl Default for RawBucketWrites {
    fn default() -> Self {
        RawBucketWrites {
            last_writer_wins: false,
            allow_unguarded_writes: false,
            rename_limit: 10_000,
            abort_uploads_after: Duration::from_secs(24 * 3600),
            object_attrs: false,
        }
    }
}

/// The FUSE session.
#[derive(Debug, Clone, PartialEq)]
pub struct RawFuse {
    /// Refuse changes.
    pub read_only: bool,
    /// Take changes.
    pub rw: bool,
    /// User and group of all changes; `None` for the users of the calling processes.
    pub squash: Option<(u32, u32)>,
    /// Locks hold among the programs of this mount only.
    pub local_locks: bool,
    /// How a bucket is changed.
    pub bucket: RawBucketWrites,
    /// Mount options.
    pub options: Vec<String>,
    /// Largest FUSE request.
    pub max_write: Size,
    /// Age of attributes at most.
    pub attr_cache: Duration,
    /// Age of names of files at most.
    pub entry_cache: Duration,
    /// Age of names of directories at most.
    pub dir_entry_cache: Duration,
    /// How requests are fetched from the kernel.
    pub fuse_io: FuseIo,
    /// Threads that answer the kernel; 0 for as many as the budget allows.
    pub fuse_threads: u16,
    /// Never hand a cached file to the kernel.
    pub no_passthrough: bool,
    /// How far blocks are fetched ahead; `None` for a part of the budget.
    pub max_readahead: Option<Size>,
    /// The kernel's own read-ahead.
    pub kernel_readahead: Size,
    /// Permission bits of files, in place of the origin's.
    pub file_mode: Option<u16>,
    /// Permission bits of directories, in place of the origin's.
    pub dir_mode: Option<u16>,
    /// Owner of all files; `None` for the user that mounts.
    pub uid: Option<u32>,
    /// Group of all files; `None` for the group of the user that mounts.
    pub gid: Option<u32>,
    /// File with a line for each request.
    pub access_log: Option<PathBuf>,
    /// Leave a keeper behind, which starts the mount's process again.
    pub recover: bool,
}

impl Default for RawFuse {
    fn default() -> Self {
        RawFuse {
            read_only: false,
            rw: false,
            squash: None,
            local_locks: false,
            bucket: RawBucketWrites::default(),
            options: Vec::new(),
            max_write: Size(1 << 20),
            attr_cache: Duration::from_secs(1),
            entry_cache: Duration::from_secs(1),
            dir_entry_cache: Duration::from_secs(1),
            fuse_io: FuseIo::Auto,
            fuse_threads: 0,
            no_passthrough: false,
            max_readahead: None,
            kernel_readahead: Size(8 << 20),
            file_mode: None,
            dir_mode: None,
            uid: None,
            gid: None,
            access_log: None,
            recover: false,
        }
    }
}

/// Logs and metrics.
#[derive(Debug, Clone, PartialEq)]
pub struct RawLog {
    /// Log file; `None` for standard error.
    pub log: Option<PathBuf>,
    /// Filter of log lines.
    pub log_filter: Option<String>,
    /// Form of a log line.
    pub log_format: LogFormat,
    /// Address of the metrics page; the word `none` serves nothing.
    pub metrics: Option<String>,
}

impl Default for RawLog {
    fn default() -> Self {
        RawLog { log: None, log_filter: None, log_format: LogFormat::Text, metrics: None }
    }
}
