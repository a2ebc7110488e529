//! A cache node as a group knows it. It knows neither how nodes are found nor which blocks they hold.

/// One cache node of a group.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Member {
    /// The name that never changes for this node, not by a restart nor by a new address: its place is decided by it.
    pub name: String,
    /// Which process it is: the number its `Welcome` tells, or 0 while that is not known.
    pub instance: u64,
    /// Where it listens over TCP, `HOST:PORT`, best first.
    pub addresses: Vec<String>,
    /// Its share of the group's blocks relative to the others; 0 gets none.
    pub weight: u32,
    /// What it shares with the readers near it: a rack, a room, a cloud zone. Empty when it was not told.
    pub zone: String,
}

impl Member {
    /// A node known by nothing but the address it was configured with.
    pub fn at(address: &str, weight: u32) -> Self {
        Member {
            name: address.to_owned(),
            instance: 0,
            addresses: vec![address.to_owned()],
            weight,
            zone: String::new(),
        }
    }
}
