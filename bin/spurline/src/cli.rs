//! The commands and their arguments. The flags of `mount`, `node`, `gateway` and `coordinator` are in [`crate::args`].

use crate::args::{self, CoordinatorArgs, GatewayArgs, MountArgs, NodeArgs};
use crate::config_file as file;
use clap::builder::styling::{AnsiColor, Styles};
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use spurline_config::{DEFAULT_GROUP, RawTrust, Registry, SourceUrl};
use spurline_types::{Size, parse_duration};
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// A distributed cache file system for GPU and HPC clusters
///
/// Spurline mounts a bucket or a directory through a cache on local disks and memory, alone or from cache nodes.
#[derive(Debug, Parser)]
#[command(name = "spurline", version, propagate_version = true, max_term_width = 110, arg_required_else_help = true)]
#[command(after_help = "Exit codes: 0 success, 1 failure, 2 usage error, 3 missing prerequisite.")]
pub struct CommandLine {
    /// The command.
    #[command(subcommand)]
    pub command: CliCommand,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum CliCommand {
    /// Mount a bucket or a directory, through a cache on this machine or from cache nodes
    #[command(after_help = SERVICE_NOTE, after_long_help = MOUNT_EXAMPLES)]
    Mount(Box<MountArgs>),
    /// Unmount a mountpoint, also when its process is gone
    #[command(visible_alias = "unmount")]
    Umount(UmountArgs),
    /// Continue mounts with another release of this program, without an unmount: mounts with --recover
    Upgrade(UpgradeArgs),
    /// Run a cache node, which fetches blocks once and serves them to mounts
    #[command(after_help = SERVICE_NOTE, after_long_help = NODE_EXAMPLES)]
    #[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
    Node(Box<NodeCommand>),
    /// Serve a bucket or a directory to S3 clients, through a cache on this machine or from cache nodes
    #[command(after_help = SERVICE_NOTE, after_long_help = GATEWAY_EXAMPLES)]
    Gateway(Box<GatewayArgs>),
    /// Run a coordinator, which keeps the node list, the rules and the jobs of groups
    #[command(after_help = SERVICE_NOTE, after_long_help = COORDINATOR_EXAMPLES)]
    Coordinator(Box<CoordinatorArgs>),
    /// Live counters of a mount or a node: usage, FUSE, cache, network, origin
    Stats(StatsArgs),
    /// Version, size and cached blocks of a file in a mount
    Info(InfoArgs),
    /// State of mounts and nodes: addresses, disks, used space, weight
    Status(StatusArgs),
    /// Load files into the cache before they are read
    #[command(after_long_help = LOAD_EXAMPLES)]
    Load(LoadArgs),
    /// Drop files from the cache, or empty it
    #[command(after_long_help = FREE_EXAMPLES)]
    Free(FreeArgs),
    /// List the cache directories of this user's mounts and nodes, and remove those that no process uses
    Cache(CacheCommandArgs),
    /// Pin folders to the cache disks of a group: their blocks are never evicted
    #[command(after_help = RULES_EXAMPLES)]
    Pin(RuleArgs),
    /// Unpin folders: their blocks may be evicted again
    #[command(after_help = RULES_EXAMPLES)]
    Unpin(RuleArgs),
    /// Limit the time and the space that folders may take in the caches of a group
    #[command(after_help = RULES_EXAMPLES)]
    Limit(LimitArgs),
    /// List the rules of a group (pins and limits), with the bytes cached under each
    #[command(after_help = RULES_EXAMPLES)]
    Rules(RulesArgs),
    /// End the upload of staged files that fails for good: drop the files, or copy their bytes elsewhere
    #[command(after_long_help = STAGE_EXAMPLES)]
    Stage(StageCommandArgs),
    /// Serve a mount to stock NFS clients over TCP and RDMA, by the kernel's NFS server
    #[command(after_long_help = crate::export::EXAMPLES)]
    Export(crate::export::ExportArgs),
    /// Measure throughput, operations, latency and processor time (runs the program spurline-bench)
    #[command(disable_help_flag = true, disable_version_flag = true, after_help = crate::bench::BENCH_HELP)]
    Bench(BenchArgs),
    /// Inspect, diagnose and measure the network and its RDMA devices
    #[command(arg_required_else_help = true)]
    Net(crate::net::NetCommandArgs),
    /// RDMA devices and volumes for pods of a Kubernetes cluster
    #[command(arg_required_else_help = true)]
    K8s(crate::k8s::KubeCommandArgs),
    /// Run a node and a mount on this machine, read through them, and clean up
    Demo(DemoArgs),
    /// Print shell completions
    Completions(CompletionsArgs),
    /// Write man pages to a directory
    Man(ManArgs),
    /// Print the tables of flags, variables and keys in CONFIGURATION.md
    #[command(hide = true)]
    ConfigReference,
}

/// The arguments of `spurline-bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Arguments of spurline-bench; --help prints them
    #[arg(value_name = "ARGUMENT", trailing_var_arg = true, allow_hyphen_values = true)]
    pub arguments: Vec<OsString>,
}

