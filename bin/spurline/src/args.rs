//! The flags of `mount`, `node` and `coordinator`, their environment variables, and their conversion to raw settings.
//! It checks single values only.

use crate::s3_args::S3Args;
use clap::builder::{BoolishValueParser, PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Arg, ArgAction, Args, Command};
use spurline_config::values::{parse_log_file, parse_mode, parse_squash, parse_weight};
use spurline_config::{
    CacheSize, Fault, FuseIo, IorpcMode, LogFormat, RawBucketWrites, RawCache, RawCoordinator, RawFuse, RawGroup,
    RawLog, RawMount, RawNetwork, RawNode, RawOrigin, RawTrust, RawVolume, Registry, ReplicaCounts, SourceUrl,
    TransportMode, TrustConfig, fuse,
};
use spurline_types::{Congestion, Size, parse_duration};
use std::path::PathBuf;
use std::time::Duration;

/// The arguments of `mount`.
#[derive(Debug, Clone, Args)]
pub struct MountArgs {
    /// Source to mount: s3://BUCKET[/PREFIX], gs://…, az://…, file:///DIR or a plain path
    #[arg(value_name = "SOURCE")]
    pub source: SourceUrl,
    /// Mountpoint: an empty directory
    #[arg(value_name = "MOUNTPOINT")]
    pub mountpoint: PathBuf,
    /// Config file, the common flags.
    #[command(flatten)]
    pub common: CommonArgs,
    /// The FUSE session.
    #[command(flatten)]
    pub fuse: FuseArgs,
    /// The cache group.
    #[command(flatten)]
    pub group: GroupArgs,
    /// Number of nodes that hold each file, with exceptions for some paths: N[,PATH=N]
    ///
    /// Use the same number in all mounts of a group. A mount with another number looks for copies that may not exist,
    /// which costs a fetch but causes no error.
    #[arg(long, value_name = "N[,PATH=N]", default_value = "1", help_heading = "Group")]
    pub replicas: ReplicaCounts,
    /// Send a slow read to a second node too, after this time at the earliest; 0 disables it
    ///
    /// A read counts as slow when it takes longer than this and longer than almost all long reads from the other
    /// nodes. The first good answer is used. At most one request in twenty is sent twice, and none when most nodes
    /// are slow. A node that is slow repeatedly is tried last until a trial read is fast again.
    #[arg(long, value_name = "TIME", default_value = "50ms", value_parser = parse_duration, help_heading = "Group")]
    pub hedge_after: Duration,
    /// Without effect: a mount never serves other mounts
    #[arg(long, help_heading = "Group", hide = true)]
    pub no_sharing: bool,
    /// The network.
    #[command(flatten)]
    pub net: NetArgs,
    /// Authentication and encryption.
    #[command(flatten)]
    pub trust: TrustArgs,
    /// The cache.
    #[command(flatten)]
    pub cache: CacheArgs,
    /// The origin.
    #[command(flatten)]
    pub under: OriginArgs,
    /// Logs and metrics.
    #[command(flatten)]
    pub log: LogArgs,
    /// Run in the background once the mount is ready
    ///
    /// The command returns 0 when the mount is ready, or the error and its exit code.
    #[arg(short = 'd', long, help_heading = "Mount", conflicts_with = "foreground")]
    pub background: bool,
    /// Stay in the foreground (the default)
    #[arg(short = 'f', long, help_heading = "Mount")]
    pub foreground: bool,
}

