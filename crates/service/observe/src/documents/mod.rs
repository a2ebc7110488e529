//! The JSON documents that describe a process, as types: written by mounts, nodes and coordinators, and read by the program, the
//! CSI driver and the runtime. Unknown keys are ignored, and missing keys have default values, so that processes of different
//! versions can be queried. The counters of `stats` are [`spurline_types::Stats`]. Knows no service.

mod export;
mod group;
mod info;
mod peers;
mod status;
mod writes;

pub use export::ExportStatus;
pub use group::{
    CoordinatedGroup, FollowedGroup, FollowedNode, GroupNode, GroupRegistration, REGISTRY_LOST, RegistryStatus,
};
pub use info::{FileReads, InfoDocument};
pub use peers::{LocalEnd, PEER_DOWN, PEER_UNKNOWN, PEER_UP, PathSpeedCheck, PathStatus, PeerStatus, PeerUse};
pub use spurline_volume::info::{BlockCounts, BlockRun, FileInfo, FolderRule};
pub use status::{
    CacheDiskStatus, CoordinatorStatus, DISK_NORMAL, FUSE_STARTING, GatewayStatus, KeeperStatus, MountStatus,
    NodeDescription, NodeStatus, ProcessRole, ProcessStatus, RailStatus, STATE_UP,
};
pub use writes::{
    FileByteCount, LOCKS_OF_GROUP, LOCKS_OF_MOUNT, LOCKS_OF_SOURCE, MountWrites, NodeWrites, SourceAbilities,
    WritesBehind,
};
