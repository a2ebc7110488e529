//! The configuration of mounts, nodes, gateways and coordinators, in three steps: settings (`Raw…`, each described once, with
//! flag, help text and default), a checked configuration (`…Config`), and derived sizes ([`budget`]). A module has the settings,
//! the checks and the checked form of a subject. Opens no device, socket or store.
#![forbid(unsafe_code)]

#[macro_use]
mod settings;

pub mod budget;
pub mod cache;
pub mod coordinator;
pub mod fuse;
pub mod gateway;
pub mod group;
pub mod host;
pub mod log;
pub mod mount;
pub mod net;
pub mod node;
pub mod origin;
pub mod s3;
pub mod stage;
pub mod trust;
pub mod values;
pub mod volume;
pub mod writes;

pub use budget::{BudgetTerm, MemoryBudget, RawMemory};
pub use cache::{CacheConfig, RawCache, default_cache_dir};
pub use coordinator::{CoordinatorConfig, RawCoordinator};
pub use fuse::{FuseConfig, MOUNT_OPTIONS, RawFuse};
pub use gateway::{GatewayConfig, RawGateway};
pub use group::{DEFAULT_GROUP, GroupConfig, NodeReads, RawGroup};
pub use host::HostLimits;
pub use log::{DEFAULT_METRICS, LogConfig, MetricsConfig, RawLog};
pub use mount::{MountConfig, RawMount};
pub use net::{NetConfig, RawNetwork, RdmaConfig};
pub use node::{NodeConfig, RawNode};
pub use origin::OriginConfig;
pub use s3::{NamedBucket, RawS3, S3Config};
pub use spurline_membership::url::RegistryUrl as Registry;
pub use spurline_types::fault::{ExitKind, Fault};
pub use spurline_types::host_port::HostPort;
pub use stage::{RawStage, StageConfig};
pub use trust::{RawTrust, TlsConfig, TrustConfig};
pub use values::{CacheSize, FuseIo, IorpcMode, LogFormat, ReplicaCounts, SourceUrl, TransportMode};
pub use volume::{RawVolume, VolumeConfig};
pub use writes::{BucketWrites, WritesConfig};
