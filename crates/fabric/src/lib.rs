//! The fabric as a host's kernel shows it: RDMA devices, ports, network interfaces. Everything is read below a root,
//! be it `/`, a folder laid out like it, or files collected elsewhere. It sends no packet and knows no transport.
#![forbid(unsafe_code)]

pub mod address;
pub mod archive;
mod device;
mod host;
mod interface;
mod model;
mod netlink;
mod tree;

pub use device::{Device, Gid, GidType, LinkLayer, Pci, PhysState, Port, PortState, Rate};
pub use host::{Host, collect};
pub use interface::{Interface, IpoibMode};
pub use model::Model;
pub use netlink::{Address, Netlink, Pfc, RdmaPort, Route};
pub use tree::{Entry, LeftOut, Tree};
