//! The document of `status`: identity and state of a mount, a node, a gateway or a coordinator.

use super::{CoordinatedGroup, ExportStatus, FollowedGroup, GroupRegistration, MountWrites, NodeWrites, PeerStatus};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::collections::BTreeMap;

/// The state of a process that works.
pub const STATE_UP: &str = "up";
/// The value of [`MountStatus::fuse`] before the kernel has answered.
pub const FUSE_STARTING: &str = "starting";
/// The state of a cache disk that works.
pub const DISK_NORMAL: &str = "normal";

/// The status of a process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProcessStatus {
    /// What depends on the kind of process.
    #[serde(flatten)]
    pub role: ProcessRole,
    /// The process number.
    #[serde(default)]
    pub pid: Option<u32>,
    /// The address of the metrics page; `None` without a page.
    #[serde(default)]
    pub metrics: Option<String>,
}

/// The kind of a process, with the status of that kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
#[expect(clippy::large_enum_variant, reason = "there is one for each process that is asked")]
pub enum ProcessRole {
    /// A mount.
    Mount(MountStatus),
    /// A cache node.
    Node(NodeStatus),
    /// A coordinator.
    Coordinator(CoordinatorStatus),
    /// A gateway for S3 clients.
    Gateway(GatewayStatus),
    /// A process of another kind, such as the device plugin: with a different status document.
    #[serde(other)]
    Other,
}

/// The answer of a node to the processes that query the node over the group port.
#[derive(Debug, Deserialize)]
pub struct NodeDescription {
    /// The status.
    pub status: ProcessStatus,
    /// The counters.
    pub stats: Stats,
}

/// The status of a mount.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct MountStatus {
    /// The version.
    pub version: String,
    /// [`STATE_UP`], or the fault of the origin.
    pub state: String,
    /// The source.
    pub source: String,
    /// The mountpoint.
    pub mountpoint: String,
    /// The channel to the kernel, or [`FUSE_STARTING`].
    pub fuse: String,
    /// The writing side.
    pub writes: MountWrites,
    /// The cache disks.
    pub disks: Vec<CacheDiskStatus>,
    /// The nodes.
    pub peers: Vec<PeerStatus>,
    /// The cache group; `None` where the mount follows no registry.
    pub group: Option<FollowedGroup>,
    /// The export by the kernel's NFS server; `None` without an export.
    pub export: Option<ExportStatus>,
    /// The keeper; `None` without `--recover`.
    pub keeper: Option<Box<KeeperStatus>>,
    /// Sources that refuse all requests of this process now, each with the error.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub origin_errors: BTreeMap<String, String>,
}

/// The keeper of a mount, which starts the mount's process again.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct KeeperStatus {
    /// The process number of the keeper.
    pub pid: u32,
    /// Whether the keeper lives. Without a keeper, the end of the mount's process is the end of the mount.
    pub alive: bool,
    /// Processes that have served the mount before.
    pub restarts: u64,
    /// Why the process before ended; empty at first.
    pub cause: String,
    /// How long programs waited for this process, in milliseconds.
    pub pause_ms: u64,
    /// Memory of the kept state.
    pub state_bytes: u64,
    /// Inodes and open files that are not kept, for want of room.
    pub not_kept: u64,
}

/// The status of a cache node.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeStatus {
    /// The version.
    pub version: String,
    /// The name.
    pub name: String,
    /// Addresses of the service over TCP.
    pub addresses: Vec<String>,
    /// `rdma` and `tcp`, the preferred transport first.
    pub transports: Vec<String>,
    /// The RDMA rails.
    pub rails: Vec<RailStatus>,
    /// The share of the group's blocks relative to other nodes; 0 gets none.
    pub weight: u64,
    /// The registration; `None` without a registration.
    pub group: Option<GroupRegistration>,
    /// Served sources.
    pub sources: Vec<String>,
    /// Sources that mounts have opened.
    pub volumes: Vec<String>,
    /// Bytes of a block.
    pub block_size: u64,
    /// The writing side.
    pub writes: NodeWrites,
    /// The cache disks.
    pub disks: Vec<CacheDiskStatus>,
    /// Sources from which the node can't fetch now, each with the error.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub origin_errors: BTreeMap<String, String>,
}

/// The status of a coordinator.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CoordinatorStatus {
    /// The version.
    pub version: String,
    /// Addresses of the service.
    pub addresses: Vec<String>,
    /// The store of jobs shared with other coordinators; `None` where the coordinator owns the jobs.
    pub job_store: Option<String>,
    /// The groups.
    pub groups: Vec<CoordinatedGroup>,
}

