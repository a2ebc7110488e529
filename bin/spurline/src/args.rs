//! The flags of `mount`, `node` and `coordinator` as clap sees them, and what every flag has besides: an environment
//! variable and a key in the config file, both made from its name. It checks nothing but single words.

use clap::builder::{BoolishValueParser, PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Arg, ArgAction, Args, Command};
use spurline_config::values::{parse_mode, parse_weight};
use spurline_config::{
    CacheSize, Fault, FuseIo, IorpcMode, LogFormat, RawCache, RawCoordinator, RawFuse, RawGroup, RawLog, RawMount,
    RawNetwork, RawNode, RawOrigin, RawTrust, RawVolume, Registry, ReplicaCounts, SourceUrl, TransportMode,
    TrustConfig,
};
use spurline_types::{Congestion, Size, parse_duration};
use std::path::PathBuf;
use std::time::Duration;

/// What `mount` is told.
#[derive(Debug, Clone, Args)]
pub struct MountArgs {
    /// What to mount: s3://BUCKET[/PREFIX], gs://…, az://…, file:///DIR or a plain path
    #[arg(value_name = "SOURCE")]
    pub source: SourceUrl,
    /// Where to mount it: an empty directory
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
    /// Nodes that hold each file, and other numbers below some paths: N[,PATH=N]
    ///
    /// The most useful number is the same in all mounts of a group: with another one a mount looks for copies where
    /// there may be none yet, which costs a fetch and no error.
    #[arg(long, value_name = "N[,PATH=N]", default_value = "1", help_heading = "Group")]
    pub replicas: ReplicaCounts,
    /// A read that takes longer than this, and than almost all long reads of the other nodes, is asked of a second node; 0: never
    ///
    /// The first good answer is taken. At most one request in twenty is such a second one, and none is made when most
    /// nodes are late. A node that is late again and again is asked after the others until a trial is in time.
    #[arg(long, value_name = "TIME", default_value = "50ms", value_parser = parse_duration, help_heading = "Group")]
    pub hedge_after: Duration,
    /// Accepted for habit's sake: a mount never serves others
    #[arg(long, help_heading = "Group")]
    pub no_sharing: bool,
    /// The network.
    #[command(flatten)]
    pub net: NetArgs,
    /// Who may join.
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
    /// Go to the background once the mount answers
    ///
    /// The command returns 0 when the mount answers, or the error and its exit code when it does not.
    #[arg(short = 'd', long, help_heading = "Mount", conflicts_with = "foreground")]
    pub background: bool,
    /// Stay in the foreground (the default)
    #[arg(short = 'f', long, help_heading = "Mount")]
    pub foreground: bool,
}

/// What `node` is told.
#[derive(Debug, Clone, Args)]
pub struct NodeArgs {
    /// What this node may fetch and serve; repeat the flag for more than one
    #[arg(long, value_name = "URL", help_heading = "Node", required = true)]
    pub source: Vec<SourceUrl>,
    /// This node's share of the group's blocks; 0 drains it
    #[arg(
        long,
        value_name = "N",
        default_value_t = 100,
        value_parser = parse_weight,
        allow_negative_numbers = true,
        help_heading = "Node"
    )]
    pub weight: u32,
    /// This node's name in its group: its blocks follow it, wherever it listens [default: HOSTNAME:PORT]
    #[arg(long, value_name = "NAME", help_heading = "Node")]
    pub name: Option<String>,
    /// Accept that settings which decide where blocks are differ from those of before, or from the other nodes'
    ///
    /// --block-size, --name and --zone: what is held by the old ones is fetched again. Without this the node does not
    /// start, and says which of them differ.
    #[arg(long, help_heading = "Node")]
    pub yes: bool,
    /// The cache group.
    #[command(flatten)]
    pub group: GroupArgs,
    /// Fixed port to serve at; a free one is chosen and printed when 0
    #[arg(long, value_name = "PORT", default_value_t = 0, help_heading = "Network")]
    pub group_port: u16,
    /// Fixed port for RDMA connections, on every rail; a free one is chosen and told to mounts when 0
    #[arg(long, value_name = "PORT", default_value_t = 0, help_heading = "Network")]
    pub rdma_port: u16,
    /// Config file, the common flags.
    #[command(flatten)]
    pub common: CommonArgs,
    /// The network.
    #[command(flatten)]
    pub net: NetArgs,
    /// Who may join.
    #[command(flatten)]
    pub trust: TrustArgs,
    /// Serve whoever reaches the ports, without a group token
    ///
    /// For networks where everybody may read everything the node may fetch.
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
    /// Go to the background once the node serves
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
    /// A flag beats its environment variable, which beats the file, which beats the default. Keys of the top level
    /// hold for mount and node; the tables [mount] and [node] hold for one and beat the top level.
    #[arg(long, value_name = "FILE", help_heading = "General")]
    pub config: Option<PathBuf>,
    /// The one hard budget for buffers and cached blocks in memory
    ///
    /// FUSE requests, fills in flight and read-ahead come out of it, and the rest holds hot blocks. It is checked
    /// against the memory of the machine and of the control group at start.
    #[arg(long, value_name = "SIZE", default_value = "300M", help_heading = "General")]
    pub buffer_size: Size,
}

