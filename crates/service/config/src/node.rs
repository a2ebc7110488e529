//! A cache node: settings and checks. Opens no store and no socket.

use crate::budget::{BudgetDemand, MemoryBudget, RawMemory};
use crate::cache::{CacheConfig, CachePlace, NODE_FOLDER, RawCache};
use crate::group::{GroupConfig, RawGroup, check_name};
use crate::host::HostLimits;
use crate::log::{LogConfig, MetricsConfig, RawLog};
use crate::net::{NetConfig, RawNetwork, warn_unencrypted};
use crate::origin::OriginConfig;
use crate::s3::{RawS3, S3Config};
use crate::stage::{RawStage, StageConfig, StageNeeds};
use crate::trust::{RawTrust, TrustConfig};
use crate::values::{SourceUrl, TransportMode};
#[cfg(feature = "clap")]
use crate::values::{parse_squash, parse_weight};
use crate::writes::{BucketWrites, WritesConfig, check_node_writes};
use spurline_types::fault::Fault;

settings! {
    /// A node.
    #[command(next_help_heading = "Node")]
    pub struct RawNode {
        /// Source that this node may fetch from and serve; repeat the flag for more
        #[arg(long, value_name = "URL", required = true)]
        pub source: Vec<SourceUrl>,
        /// Share of the group's blocks; 0 drains the node
        #[arg(long, value_name = "N", value_parser = parse_weight, allow_negative_numbers = true)]
        pub weight: u32 = 100,
        /// Name of this node in its group; its blocks belong to the name, not to the address [default: HOSTNAME:PORT]
        #[arg(long, value_name = "NAME")]
        pub name: Option<String>,
        /// Accept placement settings that differ from the previous start or from the other nodes
        ///
        /// These are --block-size, --name and --zone. Blocks cached under the old settings are fetched again. Without
        /// this flag the node refuses to start and names the settings that differ.
        #[arg(long)]
        pub yes: bool,
        /// Take changes of the sources from mounts with --rw: directories and S3 buckets
        ///
        /// Each change is made once in the source. A change of a directory is made with the user and groups that the
        /// mount reports: the node believes its mounts (docs/trust.md).
        #[arg(long)]
        pub writable: bool,
        /// Make all changes as this user and group, in place of those that mounts report
        #[arg(long, value_name = "UID:GID", value_parser = parse_squash)]
        pub squash: Option<(u32, u32)>,
        /// How buckets are changed.
        #[command(flatten)]
        pub bucket: BucketWrites,
        /// Staged files.
        #[command(flatten)]
        pub stage: RawStage,
        /// The S3 endpoint.
        #[command(flatten)]
        pub s3: RawS3,
        /// The cache group.
        #[command(flatten)]
        pub group: RawGroup,
        /// TCP port to serve on; 0 chooses a free port and prints it
        #[arg(long, value_name = "PORT", help_heading = "Network")]
        pub group_port: u16 = 0,
        /// RDMA port on every rail; 0 chooses a free port, which mounts learn during the handshake
        #[arg(long, value_name = "PORT", help_heading = "Network")]
        pub rdma_port: u16 = 0,
        /// The memory budget.
        #[command(flatten)]
        pub memory: RawMemory,
        /// The network.
        #[command(flatten)]
        pub net: RawNetwork,
        /// Authentication and encryption.
        #[command(flatten)]
        pub trust: RawTrust,
        /// Serve every client that can reach the ports, without a group token
        ///
        /// For networks where every user may read everything that the node may fetch.
        #[arg(long, help_heading = "Trust")]
        pub allow_anyone: bool,
        /// The cache.
        #[command(flatten)]
        pub cache: RawCache,
        /// The origin.
        #[command(flatten)]
        pub under: OriginConfig,
        /// Logs and metrics.
        #[command(flatten)]
        pub log: RawLog,
    }
}

impl RawNode {
    /// The defaults, for `source`.
    pub fn new(source: Vec<SourceUrl>) -> Self {
        RawNode { source, ..RawNode::default() }
    }
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
    /// Set for a node that keeps staged files.
    pub stage: Option<StageConfig>,
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
    /// Warnings printed at start.
    pub warnings: Vec<String>,
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
        let group = self.group.check()?;
        let (group, untold) = match group {
            Some(group) if !group.registry.takes_registrations() => (None, Some(group.registry)),
            group => (group, None),
        };
        if let Some(registry) = &untold {
            warnings.push(format!("--registry {registry} does not register nodes: it is for mounts"));
        }
        if let Some(name) = &self.name {
            check_name("--name", name)?;
        } else if group.is_some() && self.group_port == 0 {
            let text = "this node's name in the group changes with its port at every start, and its blocks \
                        move: give --name, or a fixed --group-port";
            warnings.push(text.to_owned());
        }
        let writes = WritesConfig { squash: self.squash, bucket: self.bucket, stage: false };
        let writes = check_node_writes(self.writable, writes, &sources)?;
        let cache = self.cache.check(host, CachePlace::Here, NODE_FOLDER, &mut warnings)?;
        let stage = self.stage.check(&StageNeeds {
            writes: writes.is_some(),
            sources: &sources,
            has_disks: !cache.dirs.is_empty(),
            group: group.as_ref(),
            other_registry: untold.as_ref(),
        })?;
        let rdma = self.net.wants_rdma();
        let s3 = self.s3.check(&sources, self.writable)?;
        let demand = BudgetDemand {
            total: self.memory.buffer_size.bytes(),
            block: cache.block_size,
            max_write: None,
            fuse_threads: None,
            max_downloads: u64::from(self.under.max_downloads),
            readahead: None,
            processors: host.processors as u64,
            rdma,
            origin: true,
            writes: false,
            s3: s3.is_some(),
        };
        let budget = MemoryBudget::of_host(demand, host, &mut warnings)?;
        let net = self.net.check(self.rdma_port, host, &mut warnings)?;
        let trust = self.trust.check(self.allow_anyone)?;
        warn_unencrypted(&net, &trust, &mut warnings);
        if net.transport == TransportMode::Rdma {
            let text = "--transport rdma applies to mounts, not nodes: this node also serves over TCP, and reads blocks \
                        from other nodes over TCP";
            warnings.push(text.to_owned());
        }
        self.under.check()?;
        let (log, metrics) = self.log.check()?;
        Ok(NodeConfig {
            writes,
            stage,
            s3,
            sources,
            weight: self.weight,
            name: self.name,
            accept: self.yes,
            group,
            port: self.group_port,
            cache,
            under: self.under,
            net,
            trust,
            budget,
            log,
            metrics,
            warnings,
        })
    }
}
