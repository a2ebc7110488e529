//! The words of the command line. The flags of `mount` and `node` are the config crate's; the rest is here.

use crate::args::{self, CoordinatorArgs, MountArgs, NodeArgs, TrustArgs};
use crate::config_file as file;
use clap::builder::styling::{AnsiColor, Styles};
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use spurline_config::{Registry, SourceUrl};
use spurline_types::{Size, parse_duration};
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// A distributed cache file system for GPU and HPC clusters
///
/// Spurline mounts a bucket or a directory through a cache on local disks and memory, alone or from cache nodes.
#[derive(Debug, Parser)]
#[command(name = "spurline", version, propagate_version = true, max_term_width = 110, arg_required_else_help = true)]
#[command(
    after_help = "Exit codes: 0 done, 1 it ran and failed, 2 the words were wrong, 3 a required thing is missing."
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Mount SOURCE at MOUNTPOINT; alone, or as a consumer of cache nodes
    #[command(after_help = SERVICE_NOTE, after_long_help = MOUNT_EXAMPLES)]
    Mount(Box<MountArgs>),
    /// Unmount a mountpoint, also one whose process is gone
    #[command(visible_alias = "unmount")]
    Umount(UmountArgs),
    /// Run a cache node: fetches blocks once and serves them to mounts
    #[command(after_help = SERVICE_NOTE, after_long_help = NODE_EXAMPLES)]
    #[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
    Node(Box<NodeWords>),
    /// Run a coordinator: the list of a group's nodes, with no other service
    #[command(after_help = SERVICE_NOTE, after_long_help = COORDINATOR_EXAMPLES)]
    Coordinator(Box<CoordinatorArgs>),
    /// Live screen of a mount or a node: usage, FUSE, cache, network, under-store
    #[command(after_long_help = STATS_EXAMPLES)]
    Stats(StatsArgs),
    /// Version, length and blocks of a file in a mount, and who holds each
    Info(InfoArgs),
    /// State of cache nodes: address, disks, used, weight
    Status(StatusArgs),
    /// Bring files into the cache before they are read
    #[command(after_long_help = LOAD_EXAMPLES)]
    Load(LoadArgs),
    /// Drop files from the cache
    Free(FreeArgs),
    /// Keep folders on the cache disks of a group: their blocks are never evicted for room
    #[command(after_help = RULES_EXAMPLES)]
    Pin(RuleArgs),
    /// Let folders be evicted again
    #[command(after_help = RULES_EXAMPLES)]
    Unpin(RuleArgs),
    /// Limit how long, and in how many bytes, a group keeps folders
    #[command(after_help = RULES_EXAMPLES)]
    Limit(LimitArgs),
    /// The rules of a group: what is pinned or limited, and how much is held by each
    #[command(after_help = RULES_EXAMPLES)]
    Rules(RulesArgs),
    /// Measure: throughput, operations, latency, processor time (runs the program spurline-bench)
    #[command(disable_help_flag = true, disable_version_flag = true)]
    Bench(BenchArgs),
    /// The fabric: what is there, what is wrong with it, how fast it is
    #[command(arg_required_else_help = true)]
    Net(crate::net::NetArgs),
    /// Run the main job on this machine, with no set-up, and clean up
    Demo(DemoArgs),
    /// Print a shell's completions
    Completions(CompletionsArgs),
    /// Write man pages into a directory
    Man(ManArgs),
    /// Print the table of all flags, variables and keys that CONFIGURATION.md holds
    #[command(hide = true)]
    ConfigReference,
}

/// Arguments of `spurline-bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Arguments of spurline-bench; --help prints them
    #[arg(value_name = "ARGUMENT", trailing_var_arg = true, allow_hyphen_values = true)]
    pub arguments: Vec<OsString>,
}

/// What `node` is told: how to run one, or what to do with one that runs.
#[derive(Debug, Args)]
pub struct NodeWords {
    /// How to run it.
    #[command(flatten)]
    pub args: NodeArgs,
    /// What to do with one that runs.
    #[command(subcommand)]
    pub action: Option<NodeAction>,
}