/// Flags of the cache.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Cache")]
pub struct CacheArgs {
    /// Cache disks, A[:B…]; globs allowed [default: /var/cache/spurline, or ~/.cache/spurline when not root]
    #[arg(long, value_name = "DIR[:DIR]", value_delimiter = ':')]
    pub cache_dir: Vec<PathBuf>,
    /// Capacity over all cache disks; -1 all there is, 0 no disk cache
    #[arg(long, value_name = "SIZE", default_value = "100G", allow_hyphen_values = true)]
    pub cache_size: CacheSize,
    /// Stop filling a disk when only this part of it is free
    #[arg(long, value_name = "RATIO", default_value_t = 0.1)]
    pub free_space_ratio: f64,
    /// Unit of caching and placement; the same on every node of a group, and theirs in its mounts [default: 4M]
    #[arg(long, value_name = "SIZE")]
    pub block_size: Option<Size>,
    /// How cache disks are read; a node with rails takes dio for splice
    #[arg(long, value_name = "MODE", default_value = "dio", value_parser = choice(&IORPC_MODES))]
    pub iorpc_mode: IorpcMode,
    /// A cache disk that leaves a read unanswered for this long, or a write for twice as long, is gone round
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = parse_duration)]
    pub disk_timeout: Duration,
}

/// Flags of the origin.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Origin")]
pub struct OriginArgs {
    /// Address of an S3-compatible server (also AWS_ENDPOINT_URL) [default: Amazon's]
    #[arg(long, value_name = "URL")]
    pub endpoint_url: Option<String>,
    /// Region of the bucket (also AWS_REGION)
    #[arg(long, value_name = "NAME")]
    pub region: Option<String>,
    /// Send no credentials: the bucket is public
    #[arg(long, visible_alias = "no-sign-request")]
    pub anonymous: bool,
    /// Deadline of one read, lookup or listing of the origin
    ///
    /// Transient failures (status 5xx, 503 SlowDown, a broken connection, no answer) are retried with growing pauses until
    /// then. After that the error is EIO if the server failed, and ETIMEDOUT if it did not answer.
    #[arg(long, alias = "under-timeout", value_name = "TIME", default_value = "60s", value_parser = parse_duration)]
    pub origin_timeout: Duration,
    /// Repeat a request without an answer for this long beside the first one, up to twice; resume a transfer without a
    /// byte for this long on another connection
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

/// The cache group: which one, and where its members are found.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Group")]
pub struct GroupArgs {
    /// Where the group's nodes are: static:HOST:PORT[,…], dns:NAME:PORT, coordinator://… or etcd://… [default: alone]
    ///
    /// A mount with a registry reads from the nodes and holds neither credentials nor a disk cache. A node
    /// registers with a coordinator or etcd; a list and a name are for mounts. A group has one coordinator; use etcd
    /// where the registry must survive the loss of a host. A name that begins with an underscore is one of SRV records,
    /// which contain the ports: dns:_spurline._tcp.NAME. etcd with TLS and a user:
    /// etcd://HOST:2379[,…]?ca=FILE&cert=FILE&key=FILE&user=NAME&password-file=FILE (or the password in
    /// SPURLINE_ETCD_PASSWORD).
    #[arg(long, value_name = "URL")]
    pub registry: Option<Registry>,
    /// The group's name in the registry [default: default]
    #[arg(long, value_name = "NAME")]
    pub cache_group: Option<String>,
    /// What this machine shares with those near it: a rack, a room, a cloud zone
    #[arg(long, value_name = "NAME", default_value = "")]
    pub zone: String,
    /// A node that left the registry keeps its place for this long; five times as long when half of the nodes left
    ///
    /// Its blocks are read through others meanwhile. A restart within this time moves no block.
    #[arg(long, value_name = "TIME", default_value = "1m", value_parser = parse_duration)]
    pub member_hold: Duration,
}

/// What `coordinator` is told.
#[derive(Debug, Clone, Args)]
pub struct CoordinatorArgs {
    /// TOML file with the same keys as the flags
    #[arg(long, value_name = "FILE", help_heading = "General")]
    pub config: Option<PathBuf>,
    /// Interface names, addresses or CIDRs to listen at, IF[:IF]; IPv6 in brackets [default: loopback only]
    #[arg(long, value_name = "IF[:IF]", help_heading = "Network")]
    pub group_network: Option<String>,
    /// Fixed port to serve at; a free one is chosen and printed when 0
    #[arg(long, value_name = "PORT", default_value_t = 0, help_heading = "Network")]
    pub group_port: u16,
    /// Serve whoever reaches the port, without a group token
    ///
    /// For networks where everybody may enter nodes and have jobs done. Nodes and mounts prove the group token to each
    /// other all the same.
    #[arg(long, help_heading = "Trust")]
    pub allow_anyone: bool,
    /// What nodes and mounts have to show, and jobs show to nodes.
    #[command(flatten)]
    pub trust: TrustArgs,
    /// File that keeps the list of nodes over a restart; the word none: in memory only [default:
    /// /var/lib/spurline/coordinator.json, or below ~/.local/state/spurline when not root]
    ///
    /// Jobs (spurline load --submit) are kept beside it.
    #[arg(long, value_name = "FILE", help_heading = "Coordinator")]
    pub state_file: Option<PathBuf>,
    /// An etcd where jobs are kept, for several coordinators: etcd://HOST:PORT[,…] [default: beside --state-file]
    ///
    /// Coordinators with the same store share the jobs: one of them runs each, any of them knows it, and after a crash
    /// another continues it. They find the nodes in this etcd: give nodes and mounts --registry etcd://HOST:PORT.
    #[arg(long, value_name = "URL", help_heading = "Coordinator")]
    pub job_store: Option<Registry>,
    /// Logs and metrics.
    #[command(flatten)]
    pub log: LogArgs,
    /// Go to the background once the coordinator serves
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
    /// Interface names, addresses or CIDRs of the group, IF[:IF]; IPv6 in brackets
    ///
    /// A node listens on loopback only until it is told its networks, which wants a --group-token-file. A mount takes
    /// the route's own interface when not told.
    #[arg(long, value_name = "IF[:IF]")]
    pub group_network: Option<String>,
    /// Rails for RDMA data: interface names, IF[:IF] [default: none, the data goes over TCP]
    ///
    /// Each interface's RDMA device, port and GID are found and told in the log. One that can't be used ends the start
    /// with exit code 3, saying why.
    #[arg(long, value_name = "IF[:IF]")]
    pub rdma_network: Option<String>,
    /// What carries the data of mounts: rdma where both sides have rails and tcp elsewhere, or one of them and nothing else
    ///
    /// A node with rails serves over both, and takes blocks from other nodes over tcp; 'tcp' leaves its rails unused.
    #[arg(long, value_name = "KIND", default_value = "auto", value_parser = choice(&TRANSPORTS))]
    pub transport: TransportMode,
    /// After an RDMA failure TCP carries the data, and RDMA is tried again after this (also IORPC_RDMA_RETRY_DURATION)
    ///
    /// When the cause was this machine's own link, RDMA is tried again as soon as the link is back and has settled,
    /// unless it was lost before within this time. An attempt to connect that fails is repeated after a second, then after
    /// twice as long each time, up to this. With --transport rdma no pause is longer than 4 s and a link settles for a second.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = parse_duration)]
    pub rdma_retry: Duration,
    /// A link that came back has to stay up this long before it carries data
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_duration)]
    pub rdma_settle: Duration,
    /// A rail that owes answers and over which nothing comes for this long is given up
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = parse_duration)]
    pub rdma_silence: Duration,
    /// TCP congestion control of connections to and from nodes: auto, system, cubic, reno, dctcp
    ///
    /// auto keeps the host's own unless that is BBR, whose pacing leaves a fast network idle between short answers.
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub tcp_congestion: Congestion,
    /// Connections per path; 0 chooses by the number of processors
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub nconnect: u16,
    /// Deadline of one request to a node
    ///
    /// Longer than the node's --origin-timeout, so that its own error about a slow origin arrives. A node that
    /// can't be reached at all is an error after 10 s (or this, if it is shorter), and at once from then on until it
    /// is back.
    #[arg(long, value_name = "TIME", default_value = "75s", value_parser = parse_duration)]
    pub peer_timeout: Duration,
    /// A node that owes answers and gives no sign of life for this long is given up: others of the group are asked
    ///
    /// It is asked for one over a connection of its own, so a node that only waits for a slow under-store is not given
    /// up. Of a group with one node, answers are waited for as long as --peer-timeout.
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = parse_duration)]
    pub peer_silence: Duration,
}

