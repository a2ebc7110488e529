//! The document of `status`: identity and state of a mount, a node or a coordinator.

use super::{CoordinatedGroup, ExportStatus, FollowedGroup, GroupRegistration, MountWrites, NodeWrites, PeerStatus};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::collections::BTreeMap;

/// The state of a process that works as it should.
pub const STATE_UP: &str = "up";
/// The value of [`MountStatus::fuse`] before the kernel has answered.
pub const FUSE_STARTING: &str = "starting";
/// The state of a cache disk that works as it should.
pub const DISK_NORMAL: &str = "normal";

/// The status of a process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProcessStatus {
    /// What depends on the kind of process.
    #[serde(flatten)]
    pub role: ProcessRole,
    /// Its process number.
    #[serde(default)]
    pub pid: Option<u32>,
    /// The address of its metrics page; `None` without one.
    #[serde(default)]
    pub metrics: Option<String>,
}

/// The kind of a process, with the status of that kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum ProcessRole {
    /// A mount.
    Mount(MountStatus),
    /// A cache node.
    Node(NodeStatus),
    /// A coordinator.
    Coordinator(CoordinatorStatus),
    /// A process of another kind, such as the device plugin: its status is a document of its own.
    #[serde(other)]
    Other,
}

/// The answer of a node to the processes that query it over its group port.
#[derive(Debug, Deserialize)]
pub struct NodeDescription {
    /// Its status.
    pub status: ProcessStatus,
    /// Its counters.
    pub stats: Stats,
}

/// The status of a mount.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct MountStatus {
    /// Its version.
    pub version: String,
    /// [`STATE_UP`], or what is wrong with its origin.
    pub state: String,
    /// Its source.
    pub source: String,
    /// Where it is mounted.
    pub mountpoint: String,
    /// How it talks to the kernel, or [`FUSE_STARTING`].
    pub fuse: String,
    /// Its writing side.
    pub writes: MountWrites,
    /// Its cache disks.
    pub disks: Vec<CacheDiskStatus>,
    /// Its nodes.
    pub peers: Vec<PeerStatus>,
    /// Its cache group; `None` where it follows no registry.
    pub group: Option<FollowedGroup>,
    /// Its export by the kernel's NFS server; `None` without one.
    pub export: Option<ExportStatus>,
}

/// The status of a cache node.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeStatus {
    /// Its version.
    pub version: String,
    /// Its name.
    pub name: String,
    /// Addresses at which it serves over TCP.
    pub addresses: Vec<String>,
    /// `rdma` and `tcp`, the preferred one first.
    pub transports: Vec<String>,
    /// Its RDMA rails.
    pub rails: Vec<RailStatus>,
    /// Its share of the group's blocks relative to other nodes; 0 gets none.
    pub weight: u64,
    /// Its registration; `None` where it registers nowhere.
    pub group: Option<GroupRegistration>,
    /// Sources that it serves.
    pub sources: Vec<String>,
    /// Sources that mounts have opened.
    pub volumes: Vec<String>,
    /// Bytes of a block.
    pub block_size: u64,
    /// Its writing side.
    pub writes: NodeWrites,
    /// Its cache disks.
    pub disks: Vec<CacheDiskStatus>,
    /// Sources that it can't fetch from now, each with the error.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub origin_errors: BTreeMap<String, String>,
}

/// The status of a coordinator.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CoordinatorStatus {
    /// Its version.
    pub version: String,
    /// Addresses at which it serves.
    pub addresses: Vec<String>,
    /// Where it shares jobs with other coordinators; `None` where it owns its jobs.
    pub job_store: Option<String>,
    /// The groups that it keeps.
    pub groups: Vec<CoordinatedGroup>,
}

/// A cache disk.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CacheDiskStatus {
    /// Its directory.
    pub path: String,
    /// [`DISK_NORMAL`], or the state that it is in.
    pub state: String,
    /// When the state began, in seconds since 1970.
    pub since: u64,
    /// Why it is not normal; empty if it is.
    pub reason: String,
    /// Bytes of blocks on it.
    pub used_bytes: u64,
    /// Bytes that it may hold.
    pub capacity_bytes: u64,
    /// Bytes free on its file system.
    pub free_bytes: u64,
    /// Blocks on it.
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
    /// When it is no description of a node.
    pub fn read(answer: &[u8]) -> Result<Option<NodeDescription>> {
        serde_json::from_slice(answer)
            .map_err(|error| Error::new(ErrorKind::Protocol, format!("the node's answer is malformed: {error}")))
    }
}

impl ProcessStatus {
    /// Reads a status document.
    ///
    /// # Errors
    /// When it is no status of a process.
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

    /// The state that the process reports; [`STATE_UP`] of one that reports none.
    pub fn state(&self) -> &str {
        self.mount().map(|mount| mount.state.as_str()).filter(|state| !state.is_empty()).unwrap_or(STATE_UP)
    }

    /// The addresses of a node or a coordinator.
    pub fn addresses(&self) -> &[String] {
        match &self.role {
            ProcessRole::Node(node) => &node.addresses,
            ProcessRole::Coordinator(coordinator) => &coordinator.addresses,
            ProcessRole::Mount(_) | ProcessRole::Other => &[],
        }
    }

    /// The cache disks of a mount or a node.
    pub fn disks(&self) -> &[CacheDiskStatus] {
        match &self.role {
            ProcessRole::Mount(mount) => &mount.disks,
            ProcessRole::Node(node) => &node.disks,
            ProcessRole::Coordinator(_) | ProcessRole::Other => &[],
        }
    }
}