/// The status of a gateway.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GatewayStatus {
    /// The version.
    pub version: String,
    /// [`STATE_UP`], or the fault of the origin.
    pub state: String,
    /// The source.
    pub source: String,
    /// The address of the endpoint.
    pub address: String,
    /// The bucket's name.
    pub bucket: String,
    /// Whether the gateway takes changes.
    pub writable: bool,
    /// The cache disks.
    pub disks: Vec<CacheDiskStatus>,
    /// The nodes.
    pub peers: Vec<PeerStatus>,
    /// Sources that refuse all requests of this process now, each with the error.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub origin_errors: BTreeMap<String, String>,
}

/// A cache disk.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CacheDiskStatus {
    /// The directory.
    pub path: String,
    /// [`DISK_NORMAL`], or another state.
    pub state: String,
    /// When the state began, in seconds since 1970.
    pub since: u64,
    /// The reason of another state than normal, or empty.
    pub reason: String,
    /// Bytes of blocks.
    pub used_bytes: u64,
    /// Bytes that the disk may hold.
    pub capacity_bytes: u64,
    /// Bytes free on the file system.
    pub free_bytes: u64,
    /// Number of blocks.
    pub blocks: u64,
}

/// An RDMA rail of a node.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RailStatus {
    /// The RDMA device.
    pub device: String,
    /// The NUMA node of the device; `None` where the kernel knows none.
    pub numa_node: Option<u32>,
    /// The network interface.
    pub interface: String,
    /// The address and port for RDMA connections.
    pub address: String,
    /// The link type.
    pub link: String,
    /// The speed of the link in megabits per second.
    pub speed_mbit: u32,
}

impl NodeDescription {
    /// The answer with this status and these counters; `None` of a node that starts.
    pub fn write(description: Option<(&ProcessStatus, &Stats)>) -> Vec<u8> {
        let answer = description.map(|(status, stats)| json!({ "status": status, "stats": stats }));
        json!(answer).to_string().into_bytes()
    }

    /// Reads an answer; `None` of a node that starts.
    ///
    /// # Errors
    /// When the answer is no description of a node.
    pub fn read(answer: &[u8]) -> Result<Option<NodeDescription>> {
        serde_json::from_slice(answer)
            .map_err(|error| Error::new(ErrorKind::Protocol, format!("the node's answer is malformed: {error}")))
    }
}

impl ProcessStatus {
    /// Reads a status document.
    ///
    /// # Errors
    /// When the document is no status of a process.
    pub fn from_json(document: &Value) -> Result<Self> {
        Self::deserialize(document)
            .map_err(|error| Error::new(ErrorKind::Protocol, format!("the status is malformed: {error}")))
    }

    /// The document.
    pub fn to_json(&self) -> Value {
        serde_json::to_value(self).unwrap_or_default()
    }

    /// The mount's part, of a mount.
    pub fn mount(&self) -> Option<&MountStatus> {
        if let ProcessRole::Mount(mount) = &self.role { Some(mount) } else { None }
    }

    /// Whether this is a mount that the kernel has not answered yet.
    pub fn is_starting(&self) -> bool {
        self.mount().is_some_and(|mount| mount.fuse == FUSE_STARTING)
    }

    /// The state that the process reports; [`STATE_UP`] without a report.
    pub fn state(&self) -> &str {
        let reported = match &self.role {
            ProcessRole::Mount(mount) => &mount.state,
            ProcessRole::Gateway(gateway) => &gateway.state,
            _ => "",
        };
        if reported.is_empty() { STATE_UP } else { reported }
    }

    /// The addresses of a node, a gateway or a coordinator.
    pub fn addresses(&self) -> &[String] {
        match &self.role {
            ProcessRole::Node(node) => &node.addresses,
            ProcessRole::Coordinator(coordinator) => &coordinator.addresses,
            ProcessRole::Gateway(gateway) => std::slice::from_ref(&gateway.address),
            ProcessRole::Mount(_) | ProcessRole::Other => &[],
        }
    }

    /// The cache disks of a mount, a node or a gateway.
    pub fn disks(&self) -> &[CacheDiskStatus] {
        match &self.role {
            ProcessRole::Mount(mount) => &mount.disks,
            ProcessRole::Node(node) => &node.disks,
            ProcessRole::Gateway(gateway) => &gateway.disks,
            ProcessRole::Coordinator(_) | ProcessRole::Other => &[],
        }
    }
}
