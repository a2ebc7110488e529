//! Network interfaces, from `/sys/class/net`. Judges nothing.

use crate::device::PciFunction;
use crate::tree::{HostTree, parse_number};
use serde::{Deserialize, Serialize, Serializer};
use std::net::IpAddr;

const NET_CLASS_DIR: &str = "sys/class/net";

/// A network interface.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct NetInterface {
    /// The name.
    #[serde(rename = "interface")]
    pub name: String,
    /// Hardware type: 1 Ethernet, 32 IPoIB, 772 loopback.
    pub hardware: Option<u32>,
    /// The kind: `vlan`, `bond`, `bridge`, `tun`, or that of the device.
    pub kind: Option<String>,
    /// The kernel's operational state: `up`, `down`, `lowerlayerdown`, `unknown`.
    pub operstate: Option<String>,
    /// Whether administratively up.
    pub is_up: bool,
    /// Whether there is a carrier; `None` while the interface is down.
    pub carrier: Option<bool>,
    /// MTU in bytes.
    pub mtu: Option<u32>,
    /// The highest MTU where known: from netlink, or from the IPoIB mode.
    pub max_mtu: Option<u32>,
    /// The addresses, with prefix lengths.
    #[serde(serialize_with = "as_text")]
    pub addresses: Vec<(IpAddr, u8)>,
    /// VLAN number.
    pub vlan: Option<u16>,
    /// Whether the lower interface is in another network namespace.
    pub lower_is_elsewhere: bool,
    /// The RDMA device and port behind.
    pub rdma: Option<(String, u32)>,
    /// Megabits per second, where known.
    pub speed_mbps: Option<u32>,
    /// IPoIB mode.
    pub ipoib_mode: Option<IpoibMode>,
    /// Hardware address.
    pub address: Option<String>,
    /// The PCI function.
    pub pci: Option<PciFunction>,
    /// Port of the device, from 0.
    pub dev_port: Option<u32>,
    /// The bond or bridge of which the interface is a member.
    pub master: Option<String>,
    /// Interfaces below: a VLAN's or child's parent, a bond's members.
    pub lower: Vec<String>,
    /// The parent of an IPoIB child interface.
    pub parent: Option<String>,
    /// Bonding mode, `802.3ad`.
    pub bond_mode: Option<String>,
    /// The active member of a bond, if any.
    pub bond_active: Option<String>,
}

/// The transport of IPoIB packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IpoibMode {
    /// Unreliable datagrams: at most 4092 bytes, usually 2044.
    Datagram,
    /// Reliable connections: at most 65520 bytes.
    Connected,
}

impl IpoibMode {
    /// The kernel's name of the mode.
    pub fn as_str(self) -> &'static str {
        match self {
            IpoibMode::Datagram => "datagram",
            IpoibMode::Connected => "connected",
        }
    }
}

impl NetInterface {
    /// The highest MTU of IPoIB datagram mode with InfiniBand packets of 2048 bytes, the usual size.
    pub const DATAGRAM_MTU: u32 = 2044;
    /// The same with packets of 4096 bytes, less the 4 of the IPoIB header.
    pub const DATAGRAM_4K_MTU: u32 = 4092;
    /// The highest MTU of datagram mode on Omni-Path with acceleration, whose packets have 10 KiB.
    pub const ACCELERATED_MTU: u32 = 10236;
    /// The highest MTU of connected mode.
    pub const CONNECTED_MTU: u32 = 65520;

    /// Whether the interface carries IP over InfiniBand.
    pub fn is_ipoib(&self) -> bool {
        self.hardware == Some(32)
    }

    /// Whether the interface is IPoIB on Omni-Path with acceleration: no other datagram mode has packets of that size.
    pub fn is_accelerated_ipoib(&self) -> bool {
        self.ipoib_mode == Some(IpoibMode::Datagram) && self.mtu.is_some_and(|mtu| mtu > Self::DATAGRAM_4K_MTU)
    }

    /// Whether the interface is the loopback interface.
    pub fn is_loopback(&self) -> bool {
        self.hardware == Some(772)
    }
}

