//! The cache group in the documents of `status`: the registry from the view of a mount or a node, and the nodes of the group.

use serde::{Deserialize, Serialize};

/// The state of a registry that does not answer.
pub const REGISTRY_LOST: &str = "lost";

/// A registry, from the view of a mount or a node.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RegistryStatus {
    /// The URL.
    pub registry: String,
    /// `up`, or [`REGISTRY_LOST`].
    pub state: String,
    /// Seconds since the state began; `None` where the begin is unknown.
    pub for_seconds: Option<u64>,
    /// Why the registry is lost.
    pub reason: Option<String>,
}

/// The group that a mount follows.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct FollowedGroup {
    /// The registry.
    #[serde(flatten)]
    pub registry: RegistryStatus,
    /// The nodes, also absent nodes.
    #[serde(default)]
    pub members: Vec<FollowedNode>,
}

/// The group that a node is registered in.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct GroupRegistration {
    /// The group's name.
    #[serde(default)]
    pub name: String,
    /// The registry.
    #[serde(flatten)]
    pub registry: RegistryStatus,
}

/// A node of a group, as named by the registry.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GroupNode {
    /// The name.
    pub name: String,
    /// The TCP addresses, the best first.
    pub addresses: Vec<String>,
    /// The share of the group's blocks relative to other nodes; 0 gets none.
    pub weight: u32,
    /// The zone; empty when unknown.
    pub zone: String,
}

/// A group at the coordinator.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CoordinatedGroup {
    /// The name.
    pub name: String,
    /// The nodes.
    pub nodes: Vec<GroupNode>,
}

/// A node of the group that a mount follows.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct FollowedNode {
    /// The node.
    #[serde(flatten)]
    pub node: GroupNode,
    /// `up`, or `away` when the registry no longer lists the node.
    #[serde(default)]
    pub state: String,
    /// Seconds since the state began.
    #[serde(default)]
    pub for_seconds: u64,
}

impl RegistryStatus {
    /// Whether the registry does not answer.
    pub fn is_lost(&self) -> bool {
        self.state == REGISTRY_LOST
    }
}

impl From<&spurline_types::Member> for GroupNode {
    fn from(member: &spurline_types::Member) -> Self {
        GroupNode {
            name: member.name.clone(),
            addresses: member.addresses.clone(),
            weight: member.weight,
            zone: member.zone.clone(),
        }
    }
}