/// The arguments of `cache`.
#[derive(Debug, Args)]
#[command(arg_required_else_help = true)]
pub struct CacheCommandArgs {
    /// What to do with the directories.
    #[command(subcommand)]
    pub action: CacheAction,
}

/// What to do with cache directories.
#[derive(Debug, Subcommand)]
pub enum CacheAction {
    /// List cache directories: space, last use, sources, and whether a process uses them
    List(CacheListArgs),
    /// Remove the cache directories that no process uses, after a question
    Clean(CacheCleanArgs),
}

/// The arguments of `stage`.
#[derive(Debug, Args)]
#[command(arg_required_else_help = true)]
pub struct StageCommandArgs {
    /// What to do with the files.
    #[command(subcommand)]
    pub action: StageAction,
}

/// What to do with staged files.
#[derive(Debug, Subcommand)]
pub enum StageAction {
    /// Give the upload of staged files up, for good: their bytes are lost
    Drop(StageDropArgs),
    /// Copy the bytes of a staged file to a local file; the upload goes on
    Export(StageExportArgs),
}

/// The group of staged files.
#[derive(Debug, Args)]
pub struct StageGroupArgs {
    /// Registry of the group: coordinator://HOST:PORT or etcd://HOST:PORT
    #[arg(long, value_name = "URL")]
    pub registry: Option<Registry>,
    /// Name of the group in the registry
    #[arg(long, value_name = "NAME", default_value = DEFAULT_GROUP)]
    pub cache_group: String,
    /// Authentication at coordinators and nodes.
    #[command(flatten)]
    pub trust: RawTrust,
    /// Print one JSON object per line
    #[arg(long, help_heading = None)]
    pub json: bool,
}

/// The arguments of `stage drop`.
#[derive(Debug, Args)]
pub struct StageDropArgs {
    /// Files: URLs (s3://bucket/key), or paths in a mount of this machine
    #[arg(required = true)]
    pub file: Vec<String>,
    /// Do not ask
    #[arg(long)]
    pub yes: bool,
    /// The group.
    #[command(flatten)]
    pub group: StageGroupArgs,
}

/// The arguments of `stage export`.
#[derive(Debug, Args)]
pub struct StageExportArgs {
    /// The file: a URL (s3://bucket/key), or a path in a mount of this machine
    pub file: String,
    /// The new file, or a folder for a file of the same name
    pub dest: PathBuf,
    /// Replace a file that exists
    #[arg(long)]
    pub force: bool,
    /// The group.
    #[command(flatten)]
    pub group: StageGroupArgs,
}

