//! Point-to-point probes between two hosts: reachability, bandwidth, latency, the cost, and a verdict. Knows no command line, no
//! cache and no cluster.
#![deny(unsafe_code)]

pub mod client;
pub mod drive;
pub mod frame;
pub mod judge;
pub mod link;
pub mod measure;
pub mod message;
pub mod paths;
mod proof;
mod rdma;
pub mod server;
pub mod stream;
mod tcp;
mod tcp_info;

/// Default port of `net serve`.
pub const DEFAULT_PORT: u16 = 18600;

/// This host's name.
fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