/// The arguments of `node`.
#[derive(Debug, Clone, Args)]
pub struct NodeArgs {
    /// Source that this node may fetch from and serve; repeat the flag for more
    #[arg(long, value_name = "URL", help_heading = "Node", required = true)]
    pub source: Vec<SourceUrl>,
    /// Share of the group's blocks; 0 drains the node
    #[arg(
        long,
        value_name = "N",
        default_value_t = 100,
        value_parser = parse_weight,
        allow_negative_numbers = true,
        help_heading = "Node"
    )]
    pub weight: u32,
    /// Name of this node in its group; its blocks belong to the name, not to the address [default: HOSTNAME:PORT]
    #[arg(long, value_name = "NAME", help_heading = "Node")]
    pub name: Option<String>,
    /// Accept placement settings that differ from the previous start or from the other nodes
    ///
    /// These are --block-size, --name and --zone. Blocks cached under the old settings are fetched again. Without
    /// this flag the node refuses to start and names the settings that differ.
    #[arg(long, help_heading = "Node")]
    pub yes: bool,
    /// Take changes of the sources from mounts with --rw: directories and S3 buckets
    ///
    /// Each change is made once in the source. A change of a directory is made with the user and groups that the mount reports: the
    /// node believes its mounts (docs/trust.md).
    #[arg(long, help_heading = "Node")]
    pub writable: bool,
    /// Make all changes as this user and group, in place of those that mounts report
    #[arg(long, value_name = "UID:GID", value_parser = parse_squash, help_heading = "Node")]
    pub squash: Option<(u32, u32)>,
    /// How buckets are changed.
    #[command(flatten)]
    pub bucket: BucketWriteArgs,
    /// The S3 endpoint.
    #[command(flatten)]
    pub s3: S3Args,
    /// The cache group.
    #[command(flatten)]
    pub group: GroupArgs,
    /// TCP port to serve on; 0 chooses a free port and prints it
    #[arg(long, value_name = "PORT", default_value_t = 0, help_heading = "Network")]
    pub group_port: u16,
    /// RDMA port on every rail; 0 chooses a free port, which mounts learn during the handshake
    #[arg(long, value_name = "PORT", default_value_t = 0, help_heading = "Network")]
    pub rdma_port: u16,
    /// Config file, the common flags.
    #[command(flatten)]
    pub common: CommonArgs,
    /// The network.
    #[command(flatten)]
    pub net: NetArgs,
    /// Authentication and encryption.
    #[command(flatten)]
    pub trust: TrustArgs,
    /// Serve every client that can reach the ports, without a group token
    ///
    /// For networks where every user may read everything that the node may fetch.
    #[arg(long, help_heading = "Trust")]
    pub allow_anyone: bool,
    /// The cache.
    #[command(flatten)]
    pub cache: CacheArgs,
    /// The origin.
    #[command(flatten)]
    pub under: OriginArgs,
    /// Logs and metrics.
    #[command(flatten)]
    pub log: LogArgs,
    /// Run in the background once the node serves
    #[arg(short = 'd', long, help_heading = "Node", conflicts_with = "foreground")]
    pub background: bool,
    /// Stay in the foreground (the default)
    #[arg(short = 'f', long, help_heading = "Node")]
    pub foreground: bool,
}

/// Flags of every service.
#[derive(Debug, Clone, Args)]
pub struct CommonArgs {
    /// TOML file with the same keys as the flags
    ///
    /// A flag overrides its environment variable, which overrides the file, which overrides the default. Keys at the
    /// top level apply to all services; the tables [mount], [node], [gateway], [coordinator], [device-plugin] and [csi-driver]
    /// apply to one and override the top level.
    #[arg(long, value_name = "FILE", help_heading = "General")]
    pub config: Option<PathBuf>,
    /// Memory budget for all buffers and cached blocks: a hard limit
    ///
    /// FUSE requests, fills in flight and read-ahead are part of it; the rest holds hot blocks. The start fails if
    /// the machine or the control group has too little memory.
    #[arg(long, value_name = "SIZE", default_value = "300M", help_heading = "General")]
    pub buffer_size: Size,
}

/// Flags of the cache.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Cache")]
pub struct CacheArgs {
    /// Cache directories, one per disk: A[:B…], globs allowed [default: a folder of its own in /var/cache/spurline, or
    /// ~/.cache/spurline when not root]
    #[arg(long, value_name = "DIR[:DIR]", value_delimiter = ':')]
    pub cache_dir: Vec<PathBuf>,
    /// Capacity of all cache disks together; -1 uses all available space, 0 disables the disk cache
    ///
    /// Mounts and nodes of one user without --cache-dir share this size: each has a folder of its own by source and mountpoint. The
    /// blocks of one that has ended stay for its next start, until others need their space.
    #[arg(long, value_name = "SIZE", default_value = "100G", allow_hyphen_values = true)]
    pub cache_size: CacheSize,
    /// Fraction of each cache disk that stays free
    #[arg(long, value_name = "RATIO", default_value_t = 0.1)]
    pub free_space_ratio: f64,
    /// Unit of caching and placement; the same on all nodes of a group; mounts of a group use that of its nodes
    /// [default: 4M]
    #[arg(long, value_name = "SIZE")]
    pub block_size: Option<Size>,
    /// How to read cache disks; a node with RDMA rails uses dio instead of splice
    #[arg(long, value_name = "MODE", default_value = "dio", value_parser = choice_parser(&IORPC_MODES))]
    pub iorpc_mode: IorpcMode,
    /// Without effect: dio, the default of --iorpc-mode, does the same
    #[arg(long, hide = true)]
    pub cache_try_dio: bool,
    /// Stop using a cache disk when a read takes longer than this (a write: twice as long)
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = parse_duration)]
    pub disk_timeout: Duration,
}