/// What to do with a node that runs.
#[derive(Debug, Subcommand)]
pub enum NodeAction {
    /// Hand a node's hot blocks on to the nodes that will own them, then take its share away
    Drain(DrainArgs),
}

/// What `node drain` is told.
#[derive(Debug, Args)]
pub struct DrainArgs {
    /// The group's nodes: coordinator://… or etcd://…
    #[arg(long, value_name = "URL")]
    pub registry: Registry,
    /// The group's name in the registry
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub cache_group: String,
    /// What nodes have to be shown.
    #[command(flatten)]
    pub trust: TrustArgs,
    /// The node, by its name or HOST:PORT
    #[arg(help_heading = None)]
    pub node: String,
    /// As JSON, one object
    #[arg(long, help_heading = None)]
    pub json: bool,
}

const SERVICE_NOTE: &str = "Every flag is also an environment variable (--cache-size: SPURLINE_CACHE_SIZE) and a key \
of the TOML file given by --config (cache-size = \"100G\"). Flag over variable over file over default. \
--help says more.";

const MOUNT_EXAMPLES: &str = "\
Every flag is also an environment variable (--cache-size: SPURLINE_CACHE_SIZE) and a key of the TOML file given by
--config (cache-size = \"100G\"). Flag over variable over file over default.

Examples:
  A bucket, with a cache on two disks, in the background:
    spurline mount s3://datasets/imagenet /mnt/data --cache-dir '/nvme0/c:/nvme1/c' --cache-size 2T -d
  An S3-compatible server of your own:
    spurline mount s3://datasets /mnt/data --endpoint-url http://10.0.0.5:9000
  A directory (an NFS mount, say):
    spurline mount /nfs/datasets /mnt/data
  From a cache node, which has the credentials and the cache:
    spurline mount s3://datasets /mnt/data --registry static:node1:7000
  What it does, live:
    spurline stats /mnt/data
  And away with it:
    spurline umount /mnt/data";

const NODE_EXAMPLES: &str = "\
Every flag is also an environment variable (--cache-size: SPURLINE_CACHE_SIZE) and a key of the TOML file given by
--config (cache-size = \"100G\"). Flag over variable over file over default.

Examples:
  A node for one bucket, reached over eth1:
    spurline node --source s3://datasets --cache-dir /nvme0/c --group-network eth1 --group-port 7000 --group-token-file token
  A node on this machine for trying out (it listens on loopback only):
    spurline node --source /usr/share --cache-dir /tmp/c --cache-size 10G --group-port 7000
  Before one is taken away or restarted for long: its hot blocks go to those that will own them
    spurline node drain node7 --registry coordinator://head1:7400 --cache-group train --group-token-file token";

const RULES_EXAMPLES: &str = "\
The registry keeps the rules: nodes that start later go by them as well. For a file the rule of the longest folder holds.

Examples:
  The validation set stays, whatever else is read; all of it is brought in now:
    spurline load --pin s3://datasets/val --source s3://datasets --registry coordinator://head:7010
  What is held of it stays, and what is read of it from now on:
    spurline pin s3://datasets/val --registry coordinator://head:7010
  Scratch data goes after a day, and never takes more than 2 TiB of the group's disks:
    spurline limit s3://scratch --ttl 1d --quota 2T --registry coordinator://head:7010
    spurline limit s3://scratch --ttl none --registry coordinator://head:7010
  What rules there are, and how much is held by each:
    spurline rules --registry coordinator://head:7010";

const COORDINATOR_EXAMPLES: &str = "\
Every flag is also an environment variable (--group-port: SPURLINE_GROUP_PORT) and a key of the TOML file given by
--config (group-port = 7400). Flag over variable over file over default.

Examples:
  On one host (or use an etcd, whose servers replace each other, with --registry etcd://head1:2379,head2:2379):
    spurline coordinator --group-network eth1 --group-port 7400 --group-token-file /etc/token -d
  The nodes, then the mounts:
    spurline node --source s3://datasets --group-network eth1 --group-port 7000 --group-token-file /etc/token \\
        --registry coordinator://head1:7400 --cache-group train -d
    spurline mount s3://datasets /mnt/data --group-token-file /etc/token \\
        --registry coordinator://head1:7400 --cache-group train -d";

const STATS_EXAMPLES: &str = "\
Sections of --schema: u usage, f fuse, m metadata, c blockcache, r remotecache (whatever carried it), e rdma, o object.

Examples:
  spurline stats /mnt/data
  spurline stats /mnt/data --json -c 1
  A node or a coordinator of this machine, by the address it serves at:
    spurline stats node1:7000 --schema ucro -l 5
  One of another machine, by the address of its metrics page (--metrics there; by itself that is on loopback only):
    spurline stats node2:9567";

const LOAD_EXAMPLES: &str = "\
Examples:
  A folder of a mount, with a progress bar; Ctrl-C ends the job:
    spurline load /mnt/data/train
  In the background, every block read back and checked at the end; how far it is; its end:
    spurline load /mnt/data/train --submit --verify
    spurline load /mnt/data/train --progress
    spurline load /mnt/data/train --stop
  The files of a list, at most 500 MiB each second:
    spurline load --files-from epoch1.txt --rate 500M
  Other options make another job of the same paths, which may run beside it; the same words again join the same job:
    spurline load /mnt/data/train --include '*.idx' --replicas 3 --submit
    spurline load /mnt/data/train --include '*.idx' --replicas 3 --progress
  By the coordinator of a group, which goes on with it after a restart:
    spurline load s3://datasets/train --source s3://datasets --registry coordinator://head:7010 --submit";

/// Flags of work on many files.
#[derive(Debug, Args)]
pub struct JobArgs {
    /// Paths from this file, one a line, instead of PATH; - is standard input. Folders are not walked
    #[arg(long, value_name = "FILE", conflicts_with = "path")]
    pub files_from: Option<PathBuf>,
    /// Only files of this pattern; repeat the flag for more. With a / it means the path below the source, else the name
    #[arg(long, value_name = "GLOB")]
    pub include: Vec<String>,
    /// No file and no folder of this pattern; repeat the flag for more
    #[arg(long, value_name = "GLOB")]
    pub exclude: Vec<String>,
    /// Bytes per second at the most, of those that are brought: reading back is not limited [default: no limit]
    #[arg(long, value_name = "SIZE")]
    pub rate: Option<Size>,
    /// Requests under way at one time
    #[arg(short, long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub parallel: u32,
    /// Begin the job and return at once; it goes on by itself
    #[arg(long, group = "what")]
    pub submit: bool,
    /// Show how far the job of these paths is
    ///
    /// Of several jobs of these paths it is the one that was begun with the same options. Without options it is one that is
    /// under way, or else the last one.
    #[arg(long, group = "what")]
    pub progress: bool,
    /// End the jobs of these paths; with options, the one that was begun with them
    #[arg(long, group = "what")]
    pub stop: bool,
    /// The coordinator that does the job: coordinator://HOST:PORT [default: the mount that PATH lies in]
    ///
    /// It goes on with jobs after a restart. PATH is below --source then. Where the variable alone names it, paths without
    /// --source are done by the mount that they lie in.
    #[arg(long, value_name = "URL", help_heading = "Group")]
    pub registry: Option<Registry>,
    /// The group's name in the registry
    #[arg(long, value_name = "NAME", default_value = "default", help_heading = "Group")]
    pub cache_group: String,
    /// What the mounts of the group mount
    #[arg(long, value_name = "URL", help_heading = "Group")]
    pub source: Option<SourceUrl>,
    /// What coordinators have to be shown.
    #[command(flatten)]
    pub trust: TrustArgs,
    /// As JSON, one object
    #[arg(long, help_heading = None)]
    pub json: bool,
    /// What words of the command line said, and not variables.
    #[arg(skip)]
    pub said: Said,
}

/// Which flags were words of the command line: what a variable says gives way to what names another place.
#[derive(Debug, Clone, Copy, Default)]
pub struct Said {
    /// `--registry`.
    pub registry: bool,
    /// `--cache-group`.
    pub cache_group: bool,
}

/// What `load` is told.
#[derive(Debug, Args)]
pub struct LoadArgs {
    /// Files and folders inside a mount of this machine, or below --source
    pub path: Vec<String>,
    /// Read every block back where it is held and check it before the job has succeeded
    #[arg(long)]
    pub verify: bool,
    /// Count files that are held whole already as skipped
    #[arg(long)]
    pub skip_if_exists: bool,
    /// Names and attributes only, no bytes
    #[arg(long, conflicts_with = "verify")]
    pub metadata_only: bool,
    /// Pin them first, as 'spurline pin' does: refused when they do not fit
    #[arg(long, requires = "registry", conflicts_with_all = ["stop", "progress", "metadata_only", "skip_if_exists"])]
    pub pin: bool,
    /// Nodes that are to hold each block [default: as the mount's --replicas says; 1 by a coordinator]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub replicas: Option<u32>,
    /// The job.
    #[command(flatten)]
    pub job: JobArgs,
}

/// What `free` is told.
#[derive(Debug, Args)]
pub struct FreeArgs {
    /// Files and folders inside a mount of this machine, or below --source
    pub path: Vec<String>,
    /// The job.
    #[command(flatten)]
    pub job: JobArgs,
}

/// What `pin` and `unpin` are told.
#[derive(Debug, Args)]
pub struct RuleArgs {
    /// Folders or files: URLs below a source of the nodes (s3://datasets/val), or paths in a mount of this machine
    #[arg(required = true)]
    pub path: Vec<String>,
    /// The group whose rules are changed.
    #[command(flatten)]
    pub group: RulesArgs,
}

/// What `rules` is told.
#[derive(Debug, Args)]
pub struct RulesArgs {
    /// The registry of the group, which keeps its rules: coordinator://HOST:PORT or etcd://HOST:PORT
    #[arg(long, value_name = "URL")]
    pub registry: Option<Registry>,
    /// The group's name in the registry
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub cache_group: String,
    /// What coordinators and nodes have to be shown.
    #[command(flatten)]
    pub trust: TrustArgs,
    /// As JSON, one object
    #[arg(long, help_heading = None)]
    pub json: bool,
}

/// What `limit` is told.
#[derive(Debug, Args)]
pub struct LimitArgs {
    /// Blocks go this long after they came (30m, 12h, 7d); none: no limit
    #[arg(long, value_name = "TIME")]
    pub ttl: Option<Ttl>,
    /// Bytes of the cache disks of all nodes together (500G, 2T), the oldest blocks go first; 0: keep nothing, none: no
    /// limit
    #[arg(long, value_name = "SIZE")]
    pub quota: Option<Quota>,
    /// The folders and the group.
    #[command(flatten)]
    pub rule: RuleArgs,
}

/// How long a folder's blocks are kept; `None` for no limit.
#[derive(Debug, Clone, Copy)]
pub struct Ttl(pub Option<Duration>);

impl std::str::FromStr for Ttl {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Ttl(None));
        }
        parse_duration(text).map(|ttl| Ttl(Some(ttl))).map_err(|why| why.to_string())
    }
}

