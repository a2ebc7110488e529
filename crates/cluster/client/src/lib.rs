//! A cache group as a volume: chooses the node for each request and handles nodes that do not answer. It uses
//! channels without knowing the transport, and holds no credentials and no metadata.
#![forbid(unsafe_code)]

mod heartbeat;
mod hedge;
mod hot_runs;
mod latency;
mod members;
mod path_monitor;
mod paths;
mod peer;
mod peer_fetch;
mod pipeline;
pub mod placement;
mod read_plan;
mod reads;
mod remote;
mod split;
mod warm;
mod writes;

pub use latency::LatencyTracker;
pub use members::{GroupMembers, MakePeer, MembersSnapshot};
pub use path_monitor::PathMonitor;
pub use paths::{NodePaths, PathsConfig, RailDialer};
pub use peer::{GroupPeer, RequestPatience};
pub use peer_fetch::GroupPeerFetch;
pub use remote::{GroupVolume, GroupVolumeConfig};
pub use warm::ObjectExtent;
pub use writes::{GroupWrites, WriteLosses};