/// Flags of the origin.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Origin")]
pub struct OriginArgs {
    /// Endpoint of an S3-compatible server (also AWS_ENDPOINT_URL) [default: Amazon's]
    #[arg(long, value_name = "URL")]
    pub endpoint_url: Option<String>,
    /// Region of the bucket (also AWS_REGION)
    #[arg(long, value_name = "NAME")]
    pub region: Option<String>,
    /// Send unsigned requests, for public buckets
    #[arg(long, visible_alias = "no-sign-request")]
    pub anonymous: bool,
    /// Deadline of one read, lookup or listing of the origin
    ///
    /// Transient failures (status 5xx, 503 SlowDown, a broken connection, no answer) are retried with growing pauses until
    /// then. After that the error is EIO if the server failed, and ETIMEDOUT if it did not answer.
    #[arg(long, alias = "under-timeout", value_name = "TIME", default_value = "60s", value_parser = parse_duration)]
    pub origin_timeout: Duration,
    /// Send a request again, up to twice, when there is no answer for this long; resume a transfer that stalls for this
    /// long on another connection
    #[arg(long, alias = "under-stall-timeout", value_name = "TIME", default_value = "10s", value_parser = parse_duration)]
    pub origin_stall_timeout: Duration,
    /// Concurrent requests to the origin, not counting repeated ones
    #[arg(long, value_name = "N", default_value_t = 200)]
    pub max_downloads: u32,
    /// While the origin does not respond, keep using the last known names, attributes and listings for this long; 0 for
    /// never
    ///
    /// Cached files stay readable for that time. The first requests wait up to 3 s for the origin. An answer of the origin
    /// replaces the last known one at once.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = parse_duration)]
    pub stale_if_error: Duration,
}

/// The cache group, and the registry that lists its members.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Group")]
pub struct GroupArgs {
    /// Registry of the group: static:HOST:PORT[,…], dns:NAME:PORT, coordinator://… or etcd://… [default: none, runs
    /// alone]
    ///
    /// A mount with a registry reads from the nodes and holds neither credentials nor a disk cache. A node
    /// registers with a coordinator or etcd; a list and a name are for mounts. A group has one coordinator; use etcd
    /// where the registry must survive the loss of a host. A name that begins with an underscore is one of SRV records,
    /// which contain the ports: dns:_spurline._tcp.NAME. etcd with TLS and a user:
    /// etcd://HOST:2379[,…]?ca=FILE&cert=FILE&key=FILE&user=NAME&password-file=FILE (or the password in
    /// SPURLINE_ETCD_PASSWORD).
    #[arg(long, value_name = "URL")]
    pub registry: Option<Registry>,
    /// Name of the group in the registry [default: default]
    #[arg(long, value_name = "NAME")]
    pub cache_group: Option<String>,
    /// Zone of this machine, such as a rack, a room or a cloud zone; readers prefer copies in their own zone
    #[arg(long, value_name = "NAME", default_value = "")]
    pub zone: String,
    /// Keep the share of a node that left the registry for this long; five times as long when half of the nodes left
    ///
    /// Meanwhile its blocks are read through other nodes. A restart within this time moves no block.
    #[arg(long, value_name = "TIME", default_value = "1m", value_parser = parse_duration)]
    pub member_hold: Duration,
}

/// The arguments of `coordinator`.
#[derive(Debug, Clone, Args)]
pub struct CoordinatorArgs {
    /// TOML file with the same keys as the flags
    #[arg(long, value_name = "FILE", help_heading = "General")]
    pub config: Option<PathBuf>,
    /// Interfaces, addresses or CIDRs to listen on: IF[:IF]; IPv6 in brackets [default: loopback only]
    #[arg(long, value_name = "IF[:IF]", help_heading = "Network")]
    pub group_network: Option<String>,
    /// Port to serve on; 0 chooses a free port and prints it
    #[arg(long, value_name = "PORT", default_value_t = 0, help_heading = "Network")]
    pub group_port: u16,
    /// Serve every client that can reach the port, without a group token
    ///
    /// For networks where every user may register nodes and start jobs. Nodes and mounts still prove the group token
    /// to each other.
    #[arg(long, help_heading = "Trust")]
    pub allow_anyone: bool,
    /// Authentication of nodes and mounts here, and of jobs at nodes.
    #[command(flatten)]
    pub trust: TrustArgs,
    /// File that keeps the node list across restarts; none keeps it in memory only [default:
    /// /var/lib/spurline/coordinator.json, or below ~/.local/state/spurline when not root]
    ///
    /// Jobs (spurline load --submit) are kept beside it.
    #[arg(long, value_name = "FILE", help_heading = "Coordinator")]
    pub state_file: Option<PathBuf>,
    /// etcd that keeps the jobs of several coordinators: etcd://HOST:PORT[,…] [default: beside --state-file]
    ///
    /// Coordinators with the same store share the jobs: one of them runs each, any of them knows it, and after a crash
    /// another continues it. They find the nodes in this etcd: give nodes and mounts --registry etcd://HOST:PORT.
    #[arg(long, value_name = "URL", help_heading = "Coordinator")]
    pub job_store: Option<Registry>,
    /// Logs and metrics.
    #[command(flatten)]
    pub log: LogArgs,
    /// Run in the background once the coordinator serves
    #[arg(short = 'd', long, help_heading = "Coordinator", conflicts_with = "foreground")]
    pub background: bool,
    /// Stay in the foreground (the default)
    #[arg(short = 'f', long, help_heading = "Coordinator")]
    pub foreground: bool,
}