/// The bytes kept of a folder; `None` for no limit.
#[derive(Debug, Clone, Copy)]
pub struct Quota(pub Option<Size>);

impl std::str::FromStr for Quota {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Quota(None));
        }
        text.parse::<Size>().map(|quota| Quota(Some(quota))).map_err(|why| why.to_string())
    }
}

/// What `umount` is told.
#[derive(Debug, Args)]
pub struct UmountArgs {
    /// The mountpoint
    pub mountpoint: PathBuf,
    /// Abort what is under way, then unmount: for a mount that hangs
    #[arg(long, short)]
    pub force: bool,
    /// Detach now, finish when the last file is closed
    #[arg(long, short)]
    pub lazy: bool,
    /// How long to wait for the mount to go
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_duration)]
    pub timeout: Duration,
}

/// What `stats` is told.
#[derive(Debug, Args)]
pub struct StatsArgs {
    /// A mountpoint, a node's HOST:PORT, or the path of an admin socket
    pub target: String,
    /// Sections to show, a letter each, of ufmcreo
    #[arg(long, value_name = "LETTERS", default_value = "ufmcro")]
    pub schema: String,
    /// Seconds between lines
    #[arg(short = 'l', long, value_name = "SECS", default_value = "1", value_parser = parse_duration)]
    pub interval: Duration,
    /// Lines to print, then stop [default: until interrupted]
    #[arg(short = 'c', long, value_name = "N")]
    pub count: Option<u64>,
    /// Absolute counters as JSON, one object a line
    #[arg(long)]
    pub json: bool,
}