/// Flags of what peers prove to each other; the same for everything that connects or listens.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Trust")]
pub struct TrustArgs {
    /// File with the secret of the group, the same on every member [default: none, a node listens on loopback only]
    ///
    /// Both sides of every connection prove that they hold it, without sending it; who does not is refused. One secret
    /// a line: the first is shown, all are accepted, so that a new one can be brought in while all goes on. The file is
    /// read again when it changes. Make one with: (umask 077; openssl rand -base64 32 > FILE)
    #[arg(long, value_name = "FILE")]
    pub group_token_file: Option<PathBuf>,
    /// Encrypt TCP data and control connections with TLS 1.3; both sides need it
    ///
    /// Without --tls-cert the token tells who is at the other end, by a proof that is bound to the connection. Data over
    /// RDMA is not encrypted.
    #[arg(long)]
    pub tls: bool,
    /// This process's certificate in PEM, and those that lead from it to the authority; turns --tls on
    ///
    /// Both sides show one and check the other's; a node's has to be for the name or address it is reached by. Files are
    /// read again when they change.
    #[arg(long, value_name = "FILE", requires_all = ["tls_key", "tls_ca"])]
    pub tls_cert: Option<PathBuf>,
    /// The certificate's key in PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Certificates in PEM of the authorities that sign those of the group
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_ca: Option<PathBuf>,
}