/// Flags of the network.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Network")]
pub struct NetArgs {
    /// Interfaces, addresses or CIDRs of the group: IF[:IF]; IPv6 in brackets
    ///
    /// A node listens on loopback only, unless this is given; other networks require --group-token-file. A mount uses
    /// the interface of the route, unless this is given.
    #[arg(long, alias = "group-ip", value_name = "IF[:IF]")]
    pub group_network: Option<String>,
    /// RDMA rails: interface names, IF[:IF] [default: none, data uses TCP]
    ///
    /// The RDMA device, port and GID of each interface are detected and logged. An interface that can't be used ends
    /// the start with exit code 3 and the reason.
    #[arg(long, value_name = "IF[:IF]")]
    pub rdma_network: Option<String>,
    /// Transport of a mount's data: auto uses rdma where both sides have rails and tcp elsewhere
    ///
    /// A node with rails serves both, and fetches blocks from other nodes over tcp; with tcp it leaves its rails
    /// unused.
    #[arg(long, value_name = "KIND", default_value = "auto", value_parser = choice_parser(&TRANSPORT_CHOICES))]
    pub transport: TransportMode,
    /// Retry RDMA this long after a failure; TCP carries the data meanwhile (also IORPC_RDMA_RETRY_DURATION)
    ///
    /// If this machine's own link caused the failure, RDMA is retried as soon as the link is up and has settled,
    /// unless it also failed earlier within this time. A failed connection attempt is retried after one second, then
    /// after twice as long each time, up to this limit. With --transport rdma no pause is longer than 4 s, and a link
    /// settles for one second.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = parse_duration)]
    pub rdma_retry: Duration,
    /// A link that came back carries data after it was up for this long
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_duration)]
    pub rdma_settle: Duration,
    /// Close an RDMA path that owes answers and receives nothing for this long
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = parse_duration)]
    pub rdma_silence: Duration,
    /// TCP congestion control of connections between mounts and nodes: auto, system, cubic, reno, dctcp
    ///
    /// auto uses the host's default, unless that is BBR: its pacing leaves a fast network idle between short answers.
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub tcp_congestion: Congestion,
    /// Without effect: mounts and nodes have one protocol, over TCP and RDMA
    #[arg(long, hide = true)]
    pub use_iorpc: bool,
    /// Connections per path; 0 derives the number from the processors
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub nconnect: u16,
    /// Deadline of one request to a node
    ///
    /// It should exceed the node's --origin-timeout, so that the node's report of a slow origin arrives. A node that
    /// can't be reached causes an error after 10 s (or this time, if shorter), and at once from then on until it is
    /// back.
    #[arg(long, value_name = "TIME", default_value = "75s", value_parser = parse_duration)]
    pub peer_timeout: Duration,
    /// Use other nodes instead of a node that owes answers and sends no heartbeat for this long
    ///
    /// A separate connection carries the heartbeats, so a node that waits for a slow origin stays in use. In a group
    /// with one node, requests wait for up to --peer-timeout.
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = parse_duration)]
    pub peer_silence: Duration,
}

/// Flags of authentication and encryption; the same for every client and server.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Trust")]
pub struct TrustArgs {
    /// File with the group's secret, the same on every member [default: none, a node listens on loopback only]
    ///
    /// Both sides of every connection prove that they have the secret, without sending it; others are refused. The
    /// file has one secret per line: the first is sent as proof, all are accepted, so that secrets can be replaced
    /// without downtime. The file is read again when it changes. Make one with: (umask 077; openssl rand -base64 32 >
    /// FILE)
    #[arg(long, value_name = "FILE")]
    pub group_token_file: Option<PathBuf>,
    /// Encrypt TCP data and control connections with TLS 1.3; required on both sides
    ///
    /// Without --tls-cert the group token authenticates the peer, by a proof bound to the connection. Data over RDMA
    /// is not encrypted.
    #[arg(long)]
    pub tls: bool,
    /// Certificate of this process in PEM, with its chain; implies --tls
    ///
    /// Both sides present and verify certificates. A node's certificate must match the name or address that clients
    /// use. The files are read again when they change.
    #[arg(long, value_name = "FILE", requires_all = ["tls_key", "tls_ca"])]
    pub tls_cert: Option<PathBuf>,
    /// Private key of the certificate in PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Certificates in PEM of the authorities that sign the group's certificates
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_ca: Option<PathBuf>,
}