/// What `info` is told.
#[derive(Debug, Args)]
pub struct InfoArgs {
    /// A file or directory inside a mount
    #[arg(required = true)]
    pub path: Vec<PathBuf>,
    /// As JSON, one object a line
    #[arg(long)]
    pub json: bool,
}

/// What `status` is told.
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// All nodes of a group, by its registry: static:HOST:PORT[,…], dns:NAME:PORT, coordinator://… or etcd://…
    #[arg(long, value_name = "URL")]
    pub registry: Option<Registry>,
    /// The group's name in the registry
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub cache_group: String,
    /// What nodes have to be shown.
    #[command(flatten)]
    pub trust: TrustArgs,
    /// Mountpoints, HOST:PORT of nodes, or admin sockets [default: everything on this machine, or the group of
    /// SPURLINE_REGISTRY]
    #[arg(help_heading = None)]
    pub target: Vec<String>,
    /// As JSON, one object a line
    #[arg(long, help_heading = None)]
    pub json: bool,
    /// What words of the command line said, and not variables.
    #[arg(skip)]
    pub said: Said,
}

/// What `demo` is told.
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// How much data to use at most; as much as /usr has is taken
    #[arg(long, value_name = "SIZE", default_value = "512M")]
    pub size: Size,
    /// Where the demo's directory is made and removed again [default: the temporary directory]
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Longest time for any one step
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_duration)]
    pub timeout: Duration,
    /// The figures as JSON
    #[arg(long)]
    pub json: bool,
}