/// The arguments of `cache list`.
#[derive(Debug, Args)]
pub struct CacheListArgs {
    /// Cache directories, or folders of them [default: /var/cache/spurline, or ~/.cache/spurline when not root]
    pub dir: Vec<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// The arguments of `cache clean`.
#[derive(Debug, Args)]
pub struct CacheCleanArgs {
    /// Do not ask
    #[arg(long)]
    pub yes: bool,
    /// The directories.
    #[command(flatten)]
    pub places: CacheListArgs,
}

/// The arguments of `node`, or an action on a running node.
#[derive(Debug, Args)]
pub struct NodeCommand {
    /// The node to run.
    #[command(flatten)]
    pub args: NodeArgs,
    /// The action on a running node.
    #[command(subcommand)]
    pub action: Option<NodeAction>,
}

/// Actions on a running node.
#[derive(Debug, Subcommand)]
pub enum NodeAction {
    /// Move a node's hot blocks to the nodes that will own them, then set its weight to 0
    Drain(DrainArgs),
}

/// The arguments of `node drain`.
#[derive(Debug, Args)]
pub struct DrainArgs {
    /// Registry of the group: coordinator://… or etcd://…
    #[arg(long, value_name = "URL")]
    pub registry: Registry,
    /// Name of the group in the registry
    #[arg(long, value_name = "NAME", default_value = DEFAULT_GROUP)]
    pub cache_group: String,
    /// Authentication at nodes.
    #[command(flatten)]
    pub trust: RawTrust,
    /// Name or HOST:PORT of the node
    #[arg(help_heading = None)]
    pub node: String,
    /// Print one JSON object
    #[arg(long, help_heading = None)]
    pub json: bool,
}

const SERVICE_NOTE: &str = "Every flag is also an environment variable (--cache-size: SPURLINE_CACHE_SIZE) and a key \
of the TOML file given by --config (cache-size = \"100G\"). A flag overrides a variable, which overrides the file. \
--help shows more, with examples.";

const MOUNT_EXAMPLES: &str = "\
Every flag is also an environment variable (--cache-size: SPURLINE_CACHE_SIZE) and a key of the TOML file given by \
--config (cache-size = \"100G\"). A flag overrides a variable, which overrides the file.

Examples:
  Mount a bucket, with a cache on two disks, in the background:
    spurline mount s3://datasets/imagenet /mnt/data \\
        --cache-dir '/nvme0/c:/nvme1/c' --cache-size 2T -d
  Mount a bucket of your own S3-compatible server:
    spurline mount s3://datasets /mnt/data --endpoint-url http://10.0.0.5:9000
  Mount a directory (such as an NFS mount) through the cache:
    spurline mount /nfs/datasets /mnt/data
  Read from a cache node, which has the credentials and the cache:
    spurline mount s3://datasets /mnt/data --registry static:node1:7000
  Watch its counters:
    spurline stats /mnt/data
  Unmount it:
    spurline umount /mnt/data

Signals: SIGTERM, SIGINT, SIGHUP and SIGQUIT unmount. While files are open, the unmount is retried for 5 s; then the mount \
is detached (as by umount --lazy): it leaves the tree, and the process ends when the last file is closed. A second signal \
ends it at once: pending requests and open files fail, and the exit code is 1.";

const NODE_EXAMPLES: &str = "\
Every flag is also an environment variable (--cache-size: SPURLINE_CACHE_SIZE) and a key of the TOML file given by \
--config (cache-size = \"100G\"). A flag overrides a variable, which overrides the file.

Examples:
  Run a node for one bucket, on the network of eth1:
    spurline node --source s3://datasets --cache-dir /nvme0/c \\
        --group-network eth1 --group-port 7000 --group-token-file token
  Try a node on this machine (it listens on loopback only):
    spurline node --source /usr/share --cache-dir /tmp/c --cache-size 10G \\
        --group-port 7000
  Serve S3 clients too, on another port:
    spurline node --source s3://datasets --group-port 7000 \\
        --s3-listen 127.0.0.1:9000
  Before a node is removed, move its hot blocks to the nodes that will own them:
    spurline node drain node7 --registry coordinator://head:7400 \\
        --cache-group train --group-token-file token";

const GATEWAY_EXAMPLES: &str = "\
Every flag is also an environment variable (--s3-listen: SPURLINE_S3_LISTEN) and a key of the TOML file given by \
--config (s3-listen = \"127.0.0.1:9000\"). A flag overrides a variable, which overrides the file.

The source is one bucket, named by --s3-bucket, or else by the last folder of the source. docs/s3-clients.md has the settings of \
S3 clients, and which calls there are.

Examples:
  Serve a bucket on this machine, through a cache of its own:
    spurline gateway s3://datasets --s3-listen 127.0.0.1:9000 \\
        --cache-dir /nvme0/c
    aws --endpoint-url http://127.0.0.1:9000 --no-sign-request \\
        s3 ls s3://datasets
  Serve it to other machines from cache nodes, to clients with keys:
    (umask 077; echo \"client1:$(openssl rand -hex 20)\" > keys)
    spurline gateway s3://datasets --s3-listen 10.0.0.7:9000 --s3-keys keys \\
        --registry coordinator://head:7400 --group-token-file token
  A directory for reading and writing, to clients with keys:
    spurline gateway /nfs/work --writable --s3-listen 127.0.0.1:9000 \\
        --s3-keys keys";

const RULES_EXAMPLES: &str = "\
The registry keeps the rules, so they also apply to nodes that start later. The rule of the deepest folder applies to a file.

Examples:
  Load the validation set now, and keep it cached:
    spurline load --pin s3://datasets/val --source s3://datasets \\
        --registry coordinator://head:7400
  Keep the part of it that is cached now, or will be read:
    spurline pin s3://datasets/val --registry coordinator://head:7400
  Evict scratch data after a day, limit it to 2 TiB of the group's disks, and remove the time limit again:
    spurline limit s3://scratch --ttl 1d --quota 2T \\
        --registry coordinator://head:7400
    spurline limit s3://scratch --ttl none --registry coordinator://head:7400
  Checkpoints are closed when two nodes have them, and uploaded soon after:
    spurline limit s3://models/run-7 --stage --registry coordinator://head:7400
  List the rules, with the bytes cached under each:
    spurline rules --registry coordinator://head:7400";

const COORDINATOR_EXAMPLES: &str = "\
Every flag is also an environment variable (--group-port: SPURLINE_GROUP_PORT) and a key of the TOML file given by \
--config (group-port = 7400). A flag overrides a variable, which overrides the file.

Examples:
  On one host (or use an etcd, whose servers replace each other, with --registry etcd://etcd1:2379,etcd2:2379):
    spurline coordinator --group-network eth1 --group-port 7400 \\
        --group-token-file /etc/token -d
  The nodes, then the mounts:
    spurline node --source s3://datasets --group-network eth1 \\
        --group-port 7000 --group-token-file /etc/token \\
        --registry coordinator://head:7400 --cache-group train -d
    spurline mount s3://datasets /mnt/data --group-token-file /etc/token \\
        --registry coordinator://head:7400 --cache-group train -d";

const STATS_EXAMPLES: &str = "\
Examples:
  A mount, one line each second:
    spurline stats /mnt/data
  All counters at once:
    spurline stats /mnt/data --json -c 1
  A node or a coordinator of this machine, by its address:
    spurline stats node1:7000 --schema ucro -l 5
  One of another machine, by the address of its metrics page (set --metrics there; the default is loopback only):
    spurline stats node2:9567";

const LOAD_EXAMPLES: &str = "\
Examples:
  Load a folder of a mount, with a progress bar; Ctrl-C stops the job:
    spurline load /mnt/data/train
  Load in the background and check every block; show the progress; stop the job:
    spurline load /mnt/data/train --submit --verify
    spurline load /mnt/data/train --progress
    spurline load /mnt/data/train --stop
  Load the files of a list, at 500 MiB per second at most:
    spurline load --files-from epoch1.txt --rate 500M
  Other options start another job on the same paths; the same arguments again show the same job:
    spurline load /mnt/data/train --include '*.idx' --replicas 3 --submit
    spurline load /mnt/data/train --include '*.idx' --replicas 3 --progress
  Let the coordinator of a group run the job; it resumes it after a restart:
    spurline load s3://datasets/train --source s3://datasets \\
        --registry coordinator://head:7400 --submit";

const STAGE_EXAMPLES: &str = "\
The nodes of a group keep staged files until the store has them. 'spurline status --unsaved' lists these files, with the last error.

Examples:
  The files that the store does not have yet:
    spurline status --unsaved --registry coordinator://head:7400
  Copy the bytes of a file to a local disk:
    spurline stage export s3://models/run-7/step-900.pt /tmp/step-900.pt \\
        --registry coordinator://head:7400
  Give the upload up, and the bytes with it:
    spurline stage drop s3://models/run-7/step-900.pt --yes \\
        --registry coordinator://head:7400";

const FREE_EXAMPLES: &str = "\
Examples:
  Drop a folder; pinned blocks below it stay:
    spurline free /mnt/data/train
  Drop all of a source, with replaced versions and removed files:
    spurline free /mnt/data
  Empty the cache of a mount or of its nodes, pinned blocks included:
    spurline free --all --pinned /mnt/data
  Empty the caches of a group through its coordinator:
    spurline free --all --source s3://datasets \\
        --registry coordinator://head:7400";

/// Flags of jobs.
#[derive(Debug, Args)]
pub struct JobArgs {
    /// Read paths from this file, one per line, instead of PATH; - is standard input. Folders in it are not walked
    #[arg(long, value_name = "FILE", conflicts_with = "path")]
    pub files_from: Option<PathBuf>,
    /// Only files that match; repeat for more. A pattern with a / matches the path below the source, others the name
    #[arg(long, value_name = "GLOB")]
    pub include: Vec<String>,
    /// Skip files and folders that match; repeat for more
    #[arg(long, value_name = "GLOB")]
    pub exclude: Vec<String>,
    /// Concurrent requests
    #[arg(short, long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub parallel: u32,
    /// Start the job and return at once
    #[arg(long, group = "what")]
    pub submit: bool,
    /// Show the progress of the job on these paths
    ///
    /// Of several jobs on these paths, it is the one started with the same options. Without options, it is a running
    /// job, or the last one that ended.
    #[arg(long, group = "what")]
    pub progress: bool,
    /// Stop the jobs on these paths; with options, only the job that was started with them
    #[arg(long, group = "what")]
    pub stop: bool,
    /// Coordinator that runs the job: coordinator://HOST:PORT [default: the mount that contains PATH]
    ///
    /// A coordinator resumes its jobs after a restart. PATH is then relative to --source. When only the environment
    /// variable is set, the mount that contains the paths runs a job without --source.
    #[arg(long, value_name = "URL", help_heading = "Group")]
    pub registry: Option<Registry>,
    /// Name of the group in the registry
    #[arg(long, value_name = "NAME", default_value = DEFAULT_GROUP, help_heading = "Group")]
    pub cache_group: String,
    /// Source of the group's mounts
    #[arg(long, value_name = "URL", help_heading = "Group")]
    pub source: Option<SourceUrl>,
    /// Authentication at coordinators.
    #[command(flatten)]
    pub trust: RawTrust,
    /// Print one JSON object
    #[arg(long, help_heading = None)]
    pub json: bool,
    /// Flags that were given on the command line, not by a variable.
    #[arg(skip)]
    pub said: GivenFlags,
}

/// The flags that were given on the command line. Arguments that name another target override a variable, but not a
/// flag.
#[derive(Debug, Clone, Copy, Default)]
pub struct GivenFlags {
    /// `--registry`.
    pub registry: bool,
    /// `--cache-group`.
    pub cache_group: bool,
}

/// The arguments of `load`.
#[derive(Debug, Args)]
pub struct LoadArgs {
    /// Files and folders in a mount of this machine, or below --source [default: all of --source]
    pub path: Vec<String>,
    /// Read every cached block back and check it before the job succeeds
    #[arg(long)]
    pub verify: bool,
    /// Report files that are cached completely as skipped
    #[arg(long)]
    pub skip_if_exists: bool,
    /// Load names and attributes only
    #[arg(long, conflicts_with = "verify")]
    pub metadata_only: bool,
    /// Pin the paths first, as 'spurline pin' does; fails when they do not fit
    #[arg(long, requires = "registry", conflicts_with_all = ["stop", "progress", "metadata_only", "skip_if_exists"])]
    pub pin: bool,
    /// Limit the bytes fetched per second; --verify is not limited [default: no limit]
    #[arg(long, value_name = "SIZE")]
    pub rate: Option<Size>,
    /// Copies of each block, on different nodes [default: --replicas of the mount; 1 for a coordinator]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub replicas: Option<u32>,
    /// The job.
    #[command(flatten)]
    pub job: JobArgs,
}

/// The arguments of `free`.
#[derive(Debug, Args)]
pub struct FreeArgs {
    /// Files and folders in a mount of this machine, or below --source [default: all of --source]
    ///
    /// Of a file, the present version is dropped. A mountpoint, or the whole source, includes replaced versions and removed
    /// files.
    pub path: Vec<String>,
    /// Empty the cache: drop all blocks of the mount at PATH or of its nodes, whatever file, version and source they
    /// belong to
    #[arg(long, conflicts_with_all = ["files_from", "include", "exclude"])]
    pub all: bool,
    /// Drop pinned blocks as well (spurline pin); the folders stay pinned
    #[arg(long)]
    pub pinned: bool,
    /// The job.
    #[command(flatten)]
    pub job: JobArgs,
}

/// The arguments of `pin` and `unpin`.
#[derive(Debug, Args)]
pub struct RuleArgs {
    /// Folders or files: URLs below a source of the nodes (s3://datasets/val), or paths in a mount of this machine
    #[arg(required = true)]
    pub path: Vec<String>,
    /// The group.
    #[command(flatten)]
    pub group: RulesArgs,
}

/// The arguments of `rules`.
#[derive(Debug, Args)]
pub struct RulesArgs {
    /// Registry that keeps the group's rules: coordinator://HOST:PORT or etcd://HOST:PORT
    #[arg(long, value_name = "URL")]
    pub registry: Option<Registry>,
    /// Name of the group in the registry
    #[arg(long, value_name = "NAME", default_value = DEFAULT_GROUP)]
    pub cache_group: String,
    /// Authentication at coordinators and nodes.
    #[command(flatten)]
    pub trust: RawTrust,
    /// Print one JSON object
    #[arg(long, help_heading = None)]
    pub json: bool,
}

/// The arguments of `limit`.
#[derive(Debug, Args)]
pub struct LimitArgs {
    /// Evict blocks this long after they were fetched (30m, 12h, 7d); none removes the limit
    #[arg(long, value_name = "TIME")]
    pub ttl: Option<TtlLimit>,
    /// Space on the cache disks of all nodes together (500G, 2T), oldest blocks are evicted first; 0 caches nothing,
    /// none removes the limit
    #[arg(long, value_name = "SIZE")]
    pub quota: Option<QuotaLimit>,
    /// New files are kept by two nodes and uploaded later (staged); of a bucket, through nodes with --stage-size
    #[arg(long)]
    pub stage: bool,
    /// New files stay on the disk of a node, are never uploaded, and are gone with the node; give a --ttl and a --quota
    #[arg(long, conflicts_with = "stage")]
    pub scratch: bool,
    /// New files are uploaded before their close ends, as without --stage and --scratch
    #[arg(long, conflicts_with_all = ["stage", "scratch"])]
    pub direct: bool,
    /// The folders and the group.
    #[command(flatten)]
    pub rule: RuleArgs,
}

/// A number of seconds, for a flag whose value is named so, or a duration with its unit.
fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.trim().parse::<f64>().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds.map_or_else(|| parse_duration(text).map_err(|why| why.to_string()), Ok)
}

/// The time limit of a folder's blocks; `None` for no limit.
#[derive(Debug, Clone, Copy)]
pub struct TtlLimit(pub Option<Duration>);

impl std::str::FromStr for TtlLimit {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(TtlLimit(None));
        }
        parse_duration(text).map(|ttl| TtlLimit(Some(ttl))).map_err(|why| why.to_string())
    }
}