/// How a bucket is changed: by a mount with --rw, or by a node with --writable.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Writing to a bucket")]
pub struct BucketWriteArgs {
    /// Writes to a bucket replace what others have written since the file was opened, in place of failing
    ///
    /// With --rw, or --writable of a node.
    #[arg(long)]
    pub last_writer_wins: bool,
    /// Write to a store that ignores the conditions of writes, which guard the changes of others
    ///
    /// With --rw, or --writable of a node. The conditions are tried at the start, which is refused without this flag if the store keeps no conditions.
    #[arg(long)]
    pub allow_unguarded_writes: bool,
    /// Most files and folders below a folder of a bucket that is renamed; programs copy a larger one
    ///
    /// With --rw, or --writable of a node. Each object is copied within the store and then removed.
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    pub rename_limit: u64,
    /// Abort uploads to a bucket that killed mounts have left behind when they are this old
    ///
    /// With --rw, or --writable of a node, at the start. Uploads of other programs are never touched. A file of another mount whose upload is aborted
    /// although it is still open is uploaded again when it is closed.
    #[arg(long, value_name = "TIME", default_value = "1d", value_parser = parse_duration)]
    pub abort_uploads_after: Duration,
    /// Keep owner, mode, times, symbolic links and extended attributes in the metadata of a bucket's objects
    ///
    /// With --rw, or --writable of a node, of all nodes alike. The metadata are those that FSx for Lustre and DataSync write; those of s3fs are read
    /// and kept. A listing with attributes then costs a request for each name. Without this flag chmod, chown and changes of times have no effect,
    /// and succeed.
    #[arg(long)]
    pub object_attrs: bool,
}

/// Flags of the FUSE session.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Mount")]
pub struct FuseArgs {
    /// Mount read-only (the default)
    #[arg(long)]
    pub read_only: bool,
    /// Mount for reading and writing (also -o rw): a directory or an S3 bucket
    ///
    /// Changes of a directory are made there with the identity of the calling process: permissions and quotas are the
    /// source's own. Through nodes, written bytes may come there later: at an fsync or a close, and after a second. A mount
    /// of a directory has no block cache then. A file of a bucket becomes an object at its close or fsync; all files belong
    /// to the user of the mount. In /etc/fstab the word is writable, because mount(8) adds rw to all options.
    #[arg(long, visible_alias = "writable")]
    pub rw: bool,
    /// Make all changes as this user and group, in place of the calling process's
    #[arg(long, value_name = "UID:GID", value_parser = parse_squash)]
    pub squash: Option<(u32, u32)>,
    /// Locks hold among the programs and NFS clients of this mount only, in place of all that use the source
    ///
    /// With --rw. NFSv3 clients of an export need it for locks: the kernel refuses them on a mount that sets locks in the source.
    #[arg(long)]
    pub local_locks: bool,
    // The list is that of the parser, so it is whole.
    #[arg(help = options_help(), long_help = options_long_help())]
    #[arg(short = 'o', long = "options", value_name = "OPT[,OPT]")]
    pub options: Vec<String>,
    /// Largest FUSE request; at least 8K
    #[arg(long, value_name = "SIZE", default_value = "1M")]
    pub max_write: Size,
    /// A replaced file is visible after this time
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = parse_duration)]
    pub attr_cache: Duration,
    /// A new or deleted file is visible after this time
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = parse_duration)]
    pub entry_cache: Duration,
    /// A new or deleted directory is visible after this time; the shortest of the three times decides how often the
    /// source is queried
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = parse_duration)]
    pub dir_entry_cache: Duration,
    /// How to receive requests from the kernel
    #[arg(long, value_name = "KIND", default_value = "auto", value_parser = choice_parser(&FUSE_IO))]
    pub fuse_io: FuseIo,
    /// Threads that serve the kernel's requests; 0 uses as many as --buffer-size allows
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub fuse_threads: u16,
    /// Never let the kernel read cached files directly, or write a directory's files (FUSE passthrough)
    #[arg(long)]
    pub no_passthrough: bool,
    /// Read-ahead of sequential readers, in bytes fetched; 0 disables it [default: from the buffer size]
    #[arg(long, alias = "readahead", value_name = "SIZE")]
    pub max_readahead: Option<Size>,
    /// Read-ahead of the kernel for buffered reads
    #[arg(long, value_name = "SIZE", default_value = "8M")]
    pub kernel_readahead: Size,
    /// Permission bits of all files, in octal [default: the origin's; 444 for objects]
    ///
    /// Programs in a bucket need 555 or 755 to be executable.
    #[arg(long, value_name = "MODE", value_parser = parse_mode)]
    pub file_mode: Option<u16>,
    /// Permission bits of all directories, in octal [default: the origin's; 555 for prefixes]
    #[arg(long, value_name = "MODE", value_parser = parse_mode)]
    pub dir_mode: Option<u16>,
    /// Owner of all files, as a number [default: the user that mounts]
    #[arg(long, value_name = "UID")]
    pub uid: Option<u32>,
    /// Group of all files, as a number [default: the group of the user that mounts]
    #[arg(long, value_name = "GID")]
    pub gid: Option<u32>,
    /// Write one line per kernel request to this file
    #[arg(long, value_name = "FILE")]
    pub access_log: Option<PathBuf>,
    /// Survive the end of the mount's process: a keeper starts the process again, and programs go on after a pause
    ///
    /// From Linux 6.9 on. The keeper holds the connection to the kernel, which names and files programs use, and what they have changed. Requests come over /dev/fuse. `spurline upgrade` replaces the program of such a mount.
    #[arg(long)]
    pub recover: bool,
    /// How a bucket is changed.
    #[command(flatten)]
    pub bucket: BucketWriteArgs,
}

