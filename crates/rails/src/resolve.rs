//! From interface names to rails: device, port and GID of each, with the reason in words. A pure function of what
//! stands below a sysfs root and of the addresses it is given.

use crate::sysfs::{Gid, GidType, Port, line, names, net, netdev_exists, parse_gid, ports};
use crate::{Address, Unusable};
use spurline_proto::{Link, Rail};
use std::net::IpAddr;
use std::path::Path;

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
    /// Whether the link carries packets now: the port is active and the interface is up.
    pub fn link_up(&self, sys: &Path) -> bool {
        let port = ports(sys).into_iter().find(|p| p.device == self.device && p.number == self.port);
        let interface = line(&net(sys, &self.rail.name).join("operstate"));
        port.is_some_and(|port| port.active()) && interface.is_some_and(|state| state != "down")
    }
}

/// Resolves `names` (none twice), in their order.
///
/// # Errors
/// The first interface that can't be used, and why.
pub fn resolve(names: &[String], sys: &Path, addresses: &[Address]) -> Result<Vec<LocalRail>, Unusable> {
    let all = ports(sys);
    let mut rails: Vec<LocalRail> = Vec::new();
    for name in names {
        if !rails.iter().any(|rail| rail.rail.name == *name) {
            rails.push(resolve_one(name, sys, addresses, &all)?);
        }
    }
    Ok(rails)
}

/// Every interface with an address that can be a rail now.
pub fn usable(sys: &Path, addresses: &[Address]) -> Vec<LocalRail> {
    let all = ports(sys);
    let mut rails: Vec<LocalRail> = Vec::new();
    for address in addresses {
        let name = &address.interface;
        if !rails.iter().any(|rail| rail.rail.name == *name) && !find(name, sys, &all).is_empty() {
            rails.extend(resolve_one(name, sys, addresses, &all));
        }
    }
    rails
}

/// A port with those slots of its GID table that belong to the interface.
struct Found {
    port: Port,
    gids: Vec<Gid>,
}

