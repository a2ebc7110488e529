//! From interface names to rails: device, port and GID of each, with the reason. A pure function of the files in a
//! tree and of the given addresses.

use crate::{HostAddress, UnusableRail};
use spurline_fabric::{
    DevicePort, GidType, HostTree, LinkLayer, NetInterface, PortGid, PortState, RdmaDevice, devices, interfaces,
    operstate, port_state,
};
use spurline_proto::{RailInfo, RailLink};
use std::net::Ipv6Addr;

/// An interface of this machine as an RDMA rail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalRail {
    /// The rail as announced to peers, with port 0.
    pub rail: RailInfo,
    /// The RDMA device.
    pub device: String,
    /// The port, counted from 1.
    pub port: u32,
    /// The GID of the interface's address.
    pub gid: PortGid,
    /// The NUMA node of the device.
    pub numa_node: Option<u32>,
    /// Why this device and this GID were chosen, a sentence for the log.
    pub why: String,
}

impl LocalRail {
    /// The device node through which programs use the device, and why the node cannot be opened; `None` when that works. The
    /// libraries report only that there is no such device.
    pub fn device_node_error(&self) -> Option<(String, std::io::Error)> {
        let entry = std::fs::read_dir("/sys/class/infiniband_verbs").ok()?.flatten().find(|entry| {
            std::fs::read_to_string(entry.path().join("ibdev")).is_ok_and(|name| name.trim() == self.device)
        })?;
        let node = format!("/dev/infiniband/{}", entry.file_name().to_string_lossy());
        let opened = std::fs::File::options().read(true).write(true).open(&node);
        opened.err().map(|why| (node, why))
    }

    /// Whether the link carries packets now: the port is active and the interface is up.
    pub fn is_link_up(&self, tree: &HostTree) -> bool {
        port_state(tree, &self.device, self.port) == PortState::Active
            && operstate(tree, &self.rail.name).is_some_and(|state| state != "down")
    }
}

/// The parts of a host that are examined.
struct HostSnapshot {
    devices: Vec<RdmaDevice>,
    interfaces: Vec<NetInterface>,
}

impl HostSnapshot {
    fn read_from(tree: &HostTree) -> Self {
        HostSnapshot { devices: devices(tree, false), interfaces: interfaces(tree) }
    }

    fn interface(&self, name: &str) -> Option<&NetInterface> {
        self.interfaces.iter().find(|i| i.name == name)
    }

    fn all_ports(&self) -> impl Iterator<Item = (&RdmaDevice, &DevicePort)> {
        self.devices.iter().flat_map(|device| device.ports.iter().map(move |port| (device, port)))
    }
}

/// Resolves `names` (none twice), in this order.
///
/// # Errors
/// The first interface that cannot be used, and why.
pub fn resolve_rails(
    names: &[String],
    tree: &HostTree,
    addresses: &[HostAddress],
) -> Result<Vec<LocalRail>, UnusableRail> {
    let seen = HostSnapshot::read_from(tree);
    let mut rails: Vec<LocalRail> = Vec::new();
    for name in names {
        if !rails.iter().any(|rail| rail.rail.name == *name) {
            rails.push(resolve_one(name, &seen, addresses)?);
        }
    }
    Ok(rails)
}

/// Every interface with an address that can be a rail now.
pub fn usable_rails(tree: &HostTree, addresses: &[HostAddress]) -> Vec<LocalRail> {
    let seen = HostSnapshot::read_from(tree);
    let mut rails: Vec<LocalRail> = Vec::new();
    for address in addresses {
        let name = &address.interface;
        if !rails.iter().any(|rail| rail.rail.name == *name) {
            rails.extend(resolve_one(name, &seen, addresses));
        }
    }
    rails
}

/// A port with the GID table's entries that belong to the interface.
struct PortMatch<'a> {
    device: &'a RdmaDevice,
    port: &'a DevicePort,
    gids: Vec<&'a PortGid>,
}

