//! From interface names to rails: device, port and GID of each, with the reason in words. A pure function of what the
//! fabric crate reads in a tree and of the addresses it is given.

use crate::{Address, Unusable};
use spurline_fabric::{
    Device, Gid, GidType, Interface, LinkLayer, Port, PortState, Tree, devices, interfaces, operstate, port_state,
};
use spurline_proto::{Link, Rail};
use std::net::Ipv6Addr;

/// An interface of this machine as an RDMA rail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalRail {
    /// What peers are told, its port still 0.
    pub rail: Rail,
    /// The RDMA device.
    pub device: String,
    /// Its port, counted from 1.
    pub port: u32,
    /// The GID that stands for the interface's address.
    pub gid: Gid,
    /// The processor node the device is attached to.
    pub numa_node: Option<u32>,
    /// Why it is this device and this GID, one sentence for the log.
    pub why: String,
}

impl LocalRail {
    /// The device node through which programs use the device, and why it can't be opened; `None` when it can. The libraries
    /// only say that there is no such device.
    pub fn node_missing(&self) -> Option<(String, std::io::Error)> {
        let is_of_it = |entry: &std::fs::DirEntry| {
            std::fs::read_to_string(entry.path().join("ibdev")).is_ok_and(|name| name.trim() == self.device)
        };
        let entry = std::fs::read_dir("/sys/class/infiniband_verbs").ok()?.flatten().find(is_of_it)?;
        let node = format!("/dev/infiniband/{}", entry.file_name().to_string_lossy());
        let opened = std::fs::File::options().read(true).write(true).open(&node);
        opened.err().map(|why| (node, why))
    }

    /// Whether the link carries packets now: the port is active and the interface is up.
    pub fn link_up(&self, tree: &Tree) -> bool {
        port_state(tree, &self.device, self.port) == PortState::Active
            && operstate(tree, &self.rail.name).is_some_and(|state| state != "down")
    }
}

/// What of a host is looked at.
struct Seen {
    devices: Vec<Device>,
    interfaces: Vec<Interface>,
}

impl Seen {
    fn of(tree: &Tree) -> Self {
        Seen { devices: devices(tree, false), interfaces: interfaces(tree) }
    }

    fn interface(&self, name: &str) -> Option<&Interface> {
        self.interfaces.iter().find(|i| i.name == name)
    }

    fn ports(&self) -> impl Iterator<Item = (&Device, &Port)> {
        self.devices.iter().flat_map(|device| device.ports.iter().map(move |port| (device, port)))
    }
}

/// Resolves `names` (none twice), in their order.
///
/// # Errors
/// The first interface that can't be used, and why.
pub fn resolve(names: &[String], tree: &Tree, addresses: &[Address]) -> Result<Vec<LocalRail>, Unusable> {
    let seen = Seen::of(tree);
    let mut rails: Vec<LocalRail> = Vec::new();
    for name in names {
        if !rails.iter().any(|rail| rail.rail.name == *name) {
            rails.push(resolve_one(name, &seen, addresses)?);
        }
    }
    Ok(rails)
}

/// Every interface with an address that can be a rail now.
pub fn usable(tree: &Tree, addresses: &[Address]) -> Vec<LocalRail> {
    let seen = Seen::of(tree);
    let mut rails: Vec<LocalRail> = Vec::new();
    for address in addresses {
        let name = &address.interface;
        if !rails.iter().any(|rail| rail.rail.name == *name) {
            rails.extend(resolve_one(name, &seen, addresses));
        }
    }
    rails
}

/// A port with those slots of its GID table that belong to the interface.
struct Found<'a> {
    device: &'a Device,
    port: &'a Port,
    gids: Vec<&'a Gid>,
}