/// Flags of the FUSE session.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Mount")]
pub struct FuseArgs {
    /// Mount read-only (the only way in this version)
    #[arg(long)]
    pub read_only: bool,
    /// Mount options: ro, allow_other, (no_)default_permissions (on with allow_other), nonempty, fsname=NAME, (no)suid, (no)dev, (no)exec, (no)atime
    #[arg(short = 'o', long = "options", value_name = "OPT[,OPT]", value_delimiter = ',')]
    pub options: Vec<String>,
    /// Largest FUSE request, from 8K
    #[arg(long, value_name = "SIZE", default_value = "1M")]
    pub max_write: Size,
    /// A file that was replaced is seen after this time
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = parse_duration)]
    pub attr_cache: Duration,
    /// A name of a file that came or went is seen after this time
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = parse_duration)]
    pub entry_cache: Duration,
    /// A name of a directory that came or went is seen after this time; the shortest of the three decides how often is asked
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = parse_duration)]
    pub dir_entry_cache: Duration,
    /// How requests are fetched from the kernel
    #[arg(long, value_name = "KIND", default_value = "auto", value_parser = choice(&FUSE_IO))]
    pub fuse_io: FuseIo,
    /// Threads that answer the kernel; 0 takes as many as --buffer-size has room for
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub fuse_threads: u16,
    /// Never hand a cached file to the kernel for reading without this process
    #[arg(long)]
    pub no_passthrough: bool,
    /// How far blocks are fetched ahead of a sequential reader; 0 not at all [default: from the buffer size]
    #[arg(long, visible_alias = "readahead", value_name = "SIZE")]
    pub max_readahead: Option<Size>,
    /// The kernel's own read-ahead of buffered reads
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
    /// One line per request of the kernel into this file
    #[arg(long, value_name = "FILE")]
    pub access_log: Option<PathBuf>,
}