fn options_help() -> String {
    format!("Mount options: {}", fuse::option_list())
}

fn options_long_help() -> String {
    format!(
        "{}\n\nallow_other brings default_permissions with it: the kernel then checks modes. Those of mount(8) and /etc/fstab \
         have no effect here: {}. The labels are those of SELinux. A comma inside a value is written as \\,, or the value in double \
         quotes.",
        options_help(),
        fuse::ignored_option_list()
    )
}

/// Flags of logs and metrics.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Logs and metrics")]
pub struct LogArgs {
    /// Log to this file [default: standard error]
    #[arg(long = "log", value_name = "FILE", value_parser = parse_log_file)]
    pub log: Option<PathBuf>,
    /// Log level: error, warn, info, debug, trace, or crate=level[,…] (also RUST_LOG) [default: info]
    #[arg(long, value_name = "FILTER")]
    pub log_filter: Option<String>,
    /// Format of log lines
    #[arg(long, value_name = "FORM", default_value = "text", value_parser = choice_parser(&LOG_FORMATS))]
    pub log_format: LogFormat,
    /// Address of the metrics page (Prometheus); none disables it [default: 127.0.0.1:9567, or the next free port if
    /// that is in use]
    #[arg(long, value_name = "ADDR")]
    pub metrics: Option<String>,
}

/// The values of a choice: word, value, help.
type ChoiceTable<T, const N: usize> = [(&'static str, T, &'static str); N];

const TRANSPORT_CHOICES: ChoiceTable<TransportMode, 3> = [
    ("auto", TransportMode::Auto, "RDMA where both sides have rails, TCP elsewhere"),
    ("tcp", TransportMode::Tcp, "TCP only"),
    ("rdma", TransportMode::Rdma, "RDMA only"),
];
const IORPC_MODES: ChoiceTable<IorpcMode, 4> = [
    ("dio", IorpcMode::Dio, "O_DIRECT with io_uring"),
    ("pagecache", IorpcMode::Pagecache, "Buffered reads through the page cache"),
    ("splice", IorpcMode::Splice, "splice from the page cache to the socket where possible; dio on a node with rails"),
    ("disable", IorpcMode::Disable, "Do not read cache disks: use memory and the origin only"),
];
const FUSE_IO: ChoiceTable<FuseIo, 3> = [
    ("auto", FuseIo::Auto, "io_uring where the kernel supports it and it is faster, /dev/fuse elsewhere"),
    (
        "uring",
        FuseIo::Uring,
        "FUSE over io_uring; root enables it for the whole host where it is off, and leaves it on; exit code 3 where the \
         kernel does not support it",
    ),
    ("dev", FuseIo::Dev, "Cloned /dev/fuse descriptors"),
];
const LOG_FORMATS: ChoiceTable<LogFormat, 2> =
    [("text", LogFormat::Text, "Plain text"), ("json", LogFormat::Json, "One JSON object per line")];

/// The parser of a choice.
fn choice_parser<T: Copy + Send + Sync, const N: usize>(
    choices: &'static ChoiceTable<T, N>,
) -> impl TypedValueParser<Value = T> {
    let words = choices.iter().map(|(word, _, help)| PossibleValue::new(*word).help(*help));
    PossibleValuesParser::new(words).try_map(|given| {
        let known = choices.iter().find(|(word, _, _)| *word == given);
        known.map(|(_, value, _)| *value).ok_or("unknown value")
    })
}

/// Converts flags to raw settings with the same field names.
macro_rules! raw {
    ($($from:ty => $to:ident { $($field:ident),* $(,)? })*) => {
        $(impl From<$from> for $to {
            fn from(args: $from) -> $to {
                $to { $($field: args.$field.into()),* }
            }
        })*
    };
}

