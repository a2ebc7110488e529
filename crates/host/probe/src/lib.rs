//! Probes between two hosts, point to point: is the other end there, how much goes through, how long does it take, at
//! what cost, and what to make of it. It deliberately knows no command line, no cache and no cluster.
#![deny(unsafe_code)]

pub mod client;
pub mod drive;
pub mod frame;
pub mod judge;
pub mod lane;
pub mod link;
pub mod measure;
pub mod message;
pub mod paths;
mod rdma;
pub mod server;
mod tcp;
mod tcp_info;

/// The port `net serve` listens on.
pub const DEFAULT_PORT: u16 = 18600;

/// This host's name.
fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