/// The space limit of a folder; `None` for no limit.
#[derive(Debug, Clone, Copy)]
pub struct QuotaLimit(pub Option<Size>);

impl std::str::FromStr for QuotaLimit {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(QuotaLimit(None));
        }
        text.parse::<Size>().map(|quota| QuotaLimit(Some(quota))).map_err(|why| why.to_string())
    }
}

/// The arguments of `umount`.
#[derive(Debug, Args)]
pub struct UmountArgs {
    /// Mountpoints
    #[arg(value_name = "MOUNTPOINT", required_unless_present = "all")]
    pub mountpoints: Vec<PathBuf>,
    /// All mounts of this user on this host; by root, of all users
    #[arg(long, conflicts_with = "mountpoints")]
    pub all: bool,
    /// Abort pending requests, then unmount: for a mount that hangs
    #[arg(long, short)]
    pub force: bool,
    /// Detach now; the mount ends when its last file is closed
    #[arg(long, short)]
    pub lazy: bool,
    /// Longest wait for the mount's process to end
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_duration)]
    pub timeout: Duration,
}

/// The arguments of `upgrade`.
#[derive(Debug, Args)]
pub struct UpgradeArgs {
    /// Mountpoint
    #[arg(required_unless_present = "all")]
    pub mountpoint: Option<PathBuf>,
    /// All mounts of this host
    #[arg(long, conflicts_with = "mountpoint")]
    pub all: bool,
    /// The program to continue with [default: this program]
    #[arg(long, value_name = "FILE")]
    pub program: Option<PathBuf>,
}

