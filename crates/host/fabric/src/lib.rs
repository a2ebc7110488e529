//! The fabric as a host's kernel shows it: RDMA devices, ports, network interfaces; what is wrong with them, and what
//! would put it right. Everything is read below a root, be it `/`, a folder laid out like it, or files collected
//! elsewhere. It sends no packet and knows no transport.
#![forbid(unsafe_code)]

pub mod address;
pub mod archive;
mod change;
mod check;
mod device;
pub mod doctor;
pub mod finding;
pub mod fix;
mod host;
mod interface;
mod machine;
mod model;
mod netlink;
mod persist;
mod tree;

pub use change::Change;
pub use check::peer::pairs;
pub use device::read_all as devices;
pub use device::{Device, Gid, GidType, LinkLayer, Pci, PhysState, Port, PortState, Rate, port_state};
pub use doctor::{Ask, Obstacle, SmAnswer, Trial, examine};
pub use finding::{Finding, Severity};
pub use host::{Host, collect};
pub use interface::read_all as interfaces;
pub use interface::{Interface, IpoibMode, operstate};
pub use machine::Machine;
pub use model::Model;
pub use netlink::{Address, Netlink, Pfc, RdmaPort, Route};
pub use tree::{Entry, LeftOut, Tree};