fn resolve_one(interface: &str, seen: &HostSnapshot, addresses: &[HostAddress]) -> Result<LocalRail, UnusableRail> {
    let Some(netdev) = seen.interface(interface) else {
        return Err(UnusableRail::NotThere { interface: interface.to_owned(), others: interfaces_with_devices(seen) });
    };
    let found = find_ports(netdev, seen);
    let others = found.len();
    let Some(PortMatch { device, port, gids }) = preferred_port(found, netdev, seen) else {
        return Err(UnusableRail::NoDevice {
            interface: interface.to_owned(),
            devices: if seen.devices.is_empty() {
                "this host has none".to_owned()
            } else {
                format!("there are {}", format_interfaces(seen))
            },
            others: interfaces_with_devices(seen),
        });
    };
    if port.state != PortState::Active {
        return Err(UnusableRail::PortDown {
            interface: interface.to_owned(),
            device: device.name.clone(),
            port: port.number,
            state: port.state.as_str().to_owned(),
            phys: port.phys_state.as_str().to_owned(),
            infiniband: is_infiniband(port),
        });
    }
    let own: Vec<&HostAddress> = addresses.iter().filter(|a| a.interface == interface).collect();
    // IPv4 first, which most peers have; otherwise the kernel's order.
    let mut routable: Vec<&HostAddress> = own.iter().copied().filter(|a| a.is_routable()).collect();
    routable.sort_by_key(|a| a.ip.is_ipv6());
    if routable.is_empty() {
        let shown: Vec<String> = own.iter().map(|a| a.ip.to_string()).collect();
        let found = if shown.is_empty() { String::new() } else { format!(", only {}", shown.join(", ")) };
        return Err(UnusableRail::NoAddress { interface: interface.to_owned(), found });
    }
    let (address, gid, link, reason) =
        choose_gid(device, port, &gids, &routable, netdev).ok_or_else(|| UnusableRail::NoGid {
            interface: interface.to_owned(),
            device: device.name.clone(),
            port: port.number,
            address: routable.iter().map(|a| a.ip.to_string()).collect::<Vec<_>>().join(" or "),
            gids: format_gids(&gids),
        })?;
    let rate = port.rate.as_ref().map_or("unknown rate".to_owned(), |rate| rate.describe());
    let speed_mbit = port.rate.as_ref().map_or(0.0, |rate| rate.gbps * 1000.0) as u32;
    let fabric = if link == RailLink::InfiniBand { (gid.address.to_bits() >> 64) as u64 } else { 0 };
    // Soft-RoCE and Soft-iWARP are on the NUMA node of the sending card.
    let card = netdev.pci.as_ref().filter(|_| device.parent.is_some());
    let numa_node = device.pci.as_ref().or(card).and_then(|pci| pci.numa_node);
    let numa = numa_node.map_or(String::new(), |node| format!(", NUMA node {node}"));
    let several = match others {
        0 | 1 => String::new(),
        n => format!(" ({n} devices have the interface; this one carries its traffic)"),
    };
    let why = format!(
        "{interface} is {} port {} ({link}, {rate}{numa}){several}; {gid}: {reason}; of {}",
        device.name,
        port.number,
        format_gids(&gids)
    );
    let rail = RailInfo {
        name: interface.to_owned(),
        address: address.ip,
        prefix_len: address.prefix_len,
        port: 0,
        link,
        fabric,
        speed_mbit,
    };
    Ok(LocalRail { rail, device: device.name.clone(), port: port.number, gid: gid.clone(), numa_node, why })
}

/// The ports of `interface`: ports whose GID table names the interface, which covers bonds and VLANs. Failing that (InfiniBand,
/// older iWARP drivers), ports of this interface, or of the interface below a VLAN or partition.
fn find_ports<'a>(interface: &NetInterface, seen: &'a HostSnapshot) -> Vec<PortMatch<'a>> {
    let by_table: Vec<PortMatch<'_>> = seen
        .all_ports()
        .filter_map(|(device, port)| {
            let gids: Vec<&PortGid> =
                port.gids.iter().filter(|gid| gid.netdev.as_ref() == Some(&interface.name)).collect();
            (!gids.is_empty()).then_some(PortMatch { device, port, gids })
        })
        .collect();
    if !by_table.is_empty() {
        return by_table;
    }
    // Entries that belong to no other interface.
    let of = |(device, port): (&'a RdmaDevice, &'a DevicePort)| {
        let gids = port.gids.iter().filter(|gid| gid.netdev.is_none()).collect();
        PortMatch { device, port, gids }
    };
    let owner = interface.parent.as_ref().and_then(|parent| seen.interface(parent)).unwrap_or(interface);
    let found: Vec<PortMatch<'_>> =
        seen.all_ports().filter(|(device, port)| owns_interface(device, port, owner)).map(of).collect();
    if !found.is_empty() {
        return found;
    }
    // A bond of IPoIB interfaces or a VLAN on iWARP: the lower interface carries the packets. On RoCE the GID table would name
    // the interface.
    bond_members(interface, seen)
        .into_iter()
        .flat_map(|member| -> Vec<PortMatch<'a>> {
            seen.all_ports()
                .filter(|(device, port)| is_infiniband(port) || is_iwarp(device))
                .filter(|(device, port)| owns_interface(device, port, member))
                .map(of)
                .collect()
        })
        .collect()
}

fn is_infiniband(port: &DevicePort) -> bool {
    port.link_layer == LinkLayer::InfiniBand
}

/// Whether the device speaks iWARP: the node type is an RNIC.
fn is_iwarp(device: &RdmaDevice) -> bool {
    device.node_type.as_deref() == Some("RNIC")
}