/// All network interfaces, by name.
pub fn read_interfaces(tree: &HostTree) -> Vec<NetInterface> {
    let mut names = tree.list_names(NET_CLASS_DIR);
    // `bonding_masters` is a file in the same directory.
    names.retain(|n| {
        tree.exists(&format!("{NET_CLASS_DIR}/{n}/type")) || tree.exists(&format!("{NET_CLASS_DIR}/{n}/mtu"))
    });
    names.iter().map(|name| read_interface(tree, name)).collect()
}

fn read_interface(tree: &HostTree, name: &str) -> NetInterface {
    let at = format!("{NET_CLASS_DIR}/{name}");
    let uevent = interface_text(tree, &at, "uevent").unwrap_or_default();
    let mut kind = uevent.lines().find_map(|l| l.strip_prefix("DEVTYPE=")).map(|k| k.trim().to_owned());
    if kind.is_none() {
        kind = [("bonding", "bond"), ("bridge", "bridge"), ("tun_flags", "tun")]
            .iter()
            .find(|(file, _)| tree.exists(&format!("{at}/{file}")))
            .map(|(_, kind)| (*kind).to_owned());
    }
    let hardware = interface_number(tree, &at, "type");
    let lower = tree.list_names(&at).iter().filter_map(|n| n.strip_prefix("lower_")).map(str::to_owned).collect();
    NetInterface {
        name: name.to_owned(),
        max_mtu: None,
        addresses: Vec::new(),
        vlan: tree.read_text(&format!("proc/net/vlan/{name}")).and_then(|t| vlan_number(&t)),
        lower_is_elsewhere: false,
        rdma: None,
        hardware,
        operstate: interface_text(tree, &at, "operstate"),
        is_up: interface_text(tree, &at, "flags").and_then(|f| parse_number(&f)).is_some_and(|flags| flags & 1 != 0),
        carrier: interface_number(tree, &at, "carrier").map(|c| c == 1),
        mtu: interface_number(tree, &at, "mtu"),
        speed_mbps: interface_number(tree, &at, "speed").filter(|s| (1..10_000_000).contains(s)),
        ipoib_mode: match interface_text(tree, &at, "mode").as_deref() {
            Some("datagram") => Some(IpoibMode::Datagram),
            Some("connected") => Some(IpoibMode::Connected),
            _ => None,
        },
        address: interface_text(tree, &at, "address"),
        pci: PciFunction::read_from(tree, &format!("{at}/device")),
        // Old kernels put a function's port number in the other file.
        dev_port: interface_number(tree, &at, "dev_port").max(interface_number(tree, &at, "dev_id")),
        master: tree.link_name(&format!("{at}/master")),
        lower,
        parent: interface_text(tree, &at, "parent"),
        bond_mode: interface_text(tree, &at, "bonding/mode")
            .and_then(|m| m.split_whitespace().next().map(str::to_owned)),
        bond_active: interface_text(tree, &at, "bonding/active_slave"),
        kind,
    }
}

fn interface_text(tree: &HostTree, at: &str, file: &str) -> Option<String> {
    tree.read_text(&format!("{at}/{file}"))
}

fn interface_number(tree: &HostTree, at: &str, file: &str) -> Option<u32> {
    tree.read_number(&format!("{at}/{file}")).and_then(|v| u32::try_from(v).ok())
}

/// The operational state of an interface; no other file is read.
pub fn operstate(tree: &HostTree, name: &str) -> Option<String> {
    tree.read_text(&format!("{NET_CLASS_DIR}/{name}/operstate"))
}

/// `ib0.100  VID: 100  REORDER_HDR: 1 …`, the first line of the VLAN's file.
fn vlan_number(text: &str) -> Option<u16> {
    text.split_once("VID:")?.1.split_whitespace().next()?.parse().ok()
}

fn as_text<S: Serializer>(addresses: &[(IpAddr, u8)], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(addresses.iter().map(|(ip, prefix)| format!("{ip}/{prefix}")))
}