fn resolve_one(interface: &str, seen: &Seen, addresses: &[Address]) -> Result<LocalRail, Unusable> {
    let Some(netdev) = seen.interface(interface) else {
        return Err(Unusable::NotThere { interface: interface.to_owned(), others: with_devices(seen) });
    };
    let found = find(netdev, seen);
    let others = found.len();
    let Some(Found { device, port, gids }) = preferred(found, netdev, seen) else {
        return Err(Unusable::NoDevice {
            interface: interface.to_owned(),
            devices: match seen.devices.is_empty() {
                true => "this machine has none".to_owned(),
                false => format!("there are {}", listed(seen)),
            },
            others: with_devices(seen),
        });
    };
    if port.state != PortState::Active {
        return Err(Unusable::PortDown {
            interface: interface.to_owned(),
            device: device.name.clone(),
            port: port.number,
            state: port.state.word().to_owned(),
            phys: port.phys_state.word().to_owned(),
            infiniband: infiniband(port),
        });
    }
    let own: Vec<&Address> = addresses.iter().filter(|a| a.interface == interface).collect();
    // IPv4 first: it is what most peers will have; the order is the kernel's otherwise.
    let mut routable: Vec<&Address> = own.iter().copied().filter(|a| a.routable()).collect();
    routable.sort_by_key(|a| a.ip.is_ipv6());
    if routable.is_empty() {
        let shown: Vec<String> = own.iter().map(|a| a.ip.to_string()).collect();
        let found = if shown.is_empty() { String::new() } else { format!(", only {}", shown.join(", ")) };
        return Err(Unusable::NoAddress { interface: interface.to_owned(), found });
    }
    let (address, gid, link, reason) =
        choose(device, port, &gids, &routable, netdev).ok_or_else(|| Unusable::NoGid {
            interface: interface.to_owned(),
            device: device.name.clone(),
            port: port.number,
            address: routable.iter().map(|a| a.ip.to_string()).collect::<Vec<_>>().join(" or "),
            gids: shown(&gids),
        })?;
    let rate = port.rate.as_ref().map_or("rate not shown".to_owned(), |rate| rate.words());
    let speed_mbit = port.rate.as_ref().map_or(0.0, |rate| rate.gbps * 1000.0) as u32;
    let fabric = if link == Link::InfiniBand { (gid.address.to_bits() >> 64) as u64 } else { 0 };
    // Soft-RoCE and Soft-iWARP are where the card is that they send with.
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
        shown(&gids)
    );
    let rail = Rail {
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

/// The ports that have `interface`: those whose GID table names it, which holds for bonds and VLANs too; failing
/// that (InfiniBand, older iWARP drivers), those whose own interface it is, or whose VLAN or partition it is.
fn find<'a>(interface: &Interface, seen: &'a Seen) -> Vec<Found<'a>> {
    let by_table: Vec<Found<'_>> = seen
        .ports()
        .filter_map(|(device, port)| {
            let gids: Vec<&Gid> = port.gids.iter().filter(|gid| gid.netdev.as_ref() == Some(&interface.name)).collect();
            (!gids.is_empty()).then_some(Found { device, port, gids })
        })
        .collect();
    if !by_table.is_empty() {
        return by_table;
    }
    // Slots that stand for no other interface.
    let of = |(device, port): (&'a Device, &'a Port)| {
        let gids = port.gids.iter().filter(|gid| gid.netdev.is_none()).collect();
        Found { device, port, gids }
    };
    let owner = interface.parent.as_ref().and_then(|parent| seen.interface(parent)).unwrap_or(interface);
    let found: Vec<Found<'_>> = seen.ports().filter(|(device, port)| owns(device, port, owner)).map(of).collect();
    if !found.is_empty() {
        return found;
    }
    // A bond of IPoIB interfaces or a VLAN on iWARP: what is below it carries its packets. On RoCE the table would
    // name it.
    let below = |(device, port): &(&Device, &Port)| infiniband(port) || iwarp(device);
    let of_member = |member: &Interface| -> Vec<Found<'a>> {
        seen.ports().filter(below).filter(|(device, port)| owns(device, port, member)).map(of).collect()
    };
    members(interface, seen).into_iter().flat_map(of_member).collect()
}

fn infiniband(port: &Port) -> bool {
    port.link_layer == LinkLayer::InfiniBand
}

/// Whether the device speaks iWARP: its node type is an RNIC.
fn iwarp(device: &Device) -> bool {
    device.node_type.as_deref() == Some("RNIC")
}

/// Whether the interface's driver is the port's own: Soft-RoCE and Soft-iWARP name it, others share a PCI function.
fn owns(device: &Device, port: &Port, interface: &Interface) -> bool {
    if let Some(parent) = &device.parent {
        return *parent == interface.name;
    }
    // Cards with one PCI function for both ports number their interfaces from 0, the RDMA ports from 1.
    device.function_netdevs.contains(&interface.name)
        && (device.ports.len() <= 1 || interface.dev_port.unwrap_or(0).checked_add(1) == Some(port.number))
}