/// Flags of logs and metrics.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Logs and metrics")]
pub struct LogArgs {
    /// Log to this file [default: standard error]
    #[arg(long = "log", value_name = "FILE", env = "SPURLINE_LOG_FILE")]
    pub log: Option<PathBuf>,
    /// What is logged: error, warn, info, debug, trace, or crate=level[,…] (also RUST_LOG) [default: info]
    #[arg(long, value_name = "FILTER", env = "SPURLINE_LOG")]
    pub log_filter: Option<String>,
    /// Form of a log line
    #[arg(long, value_name = "FORM", default_value = "text", value_parser = choice(&LOG_FORMATS))]
    pub log_format: LogFormat,
    /// Serve Prometheus metrics and a metrics page at this address; none serves nothing [default: 127.0.0.1:9567, or a
    /// free port when that one is taken]
    #[arg(long, value_name = "ADDR")]
    pub metrics: Option<String>,
}

/// The values of a flag that is a choice: word, value, help.
type Choices<T, const N: usize> = [(&'static str, T, &'static str); N];

const TRANSPORTS: Choices<TransportMode, 3> = [
    ("auto", TransportMode::Auto, "The best there is"),
    ("tcp", TransportMode::Tcp, "TCP, even where RDMA would work"),
    ("rdma", TransportMode::Rdma, "RDMA or nothing"),
];
const IORPC_MODES: Choices<IorpcMode, 4> = [
    ("dio", IorpcMode::Dio, "O_DIRECT through io_uring"),
    ("pagecache", IorpcMode::Pagecache, "Plain reads through the page cache"),
    (
        "splice",
        IorpcMode::Splice,
        "splice from the page cache to the socket, where the path allows it; dio on a node with rails",
    ),
    ("disable", IorpcMode::Disable, "Cache disks are not read: memory and the under-store only"),
];
const FUSE_IO: Choices<FuseIo, 3> = [
    ("auto", FuseIo::Auto, "io_uring where the kernel offers it and it is the faster one, /dev/fuse elsewhere"),
    (
        "uring",
        FuseIo::Uring,
        "FUSE over io_uring; as root it is switched on for the whole host where it is off, and left on; exit 3 where the \
         kernel does not offer it",
    ),
    ("dev", FuseIo::Dev, "Cloned /dev/fuse descriptors"),
];
const LOG_FORMATS: Choices<LogFormat, 2> =
    [("text", LogFormat::Text, "For people"), ("json", LogFormat::Json, "One JSON object a line")];

/// Parses one of these words.
fn choice<T: Copy + Send + Sync, const N: usize>(choices: &'static Choices<T, N>) -> impl TypedValueParser<Value = T> {
    let words = choices.iter().map(|(word, _, help)| PossibleValue::new(*word).help(*help));
    PossibleValuesParser::new(words).try_map(|given| {
        let known = choices.iter().find(|(word, _, _)| *word == given);
        known.map(|(_, value, _)| *value).ok_or("unknown value")
    })
}

