//! A cache node as a member of a group. It knows neither how nodes are found nor which blocks they hold.

/// One cache node of a group.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Member {
    /// A name that never changes for this node, not by a restart nor by a new address: it determines the node's
    /// share.
    pub name: String,
    /// The number of its process from its `Welcome`, or 0 while unknown.
    pub instance: u64,
    /// Its TCP addresses, `HOST:PORT`, best first.
    pub addresses: Vec<String>,
    /// Its share of the group's blocks relative to the others; 0 gets none.
    pub weight: u32,
    /// The zone that it shares with readers near it: a rack, a room, a cloud zone. Empty when unknown.
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