/// The interfaces below a bond or a VLAN, the one that carries its traffic first.
fn members<'a>(interface: &Interface, seen: &'a Seen) -> Vec<&'a Interface> {
    let mut members: Vec<&Interface> = interface.lower.iter().filter_map(|name| seen.interface(name)).collect();
    members.sort_by_key(|member| interface.bond_active.as_ref() != Some(&member.name));
    members
}

/// Of several ports that have the interface, the active one of the bond's active member.
fn preferred<'a>(found: Vec<Found<'a>>, interface: &Interface, seen: &Seen) -> Option<Found<'a>> {
    let members = members(interface, seen);
    let rank = |f: &Found<'_>| {
        let member = members.iter().position(|member| owns(f.device, f.port, member)).unwrap_or(members.len());
        (f.port.state != PortState::Active, member)
    };
    found.into_iter().min_by_key(rank)
}

/// The address, the GID that stands for it, what the link is, and why.
fn choose<'a>(
    device: &Device,
    port: &Port,
    gids: &[&'a Gid],
    routable: &[&'a Address],
    interface: &Interface,
) -> Option<(&'a Address, &'a Gid, Link, String)> {
    let (first, name) = (*routable.first()?, &interface.name);
    if infiniband(port) {
        // The last 16 of the 20 bytes of an IPoIB interface's hardware address are its GID.
        let own = interface.address.as_deref().and_then(|text| gid_of_pairs(text.get(12..)?));
        let of_interface = gids.iter().find(|gid| Some(gid.address) == own);
        let (gid, reason) = match of_interface {
            Some(gid) => (*gid, format!("the GID in {name}'s hardware address")),
            None => (*gids.first()?, "the port's first GID".to_owned()),
        };
        return Some((first, gid, Link::InfiniBand, reason));
    }
    if iwarp(device) {
        // iWARP connects by IP address; its GIDs are the hardware address and choose nothing.
        return Some((first, *gids.first()?, Link::Iwarp, "iWARP connects by address".to_owned()));
    }
    for link in [Link::RoceV2, Link::RoceV1] {
        for address in routable {
            let fits = |gid: &&&Gid| {
                let kind = match gid.kind {
                    GidType::RoceV2 => Link::RoceV2,
                    // Without an interface beside it, the kernel's one word for both reads as the other.
                    GidType::RoceV1 | GidType::Ib => Link::RoceV1,
                    GidType::Unknown => return false,
                };
                kind == link && gid.ip() == address.ip.to_canonical()
            };
            if let Some(gid) = gids.iter().find(fits) {
                let reason = format!("the {link} GID of {name}'s address {}/{}", address.ip, address.prefix_len);
                return Some((address, *gid, link, reason));
            }
        }
    }
    None
}

/// Sixteen bytes as pairs of digits with colons between.
fn gid_of_pairs(text: &str) -> Option<Ipv6Addr> {
    let digits: String = text.chars().filter(|c| *c != ':').collect();
    let number = u128::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 32)?;
    Some(Ipv6Addr::from_bits(number))
}

/// GIDs with their kinds, for messages; long tables are cut.
fn shown(gids: &[&Gid]) -> String {
    const MOST: usize = 8;
    if gids.is_empty() {
        return "no GID".to_owned();
    }
    let mut words: Vec<String> = gids
        .iter()
        .take(MOST)
        .map(|gid| match gid.kind {
            GidType::RoceV1 | GidType::RoceV2 => format!("{gid} ({})", gid.kind),
            GidType::Ib | GidType::Unknown => gid.to_string(),
        })
        .collect();
    if gids.len() > MOST {
        words.push(format!("{} more", gids.len() - MOST));
    }
    words.join(", ")
}

fn listed(seen: &Seen) -> String {
    let words: Vec<String> = seen.ports().map(|(d, port)| format!("{} port {}", d.name, port.number)).collect();
    words.join(", ")
}

/// The interfaces that could have been named.
fn with_devices(seen: &Seen) -> Vec<String> {
    seen.interfaces.iter().filter(|i| !find(i, seen).is_empty()).map(|i| i.name.clone()).collect()
}