/// The arguments of `stats`.
#[derive(Debug, Args)]
pub struct StatsArgs {
    /// Mountpoint, HOST:PORT of a node, or path of an admin socket
    pub target: String,
    /// Sections to show, one letter each, which --help lists [default: ufmcro, with w and x where there are writes and an
    /// export]
    #[arg(long, value_name = "LETTERS")]
    pub schema: Option<String>,
    /// Seconds between lines
    #[arg(short = 'l', long, value_name = "SECS", default_value = "1", value_parser = parse_seconds)]
    pub interval: Duration,
    /// Lines to print, then stop [default: until interrupted]
    #[arg(short = 'c', long, value_name = "N")]
    pub count: Option<u64>,
    /// Print absolute counters, one JSON object per line
    #[arg(long)]
    pub json: bool,
}

/// The arguments of `info`.
#[derive(Debug, Args)]
pub struct InfoArgs {
    /// File or directory in a mount
    #[arg(required = true)]
    pub path: Vec<PathBuf>,
    /// Print one JSON object per line
    #[arg(long)]
    pub json: bool,
}

/// The arguments of `status`.
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Show all nodes of a group, by its registry: static:HOST:PORT[,…], dns:NAME:PORT, coordinator://… or etcd://…
    #[arg(long, value_name = "URL")]
    pub registry: Option<Registry>,
    /// Name of the group in the registry
    #[arg(long, value_name = "NAME", default_value = DEFAULT_GROUP)]
    pub cache_group: String,
    /// Authentication at nodes.
    #[command(flatten)]
    pub trust: RawTrust,
    /// List the files that nodes of the group keep and the store does not have yet, oldest first, at most 5000
    #[arg(long, help_heading = None, conflicts_with = "target")]
    pub unsaved: bool,
    /// Mountpoints, HOST:PORT of nodes, or admin sockets [default: everything on this machine, or the group of
    /// SPURLINE_REGISTRY]
    #[arg(help_heading = None)]
    pub target: Vec<String>,
    /// Print one JSON object per line
    #[arg(long, help_heading = None)]
    pub json: bool,
    /// Flags that were given on the command line, not by a variable.
    #[arg(skip)]
    pub said: GivenFlags,
}

