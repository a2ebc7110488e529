//! A volume, for a mount, a gateway or a program: settings and checks. Opens no store and no socket.

use crate::budget::{BudgetDemand, MemoryBudget, RawMemory};
use crate::cache::{CacheConfig, CachePlace, RawCache, reader_folder};
use crate::fuse::FuseConfig;
use crate::group::{GroupConfig, NodeReads, RawGroup};
use crate::host::HostLimits;
use crate::net::{NetConfig, RawNetwork, warn_unencrypted};
use crate::origin::OriginConfig;
use crate::trust::{RawTrust, TrustConfig};
use crate::values::SourceUrl;
use crate::writes::{BucketWrites, WritesConfig};
use spurline_types::AccessTimes;
use spurline_types::fault::Fault;
use std::time::Duration;

/// The source of reads, and the way: through a cache of this process, or from the nodes of a group.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct RawVolume {
    /// Source: s3://BUCKET[/PREFIX], gs://…, az://…, file:///DIR or a plain path
    #[cfg_attr(feature = "clap", arg(value_name = "SOURCE", index = 1, help_heading = None))]
    pub source: SourceUrl,
    /// The memory budget.
    #[cfg_attr(feature = "clap", command(flatten))]
    pub memory: RawMemory,
    /// The cache group; without a registry the volume is read alone.
    #[cfg_attr(feature = "clap", command(flatten))]
    pub group: RawGroup,
    /// How files are read from the nodes of the group.
    #[cfg_attr(feature = "clap", command(flatten))]
    pub reads: NodeReads,
    /// The network.
    #[cfg_attr(feature = "clap", command(flatten))]
    pub net: RawNetwork,
    /// Authentication and encryption.
    #[cfg_attr(feature = "clap", command(flatten))]
    pub trust: RawTrust,
    /// The cache.
    #[cfg_attr(feature = "clap", command(flatten))]
    pub cache: RawCache,
    /// The origin.
    #[cfg_attr(feature = "clap", command(flatten))]
    pub under: OriginConfig,
}

/// A volume, ready to be opened.
#[derive(Debug, Clone)]
pub struct VolumeConfig {
    /// The source of reads.
    pub source: SourceUrl,
    /// This reader's name in handshakes, behind the host's.
    pub reader: String,
    /// Set for a volume that is changed.
    pub writes: Option<WritesConfig>,
    /// Whether reads change access times in a directory that is changed.
    pub access_times: AccessTimes,
    /// The nodes to read from; `None` for a volume that is read alone.
    pub group: Option<GroupConfig>,
    /// How files are read from the nodes (with a registry only).
    pub reads: NodeReads,
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
/// The reader of a volume, perhaps also a writer.
pub(crate) struct VolumeReader<'a> {
    /// See [`VolumeConfig::reader`].
    pub name: String,
    /// The reader's cache is named by this word, if no directory is named.
    pub place: &'a str,
    /// See [`VolumeConfig::metadata_ttl`].
    pub metadata_ttl: Duration,
    /// The FUSE session, if any, which takes a share of the budget.
    pub kernel: Option<&'a FuseConfig>,
    /// The reader serves S3 clients.
    pub s3: bool,
}

impl VolumeReader<'static> {
    /// A program without a mount. It finds its blocks again, whatever the process id.
    fn of_program() -> Self {
        let name = format!("process {}", std::process::id());
        VolumeReader { name, place: "volume", metadata_ttl: Duration::from_secs(1), kernel: None, s3: false }
    }
}

impl RawVolume {
    /// The defaults, for `source`.
    pub fn new(source: SourceUrl) -> Self {
        RawVolume {
            source,
            memory: RawMemory::default(),
            group: RawGroup::default(),
            reads: NodeReads::default(),
            net: RawNetwork::default(),
            trust: RawTrust::default(),
            cache: RawCache::default(),
            under: OriginConfig::default(),
        }
    }

    /// Checks everything that can be checked before the volume is opened.
    ///
    /// # Errors
    /// Wrong values with exit code 2, missing abilities with exit code 3.
    pub fn check(self, host: &HostLimits) -> Result<VolumeConfig, Fault> {
        self.check_for(VolumeReader::of_program(), None, host)
    }