raw! {
    CacheArgs => RawCache { cache_dir, cache_size, free_space_ratio, block_size, iorpc_mode, disk_timeout }
    GroupArgs => RawGroup { registry, cache_group, zone, member_hold }
    NetArgs => RawNetwork {
        group_network, rdma_network, transport, rdma_retry, rdma_settle, rdma_silence, tcp_congestion, nconnect,
        peer_timeout, peer_silence,
    }
    FuseArgs => RawFuse {
        read_only, rw, squash, local_locks, bucket, options, max_write, attr_cache, entry_cache, dir_entry_cache,
        fuse_io, fuse_threads,
        no_passthrough, max_readahead, kernel_readahead, file_mode, dir_mode, uid, gid, access_log, recover,
    }
    BucketWriteArgs => RawBucketWrites { last_writer_wins, allow_unguarded_writes, rename_limit, abort_uploads_after, object_attrs }
    LogArgs => RawLog { log, log_filter, log_format, metrics }
    TrustArgs => RawTrust { group_token_file, tls, tls_cert, tls_key, tls_ca }
    CoordinatorArgs => RawCoordinator {
        group_network, group_port, allow_anyone, trust, state_file, job_store, log, background,
    }
}

impl From<OriginArgs> for RawOrigin {
    fn from(args: OriginArgs) -> Self {
        RawOrigin {
            endpoint_url: args.endpoint_url,
            region: args.region,
            anonymous: args.anonymous,
            timeout: args.origin_timeout,
            stall_timeout: args.origin_stall_timeout,
            max_downloads: args.max_downloads,
            stale_if_error: args.stale_if_error,
        }
    }
}

impl From<MountArgs> for RawMount {
    fn from(args: MountArgs) -> Self {
        RawMount {
            volume: RawVolume {
                source: args.source,
                group: args.group.into(),
                replicas: args.replicas,
                hedge_after: args.hedge_after,
                net: args.net.into(),
                trust: args.trust.into(),
                cache: args.cache.into(),
                under: args.under.into(),
                buffer_size: args.common.buffer_size,
            },
            mountpoint: args.mountpoint,
            fuse: args.fuse.into(),
            log: args.log.into(),
            background: args.background,
        }
    }
}

impl From<NodeArgs> for RawNode {
    fn from(args: NodeArgs) -> Self {
        RawNode {
            source: args.source,
            weight: args.weight,
            name: args.name,
            yes: args.yes,
            writable: args.writable,
            squash: args.squash,
            bucket: args.bucket.into(),
            group: args.group.into(),
            group_port: args.group_port,
            rdma_port: args.rdma_port,
            buffer_size: args.common.buffer_size,
            net: args.net.into(),
            trust: args.trust.into(),
            allow_anyone: args.allow_anyone,
            cache: args.cache.into(),
            under: args.under.into(),
            s3: args.s3.into(),
            log: args.log.into(),
            background: args.background,
        }
    }
}

impl TrustArgs {
    /// Checks that the flags fit together.
    ///
    /// # Errors
    /// When they contradict each other (exit code 2).
    pub fn check(&self) -> Result<TrustConfig, Fault> {
        RawTrust::from(self.clone()).check(false)
    }
}

/// The environment variable of a flag: `--cache-size` has `SPURLINE_CACHE_SIZE`.
pub fn env_name(long: &str) -> String {
    format!("SPURLINE_{}", long.to_ascii_uppercase().replace('-', "_"))
}

/// Variables that are accepted beside a flag's own: the flag, and the name. The first is of another system, the second an
/// earlier name.
pub const OTHER_VARIABLES: [(&str, &str); 2] =
    [("rdma-retry", "IORPC_RDMA_RETRY_DURATION"), ("log", "SPURLINE_LOG_FILE")];

/// Gives every long flag of a service its environment variable; yes/no flags also take yes, no, on and off.
pub fn with_environment(command: Command) -> Command {
    command.mut_args(with_variable)
}

/// Gives the flags that select and authenticate a group their environment variables, for commands that query a group.
/// Other flags of these commands have no variables.
pub fn with_group_environment(command: Command) -> Command {
    let trust = TrustArgs::augment_args(Command::new("trust"));
    command.mut_args(|arg| match arg.get_long() {
        // The help names the variables, because the other flags of these commands have none.
        Some("registry" | "cache-group") => with_variable(arg).hide_env(false),
        _ if trust.get_arguments().any(|other| other.get_id() == arg.get_id()) => with_variable(arg).hide_env(false),
        _ => arg,
    })
}