/// What `completions` is told.
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// Which shell
    pub shell: clap_complete::Shell,
}

/// What `man` is told.
#[derive(Debug, Args)]
pub struct ManArgs {
    /// The directory to write spurline.1, spurline-mount.1, … into
    pub dir: PathBuf,
}

/// The whole command line, with environment variables for the services' flags.
pub fn command() -> clap::Command {
    let styles = Styles::styled()
        .header(AnsiColor::Yellow.on_default().bold())
        .usage(AnsiColor::Yellow.on_default().bold())
        .literal(AnsiColor::Green.on_default())
        .placeholder(AnsiColor::Cyan.on_default());
    let mut command = Cli::command().styles(styles);
    for service in file::SERVICES {
        command = command.mut_subcommand(service, args::with_environment);
    }
    for asking in ["status", "load", "free", "pin", "unpin", "limit", "rules"] {
        command = command.mut_subcommand(asking, args::with_group_environment);
    }
    command = command.mut_subcommand("node", |node| node.mut_subcommand("drain", args::with_group_environment));
    command
}

/// The typed words behind clap's matches.
pub fn from_matches(matches: &ArgMatches) -> Result<Cli, file::ArgsRefusal> {
    let cli = Cli::from_arg_matches(matches).map_err(|e| file::ArgsRefusal::Clap(Box::new(e.format(&mut command()))));
    let mut cli = cli?;
    let word = |name: &str| {
        let of = matches.subcommand().map(|(_, of)| of).filter(|of| of.try_contains_id(name).is_ok());
        of.is_some_and(|of| of.value_source(name) == Some(ValueSource::CommandLine))
    };
    let said = match &mut cli.command {
        Command::Load(args) => &mut args.job.said,
        Command::Free(args) => &mut args.job.said,
        Command::Status(args) => &mut args.said,
        _ => return Ok(cli),
    };
    *said = Said { registry: word("registry"), cache_group: word("cache_group") };
    Ok(cli)
}

#[cfg(test)]
mod tests {
    #[test]
    fn definitions_are_consistent() {
        super::command().debug_assert();
    }
}