fn resolve_one(interface: &str, sys: &Path, addresses: &[Address], all: &[Port]) -> Result<LocalRail, Unusable> {
    if !netdev_exists(sys, interface) {
        return Err(Unusable::NotThere { interface: interface.to_owned(), others: with_devices(sys, all) });
    }
    let found = find(interface, sys, all);
    let others = found.len();
    let Some(Found { port, gids }) = preferred(found, interface, sys) else {
        return Err(Unusable::NoDevice {
            interface: interface.to_owned(),
            devices: match all.is_empty() {
                true => "this machine has none".to_owned(),
                false => format!("there are {}", devices(all)),
            },
            others: with_devices(sys, all),
        });
    };
    if !port.active() {
        let (state, phys) = port.states();
        let (device, infiniband) = (port.device.clone(), port.infiniband());
        let interface = interface.to_owned();
        return Err(Unusable::PortDown { interface, device, port: port.number, state, phys, infiniband });
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
        choose(&port, &gids, &routable, interface, sys).ok_or_else(|| Unusable::NoGid {
            interface: interface.to_owned(),
            device: port.device.clone(),
            port: port.number,
            address: routable.iter().map(|a| a.ip.to_string()).collect::<Vec<_>>().join(" or "),
            gids: shown(&gids),
        })?;
    let (rate, speed_mbit) = port.rate();
    let fabric = if link == Link::InfiniBand { u64::from_be_bytes(first_half(&gid.raw)) } else { 0 };
    let numa_node = port.numa_node();
    let numa = numa_node.map_or(String::new(), |node| format!(", NUMA node {node}"));
    let several = match others {
        0 | 1 => String::new(),
        n => format!(" ({n} devices have the interface; this one carries its traffic)"),
    };
    let why = format!(
        "{interface} is {} port {} ({link}, {rate}{numa}){several}; {gid}: {reason}; of {}",
        port.device,
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
    Ok(LocalRail { rail, device: port.device, port: port.number, gid, numa_node, why })
}

/// The ports that have `interface`: those whose GID table names it, which holds for bonds and VLANs too; failing
/// that (InfiniBand, older iWARP drivers), those whose own interface it is, or whose VLAN or partition it is.
fn find(interface: &str, sys: &Path, all: &[Port]) -> Vec<Found> {
    let by_table: Vec<Found> = all
        .iter()
        .filter_map(|port| {
            let gids: Vec<Gid> =
                port.gids().into_iter().filter(|gid| gid.netdev.as_deref() == Some(interface)).collect();
            (!gids.is_empty()).then(|| Found { port: port.clone(), gids })
        })
        .collect();
    if !by_table.is_empty() {
        return by_table;
    }
    let parent = line(&net(sys, interface).join("parent"));
    let owner = parent.as_deref().unwrap_or(interface);
    let of = |port: &Port| Found { port: port.clone(), gids: unnamed(port) };
    let found: Vec<Found> = all.iter().filter(|port| port.owns(sys, owner)).map(of).collect();
    if !found.is_empty() {
        return found;
    }
    // A bond of IPoIB interfaces or a VLAN on iWARP: what is below it carries its packets. On RoCE the table would
    // name it.
    let below = |port: &&Port| port.infiniband() || port.iwarp();
    let of_member = |member: &String| all.iter().filter(below).filter(|p| p.owns(sys, member)).map(of).collect();
    members(interface, sys).iter().flat_map::<Vec<Found>, _>(of_member).collect()
}

/// Slots that stand for no other interface.
fn unnamed(port: &Port) -> Vec<Gid> {
    port.gids().into_iter().filter(|gid| gid.netdev.is_none()).collect()
}

/// The interfaces below a bond or a VLAN, the one that carries its traffic first.
fn members(interface: &str, sys: &Path) -> Vec<String> {
    let active = line(&net(sys, interface).join("bonding/active_slave"));
    let lower = |name: String| name.strip_prefix("lower_").map(str::to_owned);
    let mut members: Vec<String> = names(&net(sys, interface)).into_iter().filter_map(lower).collect();
    members.sort_by_key(|member| active.as_ref() != Some(member));
    members
}

/// Of several ports that have the interface, the active one of the bond's active member.
fn preferred(found: Vec<Found>, interface: &str, sys: &Path) -> Option<Found> {
    let members = members(interface, sys);
    let rank = |f: &Found| {
        let member = members.iter().position(|member| f.port.owns(sys, member)).unwrap_or(members.len());
        (!f.port.active(), member)
    };
    found.into_iter().min_by_key(rank)
}

/// The address, the GID that stands for it, what the link is, and why.
fn choose<'a>(
    port: &Port,
    gids: &[Gid],
    routable: &[&'a Address],
    interface: &str,
    sys: &Path,
) -> Option<(&'a Address, Gid, Link, String)> {
    let first = *routable.first()?;
    if port.infiniband() {
        // The last 16 of the 20 bytes of an IPoIB interface's hardware address are its GID.
        let hardware = line(&net(sys, interface).join("address"));
        let own = hardware.as_deref().and_then(|text| parse_gid(text.get(12..)?));
        let of_interface = gids.iter().find(|gid| Some(gid.raw) == own);
        let (gid, reason) = match of_interface {
            Some(gid) => (gid, format!("the GID in {interface}'s hardware address")),
            None => (gids.first()?, "the port's first GID".to_owned()),
        };
        return Some((first, gid.clone(), Link::InfiniBand, reason));
    }
    if port.iwarp() {
        // iWARP connects by IP address; its GIDs are the hardware address and choose nothing.
        return Some((first, gids.first()?.clone(), Link::Iwarp, "iWARP connects by address".to_owned()));
    }
    for (kind, link) in [(GidType::RoceV2, Link::RoceV2), (GidType::IbOrRoceV1, Link::RoceV1)] {
        for address in routable {
            if let Some(gid) = gids.iter().find(|gid| gid.kind == Some(kind) && gid.ip() == canonical(address.ip)) {
                let reason = format!("the {kind} GID of {interface}'s address {}/{}", address.ip, address.prefix_len);
                return Some((address, gid.clone(), link, reason));
            }
        }
    }
    None
}

fn canonical(ip: IpAddr) -> IpAddr {
    ip.to_canonical()
}

fn first_half(raw: &[u8; 16]) -> [u8; 8] {
    let mut half = [0; 8];
    half.copy_from_slice(&raw[..8]);
    half
}

/// GIDs with their kinds, for messages; long tables are cut.
fn shown(gids: &[Gid]) -> String {
    const MOST: usize = 8;
    if gids.is_empty() {
        return "no GID".to_owned();
    }
    let mut words: Vec<String> = gids
        .iter()
        .take(MOST)
        .map(|gid| match gid.kind {
            Some(kind) if gid.netdev.is_some() => format!("{gid} ({kind})"),
            _ => gid.to_string(),
        })
        .collect();
    if gids.len() > MOST {
        words.push(format!("{} more", gids.len() - MOST));
    }
    words.join(", ")
}

fn devices(all: &[Port]) -> String {
    let words: Vec<String> = all.iter().map(|port| format!("{} port {}", port.device, port.number)).collect();
    words.join(", ")
}

/// The interfaces that could have been named.
fn with_devices(sys: &Path, all: &[Port]) -> Vec<String> {
    names(&sys.join("class/net")).into_iter().filter(|name| !find(name, sys, all).is_empty()).collect()
}