/// Flags become raw settings of the same names.
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
        options, max_write, attr_cache, entry_cache, dir_entry_cache, fuse_io, fuse_threads, no_passthrough,
        max_readahead, kernel_readahead, file_mode, dir_mode, uid, gid, access_log,
    }
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
            group: args.group.into(),
            group_port: args.group_port,
            rdma_port: args.rdma_port,
            buffer_size: args.common.buffer_size,
            net: args.net.into(),
            trust: args.trust.into(),
            allow_anyone: args.allow_anyone,
            cache: args.cache.into(),
            under: args.under.into(),
            log: args.log.into(),
            background: args.background,
        }
    }
}

impl TrustArgs {
    /// Checks that the flags fit together.
    ///
    /// # Errors
    /// When they contradict each other (exit 2).
    pub fn check(&self) -> Result<TrustConfig, Fault> {
        RawTrust::from(self.clone()).check(false)
    }
}

/// The environment variable of a flag: `--cache-size` has `SPURLINE_CACHE_SIZE`.
pub fn env_name(long: &str) -> String {
    format!("SPURLINE_{}", long.to_ascii_uppercase().replace('-', "_"))
}

/// A variable of another system whose users find it honoured: the flag it stands for, and its name.
const OTHER_VARIABLE: (&str, &str) = ("rdma-retry", "IORPC_RDMA_RETRY_DURATION");

/// Gives every long flag of a service command its environment variable, and yes/no flags the words people write.
pub fn with_environment(command: Command) -> Command {
    command.mut_args(with_variable)
}

/// The same for the flags that say which group is meant and what it has to be shown, for commands that ask one: what is
/// set for nodes and mounts serves them as well. Their other flags have no variables.
pub fn with_group_environment(command: Command) -> Command {
    let trust = TrustArgs::augment_args(Command::new("trust"));
    let of_trust = |arg: &Arg| trust.get_arguments().any(|other| other.get_id() == arg.get_id());
    command.mut_args(|arg| match arg.get_long() {
        // Of these few the help names the variables.
        Some("registry" | "cache-group" | "group-token-file") => with_variable(arg).hide_env(false),
        _ if of_trust(&arg) => with_variable(arg),
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
    if arg.get_env().is_some() {
        return arg;
    }
    let (own, (flag, other)) = (env_name(&long), OTHER_VARIABLE);
    let other = (long == flag).then(|| other.to_owned());
    let aliases = arg.get_all_aliases().into_iter().flatten().map(env_name);
    let unset = std::env::var_os(&own).is_none();
    let theirs = other.into_iter().chain(aliases).find(|name| unset && std::env::var_os(name).is_some());
    arg.env(theirs.unwrap_or(own))
}

/// Whether a flag takes no value.
pub fn is_switch(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::SetTrue)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::FromArgMatches;

    /// The settings that a service has without flags, and without the environment.
    fn parsed<T: Args + FromArgMatches>(words: &[&str]) -> T {
        let command = T::augment_args(Command::new("test"));
        T::from_arg_matches(&command.try_get_matches_from([&["test"], words].concat()).unwrap()).unwrap()
    }

    #[test]
    fn flags_have_the_defaults_of_settings() {
        let source: SourceUrl = "s3://b".parse().unwrap();
        let mount = RawMount::from(parsed::<MountArgs>(&["s3://b", "/m"]));
        assert_eq!(mount, RawMount::new(source.clone(), "/m".into()));
        assert_eq!(RawNode::from(parsed::<NodeArgs>(&["--source", "s3://b"])), RawNode::new(vec![source]));
        assert_eq!(RawCoordinator::from(parsed::<CoordinatorArgs>(&[])), RawCoordinator::default());
    }

    /// Variables are a process's: this test starts itself again with the one it is about.
    #[test]
    fn another_system_s_variable_sets_the_flag_it_stands_for() {
        let (flag, other) = OTHER_VARIABLE;
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
