//! The configuration of mounts, nodes and coordinators, in three steps: raw words ([`raw`]), a checked configuration
//! ([`checked`]), and derived sizes ([`budget`]). Opens no device, socket or store.
#![forbid(unsafe_code)]

pub mod budget;
pub mod cache;
pub mod checked;
pub mod fuse;
pub mod host;
pub mod raw;
pub mod s3;
pub mod trust;
pub mod values;

pub use budget::{BudgetTerm, MemoryBudget};
pub use cache::CacheConfig;
pub use checked::{
    CoordinatorConfig, GroupConfig, LogConfig, MetricsConfig, MountConfig, NetConfig, NodeConfig, OriginConfig,
    RdmaConfig, VolumeConfig,
};
pub use fuse::{FuseConfig, MOUNT_OPTIONS, WritesConfig};
pub use host::HostLimits;
pub use raw::{
    RawBucketWrites, RawCache, RawCoordinator, RawFuse, RawGroup, RawLog, RawMount, RawNetwork, RawNode, RawOrigin,
    RawTrust, RawVolume,
};
pub use s3::{GatewayConfig, NamedBucket, RawGateway, RawS3, S3Config};
pub use spurline_membership::url::RegistryUrl as Registry;
pub use spurline_types::fault::{ExitKind, Fault};
pub use spurline_types::host_port::HostPort;
pub use trust::{TlsConfig, TrustConfig};
pub use values::{CacheSize, FuseIo, IorpcMode, LogFormat, ReplicaCounts, SourceUrl, TransportMode};