/// The arguments of `demo`.
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Most data to copy from /usr and read
    #[arg(long, value_name = "SIZE", default_value = "512M")]
    pub size: Size,
    /// Parent of the demo's directory, which is removed at the end [default: the temporary directory]
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Longest time for any one step
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_duration)]
    pub timeout: Duration,
    /// Print the figures as JSON
    #[arg(long)]
    pub json: bool,
}

/// The arguments of `completions`.
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// Shell
    pub shell: clap_complete::Shell,
}

/// The arguments of `man`.
#[derive(Debug, Args)]
pub struct ManArgs {
    /// Directory for spurline.1, spurline-mount.1, …
    pub dir: PathBuf,
}

/// The whole command line, with environment variables for the services' flags.
pub fn cli_command() -> clap::Command {
    let styles = Styles::styled()
        .header(AnsiColor::Yellow.on_default().bold())
        .usage(AnsiColor::Yellow.on_default().bold())
        .literal(AnsiColor::Green.on_default())
        .placeholder(AnsiColor::Cyan.on_default());
    let mut command = CommandLine::command().styles(styles);
    for service in file::SERVICE_COMMANDS {
        command = file::change_service(command, service, args::with_environment);
    }
    for asking in ["status", "load", "free", "pin", "unpin", "limit", "rules"] {
        command = command.mut_subcommand(asking, args::with_group_environment);
    }
    command = command.mut_subcommand("node", |node| node.mut_subcommand("drain", args::with_group_environment));
    for action in ["drop", "export"] {
        command = command.mut_subcommand("stage", |stage| stage.mut_subcommand(action, args::with_group_environment));
    }
    command.mut_subcommand("stats", |stats| {
        stats.after_long_help(format!("{}\n{STATS_EXAMPLES}", crate::stats::columns_help()))
    })
}

