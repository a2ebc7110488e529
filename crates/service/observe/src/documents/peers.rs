//! The nodes of a mount in the document of `status`: states, transports, paths and local addresses.

use serde::{Deserialize, Serialize};

/// The state of a node that no request was sent to.
pub const PEER_UNKNOWN: &str = "unknown";
/// The state of a node that carries data or can carry data, and of a path that carries data.
pub const PEER_UP: &str = "up";
/// The state of a node that can't be reached.
pub const PEER_DOWN: &str = "down";

/// A node of a mount.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PeerStatus {
    /// The node's name.
    #[serde(default)]
    pub address: String,
    /// [`PEER_UNKNOWN`], [`PEER_UP`] or [`PEER_DOWN`].
    #[serde(default)]
    pub state: String,
    /// Open connections.
    #[serde(default)]
    pub connections: u64,
    /// Deprioritised: other nodes come first.
    #[serde(default)]
    pub slow: bool,
    /// Local ends of the connections that carry data now.
    #[serde(default)]
    pub local: Vec<LocalEnd>,
    /// RDMA paths.
    #[serde(default)]
    pub paths: Vec<PathStatus>,
    /// `None` in a large group for a node that was not needed yet.
    #[serde(flatten)]
    pub used: Option<PeerUse>,
}

/// A node of a mount that was needed.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PeerUse {
    /// Why the peer is down; empty otherwise.
    pub reason: String,
    /// The transport that carries data now: `rdma`, `tcp` or `none`.
    pub transport: String,
    /// Why there is no RDMA path.
    #[serde(default)]
    pub no_paths: Option<String>,
}

/// A path to a node.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PathStatus {
    /// The name: the rails of both ends.
    pub path: String,
    /// The transport.
    pub transport: String,
    /// The speed in megabits per second.
    pub speed_mbit: u32,
    /// [`PEER_UP`], or the phase.
    pub state: String,
    /// Seconds since the phase began.
    pub for_seconds: u64,
    /// Channels on the path.
    pub channels: u64,
    /// Requests in flight on the path.
    pub in_flight: u64,
    /// Seconds since the last bytes arrived; `None` without data in flight.
    pub silent_seconds: Option<u64>,
    /// Failures while carrying data.
    pub failovers: u64,
    /// Recoveries after such a failure.
    pub failbacks: u64,
    /// The reason of the last failure.
    pub last_failure: Option<String>,
    /// Local ends of the channels.
    pub local: Vec<LocalEnd>,
    /// Compared with the speed before the last failure; `None` while unknown.
    pub speed_check: Option<PathSpeedCheck>,
}

/// The speed of a path before and after the last failure.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PathSpeedCheck {
    /// Bytes per second before the failure.
    pub before_bytes_per_s: u64,
    /// Bytes per second since.
    pub after_bytes_per_s: u64,
    /// Whether the path is slower.
    pub slower: bool,
}

/// The local end of a connection.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LocalEnd {
    /// The address, without a port.
    pub address: String,
    /// The interface that carries the packets; `None` where unknown.
    pub interface: Option<String>,
}

impl PeerStatus {
    /// Why the node is down; empty if that is unknown.
    pub fn reason(&self) -> &str {
        self.used.as_ref().map_or("", |used| &used.reason)
    }
}
