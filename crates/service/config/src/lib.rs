//! The configuration of mounts, nodes and coordinators, in three steps: raw words ([`args`], [`file`]), a checked
//! configuration ([`checked`]), and derived sizes ([`budget`]). It opens no device, socket or store.
#![forbid(unsafe_code)]

pub mod budget;
pub mod checked;
pub mod fuse;
pub mod host;
pub mod raw;
pub mod trust;
pub mod words;

pub use budget::{Budget, Term};
pub use checked::{
    CacheConfig, CoordinatorConfig, GroupConfig, LogConfig, MetricsConfig, MountConfig, NetConfig, NodeConfig,
    RdmaConfig, UnderConfig, VolumeConfig,
};
pub use fuse::{FuseConfig, MOUNT_OPTIONS};
pub use host::Host;
pub use raw::{
    RawCache, RawCoordinator, RawFuse, RawGroup, RawLog, RawMount, RawNetwork, RawNode, RawOrigin, RawTrust, RawVolume,
};
pub use spurline_membership::url::RegistryUrl as Registry;
pub use spurline_types::fault::{ExitKind, Fault};
pub use spurline_types::host_port::HostPort;
pub use trust::{TlsConfig, TrustConfig};
pub use words::{CacheSize, FuseIo, IorpcMode, LogFormat, Replicas, Source, Transport};
