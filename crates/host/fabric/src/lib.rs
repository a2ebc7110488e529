//! A host's fabric as shown by the kernel: RDMA devices, ports, network interfaces, problems and remedies. Everything is read
//! below a root: `/`, a folder with the same layout, or files collected elsewhere. Sends no packet and knows no transport.
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

pub use change::HostChange;
pub use check::peer::interface_pairs;
pub use device::read_devices as devices;
pub use device::{
    DevicePort, GidType, LinkLayer, PciFunction, PhysState, PortGid, PortRate, PortState, RdmaDevice, port_state,
};
pub use doctor::{DoctorOptions, RailObstacle, RouteTrial, SmAnswer, examine};
pub use finding::{HostFinding, Severity};
pub use host::{HostFacts, collect_facts};
pub use interface::read_interfaces as interfaces;
pub use interface::{IpoibMode, NetInterface, operstate};
pub use machine::MachineFacts;
pub use model::DeviceModel;
pub use netlink::{InterfaceAddress, IpRoute, ManagementDevice, NetlinkFacts, PfcState, RdmaPort};
pub use tree::{HostTree, TreeEntry, UnreadFile};