/// Whether the interface belongs to the port's driver: Soft-RoCE and Soft-iWARP name the interface, others share a PCI function.
fn owns_interface(device: &RdmaDevice, port: &DevicePort, interface: &NetInterface) -> bool {
    if let Some(parent) = &device.parent {
        return *parent == interface.name;
    }
    // Cards with a single PCI function for both ports number interfaces from 0 and RDMA ports from 1.
    device.function_netdevs.contains(&interface.name)
        && (device.ports.len() <= 1 || interface.dev_port.unwrap_or(0).checked_add(1) == Some(port.number))
}

/// The interfaces below a bond or a VLAN, the active member first.
fn bond_members<'a>(interface: &NetInterface, seen: &'a HostSnapshot) -> Vec<&'a NetInterface> {
    let mut members: Vec<&NetInterface> = interface.lower.iter().filter_map(|name| seen.interface(name)).collect();
    members.sort_by_key(|member| interface.bond_active.as_ref() != Some(&member.name));
    members
}

/// Of several ports of the interface, the active port of the bond's active member.
fn preferred_port<'a>(
    found: Vec<PortMatch<'a>>,
    interface: &NetInterface,
    seen: &HostSnapshot,
) -> Option<PortMatch<'a>> {
    let members = bond_members(interface, seen);
    found.into_iter().min_by_key(|f| {
        let member =
            members.iter().position(|member| owns_interface(f.device, f.port, member)).unwrap_or(members.len());
        (f.port.state != PortState::Active, member)
    })
}

/// The address, the GID, the link type, and the reason.
fn choose_gid<'a>(
    device: &RdmaDevice,
    port: &DevicePort,
    gids: &[&'a PortGid],
    routable: &[&'a HostAddress],
    interface: &NetInterface,
) -> Option<(&'a HostAddress, &'a PortGid, RailLink, String)> {
    let first = *routable.first()?;
    let name = &interface.name;
    if is_infiniband(port) {
        // The last 16 of the 20 bytes of an IPoIB interface's hardware address are the GID.
        let own = interface.address.as_deref().and_then(|text| gid_of_hex_pairs(text.get(12..)?));
        let of_interface = gids.iter().find(|gid| Some(gid.address) == own);
        let (gid, reason) = match of_interface {
            Some(gid) => (*gid, format!("the GID in {name}'s hardware address")),
            None => (*gids.first()?, "the port's first GID".to_owned()),
        };
        return Some((first, gid, RailLink::InfiniBand, reason));
    }
    if is_iwarp(device) {
        // iWARP connects by IP address; the GID is the hardware address and is not significant.
        return Some((first, *gids.first()?, RailLink::Iwarp, "iWARP connects by address".to_owned()));
    }
    for link in [RailLink::RoceV2, RailLink::RoceV1] {
        for address in routable {
            if let Some(gid) = gids.iter().find(|gid| {
                let kind = match gid.kind {
                    GidType::RoceV2 => RailLink::RoceV2,
                    // Without an interface, the kernel's type text of both is the same.
                    GidType::RoceV1 | GidType::Ib => RailLink::RoceV1,
                    GidType::Unknown => return false,
                };
                kind == link && gid.ip_address() == address.ip.to_canonical()
            }) {
                let reason = format!("the {link} GID of {name}'s address {}/{}", address.ip, address.prefix_len);
                return Some((address, *gid, link, reason));
            }
        }
    }
    None
}

/// Sixteen bytes as hexadecimal pairs separated by colons.
fn gid_of_hex_pairs(text: &str) -> Option<Ipv6Addr> {
    let digits: String = text.chars().filter(|c| *c != ':').collect();
    let number = u128::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 32)?;
    Some(Ipv6Addr::from_bits(number))
}

/// GIDs with types, for messages; long tables are cut.
fn format_gids(gids: &[&PortGid]) -> String {
    const MAX_RAILS: usize = 8;
    if gids.is_empty() {
        return "no GID".to_owned();
    }
    let mut words: Vec<String> = gids
        .iter()
        .take(MAX_RAILS)
        .map(|gid| match gid.kind {
            GidType::RoceV1 | GidType::RoceV2 => format!("{gid} ({})", gid.kind),
            GidType::Ib | GidType::Unknown => gid.to_string(),
        })
        .collect();
    if gids.len() > MAX_RAILS {
        words.push(format!("{} more", gids.len() - MAX_RAILS));
    }
    words.join(", ")
}

fn format_interfaces(seen: &HostSnapshot) -> String {
    let words: Vec<String> = seen.all_ports().map(|(d, port)| format!("{} port {}", d.name, port.number)).collect();
    words.join(", ")
}

/// The interfaces that could be named instead.
fn interfaces_with_devices(seen: &HostSnapshot) -> Vec<String> {
    seen.interfaces.iter().filter(|i| !find_ports(i, seen).is_empty()).map(|i| i.name.clone()).collect()
}