/// The typed arguments of clap's matches.
pub fn from_matches(matches: &ArgMatches) -> Result<CommandLine, file::ArgsRefusal> {
    let cli = CommandLine::from_arg_matches(matches)
        .map_err(|e| file::ArgsRefusal::Clap(Box::new(e.format(&mut cli_command()))));
    let mut cli = cli?;
    let word = |name: &str| {
        let of = matches.subcommand().map(|(_, of)| of).filter(|of| of.try_contains_id(name).is_ok());
        of.is_some_and(|of| of.value_source(name) == Some(ValueSource::CommandLine))
    };
    let said = match &mut cli.command {
        CliCommand::Load(args) => &mut args.job.said,
        CliCommand::Free(args) => &mut args.job.said,
        CliCommand::Status(args) => &mut args.said,
        _ => return Ok(cli),
    };
    *said = GivenFlags { registry: word("registry"), cache_group: word("cache_group") };
    Ok(cli)
}

#[cfg(test)]
mod tests {
    /// Every flag for a size, a rate or a time refuses a number without a unit, also flags that are added later.
    #[test]
    fn numbers_without_units_are_refused_by_every_flag() {
        fn check_flags(command: &clap::Command, name: &str) -> usize {
            let with_unit = |arg: &&clap::Arg| {
                arg.get_value_names().is_some_and(|names| matches!(names, [one] if one == "SIZE" || one == "TIME"))
            };
            let mut checked = 0;
            for arg in command.get_arguments().filter(with_unit) {
                let flag = format!("--{}", arg.get_long().unwrap());
                let alone = clap::Command::new("spurline").arg(arg.clone().required(false));
                let error = alone.try_get_matches_from(["spurline", &flag, "4567"]).unwrap_err().to_string();
                assert!(error.contains("no unit; did you mean 4567"), "{name} {flag}: {error}");
                let alone = clap::Command::new("spurline").arg(arg.clone().required(false));
                assert!(alone.try_get_matches_from(["spurline"]).is_ok(), "the default of {name} {flag}");
                checked += 1;
            }
            let below = command.get_subcommands().map(|sub| check_flags(sub, &format!("{name} {}", sub.get_name())));
            checked + below.sum::<usize>()
        }
        assert!(check_flags(&super::cli_command(), "spurline") > 30);
        assert_eq!(super::parse_seconds("1.5"), Ok(std::time::Duration::from_millis(1500)));
        assert_eq!(super::parse_seconds("2m"), Ok(std::time::Duration::from_secs(120)));
        assert!(super::parse_seconds("-1").is_err());
    }

    #[test]
    fn definitions_are_consistent() {
        super::cli_command().debug_assert();
    }
}