    /// As [`RawVolume::check`], for a volume that is changed: the budget has a term for bytes that were written through nodes
    /// and are not durable yet. Without a registry a directory of this host is not cached.
    ///
    /// # Errors
    /// As [`RawVolume::check`], and for a source that is neither a directory nor a bucket of S3.
    pub fn check_writable(self, writes: WritesConfig, host: &HostLimits) -> Result<VolumeConfig, Fault> {
        self.check_changes(writes.bucket, "writable")?;
        self.check_stage(writes)?;
        self.check_for(VolumeReader::of_program(), Some(writes), host)
    }

    /// As [`RawVolume::check`], for this reader.
    pub(crate) fn check_for(
        self,
        reader: VolumeReader<'_>,
        writes: Option<WritesConfig>,
        host: &HostLimits,
    ) -> Result<VolumeConfig, Fault> {
        let mut warnings = Vec::new();
        let group = self.group.check()?;
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
        let cache = self.cache.check(host, place, &folder, &mut warnings)?;
        if !alone {
            warnings.extend(self.under.unused_with_nodes());
        }
        let demand = BudgetDemand {
            total: self.memory.buffer_size.bytes(),
            block: cache.block_size,
            max_write: reader.kernel.map(|fuse| u64::from(fuse.max_write)),
            fuse_threads: reader.kernel.and_then(|fuse| fuse.threads).map(|n| n as u64),
            max_downloads: u64::from(self.under.max_downloads),
            readahead: reader.kernel.and_then(|fuse| fuse.readahead),
            processors: host.processors as u64,
            rdma: !alone && self.net.wants_rdma(),
            origin: alone || writes.is_some() && self.source.scheme() != "file",
            writes: !alone && writes.is_some(),
            s3: reader.s3,
        };
        let budget = MemoryBudget::of_host(demand, host, &mut warnings)?;
        if alone && self.net.rdma_network.is_some() {
            warnings.push("--rdma-network has no effect: without --registry nothing is read from nodes".to_owned());
        }
        let net = self.net.check(0, host, &mut warnings)?;
        let trust = self.trust.check(false)?;
        warn_unencrypted(&net, &trust, &mut warnings);
        self.reads.check()?;
        self.under.check()?;
        Ok(VolumeConfig {
            source: self.source,
            reader: reader.name,
            writes,
            access_times: AccessTimes::default(),
            group,
            reads: self.reads,
            cache,
            under: self.under,
            net,
            trust,
            budget,
            metadata_ttl: reader.metadata_ttl,
            warnings,
        })
    }

    /// Checks that there may be nodes which keep the staged files of a process that makes changes.
    pub(crate) fn check_stage(&self, writes: WritesConfig) -> Result<(), Fault> {
        if !writes.stage {
            return Ok(());
        }
        if self.source.scheme() == "file" {
            return Err(Fault::usage(
                format!("--stage: {} is a directory, and only files of a bucket are staged", self.source),
                "leave --stage out",
            ));
        }
        if self.group.registry.is_none() {
            return Err(Fault::usage(
                "--stage without --registry: staged files need two nodes, and this process runs alone",
                "name the nodes with --registry coordinator://HOST:PORT or etcd://HOST:PORT, or leave --stage out",
            ));
        }
        Ok(())
    }

    /// Checks that the source of a process that makes changes can be changed; `flag` requests changes.
    pub(crate) fn check_changes(&self, bucket: BucketWrites, flag: &str) -> Result<(), Fault> {
        match self.source.scheme() {
            "file" => Ok(()),
            "s3" if self.group.registry.is_none() => Ok(()),
            "s3" if bucket == BucketWrites::default() => Ok(()),
            "s3" => Err(Fault::usage(
                "--object-attrs, --last-writer-wins, --allow-unguarded-writes, --rename-limit and --abort-uploads-after have no effect in a mount through nodes",
                "give them to the nodes, which change the bucket (spurline node --writable), and leave them out here",
            )),
            _ => Err(Fault::usage(
                format!(
                    "{flag}: {} is neither a directory nor an S3 bucket, and only those can be changed",
                    self.source
                ),
                format!("leave {flag} out"),
            )),
        }
    }
}