fn with_variable(arg: Arg) -> Arg {
    let Some(long) = arg.get_long().map(str::to_owned) else { return arg };
    if matches!(long.as_str(), "help" | "version") {
        return arg;
    }
    let arg = if is_switch(&arg) { arg.value_parser(BoolishValueParser::new()) } else { arg };
    // The reference names the variables; in the help text they would double every line.
    let arg = arg.hide_env(true);
    let own = env_name(&long);
    let others = OTHER_VARIABLES.iter().filter(|(flag, _)| *flag == long).map(|(_, name)| (*name).to_owned());
    let aliases = arg.get_all_aliases().into_iter().flatten().map(env_name);
    let unset = std::env::var_os(&own).is_none();
    let name_in_use = others.chain(aliases).find(|name| unset && std::env::var_os(name).is_some());
    arg.env(name_in_use.unwrap_or(own))
}

/// Whether a flag takes no value.
pub fn is_switch(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::SetTrue)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::s3_args::GatewayArgs;
    use clap::FromArgMatches;
    use spurline_config::RawGateway;

    /// The settings without flags and without the environment.
    fn parsed<T: Args + FromArgMatches>(words: &[&str]) -> T {
        let command = T::augment_args(Command::new("test"));
        T::from_arg_matches(&command.try_get_matches_from([&["test"], words].concat()).unwrap()).unwrap()
    }

    #[test]
    fn flags_have_the_defaults_of_settings() {
        let source: SourceUrl = "s3://b".parse().unwrap();
        let mount = RawMount::from(parsed::<MountArgs>(&["s3://b", "/m"]));
        assert_eq!(mount, RawMount::new(source.clone(), "/m".into()));
        let gateway = RawGateway::from(parsed::<GatewayArgs>(&["s3://b"]));
        assert_eq!(gateway, RawGateway::new(source.clone()));
        assert_eq!(RawNode::from(parsed::<NodeArgs>(&["--source", "s3://b"])), RawNode::new(vec![source]));
        assert_eq!(RawCoordinator::from(parsed::<CoordinatorArgs>(&[])), RawCoordinator::default());
    }

    /// A variable belongs to the whole process, so this test runs itself again with the variable set.
    #[test]
    fn another_system_s_variable_sets_the_flag_it_stands_for() {
        let (flag, other) = OTHER_VARIABLES[0];
        if std::env::var_os(other).is_none_or(|value| value != "7m") {
            let name = std::thread::current().name().unwrap_or_default().to_owned();
            let mut again = std::process::Command::new(std::env::current_exe().unwrap());
            again.args(["--exact", &name]).env(other, "7m").env_remove(env_name(flag));
            let out = again.output().unwrap();
            let said = String::from_utf8_lossy(&out.stdout);
            assert!(out.status.success() && said.contains("1 passed"), "{name}: {said}");
            return;
        }
        let command = with_environment(NetArgs::augment_args(Command::new("mount")));
        let set = |words: &[&str]| {
            let matches = command.clone().try_get_matches_from([&["mount"], words].concat()).unwrap();
            NetArgs::from_arg_matches(&matches).unwrap().rdma_retry
        };
        assert_eq!(set(&[]), Duration::from_secs(7 * 60));
        assert_eq!(set(&["--rdma-retry", "9s"]), Duration::from_secs(9));
    }

    /// One rule gives each flag of a service its variable.
    #[test]
    fn each_flag_has_the_variable_of_its_name() {
        let command = crate::cli::cli_command();
        for service in crate::config_file::SERVICE_COMMANDS {
            let sub = crate::config_file::find_service(&command, service).unwrap();
            for arg in sub.get_arguments() {
                let Some(long) = arg.get_long() else { continue };
                let variable = arg.get_env().map(|name| name.to_string_lossy().into_owned());
                assert_eq!(variable, Some(env_name(long)), "{service} --{long}");
            }
        }
        assert_eq!(env_name("log"), "SPURLINE_LOG");
        assert_eq!(env_name("log-filter"), "SPURLINE_LOG_FILTER");
    }

    /// The flags of the origin had another name before.
    #[test]
    fn the_earlier_names_of_flags_and_their_variables_are_accepted() {
        let variable = "SPURLINE_UNDER_STALL_TIMEOUT";
        if std::env::var_os(variable).is_none_or(|value| value != "7s") {
            let name = std::thread::current().name().unwrap_or_default().to_owned();
            let mut again = std::process::Command::new(std::env::current_exe().unwrap());
            again.args(["--exact", &name]).env(variable, "7s").env_remove("SPURLINE_ORIGIN_STALL_TIMEOUT");
            let out = again.output().unwrap();
            let text = String::from_utf8_lossy(&out.stdout);
            assert!(out.status.success() && text.contains("1 passed"), "{name}: {text}");
            return;
        }
        let command = with_environment(OriginArgs::augment_args(Command::new("mount")));
        let matches = command.try_get_matches_from(["mount", "--under-timeout", "9s"]).unwrap();
        let set = OriginArgs::from_arg_matches(&matches).unwrap();
        assert_eq!((set.origin_timeout, set.origin_stall_timeout), (Duration::from_secs(9), Duration::from_secs(7)));
    }
}
