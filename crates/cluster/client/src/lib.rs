//! A cache group as a volume: chooses the node for each request and handles nodes that do not answer. It uses
//! channels without knowing the transport, and holds no credentials and no metadata.
#![forbid(unsafe_code)]

mod heartbeat;
mod hedge;
mod hot_spread;
mod latency;
mod members;
mod node_calls;
mod node_rails;
mod path_monitor;
mod peer;
mod peer_fetch;
mod peer_paths;
mod pipeline;
pub mod placement;
mod read_plan;
mod reads;
mod remote;
mod split;
mod store;
mod warm;
mod writes;

pub use latency::LatencyTracker;
pub use members::{GroupMembers, MakePeer, MembersSnapshot};
pub use node_calls::{NodeCallFailure, NodeCalls, NodeReply};
pub use node_rails::{NodeRails, RailDialer, RailsConfig};
pub use path_monitor::PathMonitor;
pub use peer::{GroupPeer, RequestPatience};
pub use peer_fetch::GroupPeerFetch;
pub use peer_paths::DataPath;
pub use remote::{GroupVolume, GroupVolumeConfig};
pub use store::RemoteStore;
pub use warm::ObjectExtent;
pub use writes::{GroupPathLocks, GroupWrites};
