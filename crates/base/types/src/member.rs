//! A cache node as a member of a group. Knows neither how nodes are found nor which blocks a node holds.

/// A cache node of a group.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Member {
    /// A name that never changes for this node, not by a restart nor by a new address: the name determines the node's share.
    pub name: String,
    /// The number of the process from the `Welcome`, or 0 while unknown.
    pub instance: u64,
    /// The TCP addresses, `HOST:PORT`, best first.
    pub addresses: Vec<String>,
    /// The share of the group's blocks relative to other members; 0 gets none.
    pub weight: u32,
    /// The zone shared with readers that are near: a rack, a room, a cloud zone. Empty when unknown.
    pub zone: String,
}

impl Member {
    /// A node of which only the configured address is known.
    pub fn from_address(address: &str, weight: u32) -> Self {
        Member {
            name: address.to_owned(),
            instance: 0,
            addresses: vec![address.to_owned()],
            weight,
            zone: String::new(),
        }
    }
}
